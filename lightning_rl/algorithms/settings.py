"""An algorithm's settings as plain data: strings, numbers, lists and dicts, the same from Python and from the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import numpy as np

from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError
from lightning_rl.networks.memory import Memory


def settings_of(cls: type) -> dict[str, inspect.Parameter]:
    """All settings of a class, with those that `**common` passes on to its bases, but for what it says to be `without`."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        parameters |= {p.name: p for p in own if p.name not in parameters and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return {name: parameter for name, parameter in parameters.items() if name not in getattr(cls, "without", ())}


def remember_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that keeps what it was given, so that Python and the command line store the same settings."""

    init.__annotations__.setdefault("env", EnvConfig)  # the command line builds it from its type

    annotated = inspect.signature(init).parameters.items()
    integers = {name for name, parameter in annotated if str(parameter.annotation) in ("int", "int | None", "<class 'int'>")}

    @wraps(init)
    def remembering(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = {name: as_integer(value) if name in integers else value for name, value in kwargs.items()}
        if "given_arguments" not in vars(self):
            for name in kwargs.keys() & set(type(self).without):
                raise SettingError(f"{name} is not a setting of {type(self).__name__}")
            object.__setattr__(self, "given_arguments", (args, kwargs))
        init(self, *args, **kwargs)

    return remembering


def as_integer(value: Any) -> Any:
    """`1e6` as the integer it means; anything but a whole float or numpy integer as it is."""
    whole = isinstance(value, float) and value.is_integer()
    return int(value) if whole or isinstance(value, np.integer) else value


def complete_settings(instance: Any) -> dict[str, Any]:
    """What an object was built with: its given arguments, and the defaults of the others. `spaces` are stored apart."""
    args, kwargs = instance.given_arguments
    parameters = settings_of(type(instance))
    given = dict(zip(parameters, args, strict=False)) | kwargs
    defaults = {name: parameter.default for name, parameter in parameters.items() if parameter.default is not parameter.empty}
    settings = defaults | given
    settings.pop("spaces", None)
    return settings


def plain(value: Any) -> Any:
    """Plain data from settings. Ready environments, functions and demonstrations become None: they work for a run and are not stored."""
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
