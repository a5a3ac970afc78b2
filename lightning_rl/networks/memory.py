"""What a network remembers. One signature: `(features, memory, episode_start) -> (features, memory)`.

Features `[..., F]` are T · N rows, time-major; `episode_start`, `[N]` for one step or `[T, N]`, says how many sequences they are and where
to forget: before a row that begins an episode. The memory is that before the first row, and, returned, that after the last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_rl.errors import SettingError, check_range, nearest
from lightning_rl.networks.recurrent import GRUMemory, LSTMMemory, RecurrentMemory
from lightning_rl.types import Tree


class NoMemory(nn.Module):
    """A policy that sees one observation at a time: the features pass, the memory is empty."""

    sequence_length = 1
    burn_in = 0

    def __init__(self, num_inputs: int = 0, num_goal_features: int = 0) -> None:
        super().__init__()
        self.num_features = num_inputs
        self.goal = slice(num_inputs - num_goal_features, num_inputs)

    def forward(self, features: Tensor, memory: Tree, episode_start: Tensor | None) -> tuple[Tensor, Tree]:
        return features, memory

    def after(self, encode: Callable[[], Tensor], memory: Tree, episode_start: Tensor | None) -> Tree:
        """The memory alone, after what `encode` would see."""
        return memory

    def initial(self, num: int) -> Tree:
        """The memory of `num` environments at the start of an episode."""
        return ()


class Memory(ABC):
    """How a policy remembers: `LSTM` or `GRU`, with the checks of ML-Agents. One of your own has its arguments as its attributes.

    Args:
        memory_size: how many numbers are kept from step to step, even. Of an LSTM one half is its output h and the other its cell c.
        sequence_length: steps through which gradients flow; a minibatch holds `batch_size / sequence_length` sequences.
        burn_in: of replayed sequences, so many steps before these that only fill the memory (Kapturowski et al. 2019, R2D2).

    Raises:
        SettingError: a size that is odd or not positive.
    """

    def __init__(self, memory_size: int = 128, sequence_length: int = 64, burn_in: int = 0) -> None:
        check_range("memory.memory_size", memory_size, 2, whole=True)
        check_range("memory.sequence_length", sequence_length, 1, whole=True)
        check_range("memory.burn_in", burn_in, 0, whole=True)
        if memory_size % 2:
            raise SettingError(f"memory.memory_size must be even, got {memory_size}; use {memory_size - 1} or {memory_size + 1}")
        self.memory_size, self.sequence_length, self.burn_in = memory_size, sequence_length, burn_in

    @property
    def settings(self) -> dict[str, Any]:
        """As plain data, from which `as_memory` makes it again."""
        return {"class_path": type(self).__name__, "init_args": dict(vars(self))}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.memory_size}, {self.sequence_length}, {self.burn_in})"

    @abstractmethod
    def build(self, num_inputs: int, num_goal_features: int = 0) -> RecurrentMemory:
        """The module for features of this width, the last of them those of goals."""


class LSTM(Memory):
    """Long short-term memory (Hochreiter and Schmidhuber 1997)."""

    def build(self, num_inputs: int, num_goal_features: int = 0) -> RecurrentMemory:
        return LSTMMemory(self.memory_size // 2, num_inputs, num_goal_features, self.sequence_length, self.burn_in)


class GRU(Memory):
    """Gated recurrent units (Cho et al. 2014)."""

    def build(self, num_inputs: int, num_goal_features: int = 0) -> RecurrentMemory:
        return GRUMemory(self.memory_size, num_inputs, num_goal_features, self.sequence_length, self.burn_in)


def as_memory(setting: Memory | Mapping[str, Any] | None) -> Memory | None:
    """The setting `memory`; in a file it is a mapping of class_path and init_args, which names LSTM, GRU or an imported class of one's own.

    Raises:
        SettingError: anything else.
    """
    if setting is None or isinstance(setting, Memory):
        return setting
    if not isinstance(setting, Mapping) or not {"class_path"} <= setting.keys() <= {"class_path", "init_args"}:
        raise SettingError(f"memory must be LSTM(…), GRU(…) or none, got {setting!r}")
    known, name = {cls.__name__: cls for cls in _kinds(Memory)}, str(setting["class_path"]).rpartition(".")[2]
    if name not in known:
        raise SettingError(f"memory.class_path {name!r} is not a memory{nearest(name, known)}")
    try:
        return known[name](**(setting.get("init_args") or {}))
    except TypeError as error:
        raise SettingError(f"memory: {name} refuses its arguments: {error}") from error


def _kinds(base: type) -> list[type]:
    children: list[type] = base.__subclasses__()
    return [cls for child in children for cls in (child, *_kinds(child))]


def make_memory(setting: Memory | None, num_inputs: int, num_goal_features: int = 0) -> NoMemory | RecurrentMemory:
    """The module for features of this width, the last of them those of goals; `goal` is where these lie in what it gives."""
    return NoMemory(num_inputs, num_goal_features) if setting is None else setting.build(num_inputs, num_goal_features)
