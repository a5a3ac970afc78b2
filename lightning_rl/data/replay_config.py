"""Settings of a replay buffer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_rl.data.layouts import DerivedNext, StoredNext
from lightning_rl.errors import SettingError, check_flag, check_range


@dataclass(frozen=True)
class ReplayConfig:
    """How a replay buffer keeps its rows and draws them.

    Args:
        prioritized: draw rows in proportion to their errors instead of all alike.
        alpha: exponent of the priorities; 0 is uniform.
        beta: first exponent of the importance weights; it grows to 1 over the run.
        replace: whether a row may be drawn twice for one batch.
        optimize_memory_usage: store each observation once instead of beside the row before it too, and each of stacked frames; nothing is
            gained where episodes take few steps.
        directory: keep the rows in files there instead of in memory, while the run lasts.
        demonstrations: by their name, such as `cartpole/expert-v0`; from Python also a list of them. A new run's buffer is filled with them
            before its first step; they are no environment steps, and give way to new rows when it is full.
        demonstration_share: keep them beside the buffer instead, for good, and draw this share of each batch from them, all alike.
    """

    prioritized: bool = False
    alpha: float = 0.6
    beta: float = 0.4
    replace: bool = True
    optimize_memory_usage: bool = False
    directory: str | None = None
    demonstrations: str | None = None
    demonstration_share: float | None = None

    def __post_init__(self) -> None:
        check_range("replay.alpha", self.alpha, 0, 1)
        check_range("replay.beta", self.beta, 0, 1)
        for name in ("prioritized", "replace", "optimize_memory_usage"):
            check_flag(f"replay.{name}", getattr(self, name))
        if self.directory is not None and not isinstance(self.directory, str | Path):
            raise SettingError(f"replay.directory must be the name of a folder, got {self.directory!r}")
        if self.demonstrations is not None and not (self.demonstrations and isinstance(self.demonstrations, str | list)):
            raise SettingError(f"replay.demonstrations must be the name of a dataset, got {self.demonstrations!r}")
        share = self.demonstration_share
        if share is not None and (not isinstance(share, int | float) or not 0 < share < 1):
            raise SettingError(f"replay.demonstration_share must be a number > 0 and < 1, got {share!r}")
        if self.prioritized and not self.replace:
            raise SettingError("replay.replace false does not go with replay.prioritized: rows drawn by their errors may come twice")

    @property
    def layout(self) -> type[StoredNext] | type[DerivedNext]:
        """How rows are kept."""
        return DerivedNext if self.optimize_memory_usage else StoredNext
