"""Behavioural cloning beside reinforcement learning: gradient steps of the policy towards demonstrations, as in ML-Agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Adam, Optimizer

from lightning_rl.algorithms.demonstrations import demonstrated_rows, demonstration_draws
from lightning_rl.algorithms.imitation import imitate
from lightning_rl.algorithms.optimization import moved
from lightning_rl.algorithms.side_learner import SideLearner
from lightning_rl.data.demonstrations import EpisodeRows
from lightning_rl.data.replay_dataset import ReplayDataset
from lightning_rl.errors import SettingError, as_settings, check_range
from lightning_rl.losses.policy_gradient import mean


@dataclass(frozen=True)
class CloningConfig:
    """Gradient steps of the policy towards demonstrations, on-policy after each iteration and off-policy after each update.

    Args:
        demo_path: a Minari id or path; from Python also a list of `Demonstration`.
        strength: their learning rate, as a multiple of the algorithm's.
        steps: environment steps over which it falls to 0; 0 keeps it for the whole run.
        batch_size: rows of a minibatch, with a memory in sequences of its sequence_length, all if there are fewer; the algorithm's unless
            given, or 64 where it has none.
        n_epochs: passes each time; 3 on-policy and 1 off-policy unless given.
        samples_per_update: demonstrated steps of a pass, 0 for all; all on-policy and one minibatch off-policy unless given.
    """

    demo_path: str | None = None
    strength: float = 1.0
    steps: int = 0
    batch_size: int | None = None
    n_epochs: int | None = None
    samples_per_update: int | None = None

    def __post_init__(self) -> None:
        check_range("behavioral_cloning.strength", self.strength, 0)
        check_range("behavioral_cloning.steps", self.steps, 0, whole=True)
        for name, least in {"batch_size": 1, "n_epochs": 1, "samples_per_update": 0}.items():
            if getattr(self, name) is not None:
                check_range(f"behavioral_cloning.{name}", getattr(self, name), least, whole=True)


def make_cloning(setting: CloningConfig | Mapping[str, Any] | None) -> SideLearner:
    """What the setting asks for; None asks for nothing.

    Raises:
        SettingError: an unknown or unusable setting.
    """
    return SideLearner() if setting is None else Cloning(as_settings("behavioral_cloning", CloningConfig, setting))


class Cloning(SideLearner):
    """Makes what demonstrations did likely, with an Adam of its own over the weights of the policy.

    Choices have cross-entropy, continuous dimensions the squared error of drawn actions on the scale of the environment's bounds.

    Metrics: `behavioral_cloning/loss`, `behavioral_cloning/learning_rate`, and how near the policy is, as for `BehavioralCloning`.
    """

    learns = True

    def __init__(self, config: CloningConfig) -> None:
        self.config = config

    def optimizers(self, algorithm: Any, own: list[Optimizer]) -> list[Optimizer]:
        self.optimizer = Adam(moved(own, algorithm.network))
        return [self.optimizer]

    def begin(self, algorithm: Any) -> None:
        config, self.replays = self.config, isinstance(algorithm.dataset, ReplayDataset)
        if config.demo_path is None:
            raise SettingError("behavioral_cloning.demo_path is missing: name a Minari dataset")
        batch_size = config.batch_size or algorithm.hparams.get("batch_size", 64)
        length = algorithm.network.memory.sequence_length
        if length > batch_size:
            raise SettingError(f"memory.sequence_length {length} is longer than behavioral_cloning.batch_size {batch_size}")
        rows = EpisodeRows(demonstrated_rows(algorithm, "behavioral_cloning.demo_path", config.demo_path), length)
        if not rows.num_rows:
            raise SettingError("behavioral_cloning.demo_path: there are no demonstrations to imitate")
        how_long = f"over {config.steps:,} environment steps" if config.steps else "for the whole run"
        algorithm.say(f"demonstrations: {rows.num_rows:,} steps of {rows.num_episodes:,} episodes; the policy follows them {how_long}")
        self.draws = demonstration_draws(algorithm, rows, batch_size)
        wanted = config.samples_per_update
        sequences = len(rows) * min(wanted or rows.num_rows, rows.num_rows) // rows.num_rows
        passes = config.n_epochs or (1 if self.replays else 3)
        one = wanted is None and self.replays
        self.minibatches = passes * (1 if one else max(1, sequences // (self.draws.num_sequences * self.draws.ranks)))

    def end_update(self, algorithm: Any, batch: Any) -> None:
        if self.replays:
            self._learn(algorithm)

    def end_iteration(self, algorithm: Any) -> None:
        burns_in = algorithm.began_at < getattr(algorithm, "critic_burn_in_steps", 0)
        if not self.replays and not burns_in:
            self._learn(algorithm)

    def _learn(self, algorithm: Any) -> None:
        """Some gradient steps, while there is a learning rate."""
        rate = self.learning_rate(algorithm)
        algorithm.record(**{"behavioral_cloning/learning_rate": lambda: torch.tensor(rate)})
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(self.minibatches if rate > 0 else 0):
            batch = self.draws.draw()
            x, _ = algorithm.network.policy(batch.obs, (), batch.episode_start)
            cost, near = imitate(algorithm.network.distribution, x, batch.action, batch.action_mask, "drawn", generator=algorithm.noise)
            loss = mean(cost.sum(-1), batch.weight)
            metrics = {"loss": loss, **{name: mean(each, batch.weight) for name, each in near.items()}}
            algorithm.record(**{f"behavioral_cloning/{name}": value for name, value in metrics.items()})
            algorithm.step(loss, self.optimizer, "behavioral_cloning loss")

    def learning_rate(self, algorithm: Any) -> float:
        """That of the algorithm now, times strength, times what is left of `steps`."""
        left = 1 - algorithm.env_steps / self.config.steps if self.config.steps else 1.0
        return float(algorithm.learning_rate(algorithm.progress)) * self.config.strength * max(0.0, left)

    def get_state(self) -> dict[str, Any]:
        return self.draws.order.get_state()

    def set_state(self, state: dict[str, Any]) -> str | None:
        return self.draws.order.set_state(state)
