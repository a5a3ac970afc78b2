"""A config under construction, with a remark beside what is compensated and a line for what is dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from lightning_rl.algorithms.settings import as_integer

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
