"""How processes begin and end: Ctrl-C before torch is loaded, where configs and modules are found, workers that end with their parent.

Imports as little as possible itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
"""Where this package lies: a checkout, or where packages are installed."""


def config_folder() -> Path:
    """Find the packaged configs: next to the package in a checkout, inside it when installed."""
    return ROOT / "configs" if (ROOT / "configs").is_dir() else Path(__file__).parent / "configs"


def search_here_last() -> None:
    """Take the current folder from the front of `sys.path`, where `python -m` puts it.

    It goes to the end where this package lies in it: in a checkout that is not installed, workers would not find the package otherwise.
    """
    here = os.getcwd()
    if sys.path[0] in ("", here):
        del sys.path[0]
        if ROOT.samefile(here):
            sys.path.append(here)


def find_modules_here(names: Iterable[str]) -> None:
    """Let Python find modules in the current folder, behind all others, if one of the names is of a module that is found nowhere else.

    Only then: the folder may hold anything, and a file in it must not be imported because a package has the same name.
    """
    packages = {name.partition(".")[0] for name in names}
    if any(package not in sys.modules and find_spec(package) is None for package in packages):
        sys.path.append(os.getcwd())


INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def is_program() -> bool:
    """Whether this package is being imported to be run, by `lightning-rl` or `python -m lightning_rl`."""
    if sys.argv[0] == "-m":  # a module that is being looked for: ours, or one of a package that imports us
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") in ("lightning_rl", "lightning_rl.__main__")
    return os.path.basename(sys.argv[0]) == "lightning-rl"


def leave_when_interrupted() -> None:
    """Answer Ctrl-C by ending at once; not where somebody else answers or ignores it."""
    _replace(signal.default_int_handler, _leave)


def raise_when_interrupted() -> None:
    """Answer Ctrl-C as Python does, again."""
    _replace(_leave, signal.default_int_handler)


def _replace(before: object, handler: object) -> None:
    if signal.getsignal(signal.SIGINT) is before:
        try:
            signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]
        except ValueError:  # not the main thread, which signals do not meet
            return


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")


def live_and_die_with_the_parent() -> None:
    """Signals to all processes of a terminal or a job are the parent's to answer, and no process stays behind one that was killed."""
    for name in SIGNALS:
        signal.signal(getattr(signal, name), _leave_it)
    threading.Thread(target=_end_with_parent, daemon=True).start()


@contextmanager
def keeping_signal_handlers() -> Iterator[None]:
    """What answers signals answers them again afterwards, also where a library of C++ has put handlers below Python's."""
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)


def _leave_it(*_: Any) -> None:
    """A handler, as programs that an environment starts would inherit SIG_IGN and could not be terminated."""


def _end_with_parent() -> None:
    """A process that waits hears that its pipe is closed; one that is frozen in its environment ends here."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        time.sleep(1.0)
        os._exit(1)
