"""DQN in one file and one loop, in the style of CleanRL: nothing of it is shared with anybody.

A vector environment of one that records its episodes, a table of arrays for memory, torch's own Adam, a copied target network, and numbers
for TensorBoard every 100 steps. No gradients are clipped.
"""

from __future__ import annotations

import tempfile
import time

import gymnasium as gym
import numpy as np
import torch
from cases import Case
from clock import Clock, measure
from torch import nn
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter

GAMMA, LAST_EPSILON, EXPLORATION = 0.99, 0.05, 0.1


class Memory:
    """The newest transitions, an array for each part; the next observation is an array too, as Stable-Baselines3 keeps them."""

    def __init__(self, capacity: int, obs_size: int) -> None:
        self.obs, self.next_obs = (np.zeros((capacity, 1, obs_size), np.float32) for _ in range(2))
        self.action = np.zeros((capacity, 1, 1), np.int64)
        self.reward, self.done = (np.zeros((capacity, 1), np.float32) for _ in range(2))
        self.capacity, self.count = capacity, 0

    def add(self, obs: np.ndarray, next_obs: np.ndarray, action: np.ndarray, reward: np.ndarray, done: np.ndarray) -> None:
        """Keep a step of the environment."""
        row = self.count % self.capacity
        self.obs[row], self.next_obs[row], self.action[row, :, 0], self.reward[row], self.done[row] = obs, next_obs, action, reward, done
        self.count += 1

    def sample(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        """Rows at random, as tensors."""
        rows = np.random.randint(0, min(self.count, self.capacity), batch_size)
        parts = (self.obs[rows, 0], self.next_obs[rows, 0], self.action[rows, 0], self.reward[rows, 0], self.done[rows, 0])
        return tuple(torch.tensor(part) for part in parts)


class QNetwork(nn.Module):
    """Action values."""

    def __init__(self, obs_size: int, actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(obs_size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, actions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


def epsilon(step: int, steps: int) -> float:
    """The share of random actions, falling linearly."""
    return max(LAST_EPSILON, 1 - (1 - LAST_EPSILON) * step / (EXPLORATION * steps))


def make_env(env_id: str) -> gym.Env:
    """One environment that says how its episodes went."""
    return gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    given = case.settings
    torch.manual_seed(1)
    np.random.seed(1)
    rng = np.random.default_rng(1)
    envs = gym.vector.SyncVectorEnv([lambda: make_env(case.env)], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    sizes = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    q_network, target_network = QNetwork(*sizes), QNetwork(*sizes)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=given["learning_rate"])
    memory = Memory(given["buffer_size"], sizes[0])
    obs, _ = envs.reset(seed=1)
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        clock.start()
        clock.follow_torch()
        began = time.time()
        for step in range(case.steps):
            if rng.random() < epsilon(step, case.steps):
                action = envs.action_space.sample()
            else:
                action = q_network(torch.Tensor(obs)).argmax(1).numpy()
            next_obs, reward, terminated, _, info = envs.step(action)
            last_obs = next_obs.copy()
            if "final_info" in info:
                episode = info["final_info"]["episode"]
                writer.add_scalar("charts/episodic_return", episode["r"][0], step)
                writer.add_scalar("charts/episodic_length", episode["l"][0], step)
                last_obs[0] = info["final_obs"][0]
            memory.add(obs, last_obs, action, reward, terminated)
            obs = next_obs
            if step < given["learning_starts"] or step % given["train_freq"]:
                continue
            seen, seen_next, taken, paid, done = memory.sample(given["batch_size"])
            with torch.no_grad():
                target = paid + GAMMA * (1 - done) * target_network(seen_next).max(1).values
            value = q_network(seen).gather(1, taken).squeeze(1)
            loss = functional.mse_loss(value, target)
            if step % 100 == 0:
                writer.add_scalar("losses/td_loss", loss.item(), step)
                writer.add_scalar("losses/q_values", value.mean().item(), step)
                writer.add_scalar("charts/SPS", int(step / (time.time() - began)), step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % given["target_update_interval"] == 0:
                target_network.load_state_dict(q_network.state_dict())
        clock.stop()
    return case.steps, case.updates


if __name__ == "__main__":
    measure(train)
