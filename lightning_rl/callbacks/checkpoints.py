"""Save checkpoints during a run: the best weights, the last, and numbered copies."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from torch import Tensor

from lightning_rl.callbacks import AlgorithmRun, callbacks_of
from lightning_rl.callbacks.self_play import SelfPlay
from lightning_rl.callbacks.stopping import KNOWN_METRICS, is_least_best, may_be_absent, metric_of
from lightning_rl.checkpoints.files import shown
from lightning_rl.checkpoints.validation import MEASURE, Rules, are_optimizer_states, is_finite
from lightning_rl.data.dataset import ReplayDataset
from lightning_rl.data.replay.segments import SegmentStore, size_of
from lightning_rl.errors import SettingError, UnsavedError
from lightning_rl.settings.fields import Range, read_fields
from lightning_rl.types import State

MAX_DEFAULT_BUFFER_BYTES = 4e9
"""The largest replay buffer that is saved by default."""
MIN_SECONDS_BETWEEN_SAVES = 5.0
"""Applies only if the user set no interval. Saving SAC takes 19 ms: once a second would cost 3 % of a short run."""


def interval_of(section: str, callback: pl.Callback, algorithm: AlgorithmRun, parts: int) -> int:
    """Return the callback's interval; default: the run's length / `parts`. Raise `SettingError` if the run does not count its unit."""
    for counter in {"env_steps", "updates"} - {algorithm.counter}:
        if getattr(callback, f"every_n_{counter}") is not None:
            name, right = type(algorithm).__name__, f"{section}.every_n_{algorithm.counter}"
            raise SettingError(f"{section}.every_n_{counter}: a run of {name} counts {algorithm.counted}; use {right}")
    return getattr(callback, f"every_n_{algorithm.counter}") or max(1, algorithm.length // parts)


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save `last.ckpt`, what decides about `best.ckpt`, and how many numbered copies to keep.

    Args:
        every_n_env_steps: environment steps between saves of `last.ckpt`; default: 2 % of the run, and at least five seconds between saves
            if `keep` is 0.
        keep: number of numbered copies to keep, the newest ones; -1 keeps all.
        save_replay_buffer: whether `last.ckpt` includes the replay buffer; default: only up to 4 GB.
        every_n_updates: the same as `every_n_env_steps` for runs that count updates.
        monitor: the evaluation metric that decides which weights `best.ckpt` holds.
        mode: `max` if a higher metric is better, `min` if a lower one is; default: `min` for a loss or exploitability, else `max`.
    """

    every_n_env_steps: Annotated[int, Range(1)] | None = None
    keep: Annotated[int, Range(-1)] = 0
    save_replay_buffer: bool | None = None
    every_n_updates: Annotated[int, Range(1)] | None = None
    monitor: str = "eval/mean_reward"
    mode: Literal["max", "min"] | None = None

    def __post_init__(self) -> None:
        read_fields(self, "checkpoint.")
        if not isinstance(self.monitor, str):
            raise SettingError(f"checkpoint.monitor must be the name of a metric such as eval/mean_reward, got {self.monitor!r}")
        meant = get_close_matches(self.monitor, KNOWN_METRICS, 1, 0.9)  # a name less like these may be a user's own metric
        if self.monitor.startswith("eval/") and not self.monitor.startswith(KNOWN_METRICS) and meant:
            raise SettingError(f"checkpoint.monitor {self.monitor!r} is not a metric of evaluations; did you mean {meant[0]}?")


class BestModel(Checkpoint):
    """Save `best.ckpt` after each evaluation that is at least as good as all previous ones.

    A tie goes to the newest weights, which have learned longest. If the file is deleted during the run, the next evaluation saves it again.

    Args:
        folder: where to save; default: `checkpoints` in the run's folder.
        monitor, mode: as in `CheckpointConfig`.
    """

    state_rules: ClassVar[Rules] = {"best": MEASURE}
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(self, folder: Path | None = None, monitor: str = "eval/mean_reward", mode: Literal["max", "min"] | None = None) -> None:
        config = CheckpointConfig(monitor=monitor, mode=mode)
        self.folder, self.monitor, self.best = folder, config.monitor, -math.inf
        self.best_model_path = ""
        """Path of the best weights; empty before the first save. Lightning also sets it, after a run in processes that it spawned."""
        self.mode = mode or ("min" if is_least_best(monitor) else "max")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.folder = self.folder or Path(trainer.default_root_dir) / "checkpoints"  # with Lightning's own Trainer
        self.best, self.has_saved = -float("inf"), self.path.is_file()
        self.best_model_path = str(self.path) if self.has_saved else ""

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        self.has_saved = trainer.strategy.broadcast(self.has_saved)  # as rank 0 found it
        self.best_model_path = str(self.path) if self.has_saved else ""

    @property
    def path(self) -> Path:
        """Return the path of the best weights."""
        assert self.folder is not None
        return self.folder / "best.ckpt"

    # attributes of a `ModelCheckpoint` that Lightning, its loggers and their users read

    save_top_k, save_last = 1, True

    @property
    def best_model_score(self) -> Tensor | None:
        """Return the best value of the monitored metric so far."""
        return torch.tensor(self.best if self.mode == "max" else -self.best) if math.isfinite(self.best) else None

    current_score = best_model_score

    @property
    def last_model_path(self) -> str:
        """Return the path of the run's newest checkpoint; empty if there is none."""
        last = None if self.folder is None else self.folder / "last.ckpt"
        return str(last) if last is not None and last.is_file() else ""

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, metrics: dict[str, float]) -> None:
        """Save if this evaluation is the best so far.

        Raise `SettingError` if evaluations have no metric of the monitored name; what was learned is saved first.
        """
        if self.monitor not in metrics and not may_be_absent(trainer, self.monitor):
            savers = callbacks_of(trainer, SaveCheckpoints)
            for saver in savers:
                saver.save(trainer, pl_module)
            if not savers and self.folder is not None:
                save_checkpoint(trainer, pl_module, self.folder / "last.ckpt")
        value = metric_of(metrics, self.monitor, "checkpoint.monitor", trainer)
        if value is None:
            return
        score = value if self.mode == "max" else -value
        was_deleted = trainer.strategy.broadcast(self.has_saved and not self.path.is_file())
        if score >= self.best or was_deleted:
            before, self.best, saved = self.best, -math.inf if math.isnan(score) else score, False
            pl_module.run.saves_run = False
            try:
                saved = save_checkpoint(trainer, pl_module, self.path)
            finally:
                pl_module.run.saves_run = True
                self.best, self.has_saved = (self.best, True) if saved else (before, self.has_saved)
            if saved:
                self.best_model_path = str(self.path)
                notify_loggers(trainer)

    def on_environment_changed(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Reset the best score, which is that of another task.

        The next evaluation replaces `best.ckpt` and keeps it as the previous generation.
        """
        self.best = -math.inf

    def state_dict(self) -> State:
        return {"best": self.best, "goal": f"{self.mode} {self.monitor}"}

    def load_state_dict(self, state_dict: State) -> None:
        if state_dict.get("goal", "max eval/mean_reward") == f"{self.mode} {self.monitor}":
            self.best = state_dict["best"]


class SaveCheckpoints(Checkpoint):
    """Save `last.ckpt` every `every_n_env_steps` environment steps (or updates) and at the end of the run, and numbered copies on request.

    Args:
        every_n_env_steps, save_replay_buffer, every_n_updates: as in `CheckpointConfig`.
        keep: number of copies `env_steps=<n>.ckpt` to keep next to `last.ckpt`: the newest, without a replay buffer; -1 keeps all.
        folder: where to save; default: `checkpoints` in the run's folder.
    """

    def __init__(
        self,
        every_n_env_steps: int | None = None,
        keep: int = 0,
        folder: Path | None = None,
        save_replay_buffer: bool | None = None,
        every_n_updates: int | None = None,
    ) -> None:
        config = CheckpointConfig(every_n_env_steps, keep, save_replay_buffer, every_n_updates)
        self.every_n_env_steps, self.every_n_updates = config.every_n_env_steps, config.every_n_updates
        self.keep, self.folder, self.save_replay_buffer = config.keep, folder, config.save_replay_buffer
        self.min_seconds = 0.0 if every_n_env_steps or every_n_updates or keep else MIN_SECONDS_BETWEEN_SAVES
        self.tried_at, self.tried_when, self.count_at_start, self.saved_at, self.has_begun = 0, 0.0, 0, 0, False

    def setup(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        self.folder = self.folder or Path(trainer.default_root_dir) / "checkpoints"
        self.interval, self.has_begun = interval_of("checkpoint", self, pl_module, 50), False

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        self.tried_at, self.tried_when = pl_module.count, time.monotonic()
        self.count_at_start = self.saved_at = pl_module.count
        self.warns = not pl_module.collector.can_be_saved
        for name, dataset in getattr(pl_module.dataset, "datasets", {"": pl_module.dataset}).items():
            learner = pl_module.run.algorithms[name]
            if isinstance(dataset, ReplayDataset) and self._saves_buffer(learner, dataset):
                dataset.store = SegmentStore(self._path("last.ckpt.d") / f"rank{trainer.global_rank}" / name)
        for past_selves in callbacks_of(trainer, SelfPlay) if trainer.is_global_zero else ():
            past_selves.store_in(self._path("last.ckpt.d"))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun, batch: object, batch_idx: int) -> None:
        """Note that the run has begun, and warn if a resumed run would lose episodes; an unusable environment has failed before."""
        self.has_begun = True
        if self.warns:
            what = f"{pl_module.collector.name} cannot be saved in the middle of an episode"
            way_out = "" if getattr(pl_module.env, "is_unity", False) else " (see docs/runs.md: get_state)"
            pl_module.say(f"{what}: a resumed run starts new episodes{way_out}")
            self.warns = False

    def _saves_buffer(self, algorithm: AlgorithmRun, dataset: ReplayDataset) -> bool:
        rows = min(dataset.buffer.length * len(dataset.buffer.envs), algorithm.max_env_steps // algorithm.trainer.world_size)
        size = size_of(dataset.buffer, rows)
        if self.save_replay_buffer is None and size > MAX_DEFAULT_BUFFER_BYTES:
            algorithm.say(
                f"the replay buffer of {size / 1e9:.1f} GB is not saved, so a resumed run has to fill it again; "
                "--checkpoint.save_replay_buffer true saves it"
            )
            return False
        return self.save_replay_buffer is not False

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / name

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, outputs: object, batch: object, batch_idx: int) -> None:
        due = pl_module.count // self.interval > self.tried_at // self.interval
        if due and self.min_seconds:  # by rank 0's clock
            due = trainer.strategy.broadcast(time.monotonic() - self.tried_when >= self.min_seconds)
        if due:
            self.save(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        self.save(trainer, pl_module, continues=False)

    def check_saved(self, algorithm: AlgorithmRun) -> None:
        """Raise `UnsavedError` after a run of this process if `last.ckpt` does not hold its newest weights."""
        last = self._path("last.ckpt")
        unsaved = algorithm.count - (self.saved_at if last.is_file() else self.count_at_start)
        if self.has_begun and unsaved:
            what = f"{unsaved:,} of {algorithm.count:,} {algorithm.counted} are lost: {shown(last)} could not be saved"
            raise UnsavedError(f"{what}; make room there, or set another trainer.default_root_dir")

    def save(self, trainer: pl.Trainer, algorithm: AlgorithmRun, continues: bool = True) -> None:
        """Save now, and delete the oldest copies beyond `keep`. `continues`: whether the run does."""
        self.tried_at, self.tried_when = algorithm.count, time.monotonic()
        parts: list[Any] = [algorithm.dataset, *callbacks_of(trainer, SelfPlay)]
        saved = try_saving(trainer, algorithm, lambda: [part.begin_save() for part in parts], continues=continues)
        saved = saved and save_checkpoint(trainer, algorithm, self._path("last.ckpt"), continues)
        for part in parts:
            part.end_save(saved)
        if saved:
            self.saved_at = algorithm.count
            notify_loggers(trainer)
        if self.keep:
            save_checkpoint(trainer, algorithm, self._path(f"{algorithm.counter}={algorithm.count}.ckpt"))
        if self.keep > 0 and trainer.is_global_zero:
            counts = {path.stem.partition("=")[2]: path for path in self._path("").glob(f"{algorithm.counter}=*.ckpt")}
            copies = sorted((name for name in counts if name.isdecimal()), key=int)  # not renamed ones
            for old in (counts[name] for name in copies[: -self.keep]):
                trainer.strategy.checkpoint_io.remove_checkpoint(old)

    def save_after_error(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Save after an error if an iteration has finished since the last save. With several ranks nothing is saved.

        If the error interrupted an iteration, or the environments cannot return their state, the gradient steps made so far are saved, and
        a resumed run starts new episodes.
        """
        if trainer.world_size > 1 or not self.has_begun:
            return
        if (algorithm.count if algorithm.dataset.is_whole else algorithm.run.began_at) <= self.saved_at:
            return
        weights, states = algorithm.state_dict().values(), [optimizer.state for optimizer in trainer.optimizers]
        if not (all(map(is_finite, weights)) and all(map(are_optimizer_states, states))):
            algorithm.say("the newest weights are NaN or infinite and are not saved")
            return
        for abandons in (False, True):
            try:
                algorithm.run.interrupt(abandons)
                self.save(trainer, algorithm, continues=False)
                return
            except Exception as error:  # the error that ended the run matters more
                reason = f"{type(error).__name__}: {error}"
        algorithm.say(f"what was learned since the last save could not be saved: {reason}")


def save_checkpoint(trainer: pl.Trainer, algorithm: AlgorithmRun, path: Path, continues: bool = True) -> bool:
    """Save a checkpoint, and return whether that succeeded."""
    return try_saving(trainer, algorithm, partial(trainer.save_checkpoint, path, weights_only=False), True, continues)


def notify_loggers(trainer: pl.Trainer) -> None:
    """Notify loggers, which may upload checkpoints, of a new best or last one."""
    best = next(iter(callbacks_of(trainer, BestModel)), None)
    if best is not None and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.after_save_checkpoint(best)  # type: ignore[arg-type]  # has the attributes of a `ModelCheckpoint`


def try_saving(
    trainer: pl.Trainer, algorithm: AlgorithmRun, save: Callable[[], object], waits: bool = False, continues: bool = True
) -> bool:
    """Run `save`, and return whether it succeeded on all ranks; report an error such as a full disk in one line.

    `waits`: the ranks wait for each other within `save`.  `continues`: whether the run does.
    """
    saved = True
    try:
        save()
    except OSError as error:
        saved = False
        if waits:
            trainer.strategy.barrier()
        algorithm.say(f"{error}{'; the run continues, and the previous save is kept' if continues else ''}")
    return saved if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(saved, all=True)
