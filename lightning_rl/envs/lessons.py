"""Values of environment parameters as in ML-Agents: samplers, and curricula of lessons."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TypedDict

import numpy as np

from lightning_rl.errors import SettingError, check_choice, check_flag, check_names, check_range, nearest

MAX_NUMBER = 1e300
"""Largest magnitude of a number; the difference of two such numbers is finite, too."""


@dataclass(frozen=True)
class Sampler:
    """A distribution to draw numbers from. With its own `seed` the numbers are the same in all runs; -1 uses the run's seed."""

    seed: int = field(default=-1, kw_only=True)

    def __post_init__(self) -> None:
        for setting in fields(self):
            if setting.type is float:
                check_number(setting.name, getattr(self, setting.name))
        check_range("seed", self.seed, -1, whole=True)
        self.check()

    def check(self) -> None:
        """Raise `SettingError` for inconsistent numbers."""

    def draw(self, generator: np.random.Generator) -> float:
        """Draw a number."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Sampler):
    """Always the same number; a bare number means this."""

    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.value:g}"

    def draw(self, generator: np.random.Generator) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Uniform(Sampler):
    """The uniform distribution from `min_value` to `max_value`."""

    min_value: float = 0.0
    max_value: float = 1.0

    def check(self) -> None:
        if self.min_value > self.max_value:
            raise SettingError(f"min_value must be <= max_value, got {self.min_value!r} and {self.max_value!r}")

    def __str__(self) -> str:
        return f"uniform({self.min_value:g}, {self.max_value:g})"

    def draw(self, generator: np.random.Generator) -> float:
        return float(generator.uniform(self.min_value, self.max_value))


@dataclass(frozen=True)
class Gaussian(Sampler):
    """The normal distribution with this mean and standard deviation."""

    mean: float = 1.0
    st_dev: float = 1.0

    def check(self) -> None:
        check_range("st_dev", self.st_dev, 0)

    def __str__(self) -> str:
        return f"gaussian({self.mean:g}, {self.st_dev:g})"

    def draw(self, generator: np.random.Generator) -> float:
        return float(generator.normal(self.mean, self.st_dev))


@dataclass(frozen=True)
class MultiRangeUniform(Sampler):
    """The uniform distribution over several intervals `[low, high]`: choose one in proportion to its length, then draw from it."""

    intervals: Sequence[Sequence[float]] = ((0.0, 1.0),)

    def check(self) -> None:
        if not isinstance(self.intervals, list | tuple) or not self.intervals:
            raise SettingError(f"intervals must be a list of [low, high], got {self.intervals!r}")
        for interval in self.intervals:
            if not isinstance(interval, list | tuple) or len(interval) != 2:
                raise SettingError(f"intervals must each have two numbers [low, high], got {interval!r}")
            for end in interval:
                check_number("intervals", end)
            if interval[0] > interval[1]:
                raise SettingError(f"intervals must each have low <= high, got {interval!r}")

    def __str__(self) -> str:
        return f"multirangeuniform({', '.join(f'[{low:g}, {high:g}]' for low, high in self.intervals)})"

    def draw(self, generator: np.random.Generator) -> float:
        lengths = np.array([high - low for low, high in self.intervals], float)
        total = lengths.sum()
        share = lengths / total if total else np.full(len(lengths), 1 / len(lengths))
        low, high = self.intervals[generator.choice(len(lengths), p=share)]
        return float(generator.uniform(low, high))


SAMPLERS: dict[str, type[Sampler]] = {
    "constant": Constant,
    "uniform": Uniform,
    "gaussian": Gaussian,
    "multirangeuniform": MultiRangeUniform,
    "multirange_uniform": MultiRangeUniform,
}
SAMPLER_KEYS = ("sampler_type", "sampler_parameters")
PlainSampler = float | dict[str, object]
"""A number for a constant, else `{sampler_type, sampler_parameters}`."""


def as_sampler(name: str, setting: object) -> Sampler:
    """Read a sampler from a number or from `{sampler_type, sampler_parameters}`; errors begin with the setting's full name."""
    if not isinstance(setting, Mapping):
        return Constant(check_number(name, setting))
    check_names(f"{name}.", setting, SAMPLER_KEYS, " of a sampler")
    for key in SAMPLER_KEYS:
        if key not in setting:
            raise SettingError(f"{name} needs a {key}; a sampler is {{sampler_type, sampler_parameters}}")
    kind, parameters = setting["sampler_type"], setting["sampler_parameters"]
    if not isinstance(kind, str) or kind not in SAMPLERS:
        raise SettingError(f"{name}.sampler_type {kind!r} is not known{nearest(str(kind), SAMPLERS)}")
    if not isinstance(parameters, Mapping):
        raise SettingError(f"{name}.sampler_parameters must be a mapping, got {parameters!r}")
    check_names(f"{name}.sampler_parameters.", parameters, [known.name for known in fields(SAMPLERS[kind])], f" of {kind}")
    try:
        return SAMPLERS[kind](**parameters)
    except SettingError as error:
        raise SettingError(f"{name}.sampler_parameters.{error}") from None


def as_plain(sampler: Sampler) -> PlainSampler:
    """Return what `as_sampler` reads back: a number for a constant, else a dictionary of plain data."""
    if isinstance(sampler, Constant):
        return sampler.value
    parameters = asdict(sampler)
    if isinstance(sampler, MultiRangeUniform):
        parameters["intervals"] = [list(interval) for interval in sampler.intervals]
    return {"sampler_type": type(sampler).__name__.lower(), "sampler_parameters": parameters}


def check_number(name: str, value: object) -> float:
    """Return a value that is a finite number; else raise `SettingError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise SettingError(f"{name} must be a finite number, got {value!r}")
    return value


@dataclass(frozen=True)
class CompletionCriteria:
    """Criteria for completing a lesson.

    Args:
        measure: `reward` (mean return) or `success` (share) of the last `min_lesson_length` episodes, `progress` of the run, 0 to 1, or
            `elo`, the rating of the policy in self-play.
        threshold: what the measure must exceed.
        min_lesson_length: the minimum number of episodes of a lesson.
        signal_smoothing: smooth the measure after each episode: a quarter of its last value plus three quarters of the new one; not `elo`.
        require_reset: end the current episodes, so that the next lesson begins immediately in all environments.
        behavior: the behavior whose episodes count, if several learn.
    """

    measure: str = "reward"
    threshold: float = 0.0
    min_lesson_length: int = 0
    signal_smoothing: bool = True
    require_reset: bool = False
    behavior: str | None = None

    def __post_init__(self) -> None:
        if str(self.measure).lower() == "elo":  # ML-Agents writes Elo
            object.__setattr__(self, "measure", "elo")
        check_choice("measure", self.measure, ("reward", "progress", "success", "elo"))
        check_number("threshold", self.threshold)
        if self.behavior is not None and (not isinstance(self.behavior, str) or not self.behavior):
            raise SettingError(f"behavior must be the name of a behavior, got {self.behavior!r}")
        if self.measure in ("progress", "success"):
            check_range("threshold", self.threshold, 0)
            if self.threshold >= 1:
                raise SettingError(f"threshold must be < 1: a lesson ends when {self.measure} exceeds it; got {self.threshold!r}")
        check_range("min_lesson_length", self.min_lesson_length, 0, whole=True)
        check_flag("signal_smoothing", self.signal_smoothing)
        check_flag("require_reset", self.require_reset)

    @property
    def window(self) -> int:
        """Return the number of episodes over which the measure is computed."""
        return max(1, self.min_lesson_length)


@dataclass(frozen=True)
class Lesson:
    """A part of a curriculum: what the parameter is drawn from, and when the next lesson begins (None: never)."""

    name: str
    value: Sampler
    completion_criteria: CompletionCriteria | None = None


class LessonValues(TypedDict):
    """The distributions from which an environment draws a parameter, as plain data.

    values: samplers of the lessons it may play.  replay: share of episodes that play an earlier lesson than the last.  first: index of the
    first lesson.
    """

    values: list[PlainSampler]
    replay: float
    first: int


@dataclass(frozen=True)
class Parameter:
    """The lessons of a parameter; without a curriculum there is only one.

    Args:
        lessons: all lessons in order.
        replay_old_lessons: the share of episodes that play an earlier lesson than the current one, each with equal probability.
    """

    lessons: tuple[Lesson, ...]
    replay_old_lessons: float = 0.0

    def until(self, lesson: int) -> LessonValues:
        """Return the values of all lessons up to and including this one."""
        values = [as_plain(stage.value) for stage in self.lessons[: lesson + 1]]
        return {"values": values, "replay": self.replay_old_lessons, "first": 0}

    def only(self, lesson: int) -> LessonValues:
        """Return the values of this lesson alone."""
        return {"values": [as_plain(self.lessons[lesson].value)], "replay": 0.0, "first": lesson}


def as_parameters(settings: object) -> dict[str, Parameter]:
    """Read parameters from settings, skipping null ones; errors begin with a setting's full name."""
    if not isinstance(settings, Mapping):
        raise SettingError(f"env.parameters must be a mapping of names to values, got {settings!r}")
    if "" in settings:
        raise SettingError(f"env.parameters has a value {settings['']!r} without a name")
    return {str(key): as_parameter(f"env.parameters.{key}", setting) for key, setting in settings.items() if setting is not None}


def as_parameter(name: str, setting: object) -> Parameter:
    """Read one parameter from a number, a sampler or `{curriculum: [lessons]}`."""
    if not isinstance(setting, Mapping) or setting.keys() & set(SAMPLER_KEYS):
        return Parameter((Lesson("", as_sampler(name, setting)),))
    if not setting.keys() & {"curriculum", "replay_old_lessons"}:
        got = "".join(f"the key {key!r}{nearest(str(key), (*SAMPLER_KEYS, 'curriculum'))}" for key in list(setting)[:1]) or "nothing"
        raise SettingError(f"{name} must be a number, a sampler or {{curriculum: [lessons]}}, got {got}")
    check_names(f"{name}.", setting, ("curriculum", "replay_old_lessons"))
    lessons, replay = setting.get("curriculum"), setting.get("replay_old_lessons", 0.0)
    if not isinstance(lessons, list | tuple) or not lessons:
        raise SettingError(f"{name}.curriculum must be a list of lessons, got {lessons!r}")
    check_range(f"{name}.replay_old_lessons", replay, 0, 1)
    last = len(lessons) - 1
    return Parameter(tuple(as_lesson(f"{name}.curriculum[{i}]", lesson, i, i == last) for i, lesson in enumerate(lessons)), replay)


def change_parameter(settings: Mapping[str, object], name: str, value: object) -> PlainSampler | None:
    """Return what a parameter of `env.parameters` is drawn from after a change; None if that is what it is drawn from already.

    Raises `SettingError`: there is no such parameter, it has lessons, or the value is invalid.
    """
    known = as_parameters(settings)
    if name not in known:
        raise SettingError(f"set_parameter: {name} is not in env.parameters, which give its first value{nearest(name, known)}")
    if len(known[name].lessons) > 1:
        raise SettingError(f"set_parameter: {name} follows its lessons in env.parameters")
    new = as_plain(as_sampler(f"set_parameter: {name}", value))
    return None if new == as_plain(known[name].lessons[0].value) else new


def as_lesson(name: str, setting: object, number: int, last: bool) -> Lesson:
    """Read one lesson; all but the last need criteria."""
    if not isinstance(setting, Mapping):
        raise SettingError(f"{name} must be a lesson {{name, value, completion_criteria}}, got {setting!r}")
    check_names(f"{name}.", setting, ("name", "value", "completion_criteria"))
    if "value" not in setting:
        raise SettingError(f"{name}.value is missing; a lesson needs a number or a sampler")
    criteria = setting.get("completion_criteria")
    if criteria is None and not last:
        raise SettingError(f"{name}.completion_criteria is missing; every lesson but the last one needs it")
    read = None if criteria is None else as_criteria(f"{name}.completion_criteria", criteria)
    return Lesson(str(setting.get("name", number)), as_sampler(f"{name}.value", setting["value"]), read)


def as_criteria(name: str, setting: object) -> CompletionCriteria:
    """Read criteria from a mapping."""
    if not isinstance(setting, Mapping):
        raise SettingError(f"{name} must be a mapping, got {setting!r}")
    check_names(f"{name}.", setting, [field.name for field in fields(CompletionCriteria)])
    length = setting.get("min_lesson_length", 0)
    if isinstance(length, float) and length.is_integer():  # 1e2
        setting = {**setting, "min_lesson_length": int(length)}
    try:
        return CompletionCriteria(**setting)
    except SettingError as error:
        raise SettingError(f"{name}.{error}") from None
