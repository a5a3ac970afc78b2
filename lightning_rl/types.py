"""Shared data types, and trees of arrays or tensors.

A tree is a leaf (numpy array, tensor or number) or a dict or tuple of trees. Observations, actions and memory are trees.
The children of a dict are ordered by key, not by insertion.
Shapes: T time steps, N environments, B rows of a batch, S reward streams. Value-like tensors end in S, row flags are `[T, N]`.
A mask is flat, `[..., M]` bools: which of the M choices of all discrete parts of the action space are legal, part after part. It is `()`
if the environment has no masks. See `envs/masks.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsFloat

import numpy as np
import torch
from torch import Tensor

Tree = Any
"""A leaf, or a dict or tuple of trees."""
State = dict[str, Any]
"""The state that an object saves for an exact resume: named numbers, arrays, tensors and plain data."""
Info = dict[str, Any]
"""The info dict of an environment's step or reset."""
Options = dict[str, Any] | None
"""Options of a reset."""
StepResult = tuple[Tree, SupportsFloat, bool, bool, Info]
"""Observation, reward, terminated, truncated and info of one environment."""
StepByAgent = tuple[dict[str, Tree], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Info]]
"""The same for all agents of a PettingZoo `ParallelEnv`, by name."""
MAX_FLOAT32 = float(np.finfo(np.float32).max)
"""Observations and rewards are stored as float32; larger values would become infinite."""


class Step(NamedTuple):
    """A policy's output for N observations: `action` (a tree, as sampled), `log_prob [N]`, `value [N, S]`, `memory`."""

    action: Tree
    log_prob: Tensor
    value: Tensor
    memory: Tree


class EnvStep(NamedTuple):
    """One step of N environments.

    obs: the observations to act on next, `[N, ...]`.  reward, terminated, truncated, valid: `[N]`; truncated excludes terminated.
    episode_start: whether `obs` is the first of an episode, `[N]`.  ended: the indices of the K environments whose episode ended.
    final_obs: their true last observations, `[K, ...]`, or None if K = 0.
    info: the environment's info; for rows whose episode ended, that of the final step.
    mask, final_mask: the legal actions at `obs`, `[N, M]`, and at `final_obs`, `[K, M]`; () if the environments have no masks.
    """

    obs: Tree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    episode_start: np.ndarray
    ended: np.ndarray
    final_obs: Tree | None
    info: Info
    mask: Tree = ()
    final_mask: Tree = ()


def first_step(obs: Tree, mask: Tree, num_envs: int) -> EnvStep:
    """Return the first observations of new episodes in all N environments, as a step with no valid rows."""
    none = np.zeros(num_envs, dtype=bool)
    return EnvStep(obs, np.zeros(num_envs), none, none, none, ~none, np.flatnonzero(none), None, {}, mask)


class Experience(NamedTuple):
    """Single steps for reward signals, with any batch shape `[...]`.

    obs, action, next_obs: trees; next_obs is the true one where an episode ended.  reward: the environment's.  terminated: bool.
    weight: importance of each step, 0 where it does not count; sums to 1.
    """

    obs: Tree
    action: Tree
    next_obs: Tree
    reward: Tree
    terminated: Tree = ()
    weight: Tree = ()


class Rollout(NamedTuple):
    """Experience of N environments over T steps, time-major. Empty slots are `()`.

    obs: `[T, N, ...]` tree.  action: `[T, N, ...]` tree as sampled.  log_prob: `[T, N, D]`, for each action part;
    empty if the algorithm does not need it.
    reward, value, next_value: `[T, N, S]`; next_value is the value of the true successor (the final observation at a truncation).
    terminated, truncated, valid, episode_start: bool `[T, N]`; `truncated` excludes `terminated`.
    action_mask: bool `[T, N, M]`, the legal choices at `obs`.
    next_obs: `[T, N, ...]` tree, the true one where an episode ended; empty if no reward signal needs it.
    memory: the policy's memory before the first row of each sequence, row 0, L, 2 L, … for sequences of L rows, `[⌈T / L⌉, N, ...]` tree.
    actors: `[A]`, the numbers of the actors that collected the A equal parts of the N environments; parts of one actor follow each other.
    """

    obs: Tree
    action: Tree
    log_prob: Tree
    reward: Tensor
    value: Tensor
    next_value: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    episode_start: Tensor
    action_mask: Tree = ()
    memory: Tree = ()
    next_obs: Tree = ()
    actors: Tree = ()

    @property
    def experience(self) -> Experience:
        """Return the rows as single steps for reward signals."""
        weight = self.valid / self.valid.sum().clamp(min=1)
        return Experience(*flatten_time((self.obs, self.action, self.next_obs, (), self.terminated, weight)))


class Transition(NamedTuple):
    """B rows of replayed experience, each the start of a window of k steps. Empty slots are `()`.

    obs, next_obs: `[B, ...]` trees, k steps apart; next_obs is the true one where an episode ended.  action: `[B, ...]` tree as sampled.
    reward: `[B, S]`, Σ γⁱ r over the window.  discount: `[B, S]`, γᵏ · (not terminated).
    weight: `[B]`, importance; sums to 1 if all rows were equally likely.
    rows: `[B]`, their indices in the buffer, as an array.
    action_mask, next_action_mask: bool `[B, M]`, the legal choices at obs and at next_obs; all true where the episode had terminated.
    experience: all single steps of the windows, `[B · n]`, for reward signals that learn; else empty.

    For a recurrent network, the rows are N sequences of T slots, flat and time-major: B = T · N. Observations are in the order of their
    episodes. The last observation of an episode has its own slot, so that each row's successor is in one of the following slots.
    episode_start: `[T, N]`.  memory: the policy's before the first slots, `[N, ...]` tree.  next_obs: the same as obs.
    successor: `[B]`, the slot k steps after each row.  weight: 0 in slots that are not learned from.
    rows: `[N]`, the indices of the first slots.
    """

    obs: Tree
    action: Tree
    reward: Tensor
    discount: Tensor
    next_obs: Tree
    weight: Tensor
    rows: np.ndarray
    action_mask: Tree = ()
    next_action_mask: Tree = ()
    episode_start: Tree = ()
    memory: Tree = ()
    successor: Tree = ()
    experience: Tree = ()

    def follow(self, x: Tree, dim: int = 0) -> Tree:
        """Select each row's successor from values for next_obs: a tensor or a tree of tensors, with rows along `dim`."""
        return tree_index(x, (slice(None),) * dim + (self.successor,)) if len(self.successor) else x

    def mean(self, x: Tensor) -> Tensor:
        """Return the unweighted mean of `x [B, ...]` over the rows that are learned from, for a metric."""
        x = x.flatten(1).mean(1) if x.dim() > 1 else x
        return x.where(self.weight > 0, 0.0).sum() / (self.weight > 0).sum().clamp(min=1) if len(self.successor) else x.sum() / len(x)


def tree_leaves(tree: Tree) -> list[Any]:
    """Return the leaves from left to right."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree, key=str) for leaf in tree_leaves(tree[key])]
    if isinstance(tree, tuple):
        return [leaf for child in tree for leaf in (tree_leaves(child) if isinstance(child, tuple | dict) else (child,))]
    return [tree]


def tree_map(function: Callable[..., Tree], tree: Tree, *others: Tree) -> Tree:
    """Apply a function to the leaves of one tree, or to the corresponding leaves of several.

    Raises `ValueError`: the trees differ in their keys or lengths.
    """
    if not isinstance(tree, tuple | dict):
        for other in others:
            if isinstance(other, tuple | dict):
                raise ValueError(f"trees differ: a leaf against {_outline(other)}")
        return function(tree, *others)
    for other in others:
        same = (
            isinstance(other, dict) and other.keys() == tree.keys()
            if isinstance(tree, dict)
            else isinstance(other, tuple) and len(other) == len(tree)
        )
        if not same:
            raise ValueError(f"trees differ: {_outline(tree)} against {_outline(other)}")
    if isinstance(tree, dict):
        return {key: tree_map(function, tree[key], *(other[key] for other in others)) for key in sorted(tree, key=str)}
    children = [
        tree_map(function, *child) if isinstance(child[0], tuple | dict) else function(*child) for child in zip(tree, *others, strict=True)
    ]
    return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)


def _outline(tree: Tree) -> str:
    if isinstance(tree, dict):
        return f"the keys {sorted(map(str, tree))}"
    return f"a tuple of {len(tree)}" if isinstance(tree, tuple) else "a leaf"


def tree_index(tree: Tree, index: object) -> Tree:
    """Return `leaf[index]` for each leaf."""
    return tree_map(lambda leaf: leaf[index], tree)


def tree_stack(trees: Sequence[Tree], dim: int = 0) -> Tree:
    """Stack trees of the same structure along a new dimension; arrays stay arrays, tensors stay tensors, dtypes are kept."""
    return tree_map(lambda *leaves: torch.stack(leaves, dim) if isinstance(leaves[0], Tensor) else np.stack(leaves, dim), *trees)


def tree_to_torch(tree: Tree, device: torch.device | str = "cpu") -> Tree:
    """Convert arrays to tensors, which share memory with the arrays if the device allows."""
    if device == "cpu" or device == torch.device("cpu"):
        return tree_map(lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else torch.as_tensor(leaf), tree)
    return tree_map(lambda leaf: torch.as_tensor(leaf, device=device), tree)


def tree_to_numpy(tree: Tree) -> Tree:
    """Convert tensors to arrays, which share memory with the tensors if the device allows."""
    return tree_map(lambda leaf: leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else np.asarray(leaf), tree)


def flatten_time(tree: Tree) -> Tree:
    """Turn `[T, N, ...]` into `[T * N, ...]` for each leaf."""
    return tree_map(lambda leaf: leaf.flatten(0, 1), tree)


def is_finite(tree: Tree) -> bool:
    """Return whether all floats in a tree of arrays are finite in float32. A small sum of squares proves it quickly."""
    if type(tree) is np.ndarray:
        if tree.dtype.kind != "f":
            return True
        if tree.dtype.itemsize < 4:  # float16 has no number of this size to compare with
            return bool(np.isfinite(tree).all())
        if tree.size <= 10_000:  # BLAS would use threads for more
            flat = tree.ravel()
            try:
                if flat.dot(flat) <= 1e38:
                    return True
            except RuntimeWarning:  # an overflow, if warnings are errors
                pass
        return np.count_nonzero(np.abs(tree) <= MAX_FLOAT32) == tree.size
    if isinstance(tree, dict | tuple):
        return all(map(is_finite, tree_leaves(tree)))
    return is_finite(np.asarray(tree))
