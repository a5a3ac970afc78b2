"""Build a config from the settings of another library's file, which are read one by one."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from lightning_rl.errors import SettingError, check_range
from lightning_rl.settings.fields import as_integer
from lightning_rl.settings.yaml_files import Plain, as_mapping, dump, parse_file

MAX_WIDTH = 120
"""Maximum width of a mapping on one line; longer ones get a line for each key."""


class Config:
    """Settings by their dotted path, such as `model.env.id`, in the order in which they are set; `command` becomes the first comment."""

    def __init__(self, algorithm: str, command: str) -> None:
        self.algorithm, self.comments = algorithm, [" ".join(command.split())]
        self.settings: Plain = {}
        self.remarks: dict[str, str] = {}

    def set(self, path: str, value: object, remark: str = "") -> None:
        """Add a setting, with a remark on why it differs from the file."""
        self.settings[path], self.remarks[path] = as_integer(value), remark

    def note(self, text: str) -> None:
        self.comments += text.splitlines()

    def drop(self, settings: Plain, reasons: Mapping[str, str]) -> None:
        """Add a comment for each reason why settings of the file are left out, except settings that are off."""
        dropped: dict[str, list[str]] = {}
        for name, value in settings.items():
            if value and value != "none":
                dropped.setdefault(reasons.get(name, f"not a setting of {self.algorithm}"), []).append(name)
        for reason, names in dropped.items():
            self.note(f"{', '.join(names)} dropped: {reason}")

    def text(self) -> str:
        """Write the config as YAML."""
        tree: Plain = {"model": {"class_path": (self.algorithm, ""), "init_args": {}}}
        for path, value in self.settings.items():
            *sections, name = path.replace("model.", "model.init_args.", 1).split(".")
            part = tree
            for section in sections:
                part = part.setdefault(section, {})
            part[name] = (value, self.remarks[path])
        return "\n".join([*(f"# {line}" for line in self.comments), *lines(tree)]) + "\n"


def lines(tree: Plain, indent: str = "") -> Iterator[str]:
    """Write sections in blocks, and each value on one line with its remark."""
    for name, part in tree.items():
        if isinstance(part, dict):
            yield f"{indent}{name}:"
            yield from lines(part, indent + "  ")
            continue
        value, remark = part
        comment = f"  # {remark}" if remark else ""
        line = dump({name: value}, default_flow_style=True, width=float("inf")).strip()[1:-1]
        if isinstance(value, Mapping) and len(line) > MAX_WIDTH:
            yield f"{indent}{name}:{comment}"
            block = dump(value, width=float("inf"))
            yield from (f"{indent}  {line}" for line in block.splitlines())
        else:
            yield f"{indent}{line}{comment}"


class Settings:
    """Settings of a file. Reading a setting removes it, so that those left over were not used.

    `places`: the path of each name in the file; default: the name.
    """

    def __init__(self, values: Plain, places: Mapping[str, str] | None = None) -> None:
        self.values, self.places = dict(values), dict(places or {})

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def place(self, name: str) -> str:
        return self.places.get(name, name)

    def take(self, name: str, default: object = None) -> Any:
        """Remove and return a value; the default if it is missing or null."""
        value = self.values.pop(name, None)
        return default if value is None else value

    def number(self, name: str, default: float, high: float = float("inf")) -> float:
        """Take a number from 0 to `high`; `SettingError` for anything else."""
        value = self.take(name, default)
        check_range(self.place(name), value, 0, high)
        return value

    def integer(self, name: str, default: int, low: int = 1, high: float = float("inf")) -> int:
        """Take an integer from `low` to `high`, which may be written as a float; `SettingError` for anything else."""
        value = as_integer(self.take(name, default))
        check_range(self.place(name), value, low, high, whole=True)
        return value

    def mapping(self, name: str) -> Plain:
        """Take a mapping, {} if it is missing or null; `SettingError` for anything else."""
        return dict(as_mapping(self.place(name), self.take(name)))

    def section(self, name: str) -> Self:
        """Take a mapping as settings with their places."""
        values = self.mapping(name)
        return type(self)(values, {value: f"{self.place(name)}.{value}" for value in values})


def read_file(path: str) -> Plain:
    """Read a YAML file."""
    settings = parse_file(Path(path), path)
    if not isinstance(settings, dict) or not settings:
        raise SettingError(f"{path} must be a mapping of names to settings, got {'nothing' if not settings else repr(settings)}")
    return settings


def merge(settings: Plain, others: Plain) -> Plain:
    """Merge `others` into settings, including nested mappings."""
    merged = dict(settings)
    for name, value in others.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def read_expression(text: object, where: str) -> object:
    """Read a Python expression as data: `dict(…)` as a mapping, names such as `nn.ReLU` as strings. Other values than strings are kept."""
    if not isinstance(text, str):
        return text
    try:
        return _as_data(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise SettingError(f"{where} must be a mapping such as dict(net_arch=[64, 64]), got {text!r}") from error


def _as_data(node: Any) -> object:
    kind = type(node)
    if kind is ast.Call and ast.unparse(node.func) == "dict" and not node.args and all(keyword.arg for keyword in node.keywords):
        return {keyword.arg: _as_data(keyword.value) for keyword in node.keywords}
    if kind is ast.Dict:
        return {_as_data(key): _as_data(value) for key, value in zip(node.keys, node.values, strict=True)}
    if kind in (ast.List, ast.Tuple):
        return [_as_data(element) for element in node.elts]
    return ast.unparse(node) if kind in (ast.Name, ast.Attribute) else ast.literal_eval(node)
