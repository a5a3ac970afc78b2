"""Memory and microseconds of a replay buffer full of HalfCheetah's rows: ours, or Stable-Baselines3's in its environment."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box

POOL, BATCH, DRAWS = 1_000, 256, 500
OBS = Box(-np.inf, np.inf, (17,), np.float64)
ACTION = Box(-1.0, 1.0, (6,), np.float32)


def rss_mb() -> float:
    """What this process has in memory."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def ours(rows: int) -> tuple[Callable[[int], Any], Callable[[], Any]]:
    """How to add transition i of a pool, and how to draw a batch of tensors."""
    from lightning_rl.data.replay.buffer import ReplayBuffer
    from lightning_rl.types import EnvStep, tree_to_torch

    obs, next_obs, action, reward = pool()
    no, yes, none = np.zeros(1, bool), np.ones(1, bool), np.zeros(0, np.int64)
    steps = [EnvStep(next_obs[i], reward[i], no, no, yes, no, none, None, {}) for i in range(POOL)]
    buffer = ReplayBuffer(OBS, np.zeros(6, np.float32), rows)
    return lambda i: buffer.add(obs[i], action[i], steps[i]), lambda: tree_to_torch(buffer.sample(BATCH))


def sb3(rows: int) -> tuple[Callable[[int], Any], Callable[[], Any]]:
    """The same."""
    from stable_baselines3.common.buffers import ReplayBuffer

    obs, next_obs, action, reward = pool()
    no = np.zeros(1, bool)
    buffer = ReplayBuffer(rows, OBS, ACTION, device="cpu")
    return lambda i: buffer.add(obs[i], next_obs[i], action[i], reward[i], no, [{}]), lambda: buffer.sample(BATCH)


def pool() -> tuple[np.ndarray, ...]:
    """Transitions of one environment to add again and again: observations as the environment gives them, actions, rewards."""
    rng = np.random.default_rng(1)
    obs, next_obs = (rng.standard_normal((POOL, 1, 17)) for _ in range(2))
    return obs, next_obs, rng.uniform(-1, 1, (POOL, 1, 6)).astype(np.float32), rng.standard_normal((POOL, 1))


def main() -> None:
    """One library and one size, filled row by row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=("ours", "sb3"))
    parser.add_argument("rows", type=int)
    options = parser.parse_args()
    make = {"ours": ours, "sb3": sb3}[options.library]
    make(POOL)[1]  # imports
    before = rss_mb()
    add, draw = make(options.rows)
    start = time.perf_counter()
    for i in range(options.rows):
        add(i % POOL)
    added = time.perf_counter() - start
    memory = rss_mb() - before
    draw()
    start = time.perf_counter()
    for _ in range(DRAWS):
        draw()
    drawn = time.perf_counter() - start
    print(json.dumps({"memory_mb": memory, "add_us": 1e6 * added / options.rows, "draw_us": 1e6 * drawn / DRAWS}))


if __name__ == "__main__":
    main()
