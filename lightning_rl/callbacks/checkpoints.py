"""Which weights to keep: the best, the last, and a few on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint

from lightning_rl.data.replay_dataset import ReplayDataset
from lightning_rl.errors import check_range
from lightning_rl.saving.segments import SegmentStore, size_of

SAVED_UNASKED = 4e9
"""Bytes of a replay buffer that are saved without being asked for."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What to keep on the way, beside `best.ckpt` and `last.ckpt`.

    Args:
        every_n_env_steps: environment steps between saves of `last.ckpt`; 2 % of the run unless given.
        keep: how many numbered copies to keep, the newest; -1 keeps all.
        save_replay_buffer: whether `last.ckpt` holds the replay buffer; up to 4 GB unless given.
    """

    every_n_env_steps: int | None = None
    keep: int = 0
    save_replay_buffer: bool | None = None


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
            pl_module.saves_run = False
            try:
                save_checkpoint(trainer, self.path)
            finally:
                pl_module.saves_run = True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]


class SaveCheckpoints(Checkpoint):
    """Saves `last.ckpt` every `every_n_env_steps` environment steps and at the end, and numbered copies on request.

    Args:
        every_n_env_steps: environment steps between saves; 2 % of the run unless given.
        keep: how many copies `env_steps=<n>.ckpt` to keep beside `last.ckpt`, the newest, without a replay buffer; -1 keeps all.
        folder: where to save; `checkpoints` of the run's folder unless given.
        save_replay_buffer: whether `last.ckpt` holds the replay buffer; up to 4 GB unless given.
    """

    def __init__(
        self,
        every_n_env_steps: int | None = None,
        keep: int = 0,
        folder: Path | None = None,
        save_replay_buffer: bool | None = None,
    ) -> None:
        if every_n_env_steps is not None:
            check_range("checkpoint.every_n_env_steps", every_n_env_steps, 1, whole=True)
        check_range("checkpoint.keep", keep, -1, whole=True)
        self.every_n_env_steps, self.keep, self.folder = every_n_env_steps, keep, folder
        self.save_replay_buffer = save_replay_buffer
        self.saved_at = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.saved_at = pl_module.env_steps
        self.folder = trainer.strategy.broadcast(self.folder)
        if not pl_module.collector.stepper.can_be_saved:
            name = pl_module.collector.stepper.name
            pl_module.say(
                f"{name} cannot be saved in the middle of an episode: a run that continues begins new ones (see README: own get_state)"
            )
        if isinstance(pl_module.dataset, ReplayDataset) and self._saves_buffer(pl_module):
            pl_module.dataset.store = SegmentStore(self._place("last.ckpt.d") / f"rank{trainer.global_rank}")

    def _saves_buffer(self, algorithm: Any) -> bool:
        buffer = algorithm.dataset.buffer
        size = size_of(buffer, min(buffer.length * len(buffer.envs), algorithm.max_env_steps // algorithm.trainer.world_size))
        if self.save_replay_buffer is None and size > SAVED_UNASKED:
            algorithm.say(
                f"the replay buffer of {size / 1e9:.1f} GB is not saved, and a run that is continued has to fill it again; "
                "--checkpoint.save_replay_buffer true saves it"
            )
            return False
        return self.save_replay_buffer is not False

    def _place(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / name

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        every = self.every_n_env_steps or max(1, pl_module.max_env_steps // 50)
        if pl_module.env_steps // every > self.saved_at // every:
            self.save(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.save(trainer, pl_module)

    def save(self, trainer: pl.Trainer, algorithm: Any) -> None:
        """Save now, and forget copies beyond `keep`."""
        self.saved_at = algorithm.env_steps
        algorithm.dataset.end_save(attempt(trainer, algorithm.dataset.begin_save) and save_checkpoint(trainer, self._place("last.ckpt")))
        if self.keep:
            save_checkpoint(trainer, self._place(f"env_steps={algorithm.env_steps}.ckpt"))
        copies = sorted(self._place("").glob("env_steps=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
        for old in copies[: -self.keep] if self.keep > 0 and trainer.is_global_zero else []:
            trainer.strategy.checkpoint_io.remove_checkpoint(old)


def save_checkpoint(trainer: Any, path: Path) -> bool:
    """Whether a checkpoint could be saved."""
    return attempt(trainer, partial(trainer.save_checkpoint, path, weights_only=False), trainer.strategy.barrier)


def attempt(trainer: Any, save: Callable[[], Any], otherwise: Callable[[], Any] = lambda: None) -> bool:
    """Whether something could be saved on all ranks; where the disk refuses, one line says so and the run goes on.

    `otherwise` is called on the ranks where it could not.
    """
    try:
        save()
        saved = True
    except OSError as error:
        otherwise()  # the barrier that the other ranks wait at
        saved = False
        trainer.lightning_module.say(f"{error}; the run goes on, with what was saved before")
    return saved if trainer.world_size == 1 else bool(trainer.strategy.reduce_boolean_decision(saved, all=True))
