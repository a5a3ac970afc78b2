"""Evaluate the policy during a run, on separate environments."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.trainer.states import RunningStage, TrainerFn
from pytorch_lightning.utilities.seed import isolate_rng

from lightning_rl.callbacks import AlgorithmRun, callbacks_of
from lightning_rl.callbacks.checkpoints import BestModel, interval_of
from lightning_rl.callbacks.self_play import SelfPlay
from lightning_rl.callbacks.stopping import StopOnEvaluation, any_rank_must_stop, check_monitors, is_monitored, must_stop
from lightning_rl.checkpoints.validation import MEASURE, Rules
from lightning_rl.data.episodes import MAX_EPISODE_STEPS, Episode, EpisodePlayer, rates_of, returns_of_parts
from lightning_rl.data.opponents import Script, explain_unsaved, find_exploitability, name_opponent
from lightning_rl.data.players import Wrapper, check_can_be_built, check_shapes, make_player
from lightning_rl.envs.config import Env, EnvConfig, as_config
from lightning_rl.envs.make import describe_wrappers
from lightning_rl.envs.unity.settings import EDITOR
from lightning_rl.errors import MAX_SEED, RunStoppedError, SettingError
from lightning_rl.loggers import CsvTable, show_to_callbacks
from lightning_rl.processes.ranks import of_all_ranks
from lightning_rl.settings.fields import Range, read_fields
from lightning_rl.spaces import as_spaces
from lightning_rl.types import State

OF_EVALUATIONS, OF_TRAINING = "eval/mean_reward", "rollout/ep_rew_mean"
"""The mean return in evaluations, and that of the last episodes of training."""


@dataclass(frozen=True)
class EvaluationConfig:
    """How to evaluate the policy during the run.

    Args:
        every_n_env_steps: environment steps between evaluations; default: 5 % of the run, or more if `max_share` requires it.
        episodes: number of episodes to play.
        seed: seed of the first episode; the others count up.
        num_envs: number of environments that are stepped together.
        deterministic: take the most likely choice or the mean of the policy instead of a sample.
        max_episode_steps: maximum length of an episode; default: the environment's own limit, or 10,000 if it has none.
        every_n_updates: the same as `every_n_env_steps` for runs that count updates.
        opponent: who plays the other seats of a game: `random`, a run's folder, or the path of a scripted player (in Python also the
            function).
        stop_at: end the run when the mean return reaches this.
        patience: end the run after this many evaluations in a row without improvement.
        max_share: without an interval, evaluations are delayed so that together they play at most this share of the run's environment
            steps; the last weights are always evaluated.
    """

    every_n_env_steps: Annotated[int, Range(1)] | None = None
    episodes: Annotated[int, Range(1)] = 5
    seed: Annotated[int, Range(0, MAX_SEED)] = 10_000
    num_envs: Annotated[int, Range(1)] = 10
    deterministic: bool = True
    max_episode_steps: Annotated[int, Range(1)] | None = None
    stop_at: float | None = None
    patience: int | None = None
    every_n_updates: Annotated[int, Range(1)] | None = None
    opponent: str | Script = "random"
    max_share: Annotated[float, Range(0, open_low=True)] = 0.1

    def __post_init__(self) -> None:
        for name in ("every_n_env_steps", "every_n_updates", "max_episode_steps", "episodes", "num_envs"):
            if (value := getattr(self, name)) == 0 and value is not False:
                raise SettingError(f"evaluation.{name} must be at least 1, got 0; evaluation null turns evaluations off")
        read_fields(self, "evaluation.")


class RolloutEvaluator(pl.Callback):
    """Play episodes with fixed seeds every `every_n_env_steps` environment steps (or updates), and at the end of the run.

    The default interval is 5 % of the run. Evaluations are delayed if they would play more than `max_share` of the run's environment steps.
    They are then spread evenly over the run, and their cost is bounded whatever the length of episodes.

    Logs `eval/mean_reward`, `eval/std_reward`, `eval/mean_ep_length` and the metrics of the algorithm's `validate`; also
    `eval/success_rate` if the environment reports success, and `eval/exploitability` for small games. Other callbacks get the metrics in
    `on_evaluation_end(trainer, algorithm, metrics)`. Evaluation does not affect learning: networks keep their mode, and the global random
    generators keep their state.

    Args:
        env: the environment: its settings or, in Python, an id, or a class or function that builds it; default: the algorithm's.
        file: a CSV file with one row per episode.
        every_n_env_steps, episodes, seed, num_envs, deterministic, max_episode_steps, every_n_updates, opponent, max_share: as in
            `EvaluationConfig`.
    """

    state_rules: ClassVar[Rules] = {"evaluated_at": MEASURE}
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(
        self,
        every_n_env_steps: int | None = None,
        episodes: int = 5,
        seed: int = 10_000,
        num_envs: int = 10,
        deterministic: bool = True,
        max_episode_steps: int | None = None,
        env: Env | None = None,
        file: Path | None = None,
        every_n_updates: int | None = None,
        opponent: str | Script = "random",
        max_share: float = 0.1,
    ) -> None:
        played = (every_n_env_steps, episodes, seed, num_envs, deterministic, max_episode_steps)
        config = EvaluationConfig(*played, every_n_updates=every_n_updates, max_share=max_share)  # which checks them
        self.every_n_env_steps, self.every_n_updates, self.max_share = config.every_n_env_steps, config.every_n_updates, config.max_share
        self.episodes, self.seed, self.num_envs = config.episodes, config.seed, config.num_envs
        self.deterministic, self.max_episode_steps = config.deterministic, config.max_episode_steps
        self.env, self.file = None if env is None else as_config(env), file
        self.opponent = name_opponent("evaluation.opponent", opponent)
        self.table: CsvTable | None = None
        self.wrappers: list[Wrapper] = []
        """Wrappers with which other callbacks watch each environment; variants are played without them."""
        self.variants: dict[str, Wrapper] = {}
        """Wrappers by name; the policy is also evaluated under each of them, in addition to the environment as it is."""
        self.evaluated_at, self.evaluations, self.continues, self.hinted = 0, 0, False, False
        self.is_off = False
        """Whether there are no evaluations: those of a Unity scene need an interval."""
        self.played, self.last_played = 0, 0
        """Environment steps of all evaluations of the run, and of the last one."""
        self.played_now: list[list[Episode]] = []
        """The finished episodes of the newest evaluation: lists that its players fill, one of each variant."""
        self.reports_success = False
        """Whether any episode of the run, in evaluation or training, has reported its success."""

    def part(self, rank: int, ranks: int) -> "RolloutEvaluator | None":
        """Return an evaluator for a rank's share of the episodes; None if its share is empty.

        Rank 0 plays all of them if there are wrappers, which must see them all, or if a subclass overrides `play`.
        """
        if self.wrappers or type(self).play is not RolloutEvaluator.play:
            return None if rank else self
        mine, begin, end = copy(self), rank * self.episodes // ranks, (rank + 1) * self.episodes // ranks
        mine.episodes, mine.seed = end - begin, self.seed + begin
        return mine if mine.episodes else None

    def play(self, algorithm: AlgorithmRun, stop: Callable[[], bool] = lambda: False, variant: Sequence[Wrapper] = ()) -> list[Episode]:
        """Play the episodes of one evaluation in environments with a variant's wrappers; raise `RunStoppedError` when `stop()` is true."""
        # new environments each time: state that survives resets would make an evaluation depend on earlier ones
        num_envs = min(self.num_envs, self.episodes)
        named = self.opponent != "random"
        opponent = algorithm.make_opponent(self.opponent, num_envs * len(algorithm.spaces.agents)) if named else None
        env = algorithm.run.current_env if self.env is None else self.env
        wrappers = variant or self.wrappers  # wrappers that watch see the environment as it is
        try:
            player = make_player(env, num_envs, self.max_episode_steps, algorithm.spaces, wrappers, opponent)
        except SettingError as error:
            if not (algorithm.has_trainer and algorithm.trainer.state.fn == TrainerFn.FITTING):
                raise
            raise type(error)(f"{error}; an evaluation builds {num_envs} of its own; --evaluation null turns it off") from error
        player.on_nan = getattr(algorithm, "on_nan", "raise")
        self.played_now[:] = [*(self.played_now if variant else ()), player.finished]
        inference = algorithm.has_trainer and algorithm.trainer.validate_loop.inference_mode
        with closing(player), isolate_rng(), torch.inference_mode(inference):
            if self.env is not None and isinstance(player, EpisodePlayer):
                check_shapes(as_spaces(player.envs[0].observation_space, player.envs[0].action_space), algorithm.spaces)
            return player.play(algorithm.network, self.episodes, self.seed, self.deterministic, stop)

    def count_episodes(self, trainer: pl.Trainer) -> tuple[int, int]:
        """Return how many episodes of this rank's share of the current evaluation have finished, and their total."""
        mine = self.part(trainer.global_rank, trainer.world_size)
        return sum(map(len, self.played_now)), 0 if mine is None else mine.episodes * (1 + len(self.variants))

    def check(self, algorithm: AlgorithmRun) -> None:
        """Raise `SettingError` if the environment cannot be built for an evaluation, or the opponent does not exist or fit."""
        env = check_can_be_built(algorithm.env if self.env is None else self.env)
        if isinstance(env, EnvConfig) and env.is_unity:
            if self.is_off:
                more = "best.ckpt follows training's return; for evaluations set evaluation.every_n_env_steps"
                return algorithm.say(f"no evaluations: {env.name} plays no episodes from seeds; {more}")
            if not algorithm.spaces.agents:
                raise SettingError("evaluation: a scene with a policy for each behavior plays no episodes; leave every_n_env_steps out")
            if env.name == EDITOR:
                raise SettingError("evaluation: Unity's editor is one player, which trains; evaluate the run when it has ended")
        for line in () if self.env is None else describe_wrappers(self.env):
            algorithm.say(f"in evaluations: {line}")
        if self.opponent != "random":
            algorithm.make_opponent(self.opponent, 1)
        if (unsaved := explain_unsaved(self.opponent)) is not None:
            algorithm.say(unsaved)

    def setup(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        number = len(callbacks_of(trainer, RolloutEvaluator))
        if number > 1 and any(isinstance(callback, BestModel | StopOnEvaluation) for callback in callbacks_of(trainer, object)):
            mixed = "best.ckpt and patience would treat them as one series"
            raise SettingError(f"{number} evaluators: {mixed}; combine them, MultiEvaluator([RolloutEvaluator(…), …])")
        self.variants, self.reports_success, self.continues = {}, False, False
        env = pl_module.env if self.env is None else self.env
        self.is_off = getattr(env, "is_unity", False) and self.every_n_env_steps is None and self.every_n_updates is None
        if self.is_off:
            if callbacks_of(trainer, StopOnEvaluation):
                raise SettingError("evaluation.stop_at and evaluation.patience need evaluation.every_n_env_steps with a scene of Unity")
            for saver in callbacks_of(trainer, BestModel):
                saver.monitor = OF_TRAINING if saver.monitor == OF_EVALUATIONS else saver.monitor
        self.interval = interval_of("evaluation", self, pl_module, 20)
        self.check(pl_module)  # fail now, not after the first rollouts

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        self.table = None if self.file is None else CsvTable(self.file, pl_module.counter, pl_module.say)
        if not self.continues:
            self.evaluated_at, self.evaluations, self.played, self.last_played = pl_module.count, 0, 0, 0

    def on_environment_changed(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Forget that episodes of another task reported their success."""
        self.reports_success = False

    def on_run_continued(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Repeat the evaluation that was interrupted when the run was stopped."""
        if self.continues:
            self.continues = False
            self._evaluate_if_due(trainer, algorithm)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, outputs: object, batch: object, batch_idx: int) -> None:
        self._evaluate_if_due(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        if self.evaluated_at != pl_module.count and not any_rank_must_stop(trainer):  # ended early: the final weights are evaluated too
            self._compare(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        if self.table is not None:
            self.table.finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: AlgorithmRun, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def _evaluate_if_due(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        count, last = algorithm.count, self.evaluated_at
        due = count // self.interval > last // self.interval and (self.is_off or self.affords_one(trainer, algorithm))
        if due or (algorithm.finished and last != count):
            self._compare(trainer, algorithm)

    def _compare(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Evaluate, or without evaluations let the best weights be those with the highest mean return in training.

        In self-play they are the newest: a return against oneself does not measure skill.
        """
        if not self.is_off:
            return self.evaluate(trainer, algorithm)
        self.evaluated_at = algorithm.count
        metrics = {OF_TRAINING: -math.inf, **algorithm.collector.metrics()}  # the newest are the best until an episode has ended
        if callbacks_of(trainer, SelfPlay):
            metrics[OF_TRAINING] = -math.inf
        for saver in callbacks_of(trainer, BestModel):
            saver.on_evaluation_end(trainer, algorithm, trainer.strategy.broadcast(metrics))

    def is_bounded(self, algorithm: AlgorithmRun) -> bool:
        """Return whether `max_share` applies: in a run that counts environment steps, without an interval."""
        return algorithm.counter == "env_steps" and self.every_n_env_steps is None

    def affords_one(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> bool:
        """Return whether `max_share` allows the environment steps of an evaluation now and of one at the end.

        An evaluation is expected to play as many steps as the last one, or as its episodes would at their mean length in training if that
        is more.
        """
        if not self.is_bounded(algorithm):
            return True
        in_training = trainer.strategy.broadcast(self.episodes * algorithm.collector.statistics.mean_length)
        expected = max(in_training * algorithm.spaces.rows * (1 + len(self.variants)), self.last_played)
        now, at_end = self.max_share * algorithm.count, self.max_share * algorithm.length
        return self.played + expected <= now and self.played + 2 * expected <= at_end

    def evaluate(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Play each rank's share, log, write the file, and call `on_evaluation_end`; record nothing if a rank is asked to stop.

        To Lightning's callbacks and the module's hooks this is a validation. What they change at its start is what is evaluated, such as
        weights replaced by their average; what they log up to `on_validation_epoch_end` becomes a metric of the evaluation.
        """
        metrics = None
        with run_as_validation(trainer, algorithm) as logged:
            call_hooks(trainer, algorithm, "on_validation_start", "on_validation_epoch_start")
            try:
                metrics = self._measure(trainer, algorithm)
            finally:  # after an interrupted evaluation, only undo the averaging of weights
                call_hooks(trainer, algorithm, "on_validation_epoch_end", only=object if metrics is not None else WeightAveraging)
        if metrics is None:
            return
        monitored, row = trainer.strategy.broadcast((logged["callback"], logged["log"]))  # so that all ranks make the same decisions
        algorithm.run.log_row(metrics | row)
        metrics |= monitored
        show_to_callbacks(trainer, monitored)
        played = algorithm.run.parameter_values
        for callback in callbacks_of(trainer, object):
            if hasattr(callback, "on_evaluation_end"):
                callback.on_evaluation_end(trainer, algorithm, metrics)
        if algorithm.run.parameter_values is not played:  # later callbacks have remembered this evaluation, which is of another task now
            algorithm.run.begin_task()
        absent = check_monitors(trainer, metrics)
        with run_as_validation(trainer, algorithm):
            call_hooks(trainer, algorithm, "on_validation_end", without=absent)

    def _measure(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> dict[str, float] | None:
        """Play the episodes and return their metrics; None if a rank is asked to stop."""
        ranks = of_all_ranks(self._play_share(trainer, algorithm))
        played = [part for part in ranks if part is not None]
        if len(played) < len(ranks):  # a rank was asked to stop
            return None
        self.evaluated_at, self.evaluations = algorithm.count, self.evaluations + 1
        steps = sum(episode.length for parts in played for part in parts for episode in part)
        self.last_played = steps * algorithm.spaces.rows
        self.played += self.last_played
        episodes, *others = ([episode for part in parts for episode in part] for parts in zip(*played, strict=True))
        if not (self.hinted or self.max_episode_steps) and any(episode.length == MAX_EPISODE_STEPS for episode in episodes):
            self.hinted = True
            way_out = "evaluation.max_episode_steps ends them earlier, env.max_episode_steps also those of training"
            algorithm.say(f"hint: episodes of the evaluation were truncated after {MAX_EPISODE_STEPS:,} steps; {way_out}")
        statistics = algorithm.collector.statistics
        statistics.share_reports()
        self.reports_success |= statistics.reports_success or any(episode.success is not None for episode in episodes)
        if not self.reports_success and is_monitored(trainer, "eval/success_rate"):
            self.reports_success = True
            algorithm.say("no episode has reported is_success in its last info: eval/success_rate, which is monitored, is 0 until one does")
        if self.reports_success:  # an episode that does not report it counts as a failure
            episodes = [episode._replace(success=episode.success or 0.0) for episode in episodes]
        metrics = metrics_of(episodes)
        for name, other in zip(self.variants, others, strict=True):
            metrics[f"eval/mean_reward_{name}"] = float(np.mean([episode.return_ for episode in other]))
        env = algorithm.env if self.env is None else self.env
        known = find_exploitability(env, algorithm.spaces, algorithm.network, self.deterministic)
        metrics |= {f"eval/{name}": value for name, value in known.items()} | algorithm.run.validate()
        show_to_callbacks(trainer, metrics)
        if self.table is not None and trainer.is_global_zero:
            self.table.add(
                {algorithm.counter: algorithm.count, "seed": e.seed, "return": e.return_, "length": e.length, "success": e.success}
                | {f"{part}/return": value for part, value in e.parts.items()}
                for e in episodes
            )
        return metrics

    def _play_share(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> list[list[Episode]] | None:
        """Return this rank's episodes, then those in each variant; None if it was asked to stop."""
        mine, stop = self.part(trainer.global_rank, trainer.world_size), partial(must_stop, trainer)
        if mine is None:
            return [[] for _ in range(1 + len(self.variants))]
        try:
            return [mine.play(algorithm, stop), *(mine.play(algorithm, stop, [wrapper]) for wrapper in self.variants.values())]
        except RunStoppedError:
            return None

    def state_dict(self) -> State:
        names = ("evaluated_at", "evaluations", "played", "last_played", "reports_success")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: State) -> None:
        self.evaluated_at, self.continues = state_dict["evaluated_at"], True
        self.reports_success, self.evaluations = state_dict.get("reports_success", False), state_dict.get("evaluations", 0)
        self.played, self.last_played = state_dict.get("played", 0), state_dict.get("last_played", 0)  # 0.1.0 did not count them

    @property
    def state_key(self) -> str:
        given = getattr(self.env, "id", self.env)
        env = given if isinstance(given, str) else getattr(given, "__qualname__", None)
        settings = {"env": env, "episodes": self.episodes, "seed": self.seed, "deterministic": self.deterministic}
        return f"{type(self).__qualname__}{settings if self.opponent == 'random' else settings | {'opponent': self.opponent}}"


class MultiEvaluator(RolloutEvaluator):
    """Combine several evaluators: their episodes are evaluated together, at the interval of the first one.

    Args:
        evaluators: for example a deterministic and a stochastic one, or one for each variant of the environment.
        file: a CSV file with one row per episode.
    """

    def __init__(self, evaluators: list[RolloutEvaluator], file: Path | None = None) -> None:
        if not evaluators or not all(isinstance(evaluator, RolloutEvaluator) for evaluator in evaluators):
            raise SettingError(f"MultiEvaluator takes a list of at least one evaluator, such as [RolloutEvaluator()], got {evaluators!r}")
        first = evaluators[0]
        super().__init__(first.every_n_env_steps, every_n_updates=first.every_n_updates, max_share=first.max_share, file=file)
        self.evaluators, self.episodes = evaluators, sum(evaluator.episodes for evaluator in evaluators)
        self.deterministic = any(evaluator.deterministic for evaluator in evaluators)

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{{'env': None, 'episodes': 10, 'seed': 10000, 'deterministic': True}}"  # as in old checkpoints

    def check(self, algorithm: AlgorithmRun) -> None:
        for evaluator in self.evaluators:
            evaluator.check(algorithm)

    def part(self, rank: int, ranks: int) -> RolloutEvaluator | None:
        parts = [part for part in (evaluator.part(rank, ranks) for evaluator in self.evaluators) if part is not None]
        return MultiEvaluator(parts) if parts else None

    def play(self, algorithm: AlgorithmRun, stop: Callable[[], bool] = lambda: False, variant: Sequence[Wrapper] = ()) -> list[Episode]:
        return [episode for evaluator in self.evaluators for episode in evaluator.play(algorithm, stop, variant)]

    def count_episodes(self, trainer: pl.Trainer) -> tuple[int, int]:
        played, total = map(sum, zip(*(evaluator.count_episodes(trainer) for evaluator in self.evaluators), strict=True))
        return played, total * (1 + len(self.variants))


def metrics_of(episodes: Sequence[Episode], group: str = "eval") -> dict[str, float]:
    """Return the metrics of an evaluation, `<group>/mean_reward` and others, with a success rate if any episode reports its success."""
    returns = [episode.return_ for episode in episodes]
    metrics = {
        "mean_reward": float(np.mean(returns)),
        "std_reward": float(np.std(returns)),
        "mean_ep_length": float(np.mean([episode.length for episode in episodes])),
        **rates_of(episodes),
    }
    for part, values in returns_of_parts(episodes).items():
        metrics[f"{part}/mean_reward"] = float(np.mean(values))
    return {f"{group}/{name}": value for name, value in metrics.items()}


@contextmanager
def run_as_validation(trainer: pl.Trainer, module: Any) -> Iterator[dict[str, dict[str, float]]]:
    """Put the Trainer into its validation stage, in which hooks may log, even at the end of a run.

    Yield a dict that is filled with their metrics on exit: `log` for the row of the log, `callback` for callbacks.
    """
    logged: dict[str, dict[str, float]] = {}
    stage, hook = trainer.state.stage, module._current_fx_name
    trainer.state.stage = RunningStage.VALIDATING
    results: Any = trainer._results
    results.clear()
    try:
        yield logged
        metrics = results.metrics(on_step=False)
        for group in ("log", "callback"):
            logged[group] = {name: float(value) for name, value in metrics[group].items()}
        trainer.progress_bar_metrics.update(metrics["pbar"])
    finally:
        results.reset()
        results.clear()
        trainer.state.stage, module._current_fx_name = stage, hook


def begin_hook(module: Any, hook: str) -> None:
    """Make `module.log` treat its next calls as made in a hook of Lightning."""
    module._current_fx_name = hook


def call_hooks(trainer: pl.Trainer, module: Any, *hooks: str, only: type = object, without: Sequence[object] = ()) -> None:
    """Call hooks of Lightning in callbacks and then in the module, except in its progress bars, which would show batches.

    `only`: the class of the objects to call.  without: callbacks to skip.
    """
    for hook in hooks:
        begin_hook(module, hook)
        for callback in [*callbacks_of(trainer, only), *([module] if isinstance(module, only) else [])]:
            if (
                callback not in without
                and hasattr(callback, hook)
                and not any(base.__name__ == "ProgressBar" for base in type(callback).__mro__)
            ):
                getattr(callback, hook)(*(() if callback is module else (trainer, module)))
