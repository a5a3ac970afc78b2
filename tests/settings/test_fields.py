"""Settings are fields: seen by an editor, checked against their annotation, stored as plain data."""

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch import nn

import lightning_rl as lrl
from lightning_rl.errors import SettingError
from lightning_rl.training.arguments import plain
from tests.fitting import ALL, fit, tiny


@pytest.mark.parametrize("algorithm", ALL)
def test_the_signature_shows_every_setting_and_the_environment_first(algorithm):
    parameters = inspect.signature(algorithm).parameters
    assert next(iter(parameters)) == "env"
    assert {"n_steps", "learning_rate", "max_env_steps", "memory", "normalize_obs"} < parameters.keys()
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def test_a_momentum_that_never_lets_the_gradient_in_is_refused():
    with pytest.raises(SettingError, match=r"^momentum must be >= 0 and <= 0\.999, got 1$"):
        lrl.EvolutionStrategies("CartPole-v1", optimizer="sgd", momentum=1)


def test_a_target_entropy_of_nothing_is_refused_in_one_line():
    with pytest.raises(SettingError, match=r"^target_entropy None must be auto, or a number for each kind of action"):
        lrl.SAC("Pendulum-v1", target_entropy=None)


@pytest.mark.parametrize(
    ("algorithm", "settings", "said"),
    [
        (lrl.SAC, {"target_entropy": float("nan")}, "target_entropy must be >= -1e+09 and <= 1e+09, got nan"),
        (lrl.SAC, {"target_entropy": float("inf")}, "target_entropy must be >= -1e+09 and <= 1e+09, got inf"),
        (lrl.SAC, {"critic_net_arch": [8, 0]}, "critic_net_arch must be >= 1, got 0"),
        (lrl.IQL, {"log_std_init": float("nan")}, "log_std_init must be >= -20 and <= 2, got nan"),
        (lrl.IQL, {"log_std_init": "low"}, "log_std_init must be a number >= -20 and <= 2, got 'low'"),
        (lrl.AWAC, {"log_std_init": 3.0}, "log_std_init must be >= -20 and <= 2, got 3.0"),
        (lrl.DQN, {"n_atoms": "many"}, "n_atoms must be an integer >= 2, got 'many'"),
        (lrl.DQN, {"n_quantiles": 0}, "n_quantiles must be >= 1, got 0"),
    ],
)
def test_a_number_that_nothing_can_be_learned_with_is_refused_by_its_name(algorithm, settings, said):
    with pytest.raises(SettingError) as error:
        algorithm("CartPole-v1" if algorithm is lrl.DQN else "Pendulum-v1", **settings)
    assert str(error.value) == said


def test_an_algorithm_or_another_module_is_no_setting():
    with pytest.raises(SettingError, match=r"^encoder must be plain data, which a checkpoint can hold, got a Identity; give its class$"):
        lrl.PPO("CartPole-v1", encoder=nn.Identity())
    with pytest.raises(SettingError, match=r"^teacher must be plain data, which a checkpoint can hold, got a PPO$"):
        tiny(lrl.DAgger, teacher=tiny(lrl.PPO))


def test_a_misspelt_setting_in_python_is_named_with_the_nearest_one():
    with pytest.raises(SettingError, match=r"^clip_rnge is not a setting of PPO; did you mean clip_range\?$"):
        lrl.PPO("CartPole-v1", clip_rnge=0.1)
    with pytest.raises(SettingError, match=r"^gamma is not a setting of BehavioralCloning"):
        lrl.BehavioralCloning("CartPole-v1", dataset="a/b-v0", gamma=0.9)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            "PPO('MlpPolicy', 'CartPole-v1')",
            "'MlpPolicy' is not an environment: write PPO('CartPole-v1', …); the spaces, encoder and net_arch determine the network",
        ),
        ("PPO('MlpPolicy', env='CartPole-v1')", "'MlpPolicy' is not an environment: write PPO('CartPole-v1', …)"),
        ("PPO('CartPole-v1', 3)", "PPO('CartPole-v1', 3): only the environment is positional; write setting=value for the others"),
        ("PPO('CartPole-v1', total_timesteps=3)", "total_timesteps is not a setting of PPO; here it is max_env_steps"),
        ("PPO('CartPole-v1', n_envs=3)", "n_envs is not a setting of PPO; here it is env=lrl.EnvConfig(…, num_envs=…)"),
        ("PPO('CartPole-v1', num_envs=3)", "num_envs is not a setting of PPO; here it is env=lrl.EnvConfig(…, num_envs=…)"),
        ("PPO('CartPole-v1', verbose=1)", "verbose is not a setting of PPO; here it is lrl.Trainer(enable_progress_bar=…)"),
        ("PPO('CartPole-v1', seed=1)", "seed is not a setting of PPO; here it is pl.seed_everything(…) of pytorch_lightning"),
        ("PPO('CartPole-v1', device='cpu')", "device is not a setting of PPO; here it is lrl.Trainer(accelerator=…)"),
        ("PPO('CartPole-v1', tensorboard_log='a')", "tensorboard_log is not a setting of PPO; here it is lrl.Trainer(default_root_dir=…)"),
        ("PPO('CartPole-v1', policy_kwargs={})", "policy_kwargs is not a setting of PPO; here it is net_arch, activation and encoder"),
        (
            "PPO('CartPole-v1', net_arch={'pi': [64]})",
            "net_arch must be a list of widths, or {pi: [64, 64], vf: [64, 64]}; got {'pi': [64]}",
        ),
        ("PPO('CartPole-v1', net_arch=64)", "net_arch must be a list of widths, or {pi: [64, 64], vf: [64, 64]}; got 64"),
        ("PPO('CartPole-v1', memory='LTSM')", "memory 'LTSM' is not a memory; did you mean LSTM?"),
        ("PPO('CartPole-v1', memory=64)", "memory must be LSTM, GRU, lightning_rl.LSTM(…), lightning_rl.GRU(…) or None, got 64"),
        ("PPO('CartPole-v1', evaluation=None)", "evaluation is not a setting of PPO; here it is lrl.Trainer(evaluation=…)"),
        ("Trainer(evaluation=False)", "evaluation must be EvaluationConfig(…) or a mapping of its settings, got False; use None for none"),
        ("Trainer(checkpoint={'kep': 1})", "checkpoint.kep is not a setting; did you mean keep?"),
        ("PPO('CartPole-v1', policy='MlpPolicy')", "policy is not a setting of PPO; here it is encoder and net_arch"),
        ("PPO('CartPole-v1', wxyz=1)", "wxyz is not a setting of PPO; help(PPO) shows all"),
        ("SAC('Pendulum-v1', n_epochs=4)", "n_epochs is not a setting of SAC, only of PPO, POCA, PQN"),
        ("SAC('Pendulum-v1', prioritized=True)", "prioritized is not a setting of SAC; here it is replay={'prioritized': …}"),
        ("Trainer(max_env_steps=3)", "trainer.max_env_steps is not a flag; it is a setting of the algorithm, such as lrl.PPO(env, max_env"),
        ("Trainer(seed=3)", "trainer.seed is not a flag; here it is pl.seed_everything(…)"),
        (
            "Trainer(callbacks=[print])",
            "trainer.callbacks: print is not a callback; it must be a pytorch_lightning.Callback, see docs/your_own",
        ),
        ("Trainer(callbacks=print)", "trainer.callbacks: print is not a callback; it must be a pytorch_lightning.Callback"),
        ("Trainer(callbacks=[lrl.Video])", "trainer.callbacks: Video is not a callback; write Video(…)"),
        (
            "PPO('CartPol-v1')",
            "env.id 'CartPol-v1' is not a registered environment (your own: its_module:CartPol-v1, or --import its",
        ),
        ("PPO('vmas')", "env.id vmas is a package; name one of its environments, such as vmas.balance"),
    ],
)
def test_a_habit_from_another_library_ends_in_one_line_with_the_way_out(wrong, words):
    with pytest.raises(SettingError) as error:
        eval(f"lrl.{wrong}", {"lrl": lrl})
    line = str(error.value)
    assert line.startswith(words) and "\n" not in line and len(line) <= 190


def test_positional_settings_of_a_users_own_init_are_accepted():
    class Own(lrl.PPO):
        def __init__(self, env, repeats: int = 3, **common):
            super().__init__(env, **common)
            self.repeats = repeats

    assert Own("CartPole-v1", 4, net_arch=[8]).repeats == 4


def test_a_class_whose_init_passes_on_no_settings_learns_with_those_that_it_gives_itself(capsys):
    class Own(lrl.PPO):
        def __init__(self, env, foo: int = 3, own_rate: bool = False):
            super().__init__(env, learning_rate=0.02, n_steps=8, batch_size=8, net_arch=[8], max_env_steps=64)
            self.foo, self.own_rate = foo, own_rate

        def configure_optimizers(self):
            return self.with_side_learners(torch.optim.Adam(self.parameters(), 0.5)) if self.own_rate else super().configure_optimizers()

    fit(model := Own("CartPole-v1", 4))
    assert (model.env_steps, model.foo) == (64, 4)
    fit(Own("CartPole-v1", own_rate=True), enable_progress_bar=True)
    assert "learning_rate 0.02 is not used" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_epochs": 0}, "n_epochs must be >= 1, got 0"),
        ({"n_epochs": 1.5}, "n_epochs must be an integer >= 1, got 1.5"),
        ({"gae_lambda": 1.1}, "gae_lambda must be >= 0 and <= 1, got 1.1"),
        ({"target_kl": 0.0}, "target_kl must be > 0, got 0.0"),
        ({"ratio": "per_prt"}, "ratio must be one of joint, per_part, per_dim, got 'per_prt'; did you mean per_part?"),
        ({"threaded": 1}, "threaded must be true or false, got 1"),
        ({"clip_range": {"schedule": "linear"}}, "clip_range.start is missing"),
    ],
)
def test_a_value_that_its_annotation_excludes_is_refused_in_one_line(settings, words):
    with pytest.raises(SettingError) as error:
        tiny(lrl.PPO, **settings)
    assert str(error.value).startswith(words)


def test_null_and_whole_floats_are_accepted_where_the_annotation_has_them():
    model = tiny(lrl.PPO, n_epochs=2.0, target_kl=None, max_env_steps=1e5)
    assert (model.n_epochs, model.target_kl, model.max_env_steps) == (2, None, 100_000)
    assert isinstance(model.hparams["max_env_steps"], int) and isinstance(model.hparams["n_epochs"], int)


def test_a_users_fields_are_settings_with_ranges_and_so_are_arguments_of_an_init():
    @dataclass(kw_only=True, eq=False, repr=False)
    class Fields(lrl.PPO):
        factor: Annotated[float, lrl.Range(0, 1)] = 0.5

    class Init(lrl.PPO):
        def __init__(self, env, *, repeats: int = 3, **common):
            super().__init__(env, **common)
            self.repeats = repeats

    assert tiny(Fields, factor=0.25).hparams["factor"] == 0.25
    with pytest.raises(SettingError, match=r"^factor must be >= 0 and <= 1, got 2$"):
        tiny(Fields, factor=2)
    assert tiny(Init, repeats=1e1).repeats == 10 and tiny(Init, repeats=1e1).hparams["repeats"] == 10
    with pytest.raises(SettingError, match=r"^repeat is not a setting of Init; did you mean repeats\?$"):
        tiny(Init, repeat=1)


def test_a_default_that_a_subclass_changes_without_being_a_dataclass_is_refused():
    class Faster(lrl.PPO):
        learning_rate = 1e-2

    with pytest.raises(SettingError, match=r"^Faster\.learning_rate: learning_rate is a setting; decorate the class with @dataclass"):
        tiny(Faster)

    @dataclass
    class Decorated(lrl.PPO):
        learning_rate: float = 1e-2

    model = tiny(Decorated)
    assert model.hparams["learning_rate"] == 1e-2 and hash(model) == hash(model)


def test_a_default_of_an_init_wins_over_that_of_the_field():
    class Novel(lrl.PPO):
        def __init__(self, env, *, reward_signals={"rnd": {}}, **common):  # noqa: B006
            super().__init__(env, reward_signals=reward_signals, **common)

    model = tiny(Novel)
    assert list(model.reward_signals) == ["extrinsic", "rnd"] and model.hparams["reward_signals"] == {"rnd": {}}


def test_no_setting_but_compile_and_double_hides_a_method_of_a_lightning_module():
    names = {field.name for algorithm in (*ALL, lrl.BehavioralCloning, lrl.EvolutionStrategies) for field in fields(algorithm)}
    assert {name for name in names if callable(getattr(pl.LightningModule, name, None))} == {"compile", "double"}


def test_numbers_as_keys_arrays_and_paths_are_stored_as_what_they_say():
    table = {0: 1.0, np.int64(3): 2.0, 0.5: 3.0, "b": np.float32(2)}
    found = plain({"table": table, "goal": np.arange(2), "file": Path("a/b.xml"), "made": object()})
    assert found == {"table": {0: 1.0, 3: 2.0, "0.5": 3.0, "b": 2.0}, "goal": [0, 1], "file": "a/b.xml", "made": None}
    assert yaml.safe_load(yaml.safe_dump(found)) == found


@pytest.mark.parametrize("memory", ["GRU", lrl.GRU, "lightning_rl.GRU", {"class_path": "GRU"}])
def test_a_memory_may_be_named_by_its_class_or_its_name(memory):
    model, expected = (lrl.PPO("CartPole-v1", memory=each) for each in (memory, lrl.GRU()))
    assert type(model.memory) is lrl.GRU and model.hparams == expected.hparams


def test_dqn_draws_32_rows_or_with_a_memory_8_of_its_sequences():
    assert lrl.DQN("CartPole-v1").batch_size == 32
    model = lrl.DQN("CartPole-v1", memory=lrl.LSTM(16, sequence_length=20))
    assert model.batch_size == 8 * 20 and model.hparams.batch_size is None
    assert lrl.DQN("CartPole-v1", memory="LSTM", batch_size=64).batch_size == 64
