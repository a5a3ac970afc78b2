"""Imitation: how far a policy is from demonstrated actions, for each row and part.

Choices come as log-probabilities `[..., n]`; a place that is no legal choice has one below `LEAST_LOG_PROB`. A bit is a choice of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

LEAST_LOG_PROB = -1e9
"""What a legal choice never comes down to."""


def branches(log_p: Tensor, sizes: Sequence[int]) -> Tensor:
    """From choices branch after branch, `[..., sum(sizes)]`, to `[..., K, max(sizes)]`; what shorter branches lack is illegal."""
    width = max(sizes)
    if min(sizes) == width:
        return log_p.unflatten(-1, (len(sizes), width))
    least = torch.finfo(log_p.dtype).min
    return torch.stack([functional.pad(part, (0, width - part.shape[-1]), value=least) for part in log_p.split(list(sizes), -1)], -2)


def cross_entropy(log_p: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """−Σ q log p with q = 1 − ε at the target, and ε spread evenly over all legal choices (Szegedy et al. 2016, sec. 7).

    log_p `[..., n]`, target `[...]`.  Returns `[...]`.
    """
    loss = -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    if label_smoothing == 0:
        return loss
    legal = log_p > LEAST_LOG_PROB
    even = -(log_p * legal).sum(-1) / legal.sum(-1)
    return (1 - label_smoothing) * loss + label_smoothing * even


def squared_error(mean: Tensor, action: Tensor) -> Tensor:
    """(μ − a)² for each dimension: with σ = 1, −log π(a|s) = ½ (μ − a)² + ½ log 2π.  All `[...]`."""
    return (mean - action).square()


def accuracy(log_p: Tensor, target: Tensor) -> Tensor:
    """Whether the target is the most likely choice, 0 or 1.  `[..., n]` and `[...]` to `[...]`."""
    return (log_p.argmax(-1) == target).float()


def rank(log_p: Tensor, target: Tensor) -> Tensor:
    """How many choices are more likely than the target.  `[..., n]` and `[...]` to `[...]`."""
    return (log_p > log_p.gather(-1, target.unsqueeze(-1))).sum(-1).float()


def top_k_accuracy(rank: Tensor, k: int) -> Tensor:
    """Whether the target is among the k most likely choices, 0 or 1, from its rank."""
    return (rank < k).float()
