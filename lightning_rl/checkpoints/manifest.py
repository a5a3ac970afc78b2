"""What is next to a checkpoint: a manifest with its size and hash and what wrote it, and files that several checkpoints share."""

import hashlib
import json
import math
import os
import platform
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
import torch

import lightning_rl
from lightning_rl.checkpoints.archive import checksum_error, mappings
from lightning_rl.checkpoints.atomic import SaveError, Staged, Writer, remove_leftovers, stage, sync_folder
from lightning_rl.errors import SettingError
from lightning_rl.types import State

FORMAT_VERSION = 1
MAX_BYTES = 1 << 20
"""Maximum size of a manifest in bytes; ours have fewer than one thousand."""

OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
BROKEN = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError, OSError)
"""Errors that a damaged file or an invalid manifest raises somewhere inside."""


def manifest_path(path: Path) -> Path:
    """Return the path of a checkpoint's manifest."""
    return path.with_name(f"{path.name}.json")


def stage_manifest(checkpoint: Staged) -> Staged:
    """Write the manifest of a checkpoint that was just written, under its temporary name."""
    content = {"format_version": FORMAT_VERSION, "size": checkpoint.size, "sha256": checkpoint.sha256, **written_by()}
    text = json.dumps(content, indent=1) + "\n"
    return stage(manifest_path(checkpoint.path), lambda file: file.write(text.encode()))


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Read the manifest of a checkpoint; None if it has none. Raises `ValueError` if the file is not a manifest."""
    file = manifest_path(path)
    if not file.is_file():
        return None
    try:
        with file.open("rb") as opened:
            content = json.loads(opened.read(MAX_BYTES))
    except FileNotFoundError:  # a run has just removed it in order to save
        return None
    except RecursionError as error:
        raise ValueError("not a manifest") from error
    if not isinstance(content, dict) or not isinstance(content.get("size"), int) or not isinstance(content.get("sha256"), str):
        raise ValueError("not a manifest")
    return content


def damage(path: Path) -> str | None:
    """Return how a checkpoint differs from its manifest and from its own checksums; None if it agrees with either.

    A checkpoint that a user's program has read and saved again agrees only with its own checksums.
    """
    for _ in range(10):
        before = identity(path)
        reason = _disagreement(path)
        if reason is None or before == identity(path):  # else a run has just saved it again
            break
    return reason


def identity(path: Path) -> list[tuple[int, int]]:
    """Return inode numbers and times, which change when a checkpoint is saved again."""
    entries = []
    for file in (path, manifest_path(path)):
        with suppress(OSError):
            status = file.stat()
            entries.append((status.st_ino, status.st_mtime_ns))
    return entries


def _disagreement(path: Path) -> str | None:
    try:
        manifest = read_manifest(path)
    except (ValueError, OSError):
        return f"its manifest {manifest_path(path).name} cannot be read"
    if manifest is None:
        return checksum_error(path)
    reason = f"it has {path.stat().st_size} bytes, not {manifest['size']}"
    if path.stat().st_size == manifest["size"]:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == manifest["sha256"]:
                return None
        reason = f"its bytes are not those of {manifest_path(path).name}"
    return reason if checksum_error(path) is not None else None


def differences(path: str | Path) -> str | None:
    """Return one line if a checkpoint was written with other versions or on another processor; else None."""
    manifest = _manifest_or_nothing(path)
    different = []
    for key, current in written_by().items():
        stored = manifest.get(key)
        if isinstance(stored, dict):
            others = [name for name in current.keys() - {"threads"} if stored.get(name) != current[name]]
            different += [f"{name} {str(stored.get(name))[:40]} (here {current[name]})" for name in others]
    if not different:
        return None
    return f"{Path(path).name} was written with {', '.join(sorted(different))}: continuing is not bit-exact"


def threads_of(path: str | Path) -> int | None:
    """Return how many CPU threads a checkpoint's run used, on a processor of the same model; None if that is unknown."""
    stored, current = _manifest_or_nothing(path).get("processor"), written_by()["processor"]
    number = stored.get("threads") if isinstance(stored, dict) and stored.get("model") == current["model"] else None
    return number if isinstance(number, int) and 1 <= number <= (os.cpu_count() or 1) else None


def _manifest_or_nothing(path: str | Path) -> dict[str, object]:
    with suppress(ValueError, OSError):
        return read_manifest(Path(path)) or {}
    return {}


def written_by() -> dict[str, dict[str, object]]:
    """Return the versions and the processor, on which the last bits of results depend."""
    modules = {"torch": torch, "numpy": np, "gymnasium": gymnasium, "lightning_rl": lightning_rl}
    versions: dict[str, object] = {
        "python": platform.python_version(),
        **{name: str(module.__version__) for name, module in modules.items()},
    }
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    processor = {
        "machine": platform.machine(),
        "model": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    return {"versions": versions, "processor": processor}


class File(NamedTuple):
    """Manifest entry of a file."""

    name: str
    size: int
    sha256: str


class FileStore:
    """Files in their own folder, which the first save creates. A save adds files, and its manifest, which a checkpoint holds, names those
    that it needs; the files of the last two saves are kept.

    Args:
        folder: such as `last.ckpt.d/rank0`.
    """

    what: ClassVar[str]
    """What the files hold, for messages."""
    kinds: ClassVar[tuple[str, ...]]
    """The endings of their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.manifest: State | None = None
        """The manifest of the save in progress: a checkpoint that is written meanwhile refers to these files."""
        self.manifests: list[State] = []
        """Those of the checkpoint and of its previous generation."""

    def is_name(self, name: str) -> re.Match[str] | None:
        """Match the name of one of its files; the first group is its number."""
        return re.fullmatch(rf"(\d{{8,12}})\.({'|'.join(self.kinds)})", name)

    def names(self) -> set[str]:
        """Return the names of all that is in the folder."""
        return {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()

    def end_save(self, saved: bool) -> None:
        """Delete what neither generation of the checkpoint needs, after it was saved or has failed."""
        if saved and self.manifest is not None:
            self.manifests = [*self.manifests[-1:], self.manifest]
            self.forget(self.manifests)
        self.manifest = None

    def forget(self, keep: Sequence[State]) -> None:
        """Delete the files that are in no manifest of `keep`."""
        needed = {mapping["name"] for manifest in keep for mapping in mappings(manifest) if "sha256" in mapping}
        if self.folder.is_dir() and not self.folder.is_symlink():
            for name in filter(self.is_name, self.names() - needed):
                (self.folder / name).unlink(missing_ok=True)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Prepare the folder for new files, and sync it at the end. Raises `SaveError`."""
        try:
            self._check_folder()
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
            self.serial = max((int(match[1]) for match in map(self.is_name, self.names()) if match), default=0)
            yield
            sync_folder(self.folder)
        except SaveError:
            raise
        except OSError as error:
            raise SaveError(f"{self.what} in {self.folder} could not be saved ({error.strerror or error})") from error

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Raise `SettingError` if a manifest or a file that is read meanwhile is damaged or missing."""
        try:
            self._check_folder()
            yield
        except BROKEN as error:
            reason = shorten(f"{type(error).__name__}: {error}", 100, placeholder=" …")
            way_out = "; copy this folder together with its checkpoint" if isinstance(error, FileNotFoundError) else ""
            raise SettingError(f"{self.what} in {str(self.folder)!r} cannot be read ({reason}){way_out}") from error

    def write(self, kind: str, write: Callable[[Writer], object]) -> File:
        """Write a file completely or not at all, under a name that was never used here, so that each name has only one content."""
        self.serial += 1
        staged = stage(self.folder / f"{self.serial:08d}.{kind}", write)
        staged.commit()
        return File(staged.path.name, staged.size, staged.sha256)

    def file_of(self, entry: State) -> File:
        """Return the file of a manifest's entry. Raises `ValueError`: it names none."""
        name, size, sha256 = (entry[key] for key in File._fields)
        if not (isinstance(name, str) and self.is_name(name) and type(size) is int and isinstance(sha256, str)):
            raise ValueError(f"{shorten(repr(name), 40, placeholder=' …')} is not the name of a file here")
        return File(name, size, sha256)

    def read(self, file: File, max_bytes: float = math.inf) -> bytes:
        """Return the content of a file. Raises `ValueError`: it is a link, too large, or not the one that was saved."""
        path = self.folder / file.name
        if path.is_symlink() or path.parent != self.folder:
            raise ValueError(f"{file.name} is a link")
        handle = os.open(path, OPEN_FLAGS)
        with os.fdopen(handle, "rb") as opened:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_size != file.size or file.size > max_bytes:
                raise ValueError(f"{file.name} has {status.st_size} bytes, not {file.size} of at most {max_bytes}")
            data = opened.read(file.size)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise ValueError(f"{file.name} is damaged")
        return data

    def _check_folder(self) -> None:
        """Raise `SettingError` if files would be elsewhere: the run's folder may be a link, but no folder inside it."""
        inside = [parent for parent in self.folder.parents if any(part.endswith(".ckpt.d") for part in parent.parts)]
        for folder in (self.folder, *inside):
            if folder.is_symlink():
                raise SettingError(f"{str(folder)!r} is a link; {self.what} must be in the folder of the checkpoint")
