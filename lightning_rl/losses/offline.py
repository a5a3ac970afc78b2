"""Offline reinforcement learning: values of actions that the data do not show are not trusted.

S reward streams; a loss for each row, `[B]`.
"""

import torch
from torch import Tensor


def expectile_loss(value: Tensor, target: Tensor, expectile: float) -> Tensor:
    """Return |τ − 1(u < 0)| u² with u = target − value, the mean over streams (Kostrikov et al. 2021, eq. 5).  `[B, S]` each to `[B]`.

    τ = ½ is half the squared error; as τ nears 1, V nears the greatest of the targets that a state has.
    """
    error = target - value
    return (torch.where(error < 0, 1 - expectile, expectile) * error.square()).mean(-1)


def advantage_weight(advantage: Tensor, beta: float, max_weight: float) -> Tensor:
    """Return exp(β A), at most `max_weight`, of advantages summed over the streams (Peng et al. 2019, AWR).  `[B, S]` to `[B]`."""
    return (beta * advantage.sum(-1)).exp().clamp(max=max_weight)


def conservative_gap(q: Tensor, log_prob: Tensor, q_data: Tensor) -> Tensor:
    """Return log ∫ exp Q(s, a) da − Q(s, a_data), summed over the critics (Kumar et al. 2020, eq. 4 and app. F).

    The integral is estimated from K actions by importance sampling: log (1/K) Σ_k exp(Q(s, a_k) − log p(a_k)), but for log K.

    Args:
        q: Q(s, a_k), `[E, K, B]`.
        log_prob: log p(a_k), `[K, B]`; zeros where the actions are all there are.
        q_data: `[E, B]`.
    """
    return ((q - log_prob).logsumexp(1) - q_data).sum(0)
