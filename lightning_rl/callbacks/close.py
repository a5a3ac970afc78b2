"""Closing what Lightning leaves open."""

from __future__ import annotations

import pytorch_lightning as pl


class CloseEnvironments(pl.Callback):
    """Lightning tears nothing down after an exception; environments with processes must still be closed."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        pl_module.teardown("fit")
