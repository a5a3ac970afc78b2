"""The settings of somebody else's file, taken one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_rl.algorithms.settings import as_integer
from lightning_rl.cli_configs import parse
from lightning_rl.errors import SettingError, check_range, nearest


class Given:
    """Settings with the place where each stands; what is taken is gone, so that what is left was not needed.

    Args:
        settings: by their names.
        places: how the file spells a name, if not just like that.
    """

    def __init__(self, settings: Mapping[str, Any], places: Mapping[str, str] | None = None) -> None:
        self.settings, self.places = dict(settings), dict(places or {})

    def __contains__(self, name: str) -> bool:
        return self.settings.get(name) is not None

    def place(self, name: str) -> str:
        """How the file spells it."""
        return self.places.get(name, name)

    def take(self, name: str, default: Any = None) -> Any:
        """Its value; the default where it is missing or null."""
        value = self.settings.pop(name, None)
        return default if value is None else value

    def number(self, name: str, default: float, high: float = float("inf")) -> float:
        """A number from 0 to `high`.

        Raises:
            SettingError: it is something else.
        """
        value = self.take(name, default)
        check_range(self.place(name), value, 0, high)
        return value

    def integer(self, name: str, default: int, low: int = 1, high: float = float("inf")) -> int:
        """An integer from `low` to `high`; whole floats are integers.

        Raises:
            SettingError: it is something else.
        """
        value = as_integer(self.take(name, default))
        check_range(self.place(name), value, low, high, whole=True)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """A mapping; an empty one where it is missing or null.

        Raises:
            SettingError: it is something else.
        """
        value = self.take(name, {})
        if not isinstance(value, Mapping):
            raise SettingError(f"{self.place(name)} must be a mapping of settings, got {value!r}")
        return dict(value)


def check_known(given: Iterable[Any], known: Iterable[str], what: str, prefix: str = "") -> None:
    """Raise `SettingError` for the first name that is not among those known, with the nearest that is."""
    known = list(known)
    for name in given:
        if name not in known:
            raise SettingError(f"{prefix}{name} is not a setting of {what}{nearest(str(name), known)}")


def read_file(path: str) -> dict[str, Any]:
    """A YAML file as plain data.

    Raises:
        SettingError: there is none, it is not UTF-8, not YAML, or not a mapping.
    """
    try:
        settings = parse(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        raise SettingError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} is not a text file in UTF-8; save it as one") from error
    if not isinstance(settings, dict) or not settings:
        raise SettingError(f"{path} must be a mapping of names to settings, got {'nothing' if not settings else repr(settings)}")
    return settings


def merged(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them, mapping into mapping."""
    both = dict(settings)
    for name, value in others.items():
        before = both.get(name)
        both[name] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return both
