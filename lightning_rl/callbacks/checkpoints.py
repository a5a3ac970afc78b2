"""Which weights to keep: the best, the last, and a few on the way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint

from lightning_rl.errors import check_range


@dataclass(frozen=True)
class CheckpointConfig:
    """What to keep on the way, beside `best.ckpt` and `last.ckpt`.

    Args:
        every_n_env_steps: environment steps between saves of `last.ckpt`; 2 % of the run unless given.
        keep: how many numbered copies to keep, the newest; -1 keeps all.
    """

    every_n_env_steps: int | None = None
    keep: int = 0


class BestModel(Checkpoint):
    """Saves `best.ckpt` after each evaluation that beats all before it; a tie does not.

    Args:
        folder: where to save; `checkpoints` of the run's folder unless given.
        monitor: the evaluation's metric.
    """

    def __init__(self, folder: Path | None = None, monitor: str = "eval/mean_reward") -> None:
        self.folder, self.monitor = folder, monitor

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.best = -float("inf")

    @property
    def path(self) -> Path:
        """Where the best weights lie."""
        assert self.folder is not None
        return self.folder / "best.ckpt"

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Save if this evaluation is the best one."""
        if metrics[self.monitor] > self.best:
            self.best = metrics[self.monitor]
            trainer.save_checkpoint(self.path, weights_only=False)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]


class SaveCheckpoints(Checkpoint):
    """Saves `last.ckpt` every `every_n_env_steps` environment steps and at the end, and numbered copies on request.

    Args:
        every_n_env_steps: environment steps between saves; 2 % of the run unless given.
        keep: how many copies `env_steps=<n>.ckpt` to keep beside `last.ckpt`, the newest; -1 keeps all.
        folder: where to save; `checkpoints` of the run's folder unless given.
    """

    def __init__(self, every_n_env_steps: int | None = None, keep: int = 0, folder: Path | None = None) -> None:
        if every_n_env_steps is not None:
            check_range("checkpoint.every_n_env_steps", every_n_env_steps, 1, whole=True)
        check_range("checkpoint.keep", keep, -1, whole=True)
        self.every_n_env_steps, self.keep, self.folder = every_n_env_steps, keep, folder
        self.saved_at = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.saved_at = pl_module.env_steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        every = self.every_n_env_steps or max(1, pl_module.max_env_steps // 50)
        if pl_module.env_steps // every > self.saved_at // every:
            self.save(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.save(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):  # whoever stops a run wants to keep it
            self.save(trainer, pl_module)

    def save(self, trainer: pl.Trainer, algorithm: Any) -> None:
        """Save now, and forget copies beyond `keep`."""
        assert self.folder is not None
        self.saved_at = algorithm.env_steps
        trainer.save_checkpoint(self.folder / "last.ckpt", weights_only=False)
        if self.keep:
            trainer.save_checkpoint(self.folder / f"env_steps={algorithm.env_steps}.ckpt", weights_only=False)
        copies = sorted(self.folder.glob("env_steps=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
        for old in copies[: -self.keep] if self.keep > 0 and trainer.is_global_zero else []:
            old.unlink()
