"""The run: Lightning's hooks in their order, counters, rows of metrics, stopping, and the state in checkpoints."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Self

import pytorch_lightning as pl
import torch

from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.callbacks.iteration import CloseIteration, EndIteration, EndRun, user_callbacks
from lightning_rl.callbacks.protocols import callbacks_of
from lightning_rl.callbacks.stopping import any_rank_must_stop
from lightning_rl.checkpoints.archive import Checkpoint, to_arrays, to_plain
from lightning_rl.config_files import Plain
from lightning_rl.data.agent_episodes import BehaviorPolicies
from lightning_rl.data.collector import RunCollector
from lightning_rl.data.episodes import Finished
from lightning_rl.data.rollout import ExperienceDataset
from lightning_rl.distributed import leave_results, merge_metrics, of_all_ranks
from lightning_rl.envs.agents.stepper import Opponent
from lightning_rl.envs.config import EnvConfig, EnvSource, changed_task
from lightning_rl.envs.lessons import PlainSampler, as_parameter, change_parameter
from lightning_rl.envs.make import describe_wrappers
from lightning_rl.errors import SettingError, printable, short_number
from lightning_rl.networks.acting import PolicyNetwork, Structure, changes_of, structure_of
from lightning_rl.spaces import Spaces
from lightning_rl.threads import one_thread
from lightning_rl.training.hooks import Additions, HookedModule, has_kind, is_packaged, read_attributes, write_attributes
from lightning_rl.training.loading import load
from lightning_rl.training.state import RunLog, random_state, set_random_state
from lightning_rl.types import State


class Run(HookedModule):
    """A run, as a LightningModule. One batch is one iteration, and `global_step` counts iterations.

    The run counts, logs, stops and saves; its subclass, one algorithm or several of them, learns. Subclasses implement the methods of the
    first section. Lightning's hooks may be overridden, with or without `super()`.
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
    built: Structure
    """The structure of an algorithm's networks when its constructor had returned."""
    behavior = ""
    """The name of its behavior, if it is one of several algorithms that learn together."""
    if TYPE_CHECKING:

        @property
        def network(self) -> PolicyNetwork | BehaviorPolicies: ...

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.env_steps = self.updates = self.episodes = 0
        self.progress, self.began_at = 0.0, 0
        """Progress at the start of the current iteration, as a fraction of the run's length and as a count."""
        self.made_before = 0
        """The collector's `steps_made` at that time."""
        self.dataset: ExperienceDataset | None = None
        self.log_rows = RunLog(1, 0)
        self.ranks: list[State] = []
        """The state of each rank in a checkpoint that is being resumed."""
        self.notices: list[str] = []
        """Lines for the user from this rank that have not been printed yet."""
        self.changed_task: list[str] = []
        """Changed settings that make the environment a different task than in the checkpoint that is being resumed."""
        self.parameter_values: dict[str, PlainSampler] = {}
        """What `set_parameter` has set: numbers or samplers, by the parameter's name."""
        self.additions = Additions()
        self.saves_run = True
        """Whether checkpoints contain the state of the run, and not only weights and optimizers."""

    # ---------------------------------------------------------------- implemented by subclasses

    @property
    def length(self) -> int:
        """Return the count at which the run ends."""
        raise NotImplementedError

    @property
    def num_envs(self) -> int:
        """Return the number of parallel environments of this rank."""
        raise NotImplementedError

    def experience(self) -> ExperienceDataset:
        """Return the dataset whose items are iterations."""
        raise NotImplementedError

    def count_steps(self) -> None:
        """Sum the counts over all ranks, if they have changed; all decisions use these numbers."""

    def finished_episodes(self) -> dict[str, list[Finished]]:
        """Return this rank's episodes that ended in the newest iteration, by behavior."""
        raise NotImplementedError

    def begin_learning(self) -> None:
        """Prepare for updates; devices, optimizers and callbacks are ready."""

    def warm_up(self) -> None:
        """Prepare a new run, which is not resumed, before its first iteration."""

    def schedule(self, progress: float) -> None:
        """Set all scheduled values for the next iteration; `progress` goes from 0 to 1."""

    def finish_learning(self) -> None:
        """Finish an iteration after its `training_step`."""

    def learning_metrics(self) -> dict[str, float]:
        """Return the metrics of the iteration and the learning rate."""
        return {}

    def recorded_metrics(self) -> dict[str, float]:
        """Return the means of what was recorded in the iteration so far."""
        return {}

    def clear_metrics(self) -> None:
        """Forget the metrics of the iteration, whose row is written."""

    def take_notices(self) -> list[str]:
        """Return lines for the user since the last call."""
        return []

    def validate(self) -> dict[str, float]:
        """Return additional metrics for an evaluation, from held-out data; the same on all ranks."""
        return {}

    def make_opponent(self, name: str, num_rows: int) -> Opponent:
        """Return the player of the other seats of its game in an evaluation, for `num_rows` rows."""
        raise SettingError(f"{type(self).__name__} has no seats for an opponent; leave it out")

    def learning_callbacks(self) -> list[pl.Callback]:
        """Return the callbacks that learning needs; a user's callback of the same class replaces one."""
        return []

    def describe(self) -> Plain:
        """Return the plain data with which a checkpoint can rebuild this module."""
        raise NotImplementedError

    def get_learning_state(self) -> State:
        """Return this rank's learning state that is not in weights and optimizers, with arrays."""
        return {}

    def set_learning_state(self, state: State) -> None:
        """Restore the state from `get_learning_state`."""

    def continue_counts(self) -> None:
        """Start the counts of this rank's experience from the totals of all ranks, if it cannot resume its own."""

    def load_buffer(self, continues: bool = True) -> None:
        """Load this rank's replay buffer from the checkpoint, if there is one; `continues`: with the episodes in progress."""

    def end_learning(self) -> None:
        """Undo `begin_learning`."""

    # ---------------------------------------------------------------- progress

    @property
    def count(self) -> int:
        """Return the progress of the run, summed over all ranks."""
        return int(getattr(self, self.counter))

    @property
    def count_so_far(self) -> int:
        """Return the count with the steps of an iteration that is being collected; other ranks are taken to be equally fast."""
        if self.counter != "env_steps" or self.collector is None:
            return self.count
        return max(self.count, self.began_at + (self.collector.steps_made - self.made_before) * self.world_size)

    @property
    def current_epoch(self) -> int:
        """Return the number of evaluations, or Lightning's epoch if larger: Optuna's callback reports validations by it."""
        epoch = super().current_epoch
        evaluators = callbacks_of(self.trainer, RolloutEvaluator) if self.has_trainer else []
        return max([epoch, *(each.evaluations for each in evaluators)])

    @property
    def counted(self) -> str:
        """Return the unit of the count, in words."""
        return self.counter.replace("env_", "environment ")

    @property
    def finished(self) -> bool:
        """Return whether the run has reached its length."""
        return self.count >= self.length

    @property
    def collector(self) -> RunCollector | None:
        """Return the collector, which steps the environments of the run."""
        return None if self.dataset is None else self.dataset.collector

    @property
    def learner_names(self) -> Sequence[str]:
        """Return the names of the behaviors that learn; empty in a run with one policy."""
        return ()

    @property
    def current_env(self) -> EnvSource | None:
        """Return the environment with the values of `set_parameter`, as evaluations play it."""
        if not isinstance(self.env, EnvConfig) or not self.parameter_values:
            return self.env
        return replace(self.env, parameters={**self.env.parameters, **self.parameter_values})

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
        if self.counter != "env_steps":
            raise SettingError(f"set_parameter: {type(self).__name__} steps no environments")
        env = self.current_env
        new = change_parameter(env.parameters if isinstance(env, EnvConfig) else {}, name, value)
        if new is not None:
            self.parameter_values = {**self.parameter_values, name: new}
            if self.collector is not None:
                self._send_parameters()
                self.begin_task()

    def _send_parameters(self) -> None:
        """Set the values of `set_parameter` in all environments."""
        collector: Any = self.collector  # steps environments
        if self.parameter_values:
            collector.set_lessons({name: as_parameter(name, value).until(0) for name, value in self.parameter_values.items()})

    def begin_task(self) -> None:
        """Reset the statistics of episodes, and let callbacks reset what they know of evaluations: all belong to another task."""
        assert self.collector is not None
        self.collector.statistics.clear()
        for callback in self._callbacks_with("on_environment_changed"):
            callback.on_environment_changed(self.trainer, self)

    def in_short(self) -> str:
        """Return the mean return and length of episodes, and texts of callbacks, for the progress bar."""
        assert self.collector is not None
        metrics = self.collector.statistics.metrics()
        shown = {"return": "rollout/ep_rew_mean", "length": "rollout/ep_len_mean"}
        means = [f"{word} {short_number(metrics[name])}" for word, name in shown.items() if name in metrics]
        means = means or (["return –"] if self.counter == "env_steps" else [])
        means += [f"success {metrics['rollout/success_rate']:.0%}"] if "rollout/success_rate" in metrics else []
        return " · ".join([*means, *(callback.in_short() for callback in self._callbacks_with("in_short"))])

    def say(self, text: str) -> None:
        """Print a line for the user on rank 0, with the name of the behavior if there are several."""
        if self.global_rank == 0:
            line = f"{self.behavior}: {text}" if self.behavior else text
            getattr(self.trainer if self.has_trainer else None, "say", print)(printable(line))

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

    def _callbacks_with(self, method: str) -> list[Any]:
        return [callback for callback in callbacks_of(self.trainer, object) if hasattr(callback, method)]

    # ---------------------------------------------------------------- Lightning's hooks, in their order

    def own_callbacks(self) -> list[pl.Callback]:
        trainer: Any = self.trainer
        trainer.callbacks = before = user_callbacks(trainer.callbacks)
        return [
            EndIteration(),
            CloseIteration(),
            EndRun(before),
            *(each for each in self.learning_callbacks() if not has_kind(before, each)),
        ]

    def train_dataloader(self) -> ExperienceDataset:
        if self.dataset is None:  # Lightning may call this again in each epoch, and the run continues
            dataset = vars(self)["dataset"] = self.experience()  # offline it replaces the setting of this name
            dataset.collected = self.count_steps
        return self.dataset  # type: ignore[return-value]

    def check_experience(self) -> None:
        """Raise `SettingError` if the Trainer's batches are not this run's experience."""
        if self.dataset is None or self.trainer.train_dataloader is not self.dataset:
            raise SettingError(describe_refused_data(self))

    def start_run(self) -> None:
        """Prepare for the first iteration, or resume the run of a checkpoint.

        Raises:
            SettingError: the Trainer needs more iterations than the run has, or a checkpoint cannot be resumed.
        """
        trainer = self.trainer
        assert self.dataset is not None and self.collector is not None
        least = max(trainer.min_steps or 0, (trainer.min_epochs or 0) * trainer.num_training_batches)
        if least > self.dataset.iterations:
            line = f"trainer.min_steps and min_epochs ask for {least:,} iterations, and the run ends after {self.dataset.iterations:,}"
            raise SettingError(f"{line}: raise max_{self.counter}")
        one_thread()  # also in processes that Lightning spawned
        self._agree_on_count()
        self.log_rows = RunLog(self.log_every, self.count)
        for line in describe_wrappers(self.env) if self.env is not None else ():
            self.say(line)
        self.begin_learning()
        if self.count:
            self._continue()
            self._send_parameters()  # restored environments have the values with which their episodes began
            for callback in self._callbacks_with("on_run_continued"):
                callback.on_run_continued(trainer, self)
        else:
            self._send_parameters()
            self.warm_up()
            self.count_steps()
        trainer.should_stop |= self.finished or any_rank_must_stop(trainer)
        self._begin_iteration()

    @property
    def log_every(self) -> int:
        """Return the interval between rows of metrics, in counts: 1 % of the run without `log_interval`."""
        return int(self.log_interval or max(1, self.length // 100))

    def _begin_iteration(self) -> None:
        """Set all scheduled values for the next iteration, before it is collected."""
        assert self.dataset is not None and self.collector is not None
        self.began_at, self.made_before = self.count, self.collector.steps_made
        self.progress = min(1.0, self.began_at / self.length)
        most = self.began_at + self.collector.n_steps * self.collector.num_envs * self.trainer.world_size
        self.log_rows.begin(math.inf if most >= self.length else most)
        self.schedule(self.progress)
        self.dataset.begin_iteration(self.began_at, self.progress)

    def end_iteration(self) -> None:
        """Finish an iteration before any callback, so that logging, evaluating and saving see the same counts and statistics.

        Its row of metrics stays open until `close_iteration`, for what callbacks and the module's own hooks record.
        """
        collector = self.collector
        assert self.dataset is not None and collector is not None
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()  # global_step counts iterations
        self.finish_learning()
        self.count_steps()
        if getattr(self.trainer, "log_every_n_steps", None) == 1:  # the x-axis of Lightning and of `self.log`, no interval
            self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.count
        self.dataset.end_iteration()
        self.notices += self.take_notices()
        if self.global_rank == 0:
            self._print_notices([self.notices])
        if self.log_rows.is_due(self.count) or self.finished:
            self._print_notices(of_all_ranks(self.notices))
            collector.statistics.share_reports()
            metrics = merge_metrics({**collector.metrics(), **self.dataset.metrics(), **self.learning_metrics()})
            metrics |= {"rollout/episodes": self.episodes} if collector.rows else {}
            for callback in self._callbacks_with("run_metrics"):
                metrics |= callback.run_metrics()
            self.log_rows.open(self.trainer, self, {**metrics, "train/n_updates": self.updates})
        for config in self.trainer.lr_scheduler_configs:  # a user's schedulers, every `frequency` iterations
            if self.trainer.global_step % config.frequency == 0:
                self.lr_scheduler_step(config.scheduler, None)
        if self.finished:
            self.trainer.should_stop = True
        self.dataset.is_whole = True

    def close_iteration(self) -> None:
        """Write the row of a finished iteration after all hooks but those of saves, and begin the next iteration."""
        if self.log_rows.is_open:
            self.log_rows.close(self.trainer, self, merge_metrics(self.recorded_metrics()))
        self.clear_metrics()
        self._begin_iteration()

    def log_row(self, metrics: dict[str, float]) -> None:
        """Write a row of metrics at the present count, after that of the iteration."""
        self.log_rows.add(self.trainer, self, metrics)

    def _print_notices(self, ranks: list[list[str]]) -> None:
        """Print the notices of ranks, and clear this rank's own."""
        for rank, notices in enumerate(ranks):
            for notice in notices:
                self.say(f"rank {rank}: {notice}" if rank else notice)
        self.notices = []

    def interrupt(self, abandons: bool) -> None:
        """Prepare for a save after an error.

        The steps of an unfinished iteration count, and its episodes are abandoned; with `abandons`, those of a finished one are too.
        """
        assert self.dataset is not None
        if abandons or not self.dataset.is_whole:
            self.dataset.collector.interrupt()
            self.count_steps()

    def end_run(self) -> None:
        """Close the environments, after a run or an error."""
        if self.dataset is not None:
            leave_results(self.trainer, self.get_results)
            self.notices += self.take_notices()
            for notice in self.notices if self.global_rank else ():  # rank 0 may have died
                print(printable(f"rank {self.global_rank}: {notice}"))
            self._print_notices([self.notices])
            if self.dataset.is_whole and self.log_rows.is_open:  # a hook has failed
                self.log_rows.close(self.trainer, self, self.recorded_metrics())
            self.dataset.collector.close()
            vars(self)["dataset"] = None
            self.end_learning()

    @property
    def parts(self) -> list[Run]:
        """Return the run, and its learners if there are several: all that have `COUNTS`."""
        return [self]

    def get_results(self) -> State:
        """Return the counts, and the state of lessons and of self-play, which the next `fit` continues, as plain data."""
        callbacks = [each.state_dict() for each in self.learning_callbacks()]
        counts = [[getattr(each, name) for name in self.COUNTS] for each in self.parts]
        return to_plain({"counts": counts, "callbacks": callbacks, "parameters": self.parameter_values})

    def set_results(self, results: State) -> None:
        """Restore what `get_results` returned in another process."""
        self.parameter_values = results["parameters"]
        for each, counts in zip(self.parts, results["counts"], strict=True):
            for name, count in zip(self.COUNTS, counts, strict=True):
                setattr(each, name, count)
        for callback, state in zip(self.learning_callbacks(), results["callbacks"], strict=True):
            callback.load_state_dict(state)

    # ---------------------------------------------------------------- saving, loading and resuming

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
        return load(checkpoint_path, cls, Run, map_location, **overrides)

    def save_run(self, checkpoint: Checkpoint) -> None:
        """Add our entries to Lightning's in a checkpoint."""
        counts = {name: getattr(self, name) for name in self.COUNTS}
        ranks = self._states_of_ranks() if self.saves_run and self.dataset is not None else []
        own = {**self.describe(), **counts, "parameters": dict(self.parameter_values), "ranks": ranks, **self.additions.save(self)}
        checkpoint["lightning_rl"] = {"format_version": self.format_version, **own}

    def load_run(self, checkpoint: Checkpoint) -> None:
        """Load the checkpoint's counts; a Trainer that resumes its run also restores everything else when training starts."""
        state = checkpoint["lightning_rl"]
        self.env_steps, self.updates, self.episodes = state["env_steps"], state["updates"], state["episodes"]
        self.ranks = state.get("ranks", []) if self.has_trainer else []
        own = self.hparams.get("env") or {}
        changed = changed_task(checkpoint.get("hyper_parameters", {}).get("env"), own)
        known = {} if changed else own.get("parameters", {})  # settings given explicitly win
        self.parameter_values = {name: value for name, value in state.get("parameters", {}).items() if name in known}
        self.changed_task = changed if self.has_trainer else []
        self.additions.load(self, state)

    @property
    def changes(self) -> dict[str, str]:
        """Return what was changed in its networks after they were built, by place; checkpoints do not hold it."""
        changes = {}
        for part in self.parts:
            if "built" in vars(part):  # an algorithm; a run of several has no networks of its own
                for place, text in changes_of(part.built, structure_of(part, is_packaged)).items():
                    changes[f"{part.behavior}/{place}"] = f"{part.behavior}: {text}" if part.behavior else text
        return changes

    def _states_of_ranks(self) -> list[State]:
        """Return the states of all ranks as plain data, on every rank."""
        assert self.dataset is not None
        run = {"num_envs": self.dataset.collector.num_envs, "data": self.dataset.get_state(), "log": self.log_rows.get_state()}
        attributes = {"attributes": read_attributes(self)[0]} if self.global_rank else {}  # those of rank 0 are the checkpoint's
        own = to_plain({**run, **self.get_learning_state(), "random": random_state(), **attributes})
        if self.trainer.world_size == 1:
            return [own]
        file = io.BytesIO()
        torch.save(own, file)  # the pickles of `all_gather_object` do not support all types of tensors
        return [torch.load(io.BytesIO(state), weights_only=True) for state in of_all_ranks(file.getvalue())]

    @property
    def own_state(self) -> State | None:
        """Return this rank's state in the checkpoint that is resumed; None if the number of ranks or environments has changed."""
        fits = len(self.ranks) == self.trainer.world_size and self.ranks[self.global_rank]["num_envs"] == self.num_envs
        return self.ranks[self.global_rank] if fits else None

    def _continue(self) -> None:
        """Resume the run of the checkpoint, as far as it and the environments allow; print a line about what cannot be resumed.

        Raises:
            SettingError: the checkpoint does not contain a valid state of this run.
        """
        dataset, ranks, state, trainer = self.dataset, self.ranks, self.own_state, self.trainer
        assert dataset is not None
        new_episodes: str | None = "the checkpoint contains no state of a run" if trainer.ckpt_path else "the model continues in a new fit"
        if ranks:
            found, agents = f"{len(ranks)} x {ranks[0]['num_envs']}", " x agents" * (self.spaces.rows > 1)
            new_episodes = f"the checkpoint has {found} (ranks x env.num_envs{agents}), not {self.trainer.world_size} x {self.num_envs}"
        if state is None:
            if self.global_rank == 0:  # one rank takes over the counts of all
                self.continue_counts()
            self.load_buffer(continues=False)
        else:
            try:
                new_episodes = self._set_state(to_arrays(state))
            except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
                reason = shorten(f"{type(error).__name__}: {error}", 80, placeholder=" …")
                raise SettingError(f"the checkpoint's run cannot be resumed ({reason}); --init_from loads only its weights") from error
        if new_episodes is not None:
            self.say(f"{dataset.restart_notice}: {new_episodes}")
        if self.changed_task:
            what = "the best score so far and the statistics of episodes belong to another task and are reset"
            self.say(f"{', '.join(self.changed_task)} changed since the checkpoint: {what}")
            self.begin_task()
        self.ranks, self.changed_task = [], []

    def _set_state(self, state: State) -> str | None:
        """Restore the state of this rank. Return why environments start new episodes; None if they do not."""
        assert self.dataset is not None
        self.load_buffer()
        new_episodes = self.dataset.set_state(state["data"])
        self.log_rows.set_state(state["log"])
        self.set_learning_state(state)
        write_attributes(self, state.get("attributes", {}))
        set_random_state(state["random"])
        return new_episodes

    def _agree_on_count(self) -> None:
        """Check that all ranks start at the same count.

        Raises:
            SettingError: the counts differ, because the ranks read different folders.
        """
        counts = of_all_ranks(self.count) if self.trainer.world_size > 1 else []
        for rank, count in enumerate(counts):
            if count != counts[0]:
                begin = f"rank {rank} starts at {count:,} {self.counted} and rank 0 at {counts[0]:,}"
                raise SettingError(f"{begin}: all must find the same checkpoint, in a folder that their machines share")


def describe_refused_data(run: Run) -> str:
    """Return the error message for dataloaders and datamodules."""
    return (
        f"{type(run).__name__} learns from its own experience: give fit no dataloaders and no datamodule, and return "
        "super().train_dataloader() from train_dataloader"
    )
