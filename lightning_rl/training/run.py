"""The run: counters, rows of metrics, stopping, and the state in checkpoints, for one algorithm or several that learn together."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import replace
from textwrap import shorten
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_rl.callbacks import callbacks_of
from lightning_rl.callbacks.iteration import CloseIteration, EndIteration, EndRun, user_callbacks
from lightning_rl.callbacks.stopping import any_rank_must_stop
from lightning_rl.checkpoints.archive import Checkpoint, to_arrays, to_plain
from lightning_rl.data.episodes import Finished
from lightning_rl.data.rollout import ExperienceDataset
from lightning_rl.envs.config import EnvConfig, EnvSource, changed_task
from lightning_rl.envs.lessons import PlainSampler, as_parameter, change_parameter
from lightning_rl.envs.make import describe_wrappers
from lightning_rl.errors import SettingError, printable, short_number
from lightning_rl.networks.changes import changes_everywhere, changes_of, structure_of
from lightning_rl.processes.children import one_thread
from lightning_rl.processes.ranks import leave_results, merge_metrics, of_all_ranks
from lightning_rl.training.hooks import RunModule, call_last_hook, has_kind
from lightning_rl.training.learner import Learner
from lightning_rl.training.state import Additions, RunLog, is_packaged, random_state, read_attributes, set_random_state, write_attributes
from lightning_rl.types import State


class Run:
    """The run of a module: it counts, logs, stops and saves, and its learners learn.

    Args:
        module: the LightningModule that Lightning trains.
        learners: those of the algorithms that learn, by the name of their behavior; `""` if there is only one.
        frozen: those of the algorithms that only act.
    """

    def __init__(self, module: RunModule, learners: Mapping[str, Learner], frozen: Mapping[str, Learner] | None = None) -> None:
        self.module, self.learners, self.frozen = module, dict(learners), dict(frozen or {})
        self.all = dict(sorted({**self.learners, **self.frozen}.items()))
        """All of them, in the order of their names."""
        self.algorithms = {name: learner.algorithm for name, learner in self.all.items()}
        self.optimizers_of: dict[str, slice] = {"": slice(None)}
        """Which of the Trainer's optimizers belong to each learner."""
        self.dataset: ExperienceDataset | None = None
        self.began_at = 0
        """The count at the start of the current iteration."""
        self.made_before = 0
        """The collector's `steps_made` at that time."""
        self.log_rows = RunLog(1, 0)
        self.newest: dict[str, dict[str, float]] = {}
        """Metrics of the newest iteration of each learner."""
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

    @property
    def trainer(self) -> pl.Trainer:
        """Return the Trainer."""
        return self.module.trainer

    # ---------------------------------------------------------------- progress

    @property
    def count_so_far(self) -> int:
        """Return the count with the steps of an iteration that is being collected; other ranks are taken to be equally fast."""
        module = self.module
        if module.counter != "env_steps" or self.dataset is None:
            return module.count
        return max(module.count, self.began_at + (self.dataset.collector.steps_made - self.made_before) * module.world_size)

    @property
    def log_every(self) -> int:
        """Return the interval between rows of metrics, in counts: 1 % of the run without `log_interval`."""
        return int(self.module.log_interval or max(1, self.module.length // 100))

    def in_short(self) -> str:
        """Return the mean return and length of episodes, and texts of callbacks, for the progress bar."""
        assert self.dataset is not None
        metrics = self.dataset.collector.statistics.metrics()
        shown = {"return": "rollout/ep_rew_mean", "length": "rollout/ep_len_mean"}
        means = [f"{word} {short_number(metrics[name])}" for word, name in shown.items() if name in metrics]
        means = means or (["return –"] if self.module.counter == "env_steps" else [])
        means += [f"success {metrics['rollout/success_rate']:.0%}"] if "rollout/success_rate" in metrics else []
        return " · ".join([*means, *(callback.in_short() for callback in self._callbacks_with("in_short"))])

    def finished_episodes(self) -> dict[str, list[Finished]]:
        """Return this rank's episodes that ended in the newest iteration, by behavior."""
        assert self.dataset is not None
        return {name: self.algorithms[name].collector.statistics.finished for name in self.dataset.full}  # type: ignore[union-attr]

    def _callbacks_with(self, method: str) -> list[Any]:
        return [callback for callback in callbacks_of(self.trainer, object) if hasattr(callback, method)]

    # ---------------------------------------------------------------- parameters of the environments

    @property
    def current_env(self) -> EnvSource | None:
        """Return the environment with the values of `set_parameter`, as evaluations play it."""
        env = self.module.env
        if not isinstance(env, EnvConfig) or not self.parameter_values:
            return env
        return replace(env, parameters={**env.parameters, **self.parameter_values})

    def set_parameter(self, name: str, value: PlainSampler) -> None:
        """Set a parameter of the environments. Raises `SettingError`: there is no such parameter, or the value is invalid."""
        if self.module.counter != "env_steps":
            raise SettingError(f"set_parameter: {type(self.module).__name__} steps no environments")
        env = self.current_env
        new = change_parameter(env.parameters if isinstance(env, EnvConfig) else {}, name, value)
        if new is not None:
            self.parameter_values = {**self.parameter_values, name: new}
            if self.dataset is not None:
                self._send_parameters()
                self.begin_task()

    def _send_parameters(self) -> None:
        """Set the values of `set_parameter` in all environments."""
        collector: Any = self.module.collector  # steps environments
        if self.parameter_values:
            collector.set_lessons({name: as_parameter(name, value).until(0) for name, value in self.parameter_values.items()})

    def begin_task(self) -> None:
        """Reset the statistics of episodes, and let callbacks reset what they know of evaluations: all belong to another task."""
        assert self.dataset is not None
        self.dataset.collector.statistics.clear()
        for callback in self._callbacks_with("on_environment_changed"):
            callback.on_environment_changed(self.trainer, self.module)

    # ---------------------------------------------------------------- called by Lightning, in this order

    def callbacks(self) -> list[pl.Callback]:
        """Return the callbacks that the run needs with any Trainer; a user's callback of the same class replaces one for learning."""
        trainer: Any = self.trainer
        trainer.callbacks = before = user_callbacks(trainer.callbacks)
        for_learning = (callback for callback in self.module.learning_callbacks() if not has_kind(before, callback))
        return [EndIteration(), CloseIteration(), EndRun(before), *for_learning]

    def build_dataset(self) -> ExperienceDataset:
        """Return the dataset whose items are iterations."""
        if self.dataset is None:  # Lightning may call this again in each epoch, and the run continues
            self.dataset = vars(self.module)["dataset"] = self.module.experience()  # offline it replaces the setting of this name
            self.dataset.collected = self.module.count_steps
        return self.dataset

    def check_experience(self) -> None:
        """Raise `SettingError` if the Trainer's batches are not this run's experience."""
        if self.dataset is None or self.trainer.train_dataloader is not self.dataset:
            raise SettingError(describe_refused_data(self.module))

    def start(self) -> None:
        """Prepare for the first iteration, or resume the run of a checkpoint.

        Raises:
            SettingError: the Trainer needs more iterations than the run has, or a checkpoint cannot be resumed.
        """
        trainer, module = self.trainer, self.module
        assert self.dataset is not None
        least = max(trainer.min_steps or 0, (trainer.min_epochs or 0) * trainer.num_training_batches)
        if least > self.dataset.iterations:
            line = f"trainer.min_steps and min_epochs ask for {least:,} iterations, and the run ends after {self.dataset.iterations:,}"
            raise SettingError(f"{line}: raise max_{module.counter}")
        one_thread()  # also in processes that Lightning spawned
        self._agree_on_count()
        self.log_rows = RunLog(self.log_every, module.count)
        for line in describe_wrappers(module.env) if module.env is not None else ():
            module.say(line)
        for learner in self.frozen.values():
            learner.begin_acting()
        for learner in self.learners.values():
            learner.begin()
        if module.count:
            self._continue()
            self._send_parameters()  # restored environments have the values with which their episodes began
            for callback in self._callbacks_with("on_run_continued"):
                callback.on_run_continued(trainer, module)
        else:
            self._send_parameters()
            for learner in self.learners.values():
                learner.algorithm.warm_up()
            module.count_steps()
        trainer.should_stop |= module.finished or any_rank_must_stop(trainer)
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        """Set all scheduled values for the next iteration, before it is collected."""
        assert self.dataset is not None
        collector, module = self.dataset.collector, self.module
        self.began_at, self.made_before = module.count, collector.steps_made
        progress = min(1.0, self.began_at / module.length)
        most = self.began_at + collector.n_steps * collector.num_envs * self.trainer.world_size
        self.log_rows.begin(math.inf if most >= module.length else most)
        for name, learner in self.learners.items():
            if not self.dataset.is_in_iteration(name):
                learner.begin_iteration(learner.algorithm.count, progress)

    def end_iteration(self) -> None:
        """Finish an iteration before any callback, so that logging, evaluating and saving see the same counts and statistics.

        Its row of metrics stays open until `close_iteration`, for what callbacks and the module's own hooks record.
        """
        dataset, module, trainer = self.dataset, self.module, self.trainer
        assert dataset is not None
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()  # global_step counts iterations
        for name in dataset.full:
            self.learners[name].finish_iteration()
        module.count_steps()
        if getattr(trainer, "log_every_n_steps", None) == 1:  # the x-axis of Lightning and of `self.log`, no interval
            trainer.fit_loop.epoch_loop._batches_that_stepped = module.count
        dataset.end_iteration()
        self.notices += self.take_notices()
        if module.global_rank == 0:
            self._print_notices([self.notices])
        is_due = self.log_rows.is_due(module.count) or module.finished
        for name in dataset.full if is_due or self._are_several else ():
            learner = self.learners[name]
            self.newest[name] = {**learner.metrics(), "train/n_updates": float(learner.algorithm.updates)}
        if is_due:
            self._open_row(dataset)
        for config in trainer.lr_scheduler_configs:  # a user's schedulers, every `frequency` iterations
            if trainer.global_step % config.frequency == 0:
                module.lr_scheduler_step(config.scheduler, None)
        if module.finished:
            trainer.should_stop = True
        dataset.is_whole = True

    @property
    def _are_several(self) -> bool:
        """Return whether several behaviors learn: the newest metrics of each stand in all rows up to its next iteration."""
        return "" not in self.learners

    def _open_row(self, dataset: ExperienceDataset) -> None:
        """Make the row of a finished iteration."""
        self._print_notices(of_all_ranks(self.notices))
        dataset.collector.statistics.share_reports()
        metrics = merge_metrics({**dataset.collector.metrics(), **dataset.metrics(), **self._newest_metrics()})
        metrics |= {"rollout/episodes": self.module.episodes} if dataset.collector.rows else {}
        for callback in self._callbacks_with("run_metrics"):
            metrics |= callback.run_metrics()
        self.log_rows.open(self.trainer, self.module, {**metrics, "train/n_updates": self.module.updates})

    def _newest_metrics(self) -> dict[str, float]:
        """Return the newest metrics of all learners, under the name of the behavior if there are several."""
        return {named(name, key): value for name, metrics in self.newest.items() for key, value in metrics.items()}

    def close_iteration(self) -> None:
        """Write the row of a finished iteration after all hooks but those of saves, and begin the next iteration."""
        assert self.dataset is not None
        self._close_row(self.dataset, merge=True)
        for name in self.dataset.full:
            self.learners[name].clear_metrics()
        self._begin_iteration()

    def _close_row(self, dataset: ExperienceDataset, merge: bool) -> None:
        """Write the row that is open, with what was recorded after it was made; `merge`: the means over all ranks."""
        for name in dataset.full if self.log_rows.is_open or self._are_several else ():
            self.newest[name] |= self.learners[name].recorded_metrics()
        if self.log_rows.is_open:
            metrics = self._newest_metrics()
            self.log_rows.close(self.trainer, self.module, merge_metrics(metrics) if merge else metrics)

    def log_row(self, metrics: dict[str, float]) -> None:
        """Write a row of metrics at the present count, after that of the iteration."""
        self.log_rows.add(self.trainer, self.module, metrics)

    def call_last_hook(self, *arguments: object) -> None:
        """Call the module's `on_train_batch_end`, before checkpoints are saved."""
        call_last_hook(self.module, *arguments)

    def take_notices(self) -> list[str]:
        """Return lines for the user since the last call."""
        return [f"{name}: {text}" if name else text for name, learner in self.all.items() for text in learner.take_notices()]

    def _print_notices(self, ranks: list[list[str]]) -> None:
        """Print the notices of ranks, and clear this rank's own."""
        for rank, notices in enumerate(ranks):
            for notice in notices:
                self.module.say(f"rank {rank}: {notice}" if rank else notice)
        self.notices = []

    def validate(self) -> dict[str, float]:
        """Return additional metrics for an evaluation, from held-out data; the same on all ranks."""
        return {named(name, key): value for name, algorithm in self.algorithms.items() for key, value in algorithm.validate().items()}

    def interrupt(self, abandons: bool) -> None:
        """Prepare for a save after an error.

        The steps of an unfinished iteration count, and its episodes are abandoned; with `abandons`, those of a finished one are too.
        """
        assert self.dataset is not None
        if abandons or not self.dataset.is_whole:
            self.dataset.collector.interrupt()
            self.module.count_steps()

    def end(self) -> None:
        """Close the environments, after a run or an error."""
        if self.dataset is not None:
            leave_results(self.trainer, self.get_results)
            self.notices += self.take_notices()
            for notice in self.notices if self.module.global_rank else ():  # rank 0 may have died
                print(printable(f"rank {self.module.global_rank}: {notice}"))
            self._print_notices([self.notices])
            if self.dataset.is_whole and self.log_rows.is_open:  # a hook has failed
                self._close_row(self.dataset, merge=False)
            self.dataset.collector.close()
            self.dataset = vars(self.module)["dataset"] = None
            for learner in reversed([*self.all.values()]):  # the first one stores torch's settings from before the run
                learner.end()

    def get_results(self) -> State:
        """Return the counts, and the state of lessons and of self-play, which the next `fit` continues, as plain data."""
        callbacks = [callback.state_dict() for callback in self.module.learning_callbacks()]
        counts = [{name: getattr(module, name) for name in module.COUNTS} for module in (self.module, *self.algorithms.values())]
        return to_plain({"counts": counts, "callbacks": callbacks, "parameters": self.parameter_values})

    def set_results(self, results: State) -> None:
        """Restore what `get_results` returned in another process."""
        self.parameter_values = results["parameters"]
        for module, counts in zip((self.module, *self.algorithms.values()), results["counts"], strict=True):
            module.set_counts(counts)
        for callback, state in zip(self.module.learning_callbacks(), results["callbacks"], strict=True):
            callback.load_state_dict(state)

    # ---------------------------------------------------------------- saving, loading and resuming

    def save(self, checkpoint: Checkpoint) -> None:
        """Add our entries to Lightning's in a checkpoint."""
        module = self.module
        counts = {name: getattr(module, name) for name in module.COUNTS}
        ranks = self._states_of_ranks() if self.saves_run and self.dataset is not None else []
        additions = self.additions.save(module, self.changes)
        entries = {**module.describe(), **counts, "parameters": dict(self.parameter_values), "ranks": ranks, **additions}
        checkpoint["lightning_rl"] = {"format_version": module.format_version, **entries}

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the checkpoint's counts; a Trainer that resumes its run also restores everything else when training starts."""
        state, module = checkpoint["lightning_rl"], self.module
        module.set_counts(state)
        self.ranks = state.get("ranks", []) if module.has_trainer else []
        env = module.hparams.get("env") or {}
        changed = changed_task(checkpoint.get("hyper_parameters", {}).get("env"), env)
        known = {} if changed else env.get("parameters", {})  # settings given explicitly win
        self.parameter_values = {name: value for name, value in state.get("parameters", {}).items() if name in known}
        self.changed_task = changed if module.has_trainer else []
        if state.get("attributes"):
            self.additions.load(module, state)
        self.additions.name_lost(module, state, self.changes if state.get("changes") else {})

    @property
    def changes(self) -> dict[str, str]:
        """Return what was changed in networks after they were built, or in all of this process, by place; checkpoints do not hold it."""
        changes = changes_everywhere(self.module.modules())
        for name, algorithm in self.algorithms.items():
            for place, text in changes_of(algorithm.built, structure_of(algorithm, is_packaged)).items():
                changes[f"{name}/{place}"] = f"{name}: {text}" if name else text
        return changes

    def _get_learning_state(self) -> State:
        """Return this rank's learning state that is not in weights and optimizers."""
        if not self._are_several:
            return self.learners[""].get_state()
        behaviors = {
            name: {**learner.get_state(), "began_at": learner.algorithm.began_at, "progress": learner.algorithm.progress}
            for name, learner in self.learners.items()
        }
        frozen = {name: {"guard": learner.guard.get_state()} for name, learner in self.frozen.items()}
        return {"behaviors": behaviors, "frozen": frozen, "newest": self.newest}

    def _set_learning_state(self, state: State) -> None:
        """Restore a state; collectors are restored already, and some behaviors may be in the middle of an iteration."""
        assert self.dataset is not None
        if not self._are_several:
            self.learners[""].set_state(state)
            return
        self.newest = state["newest"]
        for name, learner in self.frozen.items():
            learner.set_acting_state(state["frozen"][name]["guard"])
        for name, learner in self.learners.items():
            stored = state["behaviors"][name]
            learner.set_state(stored)
            if self.dataset.is_in_iteration(name):
                learner.begin_iteration(stored["began_at"], stored["progress"])

    def _states_of_ranks(self) -> list[State]:
        """Return the states of all ranks as plain data, on every rank."""
        assert self.dataset is not None
        module = self.module
        run = {"num_envs": self.dataset.collector.num_envs, "data": self.dataset.get_state(), "log": self.log_rows.get_state()}
        attributes = {"attributes": read_attributes(module)[0]} if module.global_rank else {}  # those of rank 0 are the checkpoint's
        rank_state = to_plain({**run, **self._get_learning_state(), "random": random_state(), **attributes})
        if self.trainer.world_size == 1:
            return [rank_state]
        file = io.BytesIO()
        torch.save(rank_state, file)  # the pickles of `all_gather_object` do not support all types of tensors
        return [torch.load(io.BytesIO(state), weights_only=True) for state in of_all_ranks(file.getvalue())]

    def data_of_ranks(self, name: str) -> list[tuple[State, int]]:
        """Return the data of a learner, and its number of rows, on each rank in the checkpoint that is resumed."""
        if not name:
            return [(rank["data"], rank["num_envs"]) for rank in self.ranks]
        agents = self.algorithms[name].spaces.rows
        return [(rank["data"]["behaviors"][name], rank["num_envs"] * agents) for rank in self.ranks]

    @property
    def own_state(self) -> State | None:
        """Return this rank's state in the checkpoint that is resumed; None if the number of ranks or environments has changed."""
        rank = self.module.global_rank
        fits = len(self.ranks) == self.trainer.world_size and self.ranks[rank]["num_envs"] == self.module.num_envs
        return self.ranks[rank] if fits else None

    def _continue(self) -> None:
        """Resume the run of the checkpoint, as far as it and the environments allow; print a line about what cannot be resumed.

        Raises:
            SettingError: the checkpoint does not contain a valid state of this run.
        """
        dataset, ranks, state, module = self.dataset, self.ranks, self.own_state, self.module
        assert dataset is not None
        num_ranks, continues = self.trainer.world_size, self.trainer.ckpt_path is not None
        new_episodes: str | None = "the checkpoint contains no state of a run" if continues else "the model continues in a new fit"
        if ranks:
            size, agents = f"{len(ranks)} x {ranks[0]['num_envs']}", " x agents" * (module.spaces.rows > 1)
            new_episodes = f"the checkpoint has {size} (ranks x env.num_envs{agents}), not {num_ranks} x {module.num_envs}"
        if state is None:
            for learner in self.all.values() if module.global_rank == 0 else ():  # one rank takes over the counts of all
                learner.continue_counts()
            if ranks:
                dataset.take_over(ranks[0]["data"])
            for learner in self.learners.values():
                learner.load_buffer(continues=False)
        else:
            try:
                new_episodes = self._set_state(to_arrays(state))
            except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
                reason = shorten(f"{type(error).__name__}: {error}", 80, placeholder=" …")
                raise SettingError(f"the checkpoint's run cannot be resumed ({reason}); --init_from loads only its weights") from error
        if new_episodes is not None:
            module.say(f"{dataset.restart_notice}: {new_episodes}")
        if self.changed_task:
            what = "the best score so far and the statistics of episodes belong to another task and are reset"
            module.say(f"{', '.join(self.changed_task)} changed since the checkpoint: {what}")
            self.begin_task()
        self.ranks, self.changed_task = [], []

    def _set_state(self, state: State) -> str | None:
        """Restore the state of this rank. Return why environments start new episodes; None if they do not."""
        assert self.dataset is not None
        for learner in self.learners.values():
            learner.load_buffer()
        new_episodes = self.dataset.set_state(state["data"])
        self.log_rows.set_state(state["log"])
        self._set_learning_state(state)
        write_attributes(self.module, state.get("attributes", {}))
        set_random_state(state["random"])
        return new_episodes

    def _agree_on_count(self) -> None:
        """Check that all ranks start at the same count.

        Raises:
            SettingError: the counts differ, because the ranks read different folders.
        """
        module = self.module
        counts = of_all_ranks(module.count) if self.trainer.world_size > 1 else []
        for rank, count in enumerate(counts):
            if count != counts[0]:
                begin = f"rank {rank} starts at {count:,} {module.counted} and rank 0 at {counts[0]:,}"
                raise SettingError(f"{begin}: all must find the same checkpoint, in a folder that their machines share")


def describe_refused_data(module: RunModule) -> str:
    """Return the error message for dataloaders and datamodules."""
    return (
        f"{type(module).__name__} learns from its own experience: give fit no dataloaders and no datamodule, and return "
        "super().train_dataloader() from train_dataloader"
    )


def named(behavior: str, metric: str) -> str:
    """Return the name of a metric in rows, under that of its behavior if there are several."""
    return f"{behavior}/{metric}" if behavior else metric
