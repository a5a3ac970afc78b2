"""Losses of the policy-gradient family, one for each row, and `mean` to average them."""

import torch
from torch import Tensor


def policy_gradient(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return −log π(a|s) Â per row (Williams 1992; Mnih et al. 2016, alg. S3).  All `[B]`."""
    return -log_prob * advantage


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """Return −min(ρ Â, clip(ρ, 1 − ε, 1 + ε) Â) per row (Schulman et al. 2017, eq. 7).

    All `[B]`, or `[B, D]` with a ratio for each part.
    """
    return -torch.min(ratio * advantage, ratio.clamp(1 - clip_range, 1 + clip_range) * advantage)


def value_loss(value: Tensor, returns: Tensor) -> Tensor:
    """Return (V − R)² per row and reward stream.  All `[B, S]`."""
    return (value - returns).square()


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """Return max((V − R)², (V_clip − R)²) with V_clip = V_old + clip(V − V_old, −ε, ε) per row and reward stream.  All `[B, S]`."""
    clipped = old_value + (value - old_value).clamp(-clip_range, clip_range)
    return torch.max((value - returns).square(), (clipped - returns).square())


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """Estimate KL(π_old ‖ π), unbiased and with low variance, as (ρ − 1) − log ρ (Schulman 2020, joschu.net/blog/kl-approx)."""
    return log_ratio.exp() - 1 - log_ratio


def mean(x: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean over the rows of `x [B]` or `[B, D]`, and the plain mean over D; `weight [B]` sums to 1."""
    # no matrix product: mixed precision would round it
    if x.dim() == 1:
        return (weight * x).sum()
    total = (weight.unsqueeze(-1) * x).sum()
    return total if x.shape[-1] == 1 else total / x.shape[-1]


def scaled(coefficient: float | Tensor, loss: Tensor) -> Tensor | float:
    """Return coefficient · loss, or a plain 0 if the coefficient is 0, so that nothing is differentiated needlessly."""
    if isinstance(coefficient, Tensor):
        return coefficient * loss
    return 0.0 if coefficient == 0 else loss if coefficient == 1 else coefficient * loss
