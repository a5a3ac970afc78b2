"""How processes start and end: Ctrl-C before torch is loaded, where configs and modules are found, workers that end with their parent.

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

ROOT = Path(__file__).parent.parent
"""The folder of this package: a checkout, or where packages are installed."""
INTERRUPTED = 130
"""Exit status after Ctrl-C."""
RAN_THE_PROGRAM = 78
"""Exit status of a process that found itself running the program from its beginning."""
UNGUARDED = 'spawned processes import the program: let it train below `if __name__ == "__main__":`'
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
LIMITS: list[tuple[int, int, int]] = []
"""Of garbage collection, as they were when each import that still lasts began."""
LIMITS_LOCK = threading.Lock()


def config_folder() -> Path:
    """Find the packaged configs: next to the package in a checkout, inside it when installed."""
    return folder_beside("configs")


def folder_beside(name: str) -> Path:
    """Return a folder inside the package where it is installed; next to it in a checkout."""
    inside = Path(__file__).parent / name
    return inside if inside.is_dir() else ROOT / name


def packaged_agents() -> dict[str, Path]:
    """Return the folders of the trained agents that come with this package, by the names of the configs that trained them."""
    folder = folder_beside("zoo")
    return {path.parent.relative_to(folder).as_posix(): path.parent for path in sorted(folder.rglob("agent.json"))}


def search_here_last() -> None:
    """Remove the current folder from the front of `sys.path`, where `python -m` puts it.

    It goes to the end if this package is in it: in a checkout that is not installed, workers would not find the package otherwise.
    """
    here = os.getcwd()
    if sys.path[0] in ("", here):
        del sys.path[0]
        if ROOT.samefile(here):
            sys.path.append(here)


def find_modules_here(names: Iterable[str]) -> None:
    """Let Python find modules in the current folder, after all others, if one of the names is found nowhere else.

    Only then: the folder may hold anything, and a file in it must not be imported because a package has the same name.
    """
    packages = {name.partition(".")[0] for name in names}
    if any(package not in sys.modules and find_spec(package) is None for package in packages):
        sys.path.append(os.getcwd())


def is_program() -> bool:
    """Return whether this package is being imported to be run, by `lightning-rl` or `python -m lightning_rl`."""
    if sys.argv[0] == "-m":  # Python looks for a module: ours, or one of a package that imports us
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") in ("lightning_rl", "lightning_rl.__main__")
    return os.path.basename(sys.argv[0]) == "lightning-rl"


def leave_when_interrupted() -> None:
    """End at once on Ctrl-C, unless somebody else handles or ignores it."""
    _replace_handler(signal.default_int_handler, _leave)


def raise_when_interrupted() -> None:
    """Handle Ctrl-C as Python does, again."""
    _replace_handler(_leave, signal.default_int_handler)


def _replace_handler(before: object, handler: object) -> None:
    if signal.getsignal(signal.SIGINT) is before:
        with suppress(ValueError):  # not the main thread, which gets no signals
            signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


@contextmanager
def importing() -> Iterator[None]:
    """Limit garbage collection to new objects while modules are imported: full collections take a third of the time of importing torch.

    Several threads may import at once: the last that ends restores the limits.
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
    """End a process that was spawned to work and imports, before it works, a program that trains as it is imported."""
    try:
        multiprocessing.spawn.get_preparation_data("")  # raises where multiprocessing could not start a process either
    except RuntimeError:
        os._exit(RAN_THE_PROGRAM)


def follow_parent() -> None:
    """Leave signals to all processes of a terminal or job to the parent, and end when the parent ends, also if it was killed."""
    for name in SIGNALS:
        signal.signal(getattr(signal, name), _ignore)
    threading.Thread(target=_end_with_parent, daemon=True).start()


@contextmanager
def restoring_signal_handlers() -> Iterator[None]:
    """Install Python's signal handlers again afterwards, also where a C++ library replaced them below Python."""
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)


def start_fork_server(module: str) -> None:
    """Start the process from which others are forked, after it has imported a module; it ignores signals to a whole terminal or job."""
    multiprocessing.set_forkserver_preload([module])
    with restoring_signal_handlers():
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        forkserver.ensure_running()


def _ignore(number: int, frame: object) -> None:
    """Do nothing: programs that an environment starts would inherit SIG_IGN and could not be terminated."""


def _end_with_parent() -> None:
    """End a process that is stuck in its environment; one that waits notices itself that its pipe is closed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        time.sleep(1.0)
        os._exit(1)
