"""Runs in processes of their own, side by side: how they start, report, wait for an answer, and end with the program that started them."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl

from lightning_rl.callbacks.progress import describe_progress
from lightning_rl.callbacks.protocols import AlgorithmRun, callbacks_of
from lightning_rl.callbacks.stopping import StopOnSignal
from lightning_rl.checkpoints.atomic import locked
from lightning_rl.errors import SettingError
from lightning_rl.processes import Child, error_line
from lightning_rl.startup import start_fork_server

Answer = Literal["go", "prune", "stop"]
"""What a run does after a report: go on; end; save and leave the rest for later."""
Ask = Callable[["Message"], Answer]
LOCK_TIMEOUT = 20.0
"""Seconds for the processes of a killed program to notice that it is gone."""
SECONDS_BETWEEN_REPORTS = 0.5


@dataclass(frozen=True)
class Message:
    """What a run reports: that it `begins`, its `progress`, an `evaluation`, that it `ended`, `failed` or was `stopped`.

    Args:
        count: environment steps or updates so far.
        value: the monitored metric of an evaluation.
        final: whether the run ends with this evaluation.
        text: its progress, or why it failed.
    """

    kind: Literal["begins", "progress", "evaluation", "ended", "failed", "stopped"]
    count: int = 0
    value: float = math.nan
    final: bool = False
    text: str = ""

    @property
    def waits(self) -> bool:
        """Return whether the run waits for an answer."""
        return self.kind in ("begins", "progress", "evaluation")


@dataclass(frozen=True)
class RunPlan:
    """A run to train.

    Args:
        options: of `fit`, without those that follow from the other fields.
        root: the folder of all runs.
        folder: that of the run, in the root.
        seed: `seed_everything` of the run.
        imports: modules to import first.
        log: the file for what the run prints.
        width: letters that there is room for in a report of its progress; None reports none.
        settings: what its `config.yaml` shall hold, as config files may change before it starts; None checks nothing.
    """

    options: tuple[str, ...]
    root: Path
    folder: Path
    seed: int
    imports: tuple[str, ...]
    log: Path
    width: int | None = None
    settings: dict[str, Any] | None = None

    @property
    def fit_options(self) -> list[str]:
        """Return all options of `fit`."""
        named = {"seed_everything": self.seed, "trainer.default_root_dir": self.root, "trainer.run_name": self.folder.name}
        return [*self.options, *(f"--{name}={value}" for name, value in named.items())]


Train = Callable[[RunPlan, Ask], None]
"""Trains a run from its last checkpoint, if it has one; a function of a module, as other processes import it."""


class ReportRun(pl.Callback):
    """Report the beginning, the evaluations and, where a plan has a width for it, the progress of a run, and do what the answer says.

    It must come after callbacks that save the best weights or stop the run, so that they have seen the evaluation.
    """

    def __init__(self, ask: Ask, monitor: str, width: int | None) -> None:
        self.ask, self.monitor, self.width = ask, monitor, width

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:  # type: ignore[override]
        self.first, self.began = pl_module.count, time.monotonic()
        self.reported = self.began
        self._obey(trainer, self.ask(Message("begins", pl_module.count)))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, outputs: object, batch: object, batch_idx: int) -> None:  # type: ignore[override]
        now = time.monotonic()
        if self.width is not None and (now - self.reported >= SECONDS_BETWEEN_REPORTS or pl_module.finished):
            self.reported = now
            text = describe_progress(pl_module, self.first, now - self.began, self.width)
            self._obey(trainer, self.ask(Message("progress", pl_module.count, text=text)))

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, metrics: dict[str, float]) -> None:
        """Report the monitored metric."""
        final = trainer.should_stop or pl_module.finished
        self._obey(trainer, self.ask(Message("evaluation", pl_module.count, metrics.get(self.monitor, math.nan), final)))

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
        super().__init__(context, work, (train, plan), plan.folder.name)


class RunPool:
    """Trains runs, so many at a time. The first signal lets all of them save and stop.

    Args:
        train: trains a run.
        jobs: how many are trained at a time.
    """

    def __init__(self, train: Train, jobs: int) -> None:
        self.train, self.jobs = train, jobs
        self.signals = StopOnSignal()
        self.processes: dict[int, RunProcess] = {}
        """Those that train, by a number of each run."""

    @property
    def received(self) -> signal.Signals | None:
        """Return the signal that asked the runs to stop."""
        return self.signals.received

    @property
    def has_room(self) -> bool:
        """Return whether another run may start."""
        return self.received is None and len(self.processes) < self.jobs

    @contextmanager
    def open(self) -> Iterator[None]:
        """Handle signals while runs are trained; end those that are left when an error ends this."""
        start_fork_server(self.train.__module__)
        try:
            with self.signals.listening(self._stop_all):
                yield
        finally:
            for process in self.processes.values():
                process.kill()

    def start(self, number: int, plan: RunPlan) -> None:
        """Start a run."""
        self.processes[number] = RunProcess(self.train, plan)

    def receive(self, timeout: float = 0.2) -> Iterator[tuple[int, Message]]:
        """Yield what runs report. A run that does not wait for an answer is over, and its process has ended."""
        numbers: dict[Any, int] = {process.pipe: number for number, process in self.processes.items()}
        for pipe in wait(list(numbers), timeout):
            number = numbers[pipe]
            try:
                message = self.processes[number].pipe.recv()
            except (EOFError, OSError):
                reason = self.processes[number].exit_reason()
                message = Message("failed" if self.received is None else "stopped", text=reason)
            if not message.waits:
                self.processes.pop(number).kill()
            yield number, message

    def answer(self, number: int, answer: Answer = "go") -> None:
        """Answer a run; one that may go on stops if a signal came."""
        with suppress(OSError):  # it died, which is what is received next
            self.processes[number].pipe.send("stop" if answer == "go" and self.received is not None else answer)

    def _stop_all(self, number: int) -> None:
        for process in list(self.processes.values()):
            with suppress(OSError, ValueError):  # it has just ended
                os.kill(process.process.pid or 0, signal.SIGTERM)


def work(train: Train, plan: RunPlan, pipe: Connection) -> None:
    """Train a run, with its output in a file, and send how it ended."""
    print_into(plan.log)

    def ask(message: Message) -> Answer:
        try:
            pipe.send(message)
            return pipe.recv()
        except (EOFError, OSError):  # the program was killed; the run continues from what it has saved
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
    finish_wandb(end)
    sys.stdout.flush()
    with suppress(OSError):
        pipe.send(end)


def finish_wandb(end: Message) -> None:
    """Let Weights & Biases write all it has, as it does when an ordinary program exits."""
    wandb: Any = sys.modules.get("wandb")
    if wandb is not None:
        wandb.finish(exit_code=int(end.kind == "failed"))


def print_into(log: Path) -> None:
    """Append what this process prints to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def wait_for_lock(plan: RunPlan) -> None:
    """Wait until no process of a killed program trains in the folder of a run any more."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while plan.folder.exists():
        try:
            with locked(plan.folder):
                break
        except SettingError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
