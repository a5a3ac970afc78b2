"""What a user did wrong, said in one sentence: the key, its value, why, and the way out."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

Settings = TypeVar("Settings")


def printable(text: str) -> str:
    """A text that a terminal shows and does not obey: its control characters are escaped, its line ends stay."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


class SettingError(Exception):
    """A setting, file or environment that cannot be used. The command line prints it as one line and exits with status 2.

    Not a `ValueError`: jsonargparse would take one for a wrong type and bury what it says.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class NotFiniteError(SettingError):
    """A number that became infinite or is none. The run stops; what was saved before stays."""


class LostRankError(Exception):
    """Another process of the run was killed or failed. The command line prints it as one line and exits with status 1."""


class Interrupted(Exception):
    """Given up because somebody asked the run to stop; nothing was changed."""


def closest(name: str, names: Iterable[str]) -> str:
    """`; did you mean X?` for the closest of `names`, or one that starts like it; nothing when there is none."""
    found = closest_of(name, names)
    return f"; did you mean {found}?" if found else ""


def closest_of(name: str, names: Iterable[str]) -> str | None:
    """The closest of `names`, or one that starts like it; None when there is none."""
    names = sorted(set(names))
    close = difflib.get_close_matches(name, names, n=1) or [each for each in names if name and each.startswith(name)]
    return close[0] if close else None


def nearest(name: str, names: Iterable[str]) -> str:
    """The closest of `names`, or all of them when none is close and they are few."""
    names = sorted(set(names))
    return closest(name, names) or (f"; choose from {', '.join(names)}" if 0 < len(names) <= 10 else "")


def check_range(
    name: str, value: Any, low: float = -float("inf"), high: float = float("inf"), *, open_low: bool = False, whole: bool = False
) -> None:
    """Raise `SettingError` unless low <= value <= high (low < value with `open_low`), an integer with `whole`."""
    kind, what = (int, "an integer") if whole else ((int, float), "a number")
    bounds = f"{'>' if open_low else '>='} {low:g}" + (f" and <= {high:g}" if high != float("inf") else "")
    unbounded = (low, high) == (-float("inf"), float("inf"))
    if isinstance(value, bool) or not isinstance(value, kind):
        raise SettingError(f"{name} must be {what}{'' if unbounded else f' {bounds}'}, got {value!r}")
    if not low <= value <= high or (open_low and value == low):
        raise SettingError(f"{name} must be {what if unbounded else bounds}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raise `SettingError` unless value is true or false."""
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be true or false, got {value!r}")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `SettingError` unless value is one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise SettingError(f"{name} must be one of {', '.join(choices)}, got {value!r}{closest(str(value), choices)}")


def check_path(name: str, path: Any) -> None:
    """Raise `SettingError` for a path that no file can have: too long, or with a NUL or an invalid character."""
    try:
        os.lstat(path)
    except ValueError as error:
        raise SettingError(f"{name} {str(path)[:60]!r} is not a valid path: {error}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise SettingError(f"{name} {str(path)[:60]!r}… is too long for a path") from error


def as_settings(name: str, kind: type[Settings], setting: Any) -> Settings:
    """Settings of a dataclass, which from Python may be a mapping.

    Raises:
        SettingError: something else, or an unknown name.
    """
    if isinstance(setting, kind):
        return setting
    if not isinstance(setting, Mapping):
        raise SettingError(f"{name} must be a {kind.__name__} or a mapping of its settings, got {setting!r}")
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    for key in setting.keys() - names:
        raise SettingError(f"{name}.{key} is not a setting{nearest(str(key), names)}")
    return kind(**setting)


def missing_extra(package: str, extra: str, needed_by: str) -> SettingError:
    """The error for an optional dependency that is not installed."""
    return SettingError(f'{needed_by} needs the package {package}, which is not installed; run: pip install "lightning_rl[{extra}]"')
