"""Augmented Random Search (Mania et al. 2018, https://arxiv.org/abs/1803.07055): evolution strategies with the best directions alone."""

from dataclasses import dataclass
from typing import Annotated, Literal

from lightning_rl.algorithms.evolution import EvolutionStrategies
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.training.arguments import Range


@dataclass(kw_only=True, eq=False, repr=False)
class ARS(EvolutionStrategies):
    """Move a linear policy along the better of random directions, in steps divided by the deviation of their returns (ARS V2-t, alg. 2).

    Only defaults differ from `EvolutionStrategies`, whose lines run: θ ← θ + α / (b σ_R) Σ (R⁺ − R⁻) δ over the b best of N directions,
    observations normalized by the running statistics of all episodes.

    Metrics: those of `EvolutionStrategies`.
    """

    learning_rate: ScheduleSetting = 0.02
    """α, the step size."""
    net_arch: list[int] | None = None
    """Widths of hidden layers; null: none, a linear policy."""
    normalize_obs: str = "running"
    """`running` statistics (V2), `frozen` ones of random steps, or `off` (V1)."""
    normalize_obs_share: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    """The share of a generation's jobs from which `normalize_obs: running` takes its statistics."""
    episodes_per_generation: Annotated[int, Range(2)] = 16
    """2 N, two of each direction."""
    sigma: ScheduleSetting = 0.05
    """ν, how far weights are moved."""
    shaping: Literal["centred_ranks", "centred_sign_ranks", "z_scores", "signs", "raw"] = "z_scores"
    """What an episode is worth; `z_scores` are returns over their deviation σ_R."""
    l2: Annotated[float, Range(0)] = 0.0
    """Pull of the weights towards 0."""
    optimizer: Literal["adam", "sgd"] = "sgd"
    """`adam`, or `sgd` with momentum."""
    momentum: Annotated[float, Range(0, 0.999)] = 0.0
    """Of sgd, a running mean of gradients."""
    zero_policy: bool = True
    """Begin with weights of 0 in the last layer."""

    def __post_init__(self) -> None:
        self.net_arch = [] if self.net_arch is None else self.net_arch
        super().__post_init__()
