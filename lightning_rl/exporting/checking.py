"""Whether an exported policy does what the policy does that it was exported from.

Both see the same observations, drawn from the observation space, and the same masks, drawn from all that allow something, each for ten
steps with a memory of its own, in rows side by side and in one row alone.

A number of an action may differ by 1e-5, times the width of its dimension of the action space where that is more than 1; without bounds,
times its own magnitude where that is more than 1; and by the last bit of its dtype where that is more still. A number of a memory, which no
environment sees and which rounding drives apart from step to step, may differ by a hundred times 1e-5, as long as the actions that follow
do not: behind a resnet of images an LSTM in float32 is itself 4e-5 off the same in float64 after one step, and 9e-5 after ten.

Choices must be the same, but for ties: a choice is the greatest of some sums of float32, whose last bits depend on the order in which a
program adds. So another choice passes where the policy itself gives both the same log-probability (DQN: value) to 1e-5, or to 1e-5 of its
greatest output where that is more than 1: as close as two programs can agree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_rl.algorithms.policy import Policy
from lightning_rl.distributions.distribution import split_mask
from lightning_rl.errors import SettingError
from lightning_rl.exporting.formats import Run
from lightning_rl.spaces import Spaces, allocate, choice_sizes, limits, samples
from lightning_rl.types import Tree, tree_leaves, tree_map, tree_to_numpy, tree_to_torch

STEPS, ROWS = 10, (99, 1)
"""1,000 observations."""
TOLERANCE = 1e-5
DRIFT = 100
"""How many times that a memory may differ by."""
HUGE = 1e18
"""Numbers whose squares are nearly infinite in float32: a bound from here on is none."""


class Parity(NamedTuple):
    """What a check found: on how many observations, the greatest difference of numbers of actions and of memories, the greatest as a share
    of what is allowed, and how many other choices passed as ties."""

    observations: int
    max_abs_difference: float
    max_abs_difference_of_memory: float
    max_share_of_allowed: float
    ties: int


def check(run: Run, policy: Policy, seed: int = 0) -> Parity:
    """Compare what an exported policy does with what the policy does.

    Raises:
        SettingError: they differ.
    """
    found = Check(policy, seed)
    for rows in ROWS:
        found.play(run, rows)
    return Parity(sum(ROWS) * STEPS, found.difference, found.drift, found.share, found.ties)


class Check:
    """A comparison under way. `difference`, `drift`, `share` and `ties` as in `Parity`."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy, self.spaces, self.random = policy, policy.spaces, np.random.default_rng(seed)
        self.spaces.observation.seed(seed)
        self.distribution = policy.network.distribution
        self.difference, self.drift, self.share, self.ties = 0.0, 0.0, 0.0, 0

    def play(self, run: Run, rows: int) -> None:
        """Ten steps in a row, `rows` at once."""
        memory: Tree = None
        theirs = tree_leaves(tree_to_numpy(self.policy.network.initial_memory(rows)))
        for _ in range(STEPS):
            obs, mask = tree_map(self.readable, samples(self.spaces.observation, rows)), legal_masks(self.spaces, rows, self.random)
            given = [*tree_leaves(obs), *tree_leaves(mask), *theirs]
            action, after = self.policy.act(obs, memory, action_mask=None if isinstance(mask, tuple) else mask)
            outputs = list(run(given))
            expected = [*self.distribution.flat(action), *tree_leaves(tree_to_numpy(after))]
            for ours, other in zip(expected, outputs, strict=True):
                if (ours.shape, ours.dtype) != (other.shape, other.dtype):
                    raise refusal(f"gives {other.dtype}{list(other.shape)} for {ours.dtype}{list(ours.shape)}")
            count = len(expected) - len(theirs)
            self.compare_actions(expected[:count], outputs[:count], obs, mask, memory)
            for ours, other in zip(expected[count:], outputs[count:], strict=True):
                self.drift = max(self.drift, self.compare(ours, other, DRIFT * np.maximum(1, np.abs(ours)), "a memory"))
            memory, theirs = after, outputs[count:]

    def readable(self, leaf: np.ndarray) -> np.ndarray:
        """What was drawn between bounds as wide as float32 reaches, drawn as if there were none."""
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        return np.where(np.abs(leaf.astype(float)) < HUGE, leaf, self.random.standard_normal(leaf.shape)).astype(leaf.dtype)

    def compare_actions(self, expected: list[np.ndarray], given: list[np.ndarray], obs: Tree, mask: Tree, memory: Tree) -> None:
        """The leaves of an action, choices apart from numbers."""
        leaves, bounds = self.distribution.leaves(), self.distribution.flat(limits(self.spaces.action))
        for i, (leaf, ours, other) in enumerate(zip(leaves, expected, given, strict=True)):
            if not leaf.sizes:
                low, high = bounds[i].astype(float).clip(-HUGE, HUGE)
                scale = np.where(high - low < HUGE, high - low, np.abs(ours))
                self.difference = max(self.difference, self.compare(ours, other, scale, "an action"))
            elif not np.array_equal(ours, other):
                x, legal = self.asked(obs, mask, memory)[i]
                gap = [leaf.evaluate(x, torch.from_numpy(leaf.from_env(each)), legal)[0] for each in (ours, other)]
                if not bool(((gap[0] - gap[1]).abs() <= TOLERANCE * max(1.0, float(x.abs().max()))).all()):
                    raise refusal(f"makes other choices in {int((ours != other).sum())} of {ours.size} cases")
                self.ties += int((ours != other).sum())

    @torch.no_grad()
    def asked(self, obs: Tree, mask: Tree, memory: Tree) -> list[tuple[Tensor, Tree]]:
        """The input of each leaf of the distribution, and its part of the mask."""
        rows = len(tree_leaves(obs)[0])
        stored = tree_map(lambda kept, leaf: leaf.astype(kept.dtype), allocate(self.spaces.observation), obs)
        network = self.policy.network
        x, _ = network.policy(tree_to_torch(stored), network.initial_memory(rows) if memory is None else memory, None)
        leaves = self.distribution.leaves()
        masks = split_mask(tree_to_torch(mask), [leaf.mask_width for leaf in leaves])
        return list(zip(x.split([leaf.num_inputs for leaf in leaves], -1), masks, strict=True))

    def compare(self, ours: np.ndarray, other: np.ndarray, scale: np.ndarray, what: str) -> float:
        """The greatest difference of numbers, of which `scale` is the width or the magnitude."""
        difference = np.abs(ours.astype(float) - other)
        allowed = np.maximum(TOLERANCE * np.maximum(1, scale), np.spacing(np.abs(ours)))
        shares = difference / allowed
        worst = np.unravel_index(shares.argmax(), shares.shape)
        if not shares[worst] <= 1:
            raise refusal(f"differs by {difference[worst]:.3g} in {what}, where {allowed[worst]:.3g} is allowed")
        self.share = max(self.share, float(shares[worst]))
        return float(difference.max())


def legal_masks(spaces: Spaces, num: int, random: np.random.Generator) -> Tree:
    """Random masks `[num, M]` that leave a choice in each part; () where the environment rules out nothing."""
    if not spaces.masked:
        return ()
    parts = []
    for size in choice_sizes(spaces.action):
        parts.append(random.random((num, size)) < 0.5)
        parts[-1][np.arange(num), random.integers(size, size=num)] = True
    return np.concatenate(parts, 1)


def refusal(how: str) -> SettingError:
    """That an exported policy is not the one it was exported from."""
    return SettingError(f"the exported policy {how}; it is not what the checkpoint's policy does, so nothing was written")
