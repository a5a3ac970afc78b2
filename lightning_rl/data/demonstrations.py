"""Demonstrations as rows and minibatches, and the dataset that draws them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Space
from torch import Generator, Tensor

from lightning_rl.data.episodes import EpisodeStatistics
from lightning_rl.data.rollout import ExperienceDataset
from lightning_rl.distributions import Distribution
from lightning_rl.envs.masks import Masks
from lightning_rl.errors import SettingError, check_range
from lightning_rl.nan_policy import Guard
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.types import Rollout, State, Tree, is_finite, tree_index, tree_leaves, tree_map, tree_to_numpy, tree_to_torch


class Rows(NamedTuple):
    """R steps: obs and action `[R, ...]` trees, actions as sampled, action_mask bool `[R, M]`, or () if all actions are always legal."""

    obs: Tree
    action: Tree
    action_mask: Tree


class DemonstrationBatch(NamedTuple):
    """B rows of demonstrations from N sequences of L rows, flat and time-major; L = 1 without a memory.

    obs, action: `[B, ...]` trees, actions as sampled.  weight: `[B]`, equal for all demonstrated rows, 0 for padding; sums to 1.
    episode_start: bool `[L, N]`, true in the first rows: each sequence begins with an empty memory.
    action_mask: bool `[B, M]`, of the choices at obs.
    """

    obs: Tree
    action: Tree
    weight: Tensor
    episode_start: Tensor
    action_mask: Tree


class EpisodeRows:
    """Rows of episodes, each cut into sequences of `sequence_length` rows; the last sequence of an episode may be shorter."""

    def __init__(self, episodes: Sequence[Rows], sequence_length: int = 1) -> None:
        self.length, self.num_episodes = sequence_length, len(episodes)
        ends = np.cumsum([len(tree_leaves(episode.action)[0]) for episode in episodes], dtype=np.int64)
        begins = np.concatenate([[0], ends[:-1]])[: len(ends)]
        counts = -(-(ends - begins) // sequence_length)
        place = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # index within the episode
        self.first = np.repeat(begins, counts) + place * sequence_length
        self.size = np.minimum(np.repeat(ends, counts) - self.first, sequence_length)
        self.num_rows = int(counts.sum() and ends[-1])
        self.rows = tree_map(lambda *leaves: torch.from_numpy(np.concatenate(leaves)), *episodes) if episodes else Rows((), (), ())

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.first)

    def batch(self, sequences: np.ndarray) -> DemonstrationBatch:
        """Return some sequences, side by side."""
        slot, size = np.arange(self.length)[:, None], self.size[sequences]
        rows = torch.from_numpy((self.first[sequences] + np.minimum(slot, size - 1)).reshape(-1))
        weight = torch.from_numpy((slot < size).reshape(-1) / np.float32(size.sum()))
        start = torch.from_numpy(np.broadcast_to(slot == 0, (self.length, len(sequences))).copy())
        obs, action, action_mask = tree_index(self.rows, rows)
        return DemonstrationBatch(obs, action, weight, start, action_mask)


def read_rows(who: str, obs: Tree, action: Tree, action_mask: Tree | None, spaces: Spaces, distribution: Distribution) -> Rows:
    """Convert one demonstrated episode to rows for learning.

    Args:
        obs: `[T + 1, ...]` tree, in the environment's own format.
        action: `[T, ...]` tree, also in the environment's own format.
        action_mask: masks of the choices at obs, `[T + 1, M]` or `[T, M]`, or another format of `envs/masks.py`; None: all are legal.

    Raises:
        SettingError: the episode does not fit the spaces, an observation is NaN or infinite, or an action is illegal.
    """

    def store(target: np.ndarray, source: np.ndarray) -> np.ndarray:
        if source.shape != target.shape:
            raise ValueError(f"observations of shape {source.shape} instead of {target.shape}")
        return source.astype(target.dtype)

    try:
        sampled = distribution.from_env(tree_map(np.asarray, action))
        sampled = tree_map(lambda leaf: leaf.astype(np.float32) if leaf.dtype.kind == "f" else leaf, sampled)
        steps = len(tree_leaves(sampled)[0])
        observed = tree_map(store, allocate(spaces.observation, steps + 1), tree_map(np.asarray, obs))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise SettingError(f"{who} does not fit the environment's spaces: {error}") from error
    if not is_finite(observed):
        raise SettingError(f"{who} holds an observation that is NaN or infinite")
    mask = np.ones((steps, distribution.mask_width), dtype=bool)
    if action_mask is not None:
        mask = Masks(spaces.action, f"step {{}} of {who}").batch(action_mask, steps)
    illegal = _illegal(distribution, sampled, mask)
    if illegal.any():
        raise SettingError(f"{who} takes an action in step {illegal.argmax()} that its environment does not allow")
    return Rows(tree_index(observed, slice(-1)), sampled, mask)


def _illegal(distribution: Distribution, action: Tree, mask: np.ndarray) -> np.ndarray:
    """Return which rows hold NaN or infinite values, or choices that are out of range or illegal, `[T]`."""
    illegal, first = np.zeros(len(mask), dtype=bool), 0
    for leaf, part in zip(distribution.leaves(), distribution.flat(action), strict=True):
        illegal |= ~np.isfinite(part).reshape(len(part), -1).all(1)
        if leaf.mask_width:
            choice, sizes = tree_to_numpy(leaf.choices(tree_to_torch(part))), np.array(leaf.sizes)
            outside = (choice < 0) | (choice >= sizes)
            place = first + np.cumsum([0, *sizes[:-1]]) + np.clip(choice, 0, sizes - 1)
            illegal |= (outside | ~np.take_along_axis(mask, place, 1)).any(1)
        first += leaf.mask_width
    return illegal


def split_by_episode(lengths: Sequence[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the episodes to learn from, and those held out for validation: random ones with at most `fraction` of all steps."""
    learned, held = [], []
    room = round(fraction * sum(lengths))
    for episode in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        if 0 < lengths[episode] <= room:
            room -= lengths[episode]
            held.append(episode)
        else:
            learned.append(episode)
    return sorted(learned), sorted(held)


@dataclass(frozen=True)
class DemonstrationSettings:
    """Settings of minibatches and validation; described in the algorithms that have them."""

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
        draws: minibatches to learn from.
        held: rows held out for validation.
        settings: numbers of minibatches; the last iteration has the remaining ones.
    """

    restart_notice = "demonstrations are shuffled again"

    def __init__(self, collector: NoCollector, draws: DemonstrationDraws, held: EpisodeRows, settings: DemonstrationSettings) -> None:
        super().__init__(collector, -(-settings.max_updates // settings.updates_per_iteration))
        self.draws, self.learned, self.held, self.settings = draws, draws.rows, held, settings
        self.updates = settings.updates_per_iteration

    def __iter__(self) -> Iterator[Iterator[DemonstrationBatch]]:
        while True:
            self.is_whole = False
            yield self._iteration()

    def begin_iteration(self, count: int, progress: float) -> None:
        self.updates = min(self.settings.updates_per_iteration, self.settings.max_updates - count)

    def _iteration(self) -> Iterator[DemonstrationBatch]:
        for _ in range(self.updates):
            self.batch = self.draws.draw()
            yield self.batch

    def validation(self) -> Iterator[tuple[int, DemonstrationBatch]]:
        """Yield the held-out rows once, in order, as minibatches of a few thousand rows, each with its number of rows."""
        size = max(1, 4096 // self.held.length)
        for at in range(0, len(self.held), size):
            sequences = np.arange(at, min(at + size, len(self.held)))
            yield int(self.held.size[sequences].sum()), self.draws.on_device(self.held.batch(sequences))

    def metrics(self) -> dict[str, float]:
        """Return `train/epochs`, how many times all demonstrations were drawn."""
        return {"train/epochs": self.draws.order.epochs}

    def own_state(self) -> State:
        return {"order": self.draws.order.get_state()}

    def set_own_state(self, state: State, new_episodes: str | None) -> str | None:
        return self.draws.order.set_state(state["order"])


class DemonstrationDraws:
    """Draws minibatches of demonstrations: all sequences once in random order, then again in another order.

    Args:
        batch_size: rows of a minibatch, in whole sequences; all rows if there are fewer.
        seed: seed of the order, the same on all ranks: each `rank` of `ranks` takes its share of it.
    """

    def __init__(self, rows: EpisodeRows, batch_size: int, seed: int, device: torch.device, rank: int = 0, ranks: int = 1) -> None:
        self.rows, self.device, self.rank, self.ranks = rows, device, rank, ranks
        self.num_sequences = min(batch_size // rows.length, max(1, len(rows) // ranks))
        self.order = ShuffledOrder(len(rows), seed)

    def draw(self) -> DemonstrationBatch:
        """Return the next minibatch."""
        return self.on_device(self.rows.batch(self.order.take(self.num_sequences * self.ranks)[self.rank :: self.ranks]))

    def on_device(self, batch: DemonstrationBatch) -> DemonstrationBatch:
        """Move a minibatch to the device."""
        return tree_map(lambda leaf: leaf.to(self.device, non_blocking=True), batch)


class ShuffledOrder:
    """Endless random order of the indices 0 … num − 1: all of them once, then again in another order."""

    def __init__(self, num: int, seed: int) -> None:
        self.num, self.generator, self.past = num, Generator().manual_seed(seed), 0
        self._shuffle()

    def _shuffle(self) -> None:
        self.began, self.position = self.generator.get_state(), 0
        self.order = torch.randperm(self.num, generator=self.generator).numpy()

    def take(self, count: int) -> np.ndarray:
        parts = []
        while count > 0:
            if self.position == self.num:
                self.past += 1
                self._shuffle()
            parts.append(self.order[self.position : self.position + count])
            self.position += len(parts[-1])
            count -= len(parts[-1])
        return np.concatenate(parts)

    @property
    def epochs(self) -> float:
        """Return how many times all indices were taken."""
        return self.past + self.position / self.num

    def get_state(self) -> State:
        """Return the generator's state before this pass, and the position in the pass."""
        return {"num": self.num, "began": self.began, "position": self.position, "past": self.past}

    def set_state(self, state: State) -> str | None:
        """Restore a state of `get_state`. Return None, or the reason why the order cannot be the same."""
        self.past = int(state["past"])
        if state["num"] != self.num:
            return f"the checkpoint has {state['num']:,} sequences, not {self.num:,}"
        self.generator.set_state(torch.from_numpy(state["began"]))
        self._shuffle()
        self.position = min(max(0, state["position"]), self.num)
        return None


class NoCollector:
    """Stand-in for a collector in runs that step no environment."""

    name, num_envs, n_steps, env_steps, rows, steps_made, can_be_saved = "demonstrations", 1, math.inf, 0, 0, 0, True

    def __init__(self, space: Space) -> None:
        self.guard, self.statistics, self.generator = Guard(), EpisodeStatistics(1), Generator()
        none, flag = torch.zeros(1, 0, 1), torch.zeros(1, 0, dtype=torch.bool)
        self.nothing = Rollout(tree_to_torch(allocate(space, 1, 0)), (), (), none, none, none, flag, flag, flag, flag)

    def rollout(self) -> Rollout:
        return self.nothing

    def get_state(self) -> State:
        """Return the state of a collector before its first episode."""
        state = {"env_steps": 0, "rows": 0, "statistics": self.statistics.get_state(), "generator": self.generator.get_state()}
        return {**state, "episodes": None}

    def set_state(self, state: State) -> None: ...
    def interrupt(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def take_notices(self) -> list[str]:
        return []

    def close(self) -> None: ...
