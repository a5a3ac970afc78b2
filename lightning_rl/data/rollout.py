"""On-policy experience for Lightning: one item is one iteration."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_rl.data.dataset import ExperienceDataset
from lightning_rl.types import Rollout


class RolloutDataset(ExperienceDataset):
    """Endless rollouts with the newest weights. All state lives in the collector."""

    def __iter__(self) -> Iterator[Rollout]:
        while True:
            self.batch = self.collector.collect()
            yield self.batch
