"""Read the settings of classes, dataclasses or not: their names, types, ranges and defaults. Check and convert values for them."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, Union, get_args, get_origin

import numpy as np

from lightning_rl.errors import SettingError, check_choice, check_flag, check_integers, check_names, check_range
from lightning_rl.schedules import BuildSchedule, Schedule, make_schedule

T = TypeVar("T")
Kind = tuple[object, tuple[object, ...]]
"""A type, with the metadata of its annotation."""
Settings = TypeVar("Settings")
if TYPE_CHECKING:
    OrPlain: TypeAlias = Settings | Any
else:

    class OrPlain:
        """Annotation of a setting that Python code may also give as plain data, such as a mapping that `as_settings` converts."""

        def __class_getitem__(cls, kind: type) -> type:
            """Return the type, which is what config files can hold."""
            return kind


class Dataclass(Protocol):
    """An instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True, repr=False)
class Range:
    """The allowed values of a number, in its annotation: `Annotated[int, Range(1)]`.

    Args:
        low: minimum.
        high: maximum.
        open_low: exclude the minimum.
    """

    low: float = -float("inf")
    high: float = float("inf")
    open_low: bool = False

    def __repr__(self) -> str:
        low = f"{'>' if self.open_low else '>='} {self.low:g}"
        return low if self.high == float("inf") else f"{low} and <= {self.high:g}"


@cache
def settings_of(cls: type) -> dict[str, inspect.Parameter]:
    """Return all settings of a class, including those that `**kwargs` pass on to its bases."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        declared = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        parameters |= {p.name: p for p in declared if p.name not in parameters and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if not any(p.kind is p.VAR_KEYWORD for p in declared):
            break
    return parameters


@cache
def kinds_of(cls: type) -> dict[str, list[Kind]]:
    """Return the allowed types of each setting of a class; of a dataclass, those of its fields."""
    kinds = {name: list(alternatives(parameter.annotation)) for name, parameter in settings_of(cls).items()}
    for field in fields(cls) if is_dataclass(cls) else ():
        kinds[field.name] = list(alternatives(field.type))
        if field.init and any(isinstance(kind, str) for kind, _ in kinds[field.name]):
            raise SettingError(f"{cls.__name__}.{field.name}: its annotation is a string; remove `from __future__ import annotations`")
    return kinds


@cache
def scheduled_settings(cls: type) -> frozenset[str]:
    """Return the names of the settings that may follow a schedule."""
    notes = {name: [note for _, of_kind in kinds for note in of_kind] for name, kinds in kinds_of(cls).items()}
    return frozenset(name for name, attached in notes.items() if any(isinstance(note, BuildSchedule) for note in attached))


def alternatives(hint: object) -> Iterator[Kind]:
    """Yield the types of a union."""
    if get_origin(hint) in (Union, UnionType):
        for hinted in get_args(hint):
            yield from alternatives(hinted)
    elif get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        yield kind, tuple(notes)
    else:
        yield hint, ()


def read_fields(instance: Dataclass, prefix: str = "") -> dict[str, Schedule]:
    """Check and convert each field by its annotation; see `read_value`. Return the schedules. `prefix`: of the fields' names in errors."""
    schedules: dict[str, Schedule] = {}
    kinds = kinds_of(type(instance))
    for name in [field.name for field in fields(instance) if field.init]:
        given = getattr(instance, name)
        value, schedule = read_value(f"{prefix}{name}", given, kinds[name])
        if value is not given:
            object.__setattr__(instance, name, value)  # it may be frozen
        if schedule is not None:
            schedules[name] = schedule
    return schedules


def read_value(name: str, value: object, kinds: list[Kind]) -> tuple[object, Schedule | None]:
    """Check a setting against its allowed types. Return its value and its schedule, if it has one.

    Whole floats such as 1e6 become integers; the value of a schedule is its initial value.

    Raises:
        SettingError: the value is outside its `Range`, not in its `Literal`, or not true or false.
    """
    schedule = None
    if value is None and (NoneType, ()) in kinds:
        return None, None
    if any(kind is int for kind, _ in kinds):
        value = as_integer(value)
    (kind, notes), *others = [kind for kind in kinds if kind[0] is not NoneType]
    for note in notes:
        if isinstance(note, Range):
            check_range(name, value, note.low, note.high, open_low=note.open_low, whole=kind is int)
        elif isinstance(note, BuildSchedule):
            schedule = make_schedule(name, value)
            value = schedule(0.0)
    if kind is bool and not others:
        check_flag(name, value)
    elif get_origin(kind) is Literal and not others:
        check_choice(name, value, get_args(kind))
    elif kind == list[int] and not others:
        check_integers(name, value)
    return value, schedule


def as_integer(value: T) -> T | int:
    """Convert a whole float such as 1e6, or a numpy integer, to an integer; return anything else unchanged."""
    if isinstance(value, np.integer) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value


def convert_integers(kinds: Mapping[str, list[Kind]], given: Mapping[str, T]) -> dict[str, T | int]:
    """Convert the values of settings that are annotated as integers."""
    whole = {name for name, allowed in kinds.items() if {int, "int", "int | None"} & {kind for kind, _ in allowed}}
    return {name: as_integer(value) if name in whole else value for name, value in given.items()}


def default_of(cls: type[Dataclass], parameter: inspect.Parameter) -> object:
    """Return the default of a setting."""
    factories = {field.name: field.default_factory for field in fields(cls) if field.default_factory is not MISSING}
    is_made = repr(parameter.default) == "<factory>"  # as dataclasses write it in a signature
    return factories[parameter.name]() if is_made else parameter.default


def as_settings(name: str, kind: type[Settings], setting: object) -> Settings:
    """Return settings as a dataclass; Python code may pass a mapping.

    Raises `SettingError`: the setting is of another type, has an unknown name, or lacks a required one.
    """
    if isinstance(setting, kind):
        return setting
    if not isinstance(setting, Mapping):
        instead = "; use None for none" if setting is False else ""
        raise SettingError(f"{name} must be {kind.__name__}(…) or a mapping of its settings, got {setting!r}{instead}")
    settings = fields(kind)  # type: ignore[arg-type]
    check_names(f"{name}.", setting, [field.name for field in settings])
    for field in settings:
        if field.name not in setting and field.default is MISSING and field.default_factory is MISSING:
            raise SettingError(f"{name}.{field.name} is missing")
    return kind(**setting)
