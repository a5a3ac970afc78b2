"""Losses of soft actor-critic. Entropies are `[B, K]`, a column for each kind of action with its temperature α `[K]`; S reward streams.

Values of choices are `[..., M, S]`, branch by branch, with probabilities `[B, M]`. A policy without choices has one choice of probability
1, so that the same code handles continuous, discrete and hybrid actions. Sums are not matrix products, which mixed precision would round.
"""

from torch import Tensor


def chosen(q: Tensor, choice: Tensor) -> Tensor:
    """Return Q of an action: the mean over branches of the values of its choices.  `[E, B, M, S]` and `[B, branches]` to `[E, B, S]`."""
    if q.shape[-2] == 1:
        return q.squeeze(-2)
    index = choice.unsqueeze(-1).expand(len(q), *choice.shape, q.shape[-1])
    return q.gather(-2, index).mean(-2)


def expected(q: Tensor, probs: Tensor, branches: int) -> Tensor:
    """Return the exact E_π[Q]: the mean over branches of Σ_a π(a|s) Q(s, a).  `[..., B, M, S]` and `[B, M]` to `[..., B, S]`."""
    if q.shape[-2] == 1:
        return q.squeeze(-2)
    return (probs.unsqueeze(-1) * q).sum(-2) / branches


def soft_value(expected_q: Tensor, entropy: Tensor, alpha: Tensor) -> Tensor:
    """Return V(s) = E_π[Q] + Σ_k α_k H_k (Haarnoja et al. 2018, eq. 3; Christodoulou 2019, eq. 10).

    expected_q `[B, S]`, entropy `[B, K]` and alpha `[K]` to `[B, S]`; the entropy is split evenly over the S reward streams.
    """
    return expected_q + (entropy * alpha).sum(-1, keepdim=True) / expected_q.shape[-1]


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """Return ½ Σ_E (Q − y)², the mean over reward streams (Haarnoja et al. 2018, eq. 5).  `[E, B, S]` and `[B, S]` to `[B]`."""
    return 0.5 * (q - target).square().sum(0).mean(-1)


def actor_loss(expected_q: Tensor, entropy: Tensor, alpha: Tensor) -> Tensor:
    """Return −(Σ_S E_π[Q] + Σ_k α_k H_k) (Haarnoja et al. 2018, eq. 7; Christodoulou 2019, eq. 12).  `[B, S]` and `[B, K]` to `[B]`."""
    return -(expected_q.sum(-1) + (entropy * alpha).sum(-1))


def temperature_loss(log_alpha: Tensor, entropy: Tensor, target_entropy: Tensor) -> Tensor:
    """Return Σ_k log α_k (H_k − H̄_k) (Haarnoja et al. 2018b, eq. 18, with log α in place of α as in the authors' code).

    log_alpha `[K]`, entropy `[B, K]` and target_entropy `[K]` or `[B, K]` to `[B]`.
    α rises where the entropy is below its target. The gradient for log α does not shrink with α, so that a small α still changes.
    """
    return ((entropy.detach() - target_entropy) * log_alpha).sum(-1)
