"""State of the environments in a vector environment, and the fingerprint that tells whether it fits."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from lightning_rl.envs.config import EnvConfig, resolve_vectorization, single_env_config
from lightning_rl.envs.make import make_env, make_vector_env
from lightning_rl.envs.snapshot.state import choose, get_state, layers, read_layers, record, set_state, write_layers
from lightning_rl.envs.sync import TurnVectorEnv
from lightning_rl.envs.worker_pool import WorkerVectorEnv

APART = {"num_envs", "autoreset", "autoreset_mode", "step_timeout", "max_restarts"}
"""Settings that say nothing of one environment."""
OTHERS = {"self", "env", "envs", "env_fns", "build", "render_mode"} | APART
"""Arguments that say nothing of what is compared here."""


def fingerprint(envs: VectorEnv, config: EnvConfig | None = None) -> str:
    """Of the settings where there are some, else of what can be known of environments that Python code has built."""
    if config is not None:
        config = resolve_vectorization(config)
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


class Keeper(Protocol):
    """Reads and writes the state of all environments."""

    def get_states(self) -> Any: ...

    def set_states(self, states: Any) -> bool: ...


class InTurn:
    """Of the environments of a `SyncVectorEnv`, each by its way."""

    def __init__(self, envs: SyncVectorEnv, ways: list[str]) -> None:
        self.envs, self.ways = envs, ways
        envs.envs = [record(env, way) for env, way in zip(envs.envs, ways, strict=True)]

    def get_states(self) -> dict[str, Any]:
        states = [get_state(env, way) for env, way in zip(self.envs.envs, self.ways, strict=True)]
        return {"envs": states, "autoreset": self.envs._autoreset_envs.copy()}

    def set_states(self, states: dict[str, Any]) -> bool:
        before = [read_layers(env) for env in self.envs.envs]
        if not all(map(set_state, self.envs.envs, self.ways, states["envs"])):
            for env, state in zip(self.envs.envs, before, strict=True):
                write_layers(env, state, lenient=True)
            return False
        self.envs._autoreset_envs = states["autoreset"].copy()
        return True


class Whole:
    """Of a vector environment as if it were one environment."""

    def __init__(self, envs: VectorEnv, way: str) -> None:
        self.envs, self.way = envs, way

    def get_states(self) -> dict[str, Any]:
        return get_state(self.envs, self.way)

    def set_states(self, states: dict[str, Any]) -> bool:
        return set_state(self.envs, self.way, states)


def make_keeper(envs: VectorEnv, config: EnvConfig | None = None) -> Keeper | None:
    """What keeps the states of these environments exactly, or None."""
    if isinstance(envs, WorkerVectorEnv):
        way = _choose(config) if config is not None else choose(envs.build)
        return envs if envs.record(way) else None
    if isinstance(envs, SyncVectorEnv) and type(envs) in (SyncVectorEnv, TurnVectorEnv):
        ways = [_choose(config)] * envs.num_envs if config is not None else _choose_each(envs)
        return InTurn(envs, [way for way in ways if way is not None]) if None not in ways else None
    if hasattr(envs, "get_state") and hasattr(envs, "set_state"):
        return Whole(envs, "own")
    if config is not None and config.vectorization == "native":
        way = choose(partial(make_vector_env, config), repr(config))
        return Whole(envs, way) if way in ("own", "attributes") else None
    return None


def _choose(config: EnvConfig) -> str | None:
    """The way of one environment, tried on copies that show nothing on a screen."""
    unseen = {key: value for key, value in config.kwargs.items() if key != "render_mode"}
    single = replace(single_env_config(config), vectorization="sync", autoreset=None, kwargs=unseen, step_timeout=None, max_restarts=None)
    return choose(partial(make_env, single), repr(single))


def _choose_each(envs: SyncVectorEnv) -> list[str | None]:
    """The ways of environments that functions built: tried on what one function for all builds, else on deep copies of each kind."""
    builder = envs.env_fns[0] if len({id(build) for build in envs.env_fns}) == 1 else None
    known: dict[Any, str | None] = {}
    for env in envs.envs:
        kind = tuple(type(layer) for layer in layers(env))
        if kind not in known:
            known[kind] = choose(partial(_copy, env, builder))
    return [known[tuple(type(layer) for layer in layers(env))] for env in envs.envs]


def _copy(env: gym.Env, builder: Callable[[], gym.Env] | None) -> gym.Env:
    """An environment like this one; never this one, which a function may have closed over."""
    built = None if builder is None else builder()
    return deepcopy(env) if built is None or built.unwrapped is env.unwrapped else built
