"""What goes with every iteration of an algorithm, whatever Trainer runs it."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl


class EndIteration(pl.Callback):
    """The first of all callbacks: those behind it judge and save a finished iteration."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.end_iteration()


class CloseEnvironments(pl.Callback):
    """Lightning tears nothing down after an exception; environments with processes must still be closed."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        pl_module.teardown("fit")
