"""An environment whose parameters are drawn again for each episode, from samplers or from the lessons of a curriculum.

They are set by the environment's method `set_parameters`, by options of its reset, or as attributes by dotted name.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import gymnasium as gym
import numpy as np

from lightning_rl.envs import LESSONS, PARAMETERS
from lightning_rl.envs.agents.copies import AgentsEnv
from lightning_rl.envs.lessons import LessonValues, Parameter, PlainSampler, as_sampler
from lightning_rl.errors import SettingError, keep_running, nearest
from lightning_rl.spaces import with_vector
from lightning_rl.types import Info, Options, StepResult, Tree

OBSERVED = "parameters"
"""Key of the parameters in Dict observations."""
ENTRIES = {
    "body": ("body", "nbody"),
    "geom": ("geom", "ngeom"),
    "site": ("site", "nsite"),
    "jnt": ("joint", "njnt"),
    "actuator": ("actuator", "nu"),
    "tendon": ("tendon", "ntendon"),
}
"""By the first word of a MuJoCo array's name: the model's method for named entries, and its attribute for the number of entries."""
MUJOCO_NAMES = {
    "gravity": "model.opt.gravity.2",
    "wind": "model.opt.wind.0",
    "mass": "model.body_mass.scale",
    "friction": "model.geom_friction.scale",
    "damping": "model.dof_damping.scale",
}
"""Common names for parameters of MuJoCo environments, and the dotted names to suggest for them."""
READ_ONLY = ("action_space", "observation_space", "spec")
"""Parts of an environment that are fixed when it is built, because other objects hold copies."""
RENDER_SIZES = ("width", "height", "screen_dim", "screen_width", "screen_height")
NEEDS_WIND = ("wind_power", "turbulence_power")

Number = float | np.ndarray
Values = Mapping[str, float]


def draw_by_episode(env: gym.Env) -> gym.Env:
    """Let the seed of an episode alone determine what it draws, so that an evaluation may play it in any of several environments."""
    layer = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, EnvParameters):
            layer.of_episode = True
        layer = layer.env
    return env


class EnvParameters(gym.Wrapper):
    """Draws parameters at each reset, from random streams of this environment alone, and sets them on it.

    Parameters with lessons use the last lesson until `set_lessons` is called. A reset with a seed restarts the streams, except those of
    samplers with their own seed (but see `draw_by_episode`). Checkpoints store the attributes of this class under their names.

    Args:
        env: the environment that receives the parameters.
        parameters: its parameters by name, see `lessons.py`.
        index: index of this environment in the run, for samplers with their own seed.
        observe: append the values to the observation: to a vector, or under the key `parameters` of a Dict.

    Raises:
        SettingError: the environment has no such parameter, or its observations cannot be appended to; at a reset: the environment
            overwrites a parameter.
    """

    def __init__(self, env: gym.Env, parameters: Mapping[str, Parameter], index: int = 0, observe: bool = False) -> None:
        super().__init__(env)
        self.lessons = {name: parameter.only(len(parameter.lessons) - 1) for name, parameter in parameters.items()}
        self.index, self.observe = index, observe
        self.seed: int | None = None
        self.of_episode = False
        """Whether a seeded reset determines all draws, including those of samplers with their own seed: see `draw_by_episode`."""
        self.streams: dict[str, np.random.Generator] = {}
        self.drawn: dict[str, float] = {}
        self.played: dict[str, int] = {}
        self.receive, self.restore, self.check = make_target(env, parameters)
        if observe:
            self.observation_space = with_vector(env.observation_space, OBSERVED, len(self.lessons))

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Set what to draw from, starting with the next reset."""
        for name in lessons.keys() - self.lessons.keys():
            raise SettingError(f"{name} is not a parameter that this environment draws{nearest(name, self.lessons)}")
        self.lessons = {**self.lessons, **lessons}

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        if seed is not None:
            self.seed = seed
            self.streams = {key: stream for key, stream in self.streams.items() if not (key.startswith("run ") or self.of_episode)}
        episode = {name: self.draw(name, **lessons) for name, lessons in self.lessons.items()}
        self.drawn = {name: value for name, (_, value) in episode.items()}
        self.played = {name: lesson for name, (lesson, _) in episode.items()}
        obs, info = self.env.reset(seed=seed, options=self.receive(self.drawn, options))
        self.check(self.drawn)
        return self.extend_obs(obs), self.extend_info(info)

    def step(self, action: Tree) -> StepResult:
        self.restore(self.drawn)
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.extend_obs(obs), reward, terminated, truncated, self.extend_info(info) if terminated or truncated else info

    def draw(self, name: str, values: list[PlainSampler], replay: float, first: int) -> tuple[int, float]:
        """Draw the lesson of an episode (the last one, or an earlier one with probability `replay`) and a value from it."""
        lesson, stream = len(values) - 1, self.stream(name, -1)
        if lesson and replay and stream.random() < replay:
            lesson = int(stream.integers(lesson))
        sampler = as_sampler(name, values[lesson])
        return first + lesson, sampler.draw(self.stream(name, sampler.seed))

    def stream(self, name: str, seed: int) -> np.random.Generator:
        """Return a parameter's generator, which depends on the environment's seed, or on the sampler's `seed` if it has one."""
        key = f"run {name}" if seed < 0 else f"{seed} {name}"
        if key not in self.streams:
            seeds = [] if seed < 0 else [seed]
            entropy = [*seeds, self.index if seeds and not self.of_episode else self.seed, crc32(name.encode())]
            self.streams[key] = np.random.default_rng(None if entropy[0] is None else [int(number or 0) for number in entropy])
        return self.streams[key]

    def extend_obs(self, obs: Tree) -> Tree:
        """Append the values to an observation if they are observed."""
        if not self.observe:
            return obs
        numbers = np.array([*self.drawn.values()], np.float32)
        return {**obs, OBSERVED: numbers} if isinstance(obs, dict) else np.concatenate([obs, numbers.astype(obs.dtype)])

    def extend_info(self, info: Info) -> Info:
        """Add the drawn values and their lessons to an info."""
        return {**info, PARAMETERS: dict(self.drawn), LESSONS: dict(self.played)}


Target = tuple[Callable[[Values, Options], Options], Callable[[Values], None], Callable[[Values], None]]


def make_target(env: gym.Env, names: Iterable[str]) -> Target:
    """Choose how this environment receives parameters with these names; raise `SettingError` if it has no such parameter.

    Returns three functions. The first takes the values before a reset and returns the reset's options. The second sets the values of the
    current episode again after a state was loaded. The third raises `SettingError` after a reset if a value had no effect.
    """
    core = env.unwrapped.core if isinstance(env.unwrapped, AgentsEnv) else env.unwrapped
    known, name = (env.metadata or {}).get("parameters"), type(core).__name__
    method = env.get_wrapper_attr("set_parameters") if env.has_wrapper_attr("set_parameters") else getattr(core, "set_parameters", None)
    if method is None and known is None:
        attributes = Attributes(core, names)
        return attributes.receive, attributes.restore, attributes.check
    for parameter in names:
        if known is not None and parameter not in known:
            raise SettingError(f"env.parameters.{parameter} is not a parameter of {name}{nearest(parameter, known)}")
    receive = _put_into_options if method is None else partial(_call_set_parameters, method)
    return receive, lambda values: None, lambda values: None  # the environment itself stores and uses the values


def _put_into_options(values: Values, options: Options) -> Options:
    return {**(options or {}), "parameters": dict(values)}


def _call_set_parameters(method: Callable[[dict[str, float]], object], values: Values, options: Options) -> Options:
    try:
        method(dict(values))
    except BaseException as error:  # user code may raise anything
        keep_running(error, "set_parameters")
        raise SettingError(f"set_parameters raised {type(error).__name__}: {error}; env.parameters are {dict(values)}") from error
    return options


class Attributes:
    """Writes attributes of an unwrapped environment by dotted name. Each must be a writable number."""

    def __init__(self, env: object, names: Iterable[str]) -> None:
        self.env, owner = env, type(env).__name__
        self.built: dict[str, Number] = {}
        for name in names:
            place = find(env, name.removesuffix(".scale"))
            value = place.get()
            self.built[name] = copy(value)
            try:
                place.set(value)
            except (AttributeError, TypeError, ValueError):
                raise SettingError(f"env.parameters.{name} of {owner} cannot be changed") from None
            if isinstance(value, np.ndarray) and value.ndim and not name.endswith(".scale"):
                raise SettingError(f"env.parameters.{name} has {value.size} numbers: name one, such as {name}.0, or use {name}.scale")
            if name in NEEDS_WIND and not getattr(env, "enable_wind", True):
                raise SettingError(f"env.parameters.{name} has no effect without wind; set env.kwargs.enable_wind true")
        self.refresh = make_refresh(env, self.built)
        self.written: dict[str, float] = {}
        """The values last written; they are not saved with the environment."""

    def receive(self, values: Values, options: Options) -> Options:
        """Write the values, and return the options unchanged."""
        self.write(values)
        return options

    def restore(self, values: Values) -> None:
        """Write the values if the environment has other ones, as after loading a state."""
        if values != self.written:
            self.write(values)

    def write(self, values: Values) -> None:
        """Write the values, and update what the environment derives from them."""
        self.written = dict(values)
        for name, value in values.items():
            new = self.scaled(name, value)
            stays_integer = isinstance(self.built[name], int) and float(new).is_integer()
            find(self.env, name.removesuffix(".scale")).set(int(new) if stays_integer else new)
        self.refresh()

    def scaled(self, name: str, value: float) -> Number:
        """Return the number to write: the value, or with `.scale` the value times the original number."""
        return self.built[name] * value if name.endswith(".scale") else value

    def check(self, values: Values) -> None:
        """Raise `SettingError` for a value that the environment or another parameter has overwritten."""
        for name, value in values.items():
            if not np.allclose(find(self.env, name.removesuffix(".scale")).get(), self.scaled(name, value), rtol=1e-5):
                raise SettingError(f"env.parameters.{name} has no effect: {type(self.env).__name__} or another parameter overwrites it")


class Place(NamedTuple):
    """The location of a number or of an array of numbers: an attribute of an object, or an entry of an array."""

    holder: object
    key: str

    def get(self) -> Any:
        return self.holder[int(self.key)] if isinstance(self.holder, np.ndarray) else getattr(self.holder, self.key)

    def set(self, value: Number) -> None:
        """Replace the value. Arrays are written in place, because the simulation reads their memory."""
        if isinstance(self.holder, np.ndarray):
            self.holder[int(self.key)] = value
        elif isinstance(array := getattr(self.holder, self.key), np.ndarray):
            array[...] = value
        else:
            setattr(self.holder, self.key, value)


def find(env: object, name: str) -> Place:
    """Find the location of a dotted name; raise `SettingError` if there is none, or if it holds no number."""
    holder, above, owner = env, "", type(env).__name__
    parts = name.split(".")
    if parts[0] in READ_ONLY:
        raise SettingError(f"env.parameters.{name} cannot be changed: {parts[0]} of {owner} is fixed when it is built")
    for i, part in enumerate(parts):
        place = enter(env, holder, above, part)
        if place is None:
            hint = suggest(env, holder, above, part, ".".join([*parts[:i], ""]))
            raise SettingError(f"env.parameters.{name} is not a parameter of {owner}{hint}")
        holder, above = place.get(), part
    if place is None or not is_number(holder):
        raise SettingError(f"env.parameters.{name} of {owner} is not a number")
    return place


def enter(env: object, holder: object, above: str, part: str) -> Place | None:
    """Look up one part of a dotted name in its holder, which is named `above`; return None if it is missing."""
    if not isinstance(holder, np.ndarray):
        return Place(holder, part) if hasattr(holder, part) and not is_number(holder) else None
    if part.isdecimal():
        return Place(holder, part) if holder.ndim and int(part) < len(holder) else None
    index = name_entries(env, above).get(part)
    return None if index is None else Place(holder, str(index))


def name_entries(env: object, array: str) -> dict[str, int]:
    """Return the index of each named entry of a MuJoCo model's array."""
    method, count = ENTRIES.get(array.partition("_")[0], ("", ""))
    model = mujoco_model(env)
    if model is None or not method:
        return {}
    return {name: i for i in range(getattr(model, count)) if (name := getattr(model, method)(i).name)}


def suggest(env: object, holder: object, above: str, part: str, prefix: str) -> str:
    """Return a hint with the valid name nearest to an unknown one."""
    names = list(name_entries(env, above)) if isinstance(holder, np.ndarray) else []
    if isinstance(holder, np.ndarray) and not names:
        return f"; {above} has {len(holder)} numbers"
    if holder is env and mujoco_model(env) is not None and part in MUJOCO_NAMES:
        return f"; did you mean {MUJOCO_NAMES[part]}?"
    for name in dir(holder) if not is_number(holder) else []:
        with suppress(Exception):  # properties of user code may raise anything
            if not name.startswith("_") and is_settable(env, holder, name):
                names.append(name)
    return nearest(part, names).replace("did you mean ", f"did you mean {prefix}")


def is_settable(env: object, holder: object, name: str) -> bool:
    """Return whether to suggest an attribute: it is a number that can be set, or contains one."""
    if holder is env and (isinstance(getattr(type(env), name, None), property) or name in RENDER_SIZES):
        return False
    value = getattr(holder, name)
    return name in ("model", "opt") or (is_number(value) and not (holder is env and np.ndim(value)))


def is_number(value: object) -> bool:
    """Return whether a value is a number or an array of numbers, but not a bool."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iuf"
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def mujoco_model(env: object) -> Any:
    """Return the model of a MuJoCo environment; None for others."""
    model = getattr(env, "model", None)
    return model if type(model).__name__ == "MjModel" else None


def make_refresh(env: Any, names: Iterable[str]) -> Callable[[], None]:
    """Return a function that updates the values that an environment derives from its parameters."""
    if all(hasattr(env, name) for name in ("masspole", "masscart", "length", "total_mass", "polemass_length")):

        def refresh_cartpole() -> None:
            env.total_mass, env.polemass_length = env.masspole + env.masscart, env.masspole * env.length

        return refresh_cartpole
    model = mujoco_model(env)
    if model is None:
        return lambda: None
    mujoco = importlib.import_module("mujoco")
    data = mujoco.MjData(model)  # not the environment's own, which this would reset
    mass, inertia = model.body_mass.copy(), model.body_inertia.copy()
    scale_inertia = any(name.startswith("model.body_mass") for name in names)
    scale_inertia = scale_inertia and not any(name.startswith("model.body_inertia") for name in names)

    def refresh_mujoco() -> None:
        if scale_inertia:  # a heavier body keeps its size and gets denser
            factor = np.divide(model.body_mass, mass, where=mass > 0, out=np.ones_like(mass))
            model.body_inertia[...] = inertia * factor[:, None]
        mujoco.mj_setConst(model, data)

    return refresh_mujoco
