"""Memory that processes share: weights with a version, and room for answers."""

from __future__ import annotations

import pickle
import shutil
import time
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.errors import SettingError

ALIGNMENT = 64
FOLDER = Path("/dev/shm")
"""Where Linux has shared memory."""
HEAD = ALIGNMENT
"""Bytes before the weights, which begin with two versions."""


class SharedWeights:
    """The weights of a network in one block of shared memory.

    A version stands before and behind the weights: the first changes before they are written, the second after. Who reads sees by two that
    differ, or that changed meanwhile, that weights were torn, and reads again.

    Args:
        network: whose `state_dict` it holds.
        name: of a block that another process made; None makes one.

    Raises:
        SettingError: there is no memory for it.
    """

    def __init__(self, network: nn.Module, name: str | None = None) -> None:
        state = network.state_dict()
        sizes = [_aligned(tensor.nbytes) for tensor in state.values()]
        if name is None and not _is_room_for(sum(sizes)):
            raise SettingError(f"{FOLDER} has no room for a network of {sum(sizes) / 1e6:,.0f} MB; enlarge it (docker run --shm-size)")
        self.block = SharedMemory(name, create=name is None, size=0 if name else HEAD + sum(sizes))
        assert self.block.buf is not None
        head = torch.frombuffer(self.block.buf, dtype=torch.int64, count=2)
        self.begun, self.done = head[:1], head[1:]
        self.weights: dict[str, Tensor] = {}
        offset = HEAD
        for (key, tensor), size in zip(state.items(), sizes, strict=True):
            flat = torch.frombuffer(self.block.buf, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            self.weights[key] = flat.view(tensor.shape)
            offset += size

    @property
    def name(self) -> str:
        """By which another process finds it."""
        return self.block.name

    def write(self, network: nn.Module, version: int) -> None:
        """Publish a network's weights."""
        self.begun.fill_(version)
        for key, tensor in network.state_dict().items():
            self.weights[key].copy_(tensor)
        self.done.fill_(version)

    @torch.no_grad()
    def read(self, network: nn.Module) -> int:
        """Give a network the newest weights. Returns their version."""
        state = network.state_dict()
        while True:
            version = int(self.done)
            for key, tensor in self.weights.items():
                state[key].copy_(tensor)
            if int(self.begun) == version:
                return version
            time.sleep(1e-4)

    def close(self, unlink: bool = False) -> None:
        """Let go of the block; the one who made it also removes it."""
        self.weights.clear()
        del self.begun, self.done
        _close(self.block, unlink)


class Slot:
    """Room for one answer of one worker, made by the one who asks, as large as what did not fit the last time."""

    def __init__(self) -> None:
        self.block: SharedMemory | None = None

    @property
    def name(self) -> str | None:
        """By which the worker finds it; None if there is no room yet."""
        return None if self.block is None else self.block.name

    def grow(self, size: int) -> bool:
        """Have room for so many bytes from the next answer on. Whether there is memory for it."""
        self.close()
        if not _is_room_for(size):
            return False
        self.block = SharedMemory(create=True, size=size)
        assert self.block.buf is not None
        self.block.buf[:size] = bytes(size)  # what is not written is not taken, and would be promised to the next one too
        return True

    def load(self, header: bytes, sizes: list[int]) -> Any:
        """The answer that lies there, copied."""
        assert self.block is not None and self.block.buf is not None
        buffers, offset = [], 0
        for size in sizes:
            buffers.append(bytearray(self.block.buf[offset : offset + size]))
            offset += _aligned(size)
        return pickle.loads(header, buffers=buffers)

    def close(self) -> None:
        """Remove it."""
        if self.block is not None:
            _close(self.block, unlink=True)
            self.block = None


class SlotWriter:
    """The worker's side of a slot."""

    def __init__(self) -> None:
        self.block: SharedMemory | None = None

    def dump(self, name: str | None, value: Any) -> tuple[bytes, list[int], list[bytes] | None]:
        """Write the arrays of a value to the slot of a name. Returns its pickle without them, their sizes, and, where they do not fit, they
        themselves."""
        buffers: list[pickle.PickleBuffer] = []
        header = pickle.dumps(value, 5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        sizes = [view.nbytes for view in views]
        self._attach(name)
        if self.block is None or self.block.size < sum(map(_aligned, sizes)):
            return header, sizes, [bytes(view) for view in views]
        assert self.block.buf is not None
        offset = 0
        for view, size in zip(views, sizes, strict=True):
            self.block.buf[offset : offset + size] = view
            offset += _aligned(size)
        return header, sizes, None

    def _attach(self, name: str | None) -> None:
        if self.block is None or self.block.name != name:
            self.close()
            self.block = None if name is None else SharedMemory(name)

    def close(self) -> None:
        """Let go of it."""
        if self.block is not None:
            _close(self.block)
            self.block = None


def _is_room_for(size: int) -> bool:
    """Writing where there is none would kill the process."""
    return not FOLDER.exists() or shutil.disk_usage(FOLDER).free >= 2 * size


def room(sizes: list[int]) -> int:
    """Bytes that arrays of these sizes take in a slot."""
    return sum(map(_aligned, sizes))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _close(block: SharedMemory, unlink: bool = False) -> None:
    if unlink:
        with suppress(FileNotFoundError):
            block.unlink()
    with suppress(BufferError):  # somebody still holds a view; the memory goes with it
        block.close()
