"""Operations of ATen that look at an array in another way, fill one, or move numbers between places; see `numpy_ops.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from lightning_rl.networks.numpy_ops import Call, Maker, NotInNumpy, aten


def view(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    seen = x.reshape(shape)
    if not np.shares_memory(seen, x):
        raise NotInNumpy("view")
    return seen


def squeeze(x: np.ndarray, dims: int | Sequence[int]) -> np.ndarray:
    wanted = [d % max(x.ndim, 1) for d in ([dims] if isinstance(dims, int) else dims)]
    return np.squeeze(x, tuple(d for d in wanted if x.ndim and x.shape[d] == 1))


def expand(x: np.ndarray, shape: Sequence[int], implicit: bool = False) -> np.ndarray:
    own = [1] * (len(shape) - x.ndim) + list(x.shape)
    return np.broadcast_to(x, [k if n == -1 else n for n, k in zip(shape, own, strict=True)])


def part(x: np.ndarray, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> np.ndarray:
    return np.moveaxis(np.moveaxis(x, dim, 0)[start:end:step], 0, dim)


def one(x: np.ndarray, dim: int, index: int) -> np.ndarray:
    return np.moveaxis(x, dim, 0)[index, ...]


VIEWS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: lambda x: x,
    aten.alias.default: lambda x: x,
    aten.view.default: view,
    aten._unsafe_view.default: view,
    aten.t.default: np.transpose,
    aten.transpose.int: np.swapaxes,
    aten.permute.default: np.transpose,
    aten.unsqueeze.default: np.expand_dims,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.expand.default: expand,
    aten.select.int: one,
    aten.slice.Tensor: part,
    aten.split_with_sizes.default: lambda x, sizes, dim=0: np.split(x, np.cumsum(sizes)[:-1], dim),
    aten.split.Tensor: lambda x, size, dim=0: np.split(x, range(size, x.shape[dim], size), dim),
    aten.unbind.int: lambda x, dim=0: [one(x, dim, k) for k in range(x.shape[dim])],
}
"""Looked at in another way; whatever becomes of the array is seen in it."""

FILLED: dict[Any, Callable[..., float]] = {
    aten.ones_like.default: lambda x, **_: 1,
    aten.zeros_like.default: lambda x, **_: 0,
    aten.empty_like.default: lambda x, **_: 0,
    aten.new_zeros.default: lambda x, size, **_: 0,
    aten.full_like.default: lambda x, value, **_: value,
}
"""The number that fills a new array as large as another."""


def flat(x: np.ndarray) -> np.ndarray:
    return view(x, (-1,))


def locate(x: np.ndarray, dim: int, index: np.ndarray) -> tuple[list[Call], np.ndarray]:
    """Calls that find the places in `flat(x)` of an index along a dimension, and the array where they are."""
    dim %= x.ndim
    strides = [int(np.prod(x.shape[k + 1 :])) for k in range(x.ndim)]
    others = sum((np.indices(index.shape)[k] * strides[k] for k in range(x.ndim) if k != dim), start=np.zeros(index.shape, np.int64))
    found = np.empty(index.shape, np.int64)
    return [partial(np.multiply, index, strides[dim], out=found), partial(np.add, found, others, out=found)], found


def gather(out: np.ndarray, x: np.ndarray, dim: int, index: np.ndarray, sparse: bool = False) -> list[Call]:
    calls, found = locate(x, dim, index)
    return [*calls, partial(np.take, flat(x), found, None, out, "clip")]


def scatter_add(out: np.ndarray, x: np.ndarray, dim: int, index: np.ndarray, source: np.ndarray) -> list[Call]:
    calls, found = locate(out, dim, index)
    begin = [] if x is out else [partial(np.copyto, out, x)]
    return [*begin, *calls, partial(np.add.at, flat(out), found, source)]


def index_of(x: np.ndarray, index: Sequence[np.ndarray | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if each is None else each for each in index)


def taken(out: np.ndarray, x: np.ndarray, index: Sequence[np.ndarray | None]) -> list[Call]:
    where = index_of(x, index)
    return [lambda: np.copyto(out, x[where])]


def put(out: np.ndarray, x: np.ndarray, index: Sequence[np.ndarray | None], values: np.ndarray, accumulate: bool = False) -> list[Call]:
    where = index_of(x, index)
    write = partial(np.add.at, out, where, values) if accumulate else partial(out.__setitem__, where, values)
    return [partial(np.copyto, out, x), write]


def into(place: Callable[..., np.ndarray]) -> Maker:
    """Of the gradient of a view: zeros but in that place."""

    def make(out: np.ndarray, gradient: np.ndarray, size: Sequence[int], *where: Any) -> list[Call]:
        out.fill(0)
        return [partial(np.copyto, place(out, *where), gradient)]

    return make


def cat(out: np.ndarray, parts: Sequence[np.ndarray], dim: int = 0) -> list[Call]:
    places = np.split(out, np.cumsum([each.shape[dim] for each in parts])[:-1], dim)
    return [partial(np.copyto, place, each) for place, each in zip(places, parts, strict=True)]


def stack(out: np.ndarray, parts: Sequence[np.ndarray], dim: int = 0) -> list[Call]:
    return [partial(np.copyto, one(out, dim, k), each) for k, each in enumerate(parts)]


MOVES: dict[Any, Maker] = {
    aten.gather.default: gather,
    aten.scatter_add.default: scatter_add,
    aten.index.Tensor: taken,
    aten.index_put.default: put,
    aten.slice_backward.default: into(part),
    aten.select_backward.default: into(one),
    aten.cat.default: cat,
    aten.stack.default: stack,
}
