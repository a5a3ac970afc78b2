"""Files that are written whole or not at all, and the lock on a run's folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from lightning_rl.errors import SettingError

TEMPORARY = re.compile(r"\.tmp-(\d+)$")


class SaveFailed(OSError):
    """A file could not be written. What was saved before is as it was; the message is one line, the system's word for it `strerror`."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.strerror = reason


class Writer:
    """A file to write that counts and hashes what passes. After an error it drops the rest: torch would not pass the error on."""

    def __init__(self, file: Any) -> None:
        self.file, self.size, self.hash = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes."""
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                self.file.write(data)
                self.hash.update(data)
                self.size += size
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Nothing: `stage` does it once."""


class Staged:
    """A file under its temporary name, safe on disk; `commit` gives it its own name."""

    def __init__(self, path: Path, size: int, sha256: str) -> None:
        self.path, self.size, self.sha256 = path, size, sha256

    @property
    def temporary(self) -> Path:
        """Where it lies until then."""
        return temporary(self.path)

    def commit(self) -> None:
        """Take the place of what is there, or of a link that is."""
        os.replace(self.temporary, self.path)

    def discard(self) -> None:
        """Leave nothing."""
        self.temporary.unlink(missing_ok=True)


def temporary(path: Path) -> Path:
    """The name under which this process writes a file, in the same folder."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


def create(name: Path) -> BinaryIO:
    """A new file to write; what has that name, such as a link that somebody put there, goes."""
    name.unlink(missing_ok=True)
    return name.open("xb")


def stage(path: Path, write: Callable[[Writer], Any]) -> Staged:
    """Write a file under its temporary name, down to the disk.

    Raises:
        SaveFailed: the disk is full, the folder cannot be written to, …; nothing is left of the file.
    """
    name = temporary(path)
    try:
        with create(name) as file:
            writer = Writer(file)
            write(writer)
            if writer.error is not None:
                raise writer.error
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        _remove(name)
        raise SaveFailed(
            f"{path} could not be saved ({error.strerror or error}); what was saved before is as it was", error.strerror
        ) from error
    except BaseException:
        _remove(name)
        raise
    return Staged(path, writer.size, writer.hash.hexdigest())


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text; raises what `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file.

    Raises:
        SaveFailed: the disk is full, the folder cannot be written to, …; the file is as it was.
    """
    staged = stage(path, lambda file: file.write(content))
    with taking_its_place(staged, str(path)):
        staged.commit()


@contextlib.contextmanager
def taking_its_place(staged: Staged, name: str) -> Iterator[None]:
    """While a staged file is looked at and committed; afterwards nothing lies under its temporary name.

    Raises:
        SaveFailed: the system refused something; it is named so.
    """
    try:
        yield
    except OSError as error:
        raise SaveFailed(f"{name} could not be saved ({error.strerror or error})", error.strerror) from error
    finally:
        staged.discard()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as safe as the files, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # not on Windows
        return
    with contextlib.suppress(OSError):  # not on every network file system
        os.fsync(handle)
    os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of processes that are gone."""
    for path in folder.glob("*.tmp-*"):
        found = TEMPORARY.search(path.name)
        if found and not _alive(int(found[1])):
            _remove(path)


def _alive(process: int) -> bool:
    if process == os.getpid():
        return False  # one process writes one file after the other
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


_held: set[int] = set()


@contextmanager
def locked(folder: Path, say: Callable[[str], None] = print) -> Iterator[None]:
    """Keep other processes out of a folder. The kernel releases the lock of a process that is gone, however it ended.

    The file that is locked is next to the folder, as `--force` renames the folder.

    Raises:
        SettingError: another process is in there, or there can be no lock file.
    """
    file = folder.with_name(f".{folder.name}.lock")
    try:
        descriptor = _open_locked(file, say)
    except BlockingIOError:
        raise SettingError(f"{_owner(file)} trains in {folder}: wait for its end, or name another trainer.run_name") from None
    except OSError as error:
        raise SettingError(f"{folder} cannot be locked: {file}: {error.strerror}") from error
    _held.add(descriptor)
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
        yield
    finally:
        file.unlink(missing_ok=True)  # before it is released: whoever opened it meanwhile finds that it has gone
        _held.discard(descriptor)
        os.close(descriptor)


def _open_locked(file: Path, say: Callable[[str], None]) -> int:
    """A locked descriptor of the file that has this name."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError as error:  # a network file system without locks
            say(f"{file} cannot be locked ({error.strerror}): see to it that no other process trains in this folder")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(file, follow_symlinks=False)):
                return descriptor
        os.close(descriptor)  # its owner has just removed it


def _owner(file: Path) -> str:
    """What the process that holds a lock wrote there."""
    try:
        return file.read_text(errors="replace")[:80] or "another process"
    except OSError:
        return "another process"


def _close_all() -> None:
    """In a forked worker: a lock ends with the process that took it, not with the last of its workers."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_all)
