"""How an environment was made, in a line that two runs can compare: what was saved of one does not fit into another."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from lightning_rl.envs.config import EnvConfig, settled
from lightning_rl.envs.state import layers

APART = {"num_envs", "autoreset", "autoreset_mode", "step_timeout", "max_restarts"}
"""Settings that say nothing of one environment."""
OTHERS = {"self", "env", "envs", "env_fns", "build", "render_mode"} | APART
"""Arguments that say nothing of what is compared here."""


def fingerprint(envs: VectorEnv, config: EnvConfig | None = None) -> str:
    """Of the settings where there are some, else of what can be known of environments that Python code has built."""
    if config is not None:
        config = settled(config)
        settings = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in APART}
        said: Any = plain(settings | {"kwargs": without({"render_mode"}, config.kwargs)})
    else:
        said = [[made(layer) for layer in layers(env)] for env in (envs.envs if isinstance(envs, SyncVectorEnv) else [envs])]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def made(layer: Any) -> list[Any]:
    """Its class, the arguments that gymnasium remembers, and attributes with the name of an argument."""
    own = getattr(layer, "__dict__", {})
    spec = own.get("spec") if layer is layer.unwrapped else None
    named = {name: own[name] for name in parameters(type(layer)) if name in own}
    arguments = [plain(without(OTHERS, each)) for each in (own.get("_saved_kwargs"), getattr(spec, "kwargs", None), named)]
    return [type(layer).__qualname__, getattr(spec, "id", None), *arguments]


def without(names: set[str], arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments but these."""
    return {name: value for name, value in (arguments or {}).items() if name not in names}


def parameters(cls: type) -> Iterator[str]:
    """The names of a constructor's arguments."""
    try:
        yield from inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    except (TypeError, ValueError):
        return


def plain(value: Any) -> Any:
    """A value such that those which mean the same look the same, in every process."""
    if isinstance(value, Mapping):
        return sorted((str(key), plain(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(plain(each)) for each in value)
    if isinstance(value, np.ndarray | np.generic):
        return [str(np.shape(value)), *map(plain, np.ravel(value).tolist())]
    if value is None or isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, int | float):
        return int(value) if value == value // 1 else float(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
