"""What a process measures of itself: the time of training, the first update, and memory."""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import CASES, Case


class Clock:
    """A stopwatch, held by the one that trains.

    Args:
        launched: when the process was, in seconds since the epoch, by the one that launched it.
    """

    def __init__(self, launched: float) -> None:
        self.launched = launched
        self.began = self.first = self.ended = float("nan")
        self.first_s = self.below_mb = float("nan")

    def start(self) -> None:
        """Training begins."""
        self.began = time.perf_counter()

    def update(self) -> None:
        """The first update ends."""
        self.first, self.first_s = time.perf_counter(), time.time() - self.launched
        self.below_mb = sum(private_mb(process) for process in processes_below(os.getpid()))

    def stop(self) -> None:
        """Training ends."""
        self.ended = time.perf_counter()

    def follow_torch(self) -> None:
        """Take the first step of any of torch's optimizers for the first update, and then get out of the way."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def first(*_: Any) -> None:
            handle.remove()
            self.update()

        handle = register_optimizer_step_post_hook(first)

    def follow(self, owner: Any, method: str) -> None:
        """Take the first call of an object's method for the first update, and then get out of the way."""
        call = getattr(owner, method)

        def first(*args: Any, **kwargs: Any) -> Any:
            delattr(owner, method)
            result = call(*args, **kwargs)
            self.update()
            return result

        setattr(owner, method, first)

    def figures(self) -> dict[str, float]:
        """Seconds of training, of it those after the first update, seconds from launch to the end of that, and memory in MB.

        The peak of this process, and what its workers had after the first update.
        """
        if math.isnan(self.first):
            raise SystemExit("no update was seen: the run is too short, or the hook saw none")
        return {
            "seconds": self.ended - self.began,
            "seconds_after": self.ended - self.first,
            "first_update_s": self.first_s,
            "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 + self.below_mb,
        }


def processes_below(process: int) -> list[int]:
    """The processes that one has started, and those that they have, as Linux tells it."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *processes_below(child)]
    return found


def private_mb(process: int) -> float:
    """What a process has in memory that it shares with no other: pages of a fork that were never written are its parent's."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


Train = Callable[[Case, Clock, str], tuple[int, int]]
"""Trains a case on a device. Returns environment steps and updates, which are gradient steps."""


def measure(train: Train) -> None:
    """The program of a peer: one case, one JSON line at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--launched", type=float, default=time.time())
    options = parser.parse_args()
    clock = Clock(options.launched)
    import torch

    torch.set_num_threads(options.threads)
    env_steps, updates = train(CASES[options.case].shortened(options.share), clock, options.device)
    print(json.dumps({**clock.figures(), "env_steps": env_steps, "updates": updates}), flush=True)
