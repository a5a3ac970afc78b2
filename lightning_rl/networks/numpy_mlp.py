"""Small perceptrons in numpy, forward and backward.

A layer of 64 units costs autograd more in bookkeeping than in arithmetic, and torch's tanh on a CPU sixteen times numpy's. So within
`in_numpy` narrow float32 perceptrons are computed on live views of their parameters. What they put out is a leaf to autograd, which
differentiates the loss down to it; `Tape.pull` carries the gradient on to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

MAX_WIDTH = 256
"""Of a layer's input, where numpy is still asked to act; to learn, layers this wide multiply faster in torch."""
MOST_ROWS = 2048
"""At once, where only the output is wanted: what lies between the layers stays in the processor's cache, and takes little memory."""


class Activation(NamedTuple):
    """A function in place, and a gradient times its derivative, in place too, from what the function returned."""

    apply: Callable[[np.ndarray], Any]
    pull: Callable[[np.ndarray, np.ndarray], Any]


def _pull_tanh(gradient: np.ndarray, y: np.ndarray) -> None:
    gradient *= 1 - y * y


def _pull_relu(gradient: np.ndarray, y: np.ndarray) -> None:
    gradient *= y > 0


ACTIVATIONS: dict[type, Activation] = {
    nn.Tanh: Activation(lambda x: np.tanh(x, out=x), _pull_tanh),
    nn.ReLU: Activation(lambda x: np.maximum(x, 0, out=x), _pull_relu),
    nn.Identity: Activation(lambda x: None, lambda gradient, y: None),
}


class NumpyMLP:
    """Linear layers and activations in turn, `[B, in]` to `[B, out]`, with the weights as they are at each call.

    Args:
        modules: layers that `is_plain` says yes to.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        layers: list[Any] = [*modules, nn.Identity()]
        linear = layers[: len(layers) // 2 * 2 : 2]
        self.parameters = [(layer.weight, layer.bias) for layer in linear]
        self.weights = [(weight.detach().numpy(), bias.detach().numpy()) for weight, bias in self.parameters]
        self.addresses = self._addresses()
        self.activations = [ACTIVATIONS[type(layer)] for layer in layers[1::2]]

    def _addresses(self) -> list[int]:
        return [part.data_ptr() for pair in self.parameters for part in pair]

    @property
    def is_live(self) -> bool:
        """Whether the weights that it reads are those of the layers still: they may be moved, not only changed."""
        return self._addresses() == self.addresses

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if len(x) > MOST_ROWS:
            return np.concatenate([self(x[k : k + MOST_ROWS]) for k in range(0, len(x), MOST_ROWS)])
        for (weight, bias), activation in zip(self.weights, self.activations, strict=True):
            x = x @ weight.T
            x += bias
            activation.apply(x)
        return x

    def outputs(self, x: np.ndarray) -> list[np.ndarray]:
        """What goes into the first layer and what comes out of each."""
        seen = [x]
        for (weight, bias), activation in zip(self.weights, self.activations, strict=True):
            x = x @ weight.T
            x += bias
            activation.apply(x)
            seen.append(x)
        return seen

    def pull(self, output: Tensor, seen: list[np.ndarray]) -> None:
        """Add to the gradients of the parameters, from that of the output `[B, out]`, which is overwritten, and `outputs`."""
        gradient = output.numpy()
        ones = np.ones(len(gradient), dtype=np.float32)
        for k in reversed(range(len(self.weights))):
            self.activations[k].pull(gradient, seen[k + 1])
            for parameter, own in zip(self.parameters[k], (gradient.T @ seen[k], ones @ gradient), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.from_numpy(own)
                else:
                    before = parameter.grad.numpy()
                    before += own
            if k:
                gradient = gradient @ self.weights[k][0]


MADE: WeakKeyDictionary[nn.Module, NumpyMLP] = WeakKeyDictionary()


def as_numpy(layers: nn.Sequential) -> NumpyMLP:
    """The perceptron of layers that `is_plain` says yes to, which is made once."""
    made = MADE.get(layers)
    if made is None or not made.is_live:
        made = MADE[layers] = NumpyMLP(layers)
    return made


class Tape:
    """What small perceptrons put out since, and what their gradients will need."""

    def __init__(self) -> None:
        self.known: dict[nn.Module, NumpyMLP | None] = {}
        self.pending: list[tuple[Tensor, Callable[[Tensor, Any], None], Any]] = []

    def run(self, layers: nn.Sequential, x: Tensor) -> Tensor | None:
        """The output for `x [..., in]`, a leaf if there is a gradient to know; None if torch must compute it."""
        if layers not in self.known:
            self.known[layers] = as_numpy(layers) if is_plain(layers, MAX_WIDTH - 1) and not _has_hooks(layers) else None
        mlp = self.known[layers]
        if mlp is None or x.requires_grad or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return None
        learns = [part.requires_grad for pair in mlp.parameters for part in pair]
        rows = x.numpy() if x.dim() == 2 else x.numpy().reshape(-1, x.shape[-1])
        if not (torch.is_grad_enabled() and any(learns)):
            y = torch.from_numpy(mlp(rows))
        elif all(learns):
            seen = mlp.outputs(rows)
            y = torch.from_numpy(seen[-1]).requires_grad_()
            self.pending.append((y, mlp.pull, seen))
        else:
            return None
        return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)

    def pull(self) -> None:
        """Carry the gradients that leaves have got on to the parameters."""
        reached = [each for each in self.pending if each[0].grad is not None]
        self.pending = [each for each in self.pending if each[0].grad is None]
        for leaf, pull, seen in reached:
            assert leaf.grad is not None
            pull(leaf.grad, seen)


tape: ContextVar[Tape | None] = ContextVar("tape", default=None)


@contextmanager
def in_numpy() -> Iterator[None]:
    """Compute small perceptrons in numpy. With autograd on, gradients are then those that `gradient_step` makes, and no others."""
    token = tape.set(Tape())
    try:
        yield
    finally:
        tape.reset(token)


@contextmanager
def in_torch() -> Iterator[None]:
    """The opposite."""
    token = tape.set(None)
    try:
        yield
    finally:
        tape.reset(token)


def carry(leaf: Tensor, pull: Callable[[Tensor, Any], None], seen: Any) -> None:
    """Have the gradient of another leaf carried on too: `pull` gets it, and what was seen."""
    current = tape.get()
    assert current is not None
    current.pending.append((leaf, pull, seen))


def leaves() -> list[Tensor]:
    """What small perceptrons put out since, for autograd to differentiate down to."""
    current = tape.get()
    return [] if current is None else [leaf for leaf, _, _ in current.pending]


def pull() -> None:
    """Carry the gradients of leaves on to the parameters."""
    current = tape.get()
    if current is not None:
        current.pull()


def is_plain(layers: Iterable[nn.Module], max_width: int = MAX_WIDTH) -> bool:
    """Whether these are linear layers and activations in turn, in float32 on a CPU, with inputs of at most `max_width`."""
    modules = list(layers)
    linear = modules[::2]
    return (
        bool(linear)
        and all(type(after) in ACTIVATIONS for after in modules[1::2])
        and all(type(layer) is nn.Linear and layer.bias is not None and _is_small(layer.weight, max_width) for layer in linear)
    )


def _is_small(weight: Tensor, max_width: int) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.shape[1] <= max_width


def _has_hooks(layers: nn.Module) -> bool:
    parameters: Any = layers.parameters()
    return any(
        each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks for each in layers.modules()
    ) or any(each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters)
