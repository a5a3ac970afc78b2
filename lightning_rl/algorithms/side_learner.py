"""What learns beside an algorithm's own losses."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lightning_rl.algorithms.demonstrations import show_demonstrations
from lightning_rl.data.replay_dataset import ReplayDataset
from lightning_rl.errors import SettingError
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

    Steps count from the moment that the algorithm may learn: those before are never made up for.

    Args:
        signals: all of them, by name.
        steps_per_update: environment steps, all ranks together, for one update; off-policy they may need more batches than the algorithm
            has.
    """

    def __init__(self, signals: dict[str, Any], steps_per_update: float | None) -> None:
        self.all, self.steps_per_update = signals, steps_per_update
        self.learning = {name: signal for name, signal in signals.items() if hasattr(signal, "learning_rate")}
        self.learns, self.updates = bool(self.learning), 0
        if steps_per_update is not None and not self.learns:
            raise SettingError("reward_signal_steps_per_update: no reward signal learns; name curiosity, rnd or gail in reward_signals")
        self.began: float | None = None
        """The environment steps of all ranks from which on they count."""

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
        dataset, due = algorithm.dataset, self._due(algorithm)
        replays = isinstance(dataset, ReplayDataset)
        for k in range(due if replays else min(due, 1)):
            self._learn(algorithm, dataset.sample().experience if k and replays else batch.experience)
            self.updates += 1

    def _due(self, algorithm: Any) -> int:
        """How many updates are to be made, by counts that are equal on all ranks."""
        if self.steps_per_update is None:
            return 1
        dataset, begin, steps = algorithm.dataset, algorithm.began_at, algorithm.env_steps
        if isinstance(dataset, ReplayDataset):
            ranks = algorithm.trainer.world_size
            begin, steps = max(begin, (dataset.learning_starts or 0.0) * ranks), dataset.steps * ranks
        if self.began is None:
            self.began = begin
        return int((steps - self.began) / self.steps_per_update) - self.updates

    def _learn(self, algorithm: Any, experience: Experience) -> None:
        for (name, signal), optimizer in zip(self.learning.items(), self.own, strict=True):
            loss, metrics = signal.loss(experience)
            algorithm.step(loss, optimizer, f"{name} loss")
            algorithm.record(**{f"{name}/{metric}": value for metric, value in metrics.items()})

    def get_state(self) -> dict[str, Any]:
        signals = {name: signal.get_state() for name, signal in self.all.items()}
        return {"signals": signals, "updates": self.updates, "began": self.began}

    def set_state(self, state: dict[str, Any]) -> str | None:
        for name, signal in self.all.items():
            signal.set_state(state["signals"][name])
        self.updates, self.began = int(state["updates"]), None if state["began"] is None else float(state["began"])
        return None
