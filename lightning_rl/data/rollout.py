"""On-policy experience for Lightning: one item is one iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from lightning_rl.data.collector import Collector
from lightning_rl.types import Rollout


class RolloutDataset(IterableDataset[Rollout]):
    """Endless rollouts, each collected when it is asked for.

    It has a length, the planned number of iterations, because Lightning reads a loader without one a batch ahead: that rollout would be
    collected with old weights. State lives in the collector, so the dataset has none to save.
    """

    def __init__(self, collector: Collector, iterations: int) -> None:
        self.collector, self.iterations = collector, iterations

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[Rollout]:
        while True:
            yield self.collector.collect()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning asks, to know that a run can continue in the middle of an epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
