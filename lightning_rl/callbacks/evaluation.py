"""Judging the policy during a run, on environments of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytorch_lightning as pl
from pytorch_lightning.utilities.seed import isolate_rng

from lightning_rl.callbacks.checkpoints import check_interval, interval
from lightning_rl.callbacks.stopping import any_rank_asked, stop_asked, stop_early
from lightning_rl.data.episodes import Episode, EpisodePlayer
from lightning_rl.distributed import of_all_ranks
from lightning_rl.envs.config import EnvConfig, single_env_config
from lightning_rl.envs.make import make_env
from lightning_rl.errors import Interrupted, SettingError, check_range
from lightning_rl.loggers import CsvTable, log_row


@dataclass(frozen=True)
class EvaluationConfig:
    """How to judge the policy during the run.

    Args:
        every_n_env_steps: environment steps between evaluations; 5 % of the run unless given.
        episodes: how many episodes to play.
        seed: of the first episode; the others count up.
        num_envs: how many environments act together.
        deterministic: the middle of the policy (most likely choice, mean) instead of a draw.
        max_episode_steps: longest episode; the environment's own limit, or 10,000 where it has none, unless given.
        every_n_updates: the same as `every_n_env_steps` for runs that count updates.
        stop_at: end the run when the mean return reaches this.
        patience: end the run after so many evaluations in a row without improvement.
    """

    every_n_env_steps: int | None = None
    episodes: int = 10
    seed: int = 10_000
    num_envs: int = 10
    deterministic: bool = True
    max_episode_steps: int | None = None
    stop_at: float | None = None
    patience: int | None = None
    every_n_updates: int | None = None


class RolloutEvaluator(pl.Callback):
    """Plays episodes with fixed seeds every `every_n_env_steps` environment steps (or updates), and at the end of the run.

    Logs `eval/mean_reward`, `eval/std_reward`, `eval/mean_ep_length` and, where the environment tells, `eval/success_rate`, beside what the
    algorithm's `validate` finds; other callbacks hear of it through their `on_evaluation_end(trainer, algorithm, metrics)`. Learning is the
    same with and without it: networks keep their mode and the global random generators their state.

    Args:
        every_n_env_steps: environment steps between evaluations; 5 % of the run unless given.
        episodes: how many episodes to play.
        seed: of the first episode; the others count up.
        num_envs: how many environments act together.
        deterministic: the middle of the policy (most likely choice, mean) instead of a draw.
        max_episode_steps: longest episode; the environment's own limit, or 10,000 where it has none, unless given.
        env: builds the environment, settings or a function; the algorithm's own unless given.
        file: a CSV file for one row an episode.
        every_n_updates: the same as `every_n_env_steps` for runs that count updates.
    """

    def __init__(
        self,
        every_n_env_steps: int | None = None,
        episodes: int = 10,
        seed: int = 10_000,
        num_envs: int = 10,
        deterministic: bool = True,
        max_episode_steps: int | None = None,
        env: EnvConfig | Callable[[], gym.Env] | None = None,
        file: Path | None = None,
        every_n_updates: int | None = None,
    ) -> None:
        for name in ("every_n_env_steps", "every_n_updates", "episodes", "num_envs", "max_episode_steps"):
            if locals()[name] == 0 and not isinstance(locals()[name], bool):
                raise SettingError(f"evaluation.{name} must be at least 1, got 0; a run without evaluations has evaluation null")
            if locals()[name] is not None or name in ("episodes", "num_envs"):
                check_range(f"evaluation.{name}", locals()[name], 1, whole=True)
        check_range("evaluation.seed", seed, 0, whole=True)
        self.every_n_env_steps, self.every_n_updates = every_n_env_steps, every_n_updates
        self.episodes, self.seed = episodes, seed
        self.num_envs, self.deterministic, self.max_episode_steps = num_envs, deterministic, max_episode_steps
        self.env, self.file = env, file
        self.table: CsvTable | None = None
        self.wrappers: list[Callable[[gym.Env], gym.Env]] = []
        """What other callbacks put around each environment."""
        self.variants: dict[str, Callable[[gym.Env], gym.Env]] = {}
        """What is to be judged beside the environment as it is: a name each, and what goes around the environment."""
        self.evaluated_at, self.continues = 0, False
        self.reports_success = False
        """Whether any episode of the run, played here or learned from, has reported its success."""

    def part(self, rank: int, ranks: int) -> RolloutEvaluator | None:
        """An evaluator of a rank's share of the episodes; None where it has none.

        Rank 0 plays all of them where something looks on that must see all, or `play` is a subclass's own.
        """
        if self.wrappers or type(self).play is not RolloutEvaluator.play:
            return None if rank else self
        mine, begin, end = copy(self), rank * self.episodes // ranks, (rank + 1) * self.episodes // ranks
        mine.episodes, mine.seed = end - begin, self.seed + begin
        return mine if mine.episodes else None

    def play(
        self, algorithm: Any, stop: Callable[[], bool] = lambda: False, variant: Sequence[Callable[[gym.Env], gym.Env]] = ()
    ) -> list[Episode]:
        """The episodes of one evaluation, with a variant's wrappers around each environment.

        Raises:
            Interrupted: `stop` says so.
        """
        env = algorithm.env if self.env is None else self.env
        # new ones each time: what environments keep over their resets would make an evaluation depend on those before
        masked, num_envs = algorithm.spaces.masked, min(self.num_envs, self.episodes)
        player = make_player(env, num_envs, self.max_episode_steps, masked, [*variant, *self.wrappers])
        player.on_nan = getattr(algorithm, "on_nan", "raise")
        with closing(player), isolate_rng():
            return player.play(algorithm.network, self.episodes, self.seed, self.deterministic, stop)

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.variants, self.reports_success, self.continues = {}, False, False
        check_interval("evaluation", self, pl_module)
        check_can_be_built(pl_module.env if self.env is None else self.env)  # now, not after the first rollouts

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.table = None if self.file is None else CsvTable(self.file, pl_module.counter, pl_module.say)
        if not self.continues:
            self.evaluated_at = pl_module.count

    def on_run_continued(self, trainer: pl.Trainer, algorithm: Any) -> None:
        """Before a run that continues goes on: make the evaluation that was given up when it was stopped."""
        if self.continues:
            self.continues = False
            self._evaluate_if_due(trainer, algorithm)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._evaluate_if_due(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.evaluated_at != pl_module.count and not any_rank_asked(trainer):  # ended early: the final weights are judged too
            self.evaluate(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if self.table is not None:
            self.table.finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def _evaluate_if_due(self, trainer: pl.Trainer, algorithm: Any) -> None:
        every, count = interval(self, algorithm, 20), algorithm.count
        if count // every > self.evaluated_at // every or (algorithm.finished and self.evaluated_at != count):
            self.evaluate(trainer, algorithm)

    def evaluate(self, trainer: pl.Trainer, algorithm: Any) -> None:
        """Play, each rank its share, tell all, log, write the file, and call `on_evaluation_end`; given up if somebody asks to stop."""
        played: list[Any] = of_all_ranks(self._play_unless_stopped(trainer, algorithm))
        if None in played:
            return
        self.evaluated_at = algorithm.count
        episodes, *others = ([episode for part in parts for episode in part] for parts in zip(*played, strict=True))
        algorithm.collector.statistics.share_reports()
        self.reports_success |= algorithm.collector.statistics.reports_success or any(each.success is not None for each in episodes)
        if self.reports_success:  # an episode that does not report it is a failure
            episodes = [episode._replace(success=episode.success or 0.0) for episode in episodes]
        means = [float(np.mean([episode.return_ for episode in each])) for each in others]
        report(trainer, algorithm, episodes, dict(zip(self.variants, means, strict=True)), self.table)

    def _play_unless_stopped(self, trainer: pl.Trainer, algorithm: Any) -> list[list[Episode]] | None:
        """This rank's episodes, and then those in each variant."""
        mine, stop = self.part(trainer.global_rank, trainer.world_size), partial(stop_asked, trainer)
        if mine is None:
            return [[] for _ in range(1 + len(self.variants))]
        try:
            return [mine.play(algorithm, stop), *(mine.play(algorithm, stop, [wrapper]) for wrapper in self.variants.values())]
        except Interrupted:
            return None

    def state_dict(self) -> dict[str, Any]:
        return {"evaluated_at": self.evaluated_at, "reports_success": self.reports_success}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluated_at, self.continues = state_dict["evaluated_at"], True
        self.reports_success = state_dict.get("reports_success", False)

    @property
    def state_key(self) -> str:
        env = getattr(self.env, "id", self.env and getattr(self.env, "__qualname__", None))
        return self._generate_state_key(env=env, episodes=self.episodes, seed=self.seed, deterministic=self.deterministic)


class MultiEvaluator(RolloutEvaluator):
    """Several evaluators as one: their episodes are judged together, at the first one's rhythm.

    Args:
        evaluators: for instance one deterministic and one not, or one for each variant of the environment.
        file: a CSV file for one row an episode.
    """

    def __init__(self, evaluators: list[RolloutEvaluator], file: Path | None = None) -> None:
        if not evaluators:
            raise SettingError("MultiEvaluator needs at least one evaluator")
        first = evaluators[0]
        super().__init__(every_n_env_steps=first.every_n_env_steps, every_n_updates=first.every_n_updates, file=file)
        self.evaluators = evaluators

    def part(self, rank: int, ranks: int) -> RolloutEvaluator | None:
        parts = [part for part in (each.part(rank, ranks) for each in self.evaluators) if part is not None]
        return MultiEvaluator(parts) if parts else None

    def play(
        self, algorithm: Any, stop: Callable[[], bool] = lambda: False, variant: Sequence[Callable[[gym.Env], gym.Env]] = ()
    ) -> list[Episode]:
        return [episode for evaluator in self.evaluators for episode in evaluator.play(algorithm, stop, variant)]


def make_player(
    env: Any,
    num_envs: int,
    max_episode_steps: int | None,
    masked: bool = False,
    wrappers: Sequence[Callable[[gym.Env], gym.Env]] = (),
) -> EpisodePlayer:
    """A player for settings or for a function that builds one environment; it ends episodes at the given or the environment's own limit.

    `wrappers` go around each environment.

    Raises:
        SettingError: a ready vector environment, which cannot be built again.
    """
    check_can_be_built(env)
    make = partial(make_wrapped, single_env_config(env) if isinstance(env, EnvConfig) else env, wrappers)
    return EpisodePlayer(make, num_envs, max_episode_steps, masked)


def make_wrapped(env: EnvConfig | Callable[[], gym.Env], wrappers: Sequence[Callable[[gym.Env], gym.Env]]) -> gym.Env:
    """One environment in wrappers, the last one outside."""
    return reduce(lambda wrapped, wrapper: wrapper(wrapped), wrappers, make_env(env))


def check_can_be_built(env: Any) -> None:
    """Raise `SettingError` for a ready vector environment, which cannot be built again."""
    if not (isinstance(env, EnvConfig) or callable(env)):
        raise SettingError("evaluation cannot copy a ready vector environment; pass evaluation=None or an evaluator with env=")


def report(trainer: Any, algorithm: Any, episodes: list[Episode], variants: dict[str, float], table: CsvTable | None) -> None:
    """Log an evaluation with the mean returns in its variants, add its episodes to a table, and call `on_evaluation_end` of callbacks."""
    returns = [episode.return_ for episode in episodes]
    metrics = {
        "eval/mean_reward": float(np.mean(returns)),
        "eval/std_reward": float(np.std(returns)),
        "eval/mean_ep_length": float(np.mean([episode.length for episode in episodes])),
    }
    successes = [episode.success for episode in episodes if episode.success is not None]
    if successes:
        metrics["eval/success_rate"] = float(np.mean(successes))
    metrics |= {f"eval/mean_reward_{name}": mean for name, mean in variants.items()}
    metrics |= algorithm.validate()
    log_row(trainer, algorithm, metrics)
    if table is not None and trainer.is_global_zero:
        table.add(as_row(algorithm, episode) for episode in episodes)
    for callback in trainer.callbacks:
        if hasattr(callback, "on_evaluation_end"):
            callback.on_evaluation_end(trainer, algorithm, metrics)
    stop_early(trainer, algorithm, metrics)


def as_row(algorithm: Any, episode: Episode) -> dict[str, Any]:
    """An episode of an evaluation as a row: what the run counts, seed, return, length, success."""
    success = "" if episode.success is None else episode.success
    return {
        algorithm.counter: algorithm.count,
        "seed": episode.seed,
        "return": episode.return_,
        "length": episode.length,
        "success": success,
    }
