"""CartPole without its velocities, which takes a memory: with the settings of sb3-contrib's test, and the return that it asks for."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from lightning_rl import GRU, LSTM, PPO, RolloutEvaluator
from tests.fitting import fit

SETTINGS = {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "learning_rate": 7e-4, "gae_lambda": 0.98, "max_grad_norm": 1.0}
NORMALIZED = {"normalize_obs": "running", "normalize_reward": True}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("memory", [LSTM(128), GRU(64)])
def test_velocities_are_remembered_within_50_000_steps(memory, seed):
    torch.manual_seed(seed)
    env = {"id": "tests.peers.tasks:CartPoleWithoutVelocities-v0", "num_envs": 8}
    model = PPO(env, memory=memory, max_env_steps=50_000, **SETTINGS, **NORMALIZED)
    fit(model)
    assert fmean(episode.return_ for episode in RolloutEvaluator(episodes=20, num_envs=4).play(model)) >= 450
