"""Stops a run of ours on CartPole when it is solved, and says how long it took: a callback for `lightning-rl fit`."""

from __future__ import annotations

import json
import time
from typing import Any

import pytorch_lightning as pl
from solving import solved


class StopWhenSolved(pl.Callback):
    """Looks at the last 100 training episodes after each iteration.

    Args:
        launched: when the process was, in seconds since the epoch.
    """

    def __init__(self, launched: float) -> None:
        self.launched, self.began, self.solved = launched, float("nan"), False

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.began = time.time()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if not self.solved and solved(pl_module.collector.statistics.returns):
            self.solved = trainer.should_stop = True
            now = time.time()
            figures = {"seconds": now - self.began, "seconds_from_launch": now - self.launched, "env_steps": pl_module.env_steps}
            print("\n" + json.dumps(figures), flush=True)
