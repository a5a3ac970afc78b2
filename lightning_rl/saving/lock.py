"""One process at a time in a run's folder."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_rl.errors import SettingError

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
