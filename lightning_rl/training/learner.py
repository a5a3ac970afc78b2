"""The part of one algorithm in a run: the run tells it when to begin, to finish an iteration and to end."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_rl.callbacks import callbacks_of
from lightning_rl.callbacks.iteration import (
    GRADIENT_HOOKS,
    UNUSED_HOOKS,
    UNUSED_LOOPS,
    TargetNetworkUpdate,
    gradient_hooks,
    match_target,
    overrides,
)
from lightning_rl.checkpoints.validation import GENERATOR, MAPPING, Rules, below
from lightning_rl.data.dataset import ReplayDataset
from lightning_rl.data.groups import GroupDataset
from lightning_rl.data.rollout import ExperienceDataset, RolloutDataset
from lightning_rl.envs.agents.world import SharedEnv, Side
from lightning_rl.errors import SettingError
from lightning_rl.nan_policy import Guard
from lightning_rl.networks.acting import PolicyNetwork
from lightning_rl.networks.changes import ChangeDetector, check_float32, describe_uncalled
from lightning_rl.networks.normalization import NoNormalizer, depends_on_mode
from lightning_rl.networks.off_policy import Critic
from lightning_rl.optimization import ScheduledOptimizer, best_matmul, check_optimizers, describe_unlearned, first_rate
from lightning_rl.processes.ranks import share_buffers
from lightning_rl.training.arguments import check_hyperparameters, check_signals
from lightning_rl.training.compiling import MIN_UPDATES, CompiledLoss, begin_compiling, can_compile_gradients, compile_again
from lightning_rl.training.experience import frozen_experience
from lightning_rl.training.learning import LearningModule
from lightning_rl.training.replay import load_buffer
from lightning_rl.training.threads import has_convolutions
from lightning_rl.types import State, Tree

MAX_UNREAD_STEPS = 32
"""Maximum number of GPU gradient steps before their results are read; their batches are kept, to save a bad one."""


class Learner:
    """Prepares an algorithm for its updates, and holds what they need during a run. A frozen behavior only acts."""

    state_rules: ClassVar[Rules] = {**below("guard", Guard.state_rules), "beside/[]": MAPPING, "learning|noise": GENERATOR}
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(self, algorithm: LearningModule) -> None:
        self.algorithm = algorithm
        self.scaler = GradScaler(enabled=False)
        self.hooks: Callable[..., object] | None = None
        """Calls Lightning's hooks around a gradient step, if there are any."""
        self.followers: list[Any] = []
        """Callbacks with `on_update_end`."""
        self.compiled: dict[str, CompiledLoss] = {}
        """Compiled losses, which replace the methods during the run."""
        self.unread_steps: list[tuple[Tensor, tuple[Any, ...]]] = []
        """Gradient steps on a GPU whose result is not read yet: whether each was finite, and the arguments of `refuse` if not."""
        self.matmul_before: str | None = None
        self.changes: ChangeDetector | None = None
        """Notices what a user changes in its networks during the run."""
        self.signals: dict[str, tuple[float, bool]] = {}
        """γ and `ignore_done` of each reward signal, as they were read."""
        self.settings: dict[str, Any] = {}
        """What its algorithm's `hparams` are to hold."""
        self.by_mode: list[nn.Module] = []
        """The parts of its network that act in evaluation mode, and learn in training mode."""
        self.unlearned: str | None = None
        """The line about parameters that are not learned."""
        self.rate: float | None = None
        """The learning rate that its optimizers were given last."""

    @cached_property
    def guard(self) -> Guard:
        """The guard against NaN and infinity. A run replaces it when it begins; one without a step needs it to end."""
        return Guard(self.algorithm.on_nan)

    # ---------------------------------------------------------------- one of several behaviors

    def join(self, run: object, behavior: str) -> None:
        """Become one of several learners of a run."""
        self.algorithm.run, self.algorithm.behavior = run, behavior

    def build_side(self, side: Side, is_frozen: bool) -> ExperienceDataset:
        """Build the experience of one of several behaviors, whose agents are a side of a world.

        Raises `SettingError`: it cannot learn from the steps of a shared environment.
        """
        algorithm = self.algorithm
        assert isinstance(algorithm.env, SharedEnv)
        algorithm.env.side = side
        dataset = vars(algorithm)["dataset"] = frozen_experience(algorithm) if is_frozen else algorithm.experience()
        if not isinstance(dataset, RolloutDataset | GroupDataset | ReplayDataset):
            name = type(algorithm).__name__
            raise SettingError(f"behavior {algorithm.behavior}: {name} cannot learn from the steps of a shared environment")
        return dataset

    @property
    def env_steps(self) -> int:
        """Return the algorithm's environment steps."""
        return self.algorithm.env_steps

    @property
    def turn_steps(self) -> int:
        """Return the environment steps of a turn, after which another behavior learns."""
        assert self.algorithm.self_play is not None
        return self.algorithm.self_play.turn_steps

    def begin_turn(self) -> None:
        """Begin to learn in new episodes, after other behaviors have learned."""
        for signal in self.algorithm.reward_signals.values():
            signal.begin_episodes()

    # ---------------------------------------------------------------- begin

    def begin_acting(self) -> None:
        """Prepare for a run in which it only acts."""
        collector: Any = self.algorithm.collector
        self.algorithm.counted_rows = 0
        self.guard = collector.guard = Guard(self.algorithm.on_nan, None, self.algorithm.world_size)

    def begin(self) -> None:
        """Prepare for updates; devices, optimizers and callbacks are ready."""
        algorithm, trainer = self.algorithm, self.algorithm.trainer
        assert algorithm.collector is not None
        check_float32(*self.networks())
        algorithm.counted_rows = 0
        self.unread_steps.clear()
        for learner in algorithm.side_learners:
            if learner.learns and algorithm.num_optimizers is None:
                name = type(algorithm).__name__
                raise SettingError(f"{name}.configure_optimizers must return self.with_side_learners(optimizer, …)")
            learner.begin(algorithm)
        algorithm.own_optimizers = self.all_optimizers()[: algorithm.num_optimizers]
        self.scaler = getattr(trainer.precision_plugin, "scaler", None) or GradScaler(enabled=False)
        self.guard = algorithm.collector.guard = Guard(algorithm.on_nan, getattr(trainer, "run_folder", None), trainer.world_size)
        self.guard.begin(algorithm, self.all_optimizers())
        self.followers = [callback for callback in callbacks_of(trainer, object) if hasattr(callback, "on_update_end")]
        if (update := algorithm.target_update) is not None and algorithm.behavior:  # it is not among the Trainer's callbacks
            update.on_train_start(trainer, algorithm)  # type: ignore[arg-type]
            self.followers.insert(0, update)
        self.hooks = gradient_hooks(trainer, algorithm)
        self.rate, self.unlearned = None, None
        self.by_mode = list(filter(depends_on_mode, algorithm.network.modules()))
        known = set(algorithm.modules())
        if not all(network in known for networks in algorithm.target_networks for network in networks):
            name = type(algorithm).__name__
            raise SettingError(f"a network of {name} was replaced, but not in {name}.target_networks: assign its pairs with targets too")
        self._name_unused()
        self.matmul_before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(best_matmul(algorithm.modules(), algorithm.device))
        compiled = compiled_losses(algorithm, self.scaler)
        self.compiled = {name: loss for name, loss in compiled.items() if name not in vars(algorithm)}  # unless user-replaced
        vars(algorithm).update(self.compiled)  # replaces the methods
        self.changes = ChangeDetector(algorithm)
        device = algorithm.device
        algorithm.noise = algorithm.generator if device.type == "cpu" else Generator(device).manual_seed(algorithm.seed)

    def networks(self) -> list[nn.Module]:
        """Return the policy, the critics and their targets."""
        algorithm = self.algorithm
        return [algorithm.network, *(child for child in algorithm.children() if isinstance(child, Critic | PolicyNetwork))]

    def all_optimizers(self) -> list[Optimizer]:
        """Return all optimizers without Lightning's wrappers, which would count each step as a `global_step`."""
        optimizers = self.algorithm.optimizers(use_pl_optimizer=False)
        return (optimizers if isinstance(optimizers, list) else [optimizers])[self.algorithm.run.optimizers_of[self.algorithm.behavior]]

    def _name_unused(self) -> None:
        """Print a line about each setting, parameter and hook of the algorithm that has no effect."""
        algorithm, trainer, name = self.algorithm, self.algorithm.trainer, type(self.algorithm).__name__
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        rate = algorithm.hparams.get("learning_rate", algorithm.learning_rate)
        if unused := check_optimizers(algorithm.own_optimizers, schedulers, algorithm.min_optimizers, name, rate):
            algorithm.say(unused)
        self._name_unlearned()
        if uncalled := describe_uncalled(algorithm):
            algorithm.say(uncalled)
        for hook in filter(lambda hook: overrides(algorithm, hook), UNUSED_HOOKS):
            algorithm.say(f"{name}.{hook} is not called: `step` makes the gradient step, with its hooks {', '.join(GRADIENT_HOOKS)}")
        for hook in filter(lambda hook: overrides(algorithm, hook), UNUSED_LOOPS):
            algorithm.say(f"{name}.{hook} is not called: evaluations play episodes, see docs/lightning.md")

    def _name_unlearned(self) -> None:
        """Print a line about parameters that no optimizer holds, if it is a new one."""
        algorithm = self.algorithm
        before, self.unlearned = self.unlearned, describe_unlearned(algorithm, algorithm.trainer.optimizers, algorithm.learned_otherwise)
        if self.unlearned not in (None, before):
            algorithm.say(self.unlearned)

    def _take_changes(self) -> None:
        """Give targets the parts that were put into networks during the run, and name what no optimizer holds.

        Losses are compiled again, and NaN restores the new parts from now on.

        Raises `SettingError`: parameters are not float32.
        """
        algorithm = self.algorithm
        check_float32(*self.networks())
        for networks in algorithm.target_networks:
            match_target(*networks)
        for callback in self.followers:
            if isinstance(callback, TargetNetworkUpdate):
                callback.on_train_start(algorithm.trainer, algorithm)  # type: ignore[arg-type]
        if self.compiled:
            compile_again(self.compiled)
        self.by_mode = list(filter(depends_on_mode, algorithm.network.modules()))
        self.guard.begin(algorithm, self.all_optimizers())
        self._name_unlearned()

    # ---------------------------------------------------------------- each iteration

    def begin_iteration(self, began_at: int, progress: float) -> None:
        """Set all values of an iteration that begins at a count; `progress` of the run goes from 0 to 1."""
        algorithm = self.algorithm
        assert algorithm.dataset is not None and self.changes is not None
        algorithm.began_at, algorithm.progress = began_at, progress
        if algorithm.hparams != self.settings:
            check_hyperparameters(algorithm)
        if {name: (signal.gamma, signal.ignore_done) for name, signal in algorithm.reward_signals.items()} != self.signals:
            check_signals(algorithm.reward_signals, self.signals)
        algorithm.schedule(progress)
        self.set_rates()
        if self.changes.changed():
            self._take_changes()
            self.changes.accept()
        if isinstance(algorithm.network, PolicyNetwork):  # not a module of a user's own
            algorithm.network.check_methods()
        algorithm.dataset.begin_iteration(began_at, progress)

    def set_rates(self) -> None:
        """Set the learning rate of the optimizers that follow `learning_rate`."""
        algorithm = self.algorithm
        scheduled = [config.scheduler.optimizer for config in algorithm.trainer.lr_scheduler_configs]  # a user's scheduler sets their rates
        for optimizer in algorithm.own_optimizers:
            if isinstance(optimizer, ScheduledOptimizer) and optimizer not in scheduled:
                for group in optimizer.param_groups:
                    if self.rate not in (None, group["lr"]):
                        algorithm.say(f"{group['lr']:g} in an optimizer is replaced by learning_rate, which it follows: assign that")
                    group["lr"] = algorithm.learning_rate
        self.rate = algorithm.learning_rate

    def postpone(self, finite: Tensor, name: str, loss: Tensor, norm: Tensor) -> None:
        """Read later whether a gradient step was finite that the GPU has made or skipped."""
        algorithm = self.algorithm
        parts = {part: values[-1:] for part, values in algorithm.recorded.items()}
        self.unread_steps.append((finite, (name, loss, norm, algorithm.updates, parts, getattr(algorithm.dataset, "batch", ()))))
        if len(self.unread_steps) == MAX_UNREAD_STEPS:
            self.read_steps()

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
        self.guard.refuse(name, loss, norm, f"at environment step {self.algorithm.env_steps:,}, update {update:,}", parts, batch)

    def finish_iteration(self) -> None:
        """Finish an iteration after its `training_step`."""
        algorithm = self.algorithm
        assert algorithm.collector is not None
        if self.unread_steps:
            self.read_steps()
        for learner in algorithm.active_learners:
            learner.end_iteration(algorithm)
        if not isinstance(algorithm.network.normalizer, NoNormalizer):
            rollout = algorithm.collector.rollout()
            algorithm.network.normalizer.gather(rollout.obs, rollout.valid)
        if algorithm.trainer.world_size > 1:
            share_buffers(algorithm, ("discounts", "ignore_done"))
        self.guard.end_iteration()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the iteration and the learning rate."""
        rate = first_rate(self.algorithm.own_optimizers)
        return {**self.guard.metrics(), **self.recorded_metrics(), **({} if rate is None else {"train/learning_rate": rate})}

    def recorded_metrics(self) -> dict[str, float]:
        """Return the means of what was recorded in the iteration so far."""
        means: dict[str, float | Tensor] = {
            name if "/" in name else f"train/{name}": (
                sum(values) / len(values) if isinstance(values[0], float) else torch.stack(list(map(torch.as_tensor, values))).mean()
            )
            for name, values in self.algorithm.recorded.items()
            if values
        }
        on_gpu = {name: mean for name, mean in means.items() if isinstance(mean, Tensor) and not mean.is_cpu}
        read = torch.stack(list(on_gpu.values())).tolist() if on_gpu else []  # together: each read waits for the GPU
        return {name: float(mean) for name, mean in means.items() if name not in on_gpu} | dict(zip(on_gpu, read, strict=True))

    def clear_metrics(self) -> None:
        """Forget the metrics of the iteration, whose row is written."""
        self.algorithm.recorded.clear()

    def take_notices(self) -> list[str]:
        """Return lines for the user since the last call."""
        assert self.algorithm.collector is not None
        notices = [*self.algorithm.collector.take_notices(), *self.guard.notices]
        self.guard.notices.clear()
        return notices

    # ---------------------------------------------------------------- saving and resuming

    def get_state(self) -> State:
        """Return this rank's learning state that is not in weights and optimizers, with arrays."""
        algorithm = self.algorithm
        beside = [learner.get_state() for learner in algorithm.side_learners]
        generators = {"learning": algorithm.generator.get_state(), "noise": algorithm.noise.get_state()}
        return {"guard": self.guard.get_state(), "beside": beside, **generators}

    def set_state(self, state: State) -> None:
        """Restore the state from `get_state`."""
        algorithm = self.algorithm
        for learner, learner_state in zip(algorithm.side_learners, state["beside"], strict=True):
            if (new := learner.set_state(learner_state)) is not None:
                algorithm.say(new)
        self.set_acting_state(state["guard"])
        algorithm.generator.set_state(torch.from_numpy(state["learning"]))
        algorithm.noise.set_state(torch.from_numpy(state["noise"]))

    def set_acting_state(self, guard: State) -> None:
        """Restore the state of a learner that only acts; its collector is restored already."""
        assert self.algorithm.collector is not None
        self.algorithm.counted_rows = self.algorithm.collector.rows
        self.guard.set_state(guard)

    def continue_counts(self) -> None:
        """Start the counts of this rank's experience from the totals of all ranks, if it cannot resume its own."""
        algorithm = self.algorithm
        assert algorithm.collector is not None
        algorithm.collector.env_steps, algorithm.collector.statistics.episodes = algorithm.env_steps, algorithm.episodes

    def load_buffer(self, continues: bool = True) -> None:
        """Load this rank's replay buffer from the checkpoint, if there is one; `continues`: with the episodes in progress."""
        load_buffer(self.algorithm, continues)

    # ---------------------------------------------------------------- end

    def end(self) -> None:
        """Undo `begin`; the environments are closed."""
        algorithm = self.algorithm
        vars(algorithm)["dataset"] = None
        late = [name for name in algorithm.recorded if not algorithm.trainer.callback_metrics.keys() & {name, f"train/{name}"}]
        if algorithm.run.module.finished and late:
            algorithm.say(f"{', '.join(late)}: recorded after the last iteration, so no row holds them")
        self.clear_metrics()
        self.hooks = self.changes = None  # they belong to this Trainer
        while self.compiled:
            delattr(algorithm, self.compiled.popitem()[0])
        if self.matmul_before is not None:
            torch.set_float32_matmul_precision(self.matmul_before)


# ---------------------------------------------------------------- compiled losses


def compiled_losses(algorithm: LearningModule, scaler: GradScaler) -> dict[str, CompiledLoss]:
    """Return the compiled losses of an algorithm by method name; none if `auto` expects that compiling would not pay off.

    Raises `SettingError`: a loss method is missing or has no optimizer, or torch is too old.
    """
    if algorithm.compile is False or (algorithm.compile == "auto" and not repays(algorithm)):
        return {}
    if reason := why_not(algorithm):
        if algorithm.compile is True:
            raise SettingError(f"compile: {reason}")
        algorithm.say(f"compile auto: {reason}; losses run uncompiled")
        return {}
    if algorithm.compile == "auto":
        takes = "which takes about 20 s the first time on a machine and 4 s later"
        algorithm.say(f"compile auto: losses are compiled when first used, {takes}; compile false runs them uncompiled")
    begin_compiling()
    kind, say = type(algorithm).__name__, algorithm.say if algorithm.compile == "auto" else None
    return {
        name: CompiledLoss(f"{kind}.{name}", getattr(algorithm, name), optimizer, scaler, say)
        for name, optimizer in zip(algorithm.losses, algorithm.own_optimizers, strict=False)
    }


def why_not(algorithm: LearningModule) -> str:
    """Return why the losses of an algorithm cannot be compiled; an empty string if they can."""
    kind, losses, num = type(algorithm).__name__, algorithm.losses, len(algorithm.own_optimizers)
    for name in losses:
        if not hasattr(algorithm, name):
            return f"{kind} has no method {name}; name its losses in the attribute `losses`"
    if len(losses) > num:
        names = f"{kind}.losses names {len(losses)}, {', '.join(losses)}"
        return f"{names}, for {num} optimizer{'s'[: num != 1]}; name one for each, in their order"
    return "" if can_compile_gradients() else f"torch {torch.__version__} cannot compile gradients; update it"


def repays(algorithm: LearningModule) -> bool:
    """Return whether compiling pays off, judged by settings: the run is long, and on a CPU there is a compiler and no convolution."""
    is_cut, device = getattr(algorithm.trainer, "fast_dev_run", False) or algorithm.trainer.max_steps != -1, algorithm.device.type
    if is_cut or algorithm.memory is not None or algorithm.planned_updates < MIN_UPDATES.get(device, math.inf):
        return False
    return device != "cpu" or not (has_convolutions(algorithm.modules()) or shutil.which(os.environ.get("CXX", "g++")) is None)
