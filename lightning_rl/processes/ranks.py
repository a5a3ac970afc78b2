"""Distributed runs: collectives over ranks, and what happens when a rank dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lightning_rl.errors import LostRankError, SettingError
from lightning_rl.processes.startup import RAN_THE_PROGRAM, UNGUARDED

if TYPE_CHECKING:
    import pytorch_lightning as pl  # not needed by workers

T = TypeVar("T")
RESULTS = "lightning_rl"
"""The place among a Trainer's metrics of data that must return from spawned processes."""


def num_ranks() -> int:
    """Return the number of ranks that train together."""
    is_shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_shared else 1


def launched_rank() -> int:
    """Return the rank that the launcher of this process has told it, before the ranks connect; 0 in a run of one."""
    return next((int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), 0)


def own_rank() -> int:
    """Return the rank of this process; 0 in a run of one."""
    return torch.distributed.get_rank() if num_ranks() > 1 else 0


def sum_over_ranks(number: Tensor) -> Tensor:
    """Sum a tensor over all ranks."""
    if num_ranks() == 1:
        return number
    total = number.detach().clone()
    torch.distributed.all_reduce(total)
    return total


def sum_with_gradient(number: Tensor) -> Tensor:
    """Sum a tensor over all ranks; the losses of all ranks backpropagate to each rank's own part."""
    return number if num_ranks() == 1 else all_reduce(number)


def mean_over_ranks(number: Tensor) -> Tensor:
    """Average a tensor over all ranks."""
    return number if num_ranks() == 1 else sum_over_ranks(number) / num_ranks()


def of_all_ranks(thing: T) -> list[T]:
    """Gather an object from each rank, in rank order."""
    things = [thing] * num_ranks()
    if len(things) > 1:
        torch.distributed.all_gather_object(things, thing)
    return things


@torch.no_grad()
def share_buffers(root: nn.Module, known: Container[str]) -> None:
    """Give all ranks the buffers of rank 0, as torch's DDP does.

    Those of this package's modules are equal, and so are those of the root, an algorithm, with the names `known`.
    """
    for part in root.modules():
        if not type(part).__module__.startswith("lightning_rl."):
            for name, buffer in part.named_buffers(recurse=False):
                if part is root and name in known:
                    continue
                shared = buffer.contiguous()
                torch.distributed.broadcast(shared, 0)
                buffer.copy_(shared)


SUMMED = ("rollout/replaced_steps",)
"""Metrics that each rank counts for its own environments."""


def merge_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Merge the metrics of all ranks: average each over the ranks that have it, and sum counts of events (`env/…` and `SUMMED`)."""
    ranks = of_all_ranks(metrics)
    if len(ranks) == 1:
        return metrics
    lists = {name: [rank[name] for rank in ranks if name in rank] for name in dict.fromkeys(name for rank in ranks for name in rank)}
    return {name: sum(values) / (1 if name.startswith("env/") or name.endswith(SUMMED) else len(values)) for name, values in lists.items()}


@contextmanager
def report_lost_ranks(progress: Callable[[], str]) -> Iterator[None]:
    """Turn the failure of another process of the run into a one-line error of this one.

    `progress`: says how far the run is; "" at its start.

    Raises `LostRankError`: another process was killed or failed. Raises `SettingError`: a process started here raised it, or the program
    starts training when it is imported.
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
        # the first sentence of torch's message, without its source location
        reason = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).splitlines()[0].partition(". ")[0]
        at = f" at {made}" if (made := progress()) else ""
        message = f"another process of this run died{at} ({reason}); --ckpt_path last resumes from the last save"
        raise LostRankError(message) from error


def _is_collective(error: BaseException) -> bool:
    """Return whether an error was raised in a collective of the ranks."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return modules[-1].startswith("torch.distributed")


def forward_signal(trainer: pl.Trainer, number: int) -> None:
    """Forward a signal to the processes that this one waits for, as a different signal: they may have received the original too."""
    launcher = trainer.strategy.launcher
    if launcher is not None and _waits_for_ranks(trainer):
        launcher.kill(signal.SIGTERM if number == signal.SIGUSR1 else signal.SIGUSR1)


def leave_results(trainer: pl.Trainer, get_results: Callable[[], object]) -> None:
    """Leave plain data for the process that spawned or forked this one, if any; Lightning brings back only weights and metrics.

    Only the path of a file goes with the metrics: a process cannot end before it has sent these, which waits if a pipe is full.
    """
    if parent_process() is not None and trainer.strategy.launcher is not None and trainer.is_global_zero:
        handle, path = tempfile.mkstemp(suffix=".pt")
        with os.fdopen(handle, "wb") as file:
            torch.save(get_results(), file)
        trainer.callback_metrics[RESULTS] = path  # type: ignore[assignment]


def take_results(trainer: pl.Trainer) -> Any:
    """Return what spawned or forked ranks left; None if the run was in this process."""
    if not _waits_for_ranks(trainer):
        return None
    path = Path(str(trainer.callback_metrics.pop(RESULTS)))
    try:
        return torch.load(path, weights_only=True)
    finally:
        path.unlink()


def _waits_for_ranks(trainer: pl.Trainer) -> bool:
    """Return whether all ranks are children of this process (spawned or forked), not all but the first (started as programs)."""
    processes = list(getattr(trainer.strategy.launcher, "procs", []))
    return len(processes) > 0 and not isinstance(processes[0], subprocess.Popen)
