"""Drawing sequences from a replay buffer, for networks that remember (Kapturowski et al. 2019, R2D2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.types import Tree, tree_index, tree_map


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
