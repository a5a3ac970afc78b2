"""Check the arguments of an algorithm's class, complete them by its defaults, and store them as plain data."""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, wraps
from inspect import Parameter, get_annotations, signature
from pathlib import PurePath
from textwrap import shorten
from typing import Any

import numpy as np
from torch.nn import Module

from lightning_rl.envs.config import EnvConfig, as_config
from lightning_rl.errors import SettingError
from lightning_rl.networks.memory import Memory
from lightning_rl.schedules import BuildSchedule, as_points
from lightning_rl.settings.fields import (
    Dataclass,
    Range,
    alternatives,
    convert_integers,
    default_of,
    kinds_of,
    read_value,
    scheduled_settings,
    settings_of,
)
from lightning_rl.settings.names import way_out_of_algorithm


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
        if name not in {field.name for field in fields(cls)}:
            read_value(name, given[name], kinds_of(cls)[name])
    kinds = [parameter.kind for parameter in signature(cls.__init__).parameters.values()][1:]  # type: ignore[misc]
    by_place = math.inf if Parameter.VAR_POSITIONAL in kinds else kinds.count(Parameter.POSITIONAL_OR_KEYWORD)
    if args and isinstance(args[0], str) and args[0].endswith("Policy"):
        write = f"write {cls.__name__}('CartPole-v1', …)"
        raise SettingError(f"{args[0]!r} is not an environment: {write}; the spaces, encoder and net_arch determine the network")
    if len(args) > by_place:
        got = ", ".join(shorten(repr(argument), 30) for argument in args)
        raise SettingError(f"{cls.__name__}({got}): only the environment is positional; write setting=value for the others")


@cache
def check_decorated(cls: type) -> None:
    """Raise `SettingError` for a setting in the body of a class that is not a dataclass, where it would have no effect."""
    for base in cls.__mro__:
        if is_dataclass(base) and "__dataclass_fields__" not in vars(base):
            notes = {name: [note for _, notes in alternatives(hint) for note in notes] for name, hint in get_annotations(base).items()}
            annotated = {name for name, attached in notes.items() if any(isinstance(note, Range | BuildSchedule) for note in attached)}
            for name in sorted(vars(base).keys() & {field.name for field in fields(base)} | annotated):
                decorate = "decorate the class with @dataclass(kw_only=True, eq=False, repr=False)"
                raise SettingError(f"{base.__name__}.{name}: {name} is a setting; {decorate}")


def change_setting(algorithm: Any, name: str, value: object) -> object:
    """Check a setting that is assigned to an algorithm after construction, and store it for checkpoints. Return its value.

    Raises `SettingError`: the value is wrong, or the setting is one of this package that is read during construction.
    """
    cls: Any = type(algorithm)
    is_ours = is_packaged_setting(cls, name)
    assignable = {setting for base in cls.__mro__ for setting in vars(base).get("assignable", ())}
    if is_ours and name not in assignable and name not in scheduled_settings(cls):
        raise SettingError(f"{cls.__name__}.{name} is read in the constructor: {cls.__name__}(…, {name}={value!r})")
    value = as_config(value) if name == "env" else value
    stored = plain(as_points(name, value) if callable(value) and name in scheduled_settings(cls) else value)
    algorithm.hparams[name], algorithm.learner.settings[name] = stored, deepcopy(stored)
    value, schedule = read_value(name, value, kinds_of(cls)[name]) if name in cls.__dataclass_fields__ else (value, None)
    algorithm.schedules.pop(name, None)
    if schedule is not None:
        algorithm.schedules[name] = schedule
    return value


def is_packaged_setting(cls: type, name: str) -> bool:
    """Return whether an algorithm has a setting from a class of this package."""
    return any(name in get_annotations(base) for base in cls.__mro__ if base.__module__.startswith("lightning_rl."))


def check_hyperparameters(algorithm: Any) -> None:
    """Raise `SettingError` if a setting of this package was changed in `hparams`, which only describes the algorithm."""
    now, cls = algorithm.hparams, type(algorithm)
    for name, value in algorithm.learner.settings.items():
        if (name not in now or now[name] != value) and is_packaged_setting(cls, name):
            raise SettingError(f"hparams[{name!r}] has no effect: assign {cls.__name__}.{name}, or pass {name}= to the constructor")


def check_signals(signals: Mapping[str, Any], settings: Mapping[str, tuple[float, bool]]) -> None:
    """Raise `SettingError` if γ or `ignore_done` of a reward signal was changed after they were read as `settings`."""
    for name, (gamma, ignore_done) in settings.items():
        if name in signals and (signals[name].gamma, signals[name].ignore_done) != (gamma, ignore_done):
            changed = "ignore_done" if signals[name].gamma == gamma else "gamma"
            raise SettingError(f"reward_signals.{name}.{changed} is read in the constructor: pass it there")


def with_integers(init: Callable[..., None]) -> Callable[..., None]:
    """Make the `__init__` of a user's class accept 1e6 as an integer, and annotate its `env`, whose type the command line needs."""
    init.__annotations__.setdefault("env", EnvConfig)
    kinds = {name: list(alternatives(parameter.annotation)) for name, parameter in signature(init).parameters.items()}

    @wraps(init)
    def converting(self: object, *args: object, **kwargs: object) -> None:
        init(self, *args, **convert_integers(kinds, kwargs))

    return converting


def complete_settings(cls: type[Dataclass], args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the given arguments of an algorithm's class and the defaults of the others, except `spaces`, which are stored separately."""
    parameters = settings_of(cls)
    defaults = {name: default_of(cls, parameter) for name, parameter in parameters.items() if parameter.default is not parameter.empty}
    settings = defaults | convert_integers(kinds_of(cls), {**dict(zip(parameters, args, strict=False)), **kwargs})
    for name in scheduled_settings(cls) & settings.keys():
        if callable(function := settings[name]):
            settings[name] = as_points(name, function)
    if isinstance(encoder := settings.get("encoder"), type):  # checkpoints store its path
        settings["encoder"] = f"{encoder.__module__}.{encoder.__qualname__}"
    return {name: value for name, value in settings.items() if name != "spaces"}


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
        stored = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
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
    unimportable = [name for name in dict.fromkeys(named) if name.startswith("__main__.") or ".<locals>." in name]
    what = "defines: no other program can load them; move what they name to a module"
    return f"checkpoints name {', '.join(unimportable)}, which only this program {what}" if unimportable else None


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
        parts = [(getattr(value, field.name), stored and stored[field.name]) for field in fields(value)]
        return not type(value).__module__.startswith("lightning_rl.") or any(loses(*part) for part in parts)
    if isinstance(value, Mapping):
        return any(map(loses, value.values(), stored.values()))
    if isinstance(value, list | tuple):
        return stored is None or any(map(loses, value, stored))
    return stored is None and value is not None
