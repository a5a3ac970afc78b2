"""PPO in one hand-written loop: the arithmetic of ours in torch with nothing around it.

Policy and value of 64 x 64 tanh each; rollouts in arrays made once, which are tensors too; noise drawn once a rollout; the policy in numpy
on views of the parameters; values and log-probabilities of a rollout in one pass; all parameters in one vector for clipping and fused
Adam. Where a case normalizes, observations by statistics that are merged after each rollout and rewards by the deviation of the discounted
return. The entropy has no weight in these cases and is left out. It logs, saves and checks nothing.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from cases import Case
from clock import Clock, measure
from torch import Tensor, nn

from peers.flat import Flat, views

GAMMA, LAMBDA, CLIP, VALUE_WEIGHT, MAX_NORM = 0.99, 0.95, 0.2, 0.5, 0.5


class Statistics:
    """Count, mean and variance of a stream, merged batch by batch."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count, self.mean, self.var = 1e-4, np.zeros(shape), np.ones(shape)

    def update(self, batch: np.ndarray) -> None:
        """Merge rows."""
        batch = batch - self.mean
        shift, var, total = batch.mean(0), batch.var(0), self.count + len(batch)
        spread = self.var * self.count + var * len(batch) + shift**2 * self.count * len(batch) / total
        self.mean, self.var, self.count = self.mean + shift * len(batch) / total, spread / total, total

    @property
    def scale(self) -> np.ndarray:
        """The inverse deviation."""
        return np.float32(1 / np.sqrt(self.var + 1e-8))


class Agent(nn.Module):
    """Policy and value."""

    def __init__(self, obs_size: int, space: Any) -> None:
        super().__init__()
        self.discrete = isinstance(space, gym.spaces.Discrete)
        self.actions = int(space.n) if self.discrete else space.shape[0]
        self.actor, self.critic = self.mlp(obs_size, self.actions, 0.01), self.mlp(obs_size, 1, 1.0)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(self.actions))

    def mlp(self, inputs: int, outputs: int, gain: float) -> nn.Sequential:
        """Orthogonal layers."""
        layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
        for layer, size in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
            nn.init.orthogonal_(layer.weight, size)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def noise(self, steps: int, num_envs: int) -> np.ndarray:
        """For all draws of a rollout: Gumbel for choices, else Gaussian with the policy's σ."""
        shape = steps, num_envs, self.actions
        if self.discrete:
            return torch.empty(shape).exponential_().log_().neg_().numpy()
        return (torch.randn(shape) * self.log_std.detach().exp()).numpy()

    def log_prob(self, obs: Tensor, action: Tensor) -> Tensor:
        """Joint log-probability, one for each row."""
        x = self.actor(obs)
        if self.discrete:
            return x.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        z = (action - x) * (-self.log_std).exp()
        return (-0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def backwards(x: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """y_t = x_t + decay_t y_{t+1}, in rounds whose window doubles."""
    y, decay, window = x.copy(), decay.copy(), 1
    while window < len(x):
        y[:-window] += decay[:-window] * y[window:]
        decay[:-window] = decay[:-window] * decay[window:]
        window *= 2
    return y


def make_envs(case: Case) -> tuple[gym.vector.VectorEnv, bool]:
    """The environments, and whether the step that ends an episode already begins the next."""
    if case.vectorization == "native":
        return gym.make_vec(case.env, case.num_envs, vectorization_mode="vector_entry_point"), False
    make = [lambda: gym.make(case.env, disable_env_checker=True)] * case.num_envs
    return gym.vector.SyncVectorEnv(make, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP, copy=False), True


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    torch.manual_seed(1)
    given, steps, num = case.settings, case.settings["n_steps"], case.num_envs
    envs, same_step = make_envs(case)
    space = envs.single_action_space
    o = envs.single_observation_space.shape[0]
    agent = Agent(o, space)
    flat, layers = Flat(agent, given["learning_rate"], MAX_NORM, 1e-5), views(agent.actor)
    obs = np.zeros((steps + 1, num, o), np.float32)
    action = np.zeros((steps, num), np.int64) if agent.discrete else np.zeros((steps, num, agent.actions), np.float32)
    reward, running = np.zeros((steps, num), np.float32), np.zeros(num)
    terminated, truncated = np.zeros((2, steps, num), bool)
    valid, begins = np.ones((steps, num), bool), np.zeros(num, bool)
    seen, paid = Statistics((o,)), Statistics(())
    low, high = (None, None) if agent.discrete else (space.low, space.high)
    obs[0], _ = envs.reset(seed=1)
    updates = env_steps = 0
    clock.start()
    while env_steps < case.steps:
        noise, lasts = agent.noise(steps, num), []
        mean, scale = np.float32(seen.mean), seen.scale
        for t in range(steps):
            x = ((obs[t] - mean) * scale).clip(-10, 10) if case.normalize else obs[t]
            for weight, bias in layers[:-1]:
                x = np.tanh(x @ weight + bias)
            x = x @ layers[-1][0] + layers[-1][1] + noise[t]
            action[t] = x.argmax(-1) if agent.discrete else x
            obs[t + 1], reward[t], terminated[t], truncated[t], info = envs.step(action[t] if agent.discrete else x.clip(low, high))
            if not same_step:  # the step behind an end only begins the next episode
                valid[t], begins = ~begins, terminated[t] | truncated[t]
            elif truncated[t].any():
                lasts += [(t, env, info["final_obs"][env]) for env in np.flatnonzero(truncated[t])]
        env_steps += int(valid.sum())
        rows = torch.from_numpy(obs)
        if case.normalize:
            rows = ((rows - torch.from_numpy(mean)) * torch.from_numpy(scale)).clamp(-10, 10)
        taken = torch.from_numpy(action)
        with torch.no_grad():
            value = agent.critic(rows).squeeze(-1).numpy()
            log_prob = agent.log_prob(rows[:-1], taken)
            next_value = value[1:].copy()
            for t, env, last in lasts:
                x = ((np.float32(last) - mean) * scale).clip(-10, 10) if case.normalize else np.float32(last)
                next_value[t, env] = agent.critic(torch.from_numpy(x)).item()
        carry = ~(terminated | truncated)
        scaled = (reward * paid.scale).clip(-10, 10) if case.normalize else reward
        discount = np.float32(GAMMA) * ~terminated
        advantage = backwards(scaled + discount * next_value - value[:-1], discount * np.float32(LAMBDA) * carry)
        batch = [rows[:-1], taken, log_prob, *map(torch.from_numpy, (advantage, advantage + value[:-1], np.float32(valid)))]
        batch = [part.flatten(0, 1) for part in batch]
        for _ in range(given["n_epochs"]):
            order = torch.randperm(steps * num).view(-1, given["batch_size"])
            b_obs, b_action, b_log_prob, b_advantage, b_returns, weight = (part[order] for part in batch)
            weight = weight / weight.sum(1, keepdim=True)
            centred = b_advantage - (weight * b_advantage).sum(1, keepdim=True)
            b_advantage = centred / ((weight * centred.square()).sum(1, keepdim=True).sqrt() + 1e-8)
            for k in range(len(order)):
                ratio = (agent.log_prob(b_obs[k], b_action[k]) - b_log_prob[k]).exp()
                gain = torch.min(ratio * b_advantage[k], ratio.clamp(1 - CLIP, 1 + CLIP) * b_advantage[k])
                error = (agent.critic(b_obs[k]).squeeze(-1) - b_returns[k]).square()
                flat.step((weight[k] * (VALUE_WEIGHT * error - gain)).sum())
                updates += 1
                if updates == 1:
                    clock.update()
        if case.normalize:
            returns = np.flip(backwards(np.flip(first_plus(reward, running), 0), np.flip(shifted(GAMMA * carry), 0)), 0)
            running = returns[-1] * GAMMA * carry[-1]
            seen.update(obs[:-1].reshape(-1, o))
            paid.update(returns.reshape(-1))
        obs[0] = obs[-1]
    clock.stop()
    return env_steps, updates


def first_plus(reward: np.ndarray, running: np.ndarray) -> np.ndarray:
    """Rewards, the first with what came before it."""
    reward = reward.astype(np.float64)
    reward[0] += running
    return reward


def shifted(decay: np.ndarray) -> np.ndarray:
    """The decay from the row before to each."""
    return np.concatenate([np.zeros_like(decay[:1]), decay[:-1]])


if __name__ == "__main__":
    measure(train)
