"""Which weights to keep: the best, the last, and a few on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint

from lightning_rl.checkpoints.segments import SegmentStore, size_of
from lightning_rl.data.dataset import ReplayDataset
from lightning_rl.errors import SettingError, check_choice, check_range, nearest

COUNTERS = ("env_steps", "updates")


def check_interval(section: str, callback: Any, algorithm: Any) -> None:
    """Raise `SettingError` for an interval in what the algorithm's runs do not count."""
    for counter in COUNTERS:
        if counter != algorithm.counter and getattr(callback, f"every_n_{counter}") is not None:
            name, right = type(algorithm).__name__, f"{section}.every_n_{algorithm.counter}"
            raise SettingError(f"{section}.every_n_{counter}: a run of {name} counts {algorithm.counted}; use {right}")


def interval(callback: Any, algorithm: Any, parts: int) -> int:
    """What the callback was told, or one of so many parts of the run."""
    return getattr(callback, f"every_n_{algorithm.counter}") or max(1, algorithm.length // parts)


SAVED_UNASKED = 4e9
"""Bytes of a replay buffer that are saved without being asked for."""
SECONDS = 5.0
"""Between saves whose distance nobody asked for: one of SAC takes 19 ms, which once a second would be 3 % of a short run."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What to keep on the way, beside `best.ckpt` and `last.ckpt`.

    Args:
        every_n_env_steps: environment steps between saves of `last.ckpt`; 2 % of the run, and at least five seconds unless copies are kept.
        keep: how many numbered copies to keep, the newest; -1 keeps all.
        save_replay_buffer: whether `last.ckpt` holds the replay buffer; up to 4 GB unless given.
        every_n_updates: the same as `every_n_env_steps` for runs that count updates.
        monitor: which metric of an evaluation says that `best.ckpt` is the best.
        mode: whether that is where it is greatest, `max`, or least, `min`; unless given `min` for a loss, `max` for all else.
    """

    every_n_env_steps: int | None = None
    keep: int = 0
    save_replay_buffer: bool | None = None
    every_n_updates: int | None = None
    monitor: str = "eval/mean_reward"
    mode: Literal["max", "min"] | None = None


class BestModel(Checkpoint):
    """Save `best.ckpt` after each evaluation that is at least as good as all before it; of equal ones the newest has learned longest.

    One that is deleted during the run is followed by the best since.

    Args:
        folder: where to save; `checkpoints` of the run's folder unless given.
        monitor: the evaluation's metric.
        mode: whether to save where it is greatest, `max`, or least, `min`; unless given `min` for a loss, `max` for all else.
    """

    def __init__(self, folder: Path | None = None, monitor: str = "eval/mean_reward", mode: Literal["max", "min"] | None = None) -> None:
        check_choice("checkpoint.mode", mode or "max", ("max", "min"))
        if not isinstance(monitor, str):
            raise SettingError(f"checkpoint.monitor must be the name of a metric such as eval/mean_reward, got {monitor!r}")
        self.folder, self.monitor = folder, monitor
        self.mode = mode or ("min" if monitor.endswith("loss") else "max")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.best, self.has_saved = -float("inf"), self.path.is_file()

    @property
    def path(self) -> Path:
        """Where the best weights lie."""
        assert self.folder is not None
        return self.folder / "best.ckpt"

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Save if this evaluation is the best one.

        Raises:
            SettingError: there is no metric of that name.
        """
        if self.monitor not in metrics:
            raise SettingError(f"checkpoint.monitor {self.monitor!r} is not what evaluations find{nearest(self.monitor, metrics)}")
        score = metrics[self.monitor] if self.mode == "max" else -metrics[self.monitor]
        was_deleted = trainer.strategy.broadcast(self.has_saved and not self.path.is_file())
        if score >= self.best or was_deleted:
            self.best = score
            pl_module.saves_run = False
            try:
                self.has_saved = save_checkpoint(trainer, self.path)
            finally:
                pl_module.saves_run = True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "goal": f"{self.mode} {self.monitor}"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("goal", "max eval/mean_reward") == f"{self.mode} {self.monitor}":
            self.best = state_dict["best"]


class SaveCheckpoints(Checkpoint):
    """Saves `last.ckpt` every `every_n_env_steps` environment steps (or updates) and at the end, and numbered copies on request.

    Args:
        every_n_env_steps: environment steps between saves; 2 % of the run, and at least five seconds unless copies are kept, unless given.
        keep: how many copies `env_steps=<n>.ckpt` to keep beside `last.ckpt`, the newest, without a replay buffer; -1 keeps all.
        folder: where to save; `checkpoints` of the run's folder unless given.
        save_replay_buffer: whether `last.ckpt` holds the replay buffer; up to 4 GB unless given.
        every_n_updates: the same as `every_n_env_steps` for runs that count updates.
    """

    def __init__(
        self,
        every_n_env_steps: int | None = None,
        keep: int = 0,
        folder: Path | None = None,
        save_replay_buffer: bool | None = None,
        every_n_updates: int | None = None,
    ) -> None:
        for name, every in {"every_n_env_steps": every_n_env_steps, "every_n_updates": every_n_updates}.items():
            if every is not None:
                check_range(f"checkpoint.{name}", every, 1, whole=True)
        check_range("checkpoint.keep", keep, -1, whole=True)
        self.every_n_env_steps, self.every_n_updates = every_n_env_steps, every_n_updates
        self.keep, self.folder = keep, folder
        self.save_replay_buffer = save_replay_buffer
        self.saved_at, self.saved_when = 0, 0.0

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        check_interval("checkpoint", self, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.saved_at, self.saved_when = pl_module.count, time.monotonic()
        self.folder = trainer.strategy.broadcast(self.folder)
        if not pl_module.collector.can_be_saved:
            name = pl_module.collector.name
            pl_module.say(
                f"{name} cannot be saved in the middle of an episode: a run that continues begins new ones (see docs/runs.md: get_state)"
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
        every = interval(self, pl_module, 50)
        if pl_module.count // every > self.saved_at // every and (self._is_punctual or self._is_long_ago(trainer)):
            self.save(trainer, pl_module)

    @property
    def _is_punctual(self) -> bool:
        """Whether somebody counts on saves at certain steps."""
        return bool(self.every_n_env_steps or self.every_n_updates or self.keep)

    def _is_long_ago(self, trainer: pl.Trainer) -> bool:
        """Whether the last save is, by the clock of the first rank."""
        long_ago = time.monotonic() - self.saved_when >= SECONDS
        return long_ago if trainer.world_size == 1 else bool(trainer.strategy.broadcast(long_ago))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.save(trainer, pl_module)

    def save(self, trainer: pl.Trainer, algorithm: Any) -> None:
        """Save now, and forget copies beyond `keep`."""
        self.saved_at, self.saved_when = algorithm.count, time.monotonic()
        algorithm.dataset.end_save(attempt(trainer, algorithm.dataset.begin_save) and save_checkpoint(trainer, self._place("last.ckpt")))
        if self.keep:
            save_checkpoint(trainer, self._place(f"{algorithm.counter}={algorithm.count}.ckpt"))
        copies = sorted(self._place("").glob(f"{algorithm.counter}=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
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
