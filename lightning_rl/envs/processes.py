"""What the processes beside the main one have in common."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

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
