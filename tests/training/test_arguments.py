"""A setting that is assigned has the effect that it has in the constructor, or the assignment says that it is read there."""

from dataclasses import dataclass

import pytest
import pytorch_lightning as pl
import torch

from lightning_rl import (
    A2C,
    AWAC,
    CQL,
    DQN,
    IMPALA,
    IQL,
    POCA,
    PPO,
    PQN,
    SAC,
    TD3,
    TRPO,
    SettingError,
    Trainer,
    load_policy,
)
from lightning_rl.training.arguments import settings_of
from tests.fitting import fit, tiny, weights

FEW = {"max_env_steps": 48}
ASSIGNED = [
    (PPO, "n_epochs", 3),
    (PPO, "gae_lambda", 0.5),
    (PPO, "normalize_advantage", False),
    (PPO, "vf_coef", 0.1),
    (PPO, "max_grad_norm", 0.01),
    (PPO, "target_kl", 1e-9),
    (PPO, "learning_rate", 0.02),
    (PPO, "learning_rate", {"schedule": "linear", "start": 0.1, "end": 0.0}),
    (PPO, "learning_rate", lambda progress: 0.1 * (1 - progress)),
    (PPO, "ent_coef", 0.5),
    (PPO, "clip_range", 1e-4),
    (PPO, "clip_range_vf", 0.01),
    (A2C, "gae_lambda", 0.5),
    (A2C, "normalize_advantage", True),
    (IMPALA, "lambda_", 0.5),
    (IMPALA, "clip_c", 0.1),
    (IMPALA, "clip_pg_rho", 0.1),
    (PQN, "n_epochs", 1),
    (PQN, "q_lambda", 0.1),
    (PQN, "exploration_fraction", 0.9),
    (PQN, "exploration_initial_eps", 0.1),
    (PQN, "exploration_final_eps", 0.9),
    (TRPO, "gae_lambda", 0.5),
    (TRPO, "target_kl", 1e-4),
    (TRPO, "cg_damping", 0.9),
    (TRPO, "n_critic_updates", 5),
    (POCA, "n_epochs", 3),
    (POCA, "gae_lambda", 0.5),
    (POCA, "baseline_coef", 0.1),
    (SAC, "policy_delay", 2),
    (SAC, "learning_rate", 0.02),
    (DQN, "learning_rate", 0.02),
    (DQN, "exploration_final_eps", 0.5),
    (TD3, "target_policy_noise", 0.9),
    (TD3, "target_noise_clip", 0.01),
    (CQL, "cql_alpha", 0.1),
    (CQL, "cql_actions", 3),
    (IQL, "expectile", 0.99),
    (IQL, "beta", 0.1),
    (IQL, "max_weight", 0.5),
    (AWAC, "beta", 9.0),
    (AWAC, "max_weight", 0.5),
]


def learned(model):
    torch.manual_seed(1)
    fit(model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def is_fast(algorithm, name):
    return algorithm is PPO and name in ("n_epochs", "learning_rate", "clip_range_vf")


@pytest.mark.parametrize(
    ("algorithm", "name", "value"),
    [
        pytest.param(*case, marks=[] if is_fast(*case[:2]) else pytest.mark.thorough, id=f"{case[0].__name__}-{case[1]}")
        for case in ASSIGNED
    ],
)
def test_a_setting_that_is_assigned_is_the_same_as_in_the_constructor(algorithm, name, value):
    assigned, built = tiny(algorithm), tiny(algorithm, **{name: value})
    setattr(assigned, name, value)
    assert assigned.hparams[name] == built.hparams[name] and getattr(assigned, name) == getattr(built, name)
    result = learned(assigned)
    assert torch.equal(result, learned(built)) and not torch.equal(result, learned(tiny(algorithm)))


@pytest.mark.parametrize("algorithm", [PPO, SAC, DQN])
def test_any_other_setting_of_the_package_says_that_it_is_read_in_the_constructor(algorithm):
    model = tiny(algorithm)
    assignable = {name for base in type(model).__mro__ for name in vars(base).get("assignable", ())} | model.schedules.keys()
    before = dict(model.hparams)
    for name in settings_of(algorithm).keys() - assignable - {"clip_range_vf", "spaces"}:
        with pytest.raises(
            SettingError, match=rf"^{algorithm.__name__}.{name} is read in the constructor: {algorithm.__name__}\(…, {name}=3\)$"
        ):
            setattr(model, name, 3)
    assert model.hparams == before


def test_a_wrong_value_is_refused_as_in_the_constructor():
    model = tiny(PPO)
    for name, value in {"n_epochs": 0, "learning_rate": "fast", "gae_lambda": 2.0}.items():
        with pytest.raises(SettingError, match=name):
            setattr(model, name, value)
    assert (model.n_epochs, model.gae_lambda) == (2, 0.95)


def test_a_setting_that_a_callback_assigns_holds_from_then_on_and_is_saved(tmp_path):
    seen = []

    class Lower(pl.Callback):
        def on_train_batch_start(self, trainer, algorithm, batch, batch_idx):
            if batch_idx == 2:
                algorithm.learning_rate = 1e-5

        def on_train_batch_end(self, trainer, algorithm, *_):
            seen.append(algorithm.optimizers().param_groups[0]["lr"])

    fit(tiny(PPO), callbacks=[Lower()]).save_checkpoint(tmp_path / "a.ckpt")
    assert seen == [3e-4] * 2 + [1e-5] * 4
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]["learning_rate"] == 1e-5
    assert load_policy(tmp_path / "a.ckpt") is not None


def test_settings_of_a_subclass_are_its_own_and_are_saved(tmp_path):
    @dataclass(kw_only=True, eq=False, repr=False)
    class Mine(PPO):
        factor: float = 2.0

    class Yours(PPO):
        def __init__(self, env, *, factor: float = 2.0, **common):
            super().__init__(env, **common)
            self.factor = factor

    for kind in (Mine, Yours):
        model = tiny(kind)
        model.factor = 3.0
        assert (model.factor, model.hparams["factor"]) == (3.0, 3.0)
        with pytest.raises(SettingError, match=r"gamma is read in the constructor"):
            model.gamma = 0.5


def test_a_run_writes_assigned_settings_into_its_config(tmp_path):
    model = tiny(PPO, **FEW)
    model.n_epochs = 1
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=None, enable_progress_bar=False)
    trainer.fit(model)
    assert "n_epochs: 1" in (trainer.run_folder / "config.yaml").read_text() and weights(model).isfinite().all()
