"""Actors: what more of them gain where an environment waits, and whether a run survives that they are killed.

    python benchmarks/actors.py [--case speed] [--backends processes ray] [--actors 1 2 4]
    python benchmarks/actors.py --case threaded
    python benchmarks/actors.py --case kill [--kills 20]

speed: IMPALA on CartPole-v1 that sleeps 2 ms a step, environment steps a second behind the first 20 batches.
threaded: PPO on the same, beside what acting (C) and learning (U) take apart; no more than (C + U) / max(C, U) can be gained.
kill: actors are killed (SIGKILL), one after the other; counts rollouts, the policy lag, and what is left behind.
"""

from __future__ import annotations

import argparse
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
        self.learning = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        self.learning += now - self.began
        if trainer.global_step == self.first:
            self.start, self.steps, self.learning, self.last_kill = now, pl_module.env_steps, 0.0, now
        if trainer.global_step > self.first:
            self.end, self.made = now, pl_module.env_steps - self.steps
        pool = pl_module.collector
        self.lags.append(getattr(pool, "recorded", {}).get("actors/policy_lag_max", 0.0))
        if trainer.global_step > self.first and len(self.killed) < self.kills and now - self.last_kill > self.kill_every:
            processes = [each.process.pid for each in pool.workers.processes if each is not None]
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


def speed(options: argparse.Namespace) -> None:
    """Print a table."""
    print("| backend | actors | steps/s | of one |\n|---|---|---|---|", flush=True)
    for backend in options.backends:
        rates: dict[int, float] = {}
        for actors in options.actors:
            found = []
            for _ in range(options.repeats):
                config = lrl.ActorsConfig(num_actors=actors, backend=backend)
                steps = 20 * actors * (20 + options.batches)
                found.append(train(lrl.IMPALA({"id": ID, "num_envs": 1}, max_env_steps=steps, actors=config), Clock()).rate)
            rates[actors] = float(np.median(found))
            print(f"| {backend} | {actors} | {rates[actors]:,.0f} | {rates[actors] / rates[options.actors[0]]:.2f} |", flush=True)


def threaded(options: argparse.Namespace) -> None:
    """Print what a thread gains."""
    settings: dict[str, Any] = {
        "n_steps": 128,
        "batch_size": 64,
        "n_epochs": options.n_epochs,
        "max_env_steps": 128 * (5 + options.batches),
    }
    env = {"id": ID, "num_envs": 1}
    print("| PPO | steps/s | acting C | learning U |\n|---|---|---|---|", flush=True)
    clock = train(lrl.PPO(env, **settings), Clock(5))
    learning = clock.learning / (clock.made / 128)
    acting = 128 / clock.rate - learning
    print(f"| in turn | {clock.rate:,.0f} | {acting:.3f} s | {learning:.3f} s |", flush=True)
    found = train(lrl.PPO(env, threaded=True, **settings), Clock(5))
    bound = (acting + learning) / max(acting, learning)
    gained = found.rate / clock.rate
    print(f"| threaded | {found.rate:,.0f} | | |\n\ngained {gained:.2f} of at most {bound:.2f}: {gained / bound:.2f}", flush=True)


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
    parser.add_argument("--backends", nargs="+", default=["processes"])
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--n_epochs", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    {"speed": speed, "threaded": threaded, "kill": kill}[options.case](options)


if __name__ == "__main__":
    main()
