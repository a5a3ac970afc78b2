"""How a replay buffer keeps what came next: beside each row, or as the observation of the row after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.data.table import RowTable, record_type
from lightning_rl.types import Tree, tree_index, tree_map


class Row(NamedTuple):
    """A transition as stored, but for what came next. `ended`: the episode, terminated or truncated, ends here."""

    obs: Tree
    action: Tree
    reward: Any
    terminated: Any
    ended: Any


class StoredNext:
    """Each row keeps its next observation: one gather reads all of it.

    Args:
        template: one row.
        lanes: N rings of rows.
        length: transitions in each.
        directory: where to keep them instead of in memory.
    """

    spare = 0
    """Slots of a ring that hold no transition."""

    def __init__(self, template: Row, lanes: int, length: int, directory: Path | None) -> None:
        self.table = RowTable((template, template.obs), lanes * length, directory)
        self.row, self.next_obs = self.table.columns

    @staticmethod
    def bytes_per_row(template: Row) -> int:
        """What a transition takes."""
        return record_type((template, template.obs)).itemsize

    def write(self, rows: np.ndarray, row: Row, next_obs: Tree) -> None:
        """Write one row into each of some rings."""
        tree_map(lambda column, leaf: column.__setitem__(rows, leaf), self.table.columns, (row, next_obs))

    def cut(self, rows: np.ndarray) -> None:
        """End the episodes of the newest rows of some rings."""
        self.row.ended[rows] = True

    def read(self, rows: np.ndarray, last: np.ndarray) -> tuple[Row, Tree]:
        """Rows, and the observations that followed the last rows of their windows."""
        row, next_obs = self.table.take(rows)
        return row, next_obs if last is rows else self.table.take(last)[1]

    def state_dict(self) -> dict[str, Any]:
        """Everything stored."""
        return {"rows": self.table.records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.table.records[:] = state["rows"]


class DerivedNext:
    """An observation is stored once: what followed a row is the observation of the next, or lies in a side table where an episode ended.

    Arguments as `StoredNext`. Each ring has a slot more than transitions, for what followed its newest one.
    """

    spare = 1

    def __init__(self, template: Row, lanes: int, length: int, directory: Path | None) -> None:
        self.slots = length + 1
        self.observations = RowTable(template.obs, lanes * self.slots, directory)
        self.table = RowTable(template._replace(obs=()), lanes * self.slots, directory)
        self.row = self.table.columns
        self.final_of = np.full(lanes * self.slots, -1, dtype=np.int32)
        self.finals = RowTable(template.obs, 64)
        self.free = list(range(64))

    @staticmethod
    def bytes_per_row(template: Row) -> int:
        """What a transition takes, without the last observations of episodes."""
        return record_type(template.obs).itemsize + record_type(template._replace(obs=())).itemsize + 4

    def successor(self, rows: np.ndarray) -> np.ndarray:
        """The slots after rows in their rings."""
        return np.where((rows + 1) % self.slots == 0, rows + 1 - self.slots, rows + 1)

    def write(self, rows: np.ndarray, row: Row, next_obs: Tree) -> None:
        """Write one row into each of some rings."""
        after = self.successor(rows)
        tree_map(lambda column, leaf: column.__setitem__(rows, leaf), self.row, row._replace(obs=()))
        for place, obs in ((rows, row.obs), (after, next_obs)):
            tree_map(lambda column, leaf, place=place: column.__setitem__(place, leaf), self.observations.columns, obs)
        overwritten = self.final_of[rows]
        self.free.extend(overwritten[overwritten >= 0].tolist())
        self.final_of[rows] = -1
        ended = np.flatnonzero(row.ended)
        if len(ended):
            self._keep_finals(rows[ended], tree_index(next_obs, ended))

    def cut(self, rows: np.ndarray) -> None:
        """End the episodes of the newest rows of some rings."""
        self.row.ended[rows] = True
        self._keep_finals(rows, self.observations.take(self.successor(rows)))

    def _keep_finals(self, rows: np.ndarray, final_obs: Tree) -> None:
        while len(self.free) < len(rows):
            size = len(self.finals.records)
            self.free.extend(range(size, 2 * size))
            self.finals.resize(2 * size)
        slots = np.array([self.free.pop() for _ in rows], dtype=np.int32)
        tree_map(lambda column, leaf: column.__setitem__(slots, leaf), self.finals.columns, final_obs)
        self.final_of[rows] = slots

    def read(self, rows: np.ndarray, last: np.ndarray) -> tuple[Row, Tree]:
        """Rows, and the observations that followed the last rows of their windows."""
        obs, next_obs = self.observations.take(rows), self.observations.take(self.successor(last))
        final = self.final_of[last]
        ended = np.flatnonzero(final >= 0)
        if len(ended):
            ends = self.finals.take(final[ended])
            tree_map(lambda leaf, end: leaf.__setitem__(ended, end), next_obs, ends)
        return self.table.take(rows)._replace(obs=obs), next_obs

    def state_dict(self) -> dict[str, Any]:
        """Everything stored."""
        tables = {name: getattr(self, name).records for name in ("observations", "table", "finals")}
        return {**tables, "final_of": self.final_of, "free": list(self.free)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.finals.resize(len(state["finals"]))
        for name in ("observations", "table", "finals"):
            getattr(self, name).records[:] = state[name]
        self.final_of[:], self.free = state["final_of"], list(state["free"])
