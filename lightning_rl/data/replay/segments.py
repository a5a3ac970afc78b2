"""Save a replay buffer in segments of rows next to a checkpoint. Each save writes only new rows."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import numpy as np

from lightning_rl.checkpoints.archive import to_arrays, to_plain
from lightning_rl.checkpoints.atomic import Writer
from lightning_rl.checkpoints.manifest import File, FileStore
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


class SegmentStore(FileStore):
    """The segments of one buffer."""

    what, kinds = "the replay buffer", ("rows", "priorities")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.segments: list[Segment] = []

    def save(self, buffer: ReplayBuffer) -> State:
        """Write the rows since the last save, or all rows; return the manifest as plain data. Raises `SaveError`."""
        with self.saving():
            segments, start = self._kept(buffer)
            step = max(1, MAX_SEGMENT_BYTES // (len(buffer.envs) * _row_bytes(buffer)))
            while (start < buffer.written).any():
                stop = np.minimum(start + step, buffer.written)
                segment = Segment(File("", 0, ""), start, stop)
                file = self._write_arrays("rows", buffer.layout.parts(*segment.places(buffer)))
                segments.append(segment._replace(file=file))
                start = stop
            priorities = None if buffer.priorities is None else buffer.priorities.priorities(buffer.locate(np.arange(buffer.ready)))
            weights = None if priorities is None else self._write_arrays("priorities", [priorities])
        self.segments = segments
        self.manifest = to_plain(
            {
                "format_version": FORMAT_VERSION,
                "settings": _settings_of(buffer),
                "position": buffer.position(),
                "segments": [{**segment.file._asdict(), "start": segment.start, "stop": segment.stop} for segment in segments],
                "priorities": None if weights is None else weights._asdict(),
            }
        )
        return self.manifest

    def _kept(self, buffer: ReplayBuffer) -> tuple[list[Segment], np.ndarray]:
        """Return the segments that stay valid, and the first row of each ring to write; small last segments are rewritten."""
        oldest = _oldest(buffer)
        segments = [segment for segment in self.segments if (segment.stop > oldest).any()]
        names = self.names()
        if not segments or (segments[-1].stop > buffer.written).any() or any(segment.file.name not in names for segment in segments):
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

    def load(self, manifest: State, buffer: ReplayBuffer) -> None:
        """Restore a buffer that was made with the same arguments. Its episodes are not cut, so that it continues like the saved one.

        Raises `SettingError`: a segment is missing, damaged, or of another buffer. The buffer must not be used then.
        """
        self.segments = []
        with self.loading():
            manifest = to_arrays(dict(manifest))
            _check_settings(manifest, buffer)
            buffer.continue_from(manifest["position"])
            segments = [_segment(segment, self.file_of(segment), buffer) for segment in manifest["segments"]]
            _check_cover(segments, buffer)
            types = buffer.layout.part_types()
            for segment in segments:
                rows, after = segment.places(buffer)
                bound = sum(type_.itemsize for type_ in types) * (2 * len(rows) + len(after)) + (len(types) + 1) * MAX_HEADER_BYTES
                buffer.layout.restore(rows, after, self._read_arrays(segment.file, types, bound))
            rows = buffer.locate(np.arange(buffer.ready))
            if buffer.priorities is not None:
                bound = 8 * len(rows) + MAX_HEADER_BYTES
                (priorities,) = self._read_arrays(self.file_of(manifest["priorities"]), [np.dtype(float)], bound)
                if priorities.shape != rows.shape:
                    raise ValueError(f"{len(priorities)} priorities of {len(rows)} rows")
                buffer.priorities.restore(rows, priorities)
        self.segments, self.manifests = segments, [manifest]

    def _write_arrays(self, kind: str, arrays: Sequence[np.ndarray]) -> File:
        """Write arrays in NumPy's format."""

        def write(file: Writer) -> None:
            for array in arrays:
                np.lib.format.write_array(file, array, allow_pickle=False)

        return self.write(kind, write)

    def _read_arrays(self, file: File, types: Sequence[np.dtype], max_bytes: int) -> list[np.ndarray]:
        """Read one-dimensional arrays of these types from a file; raise `ValueError` if it holds anything else."""
        data = self.read(file, max_bytes)
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
        "observations and actions": " ".join(str(type_) for type_ in buffer.layout.part_types()),
    }


def _check_settings(manifest: State, buffer: ReplayBuffer) -> None:
    """Raise `SettingError` if a manifest has another format version or is of another kind of buffer."""
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise SettingError(f"the replay buffer was saved in format {shorten(repr(version), 20)}; this version reads {FORMAT_VERSION}")
    for name, value in _settings_of(buffer).items():
        stored = manifest["settings"][name]
        if stored != value:
            what = f"other {name}" if isinstance(value, str) else f"{name} {shorten(repr(stored), 20)}, not {value!r}"
            raise SettingError(f"the replay buffer was saved with {what}: continue it with the same settings")


def _segment(entry: State, file: File, buffer: ReplayBuffer) -> Segment:
    start, stop = (np.asarray(entry[name]) for name in ("start", "stop"))
    if any(bound.shape != buffer.envs.shape or bound.dtype != np.int64 for bound in (start, stop)):
        raise ValueError("a segment without bounds")
    if (start < 0).any() or (stop < start).any() or (stop - start > buffer.slots).any():
        raise ValueError("a segment with wrong bounds")
    return Segment(file, start, stop)


def _check_cover(segments: Sequence[Segment], buffer: ReplayBuffer) -> None:
    """Raise `ValueError` unless the segments are contiguous and hold all rows of the buffer."""
    covered, before = _oldest(buffer), np.zeros_like(buffer.written)
    for segment in segments:
        if (segment.start > covered).any() or (segment.start < before).any():
            raise ValueError("segments that do not follow each other")
        covered, before = np.maximum(covered, segment.stop), segment.start
    if (covered != buffer.written).any():
        raise ValueError("rows that are in no segment")


def _oldest(buffer: ReplayBuffer) -> np.ndarray:
    """Return the number of the oldest row of each ring, including rows that are needed only to complete stacks of frames."""
    return np.maximum(0, buffer.written - (buffer.slots - buffer.layout.ahead))


def _row_bytes(buffer: ReplayBuffer) -> int:
    return sum(type_.itemsize for type_ in buffer.layout.part_types()[:3])
