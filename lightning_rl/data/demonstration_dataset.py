"""Demonstrations for Lightning: one item is one iteration, some minibatches of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Space
from torch import Generator

from lightning_rl.data.dataset import ExperienceDataset
from lightning_rl.data.demonstrations import DemonstrationBatch, EpisodeRows
from lightning_rl.data.episode_statistics import EpisodeStatistics
from lightning_rl.errors import SettingError, check_range
from lightning_rl.guards import Guard
from lightning_rl.spaces import allocate
from lightning_rl.types import Rollout, tree_map, tree_to_torch


@dataclass(frozen=True)
class DemonstrationSettings:
    """What to learn from in what portions; see the algorithms that have these settings."""

    batch_size: int
    updates_per_iteration: int
    max_updates: int
    validation_fraction: float
    split_seed: int
    sequence_length: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "updates_per_iteration"):
            check_range(name, getattr(self, name), 1, whole=True)
        check_range("validation_fraction", self.validation_fraction, 0, 1)
        check_range("split_seed", self.split_seed, 0, whole=True)
        if self.sequence_length > self.batch_size:
            raise SettingError(f"memory.sequence_length {self.sequence_length} is longer than batch_size {self.batch_size}")


class DemonstrationDataset(ExperienceDataset):
    """Endless iterations; each is an iterator over minibatches.

    Args:
        collector: a `NoCollector`.
        draws: of what to learn from.
        held: what is held back for validation.
        settings: how many minibatches there are; the last iteration has what is left of the run.
    """

    anew = "demonstrations are shuffled anew"

    def __init__(self, collector: Any, draws: DemonstrationDraws, held: EpisodeRows, settings: DemonstrationSettings) -> None:
        super().__init__(collector, -(-settings.max_updates // settings.updates_per_iteration))
        self.draws, self.held, self.settings, self.updates = draws, held, settings, 0

    @property
    def learned(self) -> EpisodeRows:
        """What to learn from."""
        return self.draws.rows

    def __iter__(self) -> Iterator[Iterator[DemonstrationBatch]]:
        while True:
            yield self._iteration()

    def begin_iteration(self, count: int, progress: float) -> None:
        self.updates = min(self.settings.updates_per_iteration, self.settings.max_updates - count)

    def _iteration(self) -> Iterator[DemonstrationBatch]:
        for _ in range(self.updates):
            self.batch = self.draws.draw()
            yield self.batch

    def validation(self) -> Iterator[tuple[int, DemonstrationBatch]]:
        """What is held back, once and in order, as minibatches of some thousand rows, each with their number."""
        size = max(1, 4096 // self.held.length)
        for at in range(0, len(self.held), size):
            sequences = np.arange(at, min(at + size, len(self.held)))
            yield int(self.held.size[sequences].sum()), self.draws.on_device(self.held.batch(sequences))

    def metrics(self) -> dict[str, float]:
        """How many times all demonstrations were learned from."""
        return {"train/epochs": self.draws.order.epochs}

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "order": self.draws.order.get_state()}

    def set_state(self, state: dict[str, Any]) -> str | None:
        super().set_state(state)
        return self.draws.order.set_state(state["order"])


class DemonstrationDraws:
    """Minibatches of demonstrations: all sequences come once, in random order, and then again in another.

    Args:
        rows: what to draw from.
        batch_size: rows of a minibatch, in whole sequences; all where there are fewer.
        seed: of the order, the same on all ranks: each takes its share of it.
        device: where minibatches go.
        rank, ranks: which of how many this is.
    """

    def __init__(self, rows: EpisodeRows, batch_size: int, seed: int, device: torch.device, rank: int = 0, ranks: int = 1) -> None:
        self.rows, self.device, self.rank, self.ranks = rows, device, rank, ranks
        self.num_sequences = min(batch_size // rows.length, max(1, len(rows) // ranks))
        self.order = ShuffledOrder(len(rows), seed)

    def draw(self) -> DemonstrationBatch:
        """The next minibatch."""
        return self.on_device(self.rows.batch(self.order.take(self.num_sequences * self.ranks)[self.rank :: self.ranks]))

    def on_device(self, batch: DemonstrationBatch) -> DemonstrationBatch:
        """A minibatch where it is learned from."""
        return tree_map(lambda leaf: leaf.to(self.device, non_blocking=True), batch)


class ShuffledOrder:
    """The places 0 … num − 1 in random order, all of them once, and then again in another order, without end."""

    def __init__(self, num: int, seed: int) -> None:
        self.num, self.generator, self.past = num, Generator().manual_seed(seed), 0
        self._begin()

    def _begin(self) -> None:
        self.began, self.position = self.generator.get_state(), 0
        self.order = torch.randperm(self.num, generator=self.generator).numpy()

    def take(self, count: int) -> np.ndarray:
        """The next places."""
        parts = []
        while count > 0:
            if self.position == self.num:
                self.past += 1
                self._begin()
            parts.append(self.order[self.position : self.position + count])
            self.position += len(parts[-1])
            count -= len(parts[-1])
        return np.concatenate(parts)

    @property
    def epochs(self) -> float:
        """How many times all places were taken."""
        return self.past + self.position / self.num

    def get_state(self) -> dict[str, Any]:
        """Where the order stands: the generator as it was before this pass, and the place in it."""
        return {"num": self.num, "began": self.began, "position": self.position, "past": self.past}

    def set_state(self, state: dict[str, Any]) -> str | None:
        """The inverse; why the order is another one, if it is."""
        self.past = int(state["past"])
        if state["num"] != self.num:
            return f"the checkpoint had {state['num']:,} sequences of them, not {self.num:,}"
        self.generator.set_state(torch.from_numpy(state["began"]))
        self._begin()
        self.position = min(max(0, state["position"]), self.num)
        return None


class NoCollector:
    """Stands where a collector is, for runs that step no environment."""

    num_envs, n_steps, env_steps, rows, can_be_saved = 1, math.inf, 0, 0, True

    def __init__(self, space: Space) -> None:
        self.guard, self.statistics, self.generator = Guard(), EpisodeStatistics(1), Generator()
        none, flag = torch.zeros(1, 0, 1), torch.zeros(1, 0, dtype=torch.bool)
        self.nothing = Rollout(tree_to_torch(allocate(space, 1, 0)), (), (), none, none, none, flag, flag, flag, flag)

    def rollout(self) -> Rollout:
        """Of no rows."""
        return self.nothing

    def get_state(self) -> dict[str, Any]:
        """What a collector has before its first episode."""
        state = {"env_steps": 0, "rows": 0, "statistics": self.statistics.get_state(), "generator": self.generator.get_state()}
        return {**state, "episodes": None}

    def set_state(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def metrics(self) -> dict[str, float]:
        """Nothing to log."""
        return {}

    def take_notices(self) -> list[str]:
        """Nothing to tell."""
        return []

    def close(self) -> None:
        """Nothing to close."""
