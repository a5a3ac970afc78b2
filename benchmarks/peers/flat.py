"""What the bare loops have in common: parameters in one vector, and layers that numpy evaluates."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn


class Flat:
    """All parameters of a module as views of one vector, moved by torch's fused Adam.

    Args:
        module: whose parameters they become.
        learning_rate: step size.
        max_norm: cut gradients to this Euclidean norm.
        eps: ε of Adam.
    """

    def __init__(self, module: nn.Module, learning_rate: float, max_norm: float = math.inf, eps: float = 1e-8) -> None:
        self.parts = list(module.parameters())
        sizes = [part.numel() for part in self.parts]
        self.vector = torch.cat([part.detach().flatten() for part in self.parts])
        self.grad, self.exp_avg, self.exp_avg_sq = (torch.zeros_like(self.vector) for _ in range(3))
        self.steps = torch.zeros(())
        self.learning_rate, self.max_norm, self.eps = learning_rate, max_norm, eps
        for part, view, grad in zip(self.parts, self.vector.split(sizes), self.grad.split(sizes), strict=True):
            part.data, part.grad = view.view_as(part), grad.view_as(part)

    def step(self, loss: Tensor) -> None:
        """One gradient step."""
        self.grad.zero_()
        loss.backward(inputs=self.parts)
        if self.max_norm < math.inf and (norm := self.grad.norm().item()) > self.max_norm:
            self.grad.mul_(self.max_norm / (norm + 1e-6))
        self.steps += 1
        torch._fused_adam_(
            [self.vector],
            [self.grad],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.steps],
            lr=self.learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


def views(net: Iterable[nn.Module]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights and biases of linear layers, live, for numpy."""
    return [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in net if isinstance(layer, nn.Linear)]
