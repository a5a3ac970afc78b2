"""The LightningModule that a run drives. Lightning's hooks are left to the user: the run works before or after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytorch_lightning as pl
import torch

from lightning_rl.callbacks import callbacks_of
from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.data.agent_episodes import BehaviorPolicies
from lightning_rl.data.episodes import Finished
from lightning_rl.data.rollout import ExperienceDataset, RunCollector
from lightning_rl.envs.agents.stepper import Opponent
from lightning_rl.envs.config import EnvSource
from lightning_rl.envs.lessons import PlainSampler
from lightning_rl.errors import SettingError, printable
from lightning_rl.networks.acting import PolicyNetwork
from lightning_rl.spaces import Spaces
from lightning_rl.training.loading import load

RUN_HOOKS = {"on_train_start": "start", "on_save_checkpoint": "save", "on_load_checkpoint": "load"}
"""Hooks in which a run does work, and its methods that do it."""
LAST_HOOK = "on_train_batch_end"
"""The hook that the run calls before checkpoints are saved; Lightning calls it after them."""

ConfigureCallbacks = Callable[..., Sequence[pl.Callback] | pl.Callback]


class RunModule(pl.LightningModule):
    """A module that is trained by a `Run`. One batch is one iteration, and `global_step` counts iterations.

    Subclasses, one algorithm or several of them, say what they learn from and how. They may override Lightning's hooks, with or without
    `super()`: the run does its work in these hooks without defining them.
    """

    counter = "env_steps"
    """The count that a run increases up to its `length`; schedules, rows of metrics, evaluations and checkpoints follow it."""
    COUNTS = ("env_steps", "updates", "episodes")
    format_version = 1
    """Version of its checkpoint format."""
    env: EnvSource | None
    spaces: Spaces
    """Observation and action space of one environment."""
    log_interval: int | None
    max_env_steps: int
    behavior = ""
    """The name of its behavior, if it is one of several algorithms that learn together."""
    run: Any
    """Its `training.run.Run`, which drives it."""
    hooks_in_progress: set[str]
    called_early: bool
    """Whether the last hook of this iteration has been called, before Lightning calls it."""
    if TYPE_CHECKING:

        @property
        def length(self) -> int: ...
        @property
        def num_envs(self) -> int: ...
        @property
        def network(self) -> PolicyNetwork | BehaviorPolicies: ...
        def count_steps(self) -> None: ...
        def make_opponent(self, name: str, num_rows: int) -> Opponent: ...
        def learning_callbacks(self) -> list[pl.Callback]: ...
        def describe(self) -> dict[str, Any]: ...

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.hooks_in_progress, self.called_early = set(), False
        self.env_steps = self.updates = self.episodes = 0
        self.dataset: ExperienceDataset | None = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        leave_hooks(cls)

    def experience(self) -> ExperienceDataset:
        """Return the dataset whose items are iterations."""
        raise NotImplementedError

    # ---------------------------------------------------------------- progress

    @property
    def count(self) -> int:
        """Return the progress of the run, summed over all ranks."""
        return int(getattr(self, self.counter))

    @property
    def counted(self) -> str:
        """Return the unit of the count, in words."""
        return self.counter.replace("env_", "environment ")

    @property
    def finished(self) -> bool:
        """Return whether the run has reached its length."""
        return self.count >= self.length

    @property
    def current_epoch(self) -> int:
        """Return the number of evaluations, or Lightning's epoch if larger: Optuna's callback reports validations by it."""
        epoch = super().current_epoch
        evaluators = callbacks_of(self.trainer, RolloutEvaluator) if self.has_trainer else []
        return max([epoch, *(evaluator.evaluations for evaluator in evaluators)])

    @property
    def collector(self) -> RunCollector | None:
        """Return the collector, which steps the environments of the run."""
        return None if self.dataset is None else self.dataset.collector

    @property
    def has_trainer(self) -> bool:
        """Return whether it has a Trainer; its experience can be used without one."""
        try:
            return isinstance(self.trainer, pl.Trainer)  # with Fabric it is something else
        except RuntimeError:  # Lightning's: it is not attached to one
            return False

    @property
    def world_size(self) -> int:
        """Return the number of ranks that train together."""
        return self.trainer.world_size if self.has_trainer else 1

    def say(self, text: str) -> None:
        """Print a line for the user on rank 0, with the name of the behavior if there are several."""
        if self.global_rank == 0:
            line = f"{self.behavior}: {text}" if self.behavior else text
            getattr(self.trainer if self.has_trainer else None, "say", print)(printable(line))

    # ---------------------------------------------------------------- what the run does for its user

    @property
    def current_env(self) -> EnvSource | None:
        """Return the environment with the values of `set_parameter`, as evaluations play it."""
        return self.run.current_env

    def set_parameter(self, name: str, value: PlainSampler) -> None:
        """Set a parameter of the environments, beginning with their next episodes, and of evaluations.

        It is another task then: the best score so far and the statistics of episodes are reset, as when a run is resumed in a changed
        environment. Checkpoints contain the value. With several ranks, call this on each of them with the same value.

        Args:
            name: a parameter in `env.parameters` without lessons.
            value: a number or a sampler, as in `env.parameters`.

        Raises:
            SettingError: there is no such parameter, it has lessons, or the value is invalid.
        """
        self.run.set_parameter(name, value)

    def finished_episodes(self) -> dict[str, list[Finished]]:
        """Return this rank's episodes that ended in the newest iteration, by behavior."""
        return self.run.finished_episodes()

    def train_dataloader(self) -> ExperienceDataset:
        return self.run.build_dataset()

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: str | torch.device = "cpu",
        hparams_file: None = None,
        strict: bool = True,
        **overrides: object,
    ) -> Self:
        """Load the algorithm of a checkpoint, from only the file; `overrides` are settings that replace the stored ones.

        Lightning's `weights_only` has no effect: our checkpoints contain only plain data.
        """
        if hparams_file is not None or strict is False:
            raise SettingError(
                "load_from_checkpoint: a checkpoint contains its settings and all weights; trainer.fit(init_from=…) loads what fits"
            )
        overrides.pop("weights_only", None)
        return load(checkpoint_path, cls, RunModule, map_location, **overrides)

    def set_counts(self, counts: Mapping[str, Any]) -> None:
        """Set the counts to those of a checkpoint, or of another process."""
        self.env_steps, self.updates, self.episodes = (counts[name] for name in self.COUNTS)


# ---------------------------------------------------------------- hooks


def leave_hooks(cls: type[RunModule]) -> None:
    """Let the run do its work in the hooks of a class, whether they are overridden or not."""
    for hook in (*RUN_HOOKS, "configure_callbacks"):
        method = getattr(cls, hook)  # may come from a mixin
        if not hasattr(method, "does_work"):
            setattr(cls, hook, work_before(hook, method) if hook in RUN_HOOKS else add_own_callbacks(method))
    if not hasattr(getattr(cls, LAST_HOOK), "is_called_early"):
        setattr(cls, LAST_HOOK, skip_second_call(getattr(cls, LAST_HOOK)))


def call_hook(module: RunModule, name: str, *arguments: object, **named: object) -> object:
    """Call a hook without the run's own work, for a module that is part of another module's run."""
    module.hooks_in_progress.add(name)
    try:
        return getattr(module, name)(*arguments, **named)
    finally:
        module.hooks_in_progress.remove(name)


def call_last_hook(module: RunModule, *arguments: object) -> None:
    """Call the module's last hook of an iteration; Lightning's own call does nothing then."""
    call_hook(module, LAST_HOOK, *arguments)
    module.called_early = True


def work_before(name: str, hook: Callable[..., object]) -> Callable[..., object]:
    """Wrap a hook so that the run's work is done once before it, whether the hook calls `super()` or not."""

    @wraps(hook)
    def both(self: RunModule, *arguments: object) -> object:
        if name in self.hooks_in_progress:  # called by `super()`
            return hook(self, *arguments)
        self.hooks_in_progress.add(name)
        try:
            getattr(self.run, RUN_HOOKS[name])(*arguments)
            return hook(self, *arguments)
        finally:
            self.hooks_in_progress.remove(name)

    both.does_work = True  # type: ignore[attr-defined]
    return both


def skip_second_call(hook: Callable[..., object]) -> Callable[..., object]:
    """Wrap the last hook of an iteration so that Lightning's call does nothing if the run has called it."""

    @wraps(hook)
    def once(self: RunModule, *arguments: object, **named: object) -> object:
        if self.called_early:
            self.called_early = False
            return None
        return hook(self, *arguments, **named)

    once.is_called_early = True  # type: ignore[attr-defined]
    return once


def add_own_callbacks(configure_callbacks: ConfigureCallbacks) -> ConfigureCallbacks:
    """Wrap a `configure_callbacks` so that it adds to the run's own callbacks, whether it calls `super()` or not."""

    @wraps(configure_callbacks)
    def add(self: RunModule) -> Sequence[pl.Callback] | pl.Callback:
        if "configure_callbacks" in self.hooks_in_progress:
            return configure_callbacks(self)
        self.hooks_in_progress.add("configure_callbacks")
        try:
            more = configure_callbacks(self) or []
        finally:
            self.hooks_in_progress.remove("configure_callbacks")
        given = [more] if isinstance(more, pl.Callback) else list(more)
        return [*(callback for callback in self.run.callbacks() if not has_kind(given, callback)), *given]

    add.does_work = True  # type: ignore[attr-defined]
    return add


leave_hooks(RunModule)


def has_kind(callbacks: Iterable[pl.Callback], callback: pl.Callback) -> bool:
    """Return whether there is a callback of this kind."""
    return any(isinstance(other, type(callback)) for other in callbacks)
