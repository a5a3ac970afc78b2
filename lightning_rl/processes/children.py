"""Child processes that communicate over pipes: starting and ending them, a limit on worker failures, and one thread for each process."""

import atexit
import os
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import DefaultContext, SpawnContext
from multiprocessing.process import BaseProcess
from textwrap import shorten
from typing import Protocol
from weakref import WeakKeyDictionary

from gymnasium.vector.utils import clear_mpi_env_vars
from threadpoolctl import threadpool_limits

from lightning_rl.errors import SettingError, place_in_code
from lightning_rl.processes.startup import follow_parent

ANSWER_TIMEOUT = 60.0
START_TIMEOUT = 300.0
"""Seconds for a process to start and build its worker, while many others do the same."""
CLOSE_TIMEOUT = 5.0
MAX_RESTARTS = 10
HOUR = 3600.0
LONGEST_WAIT = 2e6
"""Seconds (23 days): the longest single wait that operating systems accept."""


class WorkerError(SettingError):
    """A worker raised an exception, or failed too often."""


def one_thread() -> threadpool_limits:
    """Limit numpy's BLAS to one thread, until the returned context ends: small matrices are slower with more."""
    return threadpool_limits(limits=1, user_api="blas")


def error_line(error: Exception) -> str:
    """Describe an exception of a worker and its location in one line."""
    return shorten(f"{type(error).__name__}: {error}", 130, placeholder=" …") + place_in_code(error)


class FailureLimit:
    """Limits each worker to `allowed` failures per hour; `who` is a format string that names a worker by its index."""

    def __init__(self, who: str, num: int, allowed: int) -> None:
        self.who, self.allowed = who, allowed
        self.times: list[list[float]] = [[] for _ in range(num)]

    def add(self, worker: int, reason: str) -> str:
        """Count a failure and return the line that reports the restart. Raises `WorkerError`: the worker failed too often."""
        now, times, who = time.monotonic(), self.times[worker], self.who.format(worker)
        times.append(now)
        if sum(now - moment <= HOUR for moment in times) > self.allowed:
            raise WorkerError(shorten(f"{who} failed more than {self.allowed} times in an hour; last: {reason}", 200, placeholder=" …"))
        return shorten(f"{who} was restarted: {reason}", 200, placeholder=" …")


class Child:
    """A child process that runs `target` with arguments and a pipe, and the parent's end of the pipe. A daemon cannot have children.

    Raises `SettingError`: the system allows no further process, or no further open file for its pipe.
    """

    def __init__(
        self, context: DefaultContext | SpawnContext, target: Callable[..., None], arguments: tuple, name: str, daemon: bool = False
    ) -> None:
        try:
            self.pipe, child_pipe = context.Pipe()
            with closing(child_pipe):
                arguments = (target, arguments, child_pipe, self.pipe)
                self.process: BaseProcess = context.Process(target=_run, args=arguments, name=name, daemon=daemon)
                with clear_mpi_env_vars():
                    self.process.start()
        except OSError as error:
            raise SettingError(
                f"process {name} could not be started ({error.strerror}): use fewer processes, or raise the limits, ulimit -n and -u"
            ) from error

    def exit_reason(self) -> str:
        """Describe how the process died, after its pipe was closed."""
        self.process.join(1.0)
        return f"it died with exit code {self.process.exitcode}"

    def kill(self) -> None:
        """Kill the process; a frozen one reacts to nothing else."""
        self.pipe.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def _run(target: Callable[..., None], arguments: tuple, pipe: Connection, parent_end: Connection) -> None:
    parent_end.close()  # so that reads fail when the parent ends
    follow_parent()
    target(*arguments, pipe)


def close_children(children: Iterable[Child], farewell: object) -> None:
    """Ask processes to exit by a message, and kill those that still run after `CLOSE_TIMEOUT` seconds."""
    children = list(children)
    for child in children:
        with suppress(OSError):
            child.pipe.send(farewell)
        child.pipe.close()  # a busy process notices when it replies
    deadline = time.monotonic() + CLOSE_TIMEOUT
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))
        child.kill()


class Pool(Protocol):
    """Several processes that end together."""

    def close(self) -> None: ...


_pools: WeakKeyDictionary[Pool, int] = WeakKeyDictionary()
"""Open pools with the id of the process that opened them: a forked copy must not close them."""


STOPPING: set[int] = set()
"""The signals that asked the run of this process to stop, for what may wait in it without an end."""


def close_at_exit(pool: Pool) -> None:
    """Close a pool when this process ends, before multiprocessing waits for children that ignore its SIGTERM."""
    _pools[pool] = os.getpid()


@atexit.register
def _close_pools() -> None:
    for pool, owner in list(_pools.items()):
        if owner == os.getpid():
            pool.close()
