"""Trees of arrays, row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_rl.data.replay.storage import RowTable, record_type

TEMPLATE = ({"a": np.zeros((2, 3), np.uint8), "b": np.zeros((), np.int64)}, np.zeros(2, np.float32))


def filled(rows: int, directory: Path | None = None) -> RowTable:
    table = RowTable(TEMPLATE, rows, directory)
    parts, numbers = table.columns
    parts["a"][:] = np.arange(rows)[:, None, None]
    parts["b"][:] = 10 * np.arange(rows)
    numbers[:] = np.arange(rows)[:, None] / 2
    return table


def test_the_leaves_of_a_row_are_stored_side_by_side_and_aligned():
    kind = record_type(TEMPLATE)
    assert [kind.fields[name][1] for name in kind.names] == [0, 8, 16]
    assert kind.itemsize == 24  # 6, and 2 to get to the integer, 8, 8
    assert record_type(()).itemsize == 0


def test_rows_are_taken_as_copies_of_any_shape():
    table = filled(5)
    places = np.array([[3, 3], [0, 4]])
    parts, numbers = table.take(places)
    assert parts["a"].shape == (2, 2, 2, 3) and parts["a"].dtype == np.uint8
    assert parts["b"].tolist() == [[30, 30], [0, 40]]
    assert numbers[:, :, 1].tolist() == [[1.5, 1.5], [0, 2]]
    assert parts["b"].flags.c_contiguous  # sums of scalar observations would round another way where each is stored once
    parts["b"][:] = -1
    assert table.columns[0]["b"].tolist() == [0, 10, 20, 30, 40]


def test_resizing_keeps_the_first_rows():
    table = filled(4)
    table.resize(6)
    assert table.columns[0]["b"].tolist() == [0, 10, 20, 30, 0, 0]
    table.columns[0]["b"][5] = 7
    assert table.take(np.array([5, 1]))[0]["b"].tolist() == [7, 10]
    table.resize(2)
    assert table.columns[0]["b"].tolist() == [0, 10] and table.columns[1].shape == (2, 2)


def test_a_table_in_a_file_is_a_table_and_leaves_no_file(tmp_path):
    folder = tmp_path / "new" / "folder"
    first, second = filled(5, folder), RowTable(TEMPLATE, 3, folder)
    assert first.take(np.array([2]))[0]["b"].tolist() == [20]
    assert second.columns[0]["b"].tolist() == [0, 0, 0]
    assert list(folder.iterdir()) == []
    mapped = Path("/proc/self/maps")
    assert not mapped.exists() or mapped.read_text().count(str(folder)) == 2
