"""Workers in processes on this machine. Weights and large answers are in shared memory, everything else goes through pipes."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import time
from contextlib import closing, nullcontext, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_rl.actors.workers import Answer, Call, RemoteWorker, RemoteWorkers, set_weights, weights_of
from lightning_rl.errors import SettingError
from lightning_rl.processes.children import Child, WorkerError, close_at_exit, close_children
from lightning_rl.processes.startup import RAN_THE_PROGRAM, UNGUARDED, leave_the_program


def work(index: int, restarts: int, made_of: bytes, weights: SharedWeights, pipe: Connection) -> None:
    """Answer calls of a worker until the request None or until the other end of the pipe is closed."""
    remote = RemoteWorker(index, restarts, made_of)
    try:
        while (request := pipe.recv()) is not None:
            method, arguments, block = request
            answer = remote.answer(weights.read, method, arguments)
            answer = answer._replace(value=pack(answer.value, block))
            pipe.send((time.monotonic(), answer))
    except (EOFError, ConnectionError):
        pass
    except Exception as error:  # user code may raise anything
        with suppress(OSError):  # another worker's error may have ended the run already
            pipe.send(remote.describe_error(error))
    finally:
        if remote.worker is not None:
            remote.worker.close()


class ProcessWorkers(RemoteWorkers):
    """Workers that each run in a spawned process. `receive` raises `SettingError`: the program starts training when it is imported."""

    def _open(self) -> None:
        leave_the_program()
        self.context = multiprocessing.get_context("spawn")
        self.weights = SharedWeights(self.network)
        self.processes: dict[int, Child] = {}
        self.slots: list[list[Slot]] = [[] for _ in range(self.num)]
        """Free slots of each worker."""
        self.is_full = False
        """Whether shared memory had no room for an answer."""
        close_at_exit(self)

    def publish(self, version: int) -> None:
        super().publish(version)
        self.weights.write(self.network, version)

    def close(self) -> None:
        close_children(self.processes.values(), None)
        self.processes.clear()
        for slot in (*(slot for slots in self.slots for slot in slots), *(call.handle for calls in self.calls for call in calls)):
            slot.close()

    def _start(self, i: int, restarts: int, made_of: bytes) -> None:
        arguments = (i, restarts, made_of, self.weights)
        self.processes[i] = Child(self.context, work, arguments, f"actor-{i}")  # not a daemon, so that it can have children

    def _end(self, i: int) -> None:
        self.processes.pop(i).kill()

    def _send(self, i: int, call: Call) -> None:
        call.handle = call.handle or (self.slots[i].pop() if self.slots[i] else Slot())
        with suppress(OSError):  # a dead worker is noticed when its answer is awaited
            self.processes[i].pipe.send((call.method, call.arguments, call.handle.name))

    def _wait(self, busy: list[int], seconds: float) -> list[int]:
        workers: dict[Any, int] = {self.processes[i].pipe: i for i in busy}
        return [workers[pipe] for pipe in wait(list(workers), seconds)]

    def _answer(self, i: int, call: Call) -> tuple[float, Answer] | WorkerError | str:
        try:
            received = self.processes[i].pipe.recv()
        except (EOFError, OSError):
            reason = self.processes[i].exit_reason()
            if self.processes[i].process.exitcode == RAN_THE_PROGRAM:
                raise SettingError(UNGUARDED) from None
            return reason
        if isinstance(received, WorkerError | str):
            return received
        (finished, answer), slot = received, call.handle
        packed: Packed = answer.value
        self.slots[i].append(slot)
        value = slot.load(packed)
        if packed.arrays and not slot.resize(room(packed.sizes)) and not self.is_full:
            self.is_full = True
            self.notices.append(f"shared memory is full: answers of actor {i} go through pipes")
        return finished, answer._replace(value=value)


ALIGNMENT = 64
FOLDER = Path("/dev/shm")
"""Linux's folder of shared memory."""


class SharedWeights:
    """The weights of a network in shared memory, which processes share by getting this object as an argument.

    There are two version numbers: `begun` changes before the weights are written, `done` after. If a reader finds that they differ, it may
    have read half-written weights, and reads again. Raises `SettingError`: shared memory is too small.
    """

    def __init__(self, network: nn.Module) -> None:
        state = weights_of(network)
        size = sum(tensor.nbytes for tensor in state.values())
        if not _has_room(size):
            raise SettingError(f"{FOLDER} has no room for a network of {size / 1e6:,.0f} MB; enlarge it (docker run --shm-size)")
        self.weights = {key: tensor.detach().to("cpu", copy=True).share_memory_() for key, tensor in state.items()}
        self.begun, self.done = (torch.zeros((), dtype=torch.int64).share_memory_() for _ in range(2))

    @torch.no_grad()
    def write(self, network: nn.Module, version: int) -> None:
        """Publish a network's weights."""
        self.begun.fill_(version)
        for key, tensor in weights_of(network).items():
            if key in self.weights:
                self.weights[key].copy_(tensor)
        self.done.fill_(version)

    def read(self, network: nn.Module) -> int:
        """Copy the newest weights into a network; return their version."""
        while True:
            version = int(self.done)
            set_weights(network, self.weights)
            if int(self.begun) == version:
                return version
            time.sleep(1e-4)


class Packed(NamedTuple):
    """A pickled answer, the sizes of its arrays, and the arrays themselves if they did not fit into shared memory."""

    pickled: bytes
    sizes: list[int]
    arrays: list[bytes] | None


def pack(value: object, block: str | None) -> Packed:
    """Pickle an answer, with its arrays in the named block of shared memory if there is room."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, 5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in views]
    with nullcontext() if block is None or not sizes else closing(SharedMemory(block)) as memory:
        if memory is None or memory.size < room(sizes):
            return Packed(pickled, sizes, list(map(bytes, views)))
        offset = 0
        for view, size in zip(views, sizes, strict=True):
            memory_of(memory)[offset : offset + size] = view
            offset += room([size])
    return Packed(pickled, sizes, None)


class Slot:
    """Shared memory for the answer to one call, as large as the last answer that did not fit."""

    def __init__(self) -> None:
        self.block: SharedMemory | None = None

    @property
    def name(self) -> str | None:
        return None if self.block is None else self.block.name

    def resize(self, size: int) -> bool:
        """Replace the block by one of this many bytes if there is memory for it; return whether there is."""
        self.close()
        if not _has_room(size):
            return False
        self.block = SharedMemory(create=True, size=size)
        memory_of(self.block)[:size] = bytes(size)  # memory is allocated only when written to, and could be promised twice
        return True

    def load(self, packed: Packed) -> Any:
        """Return a copy of an answer."""
        if packed.arrays is not None:
            return pickle.loads(packed.pickled, buffers=map(bytearray, packed.arrays))
        assert self.block is not None
        buffers, offset = [], 0
        for size in packed.sizes:
            buffers.append(bytearray(memory_of(self.block)[offset : offset + size]))
            offset += room([size])
        return pickle.loads(packed.pickled, buffers=buffers)

    def close(self) -> None:
        if self.block is not None:
            with suppress(FileNotFoundError):
                self.block.unlink()
            with suppress(BufferError):  # a view is still in use, and releases the memory
                self.block.close()
            self.block = None


def room(sizes: list[int]) -> int:
    """Return the aligned size in bytes of arrays of these sizes in shared memory."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def memory_of(block: SharedMemory) -> memoryview:
    """Return the memory of an open block."""
    assert block.buf is not None
    return block.buf


def _has_room(size: int) -> bool:
    """Return whether this many bytes can be written; writing without free memory would kill the process."""
    return not FOLDER.exists() or shutil.disk_usage(FOLDER).free >= 2 * size
