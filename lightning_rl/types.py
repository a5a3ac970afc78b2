"""The nouns that travel between the floors, and trees of arrays or tensors.

A tree is a leaf (numpy array, tensor or number) or a dict or tuple of trees. Observations, actions and memory are trees.
The children of a dict come in the order of its keys, however it was built.
Shapes: T time steps, N environments, B rows of a batch, S reward streams. Value-like tensors end in S, row flags are `[T, N]`.
A mask is flat, `[..., M]` bools: which of the M choices of all discrete parts of the action space are legal, part after part; `()` where
the environment rules out nothing. See `envs/masks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Tree = Any
"""A leaf, or a dict or tuple of trees."""


class Step(NamedTuple):
    """What a policy did for N observations: `action` (a tree, as sampled), `log_prob [N]`, `value [N, S]`, `memory`."""

    action: Tree
    log_prob: Tensor
    value: Tensor
    memory: Tree


class Experience(NamedTuple):
    """Single steps as reward signals see them, any batch shape `[...]`: what was seen, done, seen next, and paid.

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

    obs: `[T, N, ...]` tree.  action: `[T, N, ...]` tree as sampled.  log_prob: `[T, N, D]`, part by part,
    empty where an algorithm does not need it.
    reward, value, next_value: `[T, N, S]`; next_value is the value of the true successor (the final observation at a truncation).
    terminated, truncated, valid, episode_start: bool `[T, N]`; `truncated` excludes `terminated`.
    action_mask: bool `[T, N, M]`, of the choices at `obs`.
    next_obs: `[T, N, ...]` tree, the true one where an episode ended; empty where no reward signal asks for it.
    memory: the policy's memory before the first row of each sequence, row 0, L, 2 L, … for sequences of L rows, `[⌈T / L⌉, N, ...]` tree.
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

    @property
    def experience(self) -> Experience:
        """The rows one by one, as reward signals see them."""
        weight = self.valid / self.valid.sum().clamp(min=1)
        return Experience(*flatten_time((self.obs, self.action, self.next_obs, (), self.terminated, weight)))


class Transition(NamedTuple):
    """B rows of replayed experience, each the start of a window of k steps. Empty slots are `()`.

    obs, next_obs: `[B, ...]` trees, k steps apart; next_obs is the true one where an episode ended.  action: `[B, ...]` tree as sampled.
    reward: `[B, S]`, Σ γⁱ r over the window.  discount: `[B, S]`, γᵏ · (not terminated).
    weight: `[B]`, importance; sums to 1 where all rows were equally likely.
    rows: `[B]`, their places in the buffer, as an array.
    action_mask, next_action_mask: bool `[B, M]`, of the choices at obs and at next_obs; all true where the episode had terminated.
    experience: all steps of the windows one by one, `[B · n]`, for reward signals that learn; else empty.

    For a network that remembers, rows are those of N sequences of T slots, flat and time-major: B = T · N. Observations come in the order
    of their episodes, the last one of an episode in a slot of its own, so that what follows a row lies in one of the slots behind it.
    episode_start: `[T, N]`.  memory: the policy's before the first slots, `[N, ...]` tree.  next_obs: the same as obs.
    successor: `[B]`, the slot that lies k steps behind each row.  weight: 0 in slots that are no rows to learn from.
    rows: `[N]`, of the first slots.
    """

    obs: Tree
    action: Tree
    reward: Tensor
    discount: Tensor
    next_obs: Tree
    weight: Tensor
    rows: Any
    action_mask: Tree = ()
    next_action_mask: Tree = ()
    episode_start: Any = ()
    memory: Tree = ()
    successor: Any = ()
    experience: Any = ()

    def follow(self, x: Any) -> Any:
        """From what belongs to next_obs, a tensor `[B, ...]` or a tree, that of what follows each row."""
        return tree_index(x, self.successor) if len(self.successor) else x

    def mean(self, x: Tensor) -> Tensor:
        """The plain mean of `x [B, ...]` over the rows that are learned from, for a metric."""
        return (x.flatten(1).mean(1) if x.dim() > 1 else x).where(self.weight > 0, 0.0).sum() / (self.weight > 0).sum()


def tree_leaves(tree: Tree) -> list[Any]:
    """The leaves from left to right."""
    leaves: list[Any] = []
    _gather(tree, leaves)
    return leaves


def _gather(tree: Tree, leaves: list[Any]) -> None:
    if isinstance(tree, dict):
        for key in sorted(tree, key=str):
            _gather(tree[key], leaves)
    elif isinstance(tree, tuple):
        for child in tree:
            if isinstance(child, tuple | dict):
                _gather(child, leaves)
            else:
                leaves.append(child)
    else:
        leaves.append(tree)


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply a function to the leaves of one tree, or to the corresponding leaves of several.

    Raises:
        ValueError: the trees differ in their keys or lengths.
    """
    if not others:
        return _map_one(function, tree)
    if isinstance(tree, dict):
        for other in others:
            if not isinstance(other, dict) or other.keys() != tree.keys():
                keys = sorted(map(str, other)) if isinstance(other, dict) else type(other).__name__
                raise ValueError(f"trees differ: {sorted(map(str, tree))} against {keys}")
        return {key: tree_map(function, tree[key], *(other[key] for other in others)) for key in sorted(tree, key=str)}
    if isinstance(tree, tuple):
        for other in others:
            if not isinstance(other, tuple) or len(other) != len(tree):
                size = len(other) if isinstance(other, tuple) else type(other).__name__
                raise ValueError(f"trees differ: a tuple of {len(tree)} against {size}")
        children = (tree_map(function, *pair) for pair in zip(tree, *others, strict=True))
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    for other in others:
        if isinstance(other, dict | tuple):
            raise ValueError(f"trees differ: a leaf against a {type(other).__name__}")
    return function(tree, *others)


def _map_one(function: Callable[..., Any], tree: Tree) -> Tree:
    """`tree_map` of a single tree, which is asked for several times in every step of an environment."""
    if isinstance(tree, tuple):
        children = [_map_one(function, child) if isinstance(child, tuple | dict) else function(child) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    if isinstance(tree, dict):
        return {key: _map_one(function, tree[key]) for key in sorted(tree, key=str)}
    return function(tree)


def tree_index(tree: Tree, index: Any) -> Tree:
    """`leaf[index]` for each leaf."""
    return tree_map(lambda leaf: leaf[index], tree)


def tree_stack(trees: Sequence[Tree], dim: int = 0) -> Tree:
    """Stack equal trees along a new dimension; arrays stay arrays, tensors tensors, dtypes are kept."""

    def stack(*leaves: Any) -> Any:
        return torch.stack(leaves, dim) if isinstance(leaves[0], Tensor) else np.stack(leaves, dim)

    return tree_map(stack, trees[0], *trees[1:])


def tree_unstack(tree: Tree, dim: int = 0) -> list[Tree]:
    """The inverse of `tree_stack`."""
    size = tree_leaves(tree)[0].shape[dim]
    return [tree_map(lambda leaf, i=i: leaf[(slice(None),) * dim + (i,)], tree) for i in range(size)]


def tree_to_torch(tree: Tree, device: torch.device | str = "cpu") -> Tree:
    """Tensors that share memory with the arrays where the device allows."""
    if device == "cpu" or device == torch.device("cpu"):
        return tree_map(lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else torch.as_tensor(leaf), tree)
    return tree_map(lambda leaf: torch.as_tensor(leaf, device=device), tree)


def tree_to_numpy(tree: Tree) -> Tree:
    """Arrays that share memory with the tensors where the device allows."""
    return tree_map(lambda leaf: leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else np.asarray(leaf), tree)


def flatten_time(tree: Tree) -> Tree:
    """`[T, N, ...]` to `[T * N, ...]` for each leaf."""
    return tree_map(lambda leaf: leaf.flatten(0, 1), tree)


def gradient_norm(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """Euclidean norm of all gradients; a missing gradient counts as 0."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return total_norm(gradients) if gradients else torch.zeros(())


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all tensors taken as one vector."""
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
