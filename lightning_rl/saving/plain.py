"""State as plain data: what `torch.load(weights_only=True)` reads, so that no file need be trusted."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = (str, int, float, bool, bytes, type(None))


def to_plain(tree: Any, place: str = "state") -> Any:
    """A tree of dicts, lists, tuples and deques as one of dicts, lists and tuples whose leaves are copies that torch can save.

    Arrays become tensors, numpy's scalars numbers of Python, deques lists and named tuples tuples.

    Raises:
        TypeError: a leaf that is no plain data, with its place in the tree.
    """
    if isinstance(tree, np.generic) and tree.dtype.kind in "biufcSU":
        return tree.item()
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":
        return torch.from_numpy(np.array(tree, tree.dtype.newbyteorder("="), order="C"))
    if isinstance(tree, Tensor):
        return tree.detach().cpu().clone(memory_format=torch.contiguous_format)
    if type(tree) in PLAIN:
        return tree
    if isinstance(tree, dict):
        return {to_plain(key, f"a key of {place}"): to_plain(child, f"{place}[{key!r}]") for key, child in tree.items()}
    if isinstance(tree, list | tuple | deque):
        children = [to_plain(child, f"{place}[{i}]") for i, child in enumerate(tree)]
        return tuple(children) if isinstance(tree, tuple) else children
    what = f"an array of {tree.dtype}" if isinstance(tree, np.ndarray) else f"a {type(tree).__name__}"
    raise TypeError(f"{place} is {what}, which is no plain data: a checkpoint could not be read without trusting it")


def to_arrays(tree: Any) -> Any:
    """The way back: every tensor as an array. Tuples stay tuples; what was a deque is a list, what was a numpy scalar a number."""
    if isinstance(tree, Tensor):
        return tree.detach().cpu().numpy()
    if isinstance(tree, dict):
        return {key: to_arrays(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(to_arrays(child) for child in tree)
    return tree
