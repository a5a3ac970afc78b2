"""Truncated Quantile Critics (Kuznetsov et al. 2020, https://arxiv.org/abs/2005.04269): SAC whose critics learn distributions."""

from dataclasses import dataclass
from typing import Annotated

from lightning_rl.algorithms.sac import SAC
from lightning_rl.training.arguments import Range


@dataclass(kw_only=True, eq=False, repr=False)
class TQC(SAC):
    """Learn quantiles of the return, and leave the greatest of all critics together out of the target, which would overestimate it.

    Quantiles of all E critics learn y_i = r + γ (z̄_(i) − α log π(a'|s')), i = 1 … E (Z − d): of the E Z target quantiles z̄ at s', in order,
    the E d greatest are left out. The policy climbs the mean of all quantiles in place of min Q.

    Only defaults differ from `SAC`, whose lines run: its critics are read by `QuantileValue` (networks/off_policy.py). Box actions alone.

    Metrics: those of `SAC`; `train/q_value` is the mean of all quantiles.
    """

    n_quantiles: Annotated[int, Range(1)] | None = 25
    """Critics learn this many quantiles of the return; null, with `drop_quantiles` 0: its mean, as SAC does."""
    drop_quantiles: Annotated[int, Range(0)] = 2
    """How many of the greatest quantiles, for each critic, the target leaves out (the paper: 5 for Hopper, 0 for HalfCheetah, else 2)."""
