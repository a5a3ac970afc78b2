"""`validate`, `test` and `predict` of the Trainer: play episodes with an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.types import EVAL_DATALOADERS

from lightning_rl.callbacks import callbacks_of
from lightning_rl.callbacks.evaluation import RolloutEvaluator, metrics_of
from lightning_rl.data.episodes import Episode
from lightning_rl.errors import SettingError
from lightning_rl.loggers import show_to_callbacks
from lightning_rl.training.hooks import RunModule
from lightning_rl.training.loading import best_of, check_weights, read_checkpoint
from lightning_rl.training.threads import torch_threads


class EvaluatingTrainer(pl.Trainer):
    """Lightning's Trainer, whose `validate`, `test` and `predict` play episodes if the module is an algorithm."""

    torch_threads: int | None = None
    """CPU threads for torch; None: one."""

    def validate(
        self,
        model: pl.LightningModule | None = None,
        dataloaders: EVAL_DATALOADERS | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: pl.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Play the episodes of the run's evaluation. Return their metrics, `eval/mean_reward` and others, as the only item of a list.

        This calls no hooks and not the algorithm's own `validate`, and adds no wrappers of callbacks to the environment.

        Args:
            model: the algorithm; default: that of the last `fit`.
            dataloaders, verbose, datamodule, weights_only: Lightning's, for modules that are not algorithms.
            ckpt_path: a checkpoint, a run's folder, or `best` or `last` of the last `fit`; its weights are loaded into the algorithm first.
        """
        algorithm = self._find_algorithm(model, ckpt_path, dataloaders, datamodule)
        if algorithm is None:
            return super().validate(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)
        return [self._publish(metrics_of(self._play(self._evaluator(), algorithm)))]

    def test(
        self,
        model: pl.LightningModule | None = None,
        dataloaders: EVAL_DATALOADERS | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: pl.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Play 100 episodes with seeds that evaluations during a run do not use, as in `lightning-rl evaluate`.

        Return metrics as in `validate`, `test/mean_reward` and others. Arguments as for `validate`.
        """
        algorithm = self._find_algorithm(model, ckpt_path, dataloaders, datamodule)
        if algorithm is None:
            return super().test(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)
        return [self._publish(metrics_of(self._play(RolloutEvaluator(episodes=100, seed=20_000), algorithm), "test"))]

    def predict(
        self,
        model: pl.LightningModule | None = None,
        dataloaders: EVAL_DATALOADERS | None = None,
        datamodule: pl.LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Episode] | None:
        """Play the episodes of an evaluation, and return them as `Episode`s. Arguments as for `validate`."""
        algorithm = self._find_algorithm(model, ckpt_path, dataloaders, datamodule)
        if algorithm is None:
            return super().predict(model, dataloaders, datamodule, return_predictions, ckpt_path, weights_only)  # type: ignore[return-value]
        return self._play(self._evaluator(), algorithm)

    def _find_algorithm(self, model: pl.LightningModule | None, ckpt_path: str | Path | None, *data: object) -> RunModule | None:
        """Return the algorithm to play, after loading the weights of a checkpoint into it; None for a module that is not an algorithm.

        Raise `SettingError` if there is `data`, which is for other modules.
        """
        algorithm = self.lightning_module if model is None else model
        if not isinstance(algorithm, RunModule):
            return None
        if any(loader is not None for loader in data):
            raise SettingError(f"{type(algorithm).__name__} is evaluated in its environment: give no dataloaders and no datamodule")
        if ckpt_path is not None:
            path = best_of(self.saved(ckpt_path))
            weights = read_checkpoint(path)["state_dict"]
            check_weights(weights, algorithm.state_dict(), path)
            algorithm.load_state_dict(weights)
        return algorithm

    def saved(self, ckpt_path: str | Path) -> str | Path:
        """Return the file that `best` or `last` refers to, or the path itself; raise `SettingError` if the last `fit` saved none.

        With several callbacks, the first one decides; callbacks that monitor a metric come first.
        """
        if ckpt_path not in ("best", "last"):
            return ckpt_path
        savers = sorted(self.checkpoint_callbacks, key=lambda callback: getattr(callback, "monitor", None) is None)
        saved = next((path for saver in savers if (path := getattr(saver, f"{ckpt_path}_model_path", ""))), None)
        if saved is None:
            raise SettingError(f"ckpt_path {ckpt_path}: this Trainer has saved no checkpoint; call fit first, or name a file")
        return saved

    def _evaluator(self) -> RolloutEvaluator:
        """Return the evaluator of the run, without the wrappers that callbacks add to its environments."""
        evaluator = copy(next(iter(callbacks_of(self, RolloutEvaluator)), None) or RolloutEvaluator())
        evaluator.wrappers = []
        return evaluator

    def _play(self, evaluator: RolloutEvaluator, model: Any) -> list[Episode]:
        with torch_threads(self.torch_threads or 1):  # for a few rows at a time, a second thread costs more than it saves
            return evaluator.play(model.to(self.strategy.root_device))

    def _publish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add metrics to `callback_metrics`, and return them."""
        show_to_callbacks(self, metrics)
        return metrics
