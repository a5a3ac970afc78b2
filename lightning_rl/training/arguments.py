"""Check settings of dataclass fields and arguments against their types and ranges, convert them, and store them as plain data."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import wraps
from pathlib import PurePath
from textwrap import shorten
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin

import numpy as np
from torch.nn import Module

from lightning_rl.envs.config import EnvConfig, as_config
from lightning_rl.errors import SettingError, check_choice, check_flag, check_integers, check_range
from lightning_rl.networks.memory import Memory
from lightning_rl.schedules import BuildSchedule, Schedule, as_points, make_schedule
from lightning_rl.setting_names import way_out_of_algorithm

T = TypeVar("T")
Kind = tuple[object, tuple[object, ...]]
"""A type, with the metadata of its annotation."""


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


def settings_of(cls: type) -> dict[str, inspect.Parameter]:
    """Return all settings of a class, including those that `**kwargs` pass on to its bases."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        parameters |= {p.name: p for p in own if p.name not in parameters and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return parameters


def check_arguments(cls: type, args: tuple[object, ...], given: Mapping[str, object]) -> None:
    """Raise `SettingError` for invalid arguments of a class.

    These are unknown settings, wrong values for the class's own `__init__`, settings in a subclass that is not a dataclass, modules, and
    positional arguments that must be named.
    """
    check_decorated(cls)
    names = settings_of(cls)
    for name in given:
        if name not in names:
            hint = way_out_of_algorithm(name, names, in_python=True) or f"; help({cls.__name__}) shows all"
            raise SettingError(f"{name} is not a setting of {cls.__name__}{hint}")
        if isinstance(given[name], Module) and "__dataclass_fields__" in vars(cls):
            instead = "; give its class" if name == "encoder" else ""
            raise SettingError(f"{name} must be plain data, which a checkpoint can hold, got a {type(given[name]).__name__}{instead}")
        if name not in {each.name for each in fields(cls)}:
            read_value(name, given[name], list(_alternatives(names[name].annotation)))
    kinds = [each.kind for each in inspect.signature(cls.__init__).parameters.values()][1:]  # type: ignore[misc]
    by_place = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if args and isinstance(args[0], str) and args[0].endswith("Policy"):
        write = f"write {cls.__name__}('CartPole-v1', …)"
        raise SettingError(f"{args[0]!r} is not an environment: {write}; the spaces, encoder and net_arch determine the network")
    if len(args) > by_place:
        got = ", ".join(shorten(repr(each), 30) for each in args)
        raise SettingError(f"{cls.__name__}({got}): only the environment is positional; write setting=value for the others")


def check_decorated(cls: type) -> None:
    """Raise `SettingError` for a setting in the body of a class that is not a dataclass, where it would have no effect."""
    for base in cls.__mro__:
        if is_dataclass(base) and "__dataclass_fields__" not in vars(base):
            annotated = {name for name, hint in inspect.get_annotations(base).items() if _is_setting(hint)}
            for name in sorted(vars(base).keys() & {each.name for each in fields(base)} | annotated):
                decorate = "decorate the class with @dataclass(kw_only=True, eq=False, repr=False)"
                raise SettingError(f"{base.__name__}.{name}: {name} is a setting; {decorate}")


def _is_setting(hint: object) -> bool:
    """Return whether an annotation has metadata that only settings have."""
    return any(isinstance(note, Range | BuildSchedule) for _, notes in _alternatives(hint) for note in notes)


def read_fields(instance: Dataclass) -> dict[str, Schedule]:
    """Check and convert each field by its annotation; see `read_value`. Return the schedules."""
    schedules: dict[str, Schedule] = {}
    for name, kinds in _kinds_of(type(instance)).items():
        value, schedule = read_value(name, getattr(instance, name), kinds)
        setattr(instance, name, value)
        if schedule is not None:
            schedules[name] = schedule
    return schedules


def change_setting(algorithm: Any, name: str, value: object) -> object:
    """Check a setting that is assigned to an algorithm after construction, and store it for checkpoints. Return its value.

    Raises `SettingError`: the value is wrong, or the setting is one of this package that is read during construction.
    """
    cls = type(algorithm)
    kinds = _kinds_of(cls).get(name, [])
    is_ours = any(name in inspect.get_annotations(base) for base in cls.__mro__ if base.__module__.startswith("lightning_rl."))
    assignable = {each for base in cls.__mro__ for each in vars(base).get("assignable", ())}
    if is_ours and name not in assignable and not is_scheduled(kinds):
        raise SettingError(f"{cls.__name__}.{name} is read in the constructor: {cls.__name__}(…, {name}={value!r})")
    value = as_config(value) if name == "env" else value
    algorithm.hparams[name] = plain(as_points(name, value) if callable(value) and is_scheduled(kinds) else value)
    value, schedule = read_value(name, value, kinds) if kinds else (value, None)
    algorithm.schedules.pop(name, None)
    if schedule is not None:
        algorithm.schedules[name] = schedule
    return value


def is_scheduled(kinds: list[Kind]) -> bool:
    """Return whether a setting may follow a schedule."""
    return any(isinstance(note, BuildSchedule) for _, notes in kinds for note in notes)


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
    (kind, notes), *others = [each for each in kinds if each[0] is not NoneType]
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


def _kinds_of(cls: type[Dataclass]) -> dict[str, list[Kind]]:
    """Return the allowed types of each field of a dataclass."""
    kinds = {each.name: list(_alternatives(each.type)) for each in fields(cls) if each.init}
    for name, found in kinds.items():
        if any(isinstance(kind, str) for kind, _ in found):
            raise SettingError(f"{cls.__name__}.{name}: its annotation is a string; remove `from __future__ import annotations`")
    return kinds


def _alternatives(hint: object) -> Iterator[Kind]:
    """Yield the types of a union."""
    if get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            yield from _alternatives(each)
    elif get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        yield kind, tuple(notes)
    else:
        yield hint, ()


def as_integer(value: T) -> T | int:
    """Convert a whole float such as 1e6, or a numpy integer, to an integer; return anything else unchanged."""
    if isinstance(value, np.integer) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value


def convert_integers(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, object]) -> dict[str, object]:
    """Convert the values of parameters that are annotated as integers."""
    kinds = {name: [kind for kind, _ in _alternatives(each.annotation)] for name, each in parameters.items()}
    return {name: as_integer(value) if {int, "int", "int | None"} & {*kinds.get(name, ())} else value for name, value in given.items()}


def with_integers(init: Callable[..., None]) -> Callable[..., None]:
    """Make the `__init__` of a user's class accept 1e6 as an integer, and annotate its `env`, whose type the command line needs."""
    init.__annotations__.setdefault("env", EnvConfig)
    parameters = inspect.signature(init).parameters

    @wraps(init)
    def converting(self: object, *args: object, **kwargs: object) -> None:
        init(self, *args, **convert_integers(parameters, kwargs))

    return converting


def complete_settings(cls: type[Dataclass], args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the given arguments of an algorithm's class and the defaults of the others, except `spaces`, which are stored separately."""
    parameters = settings_of(cls)
    defaults = {name: default_of(cls, each) for name, each in parameters.items() if each.default is not each.empty}
    settings = defaults | convert_integers(parameters, {**dict(zip(parameters, args, strict=False)), **kwargs})
    scheduled = {name for name, kinds in _kinds_of(cls).items() if is_scheduled(kinds)}
    for name in scheduled & settings.keys():
        if callable(function := settings[name]):
            settings[name] = as_points(name, function)
    if isinstance(encoder := settings.get("encoder"), type):  # checkpoints store its path
        settings["encoder"] = f"{encoder.__module__}.{encoder.__qualname__}"
    return {name: value for name, value in settings.items() if name != "spaces"}


def default_of(cls: type[Dataclass], parameter: inspect.Parameter) -> object:
    """Return the default of a setting."""
    factories = {each.name: each.default_factory for each in fields(cls) if each.default_factory is not MISSING}
    is_made = repr(parameter.default) == "<factory>"  # as dataclasses write it in a signature
    return factories[parameter.name]() if is_made else parameter.default


def plain(value: object) -> Any:
    """Convert settings to plain data: arrays to lists, paths to strings, and keys, except integers, to strings.

    Ready environments, functions and demonstrations are not stored and become None. So does an `EnvConfig` that contains them: without
    them it would be another environment. The class or function that an `EnvConfig` has as its id becomes its path.
    """
    if isinstance(value, Mapping):
        keys = [key.item() if isinstance(key, np.generic) else key for key in value]
        return {key if isinstance(key, int) else str(key): plain(child) for key, child in zip(keys, value.values(), strict=True)}
    if isinstance(value, Memory):
        return value.settings
    if is_dataclass(value) and not callable(value):
        stored = {each.name: plain(getattr(value, each.name)) for each in fields(value)}
        if isinstance(value, EnvConfig):
            stored["id"] = value.path
        return None if isinstance(value, EnvConfig) and any(loses(getattr(value, name), stored[name]) for name in stored) else stored
    if isinstance(value, list | tuple):
        return None if any(hasattr(child, "_fields") for child in value) else [plain(child) for child in value]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Enum):
        return plain(value.value) if isinstance(value, str | int) else None
    return value if isinstance(value, str | int | float | bool) else None


def describe_unnamed(algorithm: Any) -> str | None:
    """Return a line about what the checkpoints of an algorithm cannot name for other programs; None if they name all that they need."""
    env = algorithm.env
    if env is not None and algorithm.hparams.get("env") is None:
        name = env.name if isinstance(env, EnvConfig) else getattr(env, "__name__", type(env).__name__)
        lacks = "which has no id or import path with plain arguments"
        return f"checkpoints do not hold the environment {name}, {lacks}: pass env= to evaluate or record them"
    named = [f"{type(algorithm).__module__}.{type(algorithm).__qualname__}", *_texts(dict(algorithm.hparams))]
    own = [name for name in dict.fromkeys(named) if name.startswith("__main__.") or ".<locals>." in name]
    what = "defines: no other program can load them; move what they name to a module"
    return f"checkpoints name {', '.join(own)}, which only this program {what}" if own else None


def _texts(settings: object) -> Iterator[str]:
    """Yield the strings in plain data."""
    if isinstance(settings, Mapping | list):
        for child in settings.values() if isinstance(settings, Mapping) else settings:
            yield from _texts(child)
    elif isinstance(settings, str):
        yield settings


def loses(value: object, stored: Any) -> bool:
    """Return whether `plain` dropped a part of a value, or turned an object of another package's class into a dict."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if is_dataclass(value) and not callable(value):
        parts = [(getattr(value, each.name), stored and stored[each.name]) for each in fields(value)]
        return not type(value).__module__.startswith("lightning_rl.") or any(loses(*part) for part in parts)
    if isinstance(value, Mapping):
        return any(map(loses, value.values(), stored.values()))
    if isinstance(value, list | tuple):
        return stored is None or any(map(loses, value, stored))
    return stored is None and value is not None
