"""What environment to build, as plain settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import gymnasium as gym

from lightning_rl.envs.lessons import as_parameters
from lightning_rl.errors import SettingError, check_choice, check_range, nearest

VECTORIZATIONS = ("auto", "sync", "async", "native", "envpool")
AUTORESETS = ("SAME_STEP", "NEXT_STEP", "DISABLED")
OF_PROCESSES = ("step_timeout", "max_restarts")
MOST_ENVS = 10**6


@dataclass(frozen=True)
class EnvConfig:
    """An environment and how many of it.

    Args:
        id: a gymnasium id such as `CartPole-v1`, or `module:EnvId-v0` for an environment that a module registers.
        num_envs: how many environments to step at once, in each process of a run.
        vectorization: `sync` (in turn), `async` (a process each), `native` (gymnasium's vector entry point) or `envpool`; `auto` is `async`
            for several Atari games on several cores, else `sync`.
        autoreset: `SAME_STEP`, `NEXT_STEP` or `DISABLED`; for `sync` and `async` how to reset (SAME_STEP unless given), for the others
            what they do when they do not say it themselves.
        kwargs: arguments of the environment's constructor.
        wrappers: applied in order, each a class path or `{class_path, init_args}`; a bare name is one of gymnasium.wrappers.
        max_episode_steps: truncate episodes here instead of at the environment's own limit.
        frame_stack: observe the last so many frames.
        atari: the standard preprocessing of Atari games (Machado et al. 2018): no-op starts, frame skip 4, 84 x 84 grey, 4 frames.
        parameters: numbers of the environment by name, drawn anew for each episode: a number, a sampler
            `{sampler_type, sampler_parameters}`, or `{curriculum: [lessons]}` each; see docs/curriculum.md.
        observe_parameters: append the numbers drawn to the observation.
        step_timeout: of `async`: seconds after which an environment that does not answer is started anew; 60 unless given.
        max_restarts: of `async`: how often each environment may be started anew in an hour, as it froze, raised or died; 10 unless given.
    """

    id: str
    num_envs: int = 8
    vectorization: Literal["auto", "sync", "async", "native", "envpool"] = "auto"
    autoreset: Literal["SAME_STEP", "NEXT_STEP", "DISABLED"] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: list[Any] = field(default_factory=list)
    max_episode_steps: int | None = None
    frame_stack: int | None = None
    atari: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    observe_parameters: bool = False
    step_timeout: float | None = None
    max_restarts: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise SettingError(f"env.id must be the id of an environment such as CartPole-v1, got {self.id!r}")
        for name, kind in {"kwargs": dict, "wrappers": list}.items():
            if not isinstance(getattr(self, name), kind):
                raise SettingError(f"env.{name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        if not as_parameters(self.parameters) and self.observe_parameters:
            raise SettingError("env.observe_parameters needs env.parameters")
        check_range("env.num_envs", self.num_envs, 1, whole=True)
        if self.num_envs > MOST_ENVS:
            raise SettingError(f"env.num_envs {self.num_envs} is more than one process can step; the most are {MOST_ENVS:,}")
        check_choice("env.vectorization", self.vectorization, VECTORIZATIONS)
        if self.autoreset is not None:
            check_choice("env.autoreset", self.autoreset, AUTORESETS)
        for name in ("max_episode_steps", "frame_stack"):
            if getattr(self, name) is not None:
                check_range(f"env.{name}", getattr(self, name), 1, whole=True)
        if self.step_timeout is not None:
            check_range("env.step_timeout", self.step_timeout, 0, open_low=True)
        if self.max_restarts is not None:
            check_range("env.max_restarts", self.max_restarts, 0, whole=True)
        way = ("async" if self.are_games else "sync") if self.vectorization == "auto" else self.vectorization
        for name in OF_PROCESSES:
            if getattr(self, name) is not None and way != "async":
                raise SettingError(f"env.{name} is of vectorization async, and this one is {way}; leave it out")
        if self.vectorization in ("native", "envpool"):
            for name in ("wrappers", "frame_stack", "atari", "parameters"):
                if getattr(self, name):
                    raise SettingError(f"env.{name} does not work with vectorization {self.vectorization}; use sync or async")

    @property
    def are_games(self) -> bool:
        """Whether these are several games of Atari, which `auto` gives a process each."""
        return self.atari and self.num_envs > 1


Env = EnvConfig | str | Mapping[str, Any] | gym.vector.VectorEnv | Callable[[], gym.Env]
"""What Python code may pass for `env`: settings, an id, a ready vector environment, or a function that builds one environment."""


def as_config(env: Any) -> EnvConfig | gym.vector.VectorEnv | Callable[[], gym.Env]:
    """Settings, an id or a mapping as `EnvConfig`; ready environments and functions as they are.

    Raises:
        SettingError: anything else, or a mapping with unknown keys.
    """
    if isinstance(env, str):
        return EnvConfig(env)
    if isinstance(env, Mapping):
        names = [each.name for each in fields(EnvConfig)]
        for key in env:
            if key not in names:
                raise SettingError(f"env.{key} is not a setting of an environment{nearest(str(key), names)}")
        if "id" not in env:
            raise SettingError("env.id is missing; give the id of an environment such as CartPole-v1")
        return EnvConfig(**env)
    if isinstance(env, EnvConfig | gym.vector.VectorEnv) or (callable(env) and not isinstance(env, gym.Env)):
        return env
    if isinstance(env, gym.Env):
        raise SettingError("env is a single environment; pass its id, an EnvConfig, or a function that builds it")
    raise SettingError(f"env must be an id such as CartPole-v1 or an EnvConfig, got {env!r}")


def settled(env: Any) -> Any:
    """Settings with `vectorization: auto` decided; other environments as they are."""
    if not isinstance(env, EnvConfig) or env.vectorization != "auto":
        return env
    return replace(env, vectorization="async") if env.are_games and (os.cpu_count() or 1) > 1 else in_turn(env)


def in_turn(env: Any) -> Any:
    """The same for one process of several, where `auto` is `sync`."""
    if not isinstance(env, EnvConfig) or env.vectorization != "auto":
        return env
    return replace(env, vectorization="sync", step_timeout=None, max_restarts=None)


def one_of(config: EnvConfig, max_episode_steps: int | None = None) -> EnvConfig:
    """The same environment once, for evaluation and probing."""
    return replace(in_turn(config), num_envs=1, max_episode_steps=max_episode_steps or config.max_episode_steps)
