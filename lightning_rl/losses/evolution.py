"""Evolution strategies: fitness shaping of returns, and the gradient estimate (Salimans et al. 2017, sec. 2).

Returns are float64 `[n, 2]`, for n antithetic pairs: at θ + σε and at θ − σε.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def centred_ranks(returns: Tensor) -> Tensor:
    """Rank each among all 2n returns, from −½ for the worst to ½ for the best; equal returns share the mean of their ranks."""
    flat = returns.flatten()
    _, place, count = flat.unique(return_inverse=True, return_counts=True)
    rank = count.cumsum(0) - 0.5 * (count + 1)
    return (rank[place] / (len(flat) - 1) - 0.5).view_as(returns)


def z_scores(returns: Tensor) -> Tensor:
    """Return (R − mean) / standard deviation over all 2n returns; 0 if all are equal."""
    centred = returns - returns.mean()
    deviation = centred.square().mean().sqrt()
    return centred / deviation if deviation > 1e-12 * returns.abs().max() else torch.zeros_like(returns)


def raw(returns: Tensor) -> Tensor:
    """Return the returns unchanged."""
    return returns


SHAPINGS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "centred_ranks": ("returns", centred_ranks),
    "centred_sign_ranks": ("signs", centred_ranks),
    "z_scores": ("returns", z_scores),
    "signs": ("signs", raw),
    "raw": ("returns", raw),
}
"""For each name: the sum over an episode, of its rewards or of their signs, and the function that turns it into fitness."""


def antithetic_gradient(worth: Tensor, noise: Iterable[Tensor]) -> Tensor:
    """Return g = (1/n) Σ_j (u_j⁺ − u_j⁻) ε_j, the direction `[P]` of increasing fitness; the factor 1/σ is left to the step size.

    With u = R this is 2σ times the estimate of ∇E[R(θ + σε)] (sec. 2, with antithetic sampling).

    Args:
        worth: the fitness u, `[n, 2]`.
        noise: ε_1, …, ε_n, each `[P]`, one at a time.
    """
    total = None
    for difference, direction in zip((worth[:, 0] - worth[:, 1]).tolist(), noise, strict=True):
        total = direction * difference if total is None else total.add_(direction, alpha=difference)
    assert total is not None
    return total / len(worth)
