"""The run: Lightning's hooks in their order, counters, rows of metrics, stopping, and the state that checkpoints hold."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.callbacks.iteration import EndIteration, EndRun, user_callbacks
from lightning_rl.callbacks.protocols import callbacks_of
from lightning_rl.callbacks.stopping import any_rank_must_stop
from lightning_rl.checkpoints.archive import to_arrays, to_plain
from lightning_rl.data.collector import RunCollector
from lightning_rl.data.episodes import Finished
from lightning_rl.data.rollout import ExperienceDataset
from lightning_rl.distributed import merge_metrics, of_all_ranks
from lightning_rl.envs.agents.stepper import Opponent
from lightning_rl.envs.config import changed_task
from lightning_rl.errors import SettingError, printable, short_number
from lightning_rl.spaces import Spaces
from lightning_rl.threads import one_thread
from lightning_rl.training.hooks import HookedModule, has_kind
from lightning_rl.training.loading import load
from lightning_rl.training.state import RunLog, random_state, set_random_state
from lightning_rl.types import State


class Run(HookedModule):
    """A run: what Lightning drives. One batch is one iteration, and `global_step` counts iterations.

    It counts, logs, stops and saves. What learns in it is its subclass's matter: an algorithm by itself, or several of them. The methods of
    the first section are all that the others ask of it. Lightning's hooks are free to be overridden, with or without `super()`.
    """

    counter = "env_steps"
    """What a run counts up to its `length`: its schedules, rows, evaluations and checkpoints follow it."""
    COUNTS = ("env_steps", "updates", "episodes")
    format_version = 1
    """Of its checkpoints."""
    spaces: Spaces
    """Observation and action space of one environment."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.env_steps = self.updates = self.episodes = 0
        self.progress, self.began_at = 0.0, 0
        """How far the run was when the current iteration began, as a share of its length and as a count."""
        self.dataset: ExperienceDataset | None = None
        self.ranks: list[dict[str, Any]] = []
        """The state of each rank in a checkpoint that is being continued."""
        self.notices: list[str] = []
        """Lines for the user from this rank that have not been printed yet."""
        self.changed_task: list[str] = []
        """Settings in which the environment is another task than that of the checkpoint that is being continued."""
        self.saves_run = True
        """Whether checkpoints hold the run too, and not only what was learned."""

    # ---------------------------------------------------------------- what a run asks of its subclass

    @property
    def length(self) -> int:
        """Return the count at which the run ends."""
        raise NotImplementedError

    @property
    def num_envs(self) -> int:
        """Return how many environments step at once."""
        raise NotImplementedError

    def experience(self) -> ExperienceDataset:
        """Return the dataset whose items are iterations."""
        raise NotImplementedError

    def count_steps(self) -> None:
        """Add up the counts of all ranks, where there is something new; all decisions use these numbers."""

    def begin_learning(self) -> None:
        """Prepare for updates, when devices, optimizers and callbacks are there."""

    def warm_up(self) -> None:
        """Prepare a run that does not continue another one, before its first iteration."""

    def schedule(self, progress: float) -> None:
        """Set what follows a schedule for the next iteration; `progress` goes from 0 to 1."""

    def finish_learning(self) -> None:
        """Do what remains of an iteration after its `training_step`."""

    def learning_metrics(self) -> dict[str, float]:
        """Return what the iteration recorded, and the learning rate."""
        return {}

    def take_notices(self) -> list[str]:
        """Return lines for the user since the last call."""
        return []

    def validate(self) -> dict[str, float]:
        """Return more to log with an evaluation, from data that is not learned from; the same on all ranks."""
        return {}

    def make_opponent(self, name: str, num_rows: int) -> Opponent:
        """Return who plays the other seats of its game in an evaluation, in `num_rows` rows."""
        raise SettingError(f"{type(self).__name__} has no seats for an opponent; leave it out")

    def learning_callbacks(self) -> list[pl.Callback]:
        """Return the callbacks that learning needs, each of which a user's callback of the same class replaces."""
        return []

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint needs to build this again, as plain data."""
        raise NotImplementedError

    def get_learning_state(self) -> State:
        """Return this rank's state of learning that is not in weights and optimizers, with arrays."""
        return {}

    def set_learning_state(self, state: State) -> None:
        """Restore what `get_learning_state` returned."""

    def continue_counts(self) -> None:
        """Let the experience of this rank continue the counts of all, where it cannot continue its own."""

    def load_buffer(self, continues: bool = True) -> None:
        """Load the replay buffer, if any, that the checkpoint holds for this rank; `continues`: with the episodes in progress."""

    def end_learning(self) -> None:
        """Undo `begin_learning`."""

    # ---------------------------------------------------------------- how far it is

    @property
    def count(self) -> int:
        """Return how far the run is, all ranks together."""
        return int(getattr(self, self.counter))

    @property
    def current_epoch(self) -> int:
        """Return how many evaluations there were, or Lightning's epoch if that is more: Optuna's callback reports validations by it."""
        epoch = super().current_epoch
        evaluators = callbacks_of(self.trainer, RolloutEvaluator) if self.has_trainer else []
        return max([epoch, *(each.evaluations for each in evaluators)])

    @property
    def counted(self) -> str:
        """Return what is counted, in words."""
        return self.counter.replace("env_", "environment ")

    @property
    def finished(self) -> bool:
        """Return whether the run has its length."""
        return self.count >= self.length

    @property
    def collector(self) -> RunCollector | None:
        """Return what steps the environments of the run."""
        return None if self.dataset is None else self.dataset.collector

    @property
    def learner_names(self) -> Sequence[str]:
        """Return the names of the behaviors that learn; none in a run with one policy."""
        return ()

    def finished_episodes(self) -> dict[str, list[Finished]]:
        """Return this rank's episodes that ended in the newest iteration, by the behavior that they are of."""
        assert self.collector is not None
        statistics: Any = self.collector.statistics
        return {"": statistics.finished}

    def in_short(self) -> str:
        """Return the means of episodes and what callbacks add to them, for the progress bar."""
        assert self.collector is not None
        metrics = self.collector.statistics.metrics()
        shown = {"return": "rollout/ep_rew_mean", "length": "rollout/ep_len_mean"}
        means = [f"{word} {short_number(metrics[name])}" for word, name in shown.items() if name in metrics]
        means = means or (["return –"] if self.counter == "env_steps" else [])
        means += [f"success {metrics['rollout/success_rate']:.0%}"] if "rollout/success_rate" in metrics else []
        return " · ".join([*means, *(callback.in_short() for callback in self._callbacks_with("in_short"))])

    def say(self, text: str) -> None:
        """Print one line for the user, from one rank."""
        if self.global_rank == 0:
            getattr(self._trainer, "say", print)(printable(text))

    @property
    def has_trainer(self) -> bool:
        """Return whether a Trainer drives it; without one its experience may still be looked at."""
        return self._trainer is not None

    @property
    def world_size(self) -> int:
        """Return how many ranks learn together."""
        return self.trainer.world_size if self.has_trainer else 1

    def _callbacks_with(self, method: str) -> list[Any]:
        trainer: Any = self.trainer
        return [callback for callback in trainer.callbacks if hasattr(callback, method)]

    # ---------------------------------------------------------------- Lightning's hooks, in their order

    def own_callbacks(self) -> list[pl.Callback]:
        trainer: Any = self.trainer
        trainer.callbacks = before = user_callbacks(trainer.callbacks)
        return [EndIteration(), EndRun(before), *(each for each in self.learning_callbacks() if not has_kind(before, each))]

    def train_dataloader(self) -> ExperienceDataset:
        if self.dataset is None:  # Lightning may ask again in each epoch, and the run goes on
            self.dataset = self.experience()
            self.dataset.collected = self.count_steps
        return self.dataset

    def check_experience(self) -> None:
        """Raise `SettingError` if the Trainer's batches are not this run's experience."""
        if self.dataset is None or self.trainer.train_dataloader is not self.dataset:
            raise SettingError(describe_refused_data(self))

    def start_run(self) -> None:
        """Prepare everything for the first iteration, or continue a checkpoint's run.

        Raises:
            SettingError: the Trainer asks for more iterations than the run has, or a checkpoint cannot be continued.
        """
        trainer: Any = self.trainer
        assert self.dataset is not None and self.collector is not None
        least = max(trainer.min_steps or 0, (trainer.min_epochs or 0) * trainer.num_training_batches)
        if least > self.dataset.iterations:
            line = f"trainer.min_steps and min_epochs ask for {least:,} iterations, and the run ends after {self.dataset.iterations:,}"
            raise SettingError(f"{line}: raise max_{self.counter}")
        one_thread()  # in processes that Lightning spawned too
        self._agree_on_count()
        self.log_rows = RunLog(self.log_every, self.count)
        self.begin_learning()
        if self.count:
            self._continue()
            for callback in self._callbacks_with("on_run_continued"):
                callback.on_run_continued(trainer, self)
        else:
            self.warm_up()
            self.count_steps()
        trainer.should_stop |= self.finished or any_rank_must_stop(trainer)
        self._begin_iteration()

    @property
    def log_every(self) -> int:
        """Return how many counts lie between two rows of metrics."""
        return max(1, self.length // 100)

    def _begin_iteration(self) -> None:
        """Give everything that is scheduled its value for the next iteration, before it is collected."""
        assert self.dataset is not None and self.collector is not None
        self.began_at = self.count
        self.progress = min(1.0, self.began_at / self.length)
        most = self.began_at + self.collector.n_steps * self.collector.num_envs * self.trainer.world_size
        self.log_rows.begin(math.inf if most >= self.length else most)
        self.schedule(self.progress)
        self.dataset.begin_iteration(self.began_at, self.progress)

    def end_iteration(self) -> None:
        """Finish an iteration before any callback: logging, acting, evaluating and saving see the same counts and statistics."""
        collector = self.collector
        assert self.dataset is not None and collector is not None
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()  # global_step counts iterations
        self.finish_learning()
        self.count_steps()
        if getattr(self.trainer, "log_every_n_steps", None) == 1:  # then it is only the x-axis of Lightning and of `self.log`
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
            self.log_rows.write(self.trainer, self, {**metrics, "train/n_updates": self.updates})
        for config in self.trainer.lr_scheduler_configs:  # a user's schedulers, once in `frequency` iterations
            if self.trainer.global_step % config.frequency == 0:
                self.lr_scheduler_step(config.scheduler, None)
        if self.finished:
            self.trainer.should_stop = True
        self.dataset.is_whole = True
        self._begin_iteration()

    def _print_notices(self, ranks: list[list[str]]) -> None:
        """Print the notices of ranks, and forget this rank's own."""
        for rank, notices in enumerate(ranks):
            for notice in notices:
                self.say(f"rank {rank}: {notice}" if rank else notice)
        self.notices = []

    def interrupt(self, abandons: bool) -> None:
        """Prepare for a save after an error: what an unfinished iteration has done counts, and its episodes are abandoned, as others are
        if the run `abandons` them."""
        assert self.dataset is not None
        if abandons or not self.dataset.is_whole:
            self.dataset.collector.interrupt()
            self.count_steps()

    def end_run(self) -> None:
        """Close the environments, after a run or an error."""
        if self.dataset is not None:
            counts = {name: torch.tensor(getattr(self, name)) for name in self.COUNTS}
            self.trainer.callback_metrics.update(counts)  # which Lightning brings back from processes that it spawned
            self.notices += self.take_notices()
            for notice in self.notices if self.global_rank else ():  # rank 0 may be gone
                print(printable(f"rank {self.global_rank}: {notice}"))
            self._print_notices([self.notices])
            self.dataset.collector.close()
            self.dataset = None
            self.end_learning()

    # ---------------------------------------------------------------- saving, loading and continuing

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, map_location: Any = "cpu", hparams_file: None = None, strict: bool = True, **overrides: Any
    ) -> Any:
        """Load the algorithm of a checkpoint, from the file alone; `overrides` are settings that win over the stored ones.

        Lightning's `weights_only` changes nothing: our checkpoints hold plain data only.
        """
        if hparams_file is not None or strict is False:
            raise SettingError(
                "load_from_checkpoint: a checkpoint holds its settings and all weights; trainer.fit(init_from=…) takes what fits"
            )
        overrides.pop("weights_only", None)
        return load(checkpoint_path, cls, Run, map_location, **overrides)

    def save_run(self, checkpoint: dict[str, Any]) -> None:
        """Add what a checkpoint of ours holds besides Lightning's entries."""
        counts = {name: getattr(self, name) for name in self.COUNTS}
        ranks = self._states_of_ranks() if self.saves_run and self.dataset is not None else []
        checkpoint["lightning_rl"] = {"format_version": self.format_version, **self.describe(), **counts, "ranks": ranks}

    def load_run(self, checkpoint: dict[str, Any]) -> None:
        """Continue the checkpoint's counts; a Trainer that continues its run gets everything else too, when training starts."""
        state = checkpoint["lightning_rl"]
        self.env_steps, self.updates, self.episodes = state["env_steps"], state["updates"], state["episodes"]
        self.ranks = state.get("ranks", []) if self.has_trainer else []
        stored = checkpoint.get("hyper_parameters", {}).get("env")
        self.changed_task = changed_task(stored, self.hparams.get("env")) if self.has_trainer else []

    def _states_of_ranks(self) -> list[Any]:
        """Return the state of each rank as plain data, known to all ranks."""
        assert self.dataset is not None
        run = {"num_envs": self.dataset.collector.num_envs, "data": self.dataset.get_state(), "log": self.log_rows.get_state()}
        own = to_plain({**run, **self.get_learning_state(), "random": random_state()})
        if self.trainer.world_size == 1:
            return [own]
        file = io.BytesIO()
        torch.save(own, file)  # the pickles of `all_gather_object` do not know all types of tensors
        return [torch.load(io.BytesIO(state), weights_only=True) for state in of_all_ranks(file.getvalue())]

    @property
    def own_state(self) -> State | None:
        """Return the state of this rank in the checkpoint that is continued; None where ranks or environments are others."""
        fits = len(self.ranks) == self.trainer.world_size and self.ranks[self.global_rank]["num_envs"] == self.num_envs
        return self.ranks[self.global_rank] if fits else None

    def _continue(self) -> None:
        """Become the run of the checkpoint, as far as it and the environments allow; say in one line what they do not.

        Raises:
            SettingError: what the checkpoint holds is not the state of such a run.
        """
        dataset, ranks, state, trainer = self.dataset, self.ranks, self.own_state, self.trainer
        assert dataset is not None
        new_episodes: str | None = "the checkpoint holds none of a run" if trainer.ckpt_path else "the model goes on learning in a new fit"
        if ranks:
            found, agents = f"{len(ranks)} x {ranks[0]['num_envs']}", " x agents" * (self.spaces.rows > 1)
            new_episodes = f"the checkpoint has {found} (ranks x env.num_envs{agents}), not {self.trainer.world_size} x {self.num_envs}"
        if state is None:
            if self.global_rank == 0:  # one rank continues the counts of all
                self.continue_counts()
            self.load_buffer(continues=False)
        else:
            try:
                new_episodes = self._set_state(to_arrays(state))
            except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
                reason = shorten(f"{type(error).__name__}: {error}", 80, placeholder=" …")
                raise SettingError(f"the checkpoint's run cannot be continued ({reason}); --init_from takes only its weights") from error
        if new_episodes is not None:
            self.say(f"{dataset.restart_notice}: {new_episodes}")
        if self.changed_task:
            what = "the best score so far and the statistics of episodes are those of another task, and forgotten"
            self.say(f"{', '.join(self.changed_task)} changed since the checkpoint: {what}")
            dataset.collector.statistics.clear()
            for callback in self._callbacks_with("on_environment_changed"):
                callback.on_environment_changed(trainer, self)
        self.ranks, self.changed_task = [], []

    def _set_state(self, state: State) -> str | None:
        """Restore the state of this rank. Return why environments start new episodes, if they do."""
        assert self.dataset is not None
        self.load_buffer()
        new_episodes = self.dataset.set_state(state["data"])
        self.log_rows.set_state(state["log"])
        self.set_learning_state(state)
        set_random_state(state["random"])
        return new_episodes

    def _agree_on_count(self) -> None:
        """Check that all ranks begin at the same count.

        Raises:
            SettingError: they do not, because they look into different folders.
        """
        counts = of_all_ranks(self.count) if self.trainer.world_size > 1 else []
        for rank, count in enumerate(counts):
            if count != counts[0]:
                begin = f"rank {rank} begins at {count:,} {self.counted} and rank 0 at {counts[0]:,}"
                raise SettingError(f"{begin}: all must find the same checkpoint, in a folder that their machines share")


def describe_refused_data(run: Run) -> str:
    """Return the line that refuses data from elsewhere."""
    return (
        f"{type(run).__name__} learns from its own experience: give fit no dataloaders and no datamodule, and return "
        "super().train_dataloader() from train_dataloader"
    )
