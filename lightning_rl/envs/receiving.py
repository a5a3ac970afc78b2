"""How an environment receives parameters, in this order:

| way | which environments | when |
|---|---|---|
| a method `set_parameters(dict)` | that have one, or a wrapper of theirs has | before each reset |
| `reset(options={"parameters": dict})` | that list the names in `metadata["parameters"]` | with each reset |
| named attributes of the unwrapped environment | all others | before each reset |

An attribute is named by a dotted path: `gravity`, `model.opt.gravity.2`, `model.body_mass.torso`; of a MuJoCo model's arrays the entries
have the names that the model gives them, and numbers. A last part `scale` is a factor on what was built: `model.body_mass.scale`.
What follows from attributes is brought up to date: see `refresher`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from lightning_rl.envs.places import find, simulation
from lightning_rl.errors import SettingError, nearest

Options = dict[str, Any] | None
Values = Mapping[str, float]
WIND = ("wind_power", "turbulence_power")


class Receiver(NamedTuple):
    """How an environment takes values.

    receive: before a reset: take them, and give the options for it.  restore: take those of the episode under way again.
    check: after a reset: raise `SettingError` for one that did nothing.
    """

    receive: Callable[[Values, Options], Options]
    restore: Callable[[Values], Any]
    check: Callable[[Values], Any]


def make_receiver(env: gym.Env, names: Iterable[str]) -> Receiver:
    """How this environment receives parameters of these names.

    Raises:
        SettingError: it has none of such a name.
    """
    told, who = (env.metadata or {}).get("parameters"), type(env.unwrapped).__name__
    if env.has_wrapper_attr("set_parameters"):
        check_names(names, told, who)
        return Receiver(partial(call, env), nothing, nothing)
    if told is not None:
        check_names(names, told, who)
        return Receiver(with_options, nothing, nothing)
    write = Attributes(env.unwrapped, names)
    return Receiver(partial(before_reset, write), partial(write), write.check)


def check_names(names: Iterable[str], told: Iterable[str] | None, who: str) -> None:
    """Raise `SettingError` for a name that an environment does not tell among its own, if it tells any."""
    for name in names:
        if told is not None and name not in told:
            raise SettingError(f"env.parameters.{name} is not a parameter of {who}{nearest(name, told)}")


def nothing(values: Values) -> None:
    """What an environment received by itself it keeps by itself, and uses as it likes."""


def call(env: gym.Env, values: Values, options: Options) -> Options:
    """The first way.

    Raises:
        SettingError: the environment does not take them.
    """
    try:
        env.get_wrapper_attr("set_parameters")(dict(values))
    except Exception as error:  # a method of others may raise anything
        raise SettingError(f"set_parameters raised {type(error).__name__}: {error}; given were env.parameters {dict(values)}") from error
    return options


def with_options(values: Values, options: Options) -> Options:
    """The second way."""
    return {**(options or {}), "parameters": dict(values)}


def before_reset(write: Attributes, values: Values, options: Options) -> Options:
    """The third way."""
    write(values)
    return options


class Attributes:
    """Writes named attributes of an unwrapped environment.

    Raises:
        SettingError: there is no number of such a name, or it cannot be changed.
    """

    def __init__(self, env: Any, names: Iterable[str]) -> None:
        self.env, self.names = env, list(names)
        self.built: dict[str, Any] = {}
        for name in self.names:
            place = find(env, name.removesuffix(".scale"))
            self.built[name] = copy(place.get())
            try:
                place.set(place.get())
            except (AttributeError, TypeError, ValueError):
                raise SettingError(f"env.parameters.{name} of {type(env).__name__} cannot be changed") from None
            if np.ndim(place.get()) and not name.endswith(".scale"):
                raise SettingError(f"env.parameters.{name} has {place.get().size} numbers: name one, such as {name}.0, or use {name}.scale")
            if name in WIND and not getattr(env, "enable_wind", True):
                raise SettingError(f"env.parameters.{name} does nothing without wind; set env.kwargs.enable_wind true")
        self.refresh = refresher(env, self.names)

    def __call__(self, values: Values) -> None:
        for name, value in values.items():
            new = self.new(name, value)
            whole = isinstance(self.built[name], int) and float(new).is_integer()  # what counts something goes on counting
            find(self.env, name.removesuffix(".scale")).set(int(new) if whole else new)
        self.refresh()

    def new(self, name: str, value: float) -> Any:
        """What a parameter writes."""
        return self.built[name] * value if name.endswith(".scale") else value

    def check(self, values: Values) -> None:
        """Raise `SettingError` for what the environment, or another parameter, wrote over."""
        for name, value in values.items():
            if not np.allclose(find(self.env, name.removesuffix(".scale")).get(), self.new(name, value), rtol=1e-5):
                raise SettingError(
                    f"env.parameters.{name} does nothing: {type(self.env).__name__} sets it itself, or another parameter does"
                )


def refresher(env: Any, names: list[str]) -> Callable[[], None]:
    """What brings up to date what an environment keeps that follows from its numbers."""
    if all(hasattr(env, name) for name in ("masspole", "masscart", "length", "total_mass", "polemass_length")):
        return partial(refresh_cartpole, env)
    model = simulation(env)
    if model is None:
        return lambda: None
    mujoco = importlib.import_module("mujoco")
    # not the environment's own data, which this would put back to the beginning
    constants = partial(mujoco.mj_setConst, model, mujoco.MjData(model))
    if any(name.startswith("model.body_mass") for name in names) and not any(name.startswith("model.body_inertia") for name in names):
        return partial(refresh_bodies, model, model.body_mass.copy(), model.body_inertia.copy(), constants)
    return constants


def refresh_cartpole(env: Any) -> None:
    """Its sum of masses, and the product with the pole's length."""
    env.total_mass, env.polemass_length = env.masspole + env.masscart, env.masspole * env.length


def refresh_bodies(model: Any, mass: np.ndarray, inertia: np.ndarray, constants: Callable[[], None]) -> None:
    """A body that is heavier than it was built is as large and denser, so that its inertia grows alike."""
    factor = np.divide(model.body_mass, mass, where=mass > 0, out=np.ones_like(mass))
    model.body_inertia[...] = inertia * factor[:, None]
    constants()
