"""Run the trials of a study in processes of this machine."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import FrozenTrial

from lightning_rl.training.run_processes import Answer, Message, RunPlan, RunPool, Train
from lightning_rl.tuning.study import Study

MakePlan = Callable[[int, Mapping[str, Any], int], RunPlan]
"""Returns the run of a trial: of its number, its values, and the number of the run from 0."""


@dataclass
class ActiveTrial:
    """A trial whose run is trained.

    Args:
        seed: the number of the run in its trial, from 0.
        pruned: whether the run only has to end.
    """

    seed: int
    pruned: bool = False
    began: float = field(default_factory=time.monotonic)


class LocalEngine:
    """Runs so many trials at a time, each run in a process of its own.

    Args:
        study: records them.
        train: trains a run.
        make_plan: returns the runs of a trial.
    """

    def __init__(self, study: Study, train: Train, make_plan: MakePlan) -> None:
        self.study, self.make_plan = study, make_plan
        self.pool = RunPool(train, study.settings.jobs)
        self.active: dict[int, ActiveTrial] = {}

    @property
    def received(self) -> signal.Signals | None:
        """Return the signal that ended the study early."""
        return self.pool.received

    def run(self) -> None:
        """Run trials until there are as many as wanted, or a signal comes."""
        with self.pool.open():
            while True:
                while self.pool.has_room and (trial := self.study.next_trial()) is not None:
                    self._start(trial)
                if not self.active:
                    return
                for number, message in self.pool.receive():
                    self._handle(number, message)

    def _start(self, trial: FrozenTrial) -> None:
        """Start the next run of a trial, if there is one left."""
        seed = self.study.next_run(trial)
        if seed is not None:
            self.pool.start(trial.number, self.make_plan(trial.number, trial.params, seed))
            self.active[trial.number] = ActiveTrial(seed)

    def _handle(self, number: int, message: Message) -> None:
        """Answer a run that goes on; record what has ended."""
        active = self.active[number]
        if message.waits:
            answer: Answer = "go"
            self._count(number)
            if message.kind == "evaluation" and self.study.record(number, active.seed, message):
                active.pruned, answer = True, "prune"
            self.pool.answer(number, answer)
            return
        if active.pruned:
            del self.active[number]
            return
        self._count(number)
        del self.active[number]
        if message.kind == "failed":
            self.study.fail(number, message.text)
        elif message.kind == "stopped":
            self.pool.signals.received = self.received or signal.SIGTERM  # of somebody who asked the run alone
        else:
            self.study.end_run(number, active.seed)
            self._start(self.study.trials[number])

    def _count(self, number: int) -> None:
        """Add the seconds since the last message to those of the trial."""
        now, active = time.monotonic(), self.active[number]
        self.study.add_seconds(number, now - active.began)
        active.began = now
