"""What goes with every iteration and every run of an algorithm, whatever Trainer runs it."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from lightning_rl.callbacks.curriculum import Curriculum
from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.callbacks.stopping import follow_evaluations
from lightning_rl.errors import SettingError

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class EndIteration(pl.Callback):
    """The first of all callbacks: those behind it judge and save a finished iteration."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.precision not in PRECISIONS:
            raise SettingError(f"trainer.precision {trainer.precision}: returns need float32; use one of {', '.join(PRECISIONS)}")
        first = [self, *(each for each in trainer.callbacks if isinstance(each, Curriculum))]
        trainer.callbacks = [*first, *(each for each in trainer.callbacks if each not in first)]
        follow_evaluations(trainer, any(isinstance(each, RolloutEvaluator) for each in trainer.callbacks))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.end_iteration()


class EndRun(pl.Callback):
    """Ends a run, also after an exception, and knows which callbacks the Trainer had before it.

    Lightning tears nothing down after an exception, though environments with processes must be closed, and leaves the callbacks of a model
    to the models after it. They stay until the next one comes: a checkpoint that is saved after the run, or at an exception, holds their
    state.

    Args:
        before: the Trainer's callbacks without those of the model.
    """

    def __init__(self, before: list[pl.Callback]) -> None:
        self.before = self.during = before

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.during = list(trainer.callbacks)
        pl_module.end_run()


def callbacks_before(callbacks: list[pl.Callback]) -> list[pl.Callback]:
    """Return a Trainer's callbacks without those of the model before; what was added or taken away since its run stays so."""
    last = next((each for each in callbacks if isinstance(each, EndRun)), None)
    if last is None:
        return list(callbacks)
    taken = [each for each in last.during if each not in callbacks]
    return [each for each in last.before if each not in taken] + [each for each in callbacks if each not in last.during]
