"""What a run is to Lightning: its hooks in their order, what it counts, and what is saved of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property, partial, wraps
from typing import Any, ClassVar, Self

import pytorch_lightning as pl
import torch
from torch import Generator, Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_rl.callbacks.curriculum import Curriculum, make_curriculum
from lightning_rl.callbacks.iteration import EndIteration, EndRun, TargetNetworkUpdate, callbacks_before
from lightning_rl.callbacks.stopping import any_rank_asked, stop_asked
from lightning_rl.compiling import CompiledLoss, compiled_losses
from lightning_rl.data.collector import Collector
from lightning_rl.data.dataset import ExperienceDataset
from lightning_rl.distributed import merge_metrics, of_all_ranks
from lightning_rl.errors import SettingError, printable
from lightning_rl.nan_policy import Guard
from lightning_rl.optimization import FlatOptimizer, best_matmul
from lightning_rl.schedules import Schedule
from lightning_rl.spaces import Spaces
from lightning_rl.spaces import to_plain as space_to_plain
from lightning_rl.threads import one_thread
from lightning_rl.training.loading import stored_name
from lightning_rl.training.settings import check_names
from lightning_rl.training.side_learners import SideLearner, SignalLearner
from lightning_rl.training.state import RunLog, continue_run, run_states
from lightning_rl.types import Tree, tree_map


class Run(pl.LightningModule):
    """A run of an algorithm, which is what `Algorithm` adds: networks, settings, and what learning needs.

    One batch is one iteration; `global_step` counts iterations.
    """

    network: Any
    target_update: TargetNetworkUpdate | None = None
    """How target networks follow, if there are any."""
    counter = "env_steps"
    """What a run goes by, up to `max_<counter>`: its schedules, rows, evaluations and checkpoints."""
    min_optimizers = 1
    """How many optimizers its updates need."""
    COUNTS = ("env_steps", "updates", "episodes")
    env: Any
    spaces: Spaces
    guard: Guard
    on_nan: Any
    losses: ClassVar[tuple[str, ...]]
    discounts: Tensor
    ignore_done: Tensor
    compile: Any
    generator: Generator
    """Of the rank's draws while it learns."""
    seed: int
    learning_rate: Schedule
    given_arguments: tuple[tuple[Any, ...], dict[str, Any]]
    log_rows: RunLog
    normalize_obs: str
    normalize_obs_steps: int
    side_learners: list[SideLearner]
    signal_learner: SignalLearner

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_names(cls, kwargs)
        run = super().__new__(cls)
        object.__setattr__(run, "given_arguments", (args, kwargs))
        return run

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.env_steps = self.updates = self.episodes = 0
        self.progress, self.began_at = 0.0, 0
        """How far the run was when the iteration under way began, as a share of its length and as a count."""
        self.dataset: ExperienceDataset | None = None
        self.num_optimizers: int | None = None
        self.compiled: dict[str, CompiledLoss] = {}
        """Losses that stand in place of methods while the run lasts."""
        self.ranks: list[dict[str, Any]] = []
        self.saves_run = True
        """Whether checkpoints hold the run too, and not only what was learned."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls.configure_callbacks, "adds_own"):
            cls.configure_callbacks = adding_own(cls.configure_callbacks)  # type: ignore[method-assign]

    def experience(self) -> ExperienceDataset:
        """Which experience: the dataset whose items are iterations."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """How far the run is, all ranks together."""
        return int(getattr(self, self.counter))

    @property
    def length(self) -> int:
        """How far it goes."""
        return int(getattr(self, f"max_{self.counter}"))

    @property
    def counted(self) -> str:
        """What is counted, in words."""
        return self.counter.replace("env_", "environment ")

    @property
    def finished(self) -> bool:
        """Whether the run has its length."""
        return self.count >= self.length

    @property
    def collector(self) -> Collector | None:
        """What steps the environments of a run."""
        return None if self.dataset is None else self.dataset.collector

    @property
    def num_envs(self) -> int:
        """How many environments step at once."""
        return getattr(self.env, "num_envs", 8)

    def validate(self) -> dict[str, float]:
        """What else to judge with an evaluation, by data that is not learned from; the same on all ranks."""
        return {}

    def in_short(self) -> str:
        """How it goes, for the progress bar."""
        assert self.collector is not None
        mean = self.collector.statistics.metrics().get("rollout/ep_rew_mean")
        others = [callback.in_short() for callback in self._callbacks_with("in_short")]
        return " · ".join(["return –" if mean is None else f"return {mean:.1f}", *others])

    def _callbacks_with(self, method: str) -> list[Any]:
        trainer: Any = self.trainer
        return [callback for callback in trainer.callbacks if hasattr(callback, method)]

    def say(self, text: str) -> None:
        """One line for the user, from one rank."""
        if self.global_rank == 0:
            getattr(self.trainer, "say", print)(printable(text))

    def all_optimizers(self) -> list[Optimizer]:
        """The algorithm's and those beside it, without Lightning's wrappers, whose every step would count as a `global_step`."""
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        return optimizers if isinstance(optimizers, list) else [optimizers]

    def raw_optimizers(self) -> list[Optimizer]:
        """The algorithm's alone."""
        return self.all_optimizers()[: self.num_optimizers]

    @cached_property
    def curriculum(self) -> list[Curriculum]:
        """The lessons of its environments, which another `fit` goes on with."""
        return make_curriculum(self.env) if self.counter == "env_steps" else []

    def own_callbacks(self) -> list[pl.Callback]:
        """Return what a run itself needs, whatever Trainer runs it."""
        trainer: Any = self.trainer
        trainer.callbacks = before = callbacks_before(trainer.callbacks)
        target_update = [] if self.target_update is None else [self.target_update]
        replaceable = [each for each in (*self.curriculum, *target_update) if not has_kind(before, each)]
        return [EndIteration(), EndRun(before), *replaceable]

    # ---------------------------------------------------------------- Lightning's hooks, in their order

    def train_dataloader(self) -> ExperienceDataset:
        if self.dataset is not None:  # Lightning may ask again in each epoch, and the run goes on
            return self.dataset
        self.dataset = self.experience()
        for learner in self.side_learners:
            if learner.learns and self.num_optimizers is None:
                raise SettingError(f"{type(self).__name__}.configure_optimizers must return self.with_side_learners(optimizer, …)")
            learner.begin(self)
        return self.dataset

    def on_train_start(self) -> None:
        assert self.collector is not None
        one_thread()  # in processes that Lightning spawned too
        self._scaler = getattr(self.trainer.precision_plugin, "scaler", None) or GradScaler(enabled=False)
        trainer: Any = self.trainer
        self._agree_on_count()
        self._check_optimizers()
        folder = trainer.strategy.broadcast(getattr(trainer, "run_folder", None))
        self.guard = self.collector.guard = Guard(self.on_nan, folder, trainer.world_size)
        self.guard.begin(self, self.all_optimizers())
        self._followers = [callback for callback in trainer.callbacks if hasattr(callback, "on_update_end")]
        self._matmul = best_matmul(self.modules(), self.device)
        self.compiled = {name: loss for name, loss in compiled_losses(self).items() if name not in vars(self)}  # else it was replaced
        vars(self).update(self.compiled)  # in place of the methods
        self.noise = self.generator if self.device.type == "cpu" else Generator(self.device).manual_seed(self.seed)
        self.log_rows.start(self.count)
        if self.count:
            continue_run(self)
        self._counted_rows = self.collector.rows
        if not self.count:
            self.look_around()
        for callback in trainer.callbacks if self.count else []:
            if hasattr(callback, "on_run_continued"):
                callback.on_run_continued(trainer, self)
        trainer.should_stop = self.finished or any_rank_asked(trainer)

    def look_around(self) -> None:
        """Before a run's first iteration: the statistics that `normalize_obs: frozen` keeps, unless another run's came with its weights."""
        if self.normalize_obs == "frozen" and self.network.normalizer.is_new:
            assert self.collector is not None
            steps = self.normalize_obs_steps // self.trainer.world_size
            stop = partial(stop_asked, self.trainer) if self.trainer.world_size == 1 else lambda: False
            self.network.normalizer.update(self.collector.random_steps(steps, stop))
            self._count()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """An iteration begins: everything that is scheduled takes its value for it."""
        assert self.dataset is not None
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()  # global_step counts iterations
        self.began_at = self.count
        self.progress = min(1.0, self.began_at / self.length)
        self._count()
        self._schedule_learning_rate()
        collector = self.dataset.collector
        most = self.began_at + collector.n_steps * collector.num_envs * self.trainer.world_size
        self.log_rows.begin(math.inf if most >= self.length else most)
        self.dataset.begin_iteration(self.count, self.progress)

    def end_iteration(self) -> None:
        """After learning and before any callback: from here on logging, acting, judging and saving see the same counts and statistics."""
        assert self.dataset is not None
        for learner in self.side_learners:
            learner.end_iteration(self)
        self._count()
        collector = self.dataset.collector
        rollout = collector.rollout()
        self.network.normalizer.gather(rollout.obs, rollout.valid)
        self.dataset.end_iteration()
        self.guard.end_iteration()
        self._tell_notices()
        if self.log_rows.is_due(self.count) or self.finished:
            collector.statistics.share_reports()
            metrics = merge_metrics({**collector.metrics(), **self.dataset.metrics(), **self.guard.metrics(), **self.log_rows.means()})
            metrics |= {"rollout/episodes": self.episodes} if collector.rows else {}
            for callback in self._callbacks_with("run_metrics"):
                metrics |= callback.run_metrics()
            metrics["train/n_updates"] = self.updates
            rate = self._current_rate()
            metrics |= {} if rate is None else {"train/learning_rate": rate}
            self.log_rows.write(self.trainer, self, metrics)
        self._step_schedulers()
        if self.finished:
            self.trainer.should_stop = True

    def transfer_batch_to_device(self, batch: Tree, device: torch.device, dataloader_idx: int) -> Tree:
        return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)

    def configure_callbacks(self) -> Any:
        """Return more callbacks; those that a run needs are there in any case."""
        return []

    def end_run(self) -> None:
        """After a run or an error: close the environments."""
        if self.dataset is not None:
            counts = {name: torch.tensor(getattr(self, name)) for name in self.COUNTS}
            self.trainer.callback_metrics.update(counts)  # which Lightning brings back from processes that it spawned
            self._tell_notices()
            self.dataset.collector.close()
            self.dataset = None
            while self.compiled:
                delattr(self, self.compiled.popitem()[0])

    # ---------------------------------------------------------------- saving and loading

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lightning_rl"] = {
            "format_version": 1,
            "algorithm": stored_name(type(self)),
            "spaces": [space_to_plain(space) for space in self.spaces[:2]],
            "masked": self.spaces.masked,
            "env_steps": self.env_steps,
            "updates": self.updates,
            "episodes": self.episodes,
            "ranks": run_states(self) if self.saves_run and self.dataset is not None else [],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Count on where the checkpoint stood; a Trainer that continues its run gets everything else too, when training starts."""
        state = checkpoint["lightning_rl"]
        self.env_steps, self.updates, self.episodes = state["env_steps"], state["updates"], state["episodes"]
        self.ranks = [] if self._trainer is None else state.get("ranks", [])

    @property
    def own_state(self) -> dict[str, Any] | None:
        """What the checkpoint that is continued holds of this rank; None if it holds nothing, or has other ranks or environments."""
        fits = len(self.ranks) == self.trainer.world_size and self.ranks[self.global_rank]["num_envs"] == self.num_envs
        return self.ranks[self.global_rank] if fits else None

    # ---------------------------------------------------------------- inside

    def _tell_notices(self) -> None:
        """What befell the environments, and numbers that were none."""
        assert self.collector is not None
        for notice in (*self.collector.take_notices(), *self.guard.notices):
            self.say(notice)
        self.guard.notices.clear()

    def _schedule_learning_rate(self) -> None:
        """Set `learning_rate` for this iteration where no user's optimizer or scheduler says otherwise."""
        scheduled = [config.scheduler.optimizer for config in self.trainer.lr_scheduler_configs]
        rate = self.learning_rate(self.progress)
        for optimizer in self.raw_optimizers():
            if isinstance(optimizer, FlatOptimizer) and optimizer not in scheduled:
                for group in optimizer.param_groups:
                    group["lr"] = rate

    def _step_schedulers(self) -> None:
        """Step a user's schedulers once per iteration, or once in `frequency` iterations."""
        for config in self.trainer.lr_scheduler_configs:
            if self.trainer.global_step % config.frequency == 0:
                self.lr_scheduler_step(config.scheduler, None)

    def _check_optimizers(self) -> None:
        """Name a `learning_rate` that is not used.

        Raises:
            SettingError: there are too few optimizers, or a scheduler asks for a metric.
        """
        if (found := len(self.raw_optimizers())) < self.min_optimizers:
            name, needed = type(self).__name__, self.min_optimizers
            raise SettingError(
                f"{name} needs {needed} optimizers, got {found}: override configure_optimizers in a subclass, or leave it out"
            )
        if any(isinstance(config.scheduler, ReduceLROnPlateau) for config in self.trainer.lr_scheduler_configs):
            raise SettingError(
                "ReduceLROnPlateau needs a metric, and schedulers are stepped once per iteration without one; "
                "leave it out of configure_optimizers and step it in on_evaluation_end"
            )
        rate, setting = self._current_rate(), self.hparams.get("learning_rate")
        if rate not in (None, setting) and not isinstance(optimizer := self.raw_optimizers()[0], FlatOptimizer):
            own = f"{type(optimizer).__name__} of configure_optimizers has its own, {rate:g}"
            self.say(f"learning_rate {setting} is not used: {own}; FlatAdam follows it")

    def _current_rate(self) -> float | None:
        """Return the learning rate of the first optimizer; None where there is no optimizer or it has none."""
        groups = [group for optimizer in self.raw_optimizers()[:1] for group in getattr(optimizer, "param_groups", [])]
        return groups[0].get("lr") if groups else None

    def _agree_on_count(self) -> None:
        """All ranks must begin at the same place.

        Raises:
            SettingError: they do not, for they look into different folders.
        """
        counts = of_all_ranks(self.count) if self.trainer.world_size > 1 else []
        for rank, count in enumerate(counts):
            if count != counts[0]:
                begin = f"rank {rank} begins at {count:,} {self.counted} and rank 0 at {counts[0]:,}"
                raise SettingError(f"{begin}: all must find the same checkpoint, in a folder that their machines share")

    def _count(self) -> None:
        """The counts of all ranks together, where there is something new; all decisions use these numbers."""
        assert self.collector is not None
        if self.collector.rows == self._counted_rows:  # on all ranks alike
            return
        self._counted_rows = self.collector.rows
        counts = self.collector.env_steps, self.collector.statistics.episodes
        if self.trainer.world_size > 1:
            total = torch.tensor([*counts, self.guard.error is not None], dtype=torch.float64, device=self.device)
            torch.distributed.all_reduce(total)
            self.guard.agree(bool(total[2]))
            counts = int(total[0]), int(total[1])
        self.env_steps, self.episodes = counts


def adding_own(configure_callbacks: Callable[[Any], Any]) -> Any:
    """Make a `configure_callbacks` add to the callbacks that a run needs, whether it calls `super()` or not."""

    @wraps(configure_callbacks)
    def adding(self: Run) -> list[pl.Callback]:
        more = configure_callbacks(self) or []
        more = [more] if isinstance(more, pl.Callback) else list(more)
        return [*(each for each in self.own_callbacks() if not has_kind(more, each)), *more]

    adding.adds_own = True  # type: ignore[attr-defined]
    return adding


def has_kind(callbacks: Iterable[Any], callback: pl.Callback) -> bool:
    """Whether there is a callback of this kind."""
    return any(isinstance(each, type(callback)) for each in callbacks)
