"""Recurrent memory. One signature: `(features, memory, episode_start) -> (features, memory)`."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from lightning_rl.errors import SettingError, check_range, nearest
from lightning_rl.types import Tree

State = tuple[Tensor, ...]
Arrays = tuple[np.ndarray, ...]
# cuDNN wants the weights of a cell in one block of memory; here they are part of the network's vector, and small enough to copy each time
warnings.filterwarnings("ignore", "RNN module weights are not part", UserWarning, r"lightning_rl\.networks\.memory")
HOLD = 1e4
"""The input that holds a gate open (negative: closed), whatever its other inputs."""


class Memory(ABC):
    """The recurrent memory of a policy: `LSTM` or `GRU`, with the checks of ML-Agents. Your own class must store arguments as attributes.

    Args:
        memory_size: size of the state, an even number; half of an LSTM's state is its output h and half its cell c.
        sequence_length: steps of backpropagation through time; a minibatch contains `batch_size / sequence_length` sequences.
        burn_in: steps before replayed sequences that only initialize the memory (Kapturowski et al. 2019, R2D2).

    Raises:
        SettingError: the size is odd or not positive.
    """

    def __init__(self, memory_size: int = 128, sequence_length: int = 64, burn_in: int = 0) -> None:
        check_range("memory.memory_size", memory_size, 2, whole=True)
        check_range("memory.sequence_length", sequence_length, 1, whole=True)
        check_range("memory.burn_in", burn_in, 0, whole=True)
        if memory_size % 2:
            raise SettingError(f"memory.memory_size must be even, got {memory_size}; use {memory_size - 1} or {memory_size + 1}")
        self.memory_size, self.sequence_length, self.burn_in = memory_size, sequence_length, burn_in

    @property
    def settings(self) -> dict[str, object]:
        """Return the settings as plain data, from which `as_memory` rebuilds the memory."""
        return {"class_path": type(self).__name__, "init_args": dict(vars(self))}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.memory_size}, {self.sequence_length}, {self.burn_in})"

    @abstractmethod
    def build(self, num_inputs: int, num_goal_features: int = 0) -> RecurrentMemory:
        """Build the module for features of this width; the last `num_goal_features` are those of goals."""


class LSTM(Memory):
    """Long short-term memory (Hochreiter and Schmidhuber 1997)."""

    def build(self, num_inputs: int, num_goal_features: int = 0) -> RecurrentMemory:
        return LSTMMemory(self.memory_size // 2, num_inputs, num_goal_features, self.sequence_length, self.burn_in)


class GRU(Memory):
    """Gated recurrent units (Cho et al. 2014)."""

    def build(self, num_inputs: int, num_goal_features: int = 0) -> RecurrentMemory:
        return GRUMemory(self.memory_size, num_inputs, num_goal_features, self.sequence_length, self.burn_in)


def as_memory(setting: Memory | type[Memory] | str | Mapping[str, object] | None) -> Memory | None:
    """Return the memory of a setting: a memory, its class or name, or a mapping with class_path and init_args, as files contain it.

    A name is LSTM, GRU or the name or path of an imported class. Raises `SettingError`: the setting is anything else.
    """
    if setting is None or isinstance(setting, Memory):
        return setting
    if isinstance(setting, str):
        setting = {"class_path": setting}
    elif isinstance(setting, type) and issubclass(setting, Memory):
        return setting()
    if not isinstance(setting, Mapping) or not {"class_path"} <= setting.keys() <= {"class_path", "init_args"}:
        raise SettingError(f"memory must be LSTM, GRU, lightning_rl.LSTM(…), lightning_rl.GRU(…) or None, got {setting!r}")
    known, name = {cls.__name__: cls for cls in _subclasses(Memory)}, str(setting["class_path"]).rpartition(".")[2]
    if name not in known:
        raise SettingError(f"memory {name!r} is not a memory{nearest(name, known)}")
    try:
        return known[name](**(setting.get("init_args") or {}))  # type: ignore[arg-type]
    except TypeError as error:
        raise SettingError(f"memory: {name} refuses its arguments: {error}") from error


def _subclasses(base: type) -> list[type]:
    children: list[type] = base.__subclasses__()
    return [cls for child in children for cls in (child, *_subclasses(child))]


def make_memory(setting: Memory | None, num_inputs: int, num_goal_features: int = 0) -> NoMemory | RecurrentMemory:
    """Build the module for features of this width, goal features last; its `goal` is the slice of goal features in its output."""
    return NoMemory(num_inputs, num_goal_features) if setting is None else setting.build(num_inputs, num_goal_features)


class NoMemory(nn.Module):
    """No memory: features pass unchanged, and the memory is empty."""

    sequence_length = 1
    burn_in = 0

    def __init__(self, num_inputs: int = 0, num_goal_features: int = 0) -> None:
        super().__init__()
        self.num_features = num_inputs
        self.goal = slice(num_inputs - num_goal_features, num_inputs)

    def forward(self, features: Tensor, memory: Tree, episode_start: Tensor | None) -> tuple[Tensor, Tree]:
        return features, memory

    def after(self, encode: Callable[[], Tensor], memory: Tree, episode_start: Tensor | None) -> Tree:
        """Return the memory, without encoding."""
        return memory

    def initial(self, num: int) -> Tree:
        return ()


class RecurrentMemory(nn.Module):
    """A recurrent layer that is reset at episode starts.

    Sequences are split there into segments, which one call of the fused layer computes together. Each segment starts with zeros or the
    given memory. Rows of padding after a segment are marked by an additional input, whose fixed weights hold the gates so that the state
    stays the same: the final state is the one after each segment's last row. Goal features bypass the layer. No gradient flows into the
    first `burn_in` rows of longer sequences.
    """

    held: tuple[float, ...]
    """For each gate: 1 to hold it open, -1 to hold it closed, 0 if it does not matter."""
    leaves = 1
    """Number of tensors in a state."""
    hold: Tensor

    def __init__(self, size: int, num_inputs: int, num_goal_features: int, sequence_length: int, burn_in: int) -> None:
        super().__init__()
        self.sequence_length, self.burn_in = sequence_length, burn_in
        self.num_inputs, self.size, self.num_goal_features = num_inputs, size, num_goal_features
        self.num_features = size + num_goal_features
        self.goal = slice(size, self.num_features)
        self.gates = len(self.held)
        self.weight_ih = nn.Parameter(torch.empty(self.gates * size, num_inputs))
        self.weight_hh = nn.Parameter(torch.empty(self.gates * size, size))
        self.bias_ih = nn.Parameter(torch.zeros(self.gates * size))
        self.bias_hh = nn.Parameter(torch.zeros(self.gates * size))
        for weight in (self.weight_ih, self.weight_hh):
            for gate in weight.detach().chunk(self.gates):
                nn.init.xavier_uniform_(gate)
        self.register_buffer("hold", HOLD * torch.tensor(self.held).repeat_interleave(size), persistent=False)

    def fused(self, x: Tensor, state: State, weight_ih: Tensor) -> tuple[Tensor, State]:
        """Return the outputs `[T, N, H]` for inputs `[T, N, F]`, and the state after the last row; a state has leaves `[N, H]`."""
        raise NotImplementedError

    def cell(self, x: Tensor, state: State) -> State:
        """Return the state after one row; its first leaf is the output."""
        raise NotImplementedError

    def numpy_step(self, x: np.ndarray, state: Arrays, *weights: np.ndarray) -> Arrays:
        """Compute `cell` on arrays with transposed weights."""
        raise NotImplementedError

    def numpy_cell(self) -> Callable[[np.ndarray, Arrays], Arrays]:
        """Return `cell` on arrays, with live views of the weights."""
        weights = [parameter.detach().numpy().T for parameter in self.parameters()]
        return lambda x, state: self.numpy_step(x, state, *weights)

    def forward(self, features: Tensor, memory: Tree, episode_start: Tensor | None) -> tuple[Tensor, Tree]:
        batch, features = features.shape[:-1], features.float()
        if episode_start is None and len(batch) == 1 and len(memory):
            return self._step(features, memory)
        if episode_start is None:
            episode_start = torch.zeros(batch, dtype=torch.bool, device=features.device)
        num = episode_start.shape[-1]
        with torch.autocast(features.device.type, enabled=False):  # a state accumulates over many steps
            x, start = features.reshape(-1, num, self.num_inputs), episode_start.reshape(-1, num)
            state = memory if len(memory) else self.initial(num)
            if len(x) == 1:
                state = self.cell(x[0], _reset(state, start[0]))
                outputs = state[0]
            elif 0 < self.burn_in < len(x):
                with torch.no_grad():
                    filled, state = self._segments(x[: self.burn_in], state, start[: self.burn_in])
                outputs, state = self._segments(x[self.burn_in :], state, start[self.burn_in :])
                outputs = torch.cat([filled, outputs])
            else:
                outputs, state = self._segments(x, state, start)
        return self._with_goal(outputs.reshape(*batch, self.size), features), state

    def _step(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        """Compute one row `[N, F]` in which no episode starts, in operations that every export format has."""
        with torch.autocast(features.device.type, enabled=False):
            state = self.cell(features, state)
        return self._with_goal(state[0], features), state

    def _with_goal(self, outputs: Tensor, features: Tensor) -> Tensor:
        """Append the goal features to the outputs."""
        return torch.cat([outputs, features[..., -self.num_goal_features :]], -1) if self.num_goal_features else outputs

    def after(self, encode: Callable[[], Tensor], memory: Tree, episode_start: Tensor | None) -> Tree:
        """Return only the memory after the features that `encode` returns."""
        return self(encode(), memory, episode_start)[1]

    def initial(self, num: int) -> Tree:
        """Return the memory of `num` environments at the start of an episode: zeros."""
        return tuple(self.weight_hh.new_zeros(num, self.size) for _ in range(self.leaves))

    def _segments(self, x: Tensor, state: State, start: Tensor) -> tuple[Tensor, State]:
        steps, num = start.shape
        kept = _reset(state, start[0])
        if not start[1:].any():
            return self.fused(x, kept, self.weight_ih)
        begins = start.t().clone(memory_format=torch.contiguous_format)
        begins[:, 0] = True
        first = begins.flatten().nonzero().squeeze(-1)  # sequence by sequence
        segment = begins.flatten().cumsum(0) - 1
        row = torch.arange(steps * num, device=x.device) - first[segment]
        longest = int(row.max()) + 1
        padded = nn.functional.pad(x.new_zeros(longest, len(first), self.num_inputs), (0, 1), value=1.0)
        padded[row, segment] = nn.functional.pad(x.transpose(0, 1).flatten(0, 1), (0, 1))
        before = tuple(leaf.new_zeros(len(first), self.size).index_copy(0, segment[::steps], leaf) for leaf in kept)
        outputs, after = self.fused(padded, before, torch.cat([self.weight_ih, self.hold.unsqueeze(-1)], 1))
        outputs = outputs[row, segment].view(num, steps, -1).transpose(0, 1)
        return outputs, (outputs[-1], *(leaf[segment[steps - 1 :: steps]] for leaf in after[1:]))


class LSTMMemory(RecurrentMemory):
    """i, f, o = σ(…), g = tanh(…);  c ← f c + i g,  h ← o tanh c."""

    held, leaves = (-1.0, 1.0, 0.0, 0.0), 2

    def fused(self, x: Tensor, state: State, weight_ih: Tensor) -> tuple[Tensor, State]:
        weights = [weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
        outputs, h, c = torch.lstm(x, [leaf.unsqueeze(0) for leaf in state], weights, True, 1, 0.0, True, False, False)
        return outputs, (h[0], c[0])

    def cell(self, x: Tensor, state: State) -> State:
        return torch.lstm_cell(x, state, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)

    def numpy_step(self, x: np.ndarray, state: Arrays, *weights: np.ndarray) -> Arrays:
        weight_ih, weight_hh, bias_ih, bias_hh = weights
        (h, c), size = state, self.size
        gates = x @ weight_ih + h @ weight_hh + (bias_ih + bias_hh)
        g = np.tanh(gates[:, 2 * size : 3 * size])
        gates = _sigmoid(gates)
        c = gates[:, size : 2 * size] * c + gates[:, :size] * g
        return gates[:, 3 * size :] * np.tanh(c), c


class GRUMemory(RecurrentMemory):
    """r, z = σ(…), n = tanh(W x + b + r (U h + b'));  h ← (1 − z) n + z h."""

    held = (0.0, 1.0, 0.0)

    def fused(self, x: Tensor, state: State, weight_ih: Tensor) -> tuple[Tensor, State]:
        weights = [weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
        outputs, h = torch.gru(x, state[0].unsqueeze(0), weights, True, 1, 0.0, True, False, False)
        return outputs, (h[0],)

    def cell(self, x: Tensor, state: State) -> State:
        return (torch.gru_cell(x, state[0], self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh),)

    def numpy_step(self, x: np.ndarray, state: Arrays, *weights: np.ndarray) -> Arrays:
        weight_ih, weight_hh, bias_ih, bias_hh = weights
        (h,), size = state, self.size
        inputs, hidden = x @ weight_ih + bias_ih, h @ weight_hh + bias_hh
        gates = _sigmoid(inputs[:, : 2 * size] + hidden[:, : 2 * size])
        new = np.tanh(inputs[:, 2 * size :] + gates[:, :size] * hidden[:, 2 * size :])
        z = gates[:, size:]
        return ((1 - z) * new + z * h,)


def _reset(state: State, start: Tensor) -> State:
    """Return a state with zeros where an episode starts, even if it contained NaN."""
    return tuple(leaf.masked_fill(start.unsqueeze(-1), 0.0) for leaf in state)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))  # no overflow
