"""The states of the environments in a vector environment: of each, where they can be reached, or of all as one."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import gymnasium as gym
from gymnasium.vector import SyncVectorEnv, VectorEnv

from lightning_rl.envs.config import EnvConfig, one_of
from lightning_rl.envs.in_turn import TurnVectorEnv
from lightning_rl.envs.make import make_env, make_vector_env
from lightning_rl.envs.state import choose, get_state, layers, read_layers, record, set_state, write_layers
from lightning_rl.envs.workers import WorkerVectorEnv


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
    single = replace(one_of(config), vectorization="sync", autoreset=None, kwargs=unseen, step_timeout=None, max_restarts=None)
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
