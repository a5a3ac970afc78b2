"""What is written on the way; a disk that refuses does not end a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def going_on(algorithm: Any, what: str) -> Iterator[None]:
    """Where the system does not let us write, one line says so and the run goes on."""
    try:
        yield
    except OSError as error:
        algorithm.say(f"{what} could not be written, the run goes on: {error.strerror or error}")


def log_row(trainer: Any, algorithm: Any, metrics: Mapping[str, float]) -> None:
    """A row of metrics over what the run counts, for all loggers, and for callbacks that monitor one."""
    row = {algorithm.counter: algorithm.count, **metrics}
    for logger in list(trainer.loggers):
        try:
            with going_on(algorithm, f"a row of {type(logger).__name__}"):
                logger.log_metrics(row, step=algorithm.count)
        except Exception as error:  # TensorBoard wraps what its thread met, and can write no more
            refused = next((cause for cause in causes(error) if isinstance(cause, OSError)), None)
            if refused is None:
                raise
            algorithm.say(f"{type(logger).__name__} could not write and is left out, the run goes on: {refused.strerror or refused}")
            trainer.loggers = [each for each in trainer.loggers if each is not logger]
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in row.items()})


@contextmanager
def quiet_tensorboard() -> Iterator[None]:
    """What TensorBoard's thread meets on the disk is reported with the next row, not with a traceback of the thread as well."""
    before = threading.excepthook

    def report(failure: Any) -> None:
        if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith("tensorboard.")):
            before(failure)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
