"""Storage of a replay buffer: rows of trees as records, and how the next observation is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.errors import SettingError, check_flag, check_range
from lightning_rl.types import Tree, tree_index, tree_leaves, tree_map


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


class Seen(NamedTuple):
    """An observation, and which actions were legal: `mask [M]`, () where nothing is ruled out."""

    obs: Tree
    mask: Tree = ()


NOTHING = Seen(())


class Row(NamedTuple):
    """A transition as stored, but for what came next.

    ended: the episode, terminated or truncated, ends here.  memory: the policy's before the row, as it used it.
    """

    seen: Seen
    action: Tree
    reward: Any
    terminated: Any
    ended: Any
    memory: Tree = ()


class StoredNext:
    """Each row keeps what was seen next: one gather reads all of it.

    Args:
        template: one row.
        lanes: N rings of rows.
        length: transitions in each.
        directory: where to keep them instead of in memory.
        frames: how many frames the environment stacks; they are stored as they come.
    """

    spare = 0
    """Slots of a ring that hold no transition."""
    ahead = 0
    """Slots of a ring that hold what followed its newest row, and nothing of an older one."""

    def __init__(self, template: Row, lanes: int, length: int, directory: Path | None, frames: int = 1) -> None:
        self.frames = frames
        self.table = RowTable((template, template.seen), lanes * length, directory)
        self.row, self.next_seen = self.table.columns

    @staticmethod
    def bytes_per_row(template: Row, frames: int = 1) -> int:
        """What a transition takes."""
        return record_type((template, template.seen)).itemsize

    def write(self, rows: np.ndarray, row: Row, next_seen: Seen) -> None:
        """Write one row into each of some rings."""
        self.table.write(rows, (row, next_seen))

    def cut(self, rows: np.ndarray) -> None:
        """End the episodes of the newest rows of some rings."""
        self.row.ended[rows] = True

    def read(self, rows: np.ndarray, last: np.ndarray) -> tuple[Row, Seen]:
        """Rows, and what was seen after the last rows of their windows."""
        row, next_seen = self.table.take(rows)
        return row, next_seen if last is rows else self.table.take(last)[1]

    @property
    def nbytes(self) -> int:
        """What all rows take."""
        return self.table.records.nbytes

    def part_types(self) -> list[np.dtype]:
        """The types of `parts`."""
        return [self.table.records.dtype]

    def parts(self, rows: np.ndarray, after: np.ndarray) -> list[np.ndarray]:
        """All that is stored of rows, and in the slots after the last of them in each ring, as arrays."""
        return [self.table.records.take(rows)]

    def restore(self, rows: np.ndarray, after: np.ndarray, parts: list[np.ndarray]) -> None:
        """The inverse.

        Raises:
            ValueError: parts of other rows.
        """
        check_lengths(parts, [len(rows)])
        self.table.records[rows] = parts[0]

    def position(self) -> dict[str, Any]:
        """What is stored beside the rows: nothing."""
        return {}

    def continue_from(self, position: dict[str, Any]) -> None:
        """The inverse, before rows are restored."""


class DerivedNext:
    """An observation is stored once: what followed a row is the observation of the next, or lies in a side table where an episode ended.

    Of stacked frames only the newest is stored; the others are those of the rows before, the first one of an episode repeated. Each ring
    has slots beside its transitions, for what followed the newest one and for frames before the oldest. Other arguments as `StoredNext`.

    Args:
        frames: how many frames the environment stacks along the first dimension of its observations.
    """

    ahead = 1

    def __init__(self, template: Row, lanes: int, length: int, directory: Path | None, frames: int = 1) -> None:
        self.frames, self.spare = frames, frames
        self.slots = length + self.spare
        frame = _newest(template.seen, frames, 0)
        self.observations = RowTable(frame, lanes * self.slots, directory)
        self.table = RowTable(template._replace(seen=NOTHING), lanes * self.slots, directory)
        self.row = self.table.columns
        self.time = np.zeros(lanes, dtype=np.int64)
        """Steps since the beginning of each ring's episode."""
        self.back = np.zeros(lanes * self.slots, dtype=np.uint8)
        """How many of the frames before a row belong to its episode."""
        self.final_of = np.full(lanes * self.slots, -1, dtype=np.int32)
        self.finals = RowTable(frame, 64)
        self.free = list(range(64))

    @staticmethod
    def bytes_per_row(template: Row, frames: int = 1) -> int:
        """What a transition takes, without the last observations of episodes."""
        return record_type(_newest(template.seen, frames, 0)).itemsize + record_type(template._replace(seen=NOTHING)).itemsize + 5

    def successor(self, rows: np.ndarray) -> np.ndarray:
        """The slots after rows in their rings."""
        return np.where((rows + 1) % self.slots == 0, rows + 1 - self.slots, rows + 1)

    def write(self, rows: np.ndarray, row: Row, next_seen: Seen) -> None:
        """Write one row into each of some rings."""
        lanes = rows // self.slots
        self._check_first(tree_index(row.seen.obs, self.time[lanes] == 0))
        frame, next_frame = (_newest(seen, self.frames, 1) for seen in (row.seen, next_seen))
        self.table.write(rows, row._replace(seen=NOTHING))
        for place, seen in ((rows, frame), (self.successor(rows), next_frame)):
            self.observations.write(place, seen)
        self.back[rows] = np.minimum(self.time[lanes], self.frames - 1)
        self.time[lanes] = np.where(row.ended, 0, self.time[lanes] + 1)
        self._forget_finals(rows)
        ended = np.flatnonzero(row.ended)
        if len(ended):
            self._keep_finals(rows[ended], tree_index(next_frame, ended))

    def _check_first(self, obs: Tree) -> None:
        for leaf in tree_leaves(obs) if self.frames > 1 else ():
            if not (leaf == leaf[:, -1:]).all():
                raise SettingError(
                    "an episode begins with frames that are not all its first one, so that they cannot be stored once; "
                    "set replay.optimize_memory_usage to false"
                )

    def cut(self, rows: np.ndarray) -> None:
        """End the episodes of the newest rows of some rings."""
        self.row.ended[rows] = True
        self.time[rows // self.slots] = 0
        self._keep_finals(rows, self.observations.take(self.successor(rows)))

    def _forget_finals(self, rows: np.ndarray) -> None:
        overwritten = self.final_of[rows]
        self.free.extend(overwritten[overwritten >= 0].tolist())
        self.final_of[rows] = -1

    def _keep_finals(self, rows: np.ndarray, final_seen: Seen) -> None:
        while len(self.free) < len(rows):
            size = len(self.finals.records)
            more = min(max(len(rows), size // 2), len(self.final_of) - size)
            self.free.extend(range(size, size + more))
            self.finals.resize(size + more)
        slots = np.array([self.free.pop() for _ in rows], dtype=np.int32)
        self.finals.write(slots, final_seen)
        self.final_of[rows] = slots

    def read(self, rows: np.ndarray, last: np.ndarray) -> tuple[Row, Seen]:
        """Rows, and what was seen after the last rows of their windows."""
        older = np.arange(self.frames - 1, -1, -1)
        seen = self.observations.take(self._before(rows, older))
        after = np.concatenate([self._before(last, older[1:]), self.successor(last)[:, None]], 1)
        next_seen = self.observations.take(after)
        final = self.final_of[last]
        ended = np.flatnonzero(final >= 0)
        if len(ended):
            ends = self.finals.take(final[ended])
            tree_map(lambda leaf, end: leaf.__setitem__((ended, -1), end), next_seen, ends)
        seen, next_seen = (Seen(self._stacked(each.obs), tree_index(each.mask, (slice(None), -1))) for each in (seen, next_seen))
        return self.table.take(rows)._replace(seen=seen), next_seen

    def _stacked(self, frames: Tree) -> Tree:
        return frames if self.frames > 1 else tree_index(frames, (slice(None), 0))

    def _before(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The slots `[B, k]` so many steps before rows, or of the first frame of their episodes."""
        slot = (rows % self.slots)[:, None]
        return rows[:, None] - slot + (slot - np.minimum(steps, self.back[rows][:, None])) % self.slots

    @property
    def nbytes(self) -> int:
        """What all rows take."""
        tables = self.observations.records, self.table.records, self.finals.records
        return sum(array.nbytes for array in (*tables, self.time, self.back, self.final_of))

    def part_types(self) -> list[np.dtype]:
        """The types of `parts`."""
        frame = self.observations.records.dtype
        return [self.table.records.dtype, self.back.dtype, frame, frame]

    def parts(self, rows: np.ndarray, after: np.ndarray) -> list[np.ndarray]:
        """All that is stored of rows, and in the slots after the last of them in each ring, as arrays."""
        final = self.final_of[rows]
        frames = self.observations.records.take(np.concatenate([rows, after]))
        return [self.table.records.take(rows), self.back[rows], frames, self.finals.records.take(final[final >= 0])]

    def restore(self, rows: np.ndarray, after: np.ndarray, parts: list[np.ndarray]) -> None:
        """The inverse.

        Raises:
            ValueError: parts of other rows.
        """
        table, back, frames, finals = parts
        check_lengths(parts[:3], [len(rows), len(rows), len(rows) + len(after)])
        if (back >= self.frames).any():
            raise ValueError("stacks of more frames")
        self.table.records[rows], self.back[rows] = table, back
        self.observations.records[np.concatenate([rows, after])] = frames
        self._forget_finals(rows)
        ended = rows[self.row.ended[rows]]
        check_lengths([finals], [len(ended)])
        self._keep_finals(ended, self.finals.of(finals))

    def position(self) -> dict[str, Any]:
        """What is stored beside the rows: how long each ring's episode has been."""
        return {"time": self.time}

    def continue_from(self, position: dict[str, Any]) -> None:
        """The inverse, before rows are restored."""
        self.time[:] = check_counts(position["time"], self.time.shape)
        self.final_of[:] = -1
        self.finals.resize(64)
        self.free = list(range(64))


def check_counts(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Whole numbers from a file, none of them negative.

    Raises:
        ValueError: they are not.
    """
    counts = np.asarray(value)
    if counts.shape != shape or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ValueError("numbers that count nothing")
    return counts.astype(np.int64)


def check_lengths(arrays: Sequence[np.ndarray], lengths: Sequence[int]) -> None:
    """Raise `ValueError` unless arrays have these lengths."""
    found = [len(array) for array in arrays]
    if found != list(lengths):
        raise ValueError(f"{found} rows instead of {list(lengths)}")


def _newest(seen: Seen, frames: int, dim: int) -> Seen:
    """The newest of stacked frames."""
    return seen if frames == 1 else seen._replace(obs=tree_map(lambda leaf: leaf.take(-1, dim), seen.obs))


@dataclass(frozen=True)
class ReplayConfig:
    """How a replay buffer keeps its rows and draws them.

    Args:
        prioritized: draw rows in proportion to their errors instead of all alike.
        alpha: exponent of the priorities; 0 is uniform.
        beta: first exponent of the importance weights; it grows to 1 over the run.
        replace: whether a row may be drawn twice for one batch.
        optimize_memory_usage: store each observation once instead of beside the row before it too, and each of stacked frames; nothing is
            gained where episodes take few steps.
        directory: keep the rows in files there instead of in memory, while the run lasts.
        demonstrations: by their name, such as `cartpole/expert-v0`; from Python also a list of them. A new run's buffer is filled with them
            before its first step; they are no environment steps, and give way to new rows when it is full.
        demonstration_share: keep them beside the buffer instead, for good, and draw this share of each batch from them, all alike.
    """

    prioritized: bool = False
    alpha: float = 0.6
    beta: float = 0.4
    replace: bool = True
    optimize_memory_usage: bool = False
    directory: str | None = None
    demonstrations: str | None = None
    demonstration_share: float | None = None

    def __post_init__(self) -> None:
        check_range("replay.alpha", self.alpha, 0, 1)
        check_range("replay.beta", self.beta, 0, 1)
        for name in ("prioritized", "replace", "optimize_memory_usage"):
            check_flag(f"replay.{name}", getattr(self, name))
        if self.directory is not None and not isinstance(self.directory, str | Path):
            raise SettingError(f"replay.directory must be the name of a folder, got {self.directory!r}")
        if self.demonstrations is not None and not (self.demonstrations and isinstance(self.demonstrations, str | list)):
            raise SettingError(f"replay.demonstrations must be the name of a dataset, got {self.demonstrations!r}")
        share = self.demonstration_share
        if share is not None and (not isinstance(share, int | float) or not 0 < share < 1):
            raise SettingError(f"replay.demonstration_share must be a number > 0 and < 1, got {share!r}")
        if self.prioritized and not self.replace:
            raise SettingError("replay.replace false does not go with replay.prioritized: rows drawn by their errors may come twice")

    @property
    def layout(self) -> type[StoredNext] | type[DerivedNext]:
        """How rows are kept."""
        return DerivedNext if self.optimize_memory_usage else StoredNext
