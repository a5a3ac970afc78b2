"""Losses of the Q-learning family, one for each row. Targets carry no gradient."""

import torch
from torch import Tensor
from torch.nn import functional


def chosen(z: Tensor, action: Tensor) -> Tensor:
    """Select the entries of an action: `[B, n, S, Z]` and `[B]` to `[B, S, Z]`."""
    return z.gather(1, action.view(-1, 1, 1, 1).expand(-1, 1, *z.shape[2:])).squeeze(1)


def huber(value: Tensor, target: Tensor, threshold: float = 1.0) -> Tensor:
    """Return ½ δ² for |δ| ≤ κ, else κ (|δ| − ½ κ), with δ = value − target (Huber 1964): DQN's clipped error (Mnih et al. 2015)."""
    return functional.huber_loss(value, target, reduction="none", delta=threshold)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return −Σ p log softmax(z) (Bellemare et al. 2017, alg. 1).  `[..., Z]` to `[...]`."""
    return -(target * logits.log_softmax(-1)).sum(-1)


def project(values: Tensor, probs: Tensor, support: Tensor) -> Tensor:
    """Project atoms `values` with `probs`, each `[..., Y]`, onto an evenly spaced support `[Z]`. Return probabilities `[..., Z]`.

    p_i = Σ_j [1 − |clip(v_j, v_min, v_max) − z_i| / Δz]⁺ p_j, with atoms split between their two neighbors (Bellemare et al. 2017, eq. 7).
    """
    last = len(support) - 1
    position = ((values - support[0]) / (support[-1] - support[0]) * last).clamp(0, last)
    lower = position.floor().clamp(max=last - 1)
    upper_share = position - lower
    projected = torch.zeros(*values.shape[:-1], len(support), dtype=probs.dtype, device=probs.device)
    index = lower.nan_to_num().long()  # NaN stays in the probabilities, and is detected in the loss
    return projected.scatter_add_(-1, index, probs * (1 - upper_share)).scatter_add_(-1, index + 1, probs * upper_share)


def quantile_huber(quantiles: Tensor, fraction: Tensor, target: Tensor, threshold: float = 1.0) -> Tensor:
    """Return Σ_i mean_j |τ_i − 1(δ_ij < 0)| huber(δ_ij) / κ with δ_ij = target_j − quantile_i (Dabney et al. 2018, eq. 10).

    quantiles `[Z, ...]` at the fractions τ `[Z]` and target samples `[Y, ...]` to `[...]`.
    """
    quantiles, target = torch.broadcast_tensors(quantiles.unsqueeze(1), target)  # [Z, Y, ...]
    fraction = fraction.view(-1, *[1] * (target.dim() - 1))
    weight = torch.where(target < quantiles.detach(), 1 - fraction, fraction)
    return (weight * huber(quantiles, target, threshold)).mean(1).sum(0) / threshold
