"""Start and end of processes: Ctrl-C before torch is loaded, the search for configs and modules, workers that end with their parent.

Imports as little as possible.
"""

import gc
import multiprocessing
import multiprocessing.spawn
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder that contains this package: a checkout, or the folder of installed packages."""
INTERRUPTED = 130
"""Exit status after Ctrl-C."""
RAN_THE_PROGRAM = 78
"""Exit status of a spawned process whose import of the program starts training again."""
UNGUARDED = 'spawned processes import the program: put the training below `if __name__ == "__main__":`'
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
LIMITS: list[tuple[int, int, int]] = []
"""Garbage-collection thresholds at the start of each import that is still running."""
LIMITS_LOCK = threading.Lock()


def config_folder() -> Path:
    """Return the folder of packaged configs: next to the package in a checkout, inside it if installed."""
    return folder_beside("configs")


def folder_beside(name: str) -> Path:
    """Return a folder of the package: inside it if installed, next to it in a checkout."""
    inside = Path(__file__).parents[1] / name
    return inside if inside.is_dir() else ROOT / name


def packaged_agents() -> dict[str, Path]:
    """Return the folders of the trained agents in this package, keyed by the names of their configs."""
    folder = folder_beside("zoo")
    return {path.parent.relative_to(folder).as_posix(): path.parent for path in sorted(folder.rglob("agent.json"))}


def search_here_last() -> None:
    """Remove the current folder from the front of `sys.path`, where `python -m` puts it.

    If it contains this package, append it to the end: workers would not find a package that is not installed otherwise.
    """
    here = os.getcwd()
    if sys.path[0] in ("", here):
        del sys.path[0]
        if ROOT.samefile(here):
            sys.path.append(here)


def find_modules_here(names: Iterable[str]) -> None:
    """Append the current folder to `sys.path` if one of the modules is not found elsewhere.

    Only then: the folder may contain anything, and its files must not hide packages of the same name.
    """
    packages = {name.partition(".")[0] for name in names}
    if any(package not in sys.modules and find_spec(package) is None for package in packages):
        sys.path.append(os.getcwd())


def is_program() -> bool:
    """Return whether this package is imported by its command line, `lightning-rl` or `python -m lightning_rl`."""
    if sys.argv[0] == "-m":  # Python is looking for a module: ours, or one in a package that imports us
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") in ("lightning_rl", "lightning_rl.__main__")
    return os.path.basename(sys.argv[0]) == "lightning-rl"


def leave_when_interrupted() -> None:
    """Exit immediately on Ctrl-C, unless another handler is installed or the signal is ignored."""
    _replace_handler(signal.default_int_handler, _leave)


def raise_when_interrupted() -> None:
    """Restore Python's handling of Ctrl-C."""
    _replace_handler(_leave, signal.default_int_handler)


def _replace_handler(before: object, handler: object) -> None:
    if signal.getsignal(signal.SIGINT) is before:
        with suppress(ValueError):  # not in the main thread, so this thread gets no signals
            signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


@contextmanager
def importing() -> Iterator[None]:
    """Limit garbage collection to new objects during imports: full collections take a third of the time of importing torch.

    Several threads may import at the same time; the last one to finish restores the thresholds.
    """
    with LIMITS_LOCK:
        LIMITS.append(gc.get_threshold())
        gc.set_threshold(20_000, 10**9)
    try:
        yield
    finally:
        with LIMITS_LOCK:
            before = LIMITS.pop()
            if not LIMITS:
                gc.set_threshold(*before)


def leave_the_program() -> None:
    """Exit a spawned process whose import of the program starts training, before it does any work."""
    try:
        multiprocessing.spawn.get_preparation_data("")  # raises if multiprocessing could not start a process here
    except RuntimeError:
        os._exit(RAN_THE_PROGRAM)


def follow_parent() -> None:
    """Ignore signals that a terminal or job sends to all its processes, and exit when the parent ends, even if it is killed."""
    for name in SIGNALS:
        signal.signal(getattr(signal, name), _ignore)
    threading.Thread(target=_end_with_parent, daemon=True).start()


@contextmanager
def restoring_signal_handlers() -> Iterator[None]:
    """Reinstall Python's signal handlers after the context, even if a C++ library replaced them below Python."""
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)


def start_fork_server(module: str) -> None:
    """Start the fork server with a module preloaded; it ignores signals to a whole terminal or job."""
    multiprocessing.set_forkserver_preload([module])
    with restoring_signal_handlers():
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        forkserver.ensure_running()


def _ignore(number: int, frame: object) -> None:
    """Ignore a signal; with SIG_IGN, programs that an environment starts would inherit it and could not be terminated."""


def _end_with_parent() -> None:
    """Exit with the parent, even if stuck in an environment; a waiting process notices on its own that its pipe is closed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        time.sleep(1.0)
        os._exit(1)
