"""Stop a run early: after a good evaluation, or on a signal; check when Lightning's callbacks stop and save."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, NoReturn

import pytorch_lightning as pl

from lightning_rl.callbacks import AlgorithmRun, callbacks_of
from lightning_rl.checkpoints.validation import MEASURE, Rules
from lightning_rl.errors import SettingError, check_range, nearest, short_number
from lightning_rl.processes.children import STOPPING
from lightning_rl.types import State


class StopOnEvaluation(pl.Callback):
    """Stop when an evaluation reaches a goal, or when none has improved for a while.

    Args:
        stop_at: the goal for the monitored metric; None for no goal.
        patience: stop after this many evaluations in a row that do not beat the previous best (a tie does not beat it); None never stops.
        monitor: the evaluation metric; higher is better.
    """

    state_rules: ClassVar[Rules] = {"best": MEASURE, "since_best": MEASURE}
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(self, stop_at: float | None = None, patience: int | None = None, monitor: str = "eval/mean_reward") -> None:
        if stop_at is not None:
            check_range("evaluation.stop_at", stop_at)
        if patience is not None:
            check_range("evaluation.patience", patience, 1, whole=True)
        self.stop_at = float("inf") if stop_at is None else stop_at
        self.patience = float("inf") if patience is None else patience
        self.monitor = monitor
        self.reasons: dict[str, str] = {}
        """Why the run was stopped, by setting."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.best, self.since_best = -float("inf"), 0
        self.reasons = {}

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, metrics: dict[str, float]) -> None:
        """Decide whether to stop; the metrics are the same on all ranks."""
        value = metric_of(metrics, self.monitor, "StopOnEvaluation.monitor", trainer)
        if value is None:
            return
        self.since_best = 0 if value > self.best else self.since_best + 1
        self.best = max(self.best, value)
        at = f"at {pl_module.count:,} {pl_module.counted}"
        if value >= self.stop_at:
            self.reasons["stop_at"] = f"stop_at {self.stop_at:g}: {self.monitor} {short_number(value)} reached {at}"
        if self.since_best >= self.patience:
            self.reasons["patience"] = f"patience {self.patience}: {self.monitor} has not beaten {short_number(self.best)}, {at}"
        if self.reasons:
            trainer.should_stop = True

    def on_environment_changed(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Start the patience again: evaluations of the new task are compared only with each other."""
        self.best, self.since_best = -float("inf"), 0

    def has_stopped(self, state: State) -> bool:
        """Return whether a run whose checkpoint has this state was stopped."""
        return state["best"] >= self.stop_at or state["since_best"] >= self.patience

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best, "since_best": self.since_best}

    def load_state_dict(self, state_dict: State) -> None:
        self.best, self.since_best = state_dict["best"], state_dict["since_best"]


def why_stopped(trainer: pl.Trainer) -> dict[str, str]:
    """Return why evaluations stopped a run, by setting or callback; {} if none did."""
    reasons = {name: reason for callback in callbacks_of(trainer, StopOnEvaluation) for name, reason in callback.reasons.items()}
    messages = [(type(callback).__name__, getattr(callback, "stopping_reason_message", None)) for callback in callbacks_of(trainer, object)]
    return reasons | {name: f"{name}: {text.removesuffix(' Signaling Trainer to stop.')}" for name, text in messages if text}


def forget_reasons(trainer: pl.Trainer) -> None:
    """Forget why Lightning's callbacks stopped an earlier run."""
    for callback in callbacks_of(trainer, object):
        if getattr(callback, "stopping_reason_message", None) is not None:
            callback.stopping_reason_message = None  # type: ignore[attr-defined]


EVALUATION_METRICS = ("eval/", "val/", "val_")
KNOWN_METRICS = (
    *("eval/mean_reward", "eval/std_reward", "eval/mean_ep_length", "eval/success_rate"),
    *("eval/win_rate", "eval/draw_rate", "eval/exploitability"),
)
GREATEST_IS_BEST = ("eval/mean_reward", "eval/success_rate", "eval/win_rate")
WAITS_FOR_EPOCHS = ("_check_on_train_epoch_end", "_save_on_train_epoch_end")
"""Attributes of Lightning's `EarlyStopping` and `ModelCheckpoint`: whether they check at the end of an epoch or of a validation."""


def metric_of(metrics: Mapping[str, float], monitor: str, setting: str, trainer: pl.Trainer) -> float | None:
    """Return a metric of an evaluation; None if this evaluation lacks it but others of the run have it.

    Raises `SettingError`, with the `setting` that names the metric: evaluations have no metric of that name.
    """
    if monitor not in metrics and not may_be_absent(trainer, monitor):
        raise SettingError(f"{setting} {monitor!r} is not a metric of evaluations{nearest(monitor, metrics)}")
    return metrics.get(monitor)


def may_be_absent(trainer: pl.Trainer, monitor: str) -> bool:
    """Return whether some evaluations of a run may lack a metric, such as that of lessons."""
    return any(monitor in getattr(callback, "optional_metrics", ()) for callback in callbacks_of(trainer, object))


def is_monitored(trainer: pl.Trainer, metric: str) -> bool:
    """Return whether a callback of either package of Lightning monitors a metric."""
    return any(getattr(callback, "monitor", None) == metric for callback in callbacks_of(trainer, object))


def is_least_best(monitor: str) -> bool:
    """Return whether lower is better for a metric: for a loss, and exploitability."""
    return monitor.endswith(("loss", "exploitability"))


def is_one_epoch(trainer: pl.Trainer) -> bool:
    """Return whether a run is one epoch to Lightning; a `limit_train_batches` other than 1.0, its default, makes epochs shorter."""
    return isinstance(trainer.limit_train_batches, float) and trainer.limit_train_batches == 1.0


def monitors(trainer: pl.Trainer) -> list[tuple[Any, str]]:
    """Return the callbacks of either package of Lightning that monitor a metric, and the attribute that decides when they check it."""
    candidates = ((callback, name) for callback in callbacks_of(trainer, object) for name in WAITS_FOR_EPOCHS if hasattr(callback, name))
    return [(callback, name) for callback, name in candidates if getattr(callback, "monitor", None) is not None]


def follow_evaluations(trainer: pl.Trainer, evaluated: bool) -> None:
    """Make `EarlyStopping` and `ModelCheckpoint` check after evaluations: to Lightning a run is one epoch, so they would check only once.

    Raises:
        SettingError: evaluations lack a monitored metric; or `EarlyStopping` would never stop the run, because nothing is `evaluated` or
            because it waits for the end of the only epoch.
    """
    for callback, name in monitors(trainer):
        who, asked = type(callback).__name__, getattr(callback, name) is False  # the user asked for checks after evaluations
        follows = asked or callback.monitor.startswith(EVALUATION_METRICS)
        if follows and evaluated:
            if callback.monitor.startswith("eval/") and not callback.monitor.startswith(KNOWN_METRICS):
                hint = nearest(callback.monitor, KNOWN_METRICS)
                raise SettingError(f"{who}: monitor {callback.monitor!r} is not a metric of evaluations{hint}")
            if name == WAITS_FOR_EPOCHS[0] or getattr(callback, name) is None:  # else the user chose when to save
                setattr(callback, name, False)
            if callback.mode == "min" and callback.monitor in GREATEST_IS_BEST:
                trainer.lightning_module.say(f"{who} treats the lowest {callback.monitor} as the best; use mode='max'")  # type: ignore[operator]
        elif name == WAITS_FOR_EPOCHS[0] and (follows or is_one_epoch(trainer)):
            reason = "a run is one epoch" if evaluated else "this run has no evaluations"
            way_out = "monitor eval/mean_reward or a val/… that a hook logs in evaluations, or use evaluation.patience"
            raise SettingError(f"{who}: monitor {callback.monitor!r} would never stop the run, since {reason}; {way_out}")


def check_monitors(trainer: pl.Trainer, metrics: dict[str, float]) -> list[Any]:
    """Return Lightning's callbacks whose metric this evaluation lacks but others of the run have: they would see an old value.

    Raises `SettingError`: the evaluation lacks a metric that it should have.
    """
    absent = [monitor for monitor, _ in monitors(trainer) if monitor.monitor not in metrics and may_be_absent(trainer, monitor.monitor)]
    for callback, _ in monitors(trainer):
        strict = getattr(callback, "strict", False) and callback.monitor.startswith(EVALUATION_METRICS)
        if strict and callback.monitor not in metrics and callback not in absent:
            who, hint = type(callback).__name__, nearest(callback.monitor, metrics)
            raise SettingError(f"{who}: monitor {callback.monitor!r} is not a metric of evaluations{hint}")
    return absent


def check_savers(trainer: pl.Trainer) -> None:
    """Raise `SettingError` for a `ModelCheckpoint` of Lightning that would never save or never compare."""
    for saver in trainer.checkpoint_callbacks:
        name, epochs = type(saver).__name__, getattr(saver, "_every_n_epochs", 1)
        if getattr(saver, "_train_time_interval", None) is not None:
            raise SettingError(f"{name}: train_time_interval saves nothing under manual optimization; use every_n_train_steps")
        saves_else = getattr(saver, "save_last", None) or getattr(saver, "save_on_exception", False)
        if epochs > 1 and not saves_else and is_one_epoch(trainer):
            raise SettingError(f"{name}: every_n_epochs {epochs} saves nothing, since a run is one epoch; use every_n_train_steps")
        monitor = getattr(saver, "monitor", None)
        compares = monitor is None or monitor.startswith(EVALUATION_METRICS) or getattr(saver, "_every_n_train_steps", 1)
        if not (compares or saves_else) and getattr(saver, "_save_on_train_epoch_end", None) is not False and is_one_epoch(trainer):
            once = f"monitor {monitor!r} would be checked only at the end, since a run is one epoch"
            raise SettingError(f"{name}: {once}; add every_n_train_steps (iterations), or monitor eval/mean_reward")
    warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization")  # iterations are saved whole


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
Handler = Callable[[int, FrameType | None], object] | int | None


class StopOnSignal(pl.Callback):
    """End a run at the first SIGTERM, SIGUSR1, SIGHUP or Ctrl-C.

    The current iteration is finished. A running evaluation is interrupted, and repeated when the run is resumed. A second signal of the
    same kind ends the program immediately, except SIGHUP, which a closing terminal and its shell both send. Under `nohup`, SIGHUP stays
    ignored. All ranks stop when one is asked to.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._seen: set[int] = set()
        self._forward: Callable[[int], object] = ignore
        self._before: dict[signal.Signals, Handler] = {}

    @contextmanager
    def listening(self, forward: Callable[[int], object]) -> Iterator[None]:
        """Handle signals in this context; only the main thread can. `forward` passes them on to other processes."""
        self.received, self._seen, self._forward = None, set(), forward
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self._before = {number: handler for number, handler in handlers.items() if (number, handler) != (signal.SIGHUP, signal.SIG_IGN)}
        STOPPING.clear()
        self._listen()
        try:
            yield
        finally:
            self._stop_listening()
            self._before = {}
            STOPPING.clear()

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a spawned process, which has its own signal handlers and no process to forward signals to."""
        return {**vars(self), "_before": dict.fromkeys(self._before, signal.SIG_DFL), "_forward": ignore}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._listen()  # again: Lightning's own handlers would save or raise in the middle of an iteration
        self._least = trainer.min_epochs, trainer.min_steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, outputs: object, batch: object, batch_idx: int) -> None:
        if any_rank_must_stop(trainer):
            self.received = self.received or signal.SIGTERM
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0  # else these would keep the run going

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = self._least

    def _listen(self) -> None:
        if self._before and threading.current_thread() is threading.main_thread():
            for number in self._before:
                signal.signal(number, self._handle)

    def _stop_listening(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._seen and number != signal.SIGHUP:
            self._stop_listening()
            os.kill(os.getpid(), number)
        else:
            if number == signal.SIGHUP:
                drop_lost_output()
            self._seen.add(number)
            self.received = self.received or signal.Signals(number)
            STOPPING.add(number)
            self._forward(number)


def end_program(received: signal.Signals) -> NoReturn:
    """End the program after a handled signal, with exit status 130 after Ctrl-C, else 143."""
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(143)


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Raise a `KeyboardInterrupt` that Lightning caught, as that of a second Ctrl-C, in place of its exit with status 1."""
    try:
        yield
    except SystemExit as ended:
        if not isinstance(ended.__context__, KeyboardInterrupt):
            raise
        raise ended.__context__ from None


def drop_lost_output() -> None:
    """Discard further output to a closed terminal, so that it does not end the run before it is saved."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def ignore(number: int) -> None:
    """Do nothing: there is no process to forward a signal to."""


def any_rank_must_stop(trainer: pl.Trainer) -> bool:
    """Return whether any rank was asked to stop; all ranks call this together."""
    asked = must_stop(trainer)
    return asked if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(asked, all=False)


def must_stop(trainer: pl.Trainer) -> bool:
    """Return whether this process was asked to stop."""
    return any(callback.received is not None for callback in callbacks_of(trainer, StopOnSignal))
