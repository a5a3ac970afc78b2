"""Train the runs of a study in processes on this machine."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from lightning_rl.errors import UnsavedError
from lightning_rl.training.run_processes import Answer, Message, RunPlan, RunPool, Train
from lightning_rl.tuning.comparison import StudyRun
from lightning_rl.tuning.search_space import Value
from lightning_rl.tuning.study import Study

MakePlan = Callable[[int, Mapping[str, Value], int], RunPlan]
"""Plans a run of a trial from the number of the trial, its values, and the number of the run from 0."""


@dataclass
class ActiveRun:
    """A run that is being trained.

    Args:
        pruned: whether its trial is pruned, so that it only has to end.
    """

    run: StudyRun
    pruned: bool = False
    began: float = field(default_factory=time.monotonic)


class LocalEngine:
    """Train several runs at a time, each in its own process.

    Args:
        study: records the runs.
        train: trains a run.
        make_plan: plans a run of a trial.
    """

    def __init__(self, study: Study, train: Train, make_plan: MakePlan) -> None:
        self.study, self.make_plan = study, make_plan
        self.pool = RunPool(train, study.settings.jobs)
        self.numbers = count()
        self.active: dict[int, ActiveRun] = {}
        """Runs by their numbers in the pool."""

    @property
    def received(self) -> signal.Signals | None:
        """Return the signal that ended the study early."""
        return self.pool.received

    def run(self) -> None:
        """Train runs until the study has ended, or a signal comes. Raises `UnsavedError`: a run could not be saved."""
        with self.pool.open():
            while True:
                while self.pool.has_room and (run := self.study.next_run()) is not None:
                    number = next(self.numbers)
                    self.pool.start(number, self.make_plan(run.number, self.study.trials[run.number].params, run.seed))
                    self.active[number] = ActiveRun(run)
                if not self.active:
                    return
                for number, message in self.pool.receive():
                    self._handle(number, message)

    def _handle(self, number: int, message: Message) -> None:
        """Answer a run that waits; record a run that has ended."""
        active = self.active[number]
        if message.waits:
            answer: Answer = "go"
            self._count(active)
            if message.kind == "evaluation" and self.study.record(active.run, message):
                active.pruned, answer = True, "prune"
            self.pool.answer(number, answer)
            return
        del self.active[number]
        if active.pruned:
            return
        self._count(active)
        if message.kind == "unsaved":  # not because of the values of its trial, which is thus not a failed one
            raise UnsavedError(f"trial {active.run.number}: {message.text}")
        if message.kind == "failed":
            self.study.fail(active.run, message.text)
        elif message.kind == "stopped":
            self.pool.signals.received = self.received or signal.SIGTERM  # someone signaled only the run
        else:
            self.study.end_run(active.run)

    def _count(self, active: ActiveRun) -> None:
        """Add the seconds since the last message to those of the trial."""
        now = time.monotonic()
        self.study.add_seconds(active.run, now - active.began)
        active.began = now
