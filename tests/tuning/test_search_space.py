"""Search spaces: what files may hold, and that packaged ones fit their algorithms."""

from __future__ import annotations

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lightning_rl import ALGORITHMS, SettingError
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.cli.names import check_option
from lightning_rl.cli.tune import check, check_space
from lightning_rl.schedules import linear
from lightning_rl.settings.names import settings_of_model
from lightning_rl.training.loading import algorithm_class
from lightning_rl.tuning.search_space import FOLDER, find_space, read_space


def space_of(text, folder):
    file = folder / "space.yaml"
    file.write_text(text)
    return read_space(file)


def test_ranges_and_choices_become_distributions(tmp_path):
    space = space_of(
        "model.learning_rate: {low: 1e-5, high: 1e-2, log: true}\n"
        "model.n_steps: {low: 16, high: 64, step: 16}\n"
        "model.vf_coef: {low: 0, high: 1, step: 0.25}\n"
        "model.net_arch: {choices: [[64, 64], null, [8]]}\n"
        "model.normalize_reward: {choices: [true, false]}\n",
        tmp_path,
    )
    assert space.distributions == {
        "model.learning_rate": FloatDistribution(1e-5, 1e-2, log=True),
        "model.n_steps": IntDistribution(16, 64, step=16),
        "model.vf_coef": FloatDistribution(0, 1, step=0.25),
        "model.net_arch": CategoricalDistribution(["[64, 64]", None, "[8]"]),
        "model.normalize_reward": CategoricalDistribution([True, False]),
    }
    values = {"model.learning_rate": 0.001, "model.n_steps": 32, "model.vf_coef": 0.25, "model.net_arch": "[8]"}
    assert space.options({**values, "model.normalize_reward": False}) == [
        *("--model.learning_rate=0.001", "--model.n_steps=32", "--model.vf_coef=0.25", "--model.net_arch=[8]"),
        "--model.normalize_reward=false",
    ]


def test_values_to_check_are_within_the_range(tmp_path):
    space = space_of(
        "model.a: {low: 1e-4, high: 1.0, log: true}\nmodel.b: {low: 2, high: 20, step: 3}\nmodel.c: {low: 1, high: 2.0}", tmp_path
    )
    logarithmic, steps, floats = (each.samples() for each in space.dimensions)
    assert logarithmic == pytest.approx([1e-4, 1.0, 1e-2])
    assert steps == [2, 20, 8]
    assert floats == pytest.approx([1, 2, 1.37])


def test_rounding_does_not_move_the_end_of_a_range_out_of_it(tmp_path):
    dimension = space_of("model.vf_coef: {low: 0, high: 0.3, step: 0.1}", tmp_path).dimensions[0]
    assert 3 * 0.1 > 0.3
    assert [dimension.clip(value) for value in (-1, 0.14, 0.16, 0.3, 0.5)] == [0, 0.1, 0.2, 0.3, 0.3]


def test_the_values_of_a_config_are_those_that_the_space_contains(tmp_path):
    space = space_of(
        "model.learning_rate: {low: 1e-5, high: 1e-2, log: true}\n"
        "model.ent_coef: {low: 1e-8, high: 1e-1, log: true}\n"
        "model.n_steps: {choices: [16, 64]}\n"
        "model.batch_size: {choices: [32, 64]}\n"
        "model.net_arch: {choices: [[8], [64, 64]]}\n"
        "model.env.kwargs: {choices: [{}, {sutton_barto_reward: true, render_mode: null}]}\n"
        "model.target_kl: {low: 0.01, high: 0.1}\n",
        tmp_path,
    )
    config = {
        "learning_rate": {"schedule": "linear", "start": 3e-3, "end": 0},
        "ent_coef": 0.0,
        "n_steps": 64,
        "batch_size": 128,
        "net_arch": [64, 64],
        "env": {"id": "CartPole-v1", "kwargs": {"render_mode": None, "sutton_barto_reward": True}},
        "target_kl": None,
    }
    assert space.find_values(config, {"learning_rate": linear(3e-3)}) == {
        "model.learning_rate": 3e-3,
        "model.ent_coef": 1e-8,
        "model.n_steps": 64,
        "model.net_arch": "[64, 64]",
        "model.env.kwargs": '{"render_mode": null, "sutton_barto_reward": true}',
    }


BAD = {
    "[1, 2]": "space.yaml must map settings to ranges",
    "": "space.yaml must map settings to ranges",
    "model.gamma: {low: 1": "space.yaml is not valid YAML",
    "learning_rate: {low: 1, high: 2}": "learning_rate is not a setting of an algorithm: write its path, such as model.learning_rate",
    "trainer.devices: {low: 1, high: 2}": "trainer.devices is not a setting of an algorithm",
    "model.env.id: {choices: [CartPole-v1]}": "model.env.id cannot vary: all trials share the environment",
    "model.env: {choices: [CartPole-v1, Acrobot-v1]}": "model.env cannot vary: all trials share the environment",
    "model.max_env_steps: {low: 1, high: 9}": "model.max_env_steps cannot vary: all trials share the length of the runs",
    "model.gamma: 0.9": "model.gamma must be a mapping of low and high, or of choices, got 0.9",
    "model.gamma: {lo: 0.1, high: 0.9}": "model.gamma.lo is not a setting; did you mean low?",
    "model.gamma: {choices: [0.9], low: 0}": "model.gamma.low is not a setting of a list of values",
    "model.gamma: {low: 0.9}": "model.gamma.high is missing",
    "model.gamma: {low: 0.9, high: 0.9}": "model.gamma: low must be less than high, got 0.9 and 0.9",
    "model.gamma: {low: 0.9, high: 0.5}": "model.gamma: low must be less than high, got 0.9 and 0.5",
    "model.gamma: {low: 0.9, high: .inf}": "model.gamma.high must be >= -1e+15 and <= 1e+15, got inf",
    "model.gamma: {low: -.inf, high: 0.9}": "model.gamma.low must be >= -1e+15 and <= 1e+15, got -inf",
    "model.gamma: {low: .nan, high: 0.9}": "model.gamma.low must be >= -1e+15 and <= 1e+15, got nan",
    "model.gamma: {low: -1.7e+308, high: 1.7e+308}": "model.gamma.low must be >= -1e+15 and <= 1e+15, got -1.7e+308",
    "model.n_steps: {low: 1, high: 9007199254740993}": "model.n_steps.high must be >= -1e+15 and <= 1e+15, got 9007199254740993",
    "model.gamma: {low: zero, high: 0.9}": "model.gamma.low must be a number >= -1e+15 and <= 1e+15, got 'zero'",
    "model.gamma: {low: 0, high: 0.9, log: true}": "model.gamma.low must be > 0 on a logarithmic scale, got 0",
    "model.gamma: {low: 0.1, high: 0.9, log: 1}": "model.gamma.log must be true or false, got 1",
    "model.gamma: {low: 0.1, high: 0.9, log: true, step: 0.1}": "model.gamma.step cannot be combined with log",
    "model.gamma: {low: 0.1, high: 0.9, step: 0.3}": "model.gamma.step 0.3 does not divide the range from 0.1 to 0.9",
    "model.gamma: {low: 0.1, high: 0.9, step: 0}": "model.gamma.step must be > 0",
    "model.gamma: {low: 0.1, high: 0.9, step: .nan}": "model.gamma.step must be > 0 and <= 0.8, got nan",
    "model.gamma: {low: 0.1, high: 0.9, step: .inf}": "model.gamma.step must be > 0 and <= 0.8, got inf",
    "model.gamma: {low: 0, high: 1.0e+10, step: 1e-300}": "model.gamma.step 1e-300 is less than a billionth of the range from 0 to 1",
    "model.gamma: {low: 0.1, high: 0.9, step: 1e-300}": "model.gamma.step 1e-300 is less than a billionth of the range from 0.1 to 0.9",
    "model.gamma: {low: 0.1, high: 0.9, step: 5e-324}": "model.gamma.step 5e-324 is less than a billionth of the range from 0.1 to 0.9",
    "model.gamma: {choices: []}": "model.gamma.choices must be a list of values, got []",
    "model.gamma: {choices: [0.9, 0.95, 0.9]}": "model.gamma.choices: 0.9 appears twice",
    "model.gamma: {choices: [2026-01-01]}": "model.gamma.choices: 2026-01-01 is neither a number",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_space_is_one_line(text, tmp_path):
    with pytest.raises(SettingError) as error:
        space_of(text, tmp_path)
    assert BAD[text] in str(error.value) and "\n" not in str(error.value)


PPO = ["--model=PPO", "--model.env.id=CartPole-v1", "--model.net_arch=[8]", "--trainer.accelerator=cpu"]
REFUSED = {
    "model.learning_rat: {low: 1e-4, high: 1e-3}": "space.yaml: --model.learning_rat is not a setting of PPO; did you mean learning_rate?",
    "model.tau: {low: 0.1, high: 1.0}": "space.yaml: --model.tau is not a setting of PPO, only of SAC, TQC, DQN, TD3",
    "model.env.num_env: {choices: [1]}": "space.yaml: --model.env.num_env is not a setting; did you mean num_envs?",
    "model.gamma: {low: 0.9, high: 1.1}": "space.yaml: model.gamma must be >= 0 and <= 1, got 1.1",
    "model.n_epochs: {low: 1.0, high: 10.5}": "space.yaml: model.n_epochs must be an integer, got 10.5",
    "model.n_epochs: {choices: [2, many]}": "space.yaml: model.n_epochs must be an integer, got many",
    "model.ratio: {choices: [joint, per_prt]}": "space.yaml: model.ratio must be one of joint, per_part, per_dim, got per_prt",
    "model.normalize_advantage: {choices: [1.5]}": "space.yaml: model.normalize_advantage must be true or false, got 1.5",
}


@pytest.mark.variants
@pytest.mark.parametrize("text", REFUSED)
def test_values_that_a_setting_does_not_permit_are_refused_before_a_trial(text, tmp_path):
    space = space_of(text, tmp_path)
    with pytest.raises(SettingError) as error:
        check_space(space, PPO, [], algorithm_class("PPO", Algorithm))
    assert str(error.value).startswith(REFUSED[text])


@pytest.mark.thorough
def test_values_that_do_not_go_together_with_the_base_are_checked_with_each_other(tmp_path):
    space = space_of("model.n_steps: {choices: [3, 6]}\nmodel.batch_size: {choices: [24, 48]}", tmp_path)  # 256 divides neither rollout
    check_space(space, PPO, [], algorithm_class("PPO", Algorithm))


def test_a_subclass_has_the_space_of_its_parent_and_an_unknown_algorithm_none(tmp_path):
    ppo = algorithm_class("PPO", Algorithm)
    assert find_space(None, type("Mine", (ppo,), {})) == FOLDER / "PPO.yaml"
    with pytest.raises(SettingError, match="no packaged search space for int"):
        find_space(None, int)
    (tmp_path / "mine.yaml").write_text("")
    with pytest.raises(SettingError, match=r"there is no such file; did you mean .*mine.yaml"):
        find_space(str(tmp_path / "min.yaml"), ppo)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_packaged_space_varies_settings_of_its_algorithm(name):
    algorithm = algorithm_class(name, Algorithm)
    for each in read_space(find_space(None, algorithm)).dimensions:
        check_option(f"--{each.path}", algorithm.__name__, settings_of_model(algorithm.__name__))


BOX, DATASET = "--model.env.id=Pendulum-v1", "--model.dataset=pendulum/expert-v0"
GIVEN = {
    **dict.fromkeys(("TQC", "TD3"), (BOX,)),
    **dict.fromkeys(("IQL", "CQL", "TD3BC", "AWAC", "BehavioralCloning"), (BOX, DATASET)),
    "DAgger": ["--model.env.id=CartPole-v1", "--model.teacher=tests/sharing/sb3/ppo-CartPole-v1.zip"],
    "POCA": ["--model.env={id: tests.agents.Crew, kwargs: {env_id: CartPole-v1}}"],
}
"""What some algorithms need."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_values_of_a_packaged_space_are_permitted(name):
    given = GIVEN.get(name, ["--model.env.id=CartPole-v1"])
    space = read_space(find_space(None, algorithm_class(name, Algorithm)))
    for number in range(max(len(each.samples()) for each in space.dimensions)):
        values = [each.option(each.samples()[number % len(each.samples())]) for each in space.dimensions]
        check(["--model", name, *given, "--model.env.num_envs=8", "--trainer.accelerator=cpu", *values], [])
