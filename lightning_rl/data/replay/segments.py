"""Save a replay buffer in segments of rows next to a checkpoint. Each save writes only new rows."""

import hashlib
import os
import re
import stat
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import numpy as np

from lightning_rl.checkpoints.archive import to_arrays, to_plain
from lightning_rl.checkpoints.atomic import SaveError, Writer, remove_leftovers, stage, sync_folder
from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.errors import SettingError
from lightning_rl.types import State

FORMAT_VERSION = 1
MAX_HEADER_BYTES = 1 << 16
"""Maximum bytes of NumPy's header of an array."""
MAX_SEGMENT_BYTES = 64 << 20
"""Approximate bytes of a segment."""
SMALL_BYTES = 8 << 20
"""Bytes up to which a segment is rewritten together with the rows after it."""
NAME = re.compile(r"(\d{8,12})\.(rows|priorities)")
OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class File(NamedTuple):
    """Manifest entry of a file."""

    name: str
    size: int
    sha256: str


class Segment(NamedTuple):
    """A file and the rows in it, `start <= number < stop` of each ring, `[N]`."""

    file: File
    start: np.ndarray
    stop: np.ndarray

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return int((self.stop - self.start).sum())

    def places(self, buffer: ReplayBuffer) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices in the buffer of all its rows, and of the slots after the last row in each ring."""
        lengths = self.stop - self.start
        ring = np.repeat(buffer.envs, lengths)
        number = np.arange(lengths.sum()) + np.repeat(self.start - (lengths.cumsum() - lengths), lengths)
        some = np.flatnonzero(lengths)
        return buffer.first[ring] + number % buffer.slots, buffer.first[some] + self.stop[some] % buffer.slots


class SegmentStore:
    """The segments of one buffer, in their own folder such as `last.ckpt.d/rank0`, which the first save creates."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.segments: list[Segment] = []

    def save(self, buffer: ReplayBuffer) -> State:
        """Write the rows since the last save, or all rows; return the manifest as plain data. Raises `SaveError`."""
        try:
            _check_folder(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
            self.serial = max((int(match[1]) for match in map(NAME.fullmatch, _names(self.folder)) if match), default=0)
            segments, start = self._kept(buffer)
            step = max(1, MAX_SEGMENT_BYTES // (len(buffer.envs) * _row_bytes(buffer)))
            while (start < buffer.written).any():
                stop = np.minimum(start + step, buffer.written)
                segment = Segment(File("", 0, ""), start, stop)
                file = _write_arrays(self._next("rows"), buffer.layout.parts(*segment.places(buffer)))
                segments.append(segment._replace(file=file))
                start = stop
            priorities = None if buffer.priorities is None else buffer.priorities.priorities(buffer.locate(np.arange(buffer.ready)))
            weights = None if priorities is None else _write_arrays(self._next("priorities"), [priorities])
            sync_folder(self.folder)
        except SaveError:
            raise
        except OSError as error:
            raise SaveError(f"the replay buffer in {self.folder} could not be saved ({error.strerror or error})") from error
        self.segments = segments
        return to_plain(
            {
                "format_version": FORMAT_VERSION,
                "settings": _settings_of(buffer),
                "position": buffer.position(),
                "segments": [{**each.file._asdict(), "start": each.start, "stop": each.stop} for each in segments],
                "priorities": None if weights is None else weights._asdict(),
            }
        )

    def _kept(self, buffer: ReplayBuffer) -> tuple[list[Segment], np.ndarray]:
        """Return the segments that stay valid, and the first row of each ring to write; small last segments are rewritten."""
        oldest = _oldest(buffer)
        segments = [each for each in self.segments if (each.stop > oldest).any()]
        names = _names(self.folder)
        if not segments or (segments[-1].stop > buffer.written).any() or any(each.file.name not in names for each in segments):
            return [], oldest
        start = np.maximum(oldest, segments[-1].stop - 1)
        while segments:
            longer = np.maximum(oldest, segments[-1].start)
            size = (buffer.written - longer).sum() * _row_bytes(buffer)
            if segments[-1].rows > (buffer.written - start).sum() or size > SMALL_BYTES:
                break
            start = longer
            segments.pop()
        return segments, start

    def _next(self, kind: str) -> Path:
        """Return a file name that was never used here, so that each name has only one content."""
        self.serial += 1
        return self.folder / f"{self.serial:08d}.{kind}"

    def load(self, manifest: State, buffer: ReplayBuffer) -> None:
        """Restore a buffer that was made with the same arguments. Its episodes are not cut, so that it continues like the saved one.

        Raises `SettingError`: a segment is missing, damaged, or of another buffer. The buffer must not be used then.
        """
        self.segments = []
        try:
            _check_folder(self.folder)
            manifest = to_arrays(dict(manifest))
            _check_settings(manifest, buffer)
            buffer.continue_from(manifest["position"])
            segments = [_segment(each, buffer) for each in manifest["segments"]]
            _check_cover(segments, buffer)
            types = buffer.layout.part_types()
            for segment in segments:
                rows, after = segment.places(buffer)
                bound = sum(each.itemsize for each in types) * (2 * len(rows) + len(after)) + (len(types) + 1) * MAX_HEADER_BYTES
                buffer.layout.restore(rows, after, _read_arrays(self.folder, segment.file, types, bound))
            rows = buffer.locate(np.arange(buffer.ready))
            if buffer.priorities is not None:
                bound = 8 * len(rows) + MAX_HEADER_BYTES
                (priorities,) = _read_arrays(self.folder, _file(manifest["priorities"]), [np.dtype(float)], bound)
                if priorities.shape != rows.shape:
                    raise ValueError(f"{len(priorities)} priorities of {len(rows)} rows")
                buffer.priorities.restore(rows, priorities)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError, OSError) as error:
            reason = shorten(f"{type(error).__name__}: {error}", 100, placeholder=" …")
            raise SettingError(f"the replay buffer in {str(self.folder)!r} cannot be read ({reason})") from error
        self.segments = segments

    def forget(self, keep: Sequence[State]) -> None:
        """Delete the segments that are neither in a manifest of `keep` nor in the last save."""
        names = {each["name"] for manifest in keep for each in (*manifest["segments"], manifest["priorities"]) if each is not None}
        names |= {each.file.name for each in self.segments}
        if self.folder.is_dir() and not self.folder.is_symlink():
            for name in _names(self.folder) - names:
                if NAME.fullmatch(name):
                    (self.folder / name).unlink(missing_ok=True)


def size_of(buffer: ReplayBuffer, rows: int) -> int:
    """Estimate the size in bytes of saving this many rows."""
    priorities = 0 if buffer.priorities is None else 8
    return rows * (_row_bytes(buffer) + priorities)


def _settings_of(buffer: ReplayBuffer) -> dict[str, object]:
    """Return the settings that must be equal to restore a buffer, by the names that users know."""
    return {
        "buffer_size": buffer.length * len(buffer.envs),
        "num_envs": len(buffer.envs),
        "n_steps": buffer.n_steps,
        "replay.optimize_memory_usage": buffer.layout.ahead > 0,
        "replay.prioritized": buffer.priorities is not None,
        "frame_stack": buffer.layout.frames,
        "observations and actions": " ".join(str(each) for each in buffer.layout.part_types()),
    }


def _check_settings(manifest: State, buffer: ReplayBuffer) -> None:
    """Raise `SettingError` if a manifest has another format version or is of another kind of buffer."""
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise SettingError(f"the replay buffer was saved in format {shorten(repr(version), 20)}; this version reads {FORMAT_VERSION}")
    for name, value in _settings_of(buffer).items():
        there = manifest["settings"][name]
        if there != value:
            what = f"other {name}" if isinstance(value, str) else f"{name} {shorten(repr(there), 20)}, not {value!r}"
            raise SettingError(f"the replay buffer was saved with {what}: continue it with the same settings")


def _check_folder(folder: Path) -> None:
    """Raise `SettingError` if segments would be elsewhere: the run's folder may be a link, but no folder inside it."""
    for each in (folder, folder.parent):
        if each.is_symlink() and (each is folder or each.name.endswith(".ckpt.d")):
            raise SettingError(f"{str(each)!r} is a link; replay buffers are stored in the folder of their checkpoint")


def _segment(entry: State, buffer: ReplayBuffer) -> Segment:
    start, stop = (np.asarray(entry[name]) for name in ("start", "stop"))
    if any(bound.shape != buffer.envs.shape or bound.dtype != np.int64 for bound in (start, stop)):
        raise ValueError("a segment without bounds")
    if (start < 0).any() or (stop < start).any() or (stop - start > buffer.slots).any():
        raise ValueError("a segment with wrong bounds")
    return Segment(_file(entry), start, stop)


def _file(entry: State) -> File:
    name, size, sha256 = (entry[key] for key in File._fields)
    if not (isinstance(name, str) and NAME.fullmatch(name) and type(size) is int and isinstance(sha256, str)):
        raise ValueError(f"{shorten(repr(name), 40, placeholder=' …')} is not the name of a segment")
    return File(name, size, sha256)


def _check_cover(segments: Sequence[Segment], buffer: ReplayBuffer) -> None:
    """Raise `ValueError` unless the segments are contiguous and hold all rows of the buffer."""
    covered, before = _oldest(buffer), np.zeros_like(buffer.written)
    for each in segments:
        if (each.start > covered).any() or (each.start < before).any():
            raise ValueError("segments that do not follow each other")
        covered, before = np.maximum(covered, each.stop), each.start
    if (covered != buffer.written).any():
        raise ValueError("rows that are in no segment")


def _oldest(buffer: ReplayBuffer) -> np.ndarray:
    """Return the number of the oldest row of each ring, including rows that are needed only to complete stacks of frames."""
    return np.maximum(0, buffer.written - (buffer.slots - buffer.layout.ahead))


def _row_bytes(buffer: ReplayBuffer) -> int:
    return sum(each.itemsize for each in buffer.layout.part_types()[:3])


def _names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()} if folder.is_dir() else set()


def _write_arrays(path: Path, arrays: Sequence[np.ndarray]) -> File:
    """Write arrays in NumPy's format and flush them to disk; the file is written completely or not at all."""

    def write(file: Writer) -> None:
        for array in arrays:
            np.lib.format.write_array(file, array, allow_pickle=False)

    staged = stage(path, write)
    staged.commit()
    return File(path.name, staged.size, staged.sha256)


def _read_arrays(folder: Path, file: File, types: Sequence[np.dtype], max_bytes: int) -> list[np.ndarray]:
    """Read one-dimensional arrays of these types from a file in a folder; raise `ValueError` if it holds anything else."""
    path = folder / file.name
    if path.is_symlink() or path.parent != folder:
        raise ValueError(f"{file.name} is a link")
    handle = os.open(path, OPEN_FLAGS)
    with os.fdopen(handle, "rb") as opened:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.size or file.size > max_bytes:
            raise ValueError(f"{file.name} has {status.st_size} bytes, not {file.size} of at most {max_bytes}")
        data = opened.read(file.size)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise ValueError(f"{file.name} is damaged")
    stream, arrays = BytesIO(data), []
    for expected in types:
        try:
            arrays.append(np.lib.format.read_array(stream, max_header_size=MAX_HEADER_BYTES))
        except Exception as error:  # NumPy's parser may raise anything on invalid bytes
            raise ValueError("not an array, or truncated") from error
        if arrays[-1].dtype != expected or arrays[-1].ndim != 1:
            raise ValueError("arrays of another type or shape")
    if stream.tell() != len(data):
        raise ValueError(f"{file.name} holds more than its arrays")
    return arrays
