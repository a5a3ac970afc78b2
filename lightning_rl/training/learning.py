"""What every algorithm does in an update: reward streams, gradient steps, metrics, and priorities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from textwrap import shorten
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from lightning_rl.callbacks.iteration import TargetNetworkUpdate
from lightning_rl.callbacks.self_play import SelfPlay
from lightning_rl.callbacks.stopping import must_stop
from lightning_rl.data.collector import Collector
from lightning_rl.data.dataset import SampledDataset
from lightning_rl.data.replay.sampling import sequence_errors
from lightning_rl.data.self_play import SelfPlayConfig, Snapshots
from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import PolicyNetwork
from lightning_rl.networks.changes import Structure
from lightning_rl.networks.memory import Memory
from lightning_rl.optimization import ScheduledOptimizer, gradient_step
from lightning_rl.rewards.signal import RewardSignal
from lightning_rl.schedules import Schedule
from lightning_rl.training.arguments import change_setting
from lightning_rl.training.hooks import RunModule
from lightning_rl.types import Experience, Rollout, State, Transition

Number = Tensor | float
Metric = Number | Callable[[], Number]
"""A recorded value, or a function that returns it."""


def as_tensor(name: str, value: Number) -> Tensor:
    """Return a recorded value as a tensor. Raises `SettingError`: it is not a number."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SettingError(
            f"record({name}={shorten(repr(value), 40)}): record takes tensors, numbers, and functions that return one"
        ) from error


class LearningModule(RunModule):
    """Updates of networks: gradient steps and their metrics. Its subclass, the algorithm, has the settings, networks and losses."""

    on_nan: str
    losses: ClassVar[tuple[str, ...]]
    max_grad_norm: float | None
    memory: Memory | None
    normalize_obs: str
    normalize_obs_steps: int
    learning_rate: float
    network: PolicyNetwork
    reward_signals: Mapping[str, RewardSignal]
    self_play: SelfPlayConfig | None
    schedules: dict[str, Schedule]
    side_learners: list[SideLearner]
    active_learners: list[SideLearner]
    collector: Collector | None
    discounts: Tensor
    ignore_done: Tensor
    own_optimizers: list[Optimizer]
    """The algorithm's optimizers during a run, in the order of `configure_optimizers`, without those of side learners."""
    seed: int
    given_arguments: tuple[tuple[object, ...], dict[str, object]]
    """The arguments that it was made with."""
    generator: Generator
    """This rank's random generator for learning, on the CPU."""
    needs_next_obs = False
    """Whether on-policy batches have `next_obs` and `terminated` for a loss; else they have them only if a reward signal needs them."""
    assignable: ClassVar[tuple[str, ...]] = ("env", "log_interval", "max_env_steps", "max_grad_norm")
    """Settings of a class that are read each time they are used, and may be assigned, as those may that follow a schedule."""
    learns_in_groups: ClassVar[bool] = False
    """Whether it learns groups of agents, which then have rows next to one another in a scene of Unity."""
    learned_otherwise: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of parameters that updates change without an optimizer."""
    target_networks: Sequence[tuple[nn.Module, nn.Module]] = ()
    """Online networks with their targets."""
    min_optimizers = 1
    """Number of optimizers that the updates need."""
    target_update: TargetNetworkUpdate | None = None
    """The update of target networks, if there are any."""
    learner: Any
    """Its `training.learner.Learner`, through which its run drives it."""
    compile: bool | Literal["auto"]  # type: ignore[assignment]
    noise: Generator
    """The random generator of losses, on the device of the weights."""
    built: Structure
    """The structure of its networks when its constructor had returned."""

    def __init__(self) -> None:
        super().__init__()
        self.progress, self.began_at = 0.0, 0
        """Progress of the run at the start of the current iteration, and its count then."""
        self.num_optimizers: int | None = None
        self.counted_rows = 0
        self.recorded: dict[str, list[float | Tensor]] = {}
        """Metrics of the current iteration."""

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Log a value as Lightning does, prefixed with the name of the behavior if there are several."""
        super().log(f"{self.behavior}/{name}" if self.behavior else name, *args, **kwargs)

    def count_steps(self) -> None:
        """Sum the counts over all ranks, if they have changed; all decisions use these numbers.

        Raises:
            NotFiniteError: an environment of any rank returned NaN or infinity, and `on_nan` is raise or there were too many.
        """
        assert self.dataset is not None
        collector: Any = self.dataset.collector
        if collector.rows == self.counted_rows:  # the same on all ranks
            return
        steps, episodes = collector.env_steps, collector.statistics.episodes
        if self.trainer.world_size > 1:
            total = torch.tensor([steps, episodes, collector.guard.error is not None], dtype=torch.float64, device=self.device)
            torch.distributed.all_reduce(total)
            collector.guard.agree(bool(total[2]))
            steps, episodes = int(total[0]), int(total[1])
        vars(self).update(counted_rows=collector.rows, env_steps=steps, episodes=episodes)  # no settings, as in `end_update`

    def prepare(self, rollout: Rollout) -> tuple[Rollout, Tensor]:
        """Fill the reward streams. Return the rollout and its discount, γ · bootstrap, both `[T, N, S]`."""
        signals = self.reward_signals.values()
        for signal in signals:
            signal.gather(rollout)
        env_reward = rollout.reward.squeeze(-1)
        experience = Experience(rollout.obs, rollout.action, rollout.next_obs, env_reward, rollout.terminated)
        reward = torch.stack([signal(experience) for signal in signals], -1)
        for k, name in enumerate(self.reward_signals if any(signal.sees for signal in signals) else ()):
            self.record(**{f"rewards/{name}": reward[..., k][rollout.valid].mean()})
        over = rollout.terminated.unsqueeze(-1) & ~self.ignore_done
        return rollout._replace(reward=reward), self.discounts * ~over

    # ---------------------------------------------------------------- updates

    @property
    def planned_updates(self) -> int:
        """Return the number of updates that the run will make according to its settings; 0 if unknown."""
        return 0

    @cached_property
    def past_selves(self) -> list[SelfPlay]:
        """The snapshots that it plays against and their ratings, which the next `fit` continues."""
        config = self.self_play
        return [] if config is None else [SelfPlay(config, Snapshots(self.network, config.window), self.behavior)]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":  # Lightning sets it around each hook
            vars(self)[name] = value
            return
        if "built" in vars(self) and name in self.hparams:
            value = change_setting(self, name, value)
        super().__setattr__(name, value)
        if name == "learning_rate" and "own_optimizers" in vars(self) and self.dataset is not None:  # during a run
            self.learner.set_rates()

    def with_side_learners(self, *optimizers: Optimizer) -> list[Optimizer]:
        """Return the optimizers of an algorithm, followed by those of its side learners.

        A `ScheduledOptimizer` has no own learning rate: it follows `learning_rate`, or a scheduler that starts from it.
        """
        self.num_optimizers = len(optimizers)
        for optimizer in optimizers:
            if isinstance(optimizer, ScheduledOptimizer):
                optimizer.param_groups[0]["lr"] = self.learning_rate
        return [*optimizers, *(optimizer for learner in self.side_learners for optimizer in learner.optimizers(self, list(optimizers)))]

    def step(self, loss: Tensor, optimizer: Optimizer, name: str = "loss") -> Tensor:
        """Make one gradient step: backward, mean over ranks, clipping to `max_grad_norm`. Return the gradient norm before clipping.

        The GPU skips a non-finite step itself, and the run finds out a few updates later, at the latest at the end of the iteration. With
        `restore_last`, the run waits for the result.

        Args:
            loss: a scalar.
            optimizer: only its parameters get gradients.
            name: the name of the loss in errors.

        Raises:
            NotFiniteError: the loss or the norm is NaN or infinite, unless `on_nan` allows to continue.
        """
        max_norm = math.inf if self.max_grad_norm is None else self.max_grad_norm
        learner, waits = self.learner, self.on_nan == "restore_last"
        norm, finite = gradient_step(loss, optimizer, learner.scaler, max_norm, self.trainer.world_size, learner.hooks, waits)
        if isinstance(finite, Tensor):
            learner.postpone(finite, name, loss.detach(), norm)
        elif finite:
            learner.guard.bad_updates[name] = 0
        else:
            learner.refuse(name, loss, norm, self.updates, self.recorded, getattr(self.dataset, "batch", ()))
        return norm

    def end_update(self, batch: Any) -> None:
        """Finish an update: count it, update reward signals and cloning, and call `on_update_end` of callbacks."""
        vars(self)["updates"] += 1  # no setting, so that `__setattr__` need not look
        for learner in self.active_learners:
            learner.end_update(self, batch)
        for callback in self.learner.followers:
            callback.on_update_end(self.trainer, self)

    def update_priorities(self, batch: Transition, errors: Tensor) -> None:
        """Pass the errors |δ| `[B]` of a batch to its buffer if that samples by priorities."""
        assert isinstance(self.dataset, SampledDataset)
        if self.dataset.buffer.priorities is None:
            return

        def finite() -> Tensor:
            numbers = errors.nan_to_num(0.0, 0.0, 0.0)
            return sequence_errors(numbers, batch.weight, len(batch.rows)) if len(batch.successor) else numbers

        self.dataset.buffer.update(batch.rows, finite)

    # ---------------------------------------------------------------- metrics

    def record(self, **values: Metric) -> None:
        """Record metrics of this iteration.

        The mean of all values under a name is logged as `train/<name>`, or under the name itself if it contains a slash. A value is a
        tensor, a number, or a function that returns one and is only called if this iteration may be logged.
        """
        keeps = self.run.log_rows.keeps
        for name, value in values.items():
            if callable(value):
                if not keeps:
                    continue
                with torch.no_grad():
                    value = value()
            metric = (value if isinstance(value, Tensor) else as_tensor(name, value)).detach()
            if not keeps:  # only the newest value, for the error if it is not finite
                self.recorded[name] = [metric]
                continue
            metric = metric.float().mean() if metric.dim() else metric.float()
            # small tensors that outlive an update would fragment the memory that large tensors of the next update could reuse
            self.recorded.setdefault(name, []).append(metric.item() if metric.is_cpu else metric)

    # ---------------------------------------------------------------- called by its learner and the run

    def schedule(self, progress: float) -> None:
        """Set all scheduled values for the next iteration; `progress` of the run goes from 0 to 1."""
        for name, schedule in self.schedules.items():
            vars(self)[name] = schedule(progress)

    def warm_up(self) -> None:
        """Collect the statistics for `normalize_obs: frozen`, unless they were loaded with another run's weights."""
        if self.normalize_obs == "frozen" and self.network.normalizer.is_new:
            assert self.collector is not None
            steps = self.normalize_obs_steps // self.trainer.world_size
            stop = partial(must_stop, self.trainer) if self.trainer.world_size == 1 else lambda: False
            self.network.normalizer.update(self.collector.random_steps(steps, stop))

    def validate(self) -> dict[str, float]:
        """Return additional metrics for an evaluation, from held-out data; the same on all ranks."""
        return {}


class SideLearner:
    """A side learner that learns nothing. Subclasses have their own optimizers, and learn after updates or iterations."""

    learns = False

    def optimizers(self, algorithm: LearningModule, existing: list[Optimizer]) -> list[Optimizer]:
        """Return its optimizers, which come after the algorithm's own."""
        return []

    def begin(self, algorithm: LearningModule) -> None:
        """Prepare for a run, whose dataset is built."""

    def end_update(self, algorithm: LearningModule, batch: object) -> None:
        """Learn after an update of the algorithm from a batch."""

    def end_iteration(self, algorithm: LearningModule) -> None:
        """Learn after the updates of an iteration."""

    def get_state(self) -> State:
        """Return the state of this rank's run."""
        return {}

    def set_state(self, state: State) -> str | None:
        """Restore a state. Return a line for the user if something starts again; None otherwise."""
        return None


def choose_behavior(run: RunModule, behavior: str | None) -> LearningModule:
    """Return the algorithm of a run, or that of one of its behaviors; raise `SettingError` if there is no such behavior."""
    if isinstance(run, LearningModule) and behavior is None:
        return run
    algorithms: Mapping[str, LearningModule] = getattr(run, "algorithms", {})
    if behavior is None or behavior not in algorithms:
        asked = "name a behavior, --behavior" if behavior is None else f"there is no behavior {behavior!r}"
        known = f"this run has {', '.join(algorithms)}" if algorithms else "this run has one policy, without a name"
        raise SettingError(f"{asked}: {known}")
    return algorithms[behavior]
