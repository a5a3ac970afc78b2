"""The lock on a run's folder: one process at a time, and none that has ended."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_rl.checkpoints.atomic import locked
from lightning_rl.errors import SettingError


@contextmanager
def another_process(folder, forks=False):
    """Yield the id of a process that has the lock, with a worker if it forks; both are killed in the end."""
    said, says = os.pipe()
    child = os.fork()
    if child == 0:
        with locked(folder):
            worker = os.fork() if forks else 0
            if worker or not forks:
                os.write(says, f"{worker}\n".encode())
            signal.pause()
    worker = int(os.read(said, 20))
    try:
        yield child
    finally:
        for process in (child, worker) if forks else (child,):
            os.kill(process, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_second_process_is_refused_in_one_line_until_the_first_has_left(tmp_path):
    folder = tmp_path / "run"
    with locked(folder):
        with pytest.raises(SettingError) as error, locked(folder):
            pass
        assert (tmp_path / ".run.lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}"
    owner = f"process {os.getpid()} on {os.uname().nodename}"
    assert str(error.value) == f"{owner} is training in {folder}: wait until it ends, or set another trainer.run_name"
    with locked(folder):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_one_lock_whatever_it_is_called(tmp_path, monkeypatch):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run" / "checkpoints")
    with locked(Path("..")):
        assert (tmp_path / ".run.lock").is_file()
        monkeypatch.chdir(tmp_path / "run")
        with pytest.raises(SettingError, match=" is training in "), locked(Path(".")):
            pass


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_process_leaves_no_lock_though_its_worker_lives_on(tmp_path, forks):
    folder = tmp_path / "run"
    with another_process(folder, forks) as process:
        with pytest.raises(SettingError, match=f"^process {process} on "), locked(folder):
            pass
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        assert (tmp_path / ".run.lock").exists()
        with locked(folder):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_on_a_file_that_was_just_removed_does_not_count(tmp_path, monkeypatch):
    flock, file = fcntl.flock, tmp_path / ".run.lock"

    def remove_first(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        file.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with locked(tmp_path / "run"), pytest.raises(SettingError), locked(tmp_path / "run"):
        pass


def test_a_link_in_the_place_of_the_lock_is_not_written_through(tmp_path):
    (tmp_path / "mine").write_text("years of work")
    (tmp_path / ".run.lock").symlink_to("mine")
    with (
        pytest.raises(SettingError, match=r"run cannot be locked: .*\.run\.lock: Too many levels of symbolic links"),
        locked(tmp_path / "run"),
    ):
        pass
    assert (tmp_path / "mine").read_text() == "years of work"


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    lines: list[str] = []
    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "run", lines.append):
        pass
    assert lines == [
        f"{tmp_path / '.run.lock'} cannot be locked (No locks available): make sure that no other process is training in this folder"
    ]
