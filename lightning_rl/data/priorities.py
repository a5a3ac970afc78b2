"""Which rows of a replay buffer to learn from: all alike, or by the size of their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from lightning_rl.errors import SettingError


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
