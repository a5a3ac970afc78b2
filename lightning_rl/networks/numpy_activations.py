"""Activations of ATen, and what losses are made of, with their gradients; see `numpy_ops.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from lightning_rl.networks.numpy_ops import Call, Maker, NotInNumpy, aten, clamp, greatest, total, ufunc


def rows_of(x: np.ndarray, dim: int) -> np.ndarray:
    """An array for a number a row."""
    shape = list(x.shape)
    shape[dim] = 1
    return np.empty(shape, x.dtype)


def log_softmax(out: np.ndarray, x: np.ndarray, dim: int, half: bool) -> list[Call]:
    row, exponentials = rows_of(x, dim), np.empty_like(x)
    return [
        *greatest(row, x, dim, True),
        partial(np.subtract, x, row, out=out),
        partial(np.exp, out, out=exponentials),
        *total(row, exponentials, dim, True),
        partial(np.log, row, out=row),
        partial(np.subtract, out, row, out=out),
    ]


def log_softmax_backward(out: np.ndarray, gradient: np.ndarray, y: np.ndarray, dim: int, dtype: Any) -> list[Call]:
    row, probs = rows_of(y, dim), np.empty_like(y)
    return [
        partial(np.exp, y, out=probs),
        *total(row, gradient, dim, True),
        partial(np.multiply, probs, row, out=probs),
        partial(np.subtract, gradient, probs, out=out),
    ]


def softmax(out: np.ndarray, x: np.ndarray, dim: int, half: bool) -> list[Call]:
    row = rows_of(x, dim)
    return [
        *greatest(row, x, dim, True),
        partial(np.subtract, x, row, out=out),
        partial(np.exp, out, out=out),
        *total(row, out, dim, True),
        partial(np.divide, out, row, out=out),
    ]


def softmax_backward(out: np.ndarray, gradient: np.ndarray, y: np.ndarray, dim: int, dtype: Any) -> list[Call]:
    row, product = rows_of(y, dim), np.empty_like(y)
    return [
        partial(np.multiply, gradient, y, out=product),
        *total(row, product, dim, True),
        partial(np.subtract, gradient, row, out=out),
        partial(np.multiply, out, y, out=out),
    ]


def relu(out: np.ndarray, x: np.ndarray) -> list[Call]:
    return [partial(np.maximum, x, np.zeros_like(x), out=out)]


def relu_backward(out: np.ndarray, gradient: np.ndarray, y: np.ndarray, threshold: float) -> list[Call]:
    above = np.empty(y.shape, bool)
    return [partial(np.greater, y, threshold, out=above), partial(np.multiply, gradient, above, out=out)]


def tanh_backward(out: np.ndarray, gradient: np.ndarray, y: np.ndarray) -> list[Call]:
    return [partial(np.multiply, y, y, out=out), partial(np.subtract, 1, out, out=out), partial(np.multiply, gradient, out, out=out)]


def sigmoid(out: np.ndarray, x: np.ndarray) -> list[Call]:
    return [
        partial(np.negative, x, out=out),
        partial(np.exp, out, out=out),
        partial(np.add, out, 1, out=out),
        partial(np.reciprocal, out, out=out),
    ]


def sigmoid_backward(out: np.ndarray, gradient: np.ndarray, y: np.ndarray) -> list[Call]:
    return [partial(np.subtract, 1, y, out=out), partial(np.multiply, out, y, out=out), partial(np.multiply, gradient, out, out=out)]


def log_sigmoid(outs: Sequence[np.ndarray], x: np.ndarray) -> list[Call]:
    """min(x, 0) − log(1 + e^−|x|)."""
    out, least = outs[0], np.empty_like(x)
    return [
        partial(np.minimum, x, 0, out=least),
        partial(np.abs, x, out=out),
        partial(np.negative, out, out=out),
        partial(np.exp, out, out=out),
        partial(np.log1p, out, out=out),
        partial(np.subtract, least, out, out=out),
    ]


def log_sigmoid_backward(out: np.ndarray, gradient: np.ndarray, x: np.ndarray, buffer: np.ndarray) -> list[Call]:
    """g σ(−x)."""
    return [partial(np.negative, x, out=out), *sigmoid(out, out), partial(np.multiply, gradient, out, out=out)]


def softplus(out: np.ndarray, x: np.ndarray, beta: float = 1, threshold: float = 20) -> list[Call]:
    if beta != 1 or threshold != 20:
        raise NotInNumpy("softplus")
    return [partial(np.logaddexp, x, 0, out=out)]


def huber(out: np.ndarray, x: np.ndarray, y: np.ndarray, reduction: int = 1, delta: float = 1.0) -> list[Call]:
    """With d = |x − y| and m = min(d, δ): m (d − m / 2)."""
    if reduction:
        raise NotInNumpy("huber_loss")
    near, half = np.empty_like(out), np.empty_like(out)
    return [
        partial(np.subtract, x, y, out=out),
        partial(np.abs, out, out=out),
        partial(np.minimum, out, delta, out=near),
        partial(np.multiply, near, 0.5, out=half),
        partial(np.subtract, out, half, out=out),
        partial(np.multiply, out, near, out=out),
    ]


def huber_backward(out: np.ndarray, gradient: np.ndarray, x: np.ndarray, y: np.ndarray, reduction: int, delta: float) -> list[Call]:
    return [partial(np.subtract, x, y, out=out), *clamp(out, out, -delta, delta), partial(np.multiply, gradient, out, out=out)]


ACTIVATIONS: dict[Any, Maker] = {
    aten.relu.default: relu,
    aten.threshold_backward.default: relu_backward,
    aten.tanh.default: ufunc(np.tanh),
    aten.tanh_backward.default: tanh_backward,
    aten.sigmoid.default: sigmoid,
    aten.sigmoid_backward.default: sigmoid_backward,
    aten.log_sigmoid_forward.default: log_sigmoid,
    aten.log_sigmoid_backward.default: log_sigmoid_backward,
    aten.softplus.default: softplus,
    aten._log_softmax.default: log_softmax,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten._softmax.default: softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten.huber_loss.default: huber,
    aten.huber_loss_backward.default: huber_backward,
}
