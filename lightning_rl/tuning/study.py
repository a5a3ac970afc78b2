"""A study: draw the settings of trials, record their evaluations and decide which to prune; its file survives a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from warnings import catch_warnings, simplefilter

import numpy as np
import optuna
from optuna.distributions import distribution_to_json
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from lightning_rl.checkpoints.atomic import locked
from lightning_rl.errors import SettingError, UnsavedError, causes_of, check_choice, check_range, printable
from lightning_rl.settings.yaml_files import first_difference
from lightning_rl.training.run_processes import Message
from lightning_rl.tuning.comparison import Confirmation, Objective, StudyRun, check_records
from lightning_rl.tuning.search_space import SearchSpace, Value, as_text

SAMPLERS = ("tpe", "random")
PRUNERS = ("median", "hyperband", "none")
WARM_UP = 0.2
"""Share of each seed's run, at its beginning, in which the median pruner does not prune."""
CHANGEABLE = ("trials", "jobs", "confirm", "confirm_seeds")
"""Settings that may change when a study is resumed."""
STUDY, FILE = "study", "study.db"
"""Name of the study in its file, which has no other, and of the file."""


@dataclass(frozen=True)
class StudySettings:
    """The number of trials, and how they are drawn.

    Args:
        trials: number of trials, including failed ones.
        jobs: number of runs at a time.
        seeds: runs of a trial, with the seeds 1, 2, …
        sampler: `tpe` begins with the config's own values and draws near good ones, `random` draws anywhere.
        pruner: `median` ends a trial that is worse than half of the others were, `hyperband` gives few of them the whole length.
        startup_trials: trials before `tpe` uses earlier results; the same number must be complete before any is pruned.
        confirm: how many of the best trials are run again when all have ended; 0: none.
        confirm_seeds: new runs of each of those, with the seeds after those of a trial.
        seed: seed with which settings are drawn.
    """

    trials: int = 20
    jobs: int = 1
    seeds: int = 1
    sampler: str = "tpe"
    pruner: str = "median"
    startup_trials: int = 5
    confirm: int = 3
    confirm_seeds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("trials", "jobs", "seeds", "startup_trials", "confirm", "confirm_seeds", "seed"):
            check_range(f"--{name}", getattr(self, name), 0 if name in ("confirm", "seed") else 1, whole=True)
        check_choice("--sampler", self.sampler, SAMPLERS)
        check_choice("--pruner", self.pruner, PRUNERS)

    def make_sampler(self, number: int) -> BaseSampler:
        """Return the sampler of a trial. Its seed depends only on the trial, so that a study may be interrupted anywhere."""
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        if self.sampler == "random":
            return RandomSampler(seed=seed)
        return TPESampler(seed=seed, n_startup_trials=self.startup_trials, multivariate=True, constant_liar=True)

    def make_pruner(self, evaluations: int) -> BasePruner:
        """Return the pruner for runs with this number of evaluations."""
        if self.pruner == "median":
            return MedianPruner(n_startup_trials=self.startup_trials)
        if self.pruner == "hyperband":
            return HyperbandPruner(min_resource=1, max_resource=self.seeds * (evaluations + 1), reduction_factor=3)
        return NopPruner()


@contextmanager
def take_folder(folder: Path) -> Iterator[None]:
    """Make the folder of a study or population, and lock it against other processes; raise `SettingError` if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--out {folder}: {error.strerror}; name a folder to write to") from error
    with locked(folder, otherwise="name another --out"):
        yield


def open_storage(folder: Path) -> RDBStorage:
    """Return the storage of the study in a folder, which closes each connection to its file after use.

    Raises `ValueError`: it holds another study, or rows of a trial that is missing, which a new trial would take over.
    """
    storage = RDBStorage(f"sqlite:///{folder / FILE}", engine_kwargs={"poolclass": NullPool})
    names = [study.study_name for study in storage.get_all_studies()]
    if names not in ([], [STUDY]):
        raise ValueError(f"it holds {', '.join(names)}, not a study of tune")
    with storage.engine.connect() as connection:
        violation = connection.execute(text("PRAGMA foreign_key_check")).first()
    if violation is not None:
        raise ValueError(f"{violation[0]} has a row without its row in {violation[2]}")
    return storage


def reason_of(error: BaseException) -> str:
    """Return why SQLite, or Optuna, failed, on one line."""
    cause = next((candidate for candidate in causes_of(error) if isinstance(candidate, SQLAlchemyError)), error)
    reason = getattr(cause, "orig", None) or (cause if type(cause) is ValueError else f"{type(cause).__name__}: {cause}")
    return shorten(str(reason), 100, placeholder=" …")


class Study:
    """Trials in a folder, recorded in its file `study.db`. No other process may use the folder meanwhile, see `take_folder`.

    Args:
        folder: folder of the study and its runs.
        space: the settings that vary.
        settings: the number of trials, and how they are drawn.
        objective: what the study optimizes.
        config: the settings that all trials share; a resumed study must have the same.
        first_values: values of the first trial of `tpe`, see `SearchSpace.find_values`; missing ones are drawn.
        say: prints a line.

    Raises:
        SettingError: the folder has a study with other settings, or its file cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        settings: StudySettings,
        objective: Objective,
        config: Mapping[str, object],
        first_values: Mapping[str, Value],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.space, self.settings, self.objective = folder, space, settings, objective
        self.first_values, self.say = first_values, say
        self.on_trial_end: Callable[[], None] = lambda: None
        """Called after each trial, and each new run of the best."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        seeds = range(settings.seeds, settings.seeds + settings.confirm_seeds)
        try:
            self.study = optuna.create_study(
                storage=open_storage(folder),
                study_name=STUDY,
                sampler=RandomSampler(seed=0),  # draws nothing, see `draw`
                pruner=settings.make_pruner(objective.evaluations),
                direction="maximize" if objective.mode == "max" else "minimize",
                load_if_exists=True,
            )
            self._check_definition(config)
            self.confirmation = Confirmation(self.study, objective, settings.confirm, seeds)
            check_records(self.study, space, objective, settings.seeds)
        except SettingError:
            raise
        except Exception as error:  # Optuna and SQLAlchemy raise anything for a file that something else has changed
            raise SettingError(f"{folder / FILE} cannot be used ({reason_of(error)}): restore it, or name another --out") from error
        self.waiting = [trial.number for trial in self.trials if trial.state == TrialState.RUNNING]
        """Trials with a run to start: those that a killed study was running, and those with further seeds."""

    def _check_definition(self, config: Mapping[str, object]) -> None:
        settings = {name: value for name, value in vars(self.settings).items() if name not in CHANGEABLE}
        space = {path: distribution_to_json(distribution) for path, distribution in self.space.distributions.items()}
        definition = {"config": config, "space": space, **settings}
        before = self.study.user_attrs.get("definition")
        if before is None and not self.trials:
            self.study.set_user_attr("definition", definition)
        elif before is None:
            raise ValueError("the settings of its trials are missing")
        elif (key := first_difference(before, json.loads(json.dumps(definition)))) is not None:
            key = key.removeprefix("config.").replace(".init_args", "")
            raise SettingError(f"the study in {self.folder} has another {key}: repeat its command to continue it, or name another --out")

    @contextmanager
    def recording(self, on_trial_end: Callable[[], None]) -> Iterator[None]:
        """Call a function after each trial while trials run. Raises `UnsavedError`: the study's file cannot be written any more."""
        self.on_trial_end = on_trial_end
        if self.trials:
            left = len(self.waiting)
            self.say(f"continuing the study in {self.folder}: {len(self.trials) - left} trials ended, {left} interrupted")
        try:
            yield
        except Exception as error:  # Ray Tune raises its own
            if not any(isinstance(cause, SQLAlchemyError) for cause in causes_of(error)):
                raise
            what = f"{self.folder / FILE} could not be written ({reason_of(error)})"
            raise UnsavedError(f"{what}: make room there, and repeat the command, which continues the study") from error

    @property
    def trials(self) -> list[FrozenTrial]:
        """Return all trials, in the order of their numbers."""
        return self.study.get_trials(deepcopy=False)

    @property
    def best(self) -> FrozenTrial | None:
        """Return the best complete trial without a failed new run; None if there is none."""
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        sound = [trial for trial in complete if not self.confirmation.error(trial.number)]
        return self.confirmation.best or max(sound, key=lambda trial: self.objective.rank(trial.value or 0.0), default=None)

    def describe_value(self, trial: FrozenTrial) -> str:
        """Describe the value of a complete trial, and the number of seeds over which it is the mean."""
        mean = self.confirmation.mean(trial) if trial in self.confirmation.trials else math.nan
        if math.isnan(mean):
            return as_text(trial.value)
        return f"{as_text(mean)} (mean of {self.settings.seeds + self.settings.confirm_seeds} seeds)"

    @property
    def has_ended(self) -> bool:
        """Return whether no run is left to train."""
        whole = len(self.trials) >= self.settings.trials and all(trial.state.is_finished() for trial in self.trials)
        return whole and all(map(self.confirmation.is_over, self.confirmation.runs))

    def draw(self) -> dict[str, Value]:
        """Draw the values of the next trial in an in-memory copy of the study, so that they enter the file all together."""
        trials = self.trials
        copy = optuna.create_study(
            study_name=STUDY, direction=self.study.direction, sampler=self.settings.make_sampler(len(trials)), pruner=self.study.pruner
        )
        copy.add_trials(trials)
        if not trials and self.settings.sampler == "tpe":
            copy.enqueue_trial(dict(self.first_values))
        return copy.ask(self.space.distributions).params

    def next_run(self) -> StudyRun | None:
        """Return a run to start: of a waiting trial, of a new one or, when all have ended, of one of the best; None if there is none."""
        while self.waiting:
            number = self.waiting.pop(0)
            ended = self.trials[number].user_attrs.get("ended_runs", 0)
            if ended < self.settings.seeds:
                return StudyRun(number, ended)
            self._complete(number)  # the study was killed before this
        trials = self.trials
        if len(trials) < self.settings.trials:
            self.study.add_trial(create_trial(state=TrialState.RUNNING, params=self.draw(), distributions=self.space.distributions))
            return StudyRun(len(trials), 0)
        if not all(trial.state.is_finished() for trial in trials):
            return None
        return self._next_confirmation()

    def _next_confirmation(self) -> StudyRun | None:
        confirmation = self.confirmation
        is_first = not confirmation.started
        run = confirmation.next_run()
        if run is not None and is_first:
            numbers = ", ".join(str(trial.number) for trial in confirmation.trials)
            new = f"{self.settings.confirm_seeds} new seed{'s' * (self.settings.confirm_seeds > 1)}"
            self.say(f"running the best trials again, {numbers}, with {new} each")
        return run

    def record(self, run: StudyRun, message: Message) -> bool:
        """Record an evaluation, unless an interrupted run only repeats it; return whether it prunes the trial."""
        if run.seed in self.confirmation.seeds:
            self.confirmation.record(run, message)
            return False
        number, seed = run
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
            trial.report(float(np.mean([value for run_values in values for value in run_values])), step)
        is_last = message.final and seed + 1 == self.settings.seeds
        if step < max(known, default=0) or is_last or not self._must_prune(run, step):
            return False
        self._end(number, TrialState.PRUNED)  # now, so that a study that is killed and resumed does not train it further
        return True

    def _must_prune(self, run: StudyRun, newest: int) -> bool:
        """Ask the pruner about a trial, with its steps in one seed only: the best value of earlier seeds would protect it."""
        trial, first = copy(self.trials[run.number]), self.objective.step(run.seed, 0)
        if self.settings.pruner == "median" and newest - first < math.ceil(WARM_UP * self.objective.evaluations):
            return False  # the pruner's own warm-up would apply only to the first seed
        trial.intermediate_values = {step: value for step, value in trial.intermediate_values.items() if step >= first}
        with catch_warnings():
            simplefilter("ignore", RuntimeWarning)  # from numpy, if all values are NaN
            return self.study.pruner.prune(self.study, trial)

    def is_over(self, run: StudyRun) -> bool:
        """Return whether nothing more can be recorded for a run: its trial was pruned or failed, or the run has ended."""
        if run.seed in self.confirmation.seeds:
            return self.confirmation.is_over(run)
        return self.trials[run.number].state.is_finished()

    def end_run(self, run: StudyRun) -> None:
        """Record that a run has ended: the next run of its trial waits, or the trial is complete."""
        if run.seed in self.confirmation.seeds:
            self.confirmation.end_run(run)
            self._end_confirmation(run)
            return
        self._find(run.number).set_user_attr("ended_runs", run.seed + 1)
        if run.seed + 1 < self.settings.seeds:
            self.waiting.append(run.number)
        else:
            self._complete(run.number)

    def fail(self, run: StudyRun, error: str) -> None:
        """Record that a run, and thus its trial, has failed."""
        if run.seed in self.confirmation.seeds:
            self.confirmation.fail(run, error)
            self._end_confirmation(run)
        else:
            self._fail_trial(run.number, error)

    def _fail_trial(self, number: int, error: str) -> None:
        self._find(number).set_user_attr("error", error)
        self._end(number, TrialState.FAIL)

    def add_seconds(self, run: StudyRun, seconds: float) -> None:
        """Add to the time of a trial, which does not include the new runs of the best trials."""
        if run.seed not in self.confirmation.seeds:
            trial = self._find(run.number)
            trial.set_user_attr("seconds", round(trial.user_attrs.get("seconds", 0.0) + seconds, 3))

    def _find(self, number: int) -> optuna.Trial:
        return optuna.Trial(self.study, self.trials[number]._trial_id)  # Optuna has no other access to a trial of a killed program

    def _complete(self, number: int) -> None:
        """Record the value of a trial when all of its runs have ended."""
        value = self.objective.mean(self.trials[number], self.settings.seeds)
        if math.isfinite(value):
            self._end(number, TrialState.COMPLETE, value)
        else:
            self._fail_trial(number, "a run had no evaluation with a finite value")

    def _end(self, number: int, state: TrialState, value: float | None = None) -> None:
        self.study.tell(number, value, state=state)
        self.say(self.describe(self.trials[number]))
        self.on_trial_end()

    def _end_confirmation(self, run: StudyRun) -> None:
        """Print the results of the new runs of a trial when all of them have ended."""
        if all(self.confirmation.is_over(StudyRun(run.number, seed)) for seed in self.confirmation.seeds):
            trial, error = self.trials[run.number], self.confirmation.error(run.number)
            values = ", ".join(map(as_text, self.confirmation.values(run.number)))
            result = f"failed ({error})" if error else f"{values} with new seeds; {self.describe_value(trial)}"
            self.say(printable(f"trial {run.number} again: {result}"))
        self.on_trial_end()

    def describe(self, trial: FrozenTrial) -> str:
        """Describe a trial that has ended on one line."""
        result = "NaN" if trial.value is None else as_text(trial.value)
        if trial.state == TrialState.PRUNED:
            seed, step = divmod(max(trial.intermediate_values), self.objective.evaluations + 1)
            result = f"pruned with {result} at {step / self.objective.evaluations:.0%} of seed {seed + 1}"
        elif trial.state == TrialState.FAIL:
            result = f"failed ({trial.user_attrs.get('error', '')})"
        seconds = f"; {trial.user_attrs['seconds']:.1f} s" if "seconds" in trial.user_attrs else ""
        best = "" if self.best is None else f"; best so far {self.describe_value(self.best)}, trial {self.best.number}"
        return printable(f"trial {trial.number}: {result}; {self.space.describe(trial.params)}{seconds}{best}")
