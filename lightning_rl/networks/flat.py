"""All parameters of a network as one vector."""

from __future__ import annotations

import torch
from torch import nn


class FlatParameters(nn.Parameter):
    """One vector `[P]` that holds all trainable parameters of a module, for its optimizer.

    The module's parameters become views of the vector, so its `state_dict` and its use stay as they were, while an optimizer's step, the
    clipping of the gradient and its mean over ranks are a few operations on one tensor instead of a few for each: for the small networks
    of control tasks the number of calls is what they cost. Make it when the module is on its device.
    """

    parts: list[nn.Parameter]

    def __new__(cls, module: nn.Module) -> FlatParameters:
        parts = [parameter for parameter in module.parameters() if parameter.requires_grad]
        vector = super().__new__(cls, torch.cat([part.detach().flatten() for part in parts]))
        for part, view in zip(parts, vector.detach().split([part.numel() for part in parts]), strict=True):
            part.data = view.view_as(part)
        vector.parts = parts
        return vector

    def gather_gradient(self) -> None:
        """After the backward pass: the vector's gradient from those of its parts, 0 where a part has none."""
        self.grad = torch.cat([torch.zeros_like(part).flatten() if part.grad is None else part.grad.flatten() for part in self.parts])
