"""Ctrl-C while the program is being loaded: nothing has begun that would have to end, and an import that is cut short leaves a traceback.

Imports as little as possible itself.
"""

from __future__ import annotations

import os
import signal
import sys

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
