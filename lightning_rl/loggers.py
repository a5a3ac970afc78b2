"""`metrics.csv` and `evaluations.csv`, and rows of other loggers; a full disk does not end a run."""

from __future__ import annotations

import csv
import itertools
import os
import stat
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from lightning_rl.checkpoints.atomic import write_text

Row = Mapping[str, Any]


class MetricsLogger(Logger):
    """Writes `metrics.csv`: what the run counts first, a row flushed as it is written. A new metric adds a column to the whole file.

    Args:
        folder: of the run.
        count: how far the run is; Lightning's own rows, which come with the number of iterations, get this instead.
        counter: the name of what is counted.
        say: prints a line for the user.
    """

    def __init__(
        self,
        folder: Path,
        count: Callable[[], int] | None = None,
        counter: str = "env_steps",
        say: Callable[[str], None] = print,
    ) -> None:
        super().__init__()
        self.count, self.counter, self.say = count, counter, say
        self.folder = folder
        self.table = CsvTable(folder / "metrics.csv", counter, say)

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        return str(self.folder)

    @property
    def file(self) -> Path:
        """Where the rows are."""
        return self.table.file

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The settings stand in `config.yaml` beside this file."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.table.add([{self.counter: step if self.count is None else self.count(), **metrics}])

    @rank_zero_only
    def cut_back(self, count: int) -> None:
        """Forget rows beyond a checkpoint from which the run continues."""
        self.table.cut_back(count)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.table.finish()


class CsvTable:
    """A CSV file of what a run counts, which grows by rows. None is lost: those that the disk refuses wait until it takes them.

    A file that is not as this process left it (deleted, cut, replaced) is read and written again as a whole, and one without the counter's
    column is renamed. A link is replaced, never written through.

    Args:
        file: where the rows are.
        counter: the column that says how far the run was.
        say: prints a line for the user.
    """

    def __init__(self, file: Path, counter: str, say: Callable[[str], None] = print) -> None:
        self.file, self.counter, self.say = file, counter, say
        self.columns: list[str] = []
        self.waiting: list[Row] = []
        self.left_as: tuple[int, int] | None = None

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows, after those that wait. Where the disk refuses, one line says so, and they wait."""
        new = list(rows)
        try:
            self._add([*self.waiting, *new])
            self.waiting = []
        except OSError as error:
            if not self.waiting:
                self.say(f"{self.file} could not be written ({error.strerror or error}): its rows wait until it can be, the run goes on")
            self.waiting += new

    def cut_back(self, count: int) -> None:
        """Forget rows beyond a checkpoint from which the run continues; raises `OSError` where the disk refuses."""
        if os.path.lexists(self.file):
            self._write([row for row in self._read() if _number(row[self.counter]) <= count])

    def finish(self) -> None:
        """Write what still waits, or say that it is lost."""
        if self.waiting:
            self.add([])
        if self.waiting:
            self.say(f"{len(self.waiting)} rows of {self.file} are lost: it still cannot be written")

    def _add(self, rows: list[Row]) -> None:
        known = self.left_as is not None and self.left_as == _identity(self.file)
        if known and set(self.columns).issuperset(itertools.chain.from_iterable(rows)):
            self._append(rows)
        else:
            self._write([*self._read(), *rows])

    def _append(self, rows: list[Row]) -> None:
        assert self.left_as is not None
        inode, size = self.left_as
        data = _as_text(self.columns, rows).encode()
        try:
            with open(os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), "wb", buffering=0) as stream:
                written = stream.write(data)
                if written < len(data):
                    stream.write(data[written:])  # raises what the disk has against it
        except OSError:
            with suppress(OSError):
                os.truncate(self.file, size)  # half a row would spoil the next one
            raise
        self.left_as = inode, size + len(data)

    def _write(self, rows: list[Row]) -> None:
        """Replace the file as a whole, or leave it as it is."""
        columns = list(dict.fromkeys([self.counter, *itertools.chain.from_iterable(rows)]))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.file, _as_text(columns, [dict(zip(columns, columns, strict=True)), *rows]))
        self.columns, self.left_as = columns, _identity(self.file)

    def _read(self) -> list[dict[str, str]]:
        """The rows of the file. What is no table of this run makes room under another name."""
        if self._is_foreign():
            names = (self.file.with_name(f"{self.file.name}.unreadable{number or ''}") for number in itertools.count())
            name = next(name for name in names if not os.path.lexists(name))
            os.rename(self.file, name)
            self.say(f"{self.file} has no column {self.counter}: it is now {name.name}, and a new file begins")
        return read_rows(self.file)

    def _is_foreign(self) -> bool:
        if not os.path.lexists(self.file):
            return False
        try:
            return not self.file.is_file() or (self.file.stat().st_size > 0 and self.counter not in next(iter(_lines(self.file)), []))
        except OSError:  # it may not be read
            return True


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if it does not exist. What a kill or a full disk left of a row is none."""
    columns, *rows = _lines(file) or [[]]
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def _as_text(columns: list[str], rows: Iterable[Row]) -> str:
    text = StringIO(newline="")
    csv.DictWriter(text, columns).writerows(rows)
    return text.getvalue()


def _lines(file: Path) -> list[list[str]]:
    """The cells of all lines that end."""
    if not file.is_file():
        return []
    text = file.read_bytes()
    return [_cells(line) for line in text[: text.rfind(b"\n") + 1].decode(errors="replace").split("\n")[:-1]]


def _cells(line: str) -> list[str]:
    """The cells of one line, read alone: an open quote in one does not swallow the others."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _identity(file: Path) -> tuple[int, int] | None:
    """What changes when something else writes, cuts or replaces a file; None if there is none of its own."""
    try:
        status = os.lstat(file)
    except OSError:
        return None
    return (status.st_ino, status.st_size) if stat.S_ISREG(status.st_mode) else None


def _number(text: str) -> float:
    """What a cell counts; infinity if it is no number, which is beyond every checkpoint."""
    try:
        return float(text)
    except ValueError:
        return float("inf")


@contextmanager
def going_on(algorithm: Any, what: str) -> Iterator[None]:
    """Where the system does not let us write, one line says so and the run goes on."""
    try:
        yield
    except OSError as error:
        algorithm.say(f"{what} could not be written, the run goes on: {error.strerror or error}")


def log_row(trainer: Any, algorithm: Any, metrics: Mapping[str, float]) -> None:
    """A row of metrics over what the run counts, for all loggers, and for callbacks that monitor one."""
    row = {algorithm.counter: algorithm.count, **metrics}
    for logger in list(trainer.loggers):
        try:
            with going_on(algorithm, f"a row of {type(logger).__name__}"):
                logger.log_metrics(row, step=algorithm.count)
        except Exception as error:  # TensorBoard wraps what its thread met, and can write no more
            refused = next((cause for cause in causes(error) if isinstance(cause, OSError)), None)
            if refused is None:
                raise
            algorithm.say(f"{type(logger).__name__} could not write and is left out, the run goes on: {refused.strerror or refused}")
            trainer.loggers = [each for each in trainer.loggers if each is not logger]
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in row.items()})


@contextmanager
def quiet_tensorboard() -> Iterator[None]:
    """What TensorBoard's thread meets on the disk is reported with the next row, not with a traceback of the thread as well."""
    before = threading.excepthook

    def report(failure: Any) -> None:
        if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith("tensorboard.")):
            before(failure)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
