"""Values that change over a run: pure functions of its progress, from 0 to 1."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from lightning_rl.errors import SettingError, check_choice, check_range, nearest

Schedule = Callable[[float], float]


def constant(value: float) -> Schedule:
    """The same value all along."""
    return piecewise([[0.0, value]])


def linear(start: float, end: float = 0.0) -> Schedule:
    """From start to end over the run, then end."""
    return piecewise([[0.0, start], [1.0, end]])


def piecewise(points: list[list[float]]) -> Schedule:
    """Straight lines through `[progress, value]` points; the first and last value before and after them."""
    at, value = zip(*points, strict=True)
    return partial(_interpolate, at, value)


def _interpolate(at: Sequence[float], value: Sequence[float], progress: Any) -> Any:
    if len(at) == 1:
        return float(value[0])
    return float(np.interp(progress, at, value))


def make_schedule(name: str, setting: float | Mapping[str, Any], low: float = 0.0, high: float = float("inf")) -> Schedule:
    """Build a schedule from its setting.

    Args:
        name: what the schedule is for, for messages.
        setting: a number or a mapping, see `ScheduleSetting`.
        low, high: all values must lie between them.

    Raises:
        SettingError: unknown schedule or key, a missing one, or a value out of range.
    """
    if not isinstance(setting, Mapping):
        check_range(name, setting, low, high)
        return constant(float(setting))
    keys = {"constant": {"value"}, "linear": {"start", "end"}, "piecewise": {"points"}}
    kind = setting.get("schedule")
    check_choice(f"{name}.schedule", kind, keys)
    arguments = {key: value for key, value in setting.items() if key != "schedule"}
    for key in arguments.keys() - keys[str(kind)]:
        raise SettingError(f"{name}.{key} is not a setting of the {kind} schedule{nearest(key, keys[str(kind)])}")
    for key in keys[str(kind)] - {"end"} - arguments.keys():
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
    return constant(arguments["value"]) if kind == "constant" else linear(**arguments)


class BuildSchedule:
    """Says in an annotation that a setting becomes a schedule."""

    def build(self, name: str, setting: Any) -> Schedule:
        """Build the schedule of a setting."""
        return make_schedule(name, setting)

    def __repr__(self) -> str:
        return "schedule"


if TYPE_CHECKING:
    ScheduleSetting = Any  # given as a number or a mapping, and a `Schedule` from then on
else:
    ScheduleSetting = Annotated[float | dict[str, Any], BuildSchedule()]
    """A number, `{schedule: linear, start: 3e-4, end: 0.0}` or `{schedule: piecewise, points: [[0, 3e-4], [0.5, 1e-4], [1, 0]]}`."""
