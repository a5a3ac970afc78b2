"""Actors: what more of them gain where an environment waits, and whether a run survives that they are killed.

    python benchmarks/actors.py [--case speed] [--backends processes ray] [--actors 1 2 4]
    python benchmarks/actors.py --case threaded
    python benchmarks/actors.py --case kill [--kills 20]

speed: IMPALA and evolution strategies on CartPole-v1 that sleeps 2 ms a step, environment steps a second once all actors have begun.
threaded: PPO and SAC on the same, beside what acting (C) and learning (U) take apart; at most (C + U) / max(C, U) can be gained.
kill: actors are killed (SIGKILL), one after the other; counts rollouts, the policy lag, and what is left behind.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytorch_lightning as pl
from gymnasium.envs.classic_control import CartPoleEnv

import lightning_rl as lrl

SLEEP = 0.002
OFF: dict[str, Any] = {"evaluation": None, "checkpoint": None, "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}


class Sleeping(CartPoleEnv):
    """CartPole that waits for something."""

    def step(self, action: Any) -> Any:
        time.sleep(SLEEP)
        return super().step(action)


if "Sleeping-v0" not in gym.registry:  # this file is a program, too
    gym.register("Sleeping-v0", "benchmarks.actors:Sleeping", max_episode_steps=500)
ID = "benchmarks.actors:Sleeping-v0"


class Clock(pl.Callback):
    """Steps a second from iteration `first` on, the lags met, and what is done between iterations."""

    def __init__(self, first: int = 20, kill_every: float = 0.0, kills: int = 0) -> None:
        self.first, self.kill_every, self.kills = first, kill_every, kills
        self.killed: list[int] = []
        self.pids: set[int] = set()
        self.lags: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if trainer.global_step == self.first:
            self.start, self.steps, self.last_kill = now, pl_module.env_steps, now
        if trainer.global_step > self.first:
            self.end, self.made = now, pl_module.env_steps - self.steps
        pool = pl_module.collector
        self.lags.append(getattr(pool, "recorded", {}).get("actors/policy_lag_max", 0.0))
        if trainer.global_step > self.first and len(self.killed) < self.kills and now - self.last_kill > self.kill_every:
            processes = [each.process.pid for each in pool.workers.processes.values()]
            self.pids |= set(processes)
            self.killed.append(processes[len(self.killed) % len(processes)])
            os.kill(self.killed[-1], signal.SIGKILL)
            self.last_kill = now

    @property
    def rate(self) -> float:
        """Environment steps a second."""
        return self.made / (self.end - self.start)


def train(model: Any, clock: Clock) -> Clock:
    """Run a model to its end."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(None):
        lrl.Trainer(default_root_dir=folder, torch_threads=1, callbacks=[clock], **OFF).fit(model)
    return clock


def impala(config: lrl.ActorsConfig, batches: int) -> float:
    """Steps a second with some actors."""
    steps = 20 * config.num_actors * (20 + batches)
    return train(lrl.IMPALA({"id": ID, "num_envs": 1}, max_env_steps=steps, actors=config), Clock()).rate


def evolution(config: lrl.ActorsConfig, batches: int) -> float:
    """Steps a second with some evaluators; a generation has 40 episodes."""
    settings: dict[str, Any] = {"episodes_per_generation": 40, "max_env_steps": 40 * batches, "actors": config}
    return train(lrl.EvolutionStrategies({"id": ID, "num_envs": 1}, **settings), Clock(1)).rate


MEASURES = {"impala": impala, "evolution": evolution}


def speed(options: argparse.Namespace) -> None:
    """Print a table."""
    print("| algorithm | backend | actors | steps/s | of one |\n|---|---|---|---|---|", flush=True)
    for algorithm, backend in itertools.product(options.algorithms, options.backends):
        rates: dict[int, float] = {}
        for actors in options.actors:
            config = lrl.ActorsConfig(num_actors=actors, backend=backend)
            rates[actors] = float(np.median([MEASURES[algorithm](config, options.batches) for _ in range(options.repeats)]))
            ratio = rates[actors] / rates[options.actors[0]]
            print(f"| {algorithm} | {backend} | {actors} | {rates[actors]:,.0f} | {ratio:.2f} |", flush=True)


def threaded(options: argparse.Namespace) -> None:
    """Print what a thread gains. C is measured by a run of SAC that acts and does not learn, U is what is left of a run in turn."""
    steps = 128 * (5 + options.batches)
    sac: dict[str, Any] = {"steps_per_iteration": 128, "learning_starts": 128, "warmup": "policy", "net_arch": [64, 64]}
    ppo: dict[str, Any] = {"n_steps": 128, "batch_size": 64, "n_epochs": options.n_epochs}

    def seconds(algorithm: Any, settings: dict[str, Any]) -> float:
        """Of 128 steps."""
        return 128 / train(algorithm({"id": ID, "num_envs": 1}, max_env_steps=steps, **settings), Clock(5)).rate

    acting = seconds(lrl.SAC, sac | {"learning_starts": steps})
    print(f"acting C: {acting:.3f} s for 128 steps\n\n| algorithm | learning U | C + U in turn | threaded | gained | at most | share |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for algorithm, settings in ((lrl.PPO, ppo), (lrl.SAC, sac | {"batch_size": options.batch_size})):
        both, beside = seconds(algorithm, settings), seconds(algorithm, settings | {"threaded": True})
        learning, gained = both - acting, both / beside
        bound = both / max(acting, learning)
        numbers = f"{learning:.3f} s | {both:.3f} s | {beside:.3f} s | {gained:.2f} | {bound:.2f} | {gained / bound:.2f}"
        print(f"| {algorithm.__name__} | {numbers} |", flush=True)


def kill(options: argparse.Namespace) -> None:
    """Print what a run that lost actors did."""
    before = set(Path("/dev/shm").glob("psm_*"))
    config = lrl.ActorsConfig(num_actors=4, max_restarts=options.kills)
    clock = Clock(20, options.every, options.kills)
    model = lrl.IMPALA({"id": "CartPole-v1", "num_envs": 2}, max_env_steps=options.steps, actors=config)
    train(model, clock)
    alive = [pid for pid in clock.pids if Path(f"/proc/{pid}").exists()]
    left = set(Path("/dev/shm").glob("psm_*")) - before
    print(f"{len(clock.killed)} actors killed; {model.env_steps:,} steps of {options.steps:,}; policy lag at most {max(clock.lags):g}")
    print(f"left behind: {len(alive)} processes, {len(left)} blocks of shared memory")


def main() -> None:
    """Run a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["speed", "threaded", "kill"], default="speed")
    parser.add_argument("--algorithms", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--backends", nargs="+", default=["processes"])
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--n_epochs", type=int, default=190, help="of PPO, so that learning takes as long as acting")
    parser.add_argument("--batch_size", type=int, default=64, help="of SAC, for the same")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    {"speed": speed, "threaded": threaded, "kill": kill}[options.case](options)


if __name__ == "__main__":
    main()
