"""Sampling from a replay buffer: uniform, prioritized, and in sequences."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightning_rl.types import Tree, tree_map


class Window(NamedTuple):
    """B rows and what followed them, as arrays.

    reward: `[B, n]`, 0 after the end of an episode.  steps: `[B]`, the number k of steps to next_obs, 0 if terminated.
    weight: `[B]`.  rows: `[B]`, their indices in the buffer.  action_mask, next_action_mask: bool `[B, M]`, of obs and next_obs, or ().
    Only for sequences: episode_start, memory and successor, see `types.Transition`; source, the row in each slot.
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


def concatenate(replayed: Window, shown: Window, behind: int) -> Window:
    """Concatenate two batches, row next to row or sequence next to sequence; indices of the second are shifted by `behind`."""
    n, m = len(replayed.rows), len(shown.rows)
    shown = shown._replace(rows=shown.rows + behind, source=tree_map(lambda rows: rows + behind, shown.source))

    def widen(window: Window, lanes: int, first: int) -> Window:
        return window._replace(
            weight=window.weight * (lanes / (n + m)),
            episode_start=tree_map(np.ravel, window.episode_start),
            successor=tree_map(lambda place: place // lanes * (n + m) + place % lanes + first, window.successor),
        )

    def join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = a.reshape(-1, n, *a.shape[1:]), b.reshape(-1, m, *b.shape[1:])
        return np.concatenate([a, b], 1).reshape(-1, *a.shape[2:])

    batch = tree_map(join, widen(replayed, n, 0), widen(shown, m, n))
    return batch._replace(episode_start=tree_map(lambda start: start.reshape(-1, n + m), batch.episode_start))


class Prioritized:
    """Proportional prioritized replay (Schaul et al. 2016, sect. 3.3): P(i) ∝ (|δ_i| + ε)^α, weights (N P(i))^−β divided by their maximum.

    ε is 1e-6. New rows get the largest priority so far; β grows from its first value to 1 over the run.
    """

    def __init__(self, rows: int, alpha: float, beta: float) -> None:
        self.tree = SumTree(rows)
        self.alpha, self.beta = alpha, beta
        self.largest = 1.0

    def draw(self, rng: np.random.Generator, ready: int, batch_size: int, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """Return rows of `ready`, one from each of `batch_size` equal parts of the total, and their weights, at most 1 / batch_size."""
        beta = self.beta + progress * (1 - self.beta)
        sums = (np.arange(batch_size) + rng.random(batch_size)) / batch_size * self.tree.total
        rows = self.tree.find(sums)
        weight = (ready * self.tree[rows] / self.tree.total) ** -beta
        return rows, (weight / weight.max() / batch_size).astype(np.float32)

    def admit(self, rows: np.ndarray, overwritten: np.ndarray | None = None) -> None:
        """Make rows available for drawing, and overwritten ones unavailable."""
        if overwritten is not None:
            self.tree[overwritten] = 0.0
        self.tree[rows] = self.largest

    def update(self, rows: np.ndarray, errors: Callable[[], Tensor]) -> None:
        """Set the priorities of rows from their errors |δ| `[B]`."""
        priority = (errors().detach().cpu().numpy() + 1e-6) ** self.alpha
        self.tree[rows] = priority
        self.largest = max(self.largest, float(priority.max()))

    def priorities(self, rows: np.ndarray) -> np.ndarray | None:
        return self.tree[rows]

    def restore(self, rows: np.ndarray, priorities: np.ndarray) -> None:
        """Make only these rows available, with these priorities; raise `ValueError` for negative or non-finite priorities."""
        if not (np.isfinite(priorities).all() and (priorities >= 0).all()):
            raise ValueError("negative or non-finite priorities")
        self.tree.fill(rows, priorities)

    def position(self) -> dict[str, float]:
        """Return the largest priority so far."""
        return {"largest": self.largest}

    def continue_from(self, position: Mapping[str, float]) -> None:
        """Restore the result of `position`; raise `ValueError` for an invalid priority."""
        self.largest = float(position["largest"])
        if not 0 < self.largest < float("inf"):
            raise ValueError(f"the largest priority is {self.largest}")


class SumTree:
    """Numbers at `size` indices, drawn in proportion to their values. Sums are float64, in a binary tree in one array, its root at 1."""

    def __init__(self, size: int) -> None:
        self.leaves = 1 << max(0, size - 1).bit_length()
        self.depth = self.leaves.bit_length() - 1
        self.tree = np.zeros(2 * self.leaves)

    @property
    def total(self) -> float:
        return float(self.tree[1])

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        return self.tree[self.leaves + places]

    def __setitem__(self, places: np.ndarray, values: np.ndarray | float) -> None:
        node = self.leaves + np.asarray(places)
        self.tree[node] = values
        for _ in range(self.depth):
            node = node >> 1
            self.tree[node] = self.tree[2 * node] + self.tree[2 * node + 1]

    def fill(self, places: np.ndarray, values: np.ndarray) -> None:
        """Set the numbers at these indices, and 0 at all others."""
        self.tree[:] = 0
        self[places] = values

    def find(self, sums: np.ndarray) -> np.ndarray:
        """Return for each sum s in [0, total) the index at which the cumulative sum of the numbers exceeds s, never one that holds 0."""
        node = np.ones(len(sums), dtype=np.int64)
        for _ in range(self.depth):
            node = 2 * node
            left = self.tree[node]
            right = (sums >= left) & (self.tree[node + 1] > 0)  # rounding may push a sum past the last number
            sums = np.where(right, sums - left, sums)
            node += right
        return node - self.leaves


@dataclass(frozen=True)
class Sequences:
    """How to draw sequences.

    A sequence fills T slots with rows in order. At the end of an episode the final observation takes a slot of its own, so that the
    successor of a row is always in a later slot. Only `length` slots are learned from, and of these only slots with rows.

    Args:
        burn_in: slots before them, which only warm up the memory.
        length: slots to learn from.
        memory: memory of one environment, as arrays; each row holds such a memory.
    """

    burn_in: int
    length: int
    memory: Tree

    def slots(self, n_steps: int) -> int:
        """Return T, which includes the observation n steps after the last row."""
        return self.burn_in + self.length + n_steps

    def arrange(self, window: np.ndarray, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return from consecutive rows `[T, N]` the row in each slot, and whether the slot holds the observation after that row."""
        steps = len(window)
        place = np.arange(steps)[:, None] + ended.cumsum(0) - ended
        rows, final = window.copy(), np.zeros(window.shape, dtype=bool)
        t, lane = (place < steps).nonzero()
        rows[place[t, lane], lane] = window[t, lane]
        t, lane = (ended & (place + 1 < steps)).nonzero()
        rows[place[t, lane] + 1, lane] = window[t, lane]
        final[place[t, lane] + 1, lane] = True
        return rows, final


def sequence_errors(errors: Tensor, weight: Tensor, sequences: int) -> Tensor:
    """Return η max |δ| + (1 − η) mean |δ|, η = 0.9, over the learned rows of each sequence (Kapturowski et al. 2019, sect. 2.3).

    errors, weight: `[T · N]`, time-major.  Returns `[N]`.
    """
    learned = (weight > 0).view(-1, sequences)
    errors = errors.view(-1, sequences) * learned
    return 0.9 * errors.amax(0) + 0.1 * errors.sum(0) / learned.sum(0).clamp(min=1)
