"""A trainer file of ML-Agents, of the first kind (a section for each brain, over `default`) or of today's (`behaviors`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from lightning_rl.errors import SettingError, nearest
from lightning_rl.importing.given import Given, check_known, merged, read_file
from lightning_rl.importing.mlagents_tables import BEHAVIOR, ENTRIES, HYPERPARAMETERS, MEMORY, NETWORK, SECTIONS, SEED_ERA, SELF_PLAY

NESTED = {"hyperparameters": HYPERPARAMETERS, "network_settings": NETWORK}
FLAT = HYPERPARAMETERS | NETWORK | MEMORY | SEED_ERA
"""What stands in a behavior of an old file."""


@dataclass
class Behavior:
    """What a file says of one behavior.

    Args:
        name: of the behavior.
        given: its settings side by side, whatever the file's form.
        old: whether the file has them side by side.
        sections: the file's other sections, each with what is known of it.
    """

    name: str
    given: Given
    old: bool
    sections: Given


def read_behavior(path: str, name: str | None) -> Behavior:
    """The behavior of that name, or the only one.

    Raises:
        SettingError: there is none, there are several, or a setting is not one of ML-Agents.
    """
    file = read_file(path)
    if any(section in file for section in ("behaviors", "default_settings")):
        check_known(file, SECTIONS, "an ML-Agents file")
        behaviors, default = part(file, "behaviors"), part(file, "default_settings")
        sections = {key: value for key, value in file.items() if key not in ("behaviors", "default_settings")}
        prefix = "behaviors."
    else:
        behaviors = {key: value for key, value in file.items() if key not in ("default", "parameter_randomization")}
        default = part(file, "default")
        sections = {key: file[key] for key in ("parameter_randomization",) if key in file}
        prefix = ""
    for section, known in ENTRIES.items():
        check_known(part(sections, section), known, "ML-Agents", f"{section}.")
    if not behaviors and not default:
        raise SettingError(f"{path} has no behaviors; each has a name and settings")
    name = choose(name, behaviors, bool(default))
    settings = merged(default, part(behaviors, name, prefix))
    given, old = side_by_side(settings, f"{prefix}{name}.")
    return Behavior(name, given, old, Given(sections))


def choose(name: str | None, behaviors: Mapping[str, Any], default: bool) -> str:
    """The name of the behavior to take."""
    if name is None and len(behaviors) <= 1:
        return next(iter(behaviors), "default")
    if name is None:
        names = shorten(", ".join(map(str, behaviors)), 110, placeholder=" …")
        raise SettingError(f"there are {len(behaviors)} behaviors, name one of them by --behavior: {names}")
    if name not in behaviors and not (name == "default" and default):
        raise SettingError(f"--behavior {name}: there is none of that name{nearest(name, map(str, behaviors))}")
    return name


def part(settings: Mapping[str, Any], name: str, prefix: str = "") -> dict[str, Any]:
    """A part of the file that must be a mapping; an empty one where it is missing or null."""
    value = settings.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise SettingError(f"{prefix}{name} must be a mapping of settings, got {value!r}")
    return dict(value or {})


def side_by_side(settings: Mapping[str, Any], prefix: str) -> tuple[Given, bool]:
    """The settings of a behavior without its sections, and whether there were none.

    Raises:
        SettingError: one is not known in its place.
    """
    new = "trainer_type" in settings or any(section in settings for section in NESTED)
    old = not new and bool(settings.keys() & FLAT)
    check_known(settings, BEHAVIOR | (set() if new else FLAT), "ML-Agents", prefix)
    check_known(part(settings, "self_play", prefix), SELF_PLAY, "ML-Agents", f"{prefix}self_play.")
    flat, places = {}, {}
    for name, value in settings.items():
        if name not in NESTED:
            flat[name], places[name] = value, f"{prefix}{name}"
    for section, known in NESTED.items():
        inner = part(settings, section, prefix)
        check_known(inner, known, "ML-Agents", f"{prefix}{section}.")
        flat |= inner
        places |= {name: f"{prefix}{section}.{name}" for name in inner}
    if new:
        memory = part(flat, "memory", f"{prefix}network_settings.")
        check_known(memory, MEMORY, "ML-Agents", f"{prefix}network_settings.memory.")
        flat["use_recurrent"] = flat.pop("memory", None) is not None
        flat |= memory
        places |= {name: f"{prefix}network_settings.memory.{name}" for name in memory}
    return Given(flat, places), old
