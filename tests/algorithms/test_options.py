"""Every option of every on-policy algorithm changes what it says: an option without a row here is a failure."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_rl import A2C, PPO
from lightning_rl.algorithms.settings import settings_of
from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces
from tests.environments import Scripted
from tests.fitting import ON_POLICY, Rows, fit, tiny, weights


class Option(NamedTuple):
    """A value that must lead to other weights than the one before it: that in `given`, the tiny model's, or the default."""

    value: Any
    env_id: str = "Scripted-v0"
    given: dict[str, Any] = {}  # noqa: RUF012


COMMON = {
    "learning_rate": [Option(0.01), Option({"schedule": "linear", "start": 0.01}, given={"learning_rate": 0.01})],
    "gamma": [Option(0.5)],
    "max_grad_norm": [Option(None), Option(0.01)],
    "net_arch": [Option([6]), Option([8, 8]), Option([])],
    "activation": [Option("relu"), Option("gelu", given={"activation": "relu"})],
    "encoder": [Option("mlp", "Image-v0"), Option("fully_connected", "Image-v0")],
    "encoder_features": [Option(4, "Image-v0")],
    "normalize_obs": [Option("running"), Option("frozen", given={"normalize_obs": "running", "normalize_obs_steps": 20})],
    "normalize_obs_steps": [Option(20, given={"normalize_obs": "frozen", "normalize_obs_steps": 40})],
    "normalize_reward": [Option(True)],
    "clip_reward": [Option(1.0)],
    "reward_scale": [Option(0.1)],
    "n_steps": [Option(4)],
    "gae_lambda": [Option(0.5)],
    "ent_coef": [Option(0.1), Option({"schedule": "linear", "start": 0.1}, given={"ent_coef": 0.1})],
    "vf_coef": [Option(0.1)],
    "critic_burn_in_steps": [Option(16)],
    "share_encoder": [Option(False, "Image-v0")],
    "action_dist": [Option("tanh_normal", "ScriptedBox-v0")],
    "log_std_init": [Option(-1.0, "ScriptedBox-v0")],
}
OWN = {
    PPO: {
        "batch_size": [Option(16)],
        "n_epochs": [Option(1)],
        "clip_range": [
            Option(0.01, given={"learning_rate": 0.01}),
            Option({"schedule": "linear", "start": 0.01}, given={"clip_range": 0.01, "learning_rate": 0.01}),
        ],
        "clip_range_vf": [Option(0.1, given={"learning_rate": 0.01}), Option(0.01, given={"clip_range_vf": 0.1, "learning_rate": 0.01})],
        "normalize_advantage": [Option(False)],
        "target_kl": [Option(1e-9)],
        "ratio": [Option("per_dim", "ScriptedBox-v0")],
    },
    A2C: {
        "normalize_advantage": [Option(True)],
        "use_rms_prop": [Option(False)],
        "rms_prop_eps": [Option(0.1)],
    },
}
OTHERS = {"env", "spaces", "max_env_steps", "log_interval"}
"""Those below that are not about weights."""

every_algorithm = pytest.mark.parametrize("algorithm", ON_POLICY)


def trained(algorithm: type, env_id: str, settings: dict[str, Any]) -> Tensor:
    """The heads and hidden layers after three iterations."""
    model = tiny(algorithm, f"tests.environments:{env_id}", **({"max_env_steps": 48, "encoder_features": 8} | settings))
    fit(model)
    return torch.nn.utils.parameters_to_vector([*model.network.actor.parameters(), *model.network.critic.parameters()])


@every_algorithm
def test_every_option_is_tested(algorithm):
    assert settings_of(algorithm).keys() == COMMON.keys() | OWN[algorithm].keys() | OTHERS


@pytest.mark.parametrize(
    "algorithm, name, option",
    [
        pytest.param(algorithm, name, option, id=f"{algorithm.__name__}-{name}-{option.value}")
        for algorithm in ON_POLICY
        for name, options in (COMMON | OWN[algorithm]).items()
        for option in options
    ],
)
def test_an_option_changes_what_is_learned(algorithm, name, option):
    plain = trained(algorithm, option.env_id, option.given)
    assert plain.isfinite().all()
    assert not torch.equal(trained(algorithm, option.env_id, option.given | {name: option.value}), plain)


@every_algorithm
@pytest.mark.parametrize("env_id", ["Scripted-v0", "ScriptedBox-v0", "Image-v0"])
def test_without_a_change_the_same_is_learned(algorithm, env_id):
    assert torch.equal(trained(algorithm, env_id, {}), trained(algorithm, env_id, {}))


@every_algorithm
def test_the_seed_changes_what_is_learned(algorithm):
    assert not torch.equal(trained(algorithm, "Scripted-v0", {"seed": 1}), trained(algorithm, "Scripted-v0", {"seed": 2}))


@every_algorithm
def test_the_environment_is_what_is_trained(algorithm):
    three, two = ({"env": {"kwargs": {"period": period}}} for period in (3, 2))
    assert not torch.equal(trained(algorithm, "Scripted-v0", three), trained(algorithm, "Scripted-v0", two))


@every_algorithm
def test_given_spaces_no_environment_is_built(algorithm):
    spaces = Spaces(Scripted.observation_space, Scripted.action_space)
    model = tiny(algorithm, "Nowhere-v0", spaces=spaces)
    assert model.network.value(torch.zeros(5, 2)).shape == (5, 1)
    with pytest.raises(SettingError, match="Nowhere-v0"):
        tiny(algorithm, "Nowhere-v0")
    with pytest.raises(SettingError, match="spaces"):  # those of another environment
        fit(tiny(algorithm, "CartPole-v1", spaces=spaces))


@every_algorithm
@pytest.mark.parametrize("max_env_steps, iterations", [(1, 1), (32, 2), (33, 3)])
def test_a_run_has_the_fewest_iterations_that_reach_its_environment_steps(algorithm, max_env_steps, iterations):
    model = tiny(algorithm, max_env_steps=max_env_steps)
    assert fit(model).global_step == iterations and model.env_steps == 16 * iterations


@every_algorithm
@pytest.mark.parametrize(
    "log_interval, steps", [(1, [16, 32, 48, 64, 80, 96]), (40, [48, 96]), (1_000, [96]), (None, [16, 32, 48, 64, 80, 96])]
)
def test_the_log_interval_sets_the_rows_and_the_last_one_is_always_there(algorithm, log_interval, steps):
    logger = Rows()
    fit(tiny(algorithm, log_interval=log_interval), logger=logger)
    assert [step for step, _ in logger.rows] == steps


@every_algorithm
def test_statistics_are_frozen_after_random_steps_that_count(algorithm):
    model = tiny(algorithm, normalize_obs="frozen", normalize_obs_steps=20)
    seen, training_step = [], model.training_step

    def watched(rollout, batch_idx):
        seen.append((float(model.network.normalizer.statistics[0].count), model.env_steps, model.progress))
        training_step(rollout, batch_idx)

    model.training_step = watched
    fit(model)
    counts, env_steps, progress = zip(*seen, strict=True)
    assert counts == pytest.approx([20] * 5, abs=1e-3)
    assert env_steps == (36, 52, 68, 84, 100)
    assert progress == pytest.approx([(20 + 16 * k) / 96 for k in range(5)])


def test_learning_rates_of_zero_leave_the_weights():
    for algorithm in ON_POLICY:
        model = tiny(algorithm, learning_rate=0.0)
        before = weights(model)
        fit(model)
        assert torch.equal(weights(model), before)
