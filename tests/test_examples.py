"""The files in examples/: what a user's own algorithm may do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from tests.fitting import Rows, fit, weights

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_unrolled_loop_learns_the_weights_of_ppo(monkeypatch, env_id):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from ppo_unrolled import train

    own = {"max_env_steps": 2048, "n_steps": 64, "batch_size": 64, "ent_coef": 0.01, "learning_rate": 1e-3}
    torch.manual_seed(7)
    model = lrl.PPO({"id": env_id, "num_envs": 8}, **own)
    fit(model)
    torch.testing.assert_close(
        torch.nn.utils.parameters_to_vector(train(env_id, seed=7, **own).parameters()), weights(model), atol=2e-5, rtol=1e-4
    )


@pytest.fixture
def trpo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import trpo

    yield trpo.TRPO
    del sys.modules["trpo"]


@pytest.mark.parametrize("compile", [False, "auto"])
def test_a_users_algorithm_takes_second_derivatives_of_the_network(trpo, compile):
    rows = Rows()
    fit(trpo("CartPole-v1", compile=compile, n_steps=64, max_env_steps=2048, log_interval=1), logger=rows)
    steps = [row for _, row in rows.rows if "train/approx_kl" in row]
    assert len(steps) > 1
    for row in steps:
        assert 0 < row["train/approx_kl"] <= 0.01, "a step stays in the trust region"
        assert row["train/policy_objective"] > 0, "advantages are normalized: the objective was 0 before the step"


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, "auto", True])
def test_trpo_learns_cartpole(trpo, tmp_path, compile):
    pl.seed_everything(1, verbose=False)
    trainer = lrl.Trainer(enable_progress_bar=False, default_root_dir=tmp_path)
    trainer.fit(trpo("CartPole-v1", max_env_steps=60_000, compile=compile))
    assert trainer.callback_metrics["eval/mean_reward"] >= 450
