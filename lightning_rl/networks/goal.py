"""Goal conditioning: a hidden layer whose weights are generated from the goal (Ha et al. 2017, https://arxiv.org/abs/1609.09106).

In the shape that ML-Agents gave it: only the last hidden layer, and the goal stays an input of the first too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_rl.errors import SettingError
from lightning_rl.networks.mlp import EnsembleLinear, mlp, orthogonal_linear


def goal_mlp(
    num_inputs: int,
    widths: Sequence[int],
    activation: str = "tanh",
    layer: Callable[[int, int], nn.Module] = orthogonal_linear,
    goal: slice = slice(0),
) -> nn.Sequential:
    """`mlp`, whose last layer gets its weights from a part of the input; nothing else if that is empty.

    Args:
        num_inputs, widths, activation, layer: as in `mlp`.
        goal: where in the input the goal's features are.

    Raises:
        SettingError: there is a goal but no hidden layer; and those of `mlp`.
    """
    layers = mlp(num_inputs, widths, activation, layer)
    num_goals = len(range(num_inputs)[goal])
    if not num_goals:
        return layers
    if not widths:
        raise SettingError("net_arch is empty, but goals need a hidden layer whose weights they generate; use net_arch [64]")
    layers[-2] = HyperLinear(layers[-2], num_goals, *(num_inputs, *widths)[-2:])
    return GoalLayers(*layers, goal=goal)


class HyperLinear(nn.Module):
    """A linear layer with weights of their own for each row: `[..., in]` and goals `[..., num_goals]` to `[..., out]`.

    y = x W(g) + b,  W = reshape(L(norm(silu(L(silu(L(g))))))), whose last layer starts at U(±√(1 / (out · in))), without noise. It has
    out² · in weights, and `[..., in, out]` numbers are computed on the way.

    Args:
        plain: the layer that it replaces, whose bias it keeps; each member of an ensemble gets a generator.
        num_goals: features of the goal.
        num_inputs, num_outputs: in and out.
    """

    def __init__(self, plain: Any, num_goals: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        linear: Any = partial(EnsembleLinear, len(plain.weight)) if isinstance(plain, EnsembleLinear) else nn.Linear
        last = linear(num_outputs, num_inputs * num_outputs)
        bound = 1 / math.sqrt(num_outputs * num_inputs)
        nn.init.uniform_(last.weight, -bound, bound)
        nn.init.zeros_(last.bias)
        norm = nn.LayerNorm(num_outputs, elementwise_affine=False)
        self.generator = nn.Sequential(*mlp(num_goals, [num_outputs, num_outputs], "silu", linear), norm, last)
        self.bias, self.sizes = plain.bias, (num_inputs, num_outputs)

    def forward(self, x: Tensor, goal: Tensor) -> Tensor:
        weight = self.generator(goal).unflatten(-1, self.sizes)
        return (x.unsqueeze(-2) @ weight).squeeze(-2) + self.bias


class GoalLayers(nn.Sequential):
    """Layers of which those that generate their weights are told the part `goal` of the input."""

    def __init__(self, *layers: Any, goal: slice = slice(0)) -> None:
        super().__init__(*layers)
        self.goal = goal

    def forward(self, x: Tensor) -> Tensor:
        goal = x[..., self.goal]
        for layer in self:
            x = layer(x, goal) if isinstance(layer, HyperLinear) else layer(x)
        return x
