"""Augmented Random Search (Mania et al. 2018, https://arxiv.org/abs/1803.07055): evolution strategies with the best directions only."""

from dataclasses import dataclass
from typing import Annotated, Literal

from lightning_rl.algorithms.evolution import EvolutionStrategies
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import Range


@dataclass(kw_only=True, eq=False, repr=False)
class ARS(EvolutionStrategies):
    """Move a linear policy along the best random directions, in steps divided by the deviation of their returns (ARS V2-t, alg. 2).

    Only the defaults differ from `EvolutionStrategies`: θ ← θ + α / (b σ_R) Σ (R⁺ − R⁻) δ over the b best of N directions, with
    observations normalized by the running statistics of all episodes.

    Metrics: those of `EvolutionStrategies`.
    """

    learning_rate: ScheduleSetting = 0.02
    """α, the step size."""
    net_arch: list[int] | None = None
    """Widths of hidden layers; null: none, a linear policy."""
    normalize_obs: str = "running"
    """Normalize observations by `running` statistics (V2), by `frozen` statistics of random steps, or not at all (`off`, V1)."""
    normalize_obs_share: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    """Fraction of a generation's jobs whose observations update the statistics of `normalize_obs: running`."""
    episodes_per_generation: Annotated[int, Range(2)] = 16
    """2 N: two episodes per direction."""
    sigma: ScheduleSetting = 0.05
    """ν, standard deviation of the weight perturbations."""
    shaping: Literal["centred_ranks", "centred_sign_ranks", "z_scores", "signs", "raw"] = "z_scores"
    """Fitness of an episode; `z_scores` are returns divided by their standard deviation σ_R."""
    l2: Annotated[float, Range(0)] = 0.0
    """Coefficient of the L2 penalty on the weights."""
    optimizer: Literal["adam", "sgd"] = "sgd"
    """`adam`, or `sgd` with momentum."""
    momentum: Annotated[float, Range(0, 0.999)] = 0.0
    """Momentum of sgd, whose steps follow a running mean of gradients."""
    zero_policy: bool = True
    """Initialize the weights of the last layer to 0."""

    def __post_init__(self) -> None:
        self.net_arch = [] if self.net_arch is None else self.net_arch
        super().__post_init__()
