"""Lessons: parameters of the environments that become harder as the policy learns."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import pytorch_lightning as pl

from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.data.episodes import Finished
from lightning_rl.distributed import of_all_ranks
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.lessons import CompletionCriteria, Parameter, as_parameters
from lightning_rl.errors import SettingError, nearest

SMOOTHING = 0.25
"""The share of what a smoothed measure was before an episode."""
PATIENCE = 100
"""Episodes without a reported success before a run with `measure: success` warns."""


class Curriculum(pl.Callback):
    """Moves parameters of the environments from lesson to lesson, each by its own criteria.

    Algorithms bring this callback themselves where `env.parameters` have lessons. Episodes count that play a parameter's current lesson,
    of all ranks; each is judged as it ended, for all parameters before any moves on, so that decisions are the same on every rank. A new
    lesson begins with the next episode of each environment, or at once where the one before had `require_reset`, and empties the windows
    of all parameters. Evaluations play the final lessons, and until those are reached the current ones beside them, as
    `eval/mean_reward_lesson`. The metric `curriculum/<parameter>/lesson` counts from 0.

    Args:
        parameters: as in `env.parameters`.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = {name: each for name, each in as_parameters(parameters).items() if len(each.lessons) > 1}
        if not self.parameters:
            raise SettingError("Curriculum: no parameter has lessons")
        self.lessons = dict.fromkeys(self.parameters, 0)
        self.smoothed = dict.fromkeys(self.parameters, 0.0)
        self.windows = {name: deque[float](maxlen=self.window(name)) for name in self.parameters}
        self.unreported: int | None = 0
        """Episodes that were measured by success before the first that reported it; None from then on."""

    def criteria(self, name: str) -> CompletionCriteria | None:
        """When the current lesson of a parameter is learned; None in its last one."""
        parameter, lesson = self.parameters[name], self.lessons[name]
        return parameter.lessons[lesson].completion_criteria if lesson < len(parameter.lessons) - 1 else None

    def window(self, name: str) -> int:
        """Over how many episodes a parameter's lesson is judged."""
        criteria = self.criteria(name)
        return 1 if criteria is None else criteria.window

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if pl_module.counter != "env_steps":
            raise SettingError(f"Curriculum: {type(pl_module).__name__} steps no environments; take the callback away")
        known = pl_module.env.parameters if isinstance(pl_module.env, EnvConfig) else self.parameters
        for name in self.parameters.keys() - known.keys():
            raise SettingError(f"Curriculum: {name} is not in env.parameters{nearest(name, known)}")
        for name, parameter in self.parameters.items():
            if parameter.lessons[-1].completion_criteria is not None:
                pl_module.say(f"env.parameters.{name}: completion_criteria of the last lesson mean nothing and are left out")

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.send(pl_module)  # before the first reset

    def on_run_continued(self, trainer: pl.Trainer, algorithm: Any) -> None:
        """After environments came back as they were saved: some with the lessons that their episode began with."""
        self.send(algorithm)

    def send(self, algorithm: Any) -> None:
        """Tell the environments which lessons to play from their next episodes on, and evaluations what to play beside the final ones."""
        algorithm.collector.set_lessons({name: each.until(self.lessons[name]) for name, each in self.parameters.items()})
        variants: dict[str, Any] = {"lesson": partial(with_lessons, self)} if any(map(self.criteria, self.parameters)) else {}
        for evaluator in algorithm.trainer.callbacks:
            if isinstance(evaluator, RolloutEvaluator) and evaluator.env is None:
                evaluator.variants = variants

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before, progress, reset = dict(self.lessons), pl_module.count / pl_module.length, False
        ranks = of_all_ranks([tuple(episode) for episode in pl_module.collector.statistics.finished])
        for episode in (Finished(*each) for rank in ranks for each in rank):
            reset |= self.judge(pl_module, episode, progress)
        current = {name: self.criteria(name) for name in self.parameters}
        by_progress = {name: each for name, each in current.items() if each is not None and each.measure == "progress"}
        reset |= self.advance(pl_module, by_progress, progress)  # which moves without an episode, too
        if self.lessons != before:
            self.send(pl_module)
        if reset:
            pl_module.collector.begin_anew()

    def judge(self, algorithm: Any, episode: Finished, progress: float) -> bool:
        """Count an episode for the parameters whose current lesson it played. Whether a new lesson is to begin at once."""
        judged: dict[str, CompletionCriteria] = {}
        for name, lesson in self.lessons.items():
            criteria = self.criteria(name)
            if criteria is not None and episode.lessons.get(name) == lesson:
                self.windows[name].append(measured(criteria, episode))
                judged[name] = criteria
        if any(criteria.measure == "success" for criteria in judged.values()):
            self.count_unreported(algorithm, episode)
        return self.advance(algorithm, judged, progress)

    def count_unreported(self, algorithm: Any, episode: Finished) -> None:
        """Warn once if no episode reports its success: the environment may do so only when it happens, or never."""
        if episode.success is not None:
            self.unreported = None
        elif self.unreported is not None:
            self.unreported += 1
            if self.unreported == PATIENCE:
                algorithm.say(
                    f"env.parameters: none of the first {PATIENCE} episodes reported is_success in its last info: measure success counts "
                    "them as failures; use reward or progress if none ever does"
                )

    def advance(self, algorithm: Any, judged: Mapping[str, CompletionCriteria], progress: float) -> bool:
        """Begin the next lesson of each of these parameters whose own is learned. Whether one is to begin at once."""
        learned = []
        for name, criteria in judged.items():
            window = self.windows[name]
            due, self.smoothed[name] = need_increment(criteria, progress, window, self.smoothed[name])
            if due:
                self.tell(algorithm, name, criteria, progress)
                learned.append(name)
        for name in learned:
            self.lessons[name] += 1
        if learned:
            self.windows = {name: deque(maxlen=self.window(name)) for name in self.parameters}
        return any(judged[name].require_reset for name in learned)

    def tell(self, algorithm: Any, name: str, criteria: CompletionCriteria, progress: float) -> None:
        """A line for a lesson that is learned."""
        window, lessons, old = self.windows[name], self.parameters[name].lessons, self.lessons[name]
        value = progress if criteria.measure == "progress" else self.smoothed[name] if criteria.signal_smoothing else mean(window)
        algorithm.say(
            f"curriculum: {name} goes to lesson {old + 2} of {len(lessons)}, {lessons[old + 1].name} ({lessons[old + 1].value}): "
            f"{criteria.measure} {value:.4g} > {criteria.threshold:g} in {lessons[old].name}, "
            f"{len(window)} of {criteria.window} episodes, at {algorithm.count:,} environment steps"
        )

    def run_metrics(self) -> dict[str, float]:
        """For the rows of the log."""
        return {f"curriculum/{name}/lesson": float(lesson) for name, lesson in self.lessons.items()}

    def in_short(self) -> str:
        """For the progress bar."""
        return ", ".join(f"{name} {lesson + 1}/{len(self.parameters[name].lessons)}" for name, lesson in self.lessons.items())

    def finals(self) -> str:
        """The lessons that a policy is judged in, as a reader sees them."""
        return ", ".join(f"{name} {each.lessons[-1].name} ({each.lessons[-1].value})" for name, each in self.parameters.items())

    def state_dict(self) -> dict[str, Any]:
        windows = {name: list(window) for name, window in self.windows.items()}
        return {"lessons": dict(self.lessons), "smoothed": dict(self.smoothed), "windows": windows, "unreported": self.unreported}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.unreported = state_dict.get("unreported", 0)
        for name in self.parameters.keys() & state_dict["lessons"].keys():
            self.lessons[name] = min(state_dict["lessons"][name], len(self.parameters[name].lessons) - 1)
            self.smoothed[name] = state_dict["smoothed"][name]
            self.windows[name] = deque(state_dict["windows"][name], self.window(name))


def need_increment(criteria: CompletionCriteria, progress: float, window: Sequence[float], smoothed: float) -> tuple[bool, float]:
    """Whether a lesson is learned, asked once for each episode that ended in it (after ML-Agents' test of the same name).

    Args:
        criteria: of the lesson.
        progress: of the run, 0 to 1.
        window: returns or successes of the last episodes.
        smoothed: the measure as it was smoothed before, 0 at first.

    Returns:
        Whether it is, and the measure smoothed: a quarter of what it was and three quarters of the window's mean.
    """
    if len(window) < criteria.min_lesson_length:
        return False, smoothed
    if criteria.measure == "progress":
        return progress > criteria.threshold, smoothed
    measure = mean(window)
    if math.isnan(measure):
        return False, smoothed
    if criteria.signal_smoothing:
        measure = smoothed = SMOOTHING * smoothed + (1 - SMOOTHING) * measure
    return measure > criteria.threshold, smoothed


def mean(window: Sequence[float]) -> float:
    """The mean; not a number of nothing."""
    return sum(window) / len(window) if window else math.nan


def measured(criteria: CompletionCriteria, episode: Finished) -> float:
    """Return what an episode adds to a lesson's window: its return, or its success, 0 if it did not report one."""
    return (episode.success or 0.0) if criteria.measure == "success" else episode.return_


def with_lessons(curriculum: Curriculum, env: gym.Env) -> gym.Env:
    """An environment that plays the current lessons, if it has parameters."""
    if env.has_wrapper_attr("set_lessons"):
        env.get_wrapper_attr("set_lessons")({name: each.only(curriculum.lessons[name]) for name, each in curriculum.parameters.items()})
    return env


def make_curriculum(env: Any) -> list[Curriculum]:
    """The callback for an environment's settings, if they have lessons."""
    parameters: dict[str, Parameter] = as_parameters(env.parameters) if isinstance(env, EnvConfig) else {}
    lessons = {name: env.parameters[name] for name, parameter in parameters.items() if len(parameter.lessons) > 1}
    return [Curriculum(lessons)] if lessons else []
