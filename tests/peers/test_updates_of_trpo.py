"""An iteration of TRPO equals that of sb3-contrib, from the same weights and rollout."""

from __future__ import annotations

from typing import Any

import pytest
import sb3_contrib
import torch
from stable_baselines3.common.logger import configure
from torch import nn

from lightning_rl import TRPO
from lightning_rl.algorithms import trpo
from lightning_rl.data.rollout import Batch
from tests.fitting import fit

ROWS = 256


def linear_layers(*modules: nn.Module) -> list[Any]:
    """Return the linear layers of modules, in order."""
    return [each for module in modules for each in module.modules() if isinstance(each, nn.Linear)]


def pairs(model: TRPO, policy: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return our parameters beside those of sb3-contrib."""
    theirs = linear_layers(policy.mlp_extractor.policy_net, policy.action_net, policy.mlp_extractor.value_net, policy.value_net)
    found = []
    for own, other in zip(linear_layers(model.network.actor, model.network.critic), theirs, strict=True):
        found += [(own.weight, other.weight), (own.bias, other.bias)]
    return found + ([(model.network.distribution.log_std, policy.log_std)] if hasattr(policy, "log_std") else [])


@pytest.mark.variants
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_an_iteration_equals_that_of_sb3_contrib(env_id, monkeypatch):
    torch.manual_seed(0)
    settings = {"n_steps": ROWS, "batch_size": ROWS, "n_critic_updates": 3}
    other = sb3_contrib.TRPO("MlpPolicy", env_id, **settings, seed=1, device="cpu")
    model = TRPO({"id": env_id, "num_envs": 1}, **settings, max_env_steps=ROWS)
    with torch.no_grad():
        for own, theirs in pairs(model, other.policy):
            own.copy_(theirs)
    other.set_logger(configure(format_strings=[]))
    _, callback = other._setup_learn(ROWS)
    other.set_logger(configure(format_strings=[]))
    other.collect_rollouts(other.env, callback, other.rollout_buffer, ROWS)
    (rows,) = other.rollout_buffer.get(None)
    action = rows.actions.long().flatten() if env_id == "CartPole-v1" else rows.actions
    log_prob, value, returns = (each.unsqueeze(-1) for each in (rows.old_log_prob, rows.old_values, rows.returns))
    weight, start = torch.full((ROWS,), 1 / ROWS), torch.zeros(1, ROWS, dtype=torch.bool)
    batch = Batch(rows.observations, action, log_prob, value, rows.advantages, returns, weight, start)
    before = [own.detach().clone() for own, _ in pairs(model, other.policy)]

    monkeypatch.setattr(trpo, "make_batch", lambda *arguments: batch)
    fit(model)
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)  # where its conjugate gradient begins
    other.train()

    assert model.updates == 1
    for old, (own, theirs) in zip(before, pairs(model, other.policy), strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)
        assert not torch.equal(own, old)
