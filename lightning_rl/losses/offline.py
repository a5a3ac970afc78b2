"""Losses on recorded data: cloning, for each row and part, and offline reinforcement learning, for each row `[B]`.

Choices are log-probabilities `[..., n]`, with those of illegal choices below `MIN_LOG_PROB`. A bit is a choice of two. S is the number of
reward streams.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

MIN_LOG_PROB = -1e9
"""Lower than the log-probability of any legal choice."""


def branches(log_p: Tensor, sizes: Sequence[int]) -> Tensor:
    """Split choices `[..., sum(sizes)]` into branches, padded with illegal ones to `[..., K, max(sizes)]`."""
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
    """Return (μ − a)² for each dimension; with σ = 1, −log π(a|s) = ½ (μ − a)² + ½ log 2π.  All `[...]`."""
    return (mean - action).square()


def accuracy(log_p: Tensor, target: Tensor) -> Tensor:
    """Return 1 where the target is the most likely choice, else 0.  `[..., n]` and `[...]` to `[...]`."""
    return (log_p.argmax(-1) == target).float()


def rank(log_p: Tensor, target: Tensor) -> Tensor:
    """Count the choices that are more likely than the target.  `[..., n]` and `[...]` to `[...]`."""
    return (log_p > log_p.gather(-1, target.unsqueeze(-1))).sum(-1).float()


def top_k_accuracy(rank: Tensor, k: int) -> Tensor:
    """Return 1 where the target is among the k most likely choices, according to its rank, else 0."""
    return (rank < k).float()


def expectile_loss(value: Tensor, target: Tensor, expectile: float) -> Tensor:
    """Return |τ − 1(u < 0)| u² with u = target − value, the mean over reward streams (Kostrikov et al. 2021, eq. 5).  `[B, S]` to `[B]`.

    τ = ½ gives half the squared error; as τ approaches 1, V approaches the maximum of a state's targets.
    """
    error = target - value
    return (torch.where(error < 0, 1 - expectile, expectile) * error.square()).mean(-1)


def advantage_weight(advantage: Tensor, beta: float, max_weight: float) -> Tensor:
    """Return exp(β A), at most `max_weight`, with A summed over the reward streams (Peng et al. 2019, AWR).  `[B, S]` to `[B]`."""
    return (beta * advantage.sum(-1)).exp().clamp(max=max_weight)


def conservative_gap(q: Tensor, log_prob: Tensor, q_data: Tensor) -> Tensor:
    """Return log ∫ exp Q(s, a) da − Q(s, a_data), summed over the critics (Kumar et al. 2020, eq. 4 and app. F).

    The integral is estimated from K actions by importance sampling, as log Σ_k exp(Q(s, a_k) − log p(a_k)), without the constant −log K.

    Args:
        q: Q(s, a_k), `[E, K, B]`.
        log_prob: log p(a_k), `[K, B]`; zeros if the actions are all possible ones.
        q_data: Q(s, a_data), `[E, B]`.
    """
    return ((q - log_prob).logsumexp(1) - q_data).sum(0)
