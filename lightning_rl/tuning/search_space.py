"""Search spaces: the settings that a study varies and their values, in YAML files; one is packaged for each algorithm."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from lightning_rl.errors import SettingError, check_flag, check_names, check_range, nearest
from lightning_rl.schedules import Schedule
from lightning_rl.settings.yaml_files import Plain, parse_file

FOLDER = Path(__file__).parent / "search_spaces"
"""The packaged spaces, `<algorithm>.yaml`."""
RANGE, CHOICES = ("low", "high", "log", "step"), ("choices",)
FIXED = {
    "model.class_path": "the algorithm",
    "model.env": "the environment",
    "model.env.id": "the environment",
    "model.max_env_steps": "the length of the runs",
    "model.max_updates": "the length of the runs",
}
"""Settings that all trials share, because their values could not be compared otherwise."""
MAX_END, MAX_STEPS = 1e15, 10**9
"""Studies store values as floats, which represent every integer up to this end; steps are counted as a ratio of floats."""
Value = Any
"""A value in YAML: a number, a string, true, a list or a mapping."""
Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
"""How a setting is drawn."""


@dataclass(frozen=True)
class Dimension:
    """A setting that a study varies, by its dotted path: a range of numbers, or a list of values.

    Args:
        path: the setting as an option of `fit`, such as `model.learning_rate`.
        distribution: Optuna's distribution. Lists and mappings among choices are JSON texts, because studies store only plain values.
    """

    path: str
    distribution: Distribution

    def option(self, value: Value) -> str:
        """Return the option of `fit` that sets the value."""
        return f"--{self.path}={value if isinstance(value, str) else json.dumps(value)}"

    def samples(self) -> list[Value]:
        """Return values with which to check the dimension: each choice, or the ends of a range and a value inside."""
        distribution = self.distribution
        if isinstance(distribution, CategoricalDistribution):
            return list(distribution.choices)
        low, high, step = distribution.low, distribution.high, distribution.step
        inside = math.exp((math.log(low) + math.log(high)) / 2) if distribution.log else low + 0.37 * (high - low)
        if step is not None:
            inside = low + round((inside - low) / step) * step
        return [low, high, inside]

    def clip(self, value: Value) -> Value:
        """Return the nearest value of a range; a choice as it is."""
        distribution = self.distribution
        if isinstance(distribution, CategoricalDistribution):
            return value
        low, high, step = distribution.low, distribution.high, distribution.step
        value = min(max(value, low), high)
        return value if step is None else min(low + round((value - low) / step) * step, high)  # 0 + 3 * 0.1 > 0.3

    def place_of(self, value: Value) -> float:
        """Return a number that a picture can show: the index of a choice, or the value itself."""
        distribution = self.distribution
        return distribution.choices.index(value) if isinstance(distribution, CategoricalDistribution) else value


@dataclass(frozen=True)
class SearchSpace:
    """The settings that a study varies, in the order of their file."""

    source: str
    dimensions: tuple[Dimension, ...]

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Return Optuna's distributions by the settings' paths."""
        return {dimension.path: dimension.distribution for dimension in self.dimensions}

    def find_values(self, config: Mapping[str, object], schedules: Mapping[str, Schedule]) -> dict[str, Value]:
        """Find the values of a config: one outside a range moves to the nearer end, one that is not among the choices is left out.

        Args:
            config: the model's settings.
            schedules: the model's schedules; each counts with its first value.
        """
        values: dict[str, Value] = {}
        for dimension in self.dimensions:
            name = dimension.path.removeprefix("model.")
            value = schedules[name](0.0) if name in schedules else find_setting(config, name)
            value = as_choice(value)
            if isinstance(dimension.distribution, CategoricalDistribution):
                if value in (choices := dimension.distribution.choices):
                    values[dimension.path] = choices[choices.index(value)]  # 1 and true are equal: take the listed one
            elif isinstance(value, int | float) and not isinstance(value, bool):
                values[dimension.path] = dimension.clip(value)
        return values

    def options(self, values: Mapping[str, Value]) -> list[str]:
        """Return the options of `fit` for the values of a trial."""
        return [dimension.option(values[dimension.path]) for dimension in self.dimensions]

    def describe(self, values: Mapping[str, Value]) -> str:
        """Write the values of a trial on one line."""
        return ", ".join(f"{shorten_path(path)} {as_text(value)}" for path, value in values.items())


def find_setting(config: Mapping[str, object], path: str) -> Value:
    """Return the setting at a dotted path, which leads into the `init_args` of a class; None if a part of it is not set."""
    value: object = config
    for part in path.split("."):
        if isinstance(value, Mapping) and part not in value:
            value = value.get("init_args")
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def shorten_path(path: str) -> str:
    """Return a setting's path as tables show it."""
    return path.removeprefix("model.")


def as_text(value: Value) -> str:
    """Return a value in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def find_space(name: str | None, algorithm: type) -> Path:
    """Return the file of that name; default: the packaged one of an algorithm or of its nearest parent class.

    Raises:
        SettingError: there is no such file, or no packaged one.
    """
    packaged = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
    if name is None:
        files = [packaged[base.__name__] for base in algorithm.__mro__ if base.__name__ in packaged]
        if not files:
            raise SettingError(f"there is no packaged search space for {algorithm.__name__}: write one and name it, --space FILE")
        return files[0]
    path = Path(name)
    if not path.is_file():
        raise SettingError(f"--space {name}: there is no such file{nearest(name, [str(file) for file in path.parent.glob('*.yaml')])}")
    return path


def read_space(path: Path) -> SearchSpace:
    """Read a search space. Raises `SettingError`: not YAML, not a space, or a range that has no values."""
    parsed = parse_file(path, path.name)
    if not isinstance(parsed, dict) or not parsed:
        raise SettingError(f"{path.name} must map settings to ranges such as `model.gamma: {{low: 0.9, high: 0.999}}`, got {parsed!r}")
    return SearchSpace(path.name, tuple(Dimension(str(key), read_distribution(f"{path.name}: {key}", key, parsed[key])) for key in parsed))


def read_distribution(name: str, key: object, setting: object) -> Distribution:
    """Return the distribution of a setting; error messages begin with `name`."""
    if not isinstance(key, str) or not key.startswith("model."):
        raise SettingError(f"{name} is not a setting of an algorithm: write its path, such as model.learning_rate")
    if key in FIXED:
        raise SettingError(f"{name} cannot vary: all trials share {FIXED[key]}")
    if not isinstance(setting, dict):
        raise SettingError(f"{name} must be a mapping of low and high, or of choices, got {setting!r}")
    check_names(
        f"{name}.", setting, CHOICES if "choices" in setting else (*RANGE, *CHOICES), " of a list of values" * ("choices" in setting)
    )
    return read_choices(name, setting["choices"]) if "choices" in setting else read_range(name, setting)


def read_choices(name: str, choices: object) -> CategoricalDistribution:
    """Return the distribution of a list of values."""
    if not isinstance(choices, list) or not choices:
        raise SettingError(f"{name}.choices must be a list of values, got {choices!r}")
    for choice in choices:
        if choice is not None and not isinstance(choice, bool | int | float | str | list | dict):
            raise SettingError(f"{name}.choices: {choice} is neither a number, a string, true, false, null, a list nor a mapping")
    texts = [json.dumps(choice, default=str) for choice in choices]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise SettingError(f"{name}.choices: {twice} appears twice")
    return CategoricalDistribution(list(map(as_choice, choices)))


def as_choice(value: Value) -> Value:
    """Return a value as studies store it: lists and mappings as JSON text with sorted keys."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


def read_range(name: str, setting: Plain) -> FloatDistribution | IntDistribution:
    """Return the distribution of a range; of integers if both ends and the step are integers."""
    for end in ("low", "high"):
        if end not in setting:
            raise SettingError(f"{name}.{end} is missing: a range needs low and high, a list of values choices")
        check_range(f"{name}.{end}", setting[end], -MAX_END, MAX_END)
    low, high, log, step = setting["low"], setting["high"], setting.get("log", False), setting.get("step")
    check_flag(f"{name}.log", log)
    if not low < high:
        raise SettingError(f"{name}: low must be less than high, got {low} and {high}")
    if log and low <= 0:
        raise SettingError(f"{name}.low must be > 0 on a logarithmic scale, got {low}")
    if step is not None:
        if log:
            raise SettingError(f"{name}.step cannot be combined with log: leave one of them out")
        check_range(f"{name}.step", step, 0, high - low, open_low=True)
        if high - low > MAX_STEPS * step:
            raise SettingError(f"{name}.step {step} is less than a billionth of the range from {low} to {high}: leave it out")
        if not math.isclose((high - low) / step, round((high - low) / step)):
            raise SettingError(f"{name}.step {step} does not divide the range from {low} to {high}")
    if all(isinstance(number, int) for number in (low, high, 1 if step is None else step)):
        return IntDistribution(low, high, log=log, step=1 if step is None else step)
    return FloatDistribution(low, high, log=log, step=step)
