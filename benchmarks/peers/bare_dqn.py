"""DQN in one hand-written loop: the arithmetic of ours in torch with nothing around it.

One environment, two hidden layers of 64, an update a step; rows of memory in one table, noise drawn a hundred steps at once, the policy in
numpy on views of the parameters, all parameters in one vector for clipping and fused Adam. It logs, saves and checks nothing.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from cases import Case
from clock import Clock, measure
from torch import nn
from torch.nn import functional

from peers.flat import Flat, views

GAMMA, MAX_NORM, LAST_EPSILON, EXPLORATION, BLOCK = 0.99, 10.0, 0.05, 0.1, 100


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    given = case.settings
    starts, batch_size, every = given["learning_starts"], given["batch_size"], given["target_update_interval"]
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    env = gym.make(case.env, disable_env_checker=True)
    o, actions = env.observation_space.shape[0], int(env.action_space.n)
    online, target = (nn.Sequential(nn.Linear(o, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, actions)) for _ in range(2))
    flat, flat_target = (Flat(net, given["learning_rate"], MAX_NORM) for net in (online, target))
    flat_target.vector.copy_(flat.vector)
    layers = views(online)
    row = np.dtype([("obs", "f4", o), ("next_obs", "f4", o), ("action", "i8"), ("reward", "f4"), ("terminated", "?")], align=True)
    table = np.zeros(given["buffer_size"], row)
    obs, _ = env.reset(seed=1)
    updates = 0
    clock.start()
    for t in range(case.steps):
        if t % BLOCK == 0:
            epsilon = max(LAST_EPSILON, 1 - (1 - LAST_EPSILON) * t / (EXPLORATION * case.steps)) if t >= starts else 1.0
            explores, choices = rng.random(BLOCK) < epsilon, rng.integers(0, actions, BLOCK)
        if explores[t % BLOCK]:
            action = int(choices[t % BLOCK])
        else:
            x = obs
            for weight, bias in layers[:-1]:
                x = np.maximum(x @ weight + bias, 0)
            action = int((x @ layers[-1][0] + layers[-1][1]).argmax())
        next_obs, reward, terminated, truncated, _ = env.step(action)
        table[t % len(table)] = (obs, next_obs, action, reward, terminated)
        obs = env.reset()[0] if terminated or truncated else next_obs
        if t < starts:
            continue
        batch = table.take(rng.integers(0, min(t + 1, len(table)), batch_size))
        with torch.no_grad():
            best = target(torch.from_numpy(batch["next_obs"])).amax(1)
            discount = torch.from_numpy(np.where(batch["terminated"], np.float32(0), np.float32(GAMMA)))
            y = torch.from_numpy(batch["reward"]) + discount * best
        q = online(torch.from_numpy(batch["obs"])).gather(1, torch.from_numpy(batch["action"])[:, None]).squeeze(1)
        flat.step(functional.smooth_l1_loss(q, y))
        updates += 1
        if updates == 1:
            clock.update()
        if updates % every == 0:
            flat_target.vector.copy_(flat.vector)
    clock.stop()
    return case.steps, updates


if __name__ == "__main__":
    measure(train)
