"""Imitation: the distance of a policy from demonstrated actions, for each row and part.

Choices are given as log-probabilities `[..., n]`, those of illegal choices below `MIN_LOG_PROB`. A bit is a choice of two.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

MIN_LOG_PROB = -1e9
"""Below that of any legal choice."""


def branches(log_p: Tensor, sizes: Sequence[int]) -> Tensor:
    """Pad choices branch after branch, `[..., sum(sizes)]`, with illegal ones to `[..., K, max(sizes)]`."""
    width = max(sizes)
    if min(sizes) == width:
        return log_p.unflatten(-1, (len(sizes), width))
    least = torch.finfo(log_p.dtype).min
    return torch.stack([functional.pad(part, (0, width - part.shape[-1]), value=least) for part in log_p.split(list(sizes), -1)], -2)


def cross_entropy(log_p: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return −Σ q log p with q = 1 − ε at the target, and ε spread evenly over all legal choices (Szegedy et al. 2016, sec. 7).

    log_p `[..., n]` and target `[...]` to `[...]`.
    """
    loss = -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    if label_smoothing == 0:
        return loss
    legal = log_p > MIN_LOG_PROB
    even = -(log_p * legal).sum(-1) / legal.sum(-1)
    return (1 - label_smoothing) * loss + label_smoothing * even


def squared_error(mean: Tensor, action: Tensor) -> Tensor:
    """Return (μ − a)² for each dimension: with σ = 1, −log π(a|s) = ½ (μ − a)² + ½ log 2π.  All `[...]`."""
    return (mean - action).square()


def accuracy(log_p: Tensor, target: Tensor) -> Tensor:
    """Return 1 where the target is the most likely choice, else 0.  `[..., n]` and `[...]` to `[...]`."""
    return (log_p.argmax(-1) == target).float()


def rank(log_p: Tensor, target: Tensor) -> Tensor:
    """Count the choices that are more likely than the target.  `[..., n]` and `[...]` to `[...]`."""
    return (log_p > log_p.gather(-1, target.unsqueeze(-1))).sum(-1).float()


def top_k_accuracy(rank: Tensor, k: int) -> Tensor:
    """Return 1 where the target is among the k most likely choices, by its rank, else 0."""
    return (rank < k).float()
