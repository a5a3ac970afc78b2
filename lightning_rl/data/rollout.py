"""On-policy experience for Lightning: one item is one iteration."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_rl.data.dataset import ExperienceDataset
from lightning_rl.errors import SettingError, check_range
from lightning_rl.types import Rollout

MOST_ROWS = 10**8
"""Of a rollout: with four numbers in an observation they take 3 GB."""


class RolloutDataset(ExperienceDataset):
    """Endless rollouts with the newest weights. All state lives in the collector."""

    def __iter__(self) -> Iterator[Rollout]:
        while True:
            self.batch = self.collector.collect()
            yield self.batch


def check_n_steps(n_steps: int, num_envs: int) -> None:
    """Raise `SettingError` unless rollouts of so many steps of each environment can be held."""
    check_range("n_steps", n_steps, 1, whole=True)
    if n_steps * num_envs > MOST_ROWS:
        raise SettingError(
            f"n_steps * num_envs = {n_steps} * {num_envs} rows are more than a rollout can hold, {MOST_ROWS:,}; lower n_steps"
        )
