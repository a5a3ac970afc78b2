"""A config under construction, and the settings of somebody else's file, read one by one."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_rl.config_files import parse
from lightning_rl.errors import SettingError, check_range, nearest
from lightning_rl.training.settings import as_integer

WIDTH = 120
"""From this length on a mapping stands in lines of its own."""


class Config:
    """Settings by their dotted path, such as `model.env.id`, in the order in which they are set.

    Args:
        algorithm: what learns.
        command: that makes this config, for its first line.
    """

    def __init__(self, algorithm: str, command: str) -> None:
        self.algorithm, self.command = algorithm, command
        self.settings: dict[str, Any] = {}
        self.remarks: dict[str, str] = {}
        self.notes: list[str] = []

    def set(self, path: str, value: Any, remark: str = "") -> None:
        """A setting, and why it is not what the file says."""
        self.settings[path] = as_integer(value)
        if remark:
            self.remarks[path] = remark

    def note(self, text: str) -> None:
        """A comment before all settings: what was dropped, and what else to know."""
        self.notes.append(text)

    def drop(self, settings: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
        """What is left of a file's settings: a comment for each reason why, where they are not off."""
        dropped: dict[str, list[str]] = {}
        for name, value in settings.items():
            if value and value != "none":
                dropped.setdefault(reasons.get(name, f"not a setting of {self.algorithm}"), []).append(name)
        for reason, names in dropped.items():
            self.note(f"{', '.join(names)} dropped: {reason}")

    def text(self) -> str:
        """The config as YAML."""
        lines = [f"# {' '.join(self.command.split())}", *(f"# {line}" for note in self.notes for line in note.splitlines())]
        return "\n".join([*lines, *self._written()]) + "\n"

    def _written(self) -> Iterator[str]:
        tree: dict[str, Any] = {"model": {"class_path": self.algorithm, "init_args": {}}}
        remarks = {}
        for path, value in self.settings.items():
            section, _, rest = path.partition(".")
            *inner, name = ["model", "init_args", *rest.split(".")] if section == "model" else path.split(".")
            part = tree
            for each in inner:
                part = part.setdefault(each, {})
            part[name] = Leaf(value)
            remarks[(*inner, name)] = self.remarks.get(path, "")
        return branch(tree, remarks)


class Leaf:
    """A value that stands in one line, so that mappings which are values are not taken for sections."""

    def __init__(self, value: Any) -> None:
        self.value = value


def branch(tree: Mapping[str, Any], remarks: Mapping[tuple[str, ...], str], inside: tuple[str, ...] = ()) -> Iterator[str]:
    """The lines of a part of the config, nested sections in blocks."""
    for name, part in tree.items():
        place, indent = (*inside, name), "  " * len(inside)
        if isinstance(part, Mapping):
            yield f"{indent}{name}:"
            yield from branch(part, remarks, place)
            continue
        value = part.value if isinstance(part, Leaf) else part
        remark = f"  # {remarks[place]}" if remarks.get(place) else ""
        text = in_line(value)
        if isinstance(value, Mapping) and len(text) > WIDTH:
            yield f"{indent}{name}:{remark}"
            yield from (f"{indent}  {line}" for line in in_block(value).splitlines())
        else:
            yield f"{indent}{name}: {text}{remark}"


def in_line(value: Any) -> str:
    """A value as YAML in one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf")).removesuffix("...\n").strip()


def in_block(value: Any) -> str:
    """A value as YAML, a line for each of its parts."""
    return yaml.safe_dump(value, sort_keys=False, width=float("inf")).rstrip()


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


def read_expression(text: Any, where: str) -> Any:
    """Plain data of an expression: names such as `nn.ReLU` as texts, `dict(…)` as a mapping; what is no text as it is.

    Raises:
        SettingError: it is no expression, or says more than data.
    """
    if not isinstance(text, str):
        return text
    try:
        return _plain(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise SettingError(f"{where} must be a mapping such as dict(net_arch=[64, 64]), got {text!r}") from error


def _plain(node: ast.expr) -> Any:
    return READERS.get(type(node).__name__, ast.literal_eval)(node)


def _call(node: Any) -> dict[str, Any]:
    if ast.unparse(node.func) != "dict" or node.args or not all(each.arg for each in node.keywords):
        raise ValueError(f"{ast.unparse(node)} is no dict(name=value)")
    return {each.arg: _plain(each.value) for each in node.keywords}


def _mapping(node: Any) -> dict[Any, Any]:
    return {_plain(key): _plain(value) for key, value in zip(node.keys, node.values, strict=True)}


def _sequence(node: Any) -> list[Any]:
    return [_plain(each) for each in node.elts]


READERS: dict[str, Callable[[Any], Any]] = {
    **{"Call": _call, "Dict": _mapping, "List": _sequence, "Tuple": _sequence},
    **{"Name": ast.unparse, "Attribute": ast.unparse},
}
