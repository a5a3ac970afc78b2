"""Save and restore the state of vector environments, and fingerprint their settings to check whether a state fits."""

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from lightning_rl.envs.classic_control import ClassicControlEnvs
from lightning_rl.envs.config import EnvConfig, resolve_vectorization, single_env_config
from lightning_rl.envs.make import make_env, make_vector_env
from lightning_rl.envs.snapshot.encoding import CONSTRUCTOR_ARGUMENTS
from lightning_rl.envs.snapshot.state import AnyEnv, State, choose_way, get_state, layers, record, set_state, set_states
from lightning_rl.envs.sync import TurnVectorEnv
from lightning_rl.envs.worker_pool import WorkerVectorEnv

IGNORED_SETTINGS = {"num_envs", "autoreset", "autoreset_mode", "step_timeout", "max_restarts"}
"""Settings that do not change a single environment."""
IGNORED_ARGUMENTS = {"self", "env", "envs", "env_fns", "build", "render_mode"} | IGNORED_SETTINGS
PENDING_RESETS = "_autoreset_envs"
"""Private attribute of gymnasium's `SyncVectorEnv`: environments whose next step is a reset. There is no public way to set it."""


def fingerprint(envs: AnyEnv, config: EnvConfig | None = None) -> str:
    """Hash the settings, or without settings what can be found out about environments built by Python code."""
    if config is None:
        facts: object = [[describe(layer) for layer in layers(env)] for env in (envs.envs if isinstance(envs, SyncVectorEnv) else [envs])]
    else:
        settings = {field.name: getattr(resolve_vectorization(config), field.name) for field in fields(config)} | {
            "id": config.path or config.name
        }
        kwargs = _drop({"render_mode"}, config.kwargs)
        facts = normalize(_drop(IGNORED_SETTINGS, settings | {"kwargs": kwargs}))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def describe(layer: object) -> list[object]:
    """Return the class of an environment or wrapper, the arguments that gymnasium records, and attributes named like an argument."""
    attributes = getattr(layer, "__dict__", {})
    spec = attributes.get("spec") if layer is getattr(layer, "unwrapped", None) else None
    try:
        parameters: Collection[str] = inspect.signature(type(layer).__init__).parameters
    except (TypeError, ValueError):
        parameters = ()
    named = {name: attributes[name] for name in parameters if name in attributes}
    arguments = (attributes.get(CONSTRUCTOR_ARGUMENTS), getattr(spec, "kwargs", None), named)
    return [type(layer).__qualname__, getattr(spec, "id", None), *(normalize(_drop(IGNORED_ARGUMENTS, argument)) for argument in arguments)]


def _drop(names: set[str], arguments: Mapping[str, object] | None) -> dict[str, object]:
    return {name: value for name, value in (arguments or {}).items() if name not in names}


def normalize(value: object) -> object:
    """Convert a value so that equal settings have the same representation in every process."""
    if isinstance(value, Mapping):
        return sorted((str(key), normalize(child)) for key, child in value.items())
    if isinstance(value, list | tuple):
        return [normalize(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(normalize(item)) for item in value)
    if isinstance(value, np.ndarray | np.generic):
        return [str(np.shape(value)), *map(normalize, np.ravel(value).tolist())]
    if value is None or isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, int | float):
        return int(value) if value == value // 1 else float(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


class SyncKeeper:
    """Saves and restores the states of the environments in a `SyncVectorEnv`, each in its own way."""

    def __init__(self, envs: SyncVectorEnv, ways: list[str]) -> None:
        self.envs, self.ways = envs, ways
        envs.envs = [record(env, way) for env, way in zip(envs.envs, ways, strict=True)]

    def get_states(self) -> State:
        if isinstance(self.envs, ClassicControlEnvs):
            self.envs.store_states()
        states = [get_state(env, way) for env, way in zip(self.envs.envs, self.ways, strict=True)]
        return {"envs": states, "autoreset": getattr(self.envs, PENDING_RESETS).copy()}

    def set_states(self, states: State) -> bool:
        if not set_states(self.envs.envs, self.ways, states["envs"]):
            return False
        setattr(self.envs, PENDING_RESETS, states["autoreset"].copy())
        if isinstance(self.envs, ClassicControlEnvs):
            self.envs.load_states()
        return True


class WholeKeeper:
    """Saves and restores the state of a vector environment as if it were one environment."""

    def __init__(self, envs: VectorEnv, way: str) -> None:
        self.envs, self.way = envs, way

    def get_states(self) -> State:
        return get_state(self.envs, self.way)

    def set_states(self, states: State) -> bool:
        return set_state(self.envs, self.way, states)


Keeper = SyncKeeper | WholeKeeper | WorkerVectorEnv
"""Saves and restores the states of all environments."""


def make_keeper(envs: VectorEnv, config: EnvConfig | None = None) -> Keeper | None:
    """Make a keeper that saves and restores these environments exactly; None if there is no such way."""
    if isinstance(envs, WorkerVectorEnv):
        way = choose_way(envs.build) if config is None else _choose_by_settings(config)
        return envs if envs.record(way) else None
    if isinstance(envs, SyncVectorEnv) and type(envs) in (SyncVectorEnv, TurnVectorEnv, ClassicControlEnvs):
        ways = _choose_each(envs) if config is None else [_choose_by_settings(config)] * envs.num_envs
        return SyncKeeper(envs, [way for way in ways if way is not None]) if None not in ways else None
    if hasattr(envs.unwrapped, "get_state") and hasattr(envs.unwrapped, "set_state"):
        return WholeKeeper(envs, "own")
    if config is not None and config.vectorization == "native":
        way = choose_way(partial(make_vector_env, config), repr(config))
        return WholeKeeper(envs, way) if way in ("own", "attributes") else None
    return None


def _choose_by_settings(config: EnvConfig) -> str | None:
    """Choose the way of saving by trying copies that open no window."""
    kwargs = _drop({"render_mode"}, config.kwargs)
    single = replace(single_env_config(config), vectorization="sync", autoreset=None, kwargs=kwargs, step_timeout=None, max_restarts=None)
    return choose_way(partial(make_env, single), repr(single) if isinstance(config.id, str) else None)


def _choose_each(envs: SyncVectorEnv) -> list[str | None]:
    """Choose the ways of saving environments built by functions: try what a common function builds, else deep copies of each kind."""
    builder = envs.env_fns[0] if len({id(build) for build in envs.env_fns}) == 1 else None
    kinds = [tuple(type(layer) for layer in layers(env)) for env in envs.envs]
    ways: dict[tuple[type, ...], str | None] = {}
    for kind, env in zip(kinds, envs.envs, strict=True):
        if kind not in ways:
            ways[kind] = choose_way(partial(_copy, env, builder))
    return [ways[kind] for kind in kinds]


def _copy(env: gym.Env, builder: Callable[[], gym.Env] | None) -> gym.Env:
    """Make a copy of an environment. The result is never this one itself, which a function may return each time."""
    built = None if builder is None else builder()
    return deepcopy(env) if built is None or built.unwrapped is env.unwrapped else built
