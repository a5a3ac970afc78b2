"""What learns beside an algorithm's own losses."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lightning_rl.algorithms.demonstrations import show_demonstrations
from lightning_rl.data.replay_dataset import ReplayDataset
from lightning_rl.types import Experience


class SideLearner:
    """Learns nothing; those that do have optimizers of their own and take their turn after updates or iterations."""

    learns = False

    def optimizers(self, algorithm: Any, own: list[Optimizer]) -> list[Optimizer]:
        """Its optimizers, beside the algorithm's own ones."""
        return []

    def begin(self, algorithm: Any) -> None:
        """Before a run, when its dataset is there."""

    def end_update(self, algorithm: Any, batch: Any) -> None:
        """After an update of the algorithm from a batch."""

    def end_iteration(self, algorithm: Any) -> None:
        """After the updates of an iteration."""

    def get_state(self) -> dict[str, Any]:
        """What belongs to this rank's run."""
        return {}

    def set_state(self, state: dict[str, Any]) -> str | None:
        """The inverse; what is done anew, if something is."""
        return None


class SignalLearner(SideLearner):
    """Updates of the reward signals that learn: one with each of the algorithm's, or one for so many environment steps.

    Args:
        signals: all of them, by name.
        steps_per_update: environment steps for one update; off-policy they may need more batches than the algorithm has.
    """

    def __init__(self, signals: dict[str, Any], steps_per_update: float | None) -> None:
        self.all, self.steps_per_update = signals, steps_per_update
        self.learning = {name: signal for name, signal in signals.items() if hasattr(signal, "learning_rate")}
        self.learns, self.updates = bool(self.learning), 0

    def optimizers(self, algorithm: Any, own: list[Optimizer]) -> list[Optimizer]:
        self.own = [signal.configure_optimizer() for signal in self.learning.values()]
        for signal, optimizer in zip(self.learning.values(), self.own, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = signal.learning_rate
        return self.own

    def begin(self, algorithm: Any) -> None:
        show_demonstrations(algorithm)

    def end_update(self, algorithm: Any, batch: Any) -> None:
        if not self.learns:
            return
        due, dataset = 1, algorithm.dataset
        if self.steps_per_update is not None:
            due = int(algorithm.collector.env_steps * algorithm.trainer.world_size / self.steps_per_update) - self.updates
        replays = isinstance(dataset, ReplayDataset)
        for k in range(due if replays else min(due, 1)):
            self._learn(algorithm, dataset.sample().experience if k and replays else batch.experience)
            self.updates += 1

    def _learn(self, algorithm: Any, experience: Experience) -> None:
        for (name, signal), optimizer in zip(self.learning.items(), self.own, strict=True):
            loss, metrics = signal.loss(experience)
            algorithm.step(algorithm.finite(f"{name} loss", loss), optimizer)
            algorithm.record(**{f"{name}/{metric}": value for metric, value in metrics.items()})

    def get_state(self) -> dict[str, Any]:
        return {name: signal.get_state() for name, signal in self.all.items()}

    def set_state(self, state: dict[str, Any]) -> str | None:
        for name, signal in self.all.items():
            signal.set_state(state[name])
        return None
