"""Ways to set parameters on an environment, and where its numbers are found by dotted names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from lightning_rl.errors import SettingError, nearest

NAMED = {"body": "body", "geom": "geom", "site": "site", "jnt": "joint", "actuator": "actuator", "tendon": "tendon"}
"""Beginnings of the names of a MuJoCo model's arrays, and what their entries are."""
MEANT = {
    "gravity": "model.opt.gravity.2",
    "wind": "model.opt.wind.0",
    "mass": "model.body_mass.scale",
    "friction": "model.geom_friction.scale",
    "damping": "model.dof_damping.scale",
}
"""What one looks for in a MuJoCo environment, and where it is."""
BUILT = ("action_space", "observation_space", "spec")
"""Parts of an environment that are as they were built: others hold copies."""
PICTURE = ("width", "height", "screen_dim", "screen_width", "screen_height")


class Place(NamedTuple):
    """A number, or an array of them, by what holds it: an attribute of an object, or an entry of an array."""

    holder: Any
    key: Any

    def get(self) -> Any:
        return self.holder[self.key] if isinstance(self.holder, np.ndarray) else getattr(self.holder, self.key)

    def set(self, value: Any) -> None:
        if isinstance(self.holder, np.ndarray):
            self.holder[self.key] = value
        elif isinstance(getattr(self.holder, self.key), np.ndarray):
            getattr(self.holder, self.key)[...] = value  # a simulation's, which only its own memory changes
        else:
            setattr(self.holder, self.key, value)


def find(env: Any, name: str) -> Place:
    """The place of a dotted name.

    Raises:
        SettingError: it leads nowhere, or to what is no number.
    """
    holder, parts = env, name.split(".")
    place: Place | None = None
    if parts[0] in BUILT:
        raise SettingError(f"env.parameters.{name} cannot be changed: {parts[0]} of {type(env).__name__} stays as it was built")
    for i, part in enumerate(parts):
        place = enter(env, holder, parts[i - 1], part)
        if place is None:
            prefix = ".".join([*parts[:i], ""])
            raise SettingError(
                f"env.parameters.{name} is not a parameter of {type(env).__name__}{near(env, holder, parts[i - 1], part, prefix)}"
            )
        holder = place.get()
    if place is None or not is_number(holder):
        raise SettingError(f"env.parameters.{name} of {type(env).__name__} is no number")
    return place


def enter(env: Any, holder: Any, above: str, part: str) -> Place | None:
    """What a part of a name means in a holder, which the part above names; None if nothing."""
    if not isinstance(holder, np.ndarray):
        return Place(holder, part) if hasattr(holder, part) and not is_number(holder) else None
    if part.isdecimal():
        return Place(holder, int(part)) if holder.ndim and int(part) < len(holder) else None
    kind, names = entries(env, above)
    return Place(holder, getattr(simulation(env), kind)(part).id) if part in names else None


def entries(env: Any, array: str) -> tuple[str, list[str]]:
    """What the entries of an array of a MuJoCo model are, and their names."""
    kind, model = NAMED.get(array.partition("_")[0], ""), simulation(env)
    if model is None or not kind:
        return kind, []
    size = {"joint": "njnt", "actuator": "nu"}.get(kind, f"n{kind}")
    return kind, [name for i in range(getattr(model, size)) if (name := getattr(model, kind)(i).name)]


def near(env: Any, holder: Any, above: str, part: str, prefix: str) -> str:
    """The nearest name to a wrong one."""
    names = entries(env, above)[1] if isinstance(holder, np.ndarray) else []
    if isinstance(holder, np.ndarray) and not names:
        return f"; {above} has {len(holder)} numbers"
    if holder is env and simulation(env) is not None and part in MEANT:
        return f"; did you mean {MEANT[part]}?"
    for name in dir(holder) if not is_number(holder) else []:
        with suppress(Exception):  # properties of others may raise anything
            if not name.startswith("_") and is_offered(env, holder, name):
                names.append(name)
    found = nearest(part, names)
    return found.replace("did you mean ", f"did you mean {prefix}")


def is_offered(env: Any, holder: Any, name: str) -> bool:
    """Whether an attribute is one to suggest: a number to set, or a way to such."""
    if holder is env and (isinstance(getattr(type(env), name, None), property) or name in PICTURE):
        return False
    value = getattr(holder, name)
    return name in ("model", "opt") or (is_number(value) and not (holder is env and np.ndim(value)))


def is_number(value: Any) -> bool:
    """Whether something is a number, or an array of such."""
    if isinstance(value, bool | np.bool_):
        return False
    return isinstance(value, int | float | np.number) or (isinstance(value, np.ndarray) and value.dtype.kind in "iuf")


def simulation(env: Any) -> Any:
    """A MuJoCo environment's model; None for others."""
    model = getattr(env, "model", None)
    return model if type(model).__name__ == "MjModel" else None


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
