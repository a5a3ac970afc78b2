"""User errors in one sentence: the key, its value, the reason and the fix."""

import difflib
import dis
import errno
import inspect
import math
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from types import ModuleType

MAX_SEED = 2**32 - 1
"""The largest seed that all generators accept."""
PACKAGE = Path(__file__).parent
LIBRARIES = (PACKAGE, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))
"""Folders of this package, Python's standard library and installed packages."""


def printable(text: str) -> str:
    """Escape control characters except newlines, so that a terminal shows them and does not execute them."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def short_number(number: float) -> str:
    """Format a number with three significant digits, or as an integer from 100 on: `0.0123`, `-1.5`, `212`, `12,345`."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


class SettingError(Exception):
    """A setting, file or environment that cannot be used. The command line prints it as one line and exits with its `status`.

    Not a `ValueError`: jsonargparse would treat that as a wrong type and hide the message.
    """

    status = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_own_file(filename: str) -> bool:
    """Return whether a file of Python code is the user's: not of this package, the standard library or an installed package."""
    file = Path(filename)
    installed = not {"dist-packages", "site-packages"}.isdisjoint(file.parts) or any(map(file.is_relative_to, LIBRARIES))
    return not (filename.startswith("<") or installed)


def place_in_code(error: BaseException) -> str:
    """Return the file and line of user code that raised an error, as ` (my_env.py:41)`; an empty string if it was raised elsewhere."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if is_own_file(frame.filename):
            return f" (line {frame.lineno} of a cell)" if "ipykernel_" in file.parent.name else f" ({file.name}:{frame.lineno})"
    return ""


def was_raised_in(error: BaseException, *packages: ModuleType) -> bool:
    """Return whether the line that raised an error is in this package or one of the given ones."""
    file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return any(map(file.is_relative_to, (PACKAGE, *(Path(str(package.__file__)).parent for package in packages))))


class NotFiniteError(SettingError):
    """A value is NaN or infinite. The run stops; it can be resumed from its last save."""

    is_told = False
    """Whether another process of the run prints it."""


class ProgramEndedError(SettingError):
    """An environment called `sys.exit()`, or raised `KeyboardInterrupt` or another error that is no `Exception`."""

    status = 3


class UnsavedError(SettingError):
    """The newest weights of a run could not be saved, for instance because the disk is full."""

    status = 4


def keep_running(error: BaseException, who: str) -> None:
    """Raise `ProgramEndedError` for an error of user code that would end the program, such as `SystemExit`; do nothing for others.

    `who`: the environment, for the message. Ctrl-C by the user is raised again.
    """
    if isinstance(error, Exception):
        return
    if isinstance(error, GeneratorExit) or is_interrupt(error):
        raise error
    what = f"{type(error).__name__}{f' {error}' if str(error) else ''}"
    raise ProgramEndedError(f"{who} tried to end the program by {what}{place_in_code(error)}") from error


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is Ctrl-C by the user: a `KeyboardInterrupt` that no line of Python raised."""
    place = error.__traceback__
    if not isinstance(error, KeyboardInterrupt) or place is None:
        return False
    while place.tb_next is not None:
        place = place.tb_next
    return place.tb_frame.f_code.co_code[place.tb_lasti] != dis.opmap["RAISE_VARARGS"]


class LostRankError(Exception):
    """Another process of the run was killed or failed. The command line prints it as one line and exits with its `status`."""

    status = 1


class RunStoppedError(Exception):
    """Work was canceled because the run was asked to stop; nothing was changed."""


def closest(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean X?` for the closest of `names`; an empty string if none is close."""
    close = closest_of(name, names)
    return f"; did you mean {close}?" if close else ""


def closest_of(name: str, names: Iterable[str]) -> str | None:
    """Return the name that differs only in case or letter order, else the closest, else one with this prefix; None: no match."""
    names, small = sorted(set(names)), name.casefold()
    same_word = [known for known in names if known.casefold() == small]
    same_letters = [known for known in names if sorted(known.casefold()) == sorted(small)]
    close = (
        same_word
        or same_letters
        or difflib.get_close_matches(name, names, n=1)
        or [known for known in names if name and known.startswith(name)]
    )
    return close[0] if close else None


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the suggestion of `closest`, or all names if none is close and there are at most 15."""
    names = sorted(set(names))
    return closest(name, names) or (f"; choose from {', '.join(names)}" if 0 < len(names) <= 15 else "")


def closest_argument(error: BaseException, function: Callable[..., object]) -> str:
    """Return what `closest` suggests if an error says that a function or class does not know an argument, else an empty string."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown is None:
        return ""
    known: list[str] = []
    for base in function.__mro__ if isinstance(function, type) else [function]:
        with suppress(ValueError, TypeError):  # written in C, without a signature
            known += inspect.signature(base).parameters
    return closest(unknown[1], known)


def check_range(
    name: str, value: object, low: float = -math.inf, high: float = math.inf, *, open_low: bool = False, whole: bool = False
) -> None:
    """Raise `SettingError` unless low <= value <= high (low < value with `open_low`), an integer with `whole`."""
    what = "an integer" if whole else "a number"
    top = str(high) if isinstance(high, int) else f"{high:g}"
    bounds = f"{'>' if open_low else '>='} {low:g}" + (f" and <= {top}" if high != math.inf else "")
    unbounded = (low, high) == (-math.inf, math.inf)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise SettingError(f"{name} must be {what}{'' if unbounded else f' {bounds}'}, got {value!r}")
    if not low <= value <= high or (open_low and value == low):
        raise SettingError(f"{name} must be {what if unbounded else bounds}, got {value!r}")


def check_seed(name: str, value: object) -> None:
    """Raise `SettingError` unless value is a seed that all generators accept: a non-negative integer of 32 bits."""
    check_range(name, value, 0, MAX_SEED, whole=True)


def check_flag(name: str, value: object) -> None:
    """Raise `SettingError` unless value is true or false."""
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be true or false, got {value!r}")


def check_integers(name: str, value: object) -> None:
    """Raise `SettingError` unless a value is a list of integers."""
    if not isinstance(value, list | tuple) or not all(isinstance(number, Integral) and not isinstance(number, bool) for number in value):
        raise SettingError(f"{name} must be a list of integers such as [64, 64], got {value!r}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise `SettingError` unless value is one of the choices."""
    choices = list(choices)
    if value not in choices:
        names = list(map(str, choices))
        raise SettingError(f"{name} must be one of {', '.join(names)}, got {value!r}{closest(str(value), names)}")


def check_names(prefix: str, given: Iterable[object], known: Iterable[str], owner: str = "", where: str = "") -> None:
    """Raise `SettingError` for the first key that is not among the known names.

    Args:
        prefix: prefix of each key.
        given, known: the keys to check, and the allowed keys.
        owner: whose settings these are, such as ` of PPO`.
        where: the file that contains the keys, such as ` in a.yaml`.
    """
    known = list(known)
    for key in given:
        if key not in known:
            raise SettingError(f"{prefix}{key}{where} is not a setting{owner}{nearest(str(key), known)}")


def check_path(name: str, path: str | os.PathLike[str]) -> None:
    """Raise `SettingError` for an impossible path: too long, or with a NUL or an invalid character."""
    try:
        os.lstat(path)
    except (ValueError, TypeError) as error:
        reason = "it contains a NUL" if "\0" in str(path) else error
        raise SettingError(f"{name} {str(path)[:60]!r} is not a valid path: {reason}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise SettingError(f"{name} {str(path)[:60]!r}… is too long for a path") from error


def missing_extra(package: str, extra: str, needed_by: str) -> SettingError:
    """Return the error for an optional dependency that is not installed."""
    return SettingError(f'{needed_by} needs the package {package}, which is not installed; run: pip install "lightning_rl[{extra}]"')
