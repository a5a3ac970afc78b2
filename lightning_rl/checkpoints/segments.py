"""Replay buffer on disk: segments of rows beside a checkpoint, of which each save writes only what is new."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.checkpoints.archive import to_arrays, to_plain
from lightning_rl.checkpoints.atomic import SaveFailed, Writer, remove_leftovers, stage, sync_folder
from lightning_rl.errors import SettingError

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


FORMAT_VERSION = 1
NAME = re.compile(r"(\d{8,12})\.(rows|priorities)")
LARGEST = 64 << 20
"""Bytes of a segment, about."""
SMALL = 8 << 20
"""Bytes up to which a segment is written again together with what follows it."""


class Segment(NamedTuple):
    """A file and the rows in it, `start <= number < stop` of each ring, `[N]`."""

    file: File
    start: np.ndarray
    stop: np.ndarray

    @property
    def rows(self) -> int:
        """How many there are."""
        return int((self.stop - self.start).sum())

    def places(self, buffer: Any) -> tuple[np.ndarray, np.ndarray]:
        """The places in the buffer of all its rows, and of what comes after the last one in each ring."""
        lengths = self.stop - self.start
        ring = np.repeat(buffer.envs, lengths)
        number = np.arange(lengths.sum()) + np.repeat(self.start - (lengths.cumsum() - lengths), lengths)
        some = np.flatnonzero(lengths)
        return buffer.first[ring] + number % buffer.slots, buffer.first[some] + self.stop[some] % buffer.slots


class SegmentStore:
    """The segments of one buffer.

    Args:
        folder: of their own, `last.ckpt.d/rank0`; made when something is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.segments: list[Segment] = []

    def save(self, buffer: Any) -> dict[str, Any]:
        """Write what was added to the buffer since the last save, or all of it; returns the manifest, as plain data.

        Raises:
            SaveFailed: the disk is full, …; what was saved before is as it was.
        """
        try:
            check_folder(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
            self.serial = max((int(match[1]) for match in map(NAME.fullmatch, _names(self.folder)) if match), default=0)
            segments, start = self._kept(buffer)
            step = max(1, LARGEST // (len(buffer.envs) * _row_bytes(buffer)))
            while (start < buffer.written).any():
                stop = np.minimum(start + step, buffer.written)
                segment = Segment(File("", 0, ""), start, stop)
                file = write_arrays(self._next("rows"), buffer.layout.parts(*segment.places(buffer)))
                segments.append(segment._replace(file=file))
                start = stop
            priorities = buffer.sampler.priorities(buffer.locate(np.arange(buffer.ready)))
            weights = None if priorities is None else write_arrays(self._next("priorities"), [priorities])
            sync_folder(self.folder)
        except SaveFailed:
            raise
        except OSError as error:
            raise SaveFailed(f"the replay buffer in {self.folder} could not be saved ({error.strerror or error})") from error
        self.segments, self._priorities = segments, weights
        return to_plain(
            {
                "format_version": FORMAT_VERSION,
                "settings": settings_of(buffer),
                "position": buffer.position(),
                "segments": [{**each.file._asdict(), "start": each.start, "stop": each.stop} for each in segments],
                "priorities": None if weights is None else weights._asdict(),
            }
        )

    def _kept(self, buffer: Any) -> tuple[list[Segment], np.ndarray]:
        """The segments that go on to count, and the first row of each ring that they do not hold, or not for good."""
        oldest = _oldest(buffer)
        segments = [each for each in self.segments if (each.stop > oldest).any()]
        names = _names(self.folder)
        if not segments or (segments[-1].stop > buffer.written).any() or any(each.file.name not in names for each in segments):
            return [], oldest
        start = np.maximum(oldest, segments[-1].stop - 1)
        while segments:
            longer = np.maximum(oldest, segments[-1].start)
            if segments[-1].rows > (buffer.written - start).sum() or (buffer.written - longer).sum() * _row_bytes(buffer) > SMALL:
                break
            start = longer
            segments.pop()
        return segments, start

    def _next(self, kind: str) -> Path:
        """A name that no file ever had here: a name stands for its content."""
        self.serial += 1
        return self.folder / f"{self.serial:08d}.{kind}"

    def load(self, manifest: Mapping[str, Any], buffer: Any) -> None:
        """Restore a buffer that was made with the same arguments, to go on as the saved one would have: its episodes are not cut.

        Raises:
            SettingError: a segment is missing, damaged, or none of this buffer's; the buffer is then not to be used.
        """
        self.segments = []
        try:
            check_folder(self.folder)
            manifest = to_arrays(dict(manifest))
            check_settings(manifest, settings_of(buffer))
            buffer.continue_from(manifest["position"])
            segments = [_segment(each, buffer) for each in manifest["segments"]]
            _check_cover(segments, buffer)
            types = buffer.layout.part_types()
            for segment in segments:
                rows, after = segment.places(buffer)
                bound = expected_size(types, 2 * len(rows) + len(after))
                buffer.layout.restore(rows, after, read_arrays(self.folder, segment.file, types, bound))
            rows = buffer.locate(np.arange(buffer.ready))
            if manifest["priorities"] is not None:
                (priorities,) = read_arrays(self.folder, _file(manifest["priorities"]), [np.dtype(float)], expected_size([], 8 * len(rows)))
                if priorities.shape != rows.shape:
                    raise ValueError(f"{len(priorities)} priorities of {len(rows)} rows")
                buffer.sampler.restore(rows, priorities)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError, OSError) as error:
            reason = shorten(f"{type(error).__name__}: {error}", 100, placeholder=" …")
            raise SettingError(f"the replay buffer in {str(self.folder)!r} cannot be read ({reason})") from error
        self.segments = segments

    def forget(self, keep: Sequence[Mapping[str, Any]]) -> None:
        """Delete the segments that no manifest in `keep` names, nor the last save."""
        names = {each["name"] for manifest in keep for each in (*manifest["segments"], manifest["priorities"]) if each is not None}
        names |= {each.file.name for each in self.segments}
        if self.folder.is_dir() and not self.folder.is_symlink():
            for name in _names(self.folder) - names:
                if NAME.fullmatch(name):
                    (self.folder / name).unlink(missing_ok=True)


def size_of(buffer: Any, rows: int) -> int:
    """The bytes that a save of so many rows takes, about."""
    priorities = 0 if buffer.sampler.priorities(np.zeros(0, np.int64)) is None else 8
    return rows * (_row_bytes(buffer) + priorities)


def settings_of(buffer: Any) -> dict[str, Any]:
    """What must be the same where a buffer is restored, by the names that users know."""
    return {
        "buffer_size": buffer.length * len(buffer.envs),
        "num_envs": len(buffer.envs),
        "n_steps": buffer.n_steps,
        "replay.optimize_memory_usage": buffer.layout.ahead > 0,
        "replay.prioritized": buffer.sampler.priorities(np.zeros(0, np.int64)) is not None,
        "frame_stack": buffer.layout.frames,
        "observations and actions": " ".join(str(each) for each in buffer.layout.part_types()),
    }


def check_settings(manifest: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise `SettingError` where a manifest is of another format or of another kind of buffer."""
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise SettingError(f"the replay buffer was saved in format {shorten(repr(version), 20)}; this version reads {FORMAT_VERSION}")
    for name, value in here.items():
        there = manifest["settings"][name]
        if there != value:
            said = f"other {name}" if isinstance(value, str) else f"{name} {shorten(repr(there), 20)}, not {value!r}"
            raise SettingError(f"the replay buffer was saved with {said}: continue it with the same settings")


def check_folder(folder: Path) -> None:
    """Raise `SettingError` if segments would lie somewhere else: the run's folder may be a link, what lies in it may not."""
    for each in (folder, folder.parent):
        if each.is_symlink() and (each is folder or each.name.endswith(".ckpt.d")):
            raise SettingError(f"{str(each)!r} is a link; replay buffers are kept in the folder of their checkpoint")


def _segment(entry: Mapping[str, Any], buffer: Any) -> Segment:
    start, stop = (np.asarray(entry[name]) for name in ("start", "stop"))
    for bound in (start, stop):
        if bound.shape != buffer.envs.shape or bound.dtype != np.int64:
            raise ValueError("a segment without bounds")
    if (start < 0).any() or (stop < start).any() or (stop - start > buffer.slots).any():
        raise ValueError("a segment with wrong bounds")
    return Segment(_file(entry), start, stop)


def _file(entry: Mapping[str, Any]) -> File:
    name, size, sha256 = (entry[key] for key in File._fields)
    if not (isinstance(name, str) and NAME.fullmatch(name) and type(size) is int and isinstance(sha256, str)):
        raise ValueError(f"{shorten(repr(name), 40, placeholder=' …')} is no name of a segment")
    return File(name, size, sha256)


def _check_cover(segments: Sequence[Segment], buffer: Any) -> None:
    """Raise `ValueError` unless segments follow each other and hold all rows that the buffer has."""
    covered, before = _oldest(buffer), np.zeros_like(buffer.written)
    for each in segments:
        if (each.start > covered).any() or (each.start < before).any():
            raise ValueError("segments that do not follow each other")
        covered, before = np.maximum(covered, each.stop), each.start
    if (covered != buffer.written).any():
        raise ValueError("rows that are in no segment")


def _oldest(buffer: Any) -> np.ndarray:
    """The number of the oldest row of each ring that is there, with those that only complete stacks of frames."""
    return np.maximum(0, buffer.written - (buffer.slots - buffer.layout.ahead))


def _row_bytes(buffer: Any) -> int:
    return sum(each.itemsize for each in buffer.layout.part_types()[:3])


def _names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()} if folder.is_dir() else set()
