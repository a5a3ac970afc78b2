"""Write `metrics.csv` and `evaluations.csv`, and pass rows to other loggers; a full disk does not stop a run."""

import csv
import itertools
import logging
import os
import re
import stat
import threading
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from shlex import quote

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from lightning_rl.checkpoints.atomic import write_text
from lightning_rl.errors import causes_of
from lightning_rl.settings.yaml_files import Plain

Row = Mapping[str, object]


class MetricsLogger(Logger):
    """Writes `metrics.csv`, with the run's count in the first column. Each row is flushed; a new metric adds a column to the whole file.

    Args:
        count: returns the run's progress; it replaces the iteration number in the rows that Lightning logs.
    """

    def __init__(
        self, folder: Path, count: Callable[[], int] | None = None, counter: str = "env_steps", say: Callable[[str], None] = print
    ) -> None:
        super().__init__()
        self.folder, self.count, self.counter = folder, count, counter
        self.table = CsvTable(folder / "metrics.csv", counter, say)

    @property
    def name(self) -> str:
        return ""

    version = name

    @property
    def log_dir(self) -> str:
        return str(self.folder)

    save_dir = log_dir

    @property
    def file(self) -> Path:
        return self.table.file

    @rank_zero_only
    def log_hyperparams(self, params: Plain | Namespace, *args: object, **kwargs: object) -> None:
        """Do nothing: the settings are in `config.yaml` next to this file."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.table.add([{self.counter: step if self.count is None else self.count(), **metrics}])

    @rank_zero_only
    def cut_back(self, count: int) -> None:
        self.table.cut_back(count)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.table.finish()


class CsvTable:
    """A CSV file to which a run appends rows. No row is lost: rows that cannot be written are retried later.

    A file that something else has changed (deleted, truncated, replaced) is read and rewritten as a whole. One without the counter's
    column is renamed. A symbolic link is replaced, never followed for writing.

    `counter`: the column of the run's count.  `say`: prints a line for the user.
    """

    def __init__(self, file: Path, counter: str, say: Callable[[str], None] = print) -> None:
        self.file, self.counter, self.say = file, counter, say
        self.columns: list[str] = []
        self.waiting: list[Row] = []
        self.left_as: tuple[int, int] | None = None

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows, after those that are pending. If that fails, print a line once and keep them pending."""
        new = list(rows)
        try:
            self._add([*self.waiting, *new])
            self.waiting = []
        except OSError as error:
            if not self.waiting:
                self.say(f"{self.file} could not be written ({error.strerror or error}): its rows are retried later, the run goes on")
            self.waiting += new

    def cut_back(self, count: int) -> None:
        """Remove rows past the checkpoint from which the run resumes. Raises `OSError`: the file cannot be written."""
        if os.path.lexists(self.file):
            self._write([row for row in self._read() if _number(row[self.counter]) <= count])

    def finish(self) -> None:
        """Write pending rows, or report that they are lost."""
        if self.waiting:
            self.add([])
        if self.waiting:
            self.say(f"{len(self.waiting)} rows of {self.file} are lost: it still cannot be written")

    def _add(self, rows: list[Row]) -> None:
        is_unchanged = self.left_as is not None and self.left_as == _identity(self.file)
        if self.left_as is None or not is_unchanged or not set(self.columns).issuperset(itertools.chain.from_iterable(rows)):
            self._write([*self._read(), *rows])
            return
        inode, size = self.left_as
        data = _as_text(self.columns, rows).encode()
        try:
            with open(os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), "wb", buffering=0) as stream:
                written = stream.write(data)
                if written < len(data):
                    stream.write(data[written:])  # raises the reason
        except OSError:
            with suppress(OSError):
                os.truncate(self.file, size)  # half a row would corrupt the next one
            raise
        self.left_as = inode, size + len(data)

    def _write(self, rows: list[Row]) -> None:
        """Replace the whole file atomically."""
        columns = list(dict.fromkeys([self.counter, *itertools.chain.from_iterable(rows)]))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.file, _as_text(columns, [dict(zip(columns, columns, strict=True)), *rows]))
        self.columns, self.left_as = columns, _identity(self.file)

    def _read(self) -> list[dict[str, str]]:
        """Read the rows of the file; a file that is not a table of this run is renamed."""
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
        except OSError:  # no permission to read it
            return True


def read_rows(file: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file, without incomplete rows from a kill or a full disk; no rows if the file does not exist."""
    columns, *rows = _lines(file) or [[]]
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def _as_text(columns: list[str], rows: Iterable[Row]) -> str:
    text = StringIO(newline="")
    csv.DictWriter(text, columns).writerows(rows)
    return text.getvalue()


def _lines(file: Path) -> list[list[str]]:
    """Read the cells of all complete lines, each line separately: an open quote in one line does not swallow the others."""
    if not file.is_file():
        return []
    text = file.read_bytes()
    cells = []
    for line in text[: text.rfind(b"\n") + 1].decode(errors="replace").split("\n")[:-1]:
        try:
            cells.append(next(csv.reader([line]), []))
        except csv.Error:
            cells.append([])
    return cells


def _identity(file: Path) -> tuple[int, int] | None:
    """Return inode and size, which show that something else changed a file; None if it is not a regular file."""
    try:
        status = os.lstat(file)
    except OSError:
        return None
    return (status.st_ino, status.st_size) if stat.S_ISREG(status.st_mode) else None


def _number(text: str) -> float:
    """Return the number in a cell; infinity, which is past every checkpoint, if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return float("inf")


@contextmanager
def going_on(say: Callable[[str], None], what: str) -> Iterator[None]:
    """Print a line and continue if something cannot be written."""
    try:
        yield
    except OSError as error:
        say(f"{what} could not be written, the run goes on: {error.strerror or error}")


def log_row(trainer: pl.Trainer, row: dict[str, float], step: int, say: Callable[[str], None]) -> None:
    """Pass a row of metrics to all loggers and to callbacks that monitor a metric; `say` prints which logger could not write it."""
    for logger in reversed(trainer.loggers):  # ours is last in the list: its file gets the row even if others fail
        name = type(logger).__name__
        try:
            logger.log_metrics(row, step=step)
            logger.save()  # waits for TensorBoard's thread, whose error would otherwise end the run where Lightning closes loggers
        except Exception as error:  # TensorBoard wraps the error of its thread
            refused = next((cause for cause in causes_of(error) if isinstance(cause, OSError)), None)
            if refused is None:
                raise
            why = refused.strerror or refused
            if isinstance(logger, TensorBoardLogger):  # its thread has ended
                say(f"{name} could not write and is turned off, the run goes on: {why}")
                trainer.loggers = [other for other in trainer.loggers if other is not logger]
            else:
                say(f"a row of {name} could not be written, the run goes on: {why}")
    show_to_callbacks(trainer, row)


def show_to_callbacks(trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
    """Put metrics where callbacks such as EarlyStopping and ModelCheckpoint look for them."""
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})


HIDDEN_NOTICES = ("💡", "GPU available", "TPU available", "HPU available", "`Trainer.fit` stopped", "`weights_only` was not set")
"""First words of Lightning's advertisements and of its notices about devices and defaults."""
warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning, "pytorch_lightning")  # caused by Lightning; users cannot fix it
for words in ("`.fit(ckpt_path=None)` was called without a model", '.fit(ckpt_path="last") is set, but there is no last checkpoint'):
    warnings.filterwarnings("ignore", re.escape(words))  # printed with OnExceptionCheckpoint; our Trainer finds checkpoints itself


def is_wanted(notice: logging.LogRecord) -> bool:
    """Return whether a notice of Lightning is about the run."""
    return not notice.getMessage().startswith(HIDDEN_NOTICES)


@contextmanager
def hidden_notices() -> Iterator[None]:
    """Hide Lightning's notices that are not about the run."""
    logger = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


@rank_zero_only
def set_up_wandb(logger: WandbLogger, config: Plain, counter: str) -> None:
    """Make Weights & Biases plot over the run's count, like the other loggers, and store the run's settings."""
    init = logger._wandb_init
    if logger._offline:
        init["mode"] = "offline"  # Lightning sets WANDB_MODE, which is read only once per process
    if init["anonymous"] is None:
        del init["anonymous"]  # wandb warns about any value
    init["dir"] = init["dir"] and os.path.abspath(init["dir"])  # wandb's service resolves relative paths against its own folder
    logger.experiment.define_metric(counter)
    logger.experiment.define_metric("*", step_metric=counter, step_sync=True)
    logger.log_hyperparams({name: value for name, value in config.items() if name != "model"})


def how_to_upload(logger: Logger) -> str | None:
    """Return the command that uploads the files of an offline Weights & Biases logger; None for other loggers."""
    if not (isinstance(logger, WandbLogger) and logger._offline):
        return None
    return f"wandb sync {quote(os.path.relpath(os.path.dirname(logger.experiment.dir)))}"


@contextmanager
def quiet_tensorboard() -> Iterator[None]:
    """Suppress the traceback of an `OSError` in TensorBoard's thread; the error is reported with the next row."""
    before = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith("tensorboard.")):
            before(failure)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before
