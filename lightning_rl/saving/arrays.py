"""Arrays of records in files, one after the other, read only as what the reader expects."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.saving.atomic import Writer, stage

HEADER = 1 << 16
"""Bytes that numpy's description of an array may take."""
PLAIN_FILE = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


READERS: dict[Any, Any] = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class File(NamedTuple):
    """What a manifest says of a file."""

    name: str
    size: int
    sha256: str


def write_arrays(path: Path, arrays: Sequence[np.ndarray]) -> File:
    """Write arrays in numpy's format, down to the disk; the file is there whole or not at all."""

    def write(file: Writer) -> None:
        for array in arrays:
            np.lib.format.write_array(file, array, allow_pickle=False)

    staged = stage(path, write)
    staged.commit()
    return File(path.name, staged.size, staged.sha256)


def read_arrays(folder: Path, file: File, types: Sequence[np.dtype], bound: int) -> list[np.ndarray]:
    """The arrays of a file in a folder.

    Args:
        folder: where it must lie.
        file: what is known of it.
        types: of the arrays, each of one dimension.
        bound: the most bytes that they can have.

    Raises:
        ValueError: it is a link, damaged, or holds something else.
        OSError: it is not there.
    """
    path = folder / file.name
    if path.is_symlink() or path.parent != folder:
        raise ValueError(f"{file.name} is a link")
    handle = os.open(path, PLAIN_FILE)
    with os.fdopen(handle, "rb") as opened:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.size or file.size > bound:
            raise ValueError(f"{file.name} has {status.st_size} bytes, not {file.size} of at most {bound}")
        data = opened.read(file.size)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise ValueError(f"{file.name} is damaged")
    stream, arrays = BytesIO(data), []
    for expected in types:
        count = _read_header(stream, expected)
        if count * expected.itemsize > len(data) - stream.tell():
            raise ValueError(f"{file.name} is cut off")
        arrays.append(np.frombuffer(data, expected, count, stream.tell()))
        stream.seek(count * expected.itemsize, os.SEEK_CUR)
    if stream.tell() != len(data):
        raise ValueError(f"{file.name} holds more than its arrays")
    return arrays


def expected_size(types: Sequence[np.dtype], rows: int) -> int:
    """The most bytes of a file with arrays of these types and so many rows in the longest of them; plain bytes without types."""
    return (sum(each.itemsize for each in types) if types else 1) * rows + (len(types) + 1) * HEADER


def _read_header(stream: Any, expected: np.dtype) -> int:
    """How many records of the expected type come next."""
    try:
        version = np.lib.format.read_magic(stream)
        shape, _, dtype = READERS[version](stream, max_header_size=HEADER)
    except Exception as error:  # what tokenizers and parsers of others meet in bytes that are no header
        raise ValueError("no array") from error
    if dtype != expected or dtype.hasobject or len(shape) != 1:
        raise ValueError("arrays of another type or shape")
    return int(shape[0])
