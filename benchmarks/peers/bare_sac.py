"""Soft actor-critic in one hand-written loop: the arithmetic of ours with nothing around it.

One environment, two hidden layers of 256, batches of 256, one update a step; twin critics as one batched product, rows of memory in one
table, the parameters of each network in one vector for fused Adam, the faster route of float32 products. It logs, saves and checks nothing.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from cases import Case
from clock import Clock, measure
from torch import Tensor, nn
from torch.nn import functional

from peers.flat import Flat, views

WIDTH, BATCH, GAMMA, TAU = 256, 256, 0.99, 0.005


class Twins(nn.Module):
    """Two perceptrons in one batched product."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        sizes = [inputs, WIDTH, WIDTH, 1]
        shapes = list(pairwise(sizes))
        self.w = nn.ParameterList([torch.empty(2, a, b).uniform_(-1 / math.sqrt(a), 1 / math.sqrt(a)) for a, b in shapes])
        self.b = nn.ParameterList([torch.empty(2, 1, b).uniform_(-1 / math.sqrt(a), 1 / math.sqrt(a)) for a, b in shapes])

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Q `[2, B]`."""
        x = torch.cat([obs, action], -1)
        x = x.expand(2, *x.shape)
        for weight, bias in list(zip(self.w, self.b, strict=True))[:-1]:
            x = torch.baddbmm(bias, x, weight).relu()
        return torch.baddbmm(self.b[-1], x, self.w[-1]).squeeze(-1)


def draw(x: Tensor) -> tuple[Tensor, Tensor]:
    """An action in [-1, 1] and its log-probability."""
    mean, log_std = x.chunk(2, -1)
    log_std = log_std.clamp(-20, 2)
    noise = torch.randn_like(mean)
    u = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - u - functional.softplus(-2 * u))
    return u.tanh(), log_prob.sum(-1)


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    steps, learning_starts, learning_rate = case.steps, case.settings["learning_starts"], case.settings["learning_rate"]
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("medium")
    rng = np.random.default_rng(1)
    env = gym.make(case.env)
    space: Any = env.action_space
    o, a = env.observation_space.shape[0], space.shape[0]  # type: ignore[index]
    low, high = space.low, space.high
    actor = nn.Sequential(nn.Linear(o, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2 * a))
    critic, target = Twins(o + a), Twins(o + a)
    log_alpha = nn.Parameter(torch.zeros(1))
    learned = critic, actor, nn.ParameterList([log_alpha])
    flat_critic, flat_actor, flat_alpha = (Flat(each, learning_rate) for each in learned)
    flat_target = Flat(target, learning_rate)
    flat_target.vector.copy_(flat_critic.vector)
    table = np.zeros((steps, 2 * o + a + 2), dtype=np.float32)
    layers = views(actor)
    obs, _ = env.reset(seed=1)
    clock.start()
    for t in range(steps):
        if t < learning_starts:
            action = rng.uniform(-1, 1, a)
        else:
            x = obs.astype(np.float32)
            for weight, bias in layers[:-1]:
                x = np.maximum(x @ weight + bias, 0)
            x = x @ layers[-1][0] + layers[-1][1]
            action = np.tanh(x[:a] + np.exp(x[a:].clip(-20, 2)) * rng.standard_normal(a))
        next_obs, reward, terminated, truncated, _ = env.step(low + (action + 1) / 2 * (high - low))
        row = table[t]
        row[:o], row[o : o + a], row[o + a : 2 * o + a], row[-2], row[-1] = obs, action, next_obs, reward, terminated
        obs = env.reset()[0] if terminated or truncated else next_obs
        if t < learning_starts:
            continue
        batch = torch.from_numpy(table.take(rng.integers(0, t + 1, BATCH), 0))
        state, done_action, state2, reward_, done = batch.split([o, a, o, 1, 1], 1)
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            action2, log_prob2 = draw(actor(state2))
            y = reward_.squeeze(1) + GAMMA * (1 - done.squeeze(1)) * (target(state2, action2).amin(0) - alpha * log_prob2)
        flat_critic.step(0.5 * (critic(state, done_action) - y).square().sum(0).mean())
        new_action, log_prob = draw(actor(state))
        flat_actor.step((alpha * log_prob - critic(state, new_action).amin(0)).mean())
        flat_alpha.step(-(log_alpha.exp() * (log_prob.detach() - a)).mean())
        flat_target.vector.lerp_(flat_critic.vector, TAU)
        if t == learning_starts:
            clock.update()
    clock.stop()
    return steps, case.updates


if __name__ == "__main__":
    measure(train)
