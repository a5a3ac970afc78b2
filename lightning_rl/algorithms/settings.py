"""An algorithm's settings: dataclass fields, their ranges and choices, and plain data (strings, numbers, lists, dicts) of them."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np

from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, check_choice, check_flag, check_range, nearest
from lightning_rl.networks.memory import Memory


@dataclass(frozen=True, repr=False)
class Range:
    """The values of a number, in its annotation: `Annotated[int, Range(1)]`.

    Args:
        low: the least.
        high: the greatest.
        open_low: the least is excluded.
    """

    low: float = -float("inf")
    high: float = float("inf")
    open_low: bool = False

    def __repr__(self) -> str:
        low = f"{'>' if self.open_low else '>='} {self.low:g}"
        return low if self.high == float("inf") else f"{low} and <= {self.high:g}"


def settings_of(cls: type) -> dict[str, inspect.Parameter]:
    """Return all settings of a class, with those that `**common` passes on to its bases."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        parameters |= {p.name: p for p in own if p.name not in parameters and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return parameters


def check_names(cls: type, given: Mapping[str, Any]) -> None:
    """Raise `SettingError` for a setting that a class does not have, and for one that a subclass sets without being a dataclass."""
    names = settings_of(cls)
    for base in cls.__mro__:
        settings = {field.name for field in fields(base)} if is_dataclass(base) and "__dataclass_fields__" not in vars(base) else set()
        for name in vars(base).keys() & settings:
            decorate = "decorate the class with @dataclass(kw_only=True, eq=False, repr=False) to change its default"
            raise SettingError(f"{base.__name__}.{name}: {name} is a setting; {decorate}")
    for name in given:
        if name not in names:
            raise SettingError(f"{name} is not a setting of {cls.__name__}{nearest(name, names)}")


def read_fields(instance: Any) -> None:
    """Check each field by its annotation, and build what the annotation says: a schedule of a number, an integer of 1e6.

    Raises:
        SettingError: a value out of its `Range`, none of a `Literal`, or not a flag.
    """
    cls: Any = type(instance)
    for name, kinds in kinds_of(cls).items():
        value = getattr(instance, name)
        if value is None and (NoneType, ()) in kinds:
            continue
        if any(kind is int for kind, _ in kinds):
            value = as_integer(value)
        (kind, notes), *others = [each for each in kinds if each[0] is not NoneType]
        for note in notes:
            if isinstance(note, Range):
                check_range(name, value, note.low, note.high, open_low=note.open_low, whole=kind is int)
            elif hasattr(note, "build"):
                value = note.build(name, value)
        if kind is bool and not others:
            check_flag(name, value)
        elif get_origin(kind) is Literal and not others:
            check_choice(name, value, get_args(kind))
        setattr(instance, name, value)


@cache
def kinds_of(cls: Any) -> dict[str, list[tuple[Any, tuple[Any, ...]]]]:
    """Return the types that each field of a dataclass may have, with their notes."""
    kinds = {field.name: list(alternatives(field.type)) for field in fields(cls) if field.init}
    for name, found in kinds.items():
        if any(isinstance(kind, str) for kind, _ in found):
            raise SettingError(f"{cls.__name__}.{name}: its annotation is a string; leave out `from __future__ import annotations`")
    return kinds


def alternatives(hint: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the types of a union, with the notes of those that are annotated."""
    if get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            yield from alternatives(each)
    elif get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        yield kind, tuple(notes)
    else:
        yield hint, ()


def as_integer(value: Any) -> Any:
    """Return `1e6` as the integer it means; anything but a whole float or numpy integer as it is."""
    whole = isinstance(value, float) and value.is_integer()
    return int(value) if whole or isinstance(value, np.integer) else value


def with_integers(init: Callable[..., None]) -> Callable[..., None]:
    """Make an `__init__` of a user's class take 1e6 for an integer; its `env` is annotated, as the command line builds it from its type."""
    init.__annotations__.setdefault("env", EnvConfig)
    annotated = inspect.signature(init).parameters.items()
    integers = {name for name, parameter in annotated if str(parameter.annotation) in ("int", "int | None", "<class 'int'>")}

    @wraps(init)
    def converting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{name: as_integer(value) if name in integers else value for name, value in kwargs.items()})

    return converting


def complete_settings(instance: Any) -> dict[str, Any]:
    """Return what an object was built with: its given arguments, and the defaults of the others. `spaces` are stored apart."""
    args, kwargs = instance.given_arguments
    parameters = settings_of(type(instance))
    given = dict(zip(parameters, args, strict=False)) | kwargs
    whole = (int, "int", "int | None")
    integers = {name for name, each in parameters.items() if any(kind in whole for kind, _ in alternatives(each.annotation))}
    given = {name: as_integer(value) if name in integers else value for name, value in given.items()}
    settings = {name: default_of(type(instance), each) for name, each in parameters.items() if each.default is not each.empty} | given
    settings.pop("spaces", None)
    return settings


def default_of(cls: type, parameter: inspect.Parameter) -> Any:
    """Return the default of a setting."""
    factories = {field.name: field.default_factory for field in fields(cls) if field.default_factory is not MISSING}
    is_made = repr(parameter.default) == "<factory>"  # as dataclasses write it in a signature
    return factories[parameter.name]() if is_made else parameter.default


def plain(value: Any) -> Any:
    """Make plain data of settings. Ready environments, functions and demonstrations become None: they work for a run but are not stored."""
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, Memory):
        return value.settings
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        if any(hasattr(child, "_fields") for child in value):
            return None
        return [plain(child) for child in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, str | int | float | bool) else None
