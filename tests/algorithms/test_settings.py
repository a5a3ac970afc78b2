"""Settings are fields: seen by an editor, checked against their annotation, stored as plain data."""

import inspect
from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import pytorch_lightning as pl

import lightning_rl as lrl
from lightning_rl.errors import SettingError
from tests.fitting import ALL, tiny


@pytest.mark.parametrize("algorithm", ALL)
def test_the_signature_shows_every_setting_and_the_environment_first(algorithm):
    parameters = inspect.signature(algorithm).parameters
    assert next(iter(parameters)) == "env"
    assert {"n_steps", "learning_rate", "max_env_steps", "memory", "normalize_obs"} < parameters.keys()
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def test_a_misspelt_setting_in_python_is_named_with_the_nearest_one():
    with pytest.raises(SettingError, match=r"^clip_rnge is not a setting of PPO; did you mean clip_range\?$"):
        lrl.PPO("CartPole-v1", clip_rnge=0.1)
    with pytest.raises(SettingError, match=r"^gamma is not a setting of BehavioralCloning"):
        lrl.BehavioralCloning("CartPole-v1", dataset="a/b-v0", gamma=0.9)


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
