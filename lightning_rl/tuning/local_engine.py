"""Run the trials of a study in processes of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from optuna.trial import FrozenTrial

from lightning_rl.tuning.study import Study
from lightning_rl.tuning.trials import Answer, Message, RunPlan, RunProcess, Train

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MakePlan = Callable[[int, Mapping[str, Any], int], RunPlan]
"""Returns the run of a trial: of its number, its values, and the number of the run from 0."""


@dataclass
class ActiveTrial:
    """A trial whose run is trained.

    Args:
        trial: as it was when the run began.
        process: trains the run.
        seed: the number of the run in its trial, from 0.
        pruned: whether the run only has to end.
    """

    trial: FrozenTrial
    process: RunProcess
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
        self.study, self.train, self.make_plan = study, train, make_plan
        self.active: dict[int, ActiveTrial] = {}
        self.received: signal.Signals | None = None
        """The signal that ended the study early."""

    def run(self) -> None:
        """Run trials until there are as many as wanted, or a signal comes."""
        with self._listening():
            while True:
                while self.received is None and len(self.active) < self.study.settings.jobs:
                    trial = self.study.next_trial()
                    if trial is None:
                        break
                    self._start(trial)
                if not self.active:
                    return
                pipes: dict[Any, ActiveTrial] = {active.process.pipe: active for active in self.active.values()}
                for pipe in wait(list(pipes), timeout=0.2):
                    self._handle(pipes[pipe], self._receive(pipes[pipe]))

    def _start(self, trial: FrozenTrial) -> None:
        """Start the next run of a trial, if there is one left."""
        seed = self.study.next_run(trial)
        if seed is not None:
            process = RunProcess(self.train, self.make_plan(trial.number, trial.params, seed))
            self.active[trial.number] = ActiveTrial(trial, process, seed)

    def _receive(self, active: ActiveTrial) -> Message:
        try:
            return active.process.pipe.recv()
        except (EOFError, OSError):
            return Message("failed" if self.received is None else "stopped", text=active.process.exit_reason())

    def _handle(self, active: ActiveTrial, message: Message) -> None:
        """Answer a run that goes on; record what has ended."""
        number = active.trial.number
        if message.kind in ("begins", "evaluation"):
            answer: Answer = "go" if self.received is None else "stop"
            self._count(active)
            if message.kind == "evaluation" and self.study.record(number, active.seed, message):
                active.pruned, answer = True, "prune"
            with suppress(OSError):  # it died, which is what it sends next
                active.process.pipe.send(answer)
            return
        active.process.kill()
        del self.active[number]
        if active.pruned:
            return
        self._count(active)
        if message.kind == "failed":
            self.study.fail(number, message.text)
        elif message.kind == "stopped":
            self.received = self.received or signal.SIGTERM  # of somebody who asked the run alone
        else:
            self.study.end_run(number, active.seed)
            self._start(self.study.trials[number])

    def _count(self, active: ActiveTrial) -> None:
        """Add the seconds since the last message to those of the trial."""
        now = time.monotonic()
        self.study.add_seconds(active.trial.number, now - active.began)
        active.began = now

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
