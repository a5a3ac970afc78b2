"""Which rows of a replay buffer to learn from: uniformly, by priority, in sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_rl.errors import SettingError
from lightning_rl.types import Tree, tree_index, tree_map


class SumTree:
    """Numbers at `size` places, drawn in proportion to their values. Sums are float64, in a binary tree in one array, its root at 1."""

    def __init__(self, size: int) -> None:
        self.leaves = 1 << max(0, size - 1).bit_length()
        self.depth = self.leaves.bit_length() - 1
        self.tree = np.zeros(2 * self.leaves)

    @property
    def total(self) -> float:
        """The sum of all numbers."""
        return float(self.tree[1])

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        return self.tree[self.leaves + places]

    def __setitem__(self, places: np.ndarray, values: Any) -> None:
        node = self.leaves + np.asarray(places)
        self.tree[node] = values
        for _ in range(self.depth):
            node = node >> 1
            self.tree[node] = self.tree[2 * node] + self.tree[2 * node + 1]

    def fill(self, places: np.ndarray, values: np.ndarray) -> None:
        """Numbers at some places, 0 at all others."""
        self.tree[:] = 0
        self.tree[self.leaves + places] = values
        first = self.leaves >> 1
        while first:
            self.tree[first : 2 * first] = self.tree[2 * first : 4 * first : 2] + self.tree[2 * first + 1 : 4 * first : 2]
            first >>= 1

    def find(self, sums: np.ndarray) -> np.ndarray:
        """For each sum s in [0, total): the place where the running sum of the numbers passes s. Never one that holds 0."""
        node = np.ones(len(sums), dtype=np.int64)
        for _ in range(self.depth):
            node = 2 * node
            left = self.tree[node]
            right = (sums >= left) & (self.tree[node + 1] > 0)  # rounding may leave a sum beyond the last number
            sums = np.where(right, sums - left, sums)
            node += right
        return node - self.leaves


class Uniform:
    """All rows alike, drawn with or without replacement."""

    nbytes = 0

    def __init__(self, rows: int, replace: bool) -> None:
        self.replace = replace

    def draw(self, buffer: Any, batch_size: int, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """Rows, and their weights, which sum to 1."""
        size = buffer.ready
        if self.replace:
            number = buffer.rng.integers(0, size, batch_size)
        elif size < batch_size:
            raise SettingError(f"{batch_size} rows without replacement of {size}: raise learning_starts or lower batch_size")
        else:
            number = buffer.rng.choice(size, batch_size, replace=False, shuffle=False)
        return buffer.locate(number), np.full(batch_size, 1 / batch_size, dtype=np.float32)

    def complete(self, rows: np.ndarray) -> None:
        """Rows that may be drawn from now on: nothing to keep."""

    def remove(self, rows: np.ndarray) -> None:
        """Rows that may no longer be drawn: nothing to keep."""

    def update(self, rows: np.ndarray, errors: Callable[[], Tensor]) -> None:
        """What the errors of rows were when they were learned from: it does not matter."""

    def priorities(self, rows: np.ndarray) -> np.ndarray | None:
        """There are none."""

    def restore(self, rows: np.ndarray, priorities: np.ndarray) -> None:
        """Nothing to restore."""

    def position(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def continue_from(self, position: dict[str, Any]) -> None:
        """Nothing to restore."""


def sequence_errors(errors: Tensor, weight: Tensor, sequences: int) -> Tensor:
    """η max |δ| + (1 − η) mean |δ| with η = 0.9 over the rows of each sequence that are learned from (Kapturowski et al. 2019, sect. 2.3).

    errors, weight: `[T · N]`, time-major.  Returns `[N]`.
    """
    learned = (weight > 0).view(-1, sequences)
    errors = errors.view(-1, sequences) * learned
    return 0.9 * errors.amax(0) + 0.1 * errors.sum(0) / learned.sum(0).clamp(min=1)


class Prioritized:
    """Proportional prioritized replay (Schaul et al. 2016, sect. 3.3): P(i) ∝ (|δ_i| + ε)^α, weights (N P(i))^−β over their largest.

    New rows have the largest priority so far; β grows from its first value to 1 over the run.
    """

    def __init__(self, rows: int, alpha: float, beta: float, epsilon: float = 1e-6) -> None:
        self.tree = SumTree(rows)
        self.alpha, self.beta, self.epsilon = alpha, beta, epsilon
        self.largest = 1.0

    def draw(self, buffer: Any, batch_size: int, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """Rows, one from each of `batch_size` equal parts of the total, and their weights, at most 1 / batch_size."""
        beta = self.beta + progress * (1 - self.beta)
        sums = (np.arange(batch_size) + buffer.rng.random(batch_size)) / batch_size * self.tree.total
        rows = self.tree.find(sums)
        weight = (buffer.ready * self.tree[rows] / self.tree.total) ** -beta
        return rows, (weight / weight.max() / batch_size).astype(np.float32)

    def complete(self, rows: np.ndarray) -> None:
        """Rows that may be drawn from now on."""
        self.tree[rows] = self.largest

    def remove(self, rows: np.ndarray) -> None:
        """Rows that may no longer be drawn."""
        self.tree[rows] = 0.0

    def update(self, rows: np.ndarray, errors: Callable[[], Tensor]) -> None:
        """New priorities of rows, from their errors |δ| `[B]`."""
        priority = (errors().detach().cpu().numpy() + self.epsilon) ** self.alpha
        self.tree[rows] = priority
        self.largest = max(self.largest, float(priority.max()))

    @property
    def nbytes(self) -> int:
        """What the tree takes."""
        return self.tree.tree.nbytes

    def priorities(self, rows: np.ndarray) -> np.ndarray | None:
        """Those of rows that may be drawn."""
        return self.tree[rows]

    def restore(self, rows: np.ndarray, priorities: np.ndarray) -> None:
        """The inverse; no other row may be drawn.

        Raises:
            ValueError: some are negative or no numbers.
        """
        if not (np.isfinite(priorities).all() and (priorities >= 0).all()):
            raise ValueError("priorities that are none")
        self.tree.fill(rows, priorities)

    def position(self) -> dict[str, Any]:
        """The largest priority so far."""
        return {"largest": self.largest}

    def continue_from(self, position: dict[str, Any]) -> None:
        """The inverse."""
        self.largest = float(position["largest"])
        if not 0 < self.largest < float("inf"):
            raise ValueError(f"the largest priority is {self.largest}")


class Window(NamedTuple):
    """B rows and what followed them, as arrays.

    reward: `[B, n]`, 0 behind the end of an episode.  steps: `[B]`, the number k of steps that next_obs lies ahead, 0 if terminated.
    weight: `[B]`.  rows: `[B]`, their places in the buffer.  action_mask, next_action_mask: bool `[B, M]`, of obs and next_obs, or ().
    Of sequences, see `types.Transition`: episode_start, memory, successor; and source, the row in each slot.
    """

    obs: Tree
    action: Tree
    reward: np.ndarray
    steps: np.ndarray
    next_obs: Tree
    weight: np.ndarray
    rows: np.ndarray
    episode_start: Tree = ()
    memory: Tree = ()
    successor: Tree = ()
    action_mask: Tree = ()
    next_action_mask: Tree = ()
    source: Tree = ()


@dataclass(frozen=True)
class Sequences:
    """How to draw sequences.

    A sequence fills T slots with rows in their order. Where an episode ends, its last observation takes a slot of its own, so that what
    follows a row always lies in one of the slots behind it. Only `length` slots are learned from, and of these those that hold rows.

    Args:
        burn_in: slots before them, which only fill the memory.
        length: slots to learn from.
        memory: that of one environment, as arrays; rows hold one like it.
    """

    burn_in: int
    length: int
    memory: Tree

    def slots(self, n_steps: int) -> int:
        """T: what lies n steps ahead of the last row is there too."""
        return self.burn_in + self.length + n_steps

    def draw(self, buffer: Any, batch_size: int, progress: float) -> Window:
        """N = `batch_size` / `length` sequences from a replay buffer, in time-major order, B = T · N."""
        starts, weight = buffer.sampler.draw(buffer, batch_size // self.length, progress)
        num, steps = len(starts), self.slots(buffer.n_steps)
        buffer.drawn += num * self.length
        window = buffer.ahead(starts, steps).T
        rows, final = self._arrange(window, buffer.layout.row.ended[window])
        flat = rows.reshape(-1)
        row, next_seen = buffer.layout.read(flat, flat)
        at, seen = np.flatnonzero(final), row.seen
        tree_map(lambda leaf, last: leaf.__setitem__(at, last[at]), seen, next_seen)
        reward, ahead, length, _ = buffer.windows(flat)
        slot = np.arange(steps)[:, None]
        learned = ~final & (slot >= self.burn_in) & (slot < self.burn_in + self.length)
        start = np.concatenate([np.zeros((1, num), dtype=bool), final[:-1]])
        successor = np.minimum(slot + length.reshape(steps, num), steps - 1) * num + np.arange(num)
        return Window(
            seen.obs,
            row.action,
            reward,
            ahead,
            seen.obs,
            (weight * learned * (num / max(1, learned.sum()))).astype(np.float32).reshape(-1),
            starts,
            start,
            tree_index(row.memory, slice(num)),
            successor.reshape(-1),
            seen.mask,
            seen.mask,
            flat,
        )

    def _arrange(self, window: np.ndarray, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """From rows one after the other `[T, N]` to slots: the row in each, and whether it is the observation after that row instead."""
        steps = len(window)
        place = np.arange(steps)[:, None] + ended.cumsum(0) - ended
        rows, final = window.copy(), np.zeros(window.shape, dtype=bool)
        t, lane = (place < steps).nonzero()
        rows[place[t, lane], lane] = window[t, lane]
        t, lane = (ended & (place + 1 < steps)).nonzero()
        rows[place[t, lane] + 1, lane] = window[t, lane]
        final[place[t, lane] + 1, lane] = True
        return rows, final
