"""Storage of a replay buffer: its settings, tables of records, and layouts of next observations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, NamedTuple

import numpy as np
from gymnasium.spaces import Space

from lightning_rl.data.replay.hindsight import RelabelConfig
from lightning_rl.errors import SettingError, check_path
from lightning_rl.settings.fields import OrPlain, Range, as_settings, read_fields
from lightning_rl.spaces import allocate
from lightning_rl.types import Tree, tree_index, tree_leaves, tree_map


@dataclass(frozen=True)
class ReplayConfig:
    """How a replay buffer stores and draws its rows.

    Args:
        prioritized: draw rows in proportion to their errors instead of uniformly.
        alpha: exponent of the priorities; 0 is uniform.
        beta: first exponent of the importance weights; it grows to 1 over the run.
        replace: whether a row may be drawn twice for one batch.
        optimize_memory_usage: store each observation once instead of also as the next observation of the row before, and each stacked frame
            once; saves nothing if episodes are short.
        directory: store the rows in files in this folder instead of in memory, for the duration of the run.
        demonstrations: name of a dataset, such as `cartpole/expert-v0`; from Python also a list of them. They fill the buffer of a new run
            before its first step. They do not count as environment steps, and new rows overwrite them when the buffer is full.
        demonstration_share: keep the demonstrations permanently in a second buffer instead, and draw this share of each batch from it,
            uniformly.
        relabel: replace the goals of drawn rows by goals that were reached, see `RelabelConfig`; for environments with goals.
    """

    prioritized: bool = False
    alpha: Annotated[float, Range(0, 1)] = 0.6
    beta: Annotated[float, Range(0, 1)] = 0.4
    replace: bool = True
    optimize_memory_usage: bool = False
    directory: str | None = None
    demonstrations: str | None = None
    demonstration_share: float | None = None
    relabel: OrPlain[RelabelConfig | None] = None

    def __post_init__(self) -> None:
        read_fields(self, "replay.")
        if self.directory is not None and not isinstance(self.directory, str | Path):
            raise SettingError(f"replay.directory must be the name of a folder, got {self.directory!r}")
        if self.directory is not None:
            check_path("replay.directory", self.directory)
        if self.demonstrations is not None and not (self.demonstrations and isinstance(self.demonstrations, str | list)):
            raise SettingError(f"replay.demonstrations must be the name of a dataset, got {self.demonstrations!r}")
        share = self.demonstration_share
        if share is not None and (not isinstance(share, int | float) or not 0 < share < 1):
            raise SettingError(f"replay.demonstration_share must be a number > 0 and < 1, got {share!r}")
        if self.prioritized and not self.replace:
            raise SettingError("replay.replace false cannot be combined with replay.prioritized: rows drawn by their errors may come twice")
        if self.relabel is not None:
            object.__setattr__(self, "relabel", as_settings("replay.relabel", RelabelConfig, self.relabel))

    @property
    def layout(self) -> "type[StoredNext] | type[DerivedNext]":
        """Return the class that stores the rows."""
        return DerivedNext if self.optimize_memory_usage else StoredNext


class Observation(NamedTuple):
    """An observation and the mask of legal actions at it, `mask [M]`; () without masks."""

    obs: Tree
    mask: Tree = ()


class Row(NamedTuple):
    """A stored transition without its next observation.

    ended: the episode, terminated or truncated, ends here.  memory: the policy's memory before the row.
    """

    observation: Observation
    action: Tree
    reward: np.ndarray
    terminated: np.ndarray
    ended: np.ndarray
    memory: Tree = ()


def make_row_template(space: Space, action: Tree, memory: Tree = (), action_mask: Tree = ()) -> Row:
    """Return one row of zeros, with arrays of the right shapes and dtypes."""
    flag = np.zeros((), dtype=bool)
    observation = Observation(allocate(space), action_mask)
    return Row(observation, tree_map(np.asarray, action), np.zeros((), dtype=np.float32), flag, flag, memory)


def record_type(template: Tree) -> np.dtype:
    """Return the dtype of a record that holds the leaves of a tree side by side."""
    return np.dtype([(str(i), leaf.dtype, leaf.shape) for i, leaf in enumerate(tree_leaves(template))], align=True)


class RowTable:
    """A table of `rows` rows like `template`, in memory or in a file.

    Random access costs a cache miss for each array, so the leaves of a row are side by side in one record.

    `directory`: store the rows in an unnamed file there instead of in memory; it disappears with this process.
    """

    records: np.ndarray
    columns: Tree
    """The leaves `[rows, ...]`, as views to read and write."""

    def __init__(self, template: Tree, rows: int, directory: Path | None = None) -> None:
        number, kind = count(), record_type(template)
        self._names = tree_map(lambda leaf: str(next(number)), template)
        if directory is None:
            self._keep(np.zeros(rows, kind))
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=directory) as file:  # the mapping outlives it
                self._keep(np.asarray(np.memmap(file, kind, mode="w+", shape=(rows,))))
        except OSError as error:
            raise SettingError(f"replay.directory {str(directory)!r}: {error.strerror}; name a folder to write to") from error

    def _keep(self, records: np.ndarray) -> None:
        self.records, self.columns = records, self.fields(records)
        self._leaves = tree_leaves(self.columns)

    def fields(self, records: np.ndarray) -> Tree:
        """Return the leaves of records of this table's dtype, as views."""
        return tree_map(records.__getitem__, self._names)

    def write(self, rows: np.ndarray, tree: Tree) -> None:
        """Write leaves `[*rows.shape, ...]` over rows."""
        for column, leaf in zip(self._leaves, tree_leaves(tree), strict=True):
            column[rows] = leaf

    def take(self, rows: np.ndarray) -> Tree:
        """Return copies of rows, `[*rows.shape, ...]`; numbers are contiguous, so that sums round the same way in both layouts."""
        records, flat = self.records.take(rows), rows.ndim
        return tree_map(lambda name: records[name].copy() if records[name].ndim == flat else records[name], self._names)

    def resize(self, rows: int) -> None:
        """Change the number of rows; the first rows keep their values."""
        self._keep(np.concatenate([self.records[:rows], np.zeros(max(0, rows - len(self.records)), self.records.dtype)]))


class StoredNext(RowTable):
    """A layout in which each row also holds its next observation, so that one gather reads everything.

    Args:
        lanes: N, the number of rings.
        length: transitions in each ring.
        directory: folder in which to store them instead of in memory.
        frames: number of frames that the environment stacks; they are stored unchanged.
    """

    spare = 0
    """Number of slots of a ring that hold no transition."""
    ahead = 0
    """Number of slots of a ring that hold only the observation after its newest row."""

    def __init__(self, template: Row, lanes: int, length: int, directory: Path | None, frames: int = 1) -> None:
        super().__init__((template, template.observation), lanes * length, directory)
        self.frames = frames
        self.row: Row = self.columns[0]
        self.next_observation: Observation = self.columns[1]

    @staticmethod
    def bytes_per_row(template: Row, frames: int = 1) -> int:
        """Return the bytes of a transition."""
        return record_type((template, template.observation)).itemsize

    def cut(self, rows: np.ndarray) -> None:
        """End the episodes of the newest rows of some rings."""
        self.row.ended[rows] = True

    def read(self, rows: np.ndarray, last: np.ndarray) -> tuple[Row, Observation]:
        """Return rows, and the observations after the last rows of their windows."""
        row, next_observation = self.take(rows)
        return row, next_observation if last is rows else self.take(last)[1]

    def part_types(self) -> list[np.dtype]:
        """Return the dtypes of `parts`."""
        return [self.records.dtype]

    def parts(self, rows: np.ndarray, after: np.ndarray) -> list[np.ndarray]:
        """Return everything stored in rows, and in the slots `after` the last rows of each ring, as arrays."""
        return [self.records.take(rows)]

    def restore(self, rows: np.ndarray, after: np.ndarray, parts: list[np.ndarray]) -> None:
        """Write back the result of `parts`; raise `ValueError` for parts of other rows."""
        check_lengths(parts, [len(rows)])
        self.records[rows] = parts[0]

    def position(self) -> dict[str, np.ndarray]:
        """Return the state in addition to the rows: none."""
        return {}

    def continue_from(self, position: Mapping[str, np.ndarray]) -> None:
        """Do nothing: there is no state in addition to the rows."""


class DerivedNext:
    """A layout that stores each next observation once: as the observation of the next row, or in a side table if the episode ended.

    Of stacked frames only the newest is stored; the others are taken from the rows before, repeating the first frame of an episode. Each
    ring has spare slots, for the observation after its newest row and for frames before its oldest. Methods and other arguments are as in
    `StoredNext`.

    Args:
        frames: number of frames that the environment stacks along the first dimension of its observations.
    """

    ahead = 1
    first_finals = 64
    """Initial number of rows of the side table."""

    def __init__(self, template: Row, lanes: int, length: int, directory: Path | None, frames: int = 1) -> None:
        self.frames, self.spare = frames, frames
        self.slots = length + self.spare
        frame, row = self._templates(template, frames)
        self.observations = RowTable(frame, lanes * self.slots, directory)
        self.table = RowTable(row, lanes * self.slots, directory)
        """The rows without their observations."""
        self.row: Row = self.table.columns
        self.time = np.zeros(lanes, dtype=np.int64)
        """Steps since the start of each ring's episode."""
        self.back = np.zeros(lanes * self.slots, dtype=np.uint8 if frames <= 256 else np.uint16)
        """Number of stacked frames before a row that belong to its episode."""
        self.final_of = np.full(lanes * self.slots, -1, dtype=np.int32)
        self.finals = RowTable(frame, self.first_finals)
        self.free = list(range(self.first_finals))

    @staticmethod
    def _templates(template: Row, frames: int) -> tuple[Observation, Row]:
        return _newest(template.observation, frames, 0), template._replace(observation=Observation(()))

    @classmethod
    def bytes_per_row(cls, template: Row, frames: int = 1) -> int:
        """Return the bytes of a transition, without the final observations of episodes."""
        return sum(record_type(part).itemsize for part in cls._templates(template, frames)) + (5 if frames <= 256 else 6)

    def successor(self, rows: np.ndarray) -> np.ndarray:
        """Return the slots after rows in their rings."""
        return np.where((rows + 1) % self.slots == 0, rows + 1 - self.slots, rows + 1)

    def write(self, rows: np.ndarray, step: tuple[Row, Observation]) -> None:
        """Write one row, and the observation after it, into each of these rings."""
        (row, next_observation), lanes = step, rows // self.slots
        if self.frames > 1 and not all((leaf == leaf[:, -1:])[self.time[lanes] == 0].all() for leaf in tree_leaves(row.observation.obs)):
            raise SettingError(
                "an episode begins with frames that are not all equal to its first one, so they cannot be stored once; "
                "set replay.optimize_memory_usage to false"
            )
        next_frame = _newest(next_observation, self.frames, 1)
        self.table.write(rows, row._replace(observation=Observation(())))
        self.observations.write(rows, _newest(row.observation, self.frames, 1))
        self.observations.write(self.successor(rows), next_frame)
        self.back[rows] = np.minimum(self.time[lanes], self.frames - 1)
        self.time[lanes] = np.where(row.ended, 0, self.time[lanes] + 1)
        self._forget_finals(rows)
        ended = np.flatnonzero(row.ended)
        if len(ended):
            self._keep_finals(rows[ended], tree_index(next_frame, ended))

    def cut(self, rows: np.ndarray) -> None:
        self.row.ended[rows] = True
        self.time[rows // self.slots] = 0
        self._keep_finals(rows, self.observations.take(self.successor(rows)))

    def _forget_finals(self, rows: np.ndarray) -> None:
        overwritten = self.final_of[rows]
        self.free.extend(overwritten[overwritten >= 0].tolist())
        self.final_of[rows] = -1

    def _keep_finals(self, rows: np.ndarray, frames: Observation) -> None:
        while len(self.free) < len(rows):
            size = len(self.finals.records)
            more = min(max(len(rows), size // 2), len(self.final_of) - size)
            self.free.extend(range(size, size + more))
            self.finals.resize(size + more)
        slots = np.array([self.free.pop() for _ in rows], dtype=np.int32)
        self.finals.write(slots, frames)
        self.final_of[rows] = slots

    def read(self, rows: np.ndarray, last: np.ndarray) -> tuple[Row, Observation]:
        older = np.arange(self.frames - 1, -1, -1)
        observation = self.observations.take(self._before(rows, older))
        next_observation = self.observations.take(np.concatenate([self._before(last, older[1:]), self.successor(last)[:, None]], 1))
        final = self.final_of[last]
        ended = np.flatnonzero(final >= 0)
        if len(ended):
            for leaf, end in zip(tree_leaves(next_observation), tree_leaves(self.finals.take(final[ended])), strict=True):
                leaf[ended, -1] = end
        return self.table.take(rows)._replace(observation=self._stacked(observation)), self._stacked(next_observation)

    def _stacked(self, frames: Observation) -> Observation:
        newest = tree_index(frames, (slice(None), -1))
        return newest if self.frames == 1 else Observation(frames.obs, newest.mask)

    def _before(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return the slots `[B, k]` that are `steps` before rows, but not before the first frame of their episodes."""
        slot = (rows % self.slots)[:, None]
        return rows[:, None] - slot + (slot - np.minimum(steps, self.back[rows][:, None])) % self.slots

    def part_types(self) -> list[np.dtype]:
        frame = self.observations.records.dtype
        return [self.table.records.dtype, self.back.dtype, frame, frame]

    def parts(self, rows: np.ndarray, after: np.ndarray) -> list[np.ndarray]:
        final = self.final_of[rows]
        frames = self.observations.records.take(np.concatenate([rows, after]))
        return [self.table.records.take(rows), self.back[rows], frames, self.finals.records.take(final[final >= 0])]

    def restore(self, rows: np.ndarray, after: np.ndarray, parts: list[np.ndarray]) -> None:
        table, back, frames, finals = parts
        check_lengths(parts[:3], [len(rows), len(rows), len(rows) + len(after)])
        if (back >= self.frames).any():
            raise ValueError("stacks of more frames")
        self.table.records[rows], self.back[rows] = table, back
        self.observations.records[np.concatenate([rows, after])] = frames
        self._forget_finals(rows)
        ended = rows[self.row.ended[rows]]
        check_lengths([finals], [len(ended)])
        self._keep_finals(ended, self.finals.fields(finals))

    def position(self) -> dict[str, np.ndarray]:
        """Return the state in addition to the rows: the length of each ring's current episode."""
        return {"time": self.time}

    def continue_from(self, position: Mapping[str, np.ndarray]) -> None:
        """Restore the result of `position`, before rows are restored."""
        self.time[:] = check_counts(position["time"], self.time.shape)
        self.final_of[:] = -1
        self.finals.resize(self.first_finals)
        self.free = list(range(self.first_finals))


def _newest(observation: Observation, frames: int, dim: int) -> Observation:
    """Return only the newest of stacked frames."""
    return observation if frames == 1 else observation._replace(obs=tree_map(lambda leaf: leaf.take(-1, dim), observation.obs))


def check_counts(value: object, shape: tuple[int, ...]) -> np.ndarray:
    """Return counts read from a file as an array; raise `ValueError` for negative or fractional counts or another shape."""
    counts = np.asarray(value)
    if counts.shape != shape or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ValueError(f"counts must be integers >= 0 of shape {shape}")
    return counts.astype(np.int64)


def check_lengths(arrays: Sequence[np.ndarray], lengths: Sequence[int]) -> None:
    """Raise `ValueError` unless arrays have these lengths."""
    actual = [len(array) for array in arrays]
    if actual != list(lengths):
        raise ValueError(f"{actual} rows instead of {list(lengths)}")
