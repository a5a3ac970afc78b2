"""Advantages and returns of a whole algorithm, from environments that reset themselves in each of the three ways.

As in Stable-Baselines3's test: one reward, at the end of the episode, and a critic that says the same of everything.
"""

from __future__ import annotations

import pytest
import torch

from lightning_rl import A2C, PPO
from tests.fitting import fit, tiny

PERIOD = 16
VALUE = 0.5


def advantages(gamma, gae_lambda):
    """Compute those of one episode's steps. k steps before the last one it is (γλ)ᵏ (1 − V) + Σ_{i<k} (γλ)ⁱ (γ − 1) V."""
    decay = gamma * gae_lambda
    return [decay**k * (1 - VALUE) + sum(decay**i for i in range(k)) * (gamma - 1) * VALUE for k in reversed(range(PERIOD))]


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.9), pytest.param(1.0, 1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize("algorithm", [A2C, PPO])
def test_advantages_and_returns_are_those_of_each_episode(algorithm, autoreset, gamma, gae_lambda):
    rows = 3 * (PERIOD + (autoreset == "NEXT_STEP"))  # which spends a row on each reset
    own = {"n_epochs": 1, "batch_size": 2 * rows} if algorithm is PPO else {}
    settings = {"gamma": gamma, "gae_lambda": gae_lambda, "normalize_advantage": False, "n_steps": rows, **own}
    env = {"autoreset": autoreset, "kwargs": {"period": PERIOD}}
    model = tiny(algorithm, "tests.peers.tasks:PaidAtTheEnd-v0", env=env, max_env_steps=2 * 3 * PERIOD, **settings)
    with torch.no_grad():
        model.network.critic[-1].weight.zero_()
        model.network.critic[-1].bias.fill_(VALUE)
    batches, loss = [], model.loss
    model.loss = lambda batch, *scheduled: (batches.append(batch), loss(batch, *scheduled))[1]
    fit(model)

    (batch,) = batches
    valid = batch.weight > 0
    t = (batch.obs[valid, 0] * PERIOD).long()
    assert t.bincount().tolist() == [2 * 3] * PERIOD
    expected = torch.tensor(advantages(gamma, gae_lambda))[t]
    torch.testing.assert_close(batch.advantage[valid], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.returns[valid, 0], expected + VALUE, atol=1e-5, rtol=0)
