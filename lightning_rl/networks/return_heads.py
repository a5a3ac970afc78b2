"""What a Q-network knows of an action's return: its mean, a histogram, or its quantiles.

Each reads Z numbers z `[..., Z]` as atoms, values of h(return) with probabilities, and has a loss between z and the atoms of a target.
h is a value transform; means are of returns, so that those of several reward streams add up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_rl.errors import SettingError, check_choice, check_range
from lightning_rl.losses import q_learning as losses
from lightning_rl.value_transforms import Identity, ValueTransform

IDENTITY = Identity()


class ScalarReturn(nn.Module):
    """The mean, Z = 1 (Mnih et al. 2015)."""

    atoms = 1

    def __init__(self, transform: ValueTransform = IDENTITY) -> None:
        super().__init__()
        self.transform = transform

    def mean(self, z: Tensor) -> Tensor:
        """Estimate the expected return `[...]`: h⁻¹(z)."""
        return self.transform.inverse(z).squeeze(-1)

    def distribution(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Values and probabilities of the atoms, `[..., Z]` each."""
        return z, torch.ones_like(z)

    def loss(self, z: Tensor, target: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and error for priorities, `[...]` each, of z against a target's atoms."""
        return losses.huber(z, target).squeeze(-1), (z.detach() - target).squeeze(-1).abs()


class CategoricalReturn(nn.Module):
    """C51: a histogram over `atoms` values from v_min to v_max (Bellemare et al. 2017). The error is the loss, as in Rainbow."""

    support: Tensor

    def __init__(self, atoms: int = 51, v_min: float = -10.0, v_max: float = 10.0, transform: ValueTransform = IDENTITY) -> None:
        super().__init__()
        self.transform = transform
        check_range("n_atoms", atoms, 2, whole=True)
        if not v_min < v_max:
            raise SettingError(f"v_min {v_min} must be below v_max {v_max}")
        self.atoms = atoms
        self.register_buffer("support", torch.linspace(v_min, v_max, atoms), persistent=False)

    def mean(self, z: Tensor) -> Tensor:
        """Estimate the expected return `[...]`: Σ p h⁻¹(atom)."""
        return (z.softmax(-1) * self.transform.inverse(self.support)).sum(-1)

    def distribution(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Values and probabilities of the atoms, `[..., Z]` each."""
        return self.support.expand_as(z), z.softmax(-1)

    def loss(self, z: Tensor, target: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and error for priorities, `[...]` each, of z against a target's atoms."""
        loss = losses.cross_entropy(z, losses.project(target, probs, self.support))
        return loss, loss.detach()


class QuantileReturn(nn.Module):
    """QR-DQN: `atoms` quantiles (Dabney et al. 2018). The error is the loss."""

    fraction: Tensor

    def __init__(self, atoms: int = 50, transform: ValueTransform = IDENTITY) -> None:
        super().__init__()
        self.transform = transform
        check_range("n_quantiles", atoms, 1, whole=True)
        self.atoms = atoms
        self.register_buffer("fraction", (torch.arange(atoms) + 0.5) / atoms, persistent=False)

    def mean(self, z: Tensor) -> Tensor:
        """Estimate the expected return `[...]`: the mean of h⁻¹(quantile)."""
        return self.transform.inverse(z).mean(-1)

    def distribution(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Values and probabilities of the atoms, `[..., Z]` each."""
        return z, torch.full_like(z, 1 / self.atoms)

    def loss(self, z: Tensor, target: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and error for priorities, `[...]` each, of z against a target's atoms."""
        loss = losses.quantile_huber(z, self.fraction, target)
        return loss, loss.detach()


ReturnHead = ScalarReturn | CategoricalReturn | QuantileReturn


def make_return_head(
    distribution: str, n_atoms: int, v_min: float, v_max: float, n_quantiles: int, transform: ValueTransform = IDENTITY
) -> ReturnHead:
    """Build the head for a setting of DQN: `none`, `c51` or `quantiles`, of returns transformed by h."""
    check_choice("distribution", distribution, ("none", "c51", "quantiles"))
    if distribution == "none":
        return ScalarReturn(transform)
    return CategoricalReturn(n_atoms, v_min, v_max, transform) if distribution == "c51" else QuantileReturn(n_quantiles, transform)
