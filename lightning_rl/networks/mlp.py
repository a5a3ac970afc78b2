"""Multi-layer perceptrons and their initialization."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
}


def mlp(num_inputs: int, widths: Sequence[int], activation: str = "tanh") -> nn.Sequential:
    """Linear layers of the given widths, each orthogonal with gain √2 and followed by the activation."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [orthogonal(nn.Linear(num_inputs, width)), ACTIVATIONS[activation]()]
        num_inputs = width
    return nn.Sequential(*layers)


def orthogonal(layer: nn.Linear, gain: float = math.sqrt(2)) -> nn.Linear:
    """Orthogonal weights with a gain, zero bias (Engstrom et al. 2020 measure what it is worth)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
