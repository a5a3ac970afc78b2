"""Microseconds of a step of CartPole-v1: our collector with a policy acting, and the bare vector environment beside it."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from lightning_rl.data.collector import Collector
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_vector_env, probe_spaces
from lightning_rl.envs.stepping import make_stepper
from lightning_rl.networks.actor_critic import ActorCritic

STEPS = 128


def seconds(call: Callable[[], object], during: float) -> float:
    """The median of calls for a while, the first left out."""
    call()
    taken: list[float] = []
    while sum(taken) < during or len(taken) < 3:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    """One kind of vector environment and one size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("vectorization")
    parser.add_argument("num_envs", type=int)
    parser.add_argument("--during", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    config = EnvConfig("CartPole-v1", num_envs=options.num_envs, vectorization=options.vectorization)
    spaces = probe_spaces(config)
    collector = Collector(make_stepper(make_vector_env(config), config), spaces, ActorCritic(spaces), STEPS, seed=1)
    envs = make_vector_env(config)
    envs.reset(seed=1)
    actions = np.random.default_rng(1).integers(0, 2, (STEPS, options.num_envs), np.int32)  # EnvPool takes no other

    def bare() -> None:
        for action in actions:
            envs.step(action)

    found = {"collector": seconds(collector.collect, options.during), "bare": seconds(bare, options.during)}
    print(json.dumps({name: 1e6 * each / STEPS for name, each in found.items()}))


if __name__ == "__main__":
    main()
