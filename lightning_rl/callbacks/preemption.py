"""Stopping when somebody asks: the run ends after the iteration under way, is saved, and can be continued."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytorch_lightning as pl

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class StopOnSignal(pl.Callback):
    """End a run at the first SIGTERM, SIGUSR1, SIGHUP or Ctrl-C: the running iteration is finished, a running evaluation is interrupted
    and repeated when the run continues. A second one of the same kind is not waited for, but for SIGHUP, which a terminal that closes
    and its shell both send. Below `nohup` SIGHUP stays ignored. All ranks stop when one is asked to.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._heard: set[int] = set()
        self._tell: Callable[[int], None] = ignore
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def listening(self, tell: Callable[[int], None]) -> Iterator[None]:
        """Signals are heard in here, if this is the main thread, which no other has; `tell` passes them on to other processes."""
        self.received, self._heard, self._tell = None, set(), tell
        handlers = {each: signal.getsignal(each) for each in SIGNALS}
        self._before = {each: handler for each, handler in handlers.items() if (each, handler) != (signal.SIGHUP, signal.SIG_IGN)}
        self._listen()
        try:
            yield
        finally:
            self._stop_listening()

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is spawned: what this one would do at a signal is its own."""
        return {**vars(self), "_before": dict.fromkeys(self._before, signal.SIG_DFL), "_tell": ignore}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._listen()  # again: Lightning's own handlers would save or raise in the middle of an iteration

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if any_rank_asked(trainer):
            self.received = self.received or signal.SIGTERM
            trainer.should_stop = True

    def _listen(self) -> None:
        if self._before and threading.current_thread() is threading.main_thread():
            for each in self._before:
                signal.signal(each, self._hear)

    def _stop_listening(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for each, handler in self._before.items():
                signal.signal(each, handler)
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number in self._heard and number != signal.SIGHUP:
            self._stop_listening()
            os.kill(os.getpid(), number)
        else:
            if number == signal.SIGHUP:
                drop_lost_output()
            self._heard.add(number)
            self.received = self.received or signal.Signals(number)
            self._tell(number)


def drop_lost_output() -> None:
    """Of a terminal that is closed: what is still printed goes nowhere, instead of ending the run before it is saved."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def ignore(number: int) -> None:
    """There is nobody else to be told."""


def any_rank_asked(trainer: Any) -> bool:
    """Whether somebody asked one of the ranks to stop; all ranks ask together."""
    asked = stop_asked(trainer)
    return asked if trainer.world_size == 1 else bool(trainer.strategy.reduce_boolean_decision(asked, all=False))


def stop_asked(trainer: Any) -> bool:
    """Whether somebody asked this process to stop."""
    return any(isinstance(callback, StopOnSignal) and callback.received is not None for callback in trainer.callbacks)
