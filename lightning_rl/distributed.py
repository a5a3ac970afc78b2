"""The processes of a run, its ranks: what they share, and what happens when one of them is lost."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lightning_rl.errors import LostRankError, SettingError

Thing = TypeVar("Thing")


def num_ranks() -> int:
    """How many processes learn together."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if together else 1


def sum_over_ranks(number: Tensor) -> Tensor:
    """The sum of a tensor over all ranks."""
    if num_ranks() == 1:
        return number
    total = number.detach().clone()
    torch.distributed.all_reduce(total)
    return total


def mean_over_ranks(number: Tensor) -> Tensor:
    """The mean of a tensor over all ranks."""
    return number if num_ranks() == 1 else sum_over_ranks(number) / num_ranks()


def of_all_ranks(thing: Thing) -> list[Thing]:
    """What each rank has, in their order."""
    if num_ranks() == 1:
        return [thing]
    things: list[Thing] = [thing] * num_ranks()
    torch.distributed.all_gather_object(things, thing)
    return things


def together(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of all ranks as one: the mean of those that have one; counts of what befell environments, `env/…`, add up."""
    ranks = of_all_ranks(metrics)
    if len(ranks) == 1:
        return metrics
    found = {name: [each[name] for each in ranks if name in each] for name in dict.fromkeys(name for each in ranks for name in each)}
    return {name: sum(values) / (1 if name.startswith("env/") else len(values)) for name, values in found.items()}


@contextmanager
def losing_ranks(algorithm: Any) -> Iterator[None]:
    """Where another process of the run ends, this one does too, with one line.

    Raises:
        LostRankError: another process was killed or failed.
        SettingError: a process that was started here raised it.
    """
    try:
        yield
    except ProcessRaisedException as error:
        said = str(error).strip().splitlines()[-1]
        kind, _, text = said.partition(": ")
        raise SettingError(text) if kind == f"{SettingError.__module__}.{SettingError.__name__}" else LostRankError(said) from error
    except ProcessExitedException as error:
        raise LostRankError(in_words(str(error), algorithm)) from error
    except RuntimeError as error:
        if not in_collective(error):
            raise
        raise LostRankError(in_words(str(error), algorithm)) from error


def in_collective(error: BaseException) -> bool:
    """Whether an error came up while ranks told each other something."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return modules[-1].startswith("torch.distributed")


def in_words(reason: str, algorithm: Any) -> str:
    """One line about another process that is gone; of torch's reason its first sentence, without the place in its code."""
    first = re.sub(r"^\[[^]]*\] *", "", reason.strip()).splitlines()[0].partition(". ")[0]
    at = f" at {algorithm.count:,} {algorithm.counted}" if algorithm.count else ""
    return f"another process of this run is gone{at} ({first}); --ckpt_path last continues from what was saved"


def tell_to_stop(trainer: Any, number: int) -> None:
    """Pass a signal on to processes that run what this one waits for; as another one, for they may have heard this one too."""
    if _has_started_processes(trainer):
        trainer.strategy.launcher.kill(signal.SIGTERM if number == signal.SIGUSR1 else signal.SIGUSR1)


def bring_back(trainer: Any, algorithm: Any) -> None:
    """Copy how far a run came in processes that were spawned or forked; Lightning brings back weights and metrics."""
    if _has_started_processes(trainer):
        for name in algorithm.COUNTS:
            setattr(algorithm, name, int(trainer.callback_metrics[name]))


def _has_started_processes(trainer: Any) -> bool:
    """Return whether Python's multiprocessing runs this training; asked without importing Lightning, which actors do without."""
    return any(isinstance(each, BaseProcess) for each in getattr(trainer.strategy.launcher, "procs", ()))
