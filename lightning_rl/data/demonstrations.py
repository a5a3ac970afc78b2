"""Rows of demonstrated episodes, and the sequences they are cut into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_rl.distributions import Distribution
from lightning_rl.envs.masks import Masks
from lightning_rl.errors import SettingError
from lightning_rl.finite import all_finite
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.types import Tree, tree_index, tree_leaves, tree_map, tree_to_numpy, tree_to_torch


class Rows(NamedTuple):
    """R steps: obs and action `[R, ...]` trees, actions as sampled, action_mask bool `[R, M]`, or () where nothing is ever ruled out."""

    obs: Tree
    action: Tree
    action_mask: Tree


class DemonstrationBatch(NamedTuple):
    """B rows of demonstrations: those of N sequences of L rows, flat and time-major; L = 1 where nothing is remembered.

    obs, action: `[B, ...]` trees, actions as sampled.  weight: `[B]`, the same for all rows that were demonstrated, 0 for those that fill
    up a sequence; sums to 1.  episode_start: bool `[L, N]`, true in the first rows: each sequence begins with an empty memory.
    action_mask: bool `[B, M]`, of the choices at obs.
    """

    obs: Tree
    action: Tree
    weight: Tensor
    episode_start: Tensor
    action_mask: Tree


class EpisodeRows:
    """The rows of some episodes, each cut into sequences of `sequence_length` rows, the last of them shorter."""

    def __init__(self, episodes: Sequence[Rows], sequence_length: int = 1) -> None:
        self.length, self.num_episodes = sequence_length, len(episodes)
        ends = np.cumsum([len(tree_leaves(episode.action)[0]) for episode in episodes], dtype=np.int64)
        begins = np.concatenate([[0], ends[:-1]])[: len(ends)]
        counts = -(-(ends - begins) // sequence_length)
        place = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # in its episode
        self.first = np.repeat(begins, counts) + place * sequence_length
        self.size = np.minimum(np.repeat(ends, counts) - self.first, sequence_length)
        self.num_rows = int(counts.sum() and ends[-1])
        self.rows: Any = tree_map(lambda *leaves: torch.from_numpy(np.concatenate(leaves)), *episodes) if episodes else ()

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.first)

    def batch(self, sequences: np.ndarray) -> DemonstrationBatch:
        """Some sequences, side by side."""
        slot, size = np.arange(self.length)[:, None], self.size[sequences]
        rows = torch.from_numpy((self.first[sequences] + np.minimum(slot, size - 1)).reshape(-1))
        weight = torch.from_numpy((slot < size).reshape(-1) / np.float32(size.sum()))
        start = torch.from_numpy(np.broadcast_to(slot == 0, (self.length, len(sequences))).copy())
        obs, action, action_mask = tree_index(self.rows, rows)
        return DemonstrationBatch(obs, action, weight, start, action_mask)


def read_episode(who: str, obs: Tree, action: Tree, action_mask: Tree | None, spaces: Spaces, distribution: Distribution) -> Rows:
    """One demonstrated episode as it is learned from.

    Args:
        who: names it, for messages.
        obs: `[T + 1, ...]` tree, in the environment's own form.
        action: `[T, ...]` tree, the same.
        action_mask: of the choices at obs, `[T + 1, M]` or `[T, M]`, or another form of `envs/masks.py`; None where everything was legal.
        spaces: of one environment.
        distribution: of the policy.

    Raises:
        SettingError: it does not fit the spaces, an observation is no number, or an action is none of them or not legal.
    """
    try:
        sampled = tree_map(_as_stored, distribution.from_env(tree_map(np.asarray, action)))
        steps = len(tree_leaves(sampled)[0])
        seen = tree_map(_fill, allocate(spaces.observation, steps + 1), tree_map(np.asarray, obs))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise SettingError(f"{who} does not fit the environment's spaces: {error}") from error
    if not all_finite(seen):
        raise SettingError(f"{who} holds an observation that is infinite or not a number")
    mask = np.ones((steps, distribution.mask_width), dtype=bool)
    if action_mask is not None:
        mask = Masks(spaces.action, f"step {{}} of {who}").batch(action_mask, steps)
    illegal = _illegal(distribution, sampled, mask)
    if illegal.any():
        raise SettingError(f"{who} takes an action in step {illegal.argmax()} that its environment does not allow")
    return Rows(tree_index(seen, slice(-1)), sampled, mask)


def split_by_episode(lengths: Sequence[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Which episodes to learn from and which to hold back for validation, whole ones.

    Those held back, drawn at random, have at most `fraction` of all steps.
    """
    learned, held = [], []
    room = round(fraction * sum(lengths))
    for episode in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        if 0 < lengths[episode] <= room:
            room -= lengths[episode]
            held.append(episode)
        else:
            learned.append(episode)
    return sorted(learned), sorted(held)


def _as_stored(leaf: np.ndarray) -> np.ndarray:
    return leaf.astype(np.float32) if np.issubdtype(leaf.dtype, np.floating) else leaf


def _fill(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    if source.shape != target.shape:
        raise ValueError(f"observations of shape {source.shape} instead of {target.shape}")
    target[...] = source
    return target


def _illegal(distribution: Distribution, action: Tree, mask: np.ndarray) -> np.ndarray:
    """Which rows hold numbers that are none, or choices that are out of range or ruled out, `[T]`."""
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
