"""Settings of environments: which one to build, how many, and how to step them."""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from textwrap import shorten
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import gymnasium as gym

from lightning_rl.envs.agents.vmas import is_vmas
from lightning_rl.envs.agents.world import SharedEnv
from lightning_rl.envs.games import GAMES
from lightning_rl.envs.lessons import as_parameters
from lightning_rl.envs.sync import closing_env
from lightning_rl.envs.tensors import PREFIX
from lightning_rl.envs.unity.settings import BUILDS, EDITOR, UnitySettings, check_no_build
from lightning_rl.errors import SettingError
from lightning_rl.settings.dotted_paths import path_of
from lightning_rl.settings.fields import Range, as_settings, read_fields

Vectorization = Literal["auto", "sync", "async", "native", "envpool"]
Autoreset = Literal["SAME_STEP", "NEXT_STEP", "DISABLED"]
MAX_ENVS = 10**6
PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
"""Pattern of paths: of a module, or of a function or class in it."""
T = TypeVar("T")

if TYPE_CHECKING:
    Wrapper = str | type[gym.Wrapper] | dict[str, Any]
    EnvId = str | Callable[..., object]
    NumEnvs = int
else:  # what config files can hold
    Wrapper = str | dict[str, Any]
    EnvId = str
    NumEnvs = Annotated[int, Range(1)] | None

TASK = ("id", "kwargs", "wrappers", "max_episode_steps", "frame_stack", "atari", "parameters", "observe_parameters")
"""Settings that define the task; the others say how many environments run in parallel, and how."""
DEFAULT_NUM_ENVS = 8
"""Default number of parallel environments."""
IN_THIS_PROCESS: dict[str, Any] = {"vectorization": "sync", "step_timeout": None, "max_restarts": None}
"""Settings of environments that need neither processes nor a device."""


@dataclass(frozen=True)
class EnvConfig:
    """An environment and how many copies of it to step.

    Args:
        id: `CartPole-v1`, `module:EnvId-v0`, or a class or function, by its path: `my_envs.Corridor`; or a scene, `unity:PATH`, `unity`.
        num_envs: number of parallel environments in each process; default: 8, of Unity 1.
        vectorization: `sync` (in this process), `async` (a worker process each), `native` (gymnasium's vector entry point) or `envpool`;
            `auto`: `async` for several Atari games on several cores, `native` for `Torch/…`, numpy for classic control, else `sync`.
        autoreset: `SAME_STEP`, `NEXT_STEP` or `DISABLED`: how `sync` and `async` reset (default: SAME_STEP). For others, the mode if their
            metadata do not name one.
        kwargs: arguments of the environment's constructor.
        wrappers: applied in order, each a class path or `{class_path, init_args}`; a bare name is one of gymnasium.wrappers. From Python,
            classes also work; they are stored as paths.
        max_episode_steps: truncate episodes after this many steps of the agent (also with `atari`), instead of at the environment's own
            limit.
        frame_stack: number of latest frames to observe.
        atari: the standard preprocessing of Atari games (Machado et al. 2018): no-op starts, frame skip 4, 84 x 84 grey, 4 frames.
        parameters: values of environment parameters by name, drawn again for each episode: each a number, a sampler
            `{sampler_type, sampler_parameters}`, or `{curriculum: [lessons]}`; see docs/curriculum.md.
        observe_parameters: append the drawn values to the observation.
        step_timeout: for `async`: seconds to wait for an environment before it is restarted; default: 60.
        max_restarts: for `async` and Unity: how often each environment may be restarted in an hour; default: 10.
    """

    id: EnvId
    num_envs: NumEnvs = None  # type: ignore[assignment]
    vectorization: Vectorization = "auto"
    autoreset: Autoreset | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: list[Wrapper] = field(default_factory=list)
    max_episode_steps: Annotated[int, Range(1)] | None = None
    frame_stack: Annotated[int, Range(1)] | None = None
    atari: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    observe_parameters: bool = False
    step_timeout: Annotated[float, Range(0, open_low=True)] | None = None
    max_restarts: Annotated[int, Range(0)] | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.id, str) and self.id) and not callable(self.id):
            kinds = "the id of an environment such as CartPole-v1, or a class or function that builds one"
            raise SettingError(f"env.id must be {kinds}; got {shorten(repr(self.id), 60)}")
        for name, kind in {"kwargs": dict, "wrappers": list}.items():
            if not isinstance(getattr(self, name), kind):
                raise SettingError(f"env.{name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        object.__setattr__(self, "wrappers", [as_wrapper(wrapper) for wrapper in self.wrappers])
        if not as_parameters(self.parameters) and self.observe_parameters:
            raise SettingError("env.observe_parameters needs env.parameters")
        for name in ("atari", "observe_parameters"):
            object.__setattr__(self, name, bool(getattr(self, name)))  # in Python also 1 or an empty list
        read_fields(self, "env.")
        is_unity = self.is_unity
        if self.num_envs is None:
            object.__setattr__(self, "num_envs", 1 if is_unity else DEFAULT_NUM_ENVS)
        if self.num_envs > MAX_ENVS:
            raise SettingError(f"env.num_envs {self.num_envs} is more than one process can step; the maximum is {MAX_ENVS:,}")
        if is_unity:
            self.check_unity()
        elif isinstance(self.id, str) and ("/" in self.id or self.id.endswith(BUILDS)):
            check_no_build("env.id", self.id)
        for name in ("step_timeout", "max_restarts") if not is_unity else ():
            if getattr(self, name) is not None:
                mode = ("async" if self.is_several_games else "sync") if self.vectorization == "auto" else self.vectorization
                if mode != "async":
                    raise SettingError(f"env.{name} needs vectorization async, but it is {mode}; remove it")
        if self.vectorization in ("native", "envpool"):
            if not self.is_registered:
                only = "registered environments of one agent"
                raise SettingError(f"env.vectorization {self.vectorization} is for {only}; leave it out for {self.name}")
            for name in ("wrappers", "frame_stack", "atari", "parameters"):
                if getattr(self, name):
                    raise SettingError(f"env.{name} does not work with vectorization {self.vectorization}; use sync or async")
        if self.parameters and (is_vmas(self.name) or self.name in GAMES):
            raise SettingError(f"env.parameters: {self.name} has none that a reset can set; leave them out")

    def check_agents(self) -> None:
        """Raise `SettingError` for settings that environments of several agents, as this one has, do not support."""
        if self.vectorization not in ("auto", "sync"):
            raise SettingError(f"env.vectorization {self.vectorization} is for environments of one agent; leave it out for {self.name}")
        for name in ("autoreset", "wrappers", "frame_stack", "atari", "observe_parameters"):
            if getattr(self, name):
                way_out = "wrap it in a function of your own"
                raise SettingError(f"env.{name} is for environments of one agent; {self.name} has several: {way_out}")

    def check_unity(self) -> None:
        """Raise `SettingError` for settings that scenes of Unity, as this one is, do not support."""
        as_settings("env.kwargs", UnitySettings, self.kwargs)
        if self.name == EDITOR and self.num_envs != 1:
            raise SettingError(f"env.id {EDITOR}: the editor is one player; env.num_envs must be 1")
        if self.max_episode_steps is not None:
            raise SettingError("env.max_episode_steps: set Max Step of the agents in Unity")
        if self.step_timeout is not None:
            raise SettingError("env.step_timeout: a Unity scene has env.kwargs.timeout_wait")
        if self.observe_parameters:
            raise SettingError("env.observe_parameters: Unity draws the values itself; let the scene observe them")
        self.check_agents()

    @property
    def is_unity(self) -> bool:
        """Return whether this is a scene of Unity: `unity`, or `unity:PATH`."""
        return isinstance(self.id, str) and self.id.partition(":")[0] == EDITOR

    @property
    def path(self) -> str | None:
        """Return the id, or the import path of the class or function; None if it has none."""
        return self.id if isinstance(self.id, str) else path_of(self.id)

    @property
    def name(self) -> str:
        """Return the id, or the name of the class or function."""
        return self.id if isinstance(self.id, str) else str(getattr(self.id, "__name__", type(self.id).__name__))

    @property
    def is_registered(self) -> bool:
        """Return whether `gymnasium.make` builds this environment; others are built by a class or function, or by a path to one."""
        return isinstance(self.id, str) and not is_path(self.id) and not self.is_unity

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for `gymnasium.make`."""
        return self.kwargs | ({} if self.max_episode_steps is None else {"max_episode_steps": self.max_episode_steps})

    @property
    def lives_on_device(self) -> bool:
        """Return whether these are torch environments that `auto` steps as a batch: no setting needs single environments."""
        singles = self.wrappers, self.frame_stack, self.atari, self.parameters
        return self.name.startswith(PREFIX) and not any(singles) and self.autoreset in (None, "SAME_STEP")

    @property
    def is_several_games(self) -> bool:
        """Return whether these are several Atari games, each of which `auto` steps in its own worker."""
        return self.atari and self.num_envs > 1


def is_path(env_id: str) -> bool:
    """Return whether an id is the path of a module, function or class, and not registered in gymnasium."""
    return PATH.fullmatch(env_id) is not None and env_id not in gym.registry


def changed_task(before: object, now: object) -> list[str]:
    """Return the settings that make two environments, given as plain data, different tasks; none if one of them is unknown."""
    if not (isinstance(before, Mapping) and before and isinstance(now, Mapping) and now):
        return []
    changed = [name for name in TASK if name in before and name in now and before[name] != now[name]]
    is_same = str(before["id"]).rpartition(":")[2] == str(now["id"]).rpartition(":")[2]  # `my_envs:Mine-v0` is Mine-v0
    return [f"env.{name}" for name in changed if name != "id" or not is_same]


def as_wrapper(wrapper: Wrapper) -> str | dict[str, Any]:
    """Replace the class of a wrapper by its path; raise `SettingError` for a function, which config files cannot hold."""
    if isinstance(wrapper, Mapping) and isinstance(wrapper.get("class_path"), type):
        return {**wrapper, "class_path": as_wrapper(wrapper["class_path"])}
    if isinstance(wrapper, type) and "<locals>" not in wrapper.__qualname__:
        return f"{wrapper.__module__}.{wrapper.__qualname__}"
    if callable(wrapper):
        is_class = isinstance(wrapper, type)
        what = f"{wrapper.__name__} is defined in a function" if is_class else f"{shorten(repr(wrapper), 50)} is a function"
        use = "" if is_class else "{class_path: …, init_args: {…}}, or "
        raise SettingError(
            f"env.wrappers: {what}, which has no import path; use {use}a function that builds the wrapped environment as env"
        )
    return wrapper


Env = EnvConfig | str | Mapping[str, Any] | gym.Env | gym.vector.VectorEnv | Callable[[], gym.Env]
"""What Python code may pass as `env`: settings, an id, an environment to copy, a ready vector environment, or a function that builds one
environment."""
EnvSource = EnvConfig | gym.vector.VectorEnv | Callable[[], gym.Env]
"""Settings of environments, a ready vector environment, which cannot be built again, or a function that builds one environment."""
if TYPE_CHECKING:
    EnvSetting = Any  # passed as an `Env`, then converted to an `EnvSource`
else:  # what config files can hold
    EnvSetting = EnvConfig


def as_config(env: object) -> EnvSource:
    """Convert an id, a mapping, an environment, or a class or function with an import path to settings; return others unchanged."""
    if isinstance(env, str) or (callable(env) and path_of(env) is not None):
        return EnvConfig(env)
    if isinstance(env, Mapping):
        if "id" not in env:
            raise SettingError("env.id is missing; give the id of an environment such as CartPole-v1")
        return as_settings("env", EnvConfig, env)
    if isinstance(env, gym.Env):
        return copies_of(env)
    if isinstance(env, EnvConfig | gym.vector.VectorEnv | SharedEnv) or callable(env):
        return env  # type: ignore[return-value]
    kinds = "an id such as CartPole-v1, an EnvConfig, a gymnasium environment or vector environment, or a class or function that builds one"
    raise SettingError(f"env must be {kinds}; got {shorten(repr(env), 60)}")


def copies_of(env: gym.Env) -> EnvConfig | Callable[[], gym.Env]:
    """Return settings or a function that build copies of a ready environment, which itself is never stepped.

    Raises `SettingError`: it was not made by `gymnasium.make` and cannot be copied, or it has methods that copies would not have.
    """
    if replaced := replaced_methods(env):
        raise SettingError(f"env {env}: {replaced[0]} was replaced, which copies would not have; pass a function that builds it")
    spec = env.spec
    has_own_spaces = env.action_space is env.unwrapped.action_space and env.observation_space is env.unwrapped.observation_space
    if spec is not None and spec.id in gym.registry and not spec.additional_wrappers and has_own_spaces:
        kwargs = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}
        limit = None if spec.max_episode_steps == gym.spec(spec.id).max_episode_steps else spec.max_episode_steps
        with suppress(TypeError):  # arguments that are not plain data
            json.dumps(kwargs)
            config = EnvConfig(spec.id, kwargs=kwargs, max_episode_steps=limit)
            changes = changes_of(env, partial(gym.make, spec.id, **kwargs))
            return ChangedEnv(config, changes) if changes else config
    try:
        deepcopy(env)
    except Exception as error:  # user code may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise SettingError(f"env {env} cannot be copied ({reason}); pass its id, an EnvConfig, or a function that builds it") from error
    return partial(deepcopy, env)


def replaced_methods(env: gym.Env) -> list[str]:
    """Return the methods of an environment or of its wrappers that are functions from outside their class, which refer to this instance."""
    names: list[str] = []
    layer: Any = env
    while layer is not None:
        written = {value for kind in type(layer).__mro__ for value in vars(kind).values() if isinstance(value, FunctionType)}
        for name, value in vars(layer).items():
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType) and callable(getattr(type(layer), name, None)) and function not in written:
                names.append(name)
        layer = vars(layer).get("env")
    return names


def changes_of(env: gym.Env, make: Callable[[], gym.Env]) -> dict[str, object]:
    """Return the public numbers, strings and spaces of an unused environment that were changed after it was made.

    Returns nothing for an environment that was already reset, which may have changed them itself. Nor if no other copies can be made, for
    example because the environment occupies a port.
    """
    if env.has_wrapper_attr("has_reset") and env.get_wrapper_attr("has_reset"):
        return {}
    built: list[dict[str, object]] = []
    with suppress(Exception):  # a constructor may raise anything
        for _ in range(2):
            with closing_env(make()) as made:
                built.append(dict(vars(made.unwrapped)))
    first, second = built if len(built) == 2 else ({}, {})
    values, kinds = vars(env.unwrapped), (bool, int, float, str, *(type(space) for space in (env.action_space, env.observation_space)))
    names = [name for name in values if not name.startswith("_") and name != "render_mode" and type(values[name]) in kinds]
    return {name: values[name] for name in names if type(first.get(name)) in kinds and first[name] == second.get(name) != values[name]}


@dataclass(frozen=True)
class ChangedEnv:
    """Builds environments and changes the values of some attributes."""

    config: EnvConfig
    changes: dict[str, object]

    @property
    def spec(self) -> gym.envs.registration.EnvSpec:
        """Return the spec of gymnasium's environment, which gives its name."""
        return gym.spec(self.config.name)

    def __call__(self) -> gym.Env:
        env = gym.make(self.config.name, **{"disable_env_checker": True, **self.config.arguments})
        vars(env.unwrapped).update(self.changes)
        return env


def count_envs(env: object) -> int:
    """Return the number of environments of settings or of a vector environment, or the default for a function."""
    return int(getattr(env, "num_envs", DEFAULT_NUM_ENVS))


def resolve_vectorization(env: T) -> T:
    """Resolve `vectorization: auto`; return other environments unchanged."""
    if isinstance(env, EnvConfig) and env.vectorization == "auto" and env.lives_on_device:
        return replace(env, vectorization="native")
    if isinstance(env, EnvConfig) and env.vectorization == "auto" and env.is_several_games and (os.cpu_count() or 1) > 1:
        return replace(env, vectorization="async")
    return resolve_to_sync(env)


def resolve_to_sync(env: T) -> T:
    """Resolve `vectorization: auto` to `sync`, which needs neither processes nor a device."""
    return replace(env, **IN_THIS_PROCESS) if isinstance(env, EnvConfig) and env.vectorization == "auto" else env


def resolve_in_actor(env: T) -> T:
    """Resolve `vectorization: auto` to `sync` if it would start more processes or share a device: this is one process of several."""
    return resolve_to_sync(env) if isinstance(env, EnvConfig) and (env.is_several_games or env.lives_on_device) else env


def single_env_config(env: T) -> T:
    """Return the settings with a single environment, for evaluation and probing; return functions unchanged."""
    if not isinstance(env, EnvConfig):
        return env
    return replace(env, num_envs=1, **(IN_THIS_PROCESS if env.vectorization == "auto" else {}))
