"""Parallel runs in separate processes: they report, wait for an answer, and end with the program that started them."""

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

from lightning_rl.callbacks import AlgorithmRun, callbacks_of
from lightning_rl.callbacks.progress import describe_progress
from lightning_rl.callbacks.stopping import StopOnSignal
from lightning_rl.checkpoints.atomic import locked
from lightning_rl.errors import SettingError, UnsavedError
from lightning_rl.processes.children import Child, error_line
from lightning_rl.processes.startup import start_fork_server
from lightning_rl.settings.yaml_files import Plain

Answer = Literal["go", "prune", "stop"]
"""What a run does after a report: continue; end; or save and stop, to be resumed later."""
Ask = Callable[["Message"], Answer]
LOCK_TIMEOUT = 20.0
"""Seconds for the processes of a killed program to notice that it is dead."""
SECONDS_BETWEEN_REPORTS = 0.5


@dataclass(frozen=True)
class Message:
    """A report of a run: it `begins`, its `progress`, an `evaluation`, or it `ended`, `failed`, was `stopped` or could not be saved.

    Args:
        count: environment steps or updates so far.
        value: the monitored metric of an evaluation.
        final: the run ends with this evaluation.
        text: the progress, or why it failed or is unsaved.
    """

    kind: Literal["begins", "progress", "evaluation", "ended", "failed", "stopped", "unsaved"]
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
        options: options of `fit`, without those that follow from the other fields.
        root: the folder of all runs.
        folder: the run's folder, inside the root.
        seed: `seed_everything` of the run.
        imports: modules to import first.
        log: the file for the run's output.
        width: maximum characters of a progress report; None: no progress reports.
        settings: expected contents of its `config.yaml`, as config files may change before it starts; None: no check.
    """

    options: tuple[str, ...]
    root: Path
    folder: Path
    seed: int
    imports: tuple[str, ...]
    log: Path
    width: int | None = None
    settings: Plain | None = None

    @property
    def fit_options(self) -> list[str]:
        """Return all options of `fit`."""
        named = {"seed_everything": self.seed, "trainer.default_root_dir": self.root, "trainer.run_name": self.folder.name}
        return [*self.options, *(f"--{name}={value}" for name, value in named.items())]


Train = Callable[[RunPlan, Ask], None]
"""Trains a run, from its last checkpoint if there is one; a module-level function, because other processes import it."""


class ReportRun(pl.Callback):
    """Report the start, the evaluations and, with a `width`, the progress of a run, and follow the answers.

    It must come after callbacks that save the best weights or stop the run, so that they see the evaluation first.
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
    """A process that trains a run. It may have child processes for environments."""

    def __init__(self, train: Train, plan: RunPlan) -> None:
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        context: Any = get_context("forkserver")  # imports torch once for all runs
        context.set_forkserver_preload([train.__module__])
        super().__init__(context, work, (train, plan), plan.folder.name)


class RunPool:
    """Trains several runs in parallel. The first signal makes all of them save and stop.

    Args:
        train: trains a run.
        jobs: maximum number of parallel runs.
    """

    def __init__(self, train: Train, jobs: int) -> None:
        self.train, self.jobs = train, jobs
        self.signals = StopOnSignal()
        self.processes: dict[int, RunProcess] = {}
        """The running processes, by the number of their run."""

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
        """Handle signals while runs train; kill processes that are still running at the end, for instance after an error."""
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
        """Yield reports of runs. A run that does not wait for an answer has finished, and its process is ended."""
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
        """Answer a run; if a signal was received, a run that could go on stops."""
        with suppress(OSError):  # it died, which `receive` reports next
            self.processes[number].pipe.send("stop" if answer == "go" and self.received is not None else answer)

    def _stop_all(self, number: int) -> None:
        for process in list(self.processes.values()):
            with suppress(OSError, ValueError):  # it has just ended
                os.kill(process.process.pid or 0, signal.SIGTERM)


def work(train: Train, plan: RunPlan, pipe: Connection) -> None:
    """Train a run, with its output in a file, and report how it ended."""
    redirect_output(plan.log)

    def ask(message: Message) -> Answer:
        try:
            pipe.send(message)
            return pipe.recv()
        except (EOFError, OSError):  # the program was killed; the run can be resumed from its last save
            os._exit(1)

    try:
        wait_for_lock(plan)
        train(plan, ask)
        end = Message("ended")
    except UnsavedError as error:
        end = Message("unsaved", text=str(error))
    except SettingError as error:
        end = Message("failed", text=str(error))
    except (KeyboardInterrupt, SystemExit):
        end = Message("stopped")
    except Exception as error:  # a user's environment may raise anything
        traceback.print_exc()
        end = Message("failed", text=error_line(error))
    finish_wandb(end)
    sys.stdout.flush()
    with suppress(OSError):
        pipe.send(end)


def finish_wandb(end: Message) -> None:
    """Let Weights & Biases write all pending data, as at the exit of an ordinary program."""
    wandb: Any = sys.modules.get("wandb")
    if wandb is not None:
        wandb.finish(exit_code=int(end.kind in ("failed", "unsaved")))


def redirect_output(log: Path) -> None:
    """Append the output of this process to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def wait_for_lock(plan: RunPlan) -> None:
    """Wait until no process of a killed program trains in the run's folder any more."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while plan.folder.exists():
        try:
            with locked(plan.folder):
                break
        except SettingError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
