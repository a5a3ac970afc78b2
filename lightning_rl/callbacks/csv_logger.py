"""`metrics.csv`: a row for each call, written at once."""

from __future__ import annotations

import csv
from argparse import Namespace
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from lightning_rl.saving.atomic import write_text


class MetricsLogger(Logger):
    """Writes `metrics.csv`: what the run counts first, a row flushed as it is written. A new metric adds a column to the whole file.

    Args:
        folder: of the run.
        count: how far the run is; Lightning's own rows, which come with the number of iterations, get this instead.
        counter: the name of what is counted.
    """

    def __init__(self, folder: Path, count: Callable[[], int] | None = None, counter: str = "env_steps") -> None:
        super().__init__()
        self.count, self.counter = count, counter
        self.folder = folder
        self.file = folder / "metrics.csv"
        self.columns: list[str] = []
        if self.file.exists():
            self.columns = next(iter(_lines(self.file)), [])

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

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The settings stand in `config.yaml` beside this file."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {self.counter: step if self.count is None else self.count(), **metrics}
        missing = [name for name in row if name not in self.columns]
        if missing:
            self.columns += missing
            self._rewrite(read_rows(self.file))
        with self.file.open("a", newline="") as stream:
            csv.DictWriter(stream, self.columns).writerow(row)

    @rank_zero_only
    def cut_back(self, count: int) -> None:
        """Forget rows beyond a checkpoint from which the run continues."""
        if self.file.exists():
            self._rewrite([row for row in read_rows(self.file) if int(row[self.counter]) <= count])

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        write_rows(self.file, self.columns, rows)


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if it does not exist. What a kill or a full disk left of a row is none."""
    columns, *rows = _lines(file) or [[]]
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def write_rows(file: Path, columns: list[str], rows: list[dict[str, str]]) -> None:
    """Replace a CSV file as a whole, or leave it as it is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(file, text.getvalue())


def _lines(file: Path) -> list[list[str]]:
    """The cells of all lines that end."""
    if not file.exists():
        return []
    text = file.read_bytes()
    return list(csv.reader(StringIO(text[: text.rfind(b"\n") + 1].decode(errors="replace"), newline="")))
