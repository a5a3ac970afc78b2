"""Asynchronous calls of workers: one interface for workers in this process, in its threads, or outside of it."""

import pickle
import time
import traceback
from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import cloudpickle
import torch
from torch import Tensor, nn

from lightning_rl.errors import ProgramEndedError, SettingError
from lightning_rl.networks.changes import Structure, changes_everywhere, changes_of, copy_network, list_changes, structure_of
from lightning_rl.processes.children import ANSWER_TIMEOUT, MAX_RESTARTS, START_TIMEOUT, FailureLimit, WorkerError, error_line, one_thread


class Worker(Protocol):
    """An object whose methods are called by name."""

    def close(self) -> None: ...


Build = Callable[[int, int, nn.Module], Worker]
"""Builds a worker from its index, the number of its restarts, and its network."""


class Answer(NamedTuple):
    """The value returned by a method of a worker, the version of the worker's weights, and the seconds that the call took."""

    worker: int
    method: str
    version: int
    value: Any
    seconds: float


class Workers(ABC):
    """Interface of a set of workers. The caller of `receive` owns the returned value.

    restarts: total number of restarts.  notices: a line for each restart; the caller that prints them clears the list.
    """

    def __init__(self, num: int, network: nn.Module) -> None:
        self.num, self.network = num, network
        self.restarts, self.notices = 0, list[str]()
        self.copied, self.reported = self._structure(), set[str]()

    @abstractmethod
    def publish(self, version: int) -> None:
        """Let calls that begin from now on use the network's current weights, with this version number.

        What else was changed in the network since workers got their copies is reported in a notice.
        """
        self._report(changes_of(self.copied, self._structure()), "after they started", "change it before fit")

    def _report(self, changes: Mapping[str, str], where: str, way_out: str) -> None:
        if new := [text for place, text in changes.items() if place not in self.reported]:
            self.notices.append(f"actors act without what was changed {where}: {list_changes(new)}; {way_out}")
            self.reported |= changes.keys()

    def _structure(self) -> Structure:
        return structure_of(nn.ModuleDict({"network": self.network}))

    @abstractmethod
    def call(self, worker: int, method: str, *arguments: object) -> None:
        """Call a method. Each call is answered once; calls of one worker are answered in order.

        Pass large arguments only to a worker that owes no other answer: otherwise both sides could wait for space in their pipe.
        """

    @abstractmethod
    def receive(self) -> Answer:
        """Wait for the next answer of any worker. Raises `WorkerError`: a worker raised an exception, or failed too often."""

    @abstractmethod
    def num_ready(self) -> int:
        """Return how many answers can be received without waiting."""

    @abstractmethod
    def close(self) -> None:
        """End all workers, whatever their state."""


def make_answer(index: int, worker: Worker, version: int, method: str, arguments: tuple[object, ...]) -> Answer:
    """Call a method of a worker."""
    began = time.monotonic()
    return Answer(index, method, version, getattr(worker, method)(*arguments), time.monotonic() - began)


def close_all(workers: Iterable[Worker]) -> None:
    """Close all workers, even if the `close` of one raises."""
    with ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.close)


class LocalWorkers(Workers):
    """Workers in this process that run when an answer is awaited. They share the network, so they always have its newest weights."""

    def __init__(self, build: Build, num: int, network: nn.Module) -> None:
        super().__init__(num, network)
        self.version = 0
        self.calls: deque[tuple[int, str, tuple[object, ...]]] = deque()
        self.workers: list[Worker] = []
        try:
            for i in range(num):
                self.workers.append(build(i, 0, network))
        except BaseException:
            self.close()
            raise

    def publish(self, version: int) -> None:
        self.version = version

    def call(self, worker: int, method: str, *arguments: object) -> None:
        self.calls.append((worker, method, arguments))

    def receive(self) -> Answer:
        worker, method, arguments = self.calls.popleft()
        return make_answer(worker, self.workers[worker], self.version, method, arguments)

    def num_ready(self) -> int:
        return 0

    def close(self) -> None:
        close_all(self.workers)


class ThreadWorkers(Workers):
    """Workers that each run in a thread with a copy of the network. A call uses the weights at the time of the call, so that its result
    does not depend on when the thread starts it."""

    def __init__(self, build: Build, num: int, network: nn.Module) -> None:
        super().__init__(num, network)
        self.copies = [inference_copy(network) for _ in range(num)]
        self.threads = [ThreadPoolExecutor(1, f"actor-{i}") for i in range(num)]
        self.workers: list[Worker] = []
        try:
            for i, copy in enumerate(self.copies):
                self.workers.append(build(i, 0, copy))
        except BaseException:
            self.close()
            raise
        self.answers: list[deque[Future[Answer]]] = [deque() for _ in range(num)]
        self.done: SimpleQueue[int] = SimpleQueue()
        """Workers of finished calls, in the order of completion."""
        self.publish(0)

    def publish(self, version: int) -> None:
        super().publish(version)
        self.version = version
        self.weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights_of(self.network).items()}

    def call(self, worker: int, method: str, *arguments: object) -> None:
        answer = self.threads[worker].submit(self._answer, worker, self.version, self.weights, method, arguments)
        self.answers[worker].append(answer)
        answer.add_done_callback(lambda _: self.done.put(worker))

    def receive(self) -> Answer:
        return self.answers[self.done.get()].popleft().result()

    def num_ready(self) -> int:
        return self.done.qsize()

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown(cancel_futures=True)
        close_all(self.workers)

    def _answer(self, worker: int, version: int, weights: dict[str, Tensor], method: str, arguments: tuple[object, ...]) -> Answer:
        set_weights(self.copies[worker], weights)
        return make_answer(worker, self.workers[worker], version, method, arguments)


def inference_copy(network: nn.Module) -> nn.Module:
    """Return a copy of a network for a worker, on the CPU, without gradients."""
    return copy_network(network).cpu().requires_grad_(False)


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a network by name, also the buffers that its checkpoints leave out."""
    return {**network.state_dict(), **dict(network.named_buffers())}


@torch.no_grad()
def set_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a network in place, since actors may have views of its own."""
    for name, tensor in weights_of(network).items():
        if name in weights:  # another kind of layer may be there by now
            tensor.copy_(weights[name])


@dataclass
class Call:
    """A pending call of a remote worker; the backend finds the answer by `handle`."""

    method: str
    arguments: tuple[object, ...]
    handle: Any = None
    asked: float = field(default_factory=time.monotonic)


class RemoteWorkers(Workers):
    """Workers outside this process. One that dies or freezes is restarted, and its calls are repeated.

    Args:
        build: builds a worker where it runs.
        num: number of workers.
        network: network whose weights are published; each worker begins with a copy.
        timeout: seconds after which a worker that does not answer is restarted.
        max_restarts: maximum number of restarts of each worker per hour.
    """

    def __init__(
        self, build: Build, num: int, network: nn.Module, timeout: float = ANSWER_TIMEOUT, max_restarts: int = MAX_RESTARTS
    ) -> None:
        super().__init__(num, network)
        self.build, self.timeout = build, timeout
        self.failures = FailureLimit("actor {}", num, max_restarts)
        self.calls: list[deque[Call]] = [deque() for _ in range(num)]
        self.deadlines = [0.0] * num
        self.ready: list[tuple[float, Answer]] = []
        self._open()
        try:
            for i in range(num):
                self._start_worker(i)
        except BaseException:
            self.close()
            raise

    def publish(self, version: int) -> None:
        super().publish(version)
        self._report(changes_everywhere(self.network.modules()), "in all of this process", "change the network instead")

    def call(self, worker: int, method: str, *arguments: object) -> None:
        if not self.calls[worker]:
            self.deadlines[worker] = max(self.deadlines[worker], time.monotonic() + self.timeout)
        self.calls[worker].append(Call(method, arguments))
        self._send(worker, self.calls[worker][-1])

    def receive(self) -> Answer:
        while not self.ready:
            busy = [i for i, calls in enumerate(self.calls) if calls]
            self._read(busy, max(0.0, min(self.deadlines[i] for i in busy) - time.monotonic()))
            for i in busy:
                if self.calls[i] and time.monotonic() > self.deadlines[i]:
                    self._restart(i, f"no answer in {self.timeout:g} s (actors.timeout)")
        return self.ready.pop(0)[1]

    def num_ready(self) -> int:
        while (busy := [i for i, calls in enumerate(self.calls) if calls]) and self._read(busy, 0.0):
            pass
        return len(self.ready)

    def _read(self, busy: list[int], seconds: float) -> bool:
        """Wait for busy workers, and read one answer of each that has one. Return whether there were any."""
        workers = self._wait(busy, seconds)
        for i in workers:
            answer = self._answer(i, self.calls[i][0])
            if isinstance(answer, WorkerError):
                raise answer
            if isinstance(answer, str):
                self._restart(i, answer)
            else:
                self.calls[i].popleft()
                self.deadlines[i] = time.monotonic() + self.timeout
                insort(self.ready, answer, key=itemgetter(0))
        return bool(workers)

    def _start_worker(self, i: int) -> None:
        copied = inference_copy(self.network)
        try:
            pickled = cloudpickle.dumps((self.build, copied))
        except Exception as error:  # of a user's class or function, or of a part of torch that cannot be sent
            raise SettingError(f"the policy or its environment cannot be sent to actors: {error_line(error)}") from error
        self._start(i, len(self.failures.times[i]), pickled)
        self.deadlines[i] = time.monotonic() + max(self.timeout, START_TIMEOUT)

    def _restart(self, i: int, reason: str) -> None:
        """Replace a worker and repeat its calls. Raises `WorkerError`: it failed too often."""
        self.notices.append(self.failures.add(i, reason))
        self.restarts += 1
        self._end(i)
        self._start_worker(i)
        for call in self.calls[i]:
            self._send(i, call)

    @abstractmethod
    def _open(self) -> None:
        """Prepare what workers are started with."""

    @abstractmethod
    def _start(self, i: int, restarts: int, made_of: bytes) -> None:
        """Start a worker with the arguments of `RemoteWorker`."""

    @abstractmethod
    def _end(self, i: int) -> None:
        """Kill a worker."""

    @abstractmethod
    def _send(self, i: int, call: Call) -> None:
        """Send a call, and set its handle."""

    @abstractmethod
    def _wait(self, busy: list[int], seconds: float) -> list[int]:
        """Wait until any busy worker has an answer to its first call or has died; return all such workers."""

    @abstractmethod
    def _answer(self, i: int, call: Call) -> tuple[float, Answer] | WorkerError | str:
        """Return the answer to a worker's first call, with its time; or the error that it raised; or the reason why the worker was lost."""


class RemoteWorker:
    """The remote side of a worker: builds it at the first call, and updates its network's weights before each call.

    `made_of`: its `Build` and its network, pickled.
    """

    def __init__(self, index: int, restarts: int, made_of: bytes) -> None:
        torch.set_num_threads(1)  # the other workers have the other cores
        one_thread()
        self.index, self.restarts, self.made_of = index, restarts, made_of
        self.worker: Worker | None = None

    def answer(self, update_weights: Callable[[nn.Module], int], method: str, arguments: tuple[object, ...]) -> Answer:
        """Call a method; `update_weights` updates the network and returns the version."""
        if self.worker is None:  # building takes seconds; weights are read afterwards
            build, self.network = pickle.loads(self.made_of)
            self.worker = build(self.index, self.restarts, self.network)
        return make_answer(self.index, self.worker, update_weights(self.network), method, arguments)

    def describe_error(self, error: Exception) -> WorkerError | str:
        """Return the error to raise where the answer is awaited, with the traceback of the original error.

        If an environment tried to end this process, return the reason why the worker is to be restarted.
        """
        if isinstance(error, ProgramEndedError):
            return str(error)
        described = WorkerError(f"actor {self.index} raised {error_line(error)}")
        described.add_note(traceback.format_exc())
        return described
