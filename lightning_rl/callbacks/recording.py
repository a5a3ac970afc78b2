"""Demonstrations from the evaluations of a run."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytorch_lightning as pl

from lightning_rl.callbacks.disk import going_on
from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.demonstrations.recorder import RecordEpisodes, in_order
from lightning_rl.demonstrations.saving import save_demonstrations
from lightning_rl.demonstrations.store import dataset_id, new_folder
from lightning_rl.errors import SettingError


class RecordDemonstrations(pl.Callback):
    """Saves the episodes of the best evaluation of the run as a Minari dataset, so that at its end it holds the best there were.

    It is replaced whenever an evaluation is at least as good as all before it, as `best.ckpt` is. `evaluation.episodes` says how many
    episodes there are.

    Args:
        dataset: its id, such as `cartpole/expert-v0`; Minari's folder is `MINARI_DATASETS_PATH`.
        force: replace a dataset of that id which another run has left.
        monitor: the evaluation's metric.
    """

    def __init__(self, dataset: str, force: bool = False, monitor: str = "eval/mean_reward") -> None:
        self.dataset, self.force, self.monitor = dataset_id(dataset), force, monitor
        self.recorders: list[RecordEpisodes] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.best, self.continues = -float("inf"), False
        found = [callback for callback in trainer.callbacks if isinstance(callback, RolloutEvaluator)]  # type: ignore[attr-defined]
        if not found:
            raise SettingError("RecordDemonstrations records evaluations, and this run has none: leave evaluation as it is")
        for evaluator in (each for callback in found for each in getattr(callback, "evaluators", [callback])):
            if self.record not in evaluator.wrappers:
                evaluator.wrappers.append(self.record)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.recorders.clear()
        if trainer.is_global_zero:
            new_folder(self.dataset, self.force or self.continues)

    def record(self, env: gym.Env) -> gym.Env:
        """An environment whose episodes are kept until the end of the evaluation."""
        self.recorders.append(RecordEpisodes(env))
        return self.recorders[-1]

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Save if this evaluation is the best one."""
        recorders, self.recorders = self.recorders, []
        if metrics[self.monitor] >= self.best:
            self.best = metrics[self.monitor]
            for recorder in recorders:  # on rank 0 alone
                recorder.cut()
            if recorders:
                with going_on(pl_module, f"dataset {self.dataset}"):
                    name = type(pl_module).__name__
                    save_demonstrations(self.dataset, in_order(recorders), recorders[0].env, algorithm=name, force=True)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.continues = state_dict["best"], True
