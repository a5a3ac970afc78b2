"""Target networks follow their online networks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_rl.errors import SettingError, check_range

Network = TypeVar("Network", bound=nn.Module)


class TargetNetworkUpdate(pl.Callback):
    """Moves each target network towards its online network after every `every_n_updates` updates.

    θ̄ ← τ θ + (1 − τ) θ̄ for the weights; other numbers, such as statistics of a normalization, are copied. Algorithms with target networks
    bring this callback themselves, with their `tau` and `target_update_interval`, unless the Trainer has one.

    Args:
        tau: fraction to move; 1.0 copies the weights (DQN), 0.005 tracks slowly (SAC).
        every_n_updates: updates (joint learning steps) between moves.
    """

    def __init__(self, tau: float = 0.005, every_n_updates: int = 1) -> None:
        check_range("tau", tau, 0, 1, open_low=True)
        check_range("target_update_interval", every_n_updates, 1, whole=True)
        self.tau, self.every_n_updates = tau, every_n_updates

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if not getattr(pl_module, "target_networks", ()):
            raise SettingError(f"TargetNetworkUpdate: {type(pl_module).__name__} has no target networks")

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        online, target = (nn.ModuleList(networks) for networks in zip(*pl_module.target_networks, strict=True))
        self.weights: tuple[Any, Any] = list(target.parameters()), list(online.parameters())
        self.buffers = list(zip(target.buffers(), online.buffers(), strict=True))

    @torch.no_grad()
    def on_update_end(self, trainer: pl.Trainer, algorithm: Any) -> None:
        """After an update of the algorithm."""
        if algorithm.updates % self.every_n_updates == 0:
            torch._foreach_lerp_(*self.weights, self.tau)
            for target, online in self.buffers:
                target.copy_(online)


def make_target(online: Network) -> Network:
    """A copy of a network that only follows: it has no gradients."""
    return deepcopy(online).requires_grad_(False)
