"""Calls of objects that work elsewhere: in this process, in its threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from queue import SimpleQueue
from textwrap import shorten
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

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


Published = tuple[int, dict[str, Tensor]]
"""Weights and their version."""


class InThreads:
    """Workers in a thread each, with a copy of the network each. A call has the weights of when it was made, so that what comes of it does
    not depend on when its thread begins."""

    restarts = 0

    def __init__(self, build: Build, num: int, network: nn.Module) -> None:
        self.num, self.network, self.notices = num, network, list[str]()
        self.copies = [own_copy(network) for _ in range(num)]
        self.workers = [build(i, 0, copy) for i, copy in enumerate(self.copies)]
        self.threads = [ThreadPoolExecutor(1, f"actor-{i}") for i in range(num)]
        self.calls: list[deque[tuple[str, Future[Any]]]] = [deque() for _ in range(num)]
        self.done: SimpleQueue[int] = SimpleQueue()
        """Whose calls were done, in the order in which they were."""
        self.publish(0)

    def publish(self, version: int) -> None:
        weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.network.state_dict().items()}
        self.published: Published = version, weights

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        answer = self.threads[worker].submit(self._answer, worker, self.published, method, arguments)
        self.calls[worker].append((method, answer))
        answer.add_done_callback(lambda _: self.done.put(worker))

    def receive(self) -> Answer:
        worker = self.done.get()
        method, answer = self.calls[worker].popleft()
        version, value, seconds = answer.result()
        return Answer(worker, method, version, value, seconds)

    def num_ready(self) -> int:
        return self.done.qsize()

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown(cancel_futures=True)
        for worker in self.workers:
            worker.close()

    def _answer(self, worker: int, published: Published, method: str, arguments: tuple[Any, ...]) -> tuple[int, Any, float]:
        began, (version, weights) = time.monotonic(), published
        load(self.copies[worker], weights)
        return version, getattr(self.workers[worker], method)(*arguments), time.monotonic() - began


@torch.no_grad()
def load(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into a network in place, where others have views of them."""
    for name, tensor in network.state_dict().items():
        tensor.copy_(weights[name])
