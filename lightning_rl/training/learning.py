"""What a learner does in a run: gradient updates, their metrics, and the learning state in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from textwrap import shorten
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_rl.callbacks.iteration import GRADIENT_HOOKS, UNUSED_HOOKS, UNUSED_LOOPS, TargetNetworkUpdate, gradient_hooks, overrides
from lightning_rl.callbacks.protocols import callbacks_of
from lightning_rl.callbacks.self_play import SelfPlay
from lightning_rl.callbacks.stopping import must_stop
from lightning_rl.compiling import CompiledLoss, compile_again, compiled_losses
from lightning_rl.data.collector import Collector
from lightning_rl.data.dataset import ReplayDataset, SampledDataset
from lightning_rl.data.groups import GroupDataset
from lightning_rl.data.replay.sampling import sequence_errors
from lightning_rl.data.rollout import ExperienceDataset, RolloutDataset
from lightning_rl.data.self_play import SelfPlayConfig, Snapshots
from lightning_rl.distributed import mean_over_ranks, share_buffers
from lightning_rl.envs.agents.world import SharedEnv, Side
from lightning_rl.errors import SettingError
from lightning_rl.nan_policy import Guard
from lightning_rl.networks.acting import PolicyNetwork, Structure, check_float32, hooks_of
from lightning_rl.networks.memory import Memory
from lightning_rl.networks.normalization import NoNormalizer
from lightning_rl.optimization import ScheduledOptimizer, best_matmul, check_optimizers, describe_unlearned, first_rate, gradient_step
from lightning_rl.rewards.signal import RewardSignal
from lightning_rl.schedules import Schedule
from lightning_rl.training.arguments import change_setting
from lightning_rl.training.experience import Metric, Number, frozen_experience
from lightning_rl.training.hooks import RunModule
from lightning_rl.training.replay import load_buffer
from lightning_rl.training.side_learners import SideLearner
from lightning_rl.types import Experience, Rollout, State, Transition, Tree

MAX_UNREAD_STEPS = 32
"""Maximum number of GPU gradient steps before their results are read; their batches are kept, to save a bad one."""


def as_tensor(name: str, value: Number) -> Tensor:
    """Return a recorded value as a tensor. Raises `SettingError`: it is not a number."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SettingError(
            f"record({name}={shorten(repr(value), 40)}): record takes tensors, numbers, and functions that return one"
        ) from error


class Learner(RunModule):
    """Updates of networks; its subclass, the algorithm, has the settings, networks and losses, and its `run` drives it."""

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
    learned_otherwise: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of parameters that updates change without an optimizer."""
    target_networks: Sequence[tuple[nn.Module, nn.Module]] = ()
    """Online networks with their targets."""
    min_optimizers = 1
    """Number of optimizers that the updates need."""
    target_update: TargetNetworkUpdate | None = None
    """The update of target networks, if there are any."""
    built: Structure
    """The structure of its networks when its constructor had returned."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = Guard(self.on_nan)
        self.progress, self.began_at = 0.0, 0
        """Progress of the run at the start of the current iteration, and its count then."""
        self.num_optimizers: int | None = None
        self.counted_rows = 0
        self.recorded: dict[str, list[float | Tensor]] = {}
        """Metrics of the current iteration."""
        self.compiled: dict[str, CompiledLoss] = {}
        """Compiled losses, which replace the methods during the run."""
        self.unread_steps: list[tuple[Tensor, tuple[Any, ...]]] = []
        """Gradient steps on a GPU whose result is not read yet: whether each was finite, and the arguments of `refuse` if not."""

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
        paid = rollout.reward.squeeze(-1)
        experience = Experience(rollout.obs, rollout.action, rollout.next_obs, paid, rollout.terminated)
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
        if "built" in vars(self) and name in self.hparams:
            value = change_setting(self, name, value)
        super().__setattr__(name, value)
        if name == "learning_rate" and "own_optimizers" in vars(self) and self.dataset is not None:  # during a run
            self._set_rates()

    def with_side_learners(self, *optimizers: Optimizer) -> list[Optimizer]:
        """Return the optimizers of an algorithm, followed by those of its side learners.

        A `ScheduledOptimizer` has no own learning rate: it follows `learning_rate`, or a scheduler that starts from it.
        """
        self.num_optimizers = len(optimizers)
        for optimizer in optimizers:
            if isinstance(optimizer, ScheduledOptimizer):
                optimizer.param_groups[0]["lr"] = self.learning_rate
        return [*optimizers, *(each for learner in self.side_learners for each in learner.optimizers(self, list(optimizers)))]

    def all_optimizers(self) -> list[Optimizer]:
        """Return all optimizers without Lightning's wrappers, which would count each step as a `global_step`."""
        optimizers = self.optimizers(use_pl_optimizer=False)
        return (optimizers if isinstance(optimizers, list) else [optimizers])[self.run.optimizers_of[self.behavior]]

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
        waits = self.on_nan == "restore_last"
        norm, finite = gradient_step(loss, optimizer, self.scaler, max_norm, self.trainer.world_size, self.hooks, waits)
        if isinstance(finite, Tensor):
            parts = {part: values[-1:] for part, values in self.recorded.items()}
            self.unread_steps.append((finite, (name, loss.detach(), norm, self.updates, parts, getattr(self.dataset, "batch", ()))))
            if len(self.unread_steps) == MAX_UNREAD_STEPS:
                self.read_steps()
        elif finite:
            self.guard.bad_updates[name] = 0
        else:
            self.refuse(name, loss, norm, self.updates, self.recorded, getattr(self.dataset, "batch", ()))
        return norm

    def read_steps(self) -> None:
        """Wait for the GPU, and apply `on_nan` to the gradient steps that it skipped. Raises `NotFiniteError`."""
        unread, self.unread_steps = self.unread_steps, []
        for is_finite, (_, step) in zip(torch.stack([finite for finite, _ in unread]).tolist(), unread, strict=True):
            if is_finite:
                self.guard.bad_updates[step[0]] = 0
            else:
                self.refuse(*step)

    def refuse(self, name: str, loss: Tensor, norm: Tensor, update: int, parts: Mapping[str, list[float | Tensor]], batch: Tree) -> None:
        """Apply `on_nan` to a gradient step that was not made. Raises `NotFiniteError`."""
        self.guard.refuse(name, loss, norm, f"at environment step {self.env_steps:,}, update {update:,}", parts, batch)

    def end_update(self, batch: Any) -> None:
        """Finish an update: count it, update reward signals and cloning, and call `on_update_end` of callbacks."""
        vars(self)["updates"] += 1  # no setting, so that `__setattr__` need not look
        for learner in self.active_learners:
            learner.end_update(self, batch)
        for callback in self.followers:
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

    def mean_over_ranks(self, value: Tensor) -> float:
        """Return the mean of a number over all ranks, so that they make the same decision."""
        return float(mean_over_ranks(value.detach()) if self.trainer.world_size > 1 else value)

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
            found = (value if isinstance(value, Tensor) else as_tensor(name, value)).detach()
            if not keeps:  # only the newest value, for the error if it is not finite
                self.recorded[name] = [found]
                continue
            found = found.float().mean() if found.dim() else found.float()
            # small tensors that outlive an update would fragment the memory that large tensors of the next update could reuse
            self.recorded.setdefault(name, []).append(found.item() if found.is_cpu else found)

    def means_of_parts(self, weight: Tensor, **values: Tensor) -> dict[str, Tensor]:
        """Return the mean of values `[B, D]`, such as entropies, for each part of a Dict or Tuple action, as `train/<name>/<part>`."""
        distribution = self.network.distribution
        if not distribution.names:
            return {}
        means = {name: (weight.unsqueeze(-1) * distribution.leaf_sums(value.detach())).sum(0) for name, value in values.items()}
        return {f"train/{name}/{part}": mean[k] for name, mean in means.items() for k, part in enumerate(distribution.names)}

    # ---------------------------------------------------------------- called by the run, in this order

    def join(self, run: object, behavior: str) -> None:
        """Become one of several learners of a run."""
        self.run, self.behavior = run, behavior

    def build_side(self, side: Side, is_frozen: bool) -> ExperienceDataset:
        """Build the experience of one of several behaviors, whose agents are a side of a world.

        Raises `SettingError`: it cannot learn from the steps of a shared environment.
        """
        assert isinstance(self.env, SharedEnv)
        self.env.side = side
        dataset = vars(self)["dataset"] = frozen_experience(self) if is_frozen else self.experience()
        if not isinstance(dataset, RolloutDataset | GroupDataset | ReplayDataset):
            raise SettingError(f"behavior {self.behavior}: {type(self).__name__} cannot learn from the steps of a shared environment")
        return dataset

    def begin_turn(self) -> None:
        """Begin to learn in new episodes, after other behaviors have learned."""
        for signal in self.reward_signals.values():
            signal.begin_episodes()

    def begin_acting(self) -> None:
        """Prepare for a run in which it only acts."""
        collector: Any = self.collector
        self.counted_rows = 0
        self.guard = collector.guard = Guard(self.on_nan, None, self.world_size)

    def begin_learning(self) -> None:
        """Prepare for updates; devices, optimizers and callbacks are ready."""
        assert self.collector is not None
        trainer = self.trainer
        check_float32(self.network, *(online for online, _ in self.target_networks))
        self.counted_rows = 0
        self.unread_steps.clear()
        for learner in self.side_learners:
            if learner.learns and self.num_optimizers is None:
                raise SettingError(f"{type(self).__name__}.configure_optimizers must return self.with_side_learners(optimizer, …)")
            learner.begin(self)
        self.own_optimizers = self.all_optimizers()[: self.num_optimizers]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        name, rate = type(self).__name__, self.hparams.get("learning_rate", self.learning_rate)
        if unused := check_optimizers(self.own_optimizers, schedulers, self.min_optimizers, name, rate):
            self.say(unused)
        if unlearned := describe_unlearned(self, trainer.optimizers, self.learned_otherwise):
            self.say(unlearned)
        self.scaler = getattr(trainer.precision_plugin, "scaler", None) or GradScaler(enabled=False)
        self.guard = self.collector.guard = Guard(self.on_nan, getattr(trainer, "run_folder", None), trainer.world_size)
        self.guard.begin(self, self.all_optimizers())
        followers = [callback for callback in callbacks_of(trainer, object) if hasattr(callback, "on_update_end")]
        if (update := self.target_update) is not None and self.behavior:  # it is not among the Trainer's callbacks
            update.on_train_start(trainer, self)  # type: ignore[arg-type]
            followers.insert(0, update)
        self.followers: list[Any] = followers
        self.hooks = gradient_hooks(trainer, self)
        for hook in UNUSED_HOOKS:
            if overrides(self, hook):
                self.say(f"{name}.{hook} is not called: `step` makes the gradient step, with its hooks {', '.join(GRADIENT_HOOKS)}")
        for hook in UNUSED_LOOPS:
            if overrides(self, hook):
                self.say(f"{name}.{hook} is not called: evaluations play episodes, see docs/lightning.md")
        self.matmul_before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(best_matmul(self.modules(), self.device))
        self.compiled = {name: loss for name, loss in compiled_losses(self).items() if name not in vars(self)}  # unless user-replaced
        self.compiled_hooks = hooks_of(self.modules())
        vars(self).update(self.compiled)  # replaces the methods
        self.noise = self.generator if self.device.type == "cpu" else Generator(self.device).manual_seed(self.seed)

    def warm_up(self) -> None:
        """Collect the statistics for `normalize_obs: frozen`, unless they were loaded with another run's weights."""
        if self.normalize_obs == "frozen" and self.network.normalizer.is_new:
            assert self.collector is not None
            steps = self.normalize_obs_steps // self.trainer.world_size
            stop = partial(must_stop, self.trainer) if self.trainer.world_size == 1 else lambda: False
            self.network.normalizer.update(self.collector.random_steps(steps, stop))

    def begin_iteration(self, began_at: int, progress: float) -> None:
        """Set all values of an iteration that begins at a count; `progress` of the run goes from 0 to 1."""
        assert self.dataset is not None
        self.began_at, self.progress = began_at, progress
        self.schedule(progress)
        self.dataset.begin_iteration(began_at, progress)

    def schedule(self, progress: float) -> None:
        """Set all scheduled values for the next iteration; `progress` goes from 0 to 1."""
        if next(self.network.parameters()).dtype != torch.float32:
            check_float32(self.network)
        if isinstance(self.network, PolicyNetwork):  # not a module of a user's own
            self.network.check_methods()
        if self.compiled and self.compiled_hooks != (hooks := hooks_of(self.modules())):
            self.compiled_hooks = hooks
            compile_again(self.compiled)
        for name, schedule in self.schedules.items():
            vars(self)[name] = schedule(progress)
        self._set_rates()

    def _set_rates(self) -> None:
        """Set the learning rate of the optimizers that follow `learning_rate`."""
        theirs = [config.scheduler.optimizer for config in self.trainer.lr_scheduler_configs]  # a user's scheduler sets their rates
        for optimizer in self.own_optimizers:
            if isinstance(optimizer, ScheduledOptimizer) and optimizer not in theirs:
                for group in optimizer.param_groups:
                    group["lr"] = self.learning_rate

    def finish_learning(self) -> None:
        """Finish an iteration after its `training_step`."""
        assert self.collector is not None
        if self.unread_steps:
            self.read_steps()
        for learner in self.active_learners:
            learner.end_iteration(self)
        if not isinstance(self.network.normalizer, NoNormalizer):
            rollout = self.collector.rollout()
            self.network.normalizer.gather(rollout.obs, rollout.valid)
        if self.trainer.world_size > 1:
            share_buffers(self, ("discounts", "ignore_done"))
        self.guard.end_iteration()

    def learning_metrics(self) -> dict[str, float]:
        """Return the metrics of the iteration and the learning rate."""
        rate = first_rate(self.own_optimizers)
        return {**self.guard.metrics(), **self.recorded_metrics(), **({} if rate is None else {"train/learning_rate": rate})}

    def recorded_metrics(self) -> dict[str, float]:
        """Return the means of what was recorded in the iteration so far."""
        means = {
            name if "/" in name else f"train/{name}": (
                torch.tensor(values) if isinstance(values[0], float) else torch.stack(list(map(torch.as_tensor, values)))
            ).mean()
            for name, values in self.recorded.items()
            if values
        }
        on_gpu = [name for name, mean in means.items() if not mean.is_cpu]
        read = torch.stack([means[name] for name in on_gpu]).tolist() if on_gpu else []  # together: each read waits for the GPU
        return {name: float(mean) for name, mean in means.items() if mean.is_cpu} | dict(zip(on_gpu, read, strict=True))

    def clear_metrics(self) -> None:
        """Forget the metrics of the iteration, whose row is written."""
        self.recorded.clear()

    def take_notices(self) -> list[str]:
        """Return lines for the user since the last call."""
        assert self.collector is not None
        notices = [*self.collector.take_notices(), *self.guard.notices]
        self.guard.notices.clear()
        return notices

    def validate(self) -> dict[str, float]:
        """Return additional metrics for an evaluation, from held-out data; the same on all ranks."""
        return {}

    def get_learning_state(self) -> State:
        """Return this rank's learning state that is not in weights and optimizers, with arrays."""
        beside = [learner.get_state() for learner in self.side_learners]
        generators = {"learning": self.generator.get_state(), "noise": self.noise.get_state()}
        return {"guard": self.guard.get_state(), "beside": beside, **generators}

    def set_learning_state(self, state: State) -> None:
        """Restore the state from `get_learning_state`."""
        for learner, own in zip(self.side_learners, state["beside"], strict=True):
            if (new := learner.set_state(own)) is not None:
                self.say(new)
        self.set_acting_state(state["guard"])
        self.generator.set_state(torch.from_numpy(state["learning"]))
        self.noise.set_state(torch.from_numpy(state["noise"]))

    def set_acting_state(self, guard: State) -> None:
        """Restore the state of a learner that only acts; its collector is restored already."""
        assert self.collector is not None
        self.counted_rows = self.collector.rows
        self.guard.set_state(guard)

    def continue_counts(self) -> None:
        """Start the counts of this rank's experience from the totals of all ranks, if it cannot resume its own."""
        assert self.collector is not None
        self.collector.env_steps, self.collector.statistics.episodes = self.env_steps, self.episodes

    def load_buffer(self, continues: bool = True) -> None:
        """Load this rank's replay buffer from the checkpoint, if there is one; `continues`: with the episodes in progress."""
        load_buffer(self, continues)

    def end_learning(self) -> None:
        """Undo `begin_learning`; the environments are closed."""
        vars(self)["dataset"] = None
        late = [name for name in self.recorded if not self.trainer.callback_metrics.keys() & {name, f"train/{name}"}]
        if self.run.module.finished and late:
            self.say(f"{', '.join(late)}: recorded after the last iteration, so no row holds them")
        self.clear_metrics()
        vars(self).pop("hooks", None)  # they belong to this Trainer
        while self.compiled:
            delattr(self, self.compiled.popitem()[0])
        if hasattr(self, "matmul_before"):
            torch.set_float32_matmul_precision(self.matmul_before)
