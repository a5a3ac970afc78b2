"""Runs of trials in processes of their own, which report each evaluation and wait for what to do."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl

from lightning_rl.callbacks.protocols import AlgorithmRun, callbacks_of
from lightning_rl.callbacks.stopping import StopOnSignal
from lightning_rl.checkpoints.atomic import locked
from lightning_rl.errors import SettingError
from lightning_rl.processes import Child, error_line

Answer = Literal["go", "prune", "stop"]
"""What a run does after an evaluation: go on; end; save and leave the rest for later."""
Ask = Callable[["Message"], Answer]
LOCK_TIMEOUT = 20.0
"""Seconds for the processes of a killed study to notice that it is gone."""


@dataclass(frozen=True)
class Message:
    """What a run reports: that it `begins`, an `evaluation`, that it `ended`, `failed` or was `stopped`.

    Args:
        count: environment steps or updates so far.
        value: the monitored metric of an evaluation.
        final: whether the run ends with this evaluation.
        text: why it failed.
    """

    kind: Literal["begins", "evaluation", "ended", "failed", "stopped"]
    count: int = 0
    value: float = math.nan
    final: bool = False
    text: str = ""


@dataclass(frozen=True)
class RunPlan:
    """One run of a trial.

    Args:
        options: of `fit`: those of the study, and the values of the trial.
        root: the folder of all runs of the study.
        name: the run's folder.
        seed: `seed_everything` of the run.
        imports: modules to import first.
        log: the file for what the run prints.
    """

    options: tuple[str, ...]
    root: Path
    name: str
    seed: int
    imports: tuple[str, ...]
    log: Path

    @property
    def fit_options(self) -> list[str]:
        """Return all options of `fit`. One thread: a measured choice could differ when the run continues, and what is learned with it."""
        own = {"default_root_dir": self.root, "run_name": self.name, "enable_progress_bar": "false"}
        named = [f"--trainer.{name}={value}" for name, value in own.items()]
        threads = [] if any(each.startswith("--trainer.torch_threads") for each in self.options) else ["--trainer.torch_threads=1"]
        return [*self.options, *threads, f"--seed_everything={self.seed}", *named]


Train = Callable[[RunPlan, Ask], None]
"""Trains a run from its last checkpoint, if it has one; a function of a module, as other processes import it."""


class ReportEvaluations(pl.Callback):
    """Report the beginning and each evaluation of a run, and do what the answer says.

    It must come after callbacks that save the best weights or stop the run, so that they have seen the evaluation.
    """

    def __init__(self, ask: Ask, monitor: str) -> None:
        self.ask, self.monitor = ask, monitor

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:  # type: ignore[override]
        self._obey(trainer, self.ask(Message("begins", pl_module.count)))

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, metrics: dict[str, float]) -> None:
        """Report the monitored metric."""
        final = trainer.should_stop or pl_module.finished
        self._obey(trainer, self.ask(Message("evaluation", pl_module.count, metrics[self.monitor], final)))

    def _obey(self, trainer: pl.Trainer, answer: Answer) -> None:
        if answer == "stop":
            callbacks_of(trainer, StopOnSignal)[0].received = signal.SIGTERM
        trainer.should_stop |= answer != "go"


class RunProcess(Child):
    """A process that trains a run. It may have processes of its own, for environments."""

    def __init__(self, train: Train, plan: RunPlan) -> None:
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        context: Any = get_context("forkserver")  # which imports torch once for all runs
        context.set_forkserver_preload([train.__module__])
        super().__init__(context, work, (train, plan), plan.name)


def work(train: Train, plan: RunPlan, pipe: Connection) -> None:
    """Train a run, with its output in a file, and send how it ended."""
    print_into(plan.log)

    def ask(message: Message) -> Answer:
        try:
            pipe.send(message)
            return pipe.recv()
        except (EOFError, OSError):  # the study was killed; the run continues from what it has saved
            os._exit(1)

    try:
        wait_for_lock(plan)
        train(plan, ask)
        end = Message("ended")
    except SettingError as error:
        end = Message("failed", text=str(error))
    except (KeyboardInterrupt, SystemExit):
        end = Message("stopped")
    except Exception as error:  # an environment of others may raise anything
        traceback.print_exc()
        end = Message("failed", text=error_line(error))
    sys.stdout.flush()
    with suppress(OSError):
        pipe.send(end)


def print_into(log: Path) -> None:
    """Append what this process prints to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def wait_for_lock(plan: RunPlan) -> None:
    """Wait until no process of a killed study trains in the folder of a run any more."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    for folder in plan.root.glob(f"*/*/{plan.name}"):
        while True:
            try:
                with locked(folder):
                    break
            except SettingError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
