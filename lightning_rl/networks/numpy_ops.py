"""Arithmetic of ATen, torch's own operations, in numpy: as calls that read and write arrays of fixed places.

A maker takes the array for the result and what ATen's operation takes, and returns the calls that fill it. Where numpy's own function for
something loops over short rows, a product with ones or columns in turn do it in a tenth of the time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

aten = torch.ops.aten
Call = Callable[[], Any]
Maker = Callable[..., list[Call]]
FEW = 4
"""Columns that are taken in turn."""


class NotInNumpy(Exception):
    """An operation, or a way to use one, that is not known here."""


def ufunc(function: np.ufunc) -> Maker:
    """Of an operation that is one function, element by element."""
    return lambda out, *args: [partial(function, *args, out=out)]


def by_torch(operation: Any) -> Maker:
    """Of an operation that numpy lacks: torch's own, in the variant that writes to memory that is there.

    Raises:
        NotInNumpy: it has none.
    """
    taken = [] if operation is None or torch.Tag.nondeterministic_seeded in operation.tags else operation._schema.arguments
    for name in operation.overloadpacket.overloads() if taken else []:
        variant = getattr(operation.overloadpacket, name)
        *others, last = variant._schema.arguments
        if last.is_out and [(each.name, str(each.type)) for each in others] == [(each.name, str(each.type)) for each in taken]:
            return lambda out, *args, **kwargs: [partial(variant, *map(_tensor, args), **kwargs, **{last.name: _tensor(out)})]
    raise NotInNumpy(str(operation))


def _tensor(value: Any) -> Any:
    """In the same memory."""
    if not isinstance(value, np.ndarray):
        return value
    with warnings.catch_warnings(action="ignore"):  # of arrays that are not to be written to: they are not
        return torch.from_numpy(value)


def scaled(function: np.ufunc, turned: bool = False) -> Maker:
    """Of a ± α b, or b ± α a."""

    def make(out: np.ndarray, a: Any, b: Any, alpha: float = 1) -> list[Call]:
        if alpha != 1:
            raise NotInNumpy("alpha")
        return [partial(function, *((b, a) if turned else (a, b)), out=out)]

    return make


def power(out: np.ndarray, x: np.ndarray, exponent: float) -> list[Call]:
    known = {1: np.positive, 2: np.square, 0.5: np.sqrt, -1: np.reciprocal}
    return [partial(known[exponent], x, out=out) if exponent in known else partial(np.power, x, exponent, out=out)]


def cast(out: np.ndarray, x: np.ndarray, *others: Any, **kwargs: Any) -> list[Call]:
    return [partial(np.copyto, out, x, casting="unsafe")]


def axes(x: np.ndarray, dims: int | Sequence[int] | None) -> tuple[int, ...]:
    every = tuple(range(x.ndim))
    return every if dims is None or dims == [] else tuple(sorted(every[d] for d in ([dims] if isinstance(dims, int) else dims)))


def total(out: np.ndarray, x: np.ndarray, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> list[Call]:
    over = axes(x, dims)
    if x.dtype == out.dtype == np.float32 and x.flags.c_contiguous and over:
        number = int(np.prod([x.shape[d] for d in over]))
        ones = np.ones(number, np.float32)
        if over == tuple(range(x.ndim - len(over), x.ndim)):
            return [partial(np.dot, x.reshape(-1, number), ones, out=out.reshape(-1))]
        if over == tuple(range(len(over))):
            return [partial(np.dot, ones, x.reshape(number, -1), out=out.reshape(-1))]
    return [partial(np.add.reduce, x, axis=over, dtype=out.dtype, out=out, keepdims=keepdim)]


def average(out: np.ndarray, x: np.ndarray, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> list[Call]:
    return [*total(out, x, dims, keepdim), partial(np.multiply, out, out.dtype.type(out.size / x.size), out=out)]


def extreme(function: np.ufunc) -> Maker:
    """Of the greatest or least of each row."""

    def make(out: np.ndarray, x: np.ndarray, dims: Any = (), keepdim: bool = False) -> list[Call]:
        over = axes(x, dims)
        if over != (x.ndim - 1,) or not 1 < x.shape[-1] <= FEW:
            return [partial(function.reduce, x, axis=over, out=out, keepdims=keepdim)]
        into, columns = out.reshape(x.shape[:-1]), [x[..., k] for k in range(x.shape[-1])]
        first = partial(function, columns[0], columns[1], out=into)
        return [first, *(partial(function, into, column, out=into) for column in columns[2:])]

    return make


greatest = extreme(np.maximum)


def best(out: np.ndarray, x: np.ndarray, dim: int | None = None, keepdim: bool = False) -> list[Call]:
    return [partial(np.argmax, x, axis=dim, out=out, keepdims=keepdim)]


def product(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[Call]:
    return [partial(np.dot if a.ndim == 2 else np.matmul, a, b, out=out)]


def affine(out: np.ndarray, bias: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[Call]:
    return [*product(out, a, b), partial(np.add, out, bias, out=out)]


def clamp(out: np.ndarray, x: np.ndarray, low: Any = None, high: Any = None) -> list[Call]:
    calls: list[Call] = [] if low is None else [partial(np.maximum, x, low, out=out)]
    return calls if high is None else [*calls, partial(np.minimum, out if calls else x, high, out=out)]


def either(out: np.ndarray, mask: np.ndarray, a: Any, b: Any) -> list[Call]:
    return [partial(np.copyto, out, b), partial(np.copyto, out, a, where=mask)]


def masked_fill(out: np.ndarray, x: np.ndarray, mask: np.ndarray, value: Any) -> list[Call]:
    return either(out, mask, value, x)


ARITHMETIC: dict[Any, Maker] = {
    aten.add.Tensor: scaled(np.add),
    aten.sub.Tensor: scaled(np.subtract),
    aten.rsub.Scalar: scaled(np.subtract, turned=True),
    aten.mul.Tensor: ufunc(np.multiply),
    aten.mul.Scalar: ufunc(np.multiply),
    aten.div.Tensor: ufunc(np.divide),
    aten.div.Scalar: ufunc(np.divide),
    aten.minimum.default: ufunc(np.minimum),
    aten.maximum.default: ufunc(np.maximum),
    aten.neg.default: ufunc(np.negative),
    aten.exp.default: ufunc(np.exp),
    aten.log.default: ufunc(np.log),
    aten.abs.default: ufunc(np.abs),
    aten.sgn.default: ufunc(np.sign),
    aten.sqrt.default: ufunc(np.sqrt),
    aten.rsqrt.default: lambda out, x: [partial(np.sqrt, x, out=out), partial(np.reciprocal, out, out=out)],
    aten.floor.default: ufunc(np.floor),
    aten.pow.Tensor_Scalar: power,
    aten.eq.Tensor: ufunc(np.equal),
    aten.eq.Scalar: ufunc(np.equal),
    aten.lt.Tensor: ufunc(np.less),
    aten.lt.Scalar: ufunc(np.less),
    aten.le.Tensor: ufunc(np.less_equal),
    aten.le.Scalar: ufunc(np.less_equal),
    aten.gt.Tensor: ufunc(np.greater),
    aten.gt.Scalar: ufunc(np.greater),
    aten.ge.Tensor: ufunc(np.greater_equal),
    aten.ge.Scalar: ufunc(np.greater_equal),
    aten.logical_and.default: ufunc(np.logical_and),
    aten.bitwise_and.Tensor: ufunc(np.bitwise_and),
    aten.bitwise_or.Tensor: ufunc(np.bitwise_or),
    aten.bitwise_not.default: ufunc(np.bitwise_not),
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.where.self: either,
    aten.masked_fill.Scalar: masked_fill,
    aten.clone.default: cast,
    aten.lift_fresh_copy.default: cast,
    aten.copy.default: lambda out, x, source: cast(out, source),
    aten._to_copy.default: cast,
    aten.sum.default: total,
    aten.sum.dim_IntList: total,
    aten.mean.default: average,
    aten.mean.dim: average,
    aten.amin.default: extreme(np.minimum),
    aten.amax.default: greatest,
    aten.argmax.default: best,
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.addmm.default: affine,
    aten.baddbmm.default: affine,
}
