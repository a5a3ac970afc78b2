"""The ranks of a run: what they share, and what happens when one of them is lost."""

from __future__ import annotations

import re
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.nn.functional import all_reduce
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lightning_rl.errors import LostRankError, SettingError
from lightning_rl.startup import RAN_THE_PROGRAM, UNGUARDED

if TYPE_CHECKING:
    import pytorch_lightning as pl  # which workers do without

T = TypeVar("T")


class Counted(Protocol):
    """An algorithm that counts what it did, and prints lines for the user."""

    counter: str

    @property
    def say(self) -> Callable[[str], None]: ...
    @property
    def count(self) -> int: ...
    @property
    def counted(self) -> str: ...


def num_ranks() -> int:
    """Return how many processes learn together."""
    is_shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_shared else 1


def sum_over_ranks(number: Tensor) -> Tensor:
    """Add up a tensor over all ranks."""
    if num_ranks() == 1:
        return number
    total = number.detach().clone()
    torch.distributed.all_reduce(total)
    return total


def sum_with_gradient(number: Tensor) -> Tensor:
    """Add up a tensor over all ranks, whose losses all have a gradient for each rank's own part."""
    return number if num_ranks() == 1 else all_reduce(number)


def mean_over_ranks(number: Tensor) -> Tensor:
    """Average a tensor over all ranks."""
    return number if num_ranks() == 1 else sum_over_ranks(number) / num_ranks()


def of_all_ranks(thing: T) -> list[T]:
    """Gather what each rank has, in their order."""
    things = [thing] * num_ranks()
    if len(things) > 1:
        torch.distributed.all_gather_object(things, thing)
    return things


SUMMED = ("rollout/replaced_steps",)
"""Metrics that each rank counts of its own environments."""


def merge_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Merge the metrics of all ranks: the mean of those that have one; counts of environments' events, `env/…` and `SUMMED`, add up."""
    ranks = of_all_ranks(metrics)
    if len(ranks) == 1:
        return metrics
    found = {name: [each[name] for each in ranks if name in each] for name in dict.fromkeys(name for each in ranks for name in each)}
    return {name: sum(values) / (1 if name.startswith("env/") or name.endswith(SUMMED) else len(values)) for name, values in found.items()}


@contextmanager
def report_lost_ranks(algorithm: Counted) -> Iterator[None]:
    """End this process with one line where another process of the run ends.

    Raises `LostRankError`: another process was killed or failed. Raises `SettingError`: a process that was started here raised it, or the
    program trains as it is imported.
    """
    try:
        yield
    except ProcessRaisedException as error:
        last = str(error).strip().splitlines()[-1]
        kind, _, text = last.partition(": ")
        raise SettingError(text) if kind == f"{SettingError.__module__}.{SettingError.__name__}" else LostRankError(last) from error
    except (ProcessExitedException, RuntimeError) as error:
        if not isinstance(error, ProcessExitedException) and not _is_collective(error):
            raise
        if getattr(error, "exit_code", None) == RAN_THE_PROGRAM:
            raise SettingError(UNGUARDED) from None
        # of torch's reason the first sentence, without the place in its code
        reason = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).splitlines()[0].partition(". ")[0]
        at = f" at {algorithm.count:,} {algorithm.counted}" if algorithm.count else ""
        message = f"another process of this run is gone{at} ({reason}); --ckpt_path last continues from what was saved"
        raise LostRankError(message) from error


def _is_collective(error: BaseException) -> bool:
    """Return whether an error was raised while ranks communicated."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return modules[-1].startswith("torch.distributed")


def forward_signal(trainer: pl.Trainer, number: int) -> None:
    """Pass a signal on to the processes that this one waits for; as another one, as they may have received this one too."""
    launcher = trainer.strategy.launcher
    if launcher is not None and _waits_for_ranks(trainer):
        launcher.kill(signal.SIGTERM if number == signal.SIGUSR1 else signal.SIGUSR1)


def take_counts(trainer: pl.Trainer, algorithm: object, names: Iterable[str]) -> None:
    """Take the counts of a run from processes that were spawned or forked; Lightning brings back weights and metrics."""
    if _waits_for_ranks(trainer):
        for name in names:
            setattr(algorithm, name, int(trainer.callback_metrics[name]))


def _waits_for_ranks(trainer: pl.Trainer) -> bool:
    """Return whether all ranks are children of this process, and not, as with programs that were started, all but the first."""
    processes = list(getattr(trainer.strategy.launcher, "procs", []))
    return len(processes) > 0 and not isinstance(processes[0], subprocess.Popen)
