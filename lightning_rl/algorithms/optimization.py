"""One gradient step: everything between a loss and new weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_rl.networks.flat import FlatParameters
from lightning_rl.types import total_norm


def gradient_step(loss: Tensor, optimizer: Optimizer, scaler: GradScaler, max_norm: float, world_size: int) -> Tensor:
    """Backward, the mean over ranks, clipping, and the optimizer's step. Returns the gradient's norm before clipping.

    Args:
        loss: a scalar.
        optimizer: over parameters, or over the `FlatParameters` of a network.
        scaler: of 16-bit precision; a disabled one does nothing.
        max_norm: cut the gradient to this Euclidean norm.
        world_size: number of ranks, each with its own gradient.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    flat = [parameter for parameter in parameters if isinstance(parameter, FlatParameters)]
    for parameter in parameters + [part for vector in flat for part in vector.parts]:
        parameter.grad = None
    scaler.scale(loss).backward()
    for vector in flat:
        vector.gather_gradient()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    average_over_ranks(gradients, world_size)
    scaler.unscale_(optimizer)
    norm = clip(gradients, max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


def average_over_ranks(gradients: list[Tensor], world_size: int) -> None:
    """Replace gradients by their mean over ranks, in one collective."""
    if world_size == 1:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient) / world_size)


def clip(gradients: list[Tensor], max_norm: float) -> Tensor:
    """Scale gradients to a Euclidean norm of at most `max_norm`. Returns the norm before."""
    norm = total_norm(gradients)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
