"""From settings to environments, and the optional packages behind them."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from textwrap import shorten
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from lightning_rl.envs.config import EnvConfig, resolve_vectorization, single_env_config
from lightning_rl.envs.lessons import as_parameters
from lightning_rl.envs.masks import make_masks, with_mask_info
from lightning_rl.envs.parameters import EnvParameters
from lightning_rl.envs.sync import CheckedEnv, TurnVectorEnv
from lightning_rl.envs.worker_pool import WorkerVectorEnv
from lightning_rl.errors import SettingError, missing_extra, nearest
from lightning_rl.spaces import MASK, Spaces, as_spaces, single_spaces
from lightning_rl.types import tree_index

EXTRAS = {
    "Box2D": "box2d",
    "mujoco": "mujoco",
    "ale_py": "atari",
    "cv2": "atari",
    "opencv": "atari",
    "minatar": "minatar",
    "minigrid": "minigrid",
    "pettingzoo": "pettingzoo",
}
"""Which of our extras brings a missing package."""


def prepare_package(env_id: str) -> None:
    """What a package needs before its environment is built. Its notices go to the log, not to stderr and a file in the current folder.

    Raises:
        ImportError: the package is not installed.
    """
    if env_id.startswith("ALE/"):
        ale_py = importlib.import_module("ale_py")
        gym.register_envs(ale_py)
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    if env_id.startswith("MinAtar/") and env_id not in gym.registry:
        importlib.import_module("minatar.gym").register_envs()
    if env_id.startswith(("MiniGrid-", "BabyAI-")):
        importlib.import_module("minigrid")  # which registers them
    spec = gym.registry.get(env_id)
    if spec is not None and "mujoco" in str(spec.entry_point):
        importlib.import_module("mujoco").set_mju_user_warning(logging.getLogger("mujoco").info)


def own_module(env_id: str) -> str | None:
    """The module behind an id that a program registered itself; None for ids of gymnasium, of this package and of the packages above."""
    spec = gym.registry.get(env_id)
    if spec is None or spec.entry_point is None:
        return None
    module = spec.entry_point.partition(":")[0] if isinstance(spec.entry_point, str) else spec.entry_point.__module__
    return None if module.partition(".")[0] in ("gymnasium", "lightning_rl", *EXTRAS) else module


OWN = " (one of your own needs --import its_module)"
"""What is said of an id that nobody registered."""


def make_env(config: EnvConfig | Callable[[], gym.Env], index: int = 0) -> gym.Env:
    """One environment, wrapped as its settings say, or what a function builds; a method `action_masks` is heard (see `masks.py`).

    `index` says which of a run's environments it is.

    Raises:
        SettingError: unknown id, missing package, or arguments that the environment or a wrapper refuses.
    """
    if not isinstance(config, EnvConfig):
        return with_mask_info(config())
    if config.vectorization == "envpool":
        return FirstOf(_make_envpool(config))
    env = _gymnasium_make(config)
    if config.atari:
        env = _atari(env)
    for wrapper in config.wrappers:
        env = _wrap(env, wrapper)
    if config.parameters:
        env = EnvParameters(env, as_parameters(config.parameters), index, config.observe_parameters)
    stacks = config.frame_stack or config.atari
    return with_mask_info(gym.wrappers.FrameStackObservation(env, stacked_frames(config)) if stacks else env)


def stacked_frames(env: Any) -> int:
    """How many frames `make_env` stacks, the first one of an episode repeated at its beginning; 1 for environments made elsewhere."""
    return (env.frame_stack or (4 if env.atari else 1)) if isinstance(env, EnvConfig) else 1


def make_vector_env(env: EnvConfig | VectorEnv | Callable[[], gym.Env], num_envs: int = 8, first: int = 0) -> VectorEnv:
    """A vector environment from settings, from a function that builds one environment, or a ready one as it is.

    `num_envs` counts for a function alone, `first` is the index of the first environment among those of all ranks.
    """
    env = resolve_vectorization(env)
    if isinstance(env, VectorEnv):
        return env
    if not isinstance(env, EnvConfig):
        return TurnVectorEnv([partial(make_env, env)] * num_envs)
    if env.vectorization == "envpool":
        return _make_envpool(env)
    if env.vectorization == "native":
        return _guarded(env, lambda: gym.make_vec(env.id, env.num_envs, "vector_entry_point", **_make_arguments(env)))
    build, mode = partial(make_env, env), AutoresetMode[env.autoreset or "SAME_STEP"]
    if env.vectorization == "sync":
        builders = [partial(build, first + i) for i in range(env.num_envs)]
        if mode is AutoresetMode.SAME_STEP:
            return TurnVectorEnv(builders)
        return SyncVectorEnv([partial(_checked, each, i) for i, each in enumerate(builders)], autoreset_mode=mode, copy=False)
    return WorkerVectorEnv(build, env.num_envs, mode, env.id, env.step_timeout, env.max_restarts, first)


def _checked(build: Callable[[], gym.Env], index: int) -> gym.Env:
    return CheckedEnv(build(), index)


def probe_spaces(env: EnvConfig | VectorEnv | Callable[[], gym.Env]) -> Spaces:
    """The spaces of one environment, which is built, reset and closed, or those of a ready vector environment, which is reset.

    Raises:
        SettingError: it cannot be reset, or has masks that cannot be used.
    """
    if isinstance(env, VectorEnv):
        return _masked_spaces(env, single_spaces(env), "the environment")
    if isinstance(env, EnvConfig) and env.vectorization == "native":
        envs = make_vector_env(env)
        with closing(envs):
            return _masked_spaces(envs, single_spaces(envs), env.id)
    single = make_env(single_env_config(env) if isinstance(env, EnvConfig) else env)
    name = env.id if isinstance(env, EnvConfig) else type(single.unwrapped).__name__
    with closing(single):
        return _masked_spaces(single, as_spaces(single.observation_space, single.action_space), name)


def _masked_spaces(env: gym.Env | VectorEnv, spaces: Spaces, name: str) -> Spaces:
    """With what the info of a first reset says of masks."""
    try:
        _, info = env.reset(seed=0)
    except Exception as error:  # an environment of others may raise anything
        raise SettingError(f"the environment {name} cannot be reset: {_reason(error)}") from error
    if isinstance(env, SyncVectorEnv) and MASK not in info and any(each.has_wrapper_attr("action_masks") for each in env.envs):
        raise SettingError("action_masks() of a ready vector environment is not heard: wrap each in lightning_rl.envs.masks.MaskInfo")
    spaces = spaces._replace(masked=spaces.masked or MASK in info)
    make_masks(spaces, f"environment {{}} of {name}")
    return spaces


class EnvPool(VectorWrapper):
    """EnvPool's environments. It takes a seed only when it is built, so a seeded reset builds it anew."""

    def __init__(self, build: Callable[[int], VectorEnv]) -> None:
        super().__init__(build(0))
        self.build = build

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.env.close()
            self.env = self.build(seed % 2**31)
        return self.env.reset()


class FirstOf(gym.Env):
    """The first environment of a vector environment, alone."""

    def __init__(self, envs: VectorEnv) -> None:
        self.envs = envs
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.envs.reset(seed=seed)
        return tree_index(obs, 0), _first(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.envs.step(np.asarray(action)[None])
        return tree_index(obs, 0), float(reward[0]), bool(terminated[0]), bool(truncated[0]), _first(info)

    def close(self) -> None:
        self.envs.close()


def _first(info: dict[str, Any]) -> dict[str, Any]:
    """What a vector environment's infos say of its first environment."""
    return {key: value[0] for key, value in info.items() if isinstance(value, np.ndarray) and value.ndim}


def _gymnasium_make(config: EnvConfig) -> gym.Env:
    # the wrapper asks for its pictures itself; those that the game makes beside them are cheapest in grey
    arguments = _make_arguments(config) | ({"frameskip": 1, "obs_type": "grayscale"} if config.atari else {})
    return _guarded(config, lambda: gym.make(config.id, disable_env_checker=True, **arguments))


def _make_arguments(config: EnvConfig) -> dict[str, Any]:
    steps = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
    return {**config.kwargs, **steps}


def _guarded(config: EnvConfig, build: Callable[[], Any]) -> Any:
    """Build, and say in one line what went wrong."""
    try:
        prepare_package(config.id)
        return build()
    except gym.error.UnregisteredEnv as error:
        name = config.id.rpartition(":")[2]
        raise SettingError(f"env.id {config.id!r} is not a registered environment{OWN}{nearest(name, gym.registry)}") from error
    except (ModuleNotFoundError, gym.error.DependencyNotInstalled) as error:
        for package, extra in EXTRAS.items():
            if package.lower() in str(error).lower():
                raise missing_extra(package, extra, config.id) from error
        raise SettingError(f"the environment {config.id} cannot be built: {_reason(error)}") from error
    except Exception as error:  # a constructor of others may raise anything
        raise SettingError(f"the environment {config.id} cannot be built: {_reason(error)}{_way_out(config)}") from error


def _reason(error: Exception) -> str:
    """What an error says, in one line; gymnasium appends where it was raised, which we have said."""
    said = str(error).partition(" was raised from the environment creator")[0].strip()
    return shorten(said.splitlines()[0].rstrip("."), 140, placeholder=" …") if said else type(error).__name__


def _way_out(config: EnvConfig) -> str:
    """What to look at when an environment cannot be built."""
    if config.kwargs:
        return f"; given were env.kwargs {config.kwargs}"
    return "; try vectorization sync" if config.vectorization == "native" else ""


def _make_envpool(config: EnvConfig) -> VectorEnv:
    try:
        import envpool
    except ImportError as error:
        raise missing_extra("envpool", "envpool", "vectorization envpool") from error
    if config.id not in envpool.list_all_envs():
        raise SettingError(f"env.id {config.id!r} is not an EnvPool task{nearest(config.id, envpool.list_all_envs())}")
    arguments = {"env_type": "gymnasium", "num_envs": config.num_envs, **_make_arguments(config)}

    def build(seed: int) -> VectorEnv:
        pool = _guarded(config, lambda: envpool.make(config.id, **{"seed": seed, **arguments}))
        with warnings.catch_warnings(action="ignore"):  # it gives float64 bounds to float32 spaces when first asked for them
            _ = pool.observation_space, pool.action_space
        return pool

    return EnvPool(build)


def _atari(env: gym.Env) -> gym.Env:
    try:
        return gym.wrappers.AtariPreprocessing(env)
    except gym.error.DependencyNotInstalled as error:
        raise missing_extra("opencv-python", "atari", "atari: true") from error


def _wrap(env: gym.Env, wrapper: Any) -> gym.Env:
    """Apply a wrapper given as a class path or as `{class_path, init_args}`."""
    setting: Any = {"class_path": wrapper} if isinstance(wrapper, str) else wrapper
    if not isinstance(setting, Mapping) or not {"class_path"} <= setting.keys() <= {"class_path", "init_args"}:
        raise SettingError(f"env.wrappers takes class paths or {{class_path, init_args}}, got {wrapper!r}")
    module, _, name = setting["class_path"].rpartition(".")
    try:
        cls = getattr(importlib.import_module(module or "gymnasium.wrappers"), name)
    except (ImportError, AttributeError) as error:
        known = [each for each in dir(gym.wrappers) if each[0].isupper()] if not module else []
        raise SettingError(f"env.wrappers: there is no {setting['class_path']}{nearest(name, known)}") from error
    if not (isinstance(cls, type) and issubclass(cls, gym.Wrapper)):
        raise SettingError(f"env.wrappers: {setting['class_path']} is not a gymnasium.Wrapper")
    arguments = setting.get("init_args") or {}
    if cls.__module__.startswith("gymnasium."):  # which asks for tuples, and a config has none
        arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
    try:
        return cls(env, **arguments)
    except Exception as error:  # a constructor of others may raise anything
        raise SettingError(f"env.wrappers: {name} refuses its arguments: {_reason(error)}") from error
