"""Returns and advantages. All arguments broadcast to `[T, N, S]`; nothing carries a gradient.

`discount` is γ · (not terminated), `carry` is 0 where an episode ended, `next_value` is the value of the true successor.
"""

from typing import Any

import torch
from torch import Tensor


def gae(reward: Tensor, discount: Tensor, value: Tensor, next_value: Tensor, carry: Tensor, gae_lambda: float) -> Tensor:
    """Estimate generalized advantages (Schulman et al. 2016, eq. 16).

    δ_t = r_t + discount_t V(s'_t) − V(s_t)
    A_t = δ_t + discount_t λ carry_t A_{t+1}
    """
    delta = reward + discount * next_value - value
    return _reverse_scan(delta.detach(), (discount * gae_lambda * carry).detach())


def n_step(reward: Tensor, discount: Tensor, next_value: Tensor, carry: Tensor, n: int) -> Tensor:
    """Return n-step returns, shorter where an episode or the rollout ends (Sutton and Barto 2018, eq. 7.1).

    G¹_t = r_t + discount_t V(s'_t)
    Gⁿ_t = r_t + discount_t (carry_t Gⁿ⁻¹_{t+1} + (1 − carry_t) V(s'_t))
    """
    one_step = (reward + discount * next_value).detach()
    weight = (discount * carry).detach()
    returns = one_step
    for _ in range(min(n, one_step.shape[0]) - 1):
        ahead = one_step.clone()
        ahead[:-1] += (weight.expand_as(ahead)[:-1]) * (returns[1:] - next_value.expand_as(ahead)[:-1].detach())
        returns = ahead
    return returns


def vtrace(
    log_rho: Tensor,
    reward: Tensor,
    discount: Tensor,
    value: Tensor,
    next_value: Tensor,
    carry: Tensor,
    clip_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
    lambda_: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return V-trace targets and policy-gradient advantages (Espeholt et al. 2018, eqs. 1 and 4), correct at truncations too.

    δ_t = min(ρ̄, ρ_t) (r_t + discount_t V(s'_t) − V(s_t))
    v_t = V(s_t) + a_t,  a_t = δ_t + discount_t carry_t λ min(c̄, ρ_t) a_{t+1}
    A_t = min(ρ̄_pg, ρ_t) (r_t + discount_t v'_t − V(s_t)),  v'_t = v_{t+1} within an episode, V(s'_t) at its end

    A threshold of None means no clipping. Return (v, A).
    """

    def clip(threshold: float | None) -> Tensor:
        return rho if threshold is None else rho.clamp(max=threshold)

    with torch.no_grad():
        rho = log_rho.exp()
        delta = clip(clip_rho) * (reward + discount * next_value - value)
        excess = _reverse_scan(delta, (discount * carry * lambda_ * clip(clip_c)).expand_as(delta))
        target = value + excess
        ahead = next_value.expand_as(delta).clone()
        ahead[:-1] += carry.expand_as(delta)[:-1] * (target[1:] - ahead[:-1])
        advantage = clip(clip_pg_rho) * (reward + discount * ahead - value)
    return target, advantage


def discounted_sum(reward: Tensor, decay: Tensor, start: Tensor) -> Tensor:
    """Return the discounted sum of past rewards: R_t = r_t + decay_{t-1} R_{t-1}, with `start` = decay_{-1} R_{-1}. All `[T, ...]`."""
    first = reward.clone()
    first[0] += start
    shifted = torch.cat([torch.zeros_like(decay[:1]), decay[:-1]])
    return _reverse_scan(first.flip(0), shifted.flip(0)).flip(0)


def explained_variance(value: Tensor, returns: Tensor, valid: Tensor) -> Tensor:
    """Return 1 − Var(returns − value) / Var(returns) over the valid rows: 1 for a perfect critic, 0 for a constant one.

    value, returns: `[B, S]`; the variances of the S streams are added.  valid: bool `[B]`.
    """
    weight = (valid / valid.sum()).view(-1, *[1] * (value.dim() - 1))

    def variance(x: Tensor) -> Tensor:
        return (weight * (x - (weight * x).sum(0)).square()).sum()

    return 1 - variance(returns - value) / variance(returns).clamp(min=1e-12)


def _reverse_scan(x: Tensor, decay: Tensor) -> Tensor:
    """Compute y_t = x_t + decay_t y_{t+1} over the first dimension, in ⌈log₂ T⌉ vectorized rounds; the window doubles each round."""
    as_arrays = type(x) is Tensor and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)  # numpy calls cost less
    sums: Any = x.numpy() + 0 if as_arrays else x + 0
    weights: Any = decay.to(x.dtype).expand_as(x).numpy() + 0 if as_arrays else decay.expand_as(x) + 0
    window = 1
    while window < len(x):
        sums[:-window] += weights[:-window] * sums[window:]
        weights[:-window] = weights[:-window] * weights[window:]
        window *= 2
    return torch.from_numpy(sums) if as_arrays else sums
