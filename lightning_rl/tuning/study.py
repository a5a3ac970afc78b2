"""A study: draw the settings of trials, run them in processes, prune, and go on where a killed study stopped."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import optuna
from optuna.distributions import distribution_to_json
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from lightning_rl.checkpoints.atomic import locked
from lightning_rl.errors import SettingError, check_choice, check_range, printable
from lightning_rl.tuning.search_space import SearchSpace, as_text
from lightning_rl.tuning.trials import Answer, Message, RunPlan, RunProcess, Train

SAMPLERS = ("tpe", "random")
PRUNERS = ("median", "hyperband", "none")
WARM_UP = 0.2
"""The part of a run in which the median pruner leaves it alone."""
STUDY = "study"
"""Its name in its file, in which there is no other."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class StudySettings:
    """How many trials, and how they are drawn.

    Args:
        trials: how many, finished and failed ones together.
        jobs: how many run at a time.
        seeds: runs of a trial, with the seeds 1, 2, …
        sampler: `tpe` draws near what was good, `random` anywhere.
        pruner: `median` ends a trial that is worse than half of the others were, `hyperband` gives few of them the whole length.
        startup_trials: the first trials are drawn at random, and none is pruned before so many are complete.
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


@dataclass
class ActiveTrial:
    """A trial whose run is trained.

    Args:
        trial: its record in the study.
        process: trains the run.
        seed: the number of the run in its trial, from 0.
        pruned: whether the run only has to end.
    """

    trial: optuna.Trial
    process: RunProcess
    seed: int
    pruned: bool = False
    began: float = field(default_factory=time.monotonic)


class Study:
    """Trials in a folder, recorded in its file `study.db`.

    Args:
        folder: of the study and its runs.
        space: what varies.
        settings: how many trials, and how they are drawn.
        objective: what is looked for.
        config: the settings that all trials share; a study that goes on must have the same.
        train: trains a run.
        make_plan: returns the run of a trial: of its number, its values and the number of the seed from 0.
        say: prints a line.

    Raises:
        SettingError: another process works on the study, or the folder has a study with other settings.
    """

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        settings: StudySettings,
        objective: Objective,
        config: Mapping[str, Any],
        train: Train,
        make_plan: Callable[[int, Mapping[str, Any], int], RunPlan],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.space, self.settings, self.objective = folder, space, settings, objective
        self.train, self.make_plan, self.say = train, make_plan, say
        self.on_trial_end: Callable[[], None] = lambda: None
        self.active: dict[int, ActiveTrial] = {}
        self.received: signal.Signals | None = None
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

    def _check_definition(self, config: Mapping[str, Any]) -> None:
        own = {name: value for name, value in vars(self.settings).items() if name not in ("trials", "jobs")}
        space = {path: distribution_to_json(each) for path, each in self.space.distributions.items()}
        definition = {"config": config, "space": space, **own}
        before = self.study.user_attrs.get("definition")
        if before is None:
            self.study.set_user_attr("definition", definition)
        elif (key := first_difference(before, json.loads(json.dumps(definition)))) is not None:
            raise SettingError(f"the study in {self.folder} has another {key}: repeat its command to continue it, or name another --out")

    @property
    def trials(self) -> list[FrozenTrial]:
        """Return all trials, in the order of their numbers."""
        return self.study.get_trials(deepcopy=False)

    @property
    def best(self) -> FrozenTrial | None:
        """Return the best complete trial; None if there is none yet."""
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return self.study.best_trial if complete else None

    def run(self, on_trial_end: Callable[[], None]) -> None:
        """Run trials until there are as many as wanted, or a signal stops the study. `on_trial_end` is called after each."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.folder))
            except SettingError as error:
                raise SettingError(
                    f"another process works on the study in {self.folder}: wait for its end, or name another --out"
                ) from error
            stack.enter_context(self._listening())
            self.on_trial_end = on_trial_end
            waiting = [trial for trial in self.trials if trial.state == TrialState.RUNNING]
            if self.trials:
                self.say(
                    f"continuing the study in {self.folder}: {len(self.trials) - len(waiting)} trials ended, {len(waiting)} interrupted"
                )
            while True:
                while self.received is None and len(self.active) < self.settings.jobs:
                    if waiting:
                        self._start(waiting.pop(0))
                    elif len(self.trials) < self.settings.trials:
                        self._start(self._new_trial())
                    else:
                        break
                self._wait()
                if not self.active and (self.received is not None or (len(self.trials) >= self.settings.trials and not waiting)):
                    return

    def _wait(self) -> None:
        """Handle the next messages of the runs."""
        pipes: dict[Any, int] = {active.process.pipe: number for number, active in self.active.items()}
        for pipe in wait(list(pipes), timeout=0.2) if pipes else []:
            active = self.active[pipes[pipe]]
            self._handle(active, self._receive(active))

    def draw(self) -> dict[str, Any]:
        """Draw the values of the next trial, in a copy of the study in memory: what is drawn then enters the file in one piece."""
        trials = self.trials
        copy = optuna.create_study(
            study_name=STUDY, direction=self.study.direction, sampler=self.settings.make_sampler(len(trials)), pruner=self.study.pruner
        )
        copy.add_trials(trials)
        return copy.ask(self.space.distributions).params

    def _new_trial(self) -> FrozenTrial:
        values = self.draw()
        self.study.add_trial(create_trial(state=TrialState.RUNNING, params=values, distributions=self.space.distributions))
        return self.trials[-1]

    def _start(self, trial: FrozenTrial) -> None:
        """Start the next run of a trial that is recorded as running."""
        recorded = optuna.Trial(self.study, trial._trial_id)  # also of a trial that a killed study began
        seed = recorded.user_attrs.get("ended_runs", 0)
        if seed == self.settings.seeds:  # the study was killed before it recorded the value
            self._complete(recorded)
        else:
            process = RunProcess(self.train, self.make_plan(trial.number, trial.params, seed))
            self.active[trial.number] = ActiveTrial(recorded, process, seed)

    def _receive(self, active: ActiveTrial) -> Message:
        try:
            return active.process.pipe.recv()
        except (EOFError, OSError):
            reason = active.process.exit_reason()
            return Message("failed" if self.received is None else "stopped", text=reason)

    def _handle(self, active: ActiveTrial, message: Message) -> None:
        """Answer a run that goes on; record what has ended."""
        trial = active.trial
        if message.kind in ("begins", "evaluation"):
            answer: Answer = "go" if self.received is None else "stop"
            if message.kind == "evaluation" and self._record(active, message):
                self._end(trial, TrialState.PRUNED, active=active)  # now: a study that is killed later must not train it further
                active.pruned, answer = True, "prune"
            with suppress(OSError):  # it died, which is what it sends next
                active.process.pipe.send(answer)
            return
        active.process.kill()
        del self.active[trial.number]
        if active.pruned:
            return
        if message.kind == "failed":
            self._end(trial, TrialState.FAIL, active=active, error=message.text)
        elif message.kind == "stopped":
            self.received = self.received or signal.SIGTERM  # of somebody who asked the run alone
            self._add_seconds(active)
        else:
            trial.set_user_attr("ended_runs", active.seed + 1)
            self._add_seconds(active)
            self._start(self.trials[trial.number])

    def _record(self, active: ActiveTrial, message: Message) -> bool:
        """Record an evaluation, unless a run repeats it after it was interrupted; return whether it prunes the trial."""
        trial, seed = active.trial, active.seed
        runs: list[list[list[float]]] = trial.user_attrs.get("evaluations", [])
        runs += [[] for _ in range(seed + 1 - len(runs))]
        if message.count not in [count for count, _ in runs[seed]]:
            runs[seed].append([message.count, message.value])
            trial.set_user_attr("evaluations", runs)
        if message.final:
            trial.set_user_attr("ended_runs", seed + 1)
        step, known = self.objective.step(seed, message.count), self.trials[trial.number].intermediate_values
        if step not in known:
            values = [[value for count, value in run if count <= message.count][-1:] for run in runs]
            trial.report(float(np.mean([value for found in values for value in found])), step)
        is_last = message.final and seed + 1 == self.settings.seeds
        return step >= max(known, default=0) and not is_last and trial.should_prune()

    def _complete(self, trial: optuna.Trial) -> None:
        """Record the value of a trial all of whose runs have ended."""
        runs = trial.user_attrs.get("evaluations", [])
        values = [self.objective.best([value for _, value in run]) for run in runs]
        if len(values) < self.settings.seeds or not all(map(math.isfinite, values)):
            self._end(trial, TrialState.FAIL, error="a run had no evaluation with a finite value")
        else:
            self._end(trial, TrialState.COMPLETE, float(np.mean(values)))

    def _add_seconds(self, active: ActiveTrial) -> None:
        spent = active.trial.user_attrs.get("seconds", 0.0) + time.monotonic() - active.began
        active.trial.set_user_attr("seconds", round(spent, 3))

    def _end(
        self, trial: optuna.Trial, state: TrialState, value: float | None = None, active: ActiveTrial | None = None, error: str = ""
    ) -> None:
        """Record how a trial ended, and print a line."""
        if active is not None:
            self._add_seconds(active)
        if error:
            trial.set_user_attr("error", error)
        self.study.tell(trial, value, state=state)
        self.say(self.describe(self.trials[trial.number]))
        self.on_trial_end()

    def describe(self, trial: FrozenTrial) -> str:
        """Describe a trial that has ended on one line."""
        seconds = f"{trial.user_attrs.get('seconds', 0.0):.1f} s"
        result = "" if trial.value is None else as_text(trial.value)
        if trial.state == TrialState.PRUNED:
            seed, step = divmod(max(trial.intermediate_values), self.objective.evaluations + 1)
            result = f"pruned with {result} at {step / self.objective.evaluations:.0%} of seed {seed + 1}"
        elif trial.state == TrialState.FAIL:
            result = f"failed ({trial.user_attrs.get('error', '')})"
        best = "" if self.best is None else f"; best so far {as_text(self.best.value)}, trial {self.best.number}"
        return printable(f"trial {trial.number}: {result}; {self.space.describe(trial.params)}; {seconds}{best}")

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Let the first signal save the runs and end the study, and a second one end it at once; end all runs that are left."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.received is not None:
                raise KeyboardInterrupt
            self.received = signal.Signals(number)
            for active in self.active.values():
                with suppress(OSError):
                    os.kill(active.process.process.pid or 0, signal.SIGTERM)

        before = {each: signal.signal(each, handle) for each in SIGNALS}
        try:
            yield
        finally:
            for active in self.active.values():
                active.process.kill()
            for each, handler in before.items():
                signal.signal(each, handler)


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str | None:
    """Return the dotted name of the first setting in which two mappings differ; None if there is none."""
    for key in [*before, *(key for key in now if key not in before)]:
        one, other = before.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if (found := first_difference(one, other, f"{prefix}{key}.")) is not None:
                return found
        elif one != other:
            return f"{prefix}{key}"
    return None
