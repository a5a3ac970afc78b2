"""Schedules: values that change over a run, as pure functions of its progress from 0 to 1."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from lightning_rl.errors import SettingError, check_choice, check_names, check_range

Schedule = Callable[[float], float]
KEYS = {"constant": {"value"}, "linear": {"start", "end"}, "piecewise": {"points"}}
"""The settings of each schedule."""


def constant(value: float) -> Schedule:
    """Return a constant schedule."""
    return partial(_always, float(value))


def linear(start: float, end: float = 0.0) -> Schedule:
    """Return a linear schedule from start to end over the run."""
    return piecewise([[0.0, start], [1.0, end]])


def piecewise(points: list[list[float]]) -> Schedule:
    """Return a piecewise linear schedule through `[progress, value]` points, constant before the first and after the last."""
    at, values = zip(*points, strict=True)
    return partial(_interpolate, at, values)


def _always(value: float, progress: float) -> float:
    return value


def _interpolate(at: Sequence[float], values: Sequence[float], progress: float) -> float:
    return float(np.interp(progress, at, values))


def make_schedule(name: str, setting: object, low: float = 0.0, high: float = float("inf")) -> Schedule:
    """Build a schedule from its setting.

    Args:
        name: the setting's name in messages.
        setting: a number, a mapping or a function; see `ScheduleSetting`.
        low, high: limits of all values.

    Raises:
        SettingError: the schedule or a key is unknown, a key is missing, or a value is out of range.
    """
    if callable(setting):
        setting = as_points(name, setting)
        for at, value in setting["points"]:
            check_range(f"{name} at progress {at:g}", value, low, high)
    if not isinstance(setting, Mapping):
        check_range(name, setting, low, high)
        return constant(float(setting))  # type: ignore[arg-type]
    arguments = dict(setting)
    kind = arguments.pop("schedule", None)
    check_choice(f"{name}.schedule", kind, KEYS)
    check_names(f"{name}.", arguments, KEYS[kind], f" of the {kind} schedule")
    for key in KEYS[kind] - {"end"} - arguments.keys():
        raise SettingError(f"{name}.{key} is missing; the {kind} schedule needs it")
    if kind == "piecewise":
        points = arguments["points"]
        if not isinstance(points, list) or not points or any(not isinstance(p, list | tuple) or len(p) != 2 for p in points):
            raise SettingError(f"{name}.points must be a list of [progress, value] pairs, got {points!r}")
        for at, value in points:
            check_range(f"{name}.points progress", at, 0, 1)
            check_range(f"{name}.points value", value, low, high)
        if [at for at, _ in points] != sorted(at for at, _ in points):
            raise SettingError(f"{name}.points must be in order of progress, got {points!r}")
        return piecewise(points)
    for key, value in arguments.items():
        check_range(f"{name}.{key}", value, low, high)
    return constant(**arguments) if kind == "constant" else linear(**arguments)


def as_points(name: str, function: Callable[[float], float]) -> dict[str, Any]:
    """Convert a function of progress to a piecewise linear schedule setting, with a point at every hundredth of the run.

    Such a setting can be saved, while checkpoints contain no code.
    """
    points = []
    for k in range(101):
        try:
            points.append([k / 100, float(function(k / 100))])
        except Exception as error:  # a user's function may raise anything
            raise SettingError(f"{name}: the function of progress fails at {k / 100:g}: {type(error).__name__}: {error}") from error
    return {"schedule": "piecewise", "points": points}


class BuildSchedule:
    """Annotation marker: the setting becomes a schedule."""

    def __repr__(self) -> str:
        return "schedule"


if TYPE_CHECKING:
    ScheduleSetting = Any  # passed as a number or a mapping, then converted to a `Schedule`
else:
    ScheduleSetting = Annotated[float | dict[str, Any], BuildSchedule()]
    """A number, `{schedule: linear, start: 3e-4, end: 0.0}` or `{schedule: piecewise, points: [[0, 3e-4], [0.5, 1e-4], [1, 0]]}`; in
    Python also a function of the progress from 0 to 1, see `as_points`."""
