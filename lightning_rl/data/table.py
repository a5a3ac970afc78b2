"""Rows of trees in one array of records: a row is read and written in one piece, whatever its parts."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from lightning_rl.errors import SettingError
from lightning_rl.types import Tree, tree_leaves, tree_map


def record_type(template: Tree) -> np.dtype:
    """One row of a table: the leaves of a tree side by side."""
    return np.dtype([(str(i), leaf.dtype, leaf.shape) for i, leaf in enumerate(tree_leaves(template))], align=True)


class RowTable:
    """`rows` rows that look like `template`, in memory or in a file.

    Gathering at random places costs a cache miss for each array; the leaves of one record lie side by side.

    Args:
        template: a tree of arrays, one row.
        rows: how many.
        directory: keep them in a file there instead of in memory: one of our own, which is gone when this process is.
    """

    def __init__(self, template: Tree, rows: int, directory: Path | None = None) -> None:
        names = iter(range(len(tree_leaves(template))))
        self._names = tree_map(lambda leaf: str(next(names)), template)
        if directory is None:
            self.records: Any = np.zeros(rows, record_type(template))
        else:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                with TemporaryFile(dir=directory) as file:  # the mapping outlives it
                    self.records = np.asarray(np.memmap(file, record_type(template), mode="w+", shape=(rows,)))
            except OSError as error:
                raise SettingError(f"replay.directory {str(directory)!r}: {error.strerror}; name a folder to write to") from error
        self._view()

    def _view(self) -> None:
        self.columns = self._fields(self.records)
        """The leaves `[rows, ...]`, as views to read and write."""
        self._leaves = tree_leaves(self.columns)

    def _fields(self, records: np.ndarray) -> Tree:
        return tree_map(lambda name: records[name], self._names)

    def write(self, rows: np.ndarray, tree: Tree) -> None:
        """Write leaves `[*rows.shape, ...]` over rows."""
        for column, leaf in zip(self._leaves, tree_leaves(tree), strict=True):
            column[rows] = leaf

    def take(self, rows: np.ndarray) -> Tree:
        """Copies of rows `[*rows.shape, ...]`."""
        return self._fields(self.records.take(rows))

    def of(self, records: np.ndarray) -> Tree:
        """The leaves of records of this table's type."""
        return self._fields(records)

    def resize(self, rows: int) -> None:
        """Have so many rows, the first of them as they were."""
        self.records = np.concatenate([self.records[:rows], np.zeros(max(0, rows - len(self.records)), self.records.dtype)])
        self._view()
