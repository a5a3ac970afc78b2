"""Workers in processes of their own on this machine."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import time
import traceback
from collections import deque
from contextlib import suppress
from heapq import heappop, heappush
from multiprocessing.connection import Connection, wait
from textwrap import shorten
from typing import Any
from weakref import WeakSet

import cloudpickle
import torch
from gymnasium.vector.utils import clear_mpi_env_vars
from torch import nn

from lightning_rl.actors.shared_memory import SharedWeights, Slot, SlotWriter, room
from lightning_rl.actors.workers import START_TIMEOUT, Answer, Build, Failures, RemoteTraceback, WorkerError, own_copy
from lightning_rl.errors import SettingError
from lightning_rl.startup import follow_parent
from lightning_rl.threads import one_thread

RAN_THE_PROGRAM = 78
"""Exit status of a process that found itself running the program from its beginning."""
ERROR = "error"
"""Stands where an answer has its time, if the worker raised."""


def leave_the_program() -> None:
    """End a process that was spawned for a worker and, on its way there, imports a program that trains as it is imported."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        os._exit(RAN_THE_PROGRAM)


def work(index: int, restarts: int, made_of: bytes, weights_name: str, pipe: Connection) -> None:
    """Build a worker and answer, until told to close or until the other end of the pipe is gone."""
    follow_parent()
    torch.set_num_threads(1)  # the others have the other cores
    one_thread()
    worker, writers = None, dict[int, SlotWriter]()
    try:
        build, network = pickle.loads(made_of)
        weights = SharedWeights(network, weights_name)
        while (request := pipe.recv()) is not None:
            slot, method, arguments, slot_name = request
            if worker is None:  # which takes seconds; weights are read behind it
                worker = build(index, restarts, network)
            version, began = weights.read(network), time.monotonic()
            value = getattr(worker, method)(*arguments)
            answer = writers.setdefault(slot, SlotWriter()).dump(slot_name, value)
            pipe.send((time.monotonic(), version, *answer[:2], answer[2], time.monotonic() - began))
    except (EOFError, ConnectionError):
        pass
    except Exception as error:  # an environment of others may raise anything
        line = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" …")
        pipe.send((ERROR, line, traceback.format_exc()))
    finally:
        if worker is not None:
            worker.close()
        for writer in writers.values():
            writer.close()


CLOSE_TIMEOUT = 5.0
UNGUARDED = 'processes of actors import the program: let it train below `if __name__ == "__main__":`'

_open: WeakSet[Processes] = WeakSet()


@atexit.register
def _close_all() -> None:
    for workers in list(_open):
        workers.close()


class Process:
    """One worker's process, and the calls that it has not answered."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process, self.pipe, self.deadline = process, pipe, 0.0


class Processes:
    """Workers in a process each, spawned, with weights and large answers in shared memory and all else in pipes.

    A worker that dies or freezes is started anew, and its calls are made again.

    Args:
        build: makes a worker in its process.
        num: how many.
        network: whose weights are published; each worker begins with a copy.
        timeout: seconds after which one that does not answer is taken for frozen.
        max_restarts: how often each may be started anew in an hour.
        name: of a worker, for messages.

    Raises:
        SettingError: from `receive`: the program trains as it is imported.
    """

    def __init__(
        self,
        build: Build,
        num: int,
        network: nn.Module,
        timeout: float = 60.0,
        max_restarts: int = 10,
        name: str = "actor",
    ) -> None:
        leave_the_program()
        self.build, self.num, self.network, self.name = build, num, network, name
        self.timeout, self.failures = timeout, Failures(name, num, max_restarts)
        self.context = multiprocessing.get_context("spawn")
        self.restarts, self.notices = 0, list[str]()
        self.weights = SharedWeights(network)
        self.weights.write(network, 0)
        self.slots: list[list[Slot]] = [[] for _ in range(num)]
        """Of each worker, one for each call whose answer was not received, and free ones."""
        self.free: list[list[int]] = [[] for _ in range(num)]
        self.is_full = False
        """Whether shared memory had no room for an answer."""
        self.calls: list[deque[tuple[int, str, tuple[Any, ...]]]] = [deque() for _ in range(num)]
        """Of each worker, those without an answer: the slot, the method and its arguments."""
        self.ready: list[tuple[float, int, int, str, Any]] = []
        """Answers in the order in which they were given: when, by whom, in which slot, what was asked and what was sent."""
        self._owner = os.getpid()
        self.processes: list[Process | None] = [None] * num
        _open.add(self)
        try:
            for i in range(num):
                self._start(i)
        except BaseException:
            self.close()
            raise

    def publish(self, version: int) -> None:
        self.weights.write(self.network, version)

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        if not self.free[worker]:
            self.free[worker].append(len(self.slots[worker]))
            self.slots[worker].append(Slot())
        self.calls[worker].append((self.free[worker].pop(), method, arguments))
        self._send(worker, self.calls[worker][-1])

    def receive(self) -> Answer:
        while not self.ready:
            pipes = {each.pipe: i for i, each in enumerate(self.processes) if each is not None and self.calls[i]}
            soonest = min(self._process(i).deadline for i in pipes.values())
            for pipe in wait(list(pipes), max(0.0, soonest - time.monotonic())):
                self._read(pipes[pipe])  # type: ignore[index]
            for i in pipes.values():
                if self.calls[i] and time.monotonic() > self._process(i).deadline:
                    self._replace(i, f"no answer in {self.timeout:g} s (actors.timeout)")
        _, worker, slot, method, (version, header, sizes, inline, seconds) = heappop(self.ready)
        self.free[worker].append(slot)
        if inline is None:
            return Answer(worker, method, version, self.slots[worker][slot].load(header, sizes), seconds)
        if sizes and not self.slots[worker][slot].grow(room(sizes)) and not self.is_full:
            self.is_full = True
            self.notices.append(f"shared memory is full: what {self.name} {worker} answers goes through pipes")
        return Answer(worker, method, version, pickle.loads(header, buffers=map(bytearray, inline)), seconds)

    def num_ready(self) -> int:
        for i, each in enumerate(self.processes):
            while each is not None and self.calls[i] and each is self.processes[i] and each.pipe.poll():
                self._read(i)
        return len(self.ready)

    def close(self) -> None:
        if self not in _open or os.getpid() != self._owner:
            return
        _open.discard(self)
        for each in self.processes:
            if each is not None:
                with suppress(OSError):
                    each.pipe.send(None)
                each.pipe.close()  # so that one at work hears of it with its next answer
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for each in self.processes:
            if each is not None:
                each.process.join(max(0.0, deadline - time.monotonic()))
        for i in range(self.num):
            self._end(i)
        for slot in (slot for slots in self.slots for slot in slots):
            slot.close()
        self.weights.close(unlink=True)

    def _process(self, i: int) -> Process:
        process = self.processes[i]
        assert process is not None
        return process

    def _start(self, i: int) -> None:
        ours, theirs = self.context.Pipe()
        made_of = cloudpickle.dumps((self.build, own_copy(self.network)))
        arguments = (i, len(self.failures.times[i]), made_of, self.weights.name, theirs)
        process = self.context.Process(target=work, args=arguments, name=f"{self.name}-{i}")  # no daemon, which has no children
        with clear_mpi_env_vars():
            process.start()
        theirs.close()
        self.processes[i] = Process(process, ours)
        self._process(i).deadline = time.monotonic() + max(self.timeout, START_TIMEOUT)
        for call in self.calls[i]:
            self._send(i, call)

    def _end(self, i: int) -> None:
        """End a worker at once. A frozen one hears nothing but this."""
        each = self.processes[i]
        if each is not None:
            self.processes[i] = None
            each.pipe.close()
            each.process.kill()
            each.process.join()
            each.process.close()

    def _send(self, i: int, call: tuple[int, str, tuple[Any, ...]]) -> None:
        each = self._process(i)
        if len(self.calls[i]) == 1:
            each.deadline = max(each.deadline, time.monotonic() + self.timeout)
        with suppress(OSError):  # one that is dead is found to be when its answer is awaited
            each.pipe.send((*call, self.slots[i][call[0]].name))

    def _read(self, i: int) -> None:
        each = self._process(i)
        try:
            finished, *sent = each.pipe.recv()
        except (EOFError, OSError):
            each.process.join(1.0)
            if each.process.exitcode == RAN_THE_PROGRAM:
                raise SettingError(UNGUARDED) from None
            self._replace(i, f"it died with exit code {each.process.exitcode}")
            return
        if finished == ERROR:
            line, text = sent
            raise WorkerError(f"{self.name} {i} raised {line}") from RemoteTraceback(text)
        slot, method, _ = self.calls[i].popleft()
        each.deadline = time.monotonic() + self.timeout
        heappush(self.ready, (finished, i, slot, method, tuple(sent)))

    def _replace(self, i: int, failure: str) -> None:
        """Start a worker anew.

        Raises:
            WorkerError: it failed too often.
        """
        self._end(i)
        self.notices.append(self.failures.add(i, failure))
        self.restarts += 1
        self._start(i)
