"""PPO of skrl with its defaults: a progress bar, TensorBoard a hundred times and ten checkpoints a run.

Separate networks of 64 x 64 tanh for policy and value, no clipping of values, advantages normalized over the rollout, truncated episodes
bootstrapped. Where a case normalizes, observations and values pass its RunningStandardScaler, in the manner of its own examples; it has no
scaler for rewards.
"""

from __future__ import annotations

import tempfile
from typing import Any

import gymnasium as gym
import torch
from cases import Case
from clock import Clock, measure
from skrl.agents.torch.ppo import PPO
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import nn


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Logits(CategoricalMixin, Model):
    """A policy for a finite choice."""

    def __init__(self, env: Any) -> None:
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device=env.device)
        CategoricalMixin.__init__(self)
        self.net = mlp(self.num_observations, self.num_actions)

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


class Gaussian(GaussianMixin, Model):
    """A policy for continuous actions, with a free log σ."""

    def __init__(self, env: Any) -> None:
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device=env.device)
        GaussianMixin.__init__(self, clip_actions=True)
        self.net = mlp(self.num_observations, self.num_actions)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Value(DeterministicMixin, Model):
    """A value function."""

    def __init__(self, env: Any) -> None:
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device=env.device)
        DeterministicMixin.__init__(self)
        self.net = mlp(self.num_observations, 1)

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    set_seed(1)
    single = gym.make(case.env) if case.num_envs == 1 else gym.make_vec(case.env, case.num_envs, vectorization_mode="sync")
    env = wrap_env(single, verbose=False)
    given = case.settings
    settings = {
        "rollouts": given["n_steps"],
        "learning_epochs": given["n_epochs"],
        "mini_batches": case.rows // given["batch_size"],
        "learning_rate": given["learning_rate"],
        "value_clip": 0.0,
        "value_loss_scale": 0.5,
        "time_limit_bootstrap": True,
    }
    if case.normalize:
        scaled = {"observation": env.observation_space, "value": 1}
        for name, size in scaled.items():
            settings |= {f"{name}_preprocessor": RunningStandardScaler, f"{name}_preprocessor_kwargs": {"size": size, "device": env.device}}
    policy = Logits(env) if isinstance(env.action_space, gym.spaces.Discrete) else Gaussian(env)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        agent = PPO(
            models={"policy": policy, "value": Value(env)},
            memory=RandomMemory(memory_size=given["n_steps"], num_envs=case.num_envs, device=env.device),
            observation_space=env.observation_space,
            action_space=env.action_space,
            device=env.device,
            cfg={**settings, "experiment": {"directory": folder}},
        )
        timesteps = case.steps // case.num_envs
        trainer = SequentialTrainer(
            env=env, agents=agent, cfg={"timesteps": timesteps, "headless": True, "close_environment_at_exit": False}
        )
        clock.follow_torch()
        clock.start()
        trainer.train()
        clock.stop()
    return timesteps * case.num_envs, case.updates


if __name__ == "__main__":
    measure(train)
