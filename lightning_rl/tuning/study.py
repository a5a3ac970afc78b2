"""A study: draw the settings of trials, record their evaluations, decide which to prune, in a file that survives being killed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from optuna.distributions import distribution_to_json
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from lightning_rl.checkpoints.atomic import locked
from lightning_rl.config_files import first_difference
from lightning_rl.errors import SettingError, check_choice, check_range, printable
from lightning_rl.training.run_processes import Message
from lightning_rl.tuning.search_space import SearchSpace, as_text

SAMPLERS = ("tpe", "random")
PRUNERS = ("median", "hyperband", "none")
WARM_UP = 0.2
"""The part of a run in which the median pruner leaves it alone."""
STUDY = "study"
"""Its name in its file, in which there is no other."""


@dataclass(frozen=True)
class StudySettings:
    """How many trials, and how they are drawn.

    Args:
        trials: how many, finished and failed ones together.
        jobs: how many run at a time.
        seeds: runs of a trial, with the seeds 1, 2, …
        sampler: `tpe` begins with the config's own values and draws near what was good, `random` anywhere.
        pruner: `median` ends a trial that is worse than half of the others were, `hyperband` gives few of them the whole length.
        startup_trials: trials before `tpe` uses earlier results; as many must be complete before any is pruned.
        seed: of the draws.
    """

    trials: int = 20
    jobs: int = 1
    seeds: int = 1
    sampler: str = "tpe"
    pruner: str = "median"
    startup_trials: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in {"trials": 1, "jobs": 1, "seeds": 1, "startup_trials": 1, "seed": 0}.items():
            check_range(f"--{name}", getattr(self, name), low, whole=True)
        check_choice("--sampler", self.sampler, SAMPLERS)
        check_choice("--pruner", self.pruner, PRUNERS)

    def make_sampler(self, number: int) -> BaseSampler:
        """Return the sampler of a trial. Its seed depends on the trial alone, so that a study may be interrupted anywhere."""
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        if self.sampler == "random":
            return RandomSampler(seed=seed)
        return TPESampler(seed=seed, n_startup_trials=self.startup_trials, multivariate=True, constant_liar=True)

    def make_pruner(self, evaluations: int) -> BasePruner:
        """Return the pruner for runs of so many evaluations."""
        if self.pruner == "median":
            return MedianPruner(n_startup_trials=self.startup_trials, n_warmup_steps=math.ceil(WARM_UP * evaluations))
        if self.pruner == "hyperband":
            return HyperbandPruner(min_resource=1, max_resource=self.seeds * (evaluations + 1), reduction_factor=3)
        return NopPruner()


@dataclass(frozen=True)
class Objective:
    """What a study looks for, and when its runs are evaluated.

    A run's value is its best evaluation, as `best.ckpt` holds the weights of that one and is what the run is for: the last evaluation of
    a short run is one more draw of a noisy curve. It is higher than what those weights return in new episodes, for all trials alike. A
    trial's value is the mean over its seeds, which are too few for an interquartile mean.

    Args:
        monitor: the metric of an evaluation.
        mode: whether the greatest is the best, `max`, or the least.
        interval: environment steps or updates between evaluations.
        length: of a run.
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
        """Return the number that an evaluation has in its trial; runs with long rollouts skip some."""
        return seed * (self.evaluations + 1) + min(count // self.interval, self.evaluations)

    def best(self, values: list[float]) -> float:
        """Return the best of the finite values; NaN without any."""
        finite = [value for value in values if math.isfinite(value)]
        return (max if self.mode == "max" else min)(finite) if finite else math.nan


class Study:
    """Trials in a folder, recorded in its file `study.db`.

    Args:
        folder: of the study and its runs.
        space: what varies.
        settings: how many trials, and how they are drawn.
        objective: what is looked for.
        config: the settings that all trials share; a study that goes on must have the same.
        first_values: of the first trial of `tpe`, see `SearchSpace.find_values`; what is not in them is drawn.
        say: prints a line.

    Raises:
        SettingError: the folder has a study with other settings.
    """

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        settings: StudySettings,
        objective: Objective,
        config: Mapping[str, Any],
        first_values: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.space, self.settings, self.objective = folder, space, settings, objective
        self.first_values, self.say = first_values, say
        self.on_trial_end: Callable[[], None] = lambda: None
        """Called after each trial."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        folder.mkdir(parents=True, exist_ok=True)
        self.study = optuna.create_study(
            storage=f"sqlite:///{folder / 'study.db'}",
            study_name=STUDY,
            sampler=RandomSampler(seed=0),  # draws nothing, see `draw`
            pruner=settings.make_pruner(objective.evaluations),
            direction="maximize" if objective.mode == "max" else "minimize",
            load_if_exists=True,
        )
        self._check_definition(config)
        self.interrupted = [trial for trial in self.trials if trial.state == TrialState.RUNNING]
        """Trials that a killed study was running."""

    def _check_definition(self, config: Mapping[str, Any]) -> None:
        own = {name: value for name, value in vars(self.settings).items() if name not in ("trials", "jobs")}
        space = {path: distribution_to_json(each) for path, each in self.space.distributions.items()}
        definition = {"config": config, "space": space, **own}
        before = self.study.user_attrs.get("definition")
        if before is None:
            self.study.set_user_attr("definition", definition)
        elif (key := first_difference(before, json.loads(json.dumps(definition)))) is not None:
            raise SettingError(f"the study in {self.folder} has another {key}: repeat its command to continue it, or name another --out")

    @contextmanager
    def open(self, on_trial_end: Callable[[], None]) -> Iterator[None]:
        """Keep other processes out of the study while its trials run. Raises `SettingError`: there is one."""
        self.on_trial_end = on_trial_end
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.folder))
            except SettingError as error:
                raise SettingError(
                    f"another process works on the study in {self.folder}: wait for its end, or name another --out"
                ) from error
            if self.trials:
                left = len(self.interrupted)
                self.say(f"continuing the study in {self.folder}: {len(self.trials) - left} trials ended, {left} interrupted")
            yield

    @property
    def trials(self) -> list[FrozenTrial]:
        """Return all trials, in the order of their numbers."""
        return self.study.get_trials(deepcopy=False)

    @property
    def best(self) -> FrozenTrial | None:
        """Return the best complete trial; None if there is none yet."""
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return self.study.best_trial if complete else None

    def draw(self) -> dict[str, Any]:
        """Draw the values of the next trial, in a copy of the study in memory: what is drawn then enters the file in one piece."""
        trials = self.trials
        copy = optuna.create_study(
            study_name=STUDY, direction=self.study.direction, sampler=self.settings.make_sampler(len(trials)), pruner=self.study.pruner
        )
        copy.add_trials(trials)
        if not trials and self.settings.sampler == "tpe":
            copy.enqueue_trial(dict(self.first_values))
        return copy.ask(self.space.distributions).params

    def next_trial(self) -> FrozenTrial | None:
        """Return a trial to run: first those that a killed study left, then new ones; None if there are as many as wanted."""
        if self.interrupted:
            return self.interrupted.pop(0)
        if len(self.trials) >= self.settings.trials:
            return None
        values = self.draw()
        self.study.add_trial(create_trial(state=TrialState.RUNNING, params=values, distributions=self.space.distributions))
        return self.trials[-1]

    def next_run(self, trial: FrozenTrial) -> int | None:
        """Return the number of the run of a trial that comes next, from 0; None if all have ended, which completes the trial."""
        ended = trial.user_attrs.get("ended_runs", 0)
        if ended == self.settings.seeds and not trial.state.is_finished():
            self._complete(trial.number)
        return ended if ended < self.settings.seeds else None

    def record(self, number: int, seed: int, message: Message) -> bool:
        """Record an evaluation, unless a run repeats it after it was interrupted; return whether it pruned the trial."""
        trial = self._find(number)
        runs: list[list[list[float]]] = trial.user_attrs.get("evaluations", [])
        runs += [[] for _ in range(seed + 1 - len(runs))]
        if message.count not in [count for count, _ in runs[seed]]:
            runs[seed].append([message.count, message.value])
            trial.set_user_attr("evaluations", runs)
        if message.final:
            trial.set_user_attr("ended_runs", seed + 1)
        step, known = self.objective.step(seed, message.count), self.trials[number].intermediate_values
        if step not in known:
            values = [[value for count, value in run if count <= message.count][-1:] for run in runs]
            trial.report(float(np.mean([value for found in values for value in found])), step)
        is_last = message.final and seed + 1 == self.settings.seeds
        if step < max(known, default=0) or is_last or not trial.should_prune():
            return False
        self._end(number, TrialState.PRUNED)  # now: a study that is killed later must not train it further
        return True

    def end_run(self, number: int, seed: int) -> None:
        """Record that a run has ended."""
        self._find(number).set_user_attr("ended_runs", seed + 1)

    def fail(self, number: int, error: str) -> None:
        """Record that a trial has failed."""
        self._find(number).set_user_attr("error", error)
        self._end(number, TrialState.FAIL)

    def add_seconds(self, number: int, seconds: float) -> None:
        """Add to the time that a trial has taken."""
        trial = self._find(number)
        trial.set_user_attr("seconds", round(trial.user_attrs.get("seconds", 0.0) + seconds, 3))

    def _find(self, number: int) -> optuna.Trial:
        return optuna.Trial(self.study, self.trials[number]._trial_id)  # Optuna has no other way to a trial of a killed program

    def _complete(self, number: int) -> None:
        """Record the value of a trial all of whose runs have ended."""
        runs = self.trials[number].user_attrs.get("evaluations", [])
        values = [self.objective.best([value for _, value in run]) for run in runs]
        if len(values) < self.settings.seeds or not all(map(math.isfinite, values)):
            self.fail(number, "a run had no evaluation with a finite value")
        else:
            self._end(number, TrialState.COMPLETE, float(np.mean(values)))

    def _end(self, number: int, state: TrialState, value: float | None = None) -> None:
        self.study.tell(number, value, state=state)
        self.say(self.describe(self.trials[number]))
        self.on_trial_end()

    def describe(self, trial: FrozenTrial) -> str:
        """Describe a trial that has ended on one line."""
        result = "" if trial.value is None else as_text(trial.value)
        if trial.state == TrialState.PRUNED:
            seed, step = divmod(max(trial.intermediate_values), self.objective.evaluations + 1)
            result = f"pruned with {result} at {step / self.objective.evaluations:.0%} of seed {seed + 1}"
        elif trial.state == TrialState.FAIL:
            result = f"failed ({trial.user_attrs.get('error', '')})"
        seconds = f"; {trial.user_attrs['seconds']:.1f} s" if "seconds" in trial.user_attrs else ""
        best = "" if self.best is None else f"; best so far {as_text(self.best.value)}, trial {self.best.number}"
        return printable(f"trial {trial.number}: {result}; {self.space.describe(trial.params)}{seconds}{best}")
