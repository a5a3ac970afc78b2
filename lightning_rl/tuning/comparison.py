"""Compare the trials of a study, by their values and the best again with new seeds, and check what its file holds of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from lightning_rl.checkpoints.validation import COUNT, FLAG, NUMBER, TEXT, Kind, Rules, first_error, is_count
from lightning_rl.settings.yaml_files import Plain
from lightning_rl.training.run_processes import Message
from lightning_rl.tuning.search_space import SearchSpace

ATTRIBUTE = "confirmation"
"""Attribute of the study in its file; the trials cannot store it, because Optuna does not change trials that have ended."""
EVALUATED = (TrialState.COMPLETE, TrialState.PRUNED)
STATES = (*EVALUATED, TrialState.FAIL, TrialState.RUNNING)
EVALUATION = Kind("a count and a number", lambda value: is_count(value[0]) and type(value[1]) in (int, float) and len(value) == 2)
RECORDS: Rules = {
    "definition": Kind("a mapping", lambda value: isinstance(value, dict)),
    "trials/[]/state": Kind("one of running, complete, pruned and fail", lambda value: value in STATES),
    "trials/[]/values/[]": EVALUATION,
    "trials/[]/attributes/evaluations?/[]/[]": EVALUATION,
    "trials/[]/attributes/ended_runs?": COUNT,
    "trials/[]/attributes/seconds?": NUMBER,
    "trials/[]/attributes/error?": TEXT,
    f"{ATTRIBUTE}?/*/evaluations/[]": EVALUATION,
    f"{ATTRIBUTE}?/*/ended": FLAG,
    f"{ATTRIBUTE}?/*/error?": TEXT,
}
"""What the file of a study holds; each evaluation is a count, or its number in the trial, and a value, which may be NaN."""


@dataclass(frozen=True)
class Objective:
    """What a study optimizes, and when its runs are evaluated.

    The value of a run is its best evaluation, because `best.ckpt` holds those weights, which are the result of the run; the last evaluation
    of a short run is only one more sample of a noisy curve. The value is higher than what those weights return in new episodes, for all
    trials alike. The value of a trial is the mean over its seeds, which are too few for an interquartile mean.

    Args:
        monitor: the evaluation metric.
        mode: `max` if higher is better, `min` if lower is.
        interval: environment steps or updates between evaluations.
        length: length of a run.
    """

    monitor: str
    mode: Literal["max", "min"]
    interval: int
    length: int

    @property
    def evaluations(self) -> int:
        """Return how many evaluations a run has."""
        return max(1, self.length // self.interval)

    def step(self, seed: int, count: int) -> int:
        """Return the number of an evaluation in its trial; runs with long rollouts skip some numbers."""
        return seed * (self.evaluations + 1) + min(count // self.interval, self.evaluations)

    def best(self, values: list[float]) -> float:
        """Return the best of the finite values; NaN without any."""
        finite = [value for value in values if math.isfinite(value)]
        return (max if self.mode == "max" else min)(finite) if finite else math.nan

    def mean(self, trial: FrozenTrial, seeds: int) -> float:
        """Return the mean value of a trial's runs; NaN if there are fewer than `seeds`, or one has no finite evaluation."""
        values = [self.best([value for _, value in run]) for run in trial.user_attrs.get("evaluations", [])]
        return float(np.mean(values)) if len(values) >= seeds else math.nan

    def rank(self, value: float) -> float:
        """Return a number that is higher for better values."""
        return value if self.mode == "max" else -value


class StudyRun(NamedTuple):
    """A run of a study.  number: the number of its trial.  seed: its own number in the trial, from 0."""

    number: int
    seed: int


class Confirmation:
    """Compare the best complete trials of a study again, by the mean over all their seeds, old and new.

    The best of many noisy values is too high, and often lucky; new runs of a few trials cost less than more runs of all.

    Args:
        study: a study whose trials have ended.
        objective: what the study optimizes.
        trials: how many of the best trials are run again.
        seeds: the numbers of their new runs.
    """

    def __init__(self, study: optuna.Study, objective: Objective, trials: int, seeds: Sequence[int]) -> None:
        self.study, self.objective, self.num_trials, self.seeds = study, objective, trials, seeds
        self.started: set[StudyRun] = set()

    @property
    def trials(self) -> list[FrozenTrial]:
        """Return the trials that are run again, the best first."""
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return sorted(complete, key=lambda trial: self.objective.rank(trial.value or 0.0), reverse=True)[: self.num_trials]

    @property
    def runs(self) -> list[StudyRun]:
        """Return all runs in order: the first new run of each trial, then the second, and so on."""
        return [StudyRun(trial.number, seed) for seed in self.seeds for trial in self.trials]

    @property
    def has_ended(self) -> bool:
        """Return whether there are runs, and all have ended."""
        runs = self.runs
        return bool(runs) and all(map(self.is_over, runs))

    def next_run(self) -> StudyRun | None:
        """Return a run that has neither ended nor been returned before; None if none is left."""
        run = next((run for run in self.runs if run not in self.started and not self.is_over(run)), None)
        if run is not None:
            self.started.add(run)
        return run

    def is_over(self, run: StudyRun) -> bool:
        """Return whether a run has ended or failed."""
        return bool(self._found(run)["ended"])

    def record(self, run: StudyRun, message: Message) -> None:
        """Record an evaluation, unless an interrupted run only repeats it."""
        stored = self._found(run)
        if message.count not in [count for count, _ in stored["evaluations"]]:
            self._keep(run, {**stored, "evaluations": [*stored["evaluations"], [message.count, message.value]]})

    def end_run(self, run: StudyRun) -> None:
        """Record that a run has ended."""
        self._keep(run, {**self._found(run), "ended": True})

    def fail(self, run: StudyRun, error: str) -> None:
        """Record that a run has failed, so that its trial cannot be the best."""
        self._keep(run, {"evaluations": [], "ended": True, "error": error})

    def error(self, number: int) -> str:
        """Return why a new run of a trial has failed; an empty string if none has."""
        return next(filter(None, (self._found(StudyRun(number, seed)).get("error") for seed in self.seeds)), "")

    def values(self, number: int) -> list[float]:
        """Return the value of each new run of a trial; NaN for those that have failed or not ended."""
        trials = [self._found(StudyRun(number, seed)) for seed in self.seeds]
        return [self.objective.best([value for _, value in trial["evaluations"]]) if trial["ended"] else math.nan for trial in trials]

    def mean(self, trial: FrozenTrial) -> float:
        """Return the mean over all runs of a trial, old and new; NaN if one has failed or not ended."""
        assert trial.value is not None
        old = len(trial.user_attrs["evaluations"])
        return float(np.mean([trial.value] * old + self.values(trial.number)))

    @property
    def best(self) -> FrozenTrial | None:
        """Return the trial with the best mean; None before all runs have ended, or if every trial has a failed run."""
        compared = [trial for trial in self.trials if math.isfinite(self.mean(trial))] if self.has_ended else []
        return max(compared, key=lambda trial: self.objective.rank(self.mean(trial)), default=None)

    def _found(self, run: StudyRun) -> Plain:
        return self.study.user_attrs.get(ATTRIBUTE, {}).get(f"{run.number} {run.seed}", {"evaluations": [], "ended": False})

    def _keep(self, run: StudyRun, content: Plain) -> None:
        self.study.set_user_attr(ATTRIBUTE, {**self.study.user_attrs.get(ATTRIBUTE, {}), f"{run.number} {run.seed}": content})


def check_records(study: optuna.Study, space: SearchSpace, objective: Objective, seeds: int) -> None:
    """Raise an error if a study's file holds what no study has written: it would fail later, or give a wrong result."""
    direction = study.direction.name.lower()
    if direction != f"{objective.mode}imize":
        raise ValueError(f"its direction is {direction}, that of its config is {objective.mode}imize")
    trials = study.get_trials()
    plain = [
        {"state": trial.state, "values": [*map(list, trial.intermediate_values.items())], "attributes": trial.user_attrs}
        for trial in trials
    ]
    if error := first_error({"trials": plain, **study.user_attrs}, RECORDS):
        raise ValueError(error)
    optuna.create_study(direction=study.direction).add_trials(trials)  # checks the settings of each
    for number, trial in enumerate(trials):
        if trial.number != number:
            raise ValueError(f"trial {number} is missing")
        if trial.distributions != space.distributions:
            raise ValueError(f"trial {number} has other settings")
        if trial.state in EVALUATED and not trial.intermediate_values:
            raise ValueError(f"trial {number} has no evaluation")
        if trial.state == TrialState.COMPLETE and trial.value != objective.mean(trial, seeds):
            raise ValueError(f"the value of trial {number} is not that of its evaluations")
