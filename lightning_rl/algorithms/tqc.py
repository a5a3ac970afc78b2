"""Truncated Quantile Critics (Kuznetsov et al. 2020, https://arxiv.org/abs/2005.04269): SAC whose critics learn distributions."""

from dataclasses import dataclass
from typing import Annotated

from lightning_rl.algorithms.sac import SAC
from lightning_rl.settings.fields import Range


@dataclass(kw_only=True, eq=False, repr=False)
class TQC(SAC):
    """Learn quantiles of the return, and drop the largest quantiles of all critics from the target to prevent overestimation.

    Quantiles of all E critics learn y_i = r + γ (z̄_(i) − α log π(a'|s')), i = 1 … E (Z − d): the E Z target quantiles z̄ at s' are sorted,
    and the E d largest are dropped. The policy maximizes the mean of all quantiles instead of min Q.

    Only the defaults differ from `SAC`, whose critics `QuantileValue` (networks/off_policy.py) evaluates. Box actions only.

    Metrics: those of `SAC`; `train/q_value` is the mean of all quantiles.
    """

    n_quantiles: Annotated[int, Range(1)] | None = 25
    """Quantiles of the return per critic; null, with `drop_quantiles` 0: learn the mean, as in SAC."""
    drop_quantiles: Annotated[int, Range(0)] = 2
    """Number of largest quantiles per critic to drop from the target (the paper: 5 for Hopper, 0 for HalfCheetah, else 2)."""
