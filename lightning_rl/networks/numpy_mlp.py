"""Small perceptrons in numpy, forward and backward.

A layer of 64 units costs autograd more in bookkeeping than in arithmetic, and torch's tanh on a CPU sixteen times numpy's. So within
`tape.in_numpy` narrow float32 perceptrons are computed on live views of their parameters, and `tape.py` carries gradients on to these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


NUMPY_ACTIVATIONS: dict[type, Activation] = {
    nn.Tanh: Activation(lambda x: np.tanh(x, out=x), _pull_tanh),
    nn.ReLU: Activation(lambda x: np.maximum(x, 0, out=x), _pull_relu),
    nn.Identity: Activation(lambda x: None, lambda gradient, y: None),
}


class NumpyMLP:
    """Linear layers and activations in turn, `[B, in]` to `[B, out]`, with the weights as they are at each call.

    Args:
        modules: layers that `is_plain` says yes to.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        layers: list[Any] = [*modules, nn.Identity()]
        linear = layers[: len(layers) // 2 * 2 : 2]
        self.parameters = [(layer.weight, layer.bias) for layer in linear]
        self.weights = [(weight.detach().numpy(), bias.detach().numpy()) for weight, bias in self.parameters]
        self.ids = frozenset(id(part) for pair in self.parameters for part in pair)
        self.made_of = signature(modules)
        self.activations = [NUMPY_ACTIVATIONS[type(layer)] for layer in layers[1::2]]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The output `[B, out]` for rows `[B, in]`."""
        if len(x) > MOST_ROWS:
            return np.concatenate([self(x[k : k + MOST_ROWS]) for k in range(0, len(x), MOST_ROWS)])
        for (weight, bias), activation in zip(self.weights, self.activations, strict=True):
            x = x @ weight.T
            x += bias
            activation.apply(x)
        return x

    def outputs(self, x: np.ndarray) -> list[np.ndarray]:
        """What goes into the first layer `[B, in]` and what comes out of each, `[B, width]`."""
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
    made, modules = MADE.get(layers), list(layers)
    if made is None or made.made_of != signature(modules):
        made = MADE[layers] = NumpyMLP(modules)
    return made


def signature(modules: Sequence[nn.Module]) -> list[Any]:
    """What changes when layers or parameters are replaced or moved, and not when numbers in them change."""
    parts: list[Any] = [(type(module), *module._parameters.values()) for module in modules]
    return [(kind, *((id(each), each.data_ptr()) for each in parameters)) for kind, *parameters in parts]


def is_plain(layers: Iterable[nn.Module], max_width: int = MAX_WIDTH) -> bool:
    """Whether these are linear layers and activations in turn, in float32 on a CPU, with inputs of at most `max_width`."""
    modules = list(layers)
    linear = modules[::2]
    return (
        bool(linear)
        and all(type(after) in NUMPY_ACTIVATIONS for after in modules[1::2])
        and all(type(layer) is nn.Linear and layer.bias is not None and _is_small(layer.weight, max_width) for layer in linear)
    )


def _is_small(weight: Tensor, max_width: int) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.shape[1] <= max_width


def has_hooks(layers: nn.Module) -> bool:
    """Whether somebody watches layers or the gradients of their parameters."""
    return any(
        each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks for each in layers.modules()
    ) or any(map(is_watched, layers.parameters()))


def is_watched(parameter: Any) -> bool:
    """Whether somebody watches its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
