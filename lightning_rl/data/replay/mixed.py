"""Batches of which a fixed share are demonstrations (Ball et al. 2023, https://arxiv.org/abs/2302.02948, where it is a half)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.data.replay.sampling import Window
from lightning_rl.data.replay.storage import Observation, Row
from lightning_rl.errors import SettingError
from lightning_rl.types import State, tree_map


class MixedReplay(ReplayBuffer):
    """A replay buffer with a second one that is only read: rows of both come in each batch, its own first.

    What a replay buffer reports is about its own rows, which alone may have priorities; places after its own are those of the second one.

    Args:
        shown: the second buffer, full of demonstrations, with the same rows.
        share: of each batch that comes from there, in whole rows, or in whole sequences; at least one is of each kind.
        own: arguments of `ReplayBuffer`.
    """

    def __init__(self, *own: Any, shown: ReplayBuffer, share: float, **settings: Any) -> None:
        super().__init__(*own, **settings)
        self.shown, self.share = shown, share
        self.behind = len(self.envs) * self.slots
        """The first place of the second buffer."""

    def shown_rows(self, batch_size: int) -> int:
        """Return how many rows of a batch are demonstrations; raise `SettingError` if none or all of them are."""
        length = 1 if self.sequences is None else self.sequences.length
        drawn = round(self.share * (batch_size // length))
        if not 0 < drawn < batch_size // length:
            kind = "rows" if self.sequences is None else f"sequences of {length} rows"
            share = f"replay.demonstration_share {self.share:g} of {batch_size // length} {kind} is {drawn}"
            raise SettingError(f"{share}; a batch must hold both demonstrations and the run's own")
        return drawn * length

    def sample(self, batch_size: int, progress: float = 0.0) -> Window:
        shown = self.shown_rows(batch_size)
        own = super().sample(batch_size - shown, progress)
        return concatenate(own, self.shown.sample(shown), self.behind)

    def update(self, rows: np.ndarray, errors: Callable[[], Tensor]) -> None:
        own = rows[rows < self.behind]
        super().update(own, lambda: errors()[: len(own)])

    def steps(self, rows: np.ndarray) -> tuple[Row, Observation, np.ndarray]:
        own = rows < self.behind
        parts = super().steps(rows[own]), self.shown.steps(rows[~own] - self.behind)

        def merge(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
            places = own.repeat((len(mine) + len(other)) // len(own))
            both = np.empty((len(places), *mine.shape[1:]), mine.dtype)
            both[places], both[~places] = mine, other
            return both

        return tree_map(merge, *parts)

    def age(self, rows: np.ndarray) -> np.ndarray:
        return super().age(rows[rows < self.behind])

    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self.shown.reseed(seed + 1)

    def position(self) -> State:
        return {**super().position(), "shown": self.shown.rng.bit_generator.state}

    def continue_from(self, position: State) -> None:
        super().continue_from(position)
        if "shown" in position:  # a run may go on with demonstrations that began without
            self.shown.rng.bit_generator.state = position["shown"]


def concatenate(own: Window, shown: Window, behind: int) -> Window:
    """Return one batch of two, row next to row or sequence next to sequence; places of the second count on from `behind`."""
    n, m = len(own.rows), len(shown.rows)
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

    batch = tree_map(join, widen(own, n, 0), widen(shown, m, n))
    return batch._replace(episode_start=tree_map(lambda start: start.reshape(-1, n + m), batch.episode_start))
