"""What the tests ported from Lightning share: both Trainers, quiet, and evaluations that find what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from lightning_rl import Trainer
from tests.callbacks.evaluations import Scores

KINDS = [Trainer, pl.Trainer]


def trainer_of(kind: type[pl.Trainer], folder: Path, returns: list[float], *callbacks: pl.Callback, **flags: Any) -> pl.Trainer:
    """Return a Trainer whose evaluations, one an iteration of a tiny model, find these returns."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "max_epochs": -1}
    if kind is Trainer:
        quiet["checkpoint"] = None
    return kind(default_root_dir=folder, callbacks=[Scores(returns), *callbacks], **(quiet | flags))
