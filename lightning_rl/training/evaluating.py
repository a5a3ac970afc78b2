"""`validate`, `test` and `predict` of a Trainer: play episodes with an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.types import EVAL_DATALOADERS

from lightning_rl.callbacks.evaluation import RolloutEvaluator, metrics_of
from lightning_rl.callbacks.protocols import callbacks_of
from lightning_rl.data.episodes import Episode
from lightning_rl.errors import SettingError
from lightning_rl.loggers import show_to_callbacks
from lightning_rl.threads import torch_threads
from lightning_rl.training.loading import best_of, check_weights, read_checkpoint
from lightning_rl.training.run import Run


class EvaluatingTrainer(pl.Trainer):
    """Lightning's Trainer whose `validate`, `test` and `predict` play episodes where the module is an algorithm."""

    torch_threads: int | None = None
    """CPU threads for torch; None: one for episodes."""

    def validate(
        self,
        model: pl.LightningModule | None = None,
        dataloaders: EVAL_DATALOADERS | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: pl.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Play the episodes of an evaluation of the run. Return their metrics, `eval/mean_reward` and others, in a list of one.

        No hooks are called, and neither `validate` of the algorithm nor the variants of the environment that callbacks add.

        Args:
            model: the algorithm; default: that of the last `fit`.
            dataloaders, verbose, datamodule, weights_only: Lightning's, for modules that are no algorithms.
            ckpt_path: a checkpoint, a run's folder, or `best` or `last` of the last `fit`: the algorithm takes its weights first.
        """
        judged = self._judged(model, ckpt_path, dataloaders, datamodule)
        if judged is None:
            return super().validate(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)
        return [self._remember(metrics_of(self._play(self._evaluator(), judged)))]

    def test(
        self,
        model: pl.LightningModule | None = None,
        dataloaders: EVAL_DATALOADERS | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: pl.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Play 100 episodes that no evaluation of a run has seen, as `lightning-rl evaluate` does. Return metrics as `validate` does,
        `test/mean_reward` and others; arguments as there.
        """
        judged = self._judged(model, ckpt_path, dataloaders, datamodule)
        if judged is None:
            return super().test(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)
        return [self._remember(metrics_of(self._play(RolloutEvaluator(episodes=100, seed=20_000), judged), "test"))]

    def predict(
        self,
        model: pl.LightningModule | None = None,
        dataloaders: EVAL_DATALOADERS | None = None,
        datamodule: pl.LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Episode] | None:
        """Play the episodes of an evaluation, and return them as `Episode`s; arguments as in `validate`."""
        judged = self._judged(model, ckpt_path, dataloaders, datamodule)
        if judged is None:
            return super().predict(model, dataloaders, datamodule, return_predictions, ckpt_path, weights_only)  # type: ignore[return-value]
        return self._play(self._evaluator(), judged)

    def _judged(self, model: pl.LightningModule | None, ckpt_path: str | Path | None, *data: object) -> Run | None:
        """Return the algorithm to play, with the weights of a checkpoint, which it keeps; None for a module that is no algorithm.

        Raise `SettingError` if it is given `data`, which are for other modules.
        """
        judged = self.lightning_module if model is None else model
        if not isinstance(judged, Run):
            return None
        if any(each is not None for each in data):
            raise SettingError(f"{type(judged).__name__} is judged by episodes of its environment: give no dataloaders and no datamodule")
        if ckpt_path is not None:
            path = best_of(self.saved(ckpt_path))
            weights = read_checkpoint(path)["state_dict"]
            check_weights(weights, judged.state_dict(), path)
            judged.load_state_dict(weights)
        return judged

    def saved(self, ckpt_path: str | Path) -> str | Path:
        """Return the file that `best` or `last` stands for, or the path itself; raise `SettingError` if the last `fit` saved none.

        Of several callbacks it is the first one's, before all one that saves by a metric.
        """
        if ckpt_path not in ("best", "last"):
            return ckpt_path
        savers = sorted(self.checkpoint_callbacks, key=lambda each: getattr(each, "monitor", None) is None)
        found = next((path for each in savers if (path := getattr(each, f"{ckpt_path}_model_path", ""))), None)
        if found is None:
            raise SettingError(f"ckpt_path {ckpt_path}: this Trainer has saved none; fit first, or name a file")
        return found

    def _evaluator(self) -> RolloutEvaluator:
        """Return the evaluator of runs, without the wrappers that callbacks put around its environments."""
        evaluator = copy(next(iter(callbacks_of(self, RolloutEvaluator)), None) or RolloutEvaluator())
        evaluator.wrappers = []
        return evaluator

    def _play(self, evaluator: RolloutEvaluator, model: Any) -> list[Episode]:
        with torch_threads(self.torch_threads or 1):  # a few rows at a time wait longer for a second thread than they compute
            return evaluator.play(model.to(self.strategy.root_device))

    def _remember(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return metrics, which `callback_metrics` holds too."""
        show_to_callbacks(self, metrics)
        return metrics
