"""What an environment's parameter is drawn from: ML-Agents' samplers, under its names.

A sampler's `seed` is that of its draws; -1 takes the run's. Each environment has a stream of its own in either case, see `parameters.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np

from lightning_rl.errors import SettingError, check_range, nearest

LARGEST = 1e300
"""Differences of such numbers are finite, too."""


class Sampler(Protocol):
    """Draws numbers."""

    @property
    def seed(self) -> int: ...

    def draw(self, generator: np.random.Generator) -> float: ...


@dataclass(frozen=True)
class Constant:
    """Always the same number; a bare number means this."""

    value: float = 0.0
    seed: int = -1

    def __post_init__(self) -> None:
        check_number("value", self.value)
        check_seed(self.seed)

    def __str__(self) -> str:
        return f"{self.value:g}"

    def draw(self, generator: np.random.Generator) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Uniform:
    """Every number from `min_value` to `max_value` is as likely."""

    min_value: float = 0.0
    max_value: float = 1.0
    seed: int = -1

    def __post_init__(self) -> None:
        check_number("min_value", self.min_value)
        check_number("max_value", self.max_value)
        if self.min_value > self.max_value:
            raise SettingError(f"min_value must be <= max_value, got {self.min_value!r} and {self.max_value!r}")
        check_seed(self.seed)

    def __str__(self) -> str:
        return f"uniform({self.min_value:g}, {self.max_value:g})"

    def draw(self, generator: np.random.Generator) -> float:
        return float(generator.uniform(self.min_value, self.max_value))


@dataclass(frozen=True)
class Gaussian:
    """The normal distribution with this mean and standard deviation."""

    mean: float = 1.0
    st_dev: float = 1.0
    seed: int = -1

    def __post_init__(self) -> None:
        check_number("mean", self.mean)
        check_number("st_dev", self.st_dev)
        check_range("st_dev", self.st_dev, 0)
        check_seed(self.seed)

    def __str__(self) -> str:
        return f"gaussian({self.mean:g}, {self.st_dev:g})"

    def draw(self, generator: np.random.Generator) -> float:
        return float(generator.normal(self.mean, self.st_dev))


@dataclass(frozen=True)
class MultiRangeUniform:
    """Every number of these intervals `[low, high]` is as likely: one of them by its length, then uniform."""

    intervals: Sequence[Sequence[float]] = ((0.0, 1.0),)
    seed: int = -1

    def __post_init__(self) -> None:
        if not isinstance(self.intervals, list | tuple) or not self.intervals:
            raise SettingError(f"intervals must be a list of [low, high], got {self.intervals!r}")
        for interval in self.intervals:
            if not isinstance(interval, list | tuple) or len(interval) != 2:
                raise SettingError(f"intervals must each have two numbers [low, high], got {interval!r}")
            for end in interval:
                check_number("intervals", end)
            if interval[0] > interval[1]:
                raise SettingError(f"intervals must each have low <= high, got {interval!r}")
        check_seed(self.seed)

    def __str__(self) -> str:
        return f"multirangeuniform({', '.join(f'[{low:g}, {high:g}]' for low, high in self.intervals)})"

    def draw(self, generator: np.random.Generator) -> float:
        lengths = np.array([high - low for low, high in self.intervals], float)
        total = lengths.sum()
        share = lengths / total if total else np.full(len(lengths), 1 / len(lengths))
        low, high = self.intervals[generator.choice(len(lengths), p=share)]
        return float(generator.uniform(low, high))


SAMPLERS: dict[str, Any] = {
    "constant": Constant,
    "uniform": Uniform,
    "gaussian": Gaussian,
    "multirangeuniform": MultiRangeUniform,
    "multirange_uniform": MultiRangeUniform,
}


def as_sampler(name: str, setting: Any) -> Sampler:
    """A sampler from a number or `{sampler_type, sampler_parameters}`; `name` is the setting's, for messages.

    Raises:
        SettingError: another type, unknown or missing settings, or numbers that do not fit together.
    """
    if not isinstance(setting, Mapping):
        check_number(name, setting)
        return Constant(setting)
    for key in setting:
        if key not in ("sampler_type", "sampler_parameters"):
            raise SettingError(f"{name}.{key} is not a setting of a sampler{nearest(str(key), ('sampler_type', 'sampler_parameters'))}")
    for key in ("sampler_type", "sampler_parameters"):
        if key not in setting:
            raise SettingError(f"{name} needs a {key}; a sampler is {{sampler_type, sampler_parameters}}")
    kind, parameters = setting["sampler_type"], setting["sampler_parameters"]
    if not isinstance(kind, str) or kind not in SAMPLERS:
        raise SettingError(f"{name}.sampler_type {kind!r} is not known{nearest(str(kind), SAMPLERS)}")
    if not isinstance(parameters, Mapping):
        raise SettingError(f"{name}.sampler_parameters must be a mapping, got {parameters!r}")
    known = [each.name for each in fields(SAMPLERS[kind])]
    for key in parameters:
        if key not in known:
            raise SettingError(f"{name}.sampler_parameters.{key} is not a setting of {kind}{nearest(str(key), known)}")
    try:
        sampler: Sampler = SAMPLERS[kind](**parameters)
    except SettingError as error:
        raise SettingError(f"{name}.sampler_parameters.{error}") from None
    return sampler


def as_plain(sampler: Any) -> float | dict[str, Any]:
    """The inverse of `as_sampler`: a number for a constant, else a dictionary of plain data."""
    if isinstance(sampler, Constant):
        return sampler.value
    parameters = asdict(sampler)
    if "intervals" in parameters:
        parameters["intervals"] = [list(interval) for interval in parameters["intervals"]]
    return {"sampler_type": type(sampler).__name__.lower(), "sampler_parameters": parameters}


def check_number(name: str, value: Any) -> None:
    """Raise `SettingError` unless a value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise SettingError(f"{name} must be a finite number, got {value!r}")


def check_seed(seed: Any) -> None:
    """Raise `SettingError` unless a value is a seed, or -1 for the run's."""
    check_range("seed", seed, -1, whole=True)
