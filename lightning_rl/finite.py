"""Whether the numbers of a tree of arrays are numbers, which of them is none, and what may stand in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_rl.errors import NotFiniteError
from lightning_rl.types import Tree, tree_leaves, tree_map

LARGEST = float(np.finfo(np.float32).max)
"""Observations and rewards are kept as float32: beyond this they would be infinite."""
SMALL = 1e38
"""A sum of squares that says that each is finite in float32."""


def check_episode(obs: Tree, reward: float, before: Tree, where: str, on_nan: str = "raise") -> tuple[Tree, float]:
    """What one environment said in a step outside of training, with stand-ins where `on_nan` goes on.

    Raises:
        NotFiniteError: it is bad, and `on_nan` is raise.
    """
    if abs(reward) <= LARGEST and all_finite(obs):
        return obs, reward
    rows = tree_map(lambda leaf: np.asarray(leaf)[None], obs)
    if on_nan == "raise":
        said = first_bad("reward", np.array([reward]), [0]) or first_bad("observation", rows, [0]) or ""
        raise NotFiniteError(f"{said.replace(' of environment 0', '')} {where}")
    rows = replace(rows, tree_map(lambda leaf: np.asarray(leaf)[None], before))
    return tree_map(lambda leaf: leaf[0], rows), reward if abs(reward) <= LARGEST else 0.0


def all_finite(tree: Tree) -> bool:
    """Whether all floats of a tree of arrays are numbers that float32 can hold. A small sum of squares says yes at once."""
    if type(tree) is np.ndarray:
        if tree.dtype.kind != "f":
            return True
        if tree.size <= 10_000:  # BLAS would start threads
            flat = tree.ravel()
            try:
                if flat.dot(flat) <= SMALL:
                    return True
            except RuntimeWarning:  # an overflow, where warnings are errors
                pass
        return np.count_nonzero(np.abs(tree) <= LARGEST) == tree.size
    if isinstance(tree, dict | tuple):
        return all(map(all_finite, tree_leaves(tree)))
    return all_finite(np.asarray(tree))


def first_bad(door: str, tree: Tree, envs: Any) -> str | None:
    """`observation where.t of environment 3 is nan`: the first bad value of arrays `[K, ...]`, whose rows are the environments `envs`."""
    for key, leaf in named_leaves(tree):
        if not all_finite(leaf):
            place = np.argwhere(~_good(leaf))[0]
            return f"{door}{key and f' {key}'} of environment {envs[int(place[0])]} is {leaf[tuple(place)]}"
    return None


def named_leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves with their keys, joined by dots."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, tuple) else None
    if children is None:
        yield prefix, tree
        return
    for key, child in children:
        yield from named_leaves(child, f"{prefix}.{key}" if prefix else str(key))


def replace(tree: Tree, instead: Tree) -> Tree:
    """A tree of arrays `[K, ...]` in which a row of another stands where one of a leaf is bad."""

    def mend(leaf: np.ndarray, other: np.ndarray) -> np.ndarray:
        good = _good(leaf).reshape(len(leaf), -1).all(1)
        return leaf if good.all() else np.where(good.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, other).astype(leaf.dtype)

    return tree_map(mend, tree, instead)


def _good(leaf: np.ndarray) -> np.ndarray:
    return np.abs(leaf) <= LARGEST if leaf.dtype.kind == "f" else np.ones(leaf.shape, dtype=bool)
