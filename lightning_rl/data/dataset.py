"""What Lightning is given: endless iterations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from lightning_rl.data.collector import Collector


class ExperienceDataset(IterableDataset[Any]):
    """Endless iterations of experience, each made when it is asked for.

    It has a length, the planned number of iterations, because Lightning reads a loader without one a batch ahead: that experience would be
    collected with old weights.

    Args:
        collector: steps the environments.
        iterations: the planned number.
    """

    anew = "environments start new episodes"
    """What happens where a run cannot go on exactly as it stood."""

    def __init__(self, collector: Collector, iterations: int) -> None:
        self.collector, self.iterations = collector, iterations
        self.batch: Any = ()
        """What is learned from now."""

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def begin_iteration(self, count: int, progress: float) -> None:
        """Before learning from an iteration: how far the run is, all ranks together."""

    def end_iteration(self) -> None:
        """After learning from an iteration."""

    def metrics(self) -> dict[str, float]:
        """What there is to log of the data itself."""
        return {}

    def begin_save(self) -> None:
        """Before a checkpoint is saved that shall hold everything: what is large is saved beside it."""

    def end_save(self, saved: bool) -> None:
        """After it was saved, or was not."""

    def get_state(self) -> dict[str, Any]:
        """Between iterations: all that the next one depends on, with arrays."""
        return {"collector": self.collector.get_state()}

    def set_state(self, state: dict[str, Any]) -> str | None:
        """The inverse, before the first iteration; why it is done `anew`, if it is."""
        return self.collector.set_state(state["collector"])

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning asks, to know that a run can continue in the middle of an epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
