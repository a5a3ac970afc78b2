"""State-dependent exploration equals that of Stable-Baselines3: densities, entropies, draws, and an iteration of PPO."""

from __future__ import annotations

import pytest
import stable_baselines3
import torch
from gymnasium.spaces import Box
from stable_baselines3.common.distributions import StateDependentNoiseDistribution
from stable_baselines3.common.logger import configure

from lightning_rl import PPO
from lightning_rl.algorithms import ppo
from lightning_rl.data.rollout import Batch
from lightning_rl.distributions import SDE, make_distribution
from tests.fitting import fit
from tests.peers.test_updates_of_trpo import pairs

ROWS, FEATURES, ACTIONS = 64, 5, 3


@pytest.mark.parametrize("full_std", [True, False])
@pytest.mark.parametrize("use_expln", [False, True])
@pytest.mark.parametrize("action_dist", ["clipped_normal", "tanh_normal", "squashed_normal"])
def test_densities_and_draws_equal_theirs(action_dist, use_expln, full_std):
    torch.manual_seed(0)
    squashes = action_dist != "clipped_normal"
    theirs = StateDependentNoiseDistribution(ACTIONS, full_std, use_expln, squashes, learn_features=True)
    theirs.proba_distribution_net(FEATURES)
    ours = make_distribution(Box(-1.0, 1.0, (ACTIONS,)), action_dist, 0.0, SDE(1, use_expln, full_std, True), FEATURES)
    log_std = torch.randn(FEATURES, ACTIONS if full_std else 1) - 0.5
    ours.log_std.data = log_std
    mean, z = torch.randn(ROWS, ACTIONS).clamp(-2, 2), torch.randn(ROWS, FEATURES)

    theirs.sample_weights(log_std, ROWS)
    action = theirs.actions_from_params(mean, log_std, z)
    x = torch.cat([mean, z], -1)
    ours.exploration = theirs.exploration_matrices / theirs.get_std(log_std)
    drawn = ours.sample(x)
    torch.testing.assert_close(drawn.tanh() if action_dist == "tanh_normal" else drawn, action, atol=1e-5, rtol=1e-5)

    near = action.abs().amax(-1) < 0.99 if squashes else torch.ones(ROWS, dtype=torch.bool)  # they add 1e-6 to 1 − tanh²
    assert near.sum() > 5
    kept = action.clamp(-1 + 1e-6, 1 - 1e-6).atanh() if action_dist == "tanh_normal" else action
    log_prob, entropy = ours.evaluate(x, kept)
    torch.testing.assert_close(log_prob.sum(-1)[near], theirs.log_prob(action)[near], atol=1e-4 if squashes else 1e-5, rtol=1e-5)
    if not squashes:
        torch.testing.assert_close(entropy.sum(-1), theirs.entropy(), atol=1e-5, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("use_expln", [False, True])
def test_an_iteration_of_ppo_equals_theirs(use_expln, monkeypatch):
    torch.manual_seed(0)
    settings = {"n_steps": 256, "batch_size": 256, "n_epochs": 4, "ent_coef": 0.01, "max_grad_norm": 0.5, "learning_rate": 1e-3}
    policy = {"log_std_init": -1.0, "use_expln": use_expln}
    other = stable_baselines3.PPO("MlpPolicy", "Pendulum-v1", **settings, use_sde=True, policy_kwargs=policy, seed=1, device="cpu")
    model = PPO({"id": "Pendulum-v1", "num_envs": 1}, **settings, use_sde=True, **policy, max_env_steps=256)
    with torch.no_grad():
        for own, theirs in pairs(model, other.policy):
            own.copy_(theirs)
    _, callback = other._setup_learn(256)
    other.set_logger(configure(format_strings=[]))
    other.collect_rollouts(other.env, callback, other.rollout_buffer, 256)
    (rows,) = other.rollout_buffer.get(None)
    log_prob, value, returns = (each.unsqueeze(-1) for each in (rows.old_log_prob, rows.old_values, rows.returns))
    weight, start = torch.full((256,), 1 / 256), torch.zeros(1, 256, dtype=torch.bool)
    batch = Batch(rows.observations, rows.actions, log_prob, value, rows.advantages, returns, weight, start)
    before = [own.detach().clone() for own, _ in pairs(model, other.policy)]

    monkeypatch.setattr(ppo, "make_batch", lambda *arguments: batch)
    fit(model)
    other.train()

    assert model.updates == 4
    for old, (own, theirs) in zip(before, pairs(model, other.policy), strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)
        assert not torch.equal(own, old)
