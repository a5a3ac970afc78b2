"""Ending a run before its length is used up."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from lightning_rl.errors import SettingError, check_range, nearest


class StopOnEvaluation(pl.Callback):
    """Stops when an evaluation reaches a goal, or when none has improved for a while.

    Args:
        stop_at: the goal for the monitored metric; None has none.
        patience: stop after so many evaluations in a row that do not beat the best before them (a tie does not); None never does.
        monitor: the evaluation's metric.
    """

    def __init__(self, stop_at: float | None = None, patience: int | None = None, monitor: str = "eval/mean_reward") -> None:
        if patience is not None:
            check_range("evaluation.patience", patience, 1, whole=True)
        self.stop_at = float("inf") if stop_at is None else stop_at
        self.patience = float("inf") if patience is None else patience
        self.monitor = monitor

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.best, self.since_best = -float("inf"), 0

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Decide from this evaluation, which is the same on all ranks."""
        value = metrics[self.monitor]
        self.since_best = 0 if value > self.best else self.since_best + 1
        self.best = max(self.best, value)
        if value >= self.stop_at or self.since_best >= self.patience:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "since_best": self.since_best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.since_best = state_dict["best"], state_dict["since_best"]


def early_stopping(trainer: pl.Trainer) -> list[Any]:
    """Return each of Lightning's `EarlyStopping` callbacks, of either of its packages."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if hasattr(each, "_check_on_train_epoch_end")]


def monitors_evaluations(callback: Any) -> bool:
    """Return whether an `EarlyStopping` waits for what evaluations find."""
    return callback.monitor.startswith(("eval/", "val/"))


def follow_evaluations(trainer: pl.Trainer, evaluated: bool) -> None:
    """Let `EarlyStopping` wait for evaluations: to Lightning a run is one epoch, at the end of which it would look once.

    Args:
        trainer: has the callbacks.
        evaluated: whether the run has evaluations.

    Raises:
        SettingError: it would never stop the run: nothing evaluates, or it waits for the end of an epoch that is the end of the run.
    """
    for callback in early_stopping(trainer):
        if monitors_evaluations(callback) and evaluated:
            callback._check_on_train_epoch_end = False
        elif monitors_evaluations(callback) or trainer.limit_train_batches == 1.0:
            reason = "a run is one epoch" if evaluated else "this run has no evaluations"
            way_out = "monitor eval/mean_reward of an evaluation, or use evaluation.patience"
            raise SettingError(f"EarlyStopping: monitor {callback.monitor!r} would stop nothing, since {reason}; {way_out}")


def stop_early(trainer: pl.Trainer, algorithm: Any, metrics: dict[str, float]) -> None:
    """Let `EarlyStopping` decide from an evaluation.

    Raises:
        SettingError: it monitors what evaluations do not find.
    """
    for callback in filter(monitors_evaluations, early_stopping(trainer)):
        if callback.monitor in metrics:
            callback.on_validation_end(trainer, algorithm)
        elif callback.strict:
            monitor = callback.monitor
            raise SettingError(f"EarlyStopping: monitor {monitor!r} is not what evaluations find{nearest(monitor, metrics)}")
