"""Build environments from settings, and load the optional packages behind them."""

import importlib
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from copy import deepcopy
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from textwrap import shorten
from typing import TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.envs import registration
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from lightning_rl.envs.agents.copies import AgentsEnv, find_builder, has_agents, is_packaged, wrap_agents
from lightning_rl.envs.agents.vmas import Scenario, VmasCopies
from lightning_rl.envs.classic_control import ClassicControlEnvs, should_step_at_once
from lightning_rl.envs.config import DEFAULT_NUM_ENVS, EnvConfig, EnvSource, is_path, resolve_vectorization, single_env_config
from lightning_rl.envs.lessons import as_parameters
from lightning_rl.envs.masks import Masks, with_mask_info
from lightning_rl.envs.parameters import EnvParameters
from lightning_rl.envs.sync import CheckedEnv, TurnVectorEnv, closing_env
from lightning_rl.envs.tensors import PREFIX, HostView, gives_tensors, register_torch_control
from lightning_rl.envs.unity.scene import find_spaces as find_unity_spaces
from lightning_rl.envs.worker_pool import WorkerVectorEnv
from lightning_rl.envs.wrapper_effects import check_wrappers, describe_effects, effects_by_class, find_effects
from lightning_rl.errors import SettingError, closest_argument, closest_of, keep_running, missing_extra, nearest, place_in_code
from lightning_rl.settings.dotted_paths import check_module
from lightning_rl.spaces import MASK, Spaces, as_spaces, single_spaces
from lightning_rl.types import Info, Options, StepResult, Tree, tree_index

EXTRAS = {
    "Box2D": "box2d",
    "mujoco": "mujoco",
    "ale_py": "atari",
    "cv2": "atari",
    "opencv": "atari",
    "minatar": "minatar",
    "minigrid": "minigrid",
    "gymnasium_robotics": "robotics",
    "pettingzoo": "pettingzoo",
    "vmas": "vmas",
}
"""The extra of this package that installs each optional package."""
ROBOTICS = ("AdroitHand", "AntMaze", "Fetch", "FrankaKitchen", "Hand", "PointMaze")
"""Prefixes of the ids of gymnasium-robotics."""
PACKAGES = {"pettingzoo": "pettingzoo.classic.connect_four_v3", "mpe2": "mpe2.simple_spread_v3", "vmas": "vmas.balance"}
"""Packages whose environments are given by path, with an example of each."""
Built = TypeVar("Built")


def make_vector_env(env: EnvSource, num_envs: int = DEFAULT_NUM_ENVS, first: int = 0) -> VectorEnv:
    """Build a vector environment from settings or from a function that builds one environment; return a ready one unchanged.

    `num_envs` is used only with a function; `first` is the index of the first environment among those of all ranks.
    """
    chosen = isinstance(env, EnvConfig) and env.vectorization == "auto" and env.is_registered  # a function may change what it builds
    env = resolve_vectorization(env)
    if isinstance(env, VectorEnv):
        check_wrappers(env)
        return HostView(env) if gives_tensors(env) else env
    if not isinstance(env, EnvConfig):
        return TurnVectorEnv([partial(make_env, env)] * num_envs)
    if env.vectorization == "envpool":
        return _make_envpool(env)
    if env.vectorization == "native":
        envs = _build(env, partial(gym.make_vec, env.name, env.num_envs, "vector_entry_point", **env.arguments))
        check_wrappers(envs)
        return HostView(envs) if gives_tensors(envs) else envs
    build, mode = partial(make_env, env), AutoresetMode[env.autoreset or "SAME_STEP"]
    if env.vectorization == "async":
        return WorkerVectorEnv(build, env.num_envs, mode, env.name, env.step_timeout, env.max_restarts, first)
    builders = [partial(build, first + i) for i in range(env.num_envs)]
    if mode is AutoresetMode.SAME_STEP:
        one = builders[0]()
        cls = ClassicControlEnvs if chosen and should_step_at_once(one, env.num_envs) else TurnVectorEnv
        return cls([lambda: one, *builders[1:]])
    return SyncVectorEnv([partial(CheckedEnv, builder, i) for i, builder in enumerate(builders)], autoreset_mode=mode, copy=False)


def make_env(config: EnvSource, index: int = 0) -> gym.Env:
    """Build one environment from settings or with a function; put masks of a method `action_masks` into the info (see `masks.py`).

    `index` is its index among the run's environments. Raises `SettingError` for an unknown id, a missing package or wrong arguments.
    """
    if isinstance(config, VectorEnv):
        raise SettingError("a ready vector environment cannot be built again; pass an id, an EnvConfig, or a function that builds one")
    config = config if isinstance(config, EnvConfig) else EnvConfig(config)
    if config.is_unity:
        raise SettingError(f"{config.name} is a scene of Unity, which cannot be played as a single environment here; see docs/unity.md")
    if config.vectorization == "envpool":
        return SingleEnv(_make_envpool(config))
    if config.vectorization == "native":
        return _make_native(config)
    env = _make_registered(config) if config.is_registered else _make_own(config, index)
    if isinstance(env, AgentsEnv):
        return EnvParameters(env, as_parameters(config.parameters), index) if config.parameters else env
    if config.atari:
        try:
            env = gym.wrappers.AtariPreprocessing(env)
        except gym.error.DependencyNotInstalled as error:
            raise missing_extra("opencv-python", "atari", "atari: true") from error
        except (AttributeError, ValueError) as error:  # of a class of the user's own
            raise SettingError(f"env.atari: {config.name} is not an Atari game that skips no frames: {_reason(error)}") from error
    if config.max_episode_steps is not None and (config.atari or not config.is_registered):  # agent steps: not frames, not no-op starts
        env = gym.wrappers.TimeLimit(env, config.max_episode_steps)
    for wrapper in config.wrappers:
        env = _wrap(env, wrapper)
    check_wrappers(env)
    if config.parameters:
        env = EnvParameters(env, as_parameters(config.parameters), index, config.observe_parameters)
    if config.frame_stack or config.atari:
        env = gym.wrappers.FrameStackObservation(env, count_stacked_frames(config))
    return with_mask_info(env)


def _make_native(config: EnvConfig) -> gym.Env:
    """Build one copy of an environment that is stepped as a batch: a batch of one if the single version is another task, as ALE's is."""
    envs = make_vector_env(replace(config, num_envs=1))
    try:
        single = with_mask_info(_make_registered(config))
    except SettingError:  # it takes other arguments
        return SingleEnv(envs)
    spaces = single.observation_space, single.action_space
    if spaces != (envs.single_observation_space, envs.single_action_space):
        single.close()
        return SingleEnv(envs)
    envs.close()
    return single


def _make_registered(config: EnvConfig) -> gym.Env:
    # AtariPreprocessing skips frames and reads grayscale frames itself; for the frames it does not use, grayscale is the cheapest type
    arguments = config.kwargs | {"frameskip": 1, "obs_type": "grayscale"} if config.atari else config.arguments
    return _build(config, partial(gym.make, config.name, **{"disable_env_checker": True, **arguments}))


def _make_own(config: EnvConfig, index: int) -> gym.Env:
    """Call the class or function that builds an environment, or to which the id is a path; wrap what it builds if it has several agents."""
    builder = find_builder(config.id)
    arguments = vmas_arguments(config) if isinstance(builder, Scenario) else config.kwargs
    env = _build(config, partial(builder, **arguments))
    if isinstance(env, gym.Env) and not has_agents(env):
        return env
    agents = wrap_agents(env, type(env).__name__ if has_agents(env) and not isinstance(config.id, str) else config.name, index)
    config.check_agents()
    return agents


def make_vmas(env: EnvSource, num_copies: int) -> VmasCopies | None:
    """Build copies of a VMAS scenario as one batch; None for other environments. Raises `SettingError` as `make_env` does."""
    if not isinstance(env, EnvConfig) or env.is_registered or not isinstance(scenario := find_builder(env.id), Scenario):
        return None
    return _build(env, partial(VmasCopies, scenario, num_copies, vmas_arguments(env)))


def vmas_arguments(config: EnvConfig) -> dict[str, object]:
    """Return `env.kwargs`, with `max_episode_steps` if it is set."""
    return config.kwargs | ({} if config.max_episode_steps is None else {"max_steps": config.max_episode_steps})


def count_stacked_frames(env: object) -> int:
    """Return how many frames `make_env` stacks (the first of an episode is repeated); 1 for environments made elsewhere."""
    return (env.frame_stack or (4 if env.atari else 1)) if isinstance(env, EnvConfig) else 1


def probe_spaces(env: EnvSource, joint: str = "") -> Spaces:
    """Find the spaces by building, resetting and closing one environment, or by resetting a ready vector environment.

    `joint`: what agents' observations hold in addition to their own, as in `Spaces`; for environments of several agents only.
    """
    if isinstance(env, VectorEnv):
        check_wrappers(env)
        spaces = _find_masks(env, single_spaces(env), "the environment")
    elif isinstance(env, EnvConfig) and env.vectorization == "native":
        envs = make_vector_env(env)
        with closing_env(envs):
            spaces = _find_masks(envs, single_spaces(envs), env.name)
    elif isinstance(env, EnvConfig) and env.is_unity:
        if joint:
            raise SettingError(f"critic_obs {joint}: agents of {env.name} come and go by themselves, so they are not seen jointly")
        spaces = find_unity_spaces(env)
    else:
        single = make_env(single_env_config(env))
        if isinstance(agents := single.unwrapped, AgentsEnv):
            with closing_env(single):
                single.reset(seed=0)
                return agents.with_joint(agents.find_spaces(), joint)
        name = env.name if isinstance(env, EnvConfig) else type(single.unwrapped).__name__
        with closing_env(single):
            for space in ("observation_space", "action_space"):
                try:
                    has_none, place = getattr(single, space) is None, ""
                except AttributeError as error:  # possibly raised within a property of user code
                    has_none, place = True, place_in_code(error)
                if has_none:
                    raise SettingError(f"the environment {name} has no {space}{place}; see docs/environments.md")
            spaces = _find_masks(single, as_spaces(single.observation_space, single.action_space), name)
    if joint:
        raise SettingError(f"critic_obs {joint} is for environments of several agents; name the observations that only the critic gets")
    return spaces


def _find_masks(env: gym.Env | VectorEnv, spaces: Spaces, name: str) -> Spaces:
    """Reset an environment, and mark its spaces as masked if the info has a mask."""
    try:
        result = env.reset(seed=0)
    except BaseException as error:  # user code may raise anything
        keep_running(error, f"the environment {name}")
        raise SettingError(f"the environment {name} cannot be reset: {_reason(error)}{place_in_code(error)}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise SettingError(
            f"reset of the environment {name} must return an observation and an info, a mapping; got {shorten(repr(result), 60)}"
        )
    info = result[1]
    if isinstance(env, SyncVectorEnv) and MASK not in info and any(single.has_wrapper_attr("action_masks") for single in env.envs):
        raise SettingError("action_masks() of a ready vector environment is not called: wrap each in lightning_rl.envs.masks.MaskInfo")
    spaces = spaces._replace(masked=spaces.masked or MASK in info)
    if spaces.masked:
        Masks(spaces.action, f"environment {{}} of {name}")  # raises if there is nothing to mask
    return spaces


def describe_wrappers(env: EnvSource) -> list[str]:
    """Return lines for the user about an environment's wrappers that change rewards or depend on earlier episodes.

    Raises `SettingError`: a setting replaces one of them.
    """
    builders: list[Callable[[], gym.Env | VectorEnv]] = []
    if isinstance(env, VectorEnv):
        builders = [] if gives_tensors(env) else [partial(deepcopy, env)]
        if isinstance(inner := env.unwrapped, SyncVectorEnv):
            builders.append(partial(deepcopy, inner.envs[0]))
        elif isinstance(inner, AsyncVectorEnv):
            builders.append(inner.env_fns[0])
    elif not isinstance(env, EnvConfig):
        builders = [partial(make_env, env)] if callable(env) else []
    elif env.vectorization != "envpool" and (env.wrappers or env.path is None or find_user_module(env.path)):
        native = env.vectorization == "native"
        builders = [partial(make_vector_env, env) if native else partial(make_env, single_env_config(env))]
    return describe_effects([*effects_by_class(env), *(effect for build in builders for effect in find_effects(build))])


class EnvPool(VectorWrapper):
    """EnvPool's environments. They take a seed only when they are built, so a reset with a seed builds them again."""

    def __init__(self, build: Callable[[int], VectorEnv]) -> None:
        super().__init__(build(0))
        self.build = build

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        if seed is not None:
            self.env.close()
            self.env = self.build(seed % 2**31)
        return self.env.reset()


class SingleEnv(gym.Env):
    """The first environment of a vector environment as a single environment."""

    def __init__(self, envs: VectorEnv) -> None:
        self.envs = envs
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        obs, info = self.envs.reset(seed=seed)
        return tree_index(obs, 0), self._first(info)

    def step(self, action: Tree) -> StepResult:
        obs, reward, terminated, truncated, info = self.envs.step(np.asarray(action)[None])
        return tree_index(obs, 0), float(reward[0]), bool(terminated[0]), bool(truncated[0]), self._first(info)

    def close(self) -> None:
        self.envs.close()

    def _first(self, info: Info) -> Info:
        return {key: value[0] for key, value in info.items() if isinstance(value, np.ndarray) and value.ndim}


def _make_envpool(config: EnvConfig) -> VectorEnv:
    try:
        import envpool
    except ImportError as error:
        raise missing_extra("envpool", "envpool", "vectorization envpool") from error
    if config.name not in envpool.list_all_envs():
        raise SettingError(f"env.id {config.name!r} is not an EnvPool task{nearest(config.name, envpool.list_all_envs())}")
    arguments = {"env_type": "gymnasium", "num_envs": config.num_envs, **config.arguments}

    def build(seed: int) -> VectorEnv:
        pool = _build(config, lambda: envpool.make(config.name, **{"seed": seed, **arguments}))
        with warnings.catch_warnings(action="ignore"):  # the first access warns of float64 bounds of float32 spaces
            _ = pool.observation_space, pool.action_space
        return pool

    return EnvPool(build)


def _build(config: EnvConfig, make: Callable[[], Built]) -> Built:
    """Build an environment; raise `SettingError` in one line if that fails."""
    if ":" in config.name:
        check_module("env.id", config.name.rpartition(":")[0])
    try:
        prepare_package(config.name)
        return make()
    except gym.error.UnregisteredEnv as error:
        module, colon, name = config.name.rpartition(":")
        close = closest_of(name, gym.registry)
        hint = f"; did you mean {module}{colon}{close}?" if close else ""
        if name in PACKAGES:
            raise SettingError(f"env.id {name} is a package; name one of its environments, such as {PACKAGES[name]}") from error
        if names := [attribute for attribute in ("parallel_env", "env") if callable(getattr(sys.modules.get(name), attribute, None))]:
            raise SettingError(f"env.id {name} is a module with an environment of several agents; name it {name}.{names[0]}") from error
        if way := name_in_gym(name):
            raise SettingError(f"env.id {name!r} is registered in the old package gym, not in gymnasium; {way}") from error
        builder = getattr(sys.modules.get(module), name, None)
        if callable(builder) and not (isinstance(builder, type) and issubclass(builder, gym.Env | VectorEnv)):
            hint = f"; register it with gymnasium, or name it {module}.{name} if it has several agents"
        example = "" if colon else f" (your own: its_module:{name}, or --import its_module)"
        raise SettingError(f"env.id {config.name!r} is not a registered environment{example}{hint}") from error
    except BaseException as error:  # a constructor may raise anything
        keep_running(error, f"the environment {config.name}")
        if needs_mujoco_py(config.name) and isinstance(error, ImportError | gym.error.Error):
            newest = find_newest_version(config.name)
            raise SettingError(f"{config.name} needs mujoco_py, which is no longer maintained; use {newest}") from error
        hint = "; try vectorization sync" if config.vectorization == "native" else ""
        if isinstance(error, ModuleNotFoundError | gym.error.DependencyNotInstalled):
            hint = ""
            for package, extra in EXTRAS.items():
                if package.lower() in str(error).lower():
                    raise missing_extra(package, extra, config.name) from error
        elif config.kwargs:
            has_spec = isinstance(error, TypeError) and config.vectorization != "envpool"
            meant = closest_argument(error, _find_constructor(config)) if has_spec else ""
            hint = meant or f"; env.kwargs are {config.kwargs}"
        raise SettingError(f"the environment {config.name} cannot be built: {_reason(error)}{place_in_code(error)}{hint}") from error


def _find_constructor(config: EnvConfig) -> Callable[..., object]:
    """Return the class or function that takes `env.kwargs`."""
    if not config.is_registered:
        return find_builder(config.id)
    spec = gym.spec(config.name)
    entry = spec.vector_entry_point if config.vectorization == "native" else spec.entry_point
    return registration.load_env_creator(entry) if isinstance(entry, str) else entry  # type: ignore[return-value]


def name_in_gym(name: str) -> str | None:
    """Return how to name an environment that a package registered in `gym`, gymnasium's predecessor; None if there is none."""
    old = sys.modules.get("gym")
    registry = getattr(getattr(old, "envs", None), "registry", {})
    if name not in getattr(registry, "env_specs", registry):  # before 0.26 it was no dict
        return None
    version = "26" if str(getattr(old, "__version__", "0.26")) >= "0.26" else "21"
    command = f'pip install "shimmy[gym-v{version}]"'
    return f"{command} and set env.id GymV{version}Environment-v0, env.kwargs {{env_id: {name}}}"


def _reason(error: BaseException) -> str:
    """Return an error's message in one line, without what gymnasium and Python append."""
    added = r" was raised from the environment creator|\. Environment registration via|\. Did you mean"  # by gymnasium, by Python 3.13
    message = re.split(added, str(error))[0].strip()
    if not message and error.__traceback__ is not None:  # a bare assertion
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if place_in_code(error) else f" ({Path(frame.filename).name}:{frame.lineno})"
        return f"{type(error).__name__}: {frame.line or 'no message'}{where}"
    return shorten((message or type(error).__name__).splitlines()[0].rstrip("."), 140, placeholder=" …")


def _wrap(env: gym.Env, wrapper: object) -> gym.Env:
    """Apply a wrapper given as a class path or as `{class_path, init_args}`."""
    setting = {"class_path": wrapper} if isinstance(wrapper, str) else wrapper
    given = dict(setting) if isinstance(setting, Mapping) else {}
    path, arguments = given.pop("class_path", None), given.pop("init_args", None) or {}
    if not isinstance(path, str) or not isinstance(arguments, Mapping) or given:
        raise SettingError(f"env.wrappers takes class paths or {{class_path: …, init_args: {{name: value}}}}, got {wrapper!r}")
    module, _, name = path.rpartition(".")
    check_module("env.wrappers", module)
    try:
        cls = getattr(importlib.import_module(module or "gymnasium.wrappers"), name)
    except (ImportError, AttributeError) as error:
        known = [name for name in dir(gym.wrappers) if name[0].isupper()] if not module else []
        raise SettingError(f"env.wrappers: there is no {path}{nearest(name, known)}") from error
    if not (isinstance(cls, type) and issubclass(cls, gym.Wrapper)):
        raise SettingError(f"env.wrappers: {path} is not a gymnasium.Wrapper")
    if cls.__module__.startswith("gymnasium."):  # these expect tuples, and YAML has none
        arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
    try:
        return cls(env, **arguments)
    except BaseException as error:  # a constructor may raise anything
        keep_running(error, f"env.wrappers: {name}")
        reason = f"{_reason(error)}{place_in_code(error)}{closest_argument(error, cls)}"
        raise SettingError(f"env.wrappers: {name} rejects its arguments: {reason}") from error


def prepare_package(env_id: str) -> None:
    """Import and register the package of an environment. Its warnings go to the log, not to stderr or to a file in the current folder."""
    if env_id.startswith("ALE/"):
        ale_py = importlib.import_module("ale_py")
        gym.register_envs(ale_py)
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    if env_id.startswith(PREFIX):
        register_torch_control()
    if env_id.startswith("MinAtar/") and env_id not in gym.registry:
        importlib.import_module("minatar.gym").register_envs()
    if env_id.startswith(("MiniGrid-", "BabyAI-")):
        importlib.import_module("minigrid")  # registers its environments
    if env_id.startswith(ROBOTICS) and env_id not in gym.registry:
        with redirect_stderr(StringIO()):
            importlib.import_module("gymnasium_robotics")
    spec = gym.registry.get(env_id)
    if spec is not None and "mujoco" in str(spec.entry_point):
        importlib.import_module("mujoco").set_mju_user_warning(logging.getLogger("mujoco").info)


def needs_mujoco_py(env_id: str) -> bool:
    """Return whether an id is an old MuJoCo environment (such as HalfCheetah-v3 or FetchReach-v1) that gymnasium-robotics registers."""
    entry = getattr(gym.registry.get(env_id), "entry_point", None)
    named = getattr(entry, "__name__", "") + str(entry)
    return named.startswith("gymnasium_robotics.envs.mujoco.") or any(old in named for old in ("mujoco_py", "MujocoPy"))


def find_newest_version(env_id: str) -> str:
    """Return the id of the newest registered version of an environment; the id itself if there is none."""
    try:
        namespace, name, _ = registration.parse_env_id(env_id)
    except gym.error.Error:
        return env_id
    newest = registration.find_highest_version(namespace, name)
    return env_id if newest is None else registration.get_env_id(namespace, name, newest)


def find_user_module(env_id: str) -> str | None:
    """Return the module of an id registered by user code; None for ids of gymnasium, of this package and of its extras."""
    if is_path(env_id):
        return None if is_packaged(env_id) else env_id.rpartition(".")[0]
    spec = gym.registry.get(env_id)
    if spec is None or spec.entry_point is None:
        return None
    module = spec.entry_point.partition(":")[0] if isinstance(spec.entry_point, str) else spec.entry_point.__module__
    return None if module.partition(".")[0] in ("gymnasium", "lightning_rl", *EXTRAS) else module
