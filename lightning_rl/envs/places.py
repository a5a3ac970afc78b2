"""Where a number of an environment lies, by its dotted name; see `receiving.py` for what such names are."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

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
