"""Write files atomically, and lock a run's folder."""

import fcntl
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lightning_rl.errors import SettingError


class SaveError(SettingError, OSError):
    """Raised if a file could not be written; the previous file is unchanged. The message is one line; `strerror` is the system's reason."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.strerror = reason


class Writer:
    """A writable file that counts and hashes its bytes. After an error it drops the rest, because torch would not propagate the error."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.hash = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes, unless an earlier write failed."""
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
        """Do nothing: `stage` flushes once."""


@dataclass
class Staged:
    """A file under its temporary name, synced to the disk; `commit` gives it its final name."""

    path: Path
    size: int
    sha256: str

    @property
    def temporary(self) -> Path:
        return temporary(self.path)

    def commit(self) -> None:
        os.replace(self.temporary, self.path)

    def discard(self) -> None:
        self.temporary.unlink(missing_ok=True)


def temporary(path: Path) -> Path:
    """Return the temporary name under which this process writes a file, in the same folder."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


def create(name: Path) -> BinaryIO:
    """Open a new file; anything that already has that name, such as a planted link, is removed."""
    name.unlink(missing_ok=True)
    return name.open("xb")


def stage(path: Path, write: Callable[[Writer], object]) -> Staged:
    """Write a file under its temporary name, and sync it to the disk; if that fails, remove it and raise `SaveError`."""
    name = temporary(path)
    try:
        with create(name) as file:
            writer = Writer(file)
            write(writer)
            if writer.error is not None:
                raise writer.error
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        with suppress(OSError):
            name.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        reason = f"({error.strerror or error}); what was saved before is unchanged"
        raise SaveError(f"{path} could not be saved {reason}", error.strerror) from error
    return Staged(path, writer.size, writer.hash.hexdigest())


def write_text(path: Path, text: str) -> None:
    """Replace the content of a file by a text; raises the same as `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the content of a file; raises `SaveError` and leaves it unchanged if the disk is full, the folder is not writable, …"""
    staged = stage(path, lambda file: file.write(content))
    with committing(str(path), staged):
        staged.commit()


@contextmanager
def committing(name: str, *staged: Staged) -> Iterator[None]:
    """Turn an `OSError` into a `SaveError` with that name, and remove the temporary files of `staged`."""
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        raise SaveError(f"{name} could not be saved ({error.strerror or error})", error.strerror) from error
    finally:
        for file in staged:
            file.discard()


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk if the system can; not every network file system does."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of processes that have ended."""
    for path in folder.glob("*.tmp-*"):
        match = re.search(r"\.tmp-(\d+)$", path.name)
        if match and not _is_alive(int(match[1])):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return False  # this process writes one file at a time
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


_held: set[int] = set()


@contextmanager
def locked(folder: Path, say: Callable[[str], None] = print, otherwise: str = "set another trainer.run_name") -> Iterator[None]:
    """Lock a folder against other processes. The kernel releases the lock when the process ends, however it ends.

    The lock file is next to the folder, because `--force` renames the folder. Raises `SettingError`: another process holds the lock, or the
    lock file cannot be created; `otherwise` is what else to do than wait.
    """
    whole = Path(os.path.abspath(folder))  # `.` has no name
    file = whole.parent / f".{whole.name}.lock"
    try:
        descriptor = _open_locked(file, say)
    except BlockingIOError:
        raise SettingError(f"{_owner(file)} is training in {folder}: wait until it ends, or {otherwise}") from None
    except OSError as error:
        raise SettingError(f"{folder} cannot be locked: {file}: {error.strerror}") from error
    _held.add(descriptor)
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
        yield
    finally:
        with suppress(OSError):  # a file may have taken the place of its folder
            file.unlink(missing_ok=True)  # before the release: a process that opened it in the meantime sees that it is gone
        _held.discard(descriptor)
        os.close(descriptor)


def _open_locked(file: Path, say: Callable[[str], None]) -> int:
    """Return a locked descriptor of the file that currently has this name."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError as error:  # a network file system without locks
            say(f"{file} cannot be locked ({error.strerror}): make sure that no other process is training in this folder")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(file, follow_symlinks=False)):
                return descriptor
        os.close(descriptor)  # its owner has just removed it


def _owner(file: Path) -> str:
    """Return what the process that holds a lock wrote into its file."""
    with suppress(OSError):
        return file.read_text(errors="replace")[:80] or "another process"
    return "another process"


def _release_in_child() -> None:
    """Close inherited locks in a forked worker, so that a lock ends with the process that took it, not with its last worker."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)
