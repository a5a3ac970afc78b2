"""All parameters of a network as one vector, and torch's optimizers for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_rl.saving.runs import check_optimizer


class FlatParameters(nn.Parameter):
    """One vector `[P]` that holds all trainable parameters of a module, for its optimizer.

    The module's parameters become views of the vector, so its `state_dict` and its use stay the same, while an optimizer's step, the
    clipping of the gradient and its mean over ranks are a few operations on one tensor instead of a few for each: for the small networks
    of control tasks the number of calls is what they cost. Create it when the module is on its device.
    """

    parts: tuple[nn.Parameter, ...]

    def __new__(cls, module: nn.Module) -> FlatParameters:
        parts = [parameter for parameter in module.parameters() if parameter.requires_grad]
        vector = super().__new__(cls, torch.cat([part.detach().flatten() for part in parts]))
        for part, view in zip(parts, vector.detach().split([part.numel() for part in parts]), strict=True):
            part.data = view.view_as(part)
        vector.parts = tuple(parts)
        vector.clear()
        return vector

    def clear(self) -> None:
        """Set the gradient to zeros, of which the gradients of the parts are views."""
        if self.grad is not None and self.parts[0].grad is not None:
            self.grad.zero_()
            return
        self.grad = torch.zeros_like(self)
        for part, view in zip(self.parts, self.grad.split([part.numel() for part in self.parts]), strict=True):
            part.grad = view.view_as(part)


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer of one `FlatParameters`.

    Its learning rate is not an argument: it follows the `learning_rate` of the algorithm.
    """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradient to zeros in any case: it stays where the module's parameters have theirs."""
        self.param_groups[0]["params"][0].clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state.

        Raises:
            SettingError: the state is not one of an optimizer of this vector.
        """
        check_optimizer(state_dict, self)
        super().load_state_dict(state_dict)


class FlatAdam(FlatOptimizer, torch.optim.Adam):
    """`torch.optim.Adam(…, fused=True)` (Kingma and Ba 2015) on one `FlatParameters`."""

    def __init__(self, module: nn.Module, eps: float = 1e-8) -> None:
        super().__init__([FlatParameters(module)], eps=eps, fused=True)


class FlatRMSprop(FlatOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` (Tieleman and Hinton 2012) on one `FlatParameters`."""

    def __init__(self, module: nn.Module, alpha: float = 0.99, eps: float = 1e-8) -> None:
        super().__init__([FlatParameters(module)], alpha=alpha, eps=eps)


class FlatSGD(FlatOptimizer, torch.optim.SGD):
    """Gradient descent with momentum μ on one `FlatParameters`: v ← μ v + (1 − μ) g, θ ← θ − η v, with v = 0 at first."""

    def __init__(self, module: nn.Module, momentum: float) -> None:
        weights = FlatParameters(module)
        super().__init__([weights], momentum=momentum, dampening=momentum)
        # or torch begins with the first gradient, 1/(1 − μ) times as long
        self.state[weights]["momentum_buffer"] = torch.zeros_like(weights)
