"""Calls of objects that work elsewhere.

A worker is an object that was built with a copy of a network. It answers calls of its methods one after the other, each with the newest
weights that were published before it began. IMPALA's actors and evolution strategies' evaluators are such objects; where they live, in
this process, in others, or on other machines, is the business of three classes with the same few methods.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from textwrap import shorten
from typing import Any, NamedTuple, Protocol

from torch import nn

from lightning_rl.errors import SettingError

HOUR = 3600.0
START_TIMEOUT = 300.0
"""Seconds for a process to start and to build its worker, with many others at once."""
Build = Callable[[int, int, nn.Module], Any]
"""Makes a worker from its index, how often it was started anew, and its network."""


class Answer(NamedTuple):
    """What a method of a worker returned, the version of the weights that it had, and the seconds it took."""

    worker: int
    method: str
    version: int
    value: Any
    seconds: float


class Workers(Protocol):
    """Some workers. The caller of `receive` owns what it gets.

    num: how many.  restarts: how often one was started anew.  notices: what befell them, a line each; who prints them clears the list.
    """

    num: int
    restarts: int
    notices: list[str]

    def publish(self, version: int) -> None:
        """Let calls that begin from now on see the network's weights as they are, under a number."""

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        """Ask for something; each call is answered once, those of one worker in their order.

        Large arguments only where the worker owes no other answer: both sides would wait for room in their pipe.
        """

    def receive(self) -> Answer:
        """The next answer, of whichever worker has one; waits for it.

        Raises:
            WorkerError: a worker raised, or failed too often.
        """

    def num_ready(self) -> int:
        """How many answers are there."""

    def close(self) -> None:
        """End all workers, in whatever state they are."""


class WorkerError(SettingError):
    """What a worker raised; the cause holds its traceback."""


class RemoteTraceback(Exception):
    """Where a worker raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class InTurn:
    """Workers in this process, that work when an answer is awaited. They share the network, so they always have its newest weights."""

    restarts = 0

    def __init__(self, build: Build, num: int, network: nn.Module) -> None:
        self.num, self.version, self.notices = num, 0, list[str]()
        self.workers: list[Any] = []
        try:
            for i in range(num):
                self.workers.append(build(i, 0, network))
        except BaseException:
            self.close()
            raise
        self.calls: deque[tuple[int, str, tuple[Any, ...]]] = deque()

    def publish(self, version: int) -> None:
        self.version = version

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        self.calls.append((worker, method, arguments))

    def receive(self) -> Answer:
        (worker, method, arguments), began = self.calls.popleft(), time.monotonic()
        return Answer(worker, method, self.version, getattr(self.workers[worker], method)(*arguments), time.monotonic() - began)

    def num_ready(self) -> int:
        return 0

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class Failures:
    """When each worker died or froze.

    Args:
        name: of a worker, for messages.
        num: how many workers.
        allowed: how often each may, in an hour.
    """

    def __init__(self, name: str, num: int, allowed: int) -> None:
        self.name, self.allowed = name, allowed
        self.times: list[list[float]] = [[] for _ in range(num)]

    def add(self, worker: int, failure: str) -> str:
        """A line that a worker is started anew.

        Raises:
            WorkerError: it failed too often.
        """
        now, times = time.monotonic(), self.times[worker]
        times.append(now)
        if sum(now - each <= HOUR for each in times) > self.allowed:
            raise WorkerError(f"{self.name} {worker} failed more than {self.allowed} times in an hour; last: {failure}")
        return shorten(f"{self.name} {worker} was started anew: {failure}", 200, placeholder=" …")


def own_copy(network: nn.Module) -> nn.Module:
    """A network for a worker, on the CPU, that nothing is trained with."""
    return deepcopy(network).cpu().requires_grad_(False)
