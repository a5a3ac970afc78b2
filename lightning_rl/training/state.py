"""Intervals of metric rows, and the state of a process's random generators."""

from __future__ import annotations

import itertools
import os
import random
import time

import numpy as np
import pytorch_lightning as pl
import torch

from lightning_rl.loggers import Counted, log_row, show_to_callbacks
from lightning_rl.types import State


class RunLog:
    """Writes a row of metrics every `interval` counts of the run (environment steps or updates).

    Lightning's `self.log` costs 0.2 ms per key and has neither count, so rows go directly to the loggers and `callback_metrics`.

    Args:
        interval: counts between rows.
        count: the run's count at the start.
    """

    def __init__(self, interval: int, count: int) -> None:
        self.interval, self.logged_env_steps = interval, count
        self.started = self.logged_at = time.monotonic()
        self.keeps = True
        """Whether the current iteration may be logged."""
        self.open_rows: list[dict[str, float]] = []
        """The row of the current iteration until it is written, and those of evaluations that come after it."""

    def begin(self, most: float) -> None:
        """Begin an iteration, after which the run's count is at most `most`."""
        self.keeps = most - self.logged_env_steps >= self.interval

    def is_due(self, count: int) -> bool:
        """Return whether a row is due."""
        return self.keeps and count - self.logged_env_steps >= self.interval

    @property
    def is_open(self) -> bool:
        """Return whether the row of the current iteration is not written yet."""
        return bool(self.open_rows)

    def open(self, trainer: pl.Trainer, run: Counted, metrics: dict[str, float]) -> None:
        """Make a row of the given metrics and time metrics, and show it to callbacks."""
        now, count = time.monotonic(), run.count
        rate = (count - self.logged_env_steps) / max(now - self.logged_at, 1e-9)
        times = {"time/fps": rate, "time/time_elapsed": now - self.started, "time/iterations": trainer.global_step}
        self.open_rows = [{run.counter: count, **metrics, **times}]
        self.logged_at, self.logged_env_steps = now, count
        show_to_callbacks(trainer, self.open_rows[0])

    def add(self, trainer: pl.Trainer, run: Counted, metrics: dict[str, float]) -> None:
        """Write another row, after the one that is open, and show it to callbacks."""
        if self.is_open:
            self.open_rows.append(metrics)
            show_to_callbacks(trainer, metrics)
        else:
            log_row(trainer, run, metrics)

    def close(self, trainer: pl.Trainer, run: Counted, metrics: dict[str, float]) -> None:
        """Write the open rows, the first with metrics that replace earlier ones."""
        (first, *others), self.open_rows = self.open_rows, []
        for row in ({**first, **metrics}, *others):
            log_row(trainer, run, row)

    def get_state(self) -> State:
        """Return the count of the last row, the elapsed time, and the time since that row."""
        now = time.monotonic()
        return {"logged_env_steps": self.logged_env_steps, "elapsed": now - self.started, "since_row": now - self.logged_at}

    def set_state(self, state: State) -> None:
        """Restore a state; times continue from there."""
        self.logged_env_steps = state["logged_env_steps"]
        now = time.monotonic()
        self.started, self.logged_at = now - state["elapsed"], now - state.get("since_row", 0.0)  # 0.1.0 did not store it


def random_state() -> State:
    """Return the state of this process's global random generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


LEAST_OWN_SEED = 2**32
"""Torch's own seeds are random numbers of 64 bits, and those of runs are at least this: a smaller one is the user's."""
run_numbers = itertools.count()
"""Two runs that begin with the same state of torch's generator, as after two resumed runs, differ by these."""


def draw_seed() -> None:
    """Seed torch again unless the user seeded it or Lightning: otherwise the program's next run would repeat this one's episodes."""
    if "PL_GLOBAL_SEED" not in os.environ and torch.initial_seed() >= LEAST_OWN_SEED:
        entropy = [int(torch.randint(2**32, ())), next(run_numbers)]
        torch.manual_seed(LEAST_OWN_SEED + int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def set_random_state(state: State) -> None:
    """Restore the state from `random_state`, except for generators of GPUs that do not exist here."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    for device, words in list(enumerate(state["cuda"]))[: torch.cuda.device_count()]:
        torch.cuda.set_rng_state(torch.from_numpy(words), device)
