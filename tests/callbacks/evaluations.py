"""An evaluator that finds what it is told, for what follows evaluations."""

from __future__ import annotations

from typing import Any

from lightning_rl import RolloutEvaluator
from lightning_rl.data.episodes import Episode


class Scores(RolloutEvaluator):
    """After every iteration of 16 environment steps, one episode with the next of some returns."""

    def __init__(self, returns: list[float]) -> None:
        super().__init__(every_n_env_steps=16)
        self.returns = iter(returns)

    def play(self, algorithm: Any, stop: Any = None) -> list[Episode]:
        return [Episode(0, float(next(self.returns)), 1, None)]
