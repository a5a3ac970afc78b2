"""Curriculum learning: environment parameters that get harder, lesson by lesson, as the policy learns."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import pytorch_lightning as pl

from lightning_rl.callbacks import AlgorithmRun, callbacks_of
from lightning_rl.callbacks.evaluation import RolloutEvaluator, Wrapper
from lightning_rl.callbacks.self_play import SelfPlay
from lightning_rl.checkpoints.validation import COUNT, NUMBER, Rules
from lightning_rl.data.episodes import Finished
from lightning_rl.envs.config import EnvConfig, EnvSource
from lightning_rl.envs.lessons import CompletionCriteria, Parameter, as_parameters
from lightning_rl.errors import SettingError, nearest
from lightning_rl.processes.ranks import of_all_ranks
from lightning_rl.types import State

SMOOTHING = 0.25
"""The weight of the previous value in a smoothed measure."""
MAX_UNREPORTED_EPISODES = 100
"""Episodes without a reported success before a run with `measure: success` warns."""


class Curriculum(pl.Callback):
    """Move environment parameters from lesson to lesson, each by its own criteria.

    Runs add this callback automatically if `env.parameters` has lessons. An episode counts for a parameter if it plays the parameter's
    current lesson, on any rank. With several agents, the episodes of each agent count; with several learning behaviors, those of the
    behavior that the criteria name. Episodes are measured one by one, each for all parameters before any parameter advances, so that all
    ranks make the same decisions. A new lesson begins with the next episode of each environment, or immediately if the previous lesson had
    `require_reset`; it clears the windows of all parameters. Evaluations play the final lessons and, until those are reached, also the
    current ones, as `eval/mean_reward_lesson`. The metric `curriculum/<parameter>/lesson` counts from 0.

    Args:
        parameters: as in `env.parameters`.
    """

    state_rules: ClassVar[Rules] = {
        "lessons/*": COUNT,
        "smoothed/*": NUMBER,
        "windows/*/[]": NUMBER,
        "unreported?": COUNT.or_null(),
    }
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    optional_metrics = ("eval/mean_reward_lesson",)

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = {name: parameter for name, parameter in as_parameters(parameters).items() if len(parameter.lessons) > 1}
        if not self.parameters:
            raise SettingError("Curriculum: no parameter has lessons")
        self.begin()

    def begin(self) -> None:
        """Go to the first lessons."""
        self.lessons = dict.fromkeys(self.parameters, 0)
        self.smoothed = dict.fromkeys(self.parameters, 0.0)
        self.windows = {name: deque[float](maxlen=self.window(name)) for name in self.parameters}
        self.elos: dict[str, float] = {}
        """The self-play rating of each behavior; a single policy has the name ""."""
        self.unreported: int | None = 0
        """Number of episodes that were measured by success but did not report it; None once an episode has."""

    def criteria(self, name: str) -> CompletionCriteria | None:
        """Return the completion criteria of a parameter's current lesson; None for its last lesson."""
        parameter, lesson = self.parameters[name], self.lessons[name]
        return parameter.lessons[lesson].completion_criteria if lesson < len(parameter.lessons) - 1 else None

    def window(self, name: str) -> int:
        """Return the number of episodes over which a parameter's lesson is measured."""
        criteria = self.criteria(name)
        return 1 if criteria is None else criteria.window

    def setup(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        if pl_module.count == 0:  # else the model continues; a checkpoint is loaded later
            self.begin()
        if pl_module.counter != "env_steps":
            raise SettingError(f"Curriculum: {type(pl_module).__name__} steps no environments; remove the callback")
        env = pl_module.env  # what a class or function builds may be in `EnvParameters` already
        known = env.parameters if isinstance(env, EnvConfig) and env.is_registered else self.parameters
        for name in self.parameters.keys() - known.keys():
            raise SettingError(f"Curriculum: {name} is not in env.parameters{nearest(name, known)}")
        check_criteria(
            self.parameters,
            [name for name in pl_module.run.learners if name],
            [callback.behavior for callback in callbacks_of(trainer, SelfPlay)],
        )
        for name, parameter in self.parameters.items():
            if parameter.lessons[-1].completion_criteria is not None:
                pl_module.say(f"env.parameters.{name}: completion_criteria of the last lesson have no effect and are ignored")

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        self.send(trainer, pl_module)  # before the first reset

    def on_environment_changed(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Measure the current lessons again, from new episodes."""
        self.windows = {name: deque(maxlen=self.window(name)) for name in self.parameters}
        self.smoothed = dict.fromkeys(self.parameters, 0.0)

    def on_run_continued(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Send the lessons again: restored environments still have those with which their episodes began."""
        self.send(trainer, algorithm)

    def send(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Set the lessons of the next episodes, and those that evaluations play in addition to the final ones."""
        algorithm.collector.set_lessons({name: parameter.until(self.lessons[name]) for name, parameter in self.parameters.items()})
        variants: dict[str, Wrapper] = {"lesson": partial(with_lessons, self)} if any(map(self.criteria, self.parameters)) else {}
        for evaluator in callbacks_of(trainer, RolloutEvaluator):
            if evaluator.env is None:
                evaluator.variants = variants

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, outputs: object, batch: object, batch_idx: int) -> None:
        before, progress, reset = dict(self.lessons), pl_module.count / pl_module.length, False
        self.elos = {callback.behavior: callback.elo for callback in callbacks_of(trainer, SelfPlay)}
        for finished in of_all_ranks(pl_module.run.finished_episodes()):
            for behavior, episodes in finished.items():
                for episode in episodes:
                    reset |= self.add_episode(pl_module, episode, progress, behavior)
        current = {name: self.criteria(name) for name in self.parameters}
        by_progress = {name: criteria for name, criteria in current.items() if criteria is not None and criteria.measure == "progress"}
        reset |= self.advance(pl_module, by_progress, progress)  # progress grows without episodes too
        if self.lessons != before:
            self.send(trainer, pl_module)
        if reset:
            pl_module.collector.restart_episodes()

    def add_episode(self, algorithm: AlgorithmRun, episode: Finished, progress: float, behavior: str = "") -> bool:
        """Count an episode for the parameters whose current lesson it played; return whether a new lesson must begin immediately.

        `behavior`: the behavior that played it, if there are several.
        """
        measured: dict[str, CompletionCriteria] = {}
        for name, lesson in self.lessons.items():
            criteria = self.criteria(name)
            if criteria is not None and episode.lessons.get(name) == lesson and criteria.behavior in (None, behavior):
                self.windows[name].append((episode.success or 0.0) if criteria.measure == "success" else episode.return_)
                measured[name] = criteria
        if any(criteria.measure == "success" for criteria in measured.values()):
            self._count_unreported(algorithm, episode)
        return self.advance(algorithm, measured, progress)

    def _count_unreported(self, algorithm: AlgorithmRun, episode: Finished) -> None:
        """Warn once if no episode reports its success: the environment may report it only when it succeeds, or never."""
        if episode.success is not None:
            self.unreported = None
        elif self.unreported is not None:
            self.unreported += 1
            if self.unreported == MAX_UNREPORTED_EPISODES:
                algorithm.say(
                    f"env.parameters: none of the first {MAX_UNREPORTED_EPISODES} episodes reported is_success in its last info: "
                    "measure success counts them as failures; use reward or progress if none ever does"
                )

    def advance(self, algorithm: AlgorithmRun, measured: Mapping[str, CompletionCriteria], progress: float) -> bool:
        """Advance the parameters whose current lesson is learned; return whether a new lesson must begin immediately."""
        learned = []
        for name, criteria in measured.items():
            window, lessons, old = self.windows[name], self.parameters[name].lessons, self.lessons[name]
            elo = self.elos.get(criteria.behavior or "", math.nan)
            due, self.smoothed[name] = need_increment(criteria, progress, window, self.smoothed[name], elo)
            if due:
                learned.append(name)
                value = {"progress": progress, "elo": elo}.get(criteria.measure)
                if value is None:
                    value = self.smoothed[name] if criteria.signal_smoothing else mean(window)
                algorithm.say(
                    f"curriculum: {name} goes to lesson {old + 2} of {len(lessons)}, {lessons[old + 1].name} ({lessons[old + 1].value}): "
                    f"{criteria.measure} {value:.4g} > {criteria.threshold:g} in {lessons[old].name}, "
                    f"{len(window)} of {criteria.window} episodes, at {algorithm.count:,} environment steps"
                )
        for name in learned:
            self.lessons[name] += 1
        if learned:
            self.windows = {name: deque(maxlen=self.window(name)) for name in self.parameters}
        return any(measured[name].require_reset for name in learned)

    def run_metrics(self) -> dict[str, float]:
        """Return the metrics for the rows of the log."""
        return {f"curriculum/{name}/lesson": float(lesson) for name, lesson in self.lessons.items()}

    def in_short(self) -> str:
        """Return the text for the progress bar."""
        return ", ".join(f"{name} {lesson + 1}/{len(self.parameters[name].lessons)}" for name, lesson in self.lessons.items())

    def finals(self) -> str:
        """Describe the final lessons, in which a policy is evaluated."""
        return ", ".join(
            f"{name} {parameter.lessons[-1].name} ({parameter.lessons[-1].value})" for name, parameter in self.parameters.items()
        )

    def state_dict(self) -> State:
        windows = {name: list(window) for name, window in self.windows.items()}
        return {"lessons": dict(self.lessons), "smoothed": dict(self.smoothed), "windows": windows, "unreported": self.unreported}

    def load_state_dict(self, state_dict: State) -> None:
        self.unreported = state_dict.get("unreported", 0)
        for name in self.parameters.keys() & state_dict["lessons"].keys():
            self.lessons[name] = min(state_dict["lessons"][name], len(self.parameters[name].lessons) - 1)
            self.smoothed[name] = state_dict["smoothed"][name]
            self.windows[name] = deque(state_dict["windows"][name], self.window(name))


def need_increment(
    criteria: CompletionCriteria, progress: float, window: Sequence[float], smoothed: float, elo: float = math.nan
) -> tuple[bool, float]:
    """Return whether a lesson is learned, and the new smoothed measure; called once for each episode that ended in the lesson.

    Follows ML-Agents' function of the same name. `window` holds the returns or successes of the last episodes. The smoothed measure is a
    quarter of its previous value plus three quarters of the window's mean. It starts at 0, as in ML-Agents, or at the mean if the mean is
    negative, for which 0 would be a success. An Elo rating is not smoothed again.
    """
    if len(window) < criteria.min_lesson_length:
        return False, smoothed
    if criteria.measure == "progress":
        return progress > criteria.threshold, smoothed
    if criteria.measure == "elo":
        return elo > criteria.threshold, smoothed
    measure = mean(window)
    if math.isnan(measure):
        return False, smoothed
    if criteria.signal_smoothing:
        measure = smoothed = SMOOTHING * (smoothed or min(measure, 0.0)) + (1 - SMOOTHING) * measure
    return measure > criteria.threshold, smoothed


def mean(window: Sequence[float]) -> float:
    """Return the mean; NaN for an empty window."""
    return sum(window) / len(window) if window else math.nan


def with_lessons(curriculum: Curriculum, env: gym.Env) -> gym.Env:
    """Make an environment play the current lessons, if it has parameters."""
    if env.has_wrapper_attr("set_lessons"):
        env.get_wrapper_attr("set_lessons")(
            {name: parameter.only(curriculum.lessons[name]) for name, parameter in curriculum.parameters.items()}
        )
    return env


def check_criteria(parameters: Mapping[str, Parameter], behaviors: Sequence[str], rated: Sequence[str]) -> None:
    """Raise `SettingError` for criteria that a run cannot evaluate.

    Args:
        behaviors: the names of the learning behaviors; empty for a single policy, which has no name.
        rated: the names of the behaviors with a self-play rating; "" for a single policy.
    """
    for name, parameter in parameters.items():
        for number, lesson in enumerate(parameter.lessons[:-1]):
            criteria, place = lesson.completion_criteria, f"env.parameters.{name}.curriculum[{number}].completion_criteria"
            if criteria is None:
                continue
            if criteria.behavior is not None and not behaviors:
                raise SettingError(f"{place}.behavior {criteria.behavior!r}: this run has one policy, without a name; remove it")
            if criteria.behavior is not None and criteria.behavior not in behaviors:
                hint = nearest(criteria.behavior, behaviors)
                raise SettingError(f"{place}.behavior {criteria.behavior!r} is not a learning behavior{hint}")
            if criteria.behavior is None and len(behaviors) > 1 and criteria.measure != "progress":
                raise SettingError(f"{place}.behavior is missing: several behaviors learn; name one of {', '.join(behaviors)}")
            if criteria.measure == "elo" and (criteria.behavior or "") not in rated:
                whose = criteria.behavior or "the algorithm"
                raise SettingError(f"{place}.measure elo needs self_play of {whose}; use reward, progress or success")


def make_curriculum(env: EnvSource) -> list[Curriculum]:
    """Return the callback for an environment's settings, if they have lessons."""
    settings = env.parameters if isinstance(env, EnvConfig) else {}
    lessons = {name: settings[name] for name, parameter in as_parameters(settings).items() if len(parameter.lessons) > 1}
    return [Curriculum(lessons)] if lessons else []
