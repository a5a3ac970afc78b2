"""Auxiliary learners with their own loss and optimizer: reward signals and behavioral cloning."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from lightning_rl.data.dataset import ReplayDataset, SampledDataset
from lightning_rl.data.demonstrations import EpisodeRows
from lightning_rl.distributions import Distribution
from lightning_rl.distributions.distribution import split_mask
from lightning_rl.errors import SettingError
from lightning_rl.losses import offline as losses
from lightning_rl.losses.policy_gradient import mean
from lightning_rl.optimization import ScheduledAdam, parameters_in
from lightning_rl.rewards.signal import LearnedSignal, RewardSignal
from lightning_rl.settings.fields import Range, as_settings, read_fields
from lightning_rl.training.experience import demonstrated_rows, demonstration_draws, show_demonstrations
from lightning_rl.training.learning import LearningModule, SideLearner
from lightning_rl.types import Experience, State, Tree


class SignalLearner(SideLearner):
    """Updates of learned reward signals: one with each update of the algorithm, or one per number of environment steps.

    Steps count from the time when the algorithm may learn; there are no updates for earlier steps.

    Args:
        signals: all reward signals, by name.
        steps_per_update: environment steps, summed over all ranks, per update; off-policy, this may need more batches than the algorithm
            itself.
    """

    def __init__(self, signals: Mapping[str, RewardSignal], steps_per_update: float | None) -> None:
        self.all, self.steps_per_update = signals, steps_per_update
        self.learning = {name: signal for name, signal in signals.items() if isinstance(signal, LearnedSignal)}
        self.learns, self.updates = bool(self.learning), 0
        if steps_per_update is not None and not self.learns:
            raise SettingError("reward_signal_steps_per_update: no reward signal learns; name curiosity, rnd or gail in reward_signals")
        self.began: float | None = None
        """The environment steps of all ranks when counting starts."""

    def optimizers(self, algorithm: LearningModule, existing: list[Optimizer]) -> list[Optimizer]:
        self.own = [signal.configure_optimizer() for signal in self.learning.values()]
        for signal, optimizer in zip(self.learning.values(), self.own, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = signal.learning_rate
        return self.own

    def begin(self, algorithm: LearningModule) -> None:
        show_demonstrations(algorithm)

    def end_update(self, algorithm: LearningModule, batch: Any) -> None:
        if not self.learns:
            return
        dataset, due = algorithm.dataset, self._due(algorithm)
        replayed = dataset if isinstance(dataset, ReplayDataset) else None
        for k in range(min(due, 1) if replayed is None else due):
            self._learn(algorithm, batch.experience if replayed is None or not k else replayed.sample().experience)
            self.updates += 1

    def _due(self, algorithm: LearningModule) -> int:
        """Return the number of due updates, from counts that are equal on all ranks."""
        if self.steps_per_update is None:
            return 1
        dataset, begin, steps = algorithm.dataset, float(algorithm.began_at), float(algorithm.env_steps)
        if isinstance(dataset, ReplayDataset):
            ranks = algorithm.trainer.world_size
            begin, steps = max(begin, (dataset.learning_starts or 0.0) * ranks), dataset.steps * ranks
        if self.began is None:
            self.began = begin
        return int((steps - self.began) / self.steps_per_update) - self.updates

    def _learn(self, algorithm: LearningModule, experience: Experience) -> None:
        for (name, signal), optimizer in zip(self.learning.items(), self.own, strict=True):
            loss, metrics = signal.loss(experience)
            algorithm.step(loss, optimizer, f"{name} loss")
            algorithm.record(**{f"{name}/{metric}": value for metric, value in metrics.items()})

    def get_state(self) -> State:
        signals = {name: signal.get_state() for name, signal in self.all.items()}
        return {"signals": signals, "updates": self.updates, "began": self.began}

    def set_state(self, state: State) -> str | None:
        for name, signal in self.all.items():
            signal.set_state(state["signals"][name])
        self.updates, self.began = int(state["updates"]), None if state["began"] is None else float(state["began"])
        return None


TOP_K = ((5, 10), (10, 20))
"""Pairs (k, n): top-k accuracies are logged for branches with more than n choices."""

BOX_LOSSES: dict[str, Callable[[Any, Tensor, Tensor, Generator | None], Tensor]] = {
    "nll": lambda leaf, x, action, generator: -leaf.evaluate(x, action)[0],
    "mse": lambda leaf, x, action, generator: losses.squared_error(leaf.mode(x), action),
    "drawn": lambda leaf, x, action, generator: leaf.drawn_error(x, action, generator),
}


def imitate(
    distribution: Distribution,
    x: Tensor,
    action: Tree,
    mask: Tree,
    box_loss: str,
    label_smoothing: float = 0.0,
    generator: Generator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each dimension or branch `[B, D]`, and metrics of the distance between policy and actions by name, each `[B]`.

    The loss of choices and bits is cross-entropy. That of continuous dimensions depends on `box_loss`: `nll`, −log π(a|s); `mse`, the
    squared error of the mean; or `drawn`, the squared error of a sampled action scaled to [-1, 1], which also trains σ. Metrics of choices
    are accuracy and rank (0 is the most likely choice), averaged over branches; that of dimensions is the mean absolute deviation of the
    mean, in the environment's units.

    Args:
        distribution: the policy's distribution.
        x: its input, `[B, num_inputs]`.
        action: demonstrated actions, as sampled.
        mask: the legal choices.
        box_loss: the loss of continuous dimensions.
        label_smoothing: ε of the cross-entropy.
        generator: random generator for sampled actions.
    """
    costs, near = [], defaultdict(list)
    leaves = distribution.leaves()
    inputs, masks = x.split([leaf.num_inputs for leaf in leaves], -1), split_mask(mask, [leaf.mask_width for leaf in leaves])
    for leaf, part, done, legal in zip(leaves, inputs, distribution.flat(action), masks, strict=True):
        if leaf.sizes:
            log_p, choice = losses.branches(leaf.log_probs(part, legal), leaf.sizes), leaf.choices(done)
            costs.append(losses.cross_entropy(log_p, choice, label_smoothing))
            rank = losses.rank(log_p.detach(), choice)
            near["accuracy"].append(losses.accuracy(log_p.detach(), choice))
            near["action_rank"].append(rank)
            for k, many in TOP_K:
                large = [branch for branch, size in enumerate(leaf.sizes) if size > many]
                if large:
                    near[f"top_{k}_accuracy"].append(losses.top_k_accuracy(rank[:, large], k))
        else:
            costs.append(BOX_LOSSES[box_loss](leaf, part, done, generator))
            near["mean_abs_deviation"].append(deviation(leaf, leaf.mode(part), done))
    return torch.cat(costs, -1), {name: torch.cat(parts, -1).mean(-1) for name, parts in near.items()}


def deviation(leaf: Any, mean: Tensor, action: Tensor) -> Tensor:
    """Return |μ − a| in the environment's units, `[B, D]`."""
    predicted, taken = (leaf.to_env(chosen.detach().cpu().numpy()) for chosen in (mean, action))
    return torch.as_tensor(abs(predicted - taken), device=mean.device).reshape(len(mean), -1)


@dataclass(frozen=True)
class CloningConfig:
    """Gradient steps that imitate demonstrations: on-policy after each iteration, off-policy after each update.

    Args:
        demo_path: a Minari id or path, or `.demo` files; in Python also a list of `Demonstration`.
        strength: learning rate, as a multiple of the algorithm's.
        steps: environment steps (or updates, if the run counts them) over which the learning rate falls to 0; 0: constant.
        batch_size: rows of a minibatch, or all if there are fewer; with a memory, they form sequences of its sequence_length. Default: the
            algorithm's batch_size, or 64 if it has none.
        n_epochs: passes each time; default: 3 on-policy and 1 off-policy.
        samples_per_update: demonstrated steps per pass, 0 for all; default: all on-policy and one minibatch off-policy.
    """

    demo_path: str | None = None
    strength: Annotated[float, Range(0)] = 1.0
    steps: Annotated[int, Range(0)] = 0
    batch_size: Annotated[int, Range(1)] | None = None
    n_epochs: Annotated[int, Range(1)] | None = None
    samples_per_update: Annotated[int, Range(0)] | None = None

    def __post_init__(self) -> None:
        read_fields(self, "behavioral_cloning.")


def make_cloning(setting: CloningConfig | Mapping[str, object] | None) -> SideLearner:
    """Make the side learner of a setting; None makes one that learns nothing.

    Raises:
        SettingError: the setting is unknown or invalid.
    """
    return SideLearner() if setting is None else Cloning(as_settings("behavioral_cloning", CloningConfig, setting))


class Cloning(SideLearner):
    """Behavioral cloning in addition to reinforcement learning, with its own Adam optimizer for the policy's weights, as in ML-Agents.

    The loss is cross-entropy for choices, and the squared error of sampled actions, scaled by the environment's bounds, for continuous
    dimensions.

    Metrics: `behavioral_cloning/loss`, `behavioral_cloning/learning_rate`, and accuracy, rank and deviation as in `BehavioralCloning`.
    """

    learns = True

    def __init__(self, config: CloningConfig) -> None:
        self.config = config

    def optimizers(self, algorithm: LearningModule, existing: list[Optimizer]) -> list[Optimizer]:
        self.optimizer = ScheduledAdam(parameters_in(existing, algorithm.network))
        return [self.optimizer]

    def begin(self, algorithm: LearningModule) -> None:
        config, self.replays = self.config, isinstance(algorithm.dataset, SampledDataset)
        if config.demo_path is None:
            raise SettingError("behavioral_cloning.demo_path is missing: name a Minari dataset")
        batch_size: int = getattr(algorithm, "batch_size", 64) if config.batch_size is None else config.batch_size
        length = algorithm.network.memory.sequence_length
        if length > batch_size:
            raise SettingError(f"memory.sequence_length {length} is longer than behavioral_cloning.batch_size {batch_size}")
        rows = EpisodeRows(demonstrated_rows(algorithm, "behavioral_cloning.demo_path", config.demo_path), length)
        if not rows.num_rows:
            raise SettingError("behavioral_cloning.demo_path: there are no demonstrations to imitate")
        how_long = f"over {config.steps:,} {algorithm.counted}" if config.steps else "for the whole run"
        algorithm.say(f"demonstrations: {rows.num_rows:,} steps of {rows.num_episodes:,} episodes; the policy imitates them {how_long}")
        self.draws = demonstration_draws(algorithm, rows, batch_size)
        wanted = config.samples_per_update
        sequences = len(rows) * min(wanted or rows.num_rows, rows.num_rows) // rows.num_rows
        passes = config.n_epochs or (1 if self.replays else 3)
        one = wanted is None and self.replays
        self.minibatches = passes * (1 if one else max(1, sequences // (self.draws.num_sequences * self.draws.ranks)))

    def end_update(self, algorithm: LearningModule, batch: object) -> None:
        if self.replays:
            self._learn(algorithm)

    def end_iteration(self, algorithm: LearningModule) -> None:
        burns_in = algorithm.began_at < getattr(algorithm, "critic_burn_in_steps", 0)
        if not self.replays and not burns_in:
            self._learn(algorithm)

    def _learn(self, algorithm: LearningModule) -> None:
        """Make gradient steps, while the learning rate is above 0."""
        rate = self.learning_rate(algorithm)
        algorithm.record(**{"behavioral_cloning/learning_rate": lambda: torch.tensor(rate)})
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(self.minibatches if rate > 0 else 0):
            batch = self.draws.draw()
            x, _ = algorithm.network.policy(batch.obs, (), batch.episode_start)
            cost, near = imitate(algorithm.network.distribution, x, batch.action, batch.action_mask, "drawn", generator=algorithm.noise)
            loss = mean(cost.sum(-1), batch.weight)
            metrics = {"loss": loss, **{name: mean(values, batch.weight) for name, values in near.items()}}
            algorithm.record(**{f"behavioral_cloning/{name}": value for name, value in metrics.items()})
            algorithm.step(loss, self.optimizer, "behavioral_cloning loss")

    def learning_rate(self, algorithm: LearningModule) -> float:
        """Return the algorithm's learning rate times `strength`, times the remaining fraction of `steps` at the start of the iteration."""
        left = 1 - algorithm.began_at / self.config.steps if self.config.steps else 1.0
        return algorithm.learning_rate * self.config.strength * max(0.0, left)

    def get_state(self) -> State:
        return self.draws.order.get_state()

    def set_state(self, state: State) -> str | None:
        return self.draws.order.set_state(state)
