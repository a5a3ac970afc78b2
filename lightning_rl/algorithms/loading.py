"""Algorithms from checkpoints: plain data only, and no module that the file alone names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from lightning_rl import ALGORITHMS
from lightning_rl.errors import SettingError, nearest
from lightning_rl.spaces import Spaces, from_plain


def load(path: str | Path, wanted: type, base: type, map_location: Any = "cpu", **overrides: Any) -> Any:
    """An algorithm from a checkpoint alone: no configuration, no environment is built.

    Args:
        path: a `.ckpt` file.
        wanted: what the file must hold, this class or a subclass.
        base: the base of all algorithms.
        map_location: the device to load to.
        overrides: settings that win over the stored ones.

    Raises:
        SettingError: no such file, not one of our checkpoints, or one that names a module which was not imported.
    """
    checkpoint = read_checkpoint(path, map_location)
    name = checkpoint["lightning_rl"]["algorithm"]
    cls: Any = algorithm_class(name, base)
    if not issubclass(cls, wanted):
        raise SettingError(f"ckpt_path {str(path)!r} holds {name}, not {wanted.__name__}; load it with {name}.load_from_checkpoint")
    try:
        if "env" not in overrides:
            check_stored_names(checkpoint["hyper_parameters"].get("env"), path)
        spaces = Spaces(*(from_plain(space) for space in checkpoint["lightning_rl"]["spaces"]))
        algorithm = cls(**{"spaces": spaces, **checkpoint["hyper_parameters"], **overrides})
        algorithm.load_state_dict(checkpoint["state_dict"])
        algorithm.on_load_checkpoint(checkpoint)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = shorten(f"{type(error).__name__}: {error}", 80, placeholder=" …")
        raise SettingError(f"ckpt_path {str(path)!r} does not hold what a {name} needs ({reason})") from error
    return algorithm


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint as plain data; code in it never runs.

    Raises:
        SettingError: no such file, or not one of our checkpoints.
    """
    if not Path(path).is_file():
        beside = [each.name for each in Path(path).parent.glob("*.ckpt")]
        raise SettingError(f"ckpt_path {str(path)!r} is not a file; checkpoints lie in RUN/checkpoints{nearest(Path(path).name, beside)}")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
        if {"state_dict", "hyper_parameters", "lightning_rl"} <= checkpoint.keys() and "algorithm" in checkpoint["lightning_rl"]:
            return checkpoint
    except Exception as error:  # torch raises what its unpickler meets: EOFError, RuntimeError, UnpicklingError, KeyError, …
        raise SettingError(
            f"ckpt_path {str(path)!r} cannot be read as a checkpoint ({type(error).__name__}); it is damaged or of another kind"
        ) from error
    raise SettingError(
        f"ckpt_path {str(path)!r} is not a checkpoint of lightning_rl; those have a state_dict, hyper_parameters, lightning_rl"
    )


def check_fits(algorithm: Any, path: str | Path) -> int:
    """The environment steps at which a checkpoint stands.

    Raises:
        SettingError: it cannot be read, or it holds another algorithm or other weights than this one.
    """
    checkpoint = read_checkpoint(path)
    stored, name = checkpoint["lightning_rl"]["algorithm"], stored_name(type(algorithm))
    if stored != name:
        raise SettingError(f"ckpt_path {str(path)!r} holds {stored}, not {name}; continue it with --model {stored}")
    shapes, weights = (
        {key: tuple(value.shape) for key, value in each.items()} for each in (checkpoint["state_dict"], algorithm.state_dict())
    )
    for key in sorted(shapes.keys() | weights.keys()):
        if shapes.get(key) != weights.get(key):
            raise SettingError(
                f"ckpt_path {str(path)!r} does not fit the model: {key} is {shapes.get(key)} there and {weights.get(key)} here; "
                "use the same settings"
            )
    return checkpoint["lightning_rl"]["env_steps"]


def stored_name(cls: type) -> str:
    """How a file names an algorithm: `PPO` for one of this package, `my_module.MyPPO` for others."""
    return cls.__name__ if cls.__module__ == ALGORITHMS.get(cls.__name__) else f"{cls.__module__}.{cls.__qualname__}"


def algorithm_class(name: str, base: type) -> type:
    """An algorithm of this package, or one that was imported before, by its class name or its stored name.

    Raises:
        SettingError: there is none.
    """
    if name in ALGORITHMS:
        return getattr(importlib.import_module("lightning_rl"), name)
    imported = {key: cls for cls in (base, *_subclasses(base)) for key in (cls.__name__, stored_name(cls))}
    if name not in imported:
        names = {*ALGORITHMS, *imported} - {"Algorithm", "lightning_rl.algorithms.algorithm.Algorithm"}
        raise SettingError(f"there is no algorithm {name!r} (one of your own needs --import its_module){nearest(name, names)}")
    return imported[name]


def check_stored_names(env: Any, path: str | Path) -> None:
    """Refuse modules that a file names and the user did not: a checkpoint must not choose what is imported."""
    if not isinstance(env, dict):
        return
    modules = [env["id"].rpartition(":")[0]] if ":" in env["id"] else []
    for wrapper in env.get("wrappers") or []:
        class_path = wrapper if isinstance(wrapper, str) else wrapper["class_path"]
        modules.append(class_path.rpartition(".")[0] or "gymnasium")
    for module in modules:
        package = module.partition(".")[0]
        if package in sys.stdlib_module_names:
            raise SettingError(f"{str(path)!r} names {module!r} as a module of an environment or wrapper, which it is not: do not trust it")
        if package not in ("gymnasium", "lightning_rl") and module not in sys.modules:
            raise SettingError(f"{str(path)!r} names the module {module!r}; if you trust it, add --import {module} (or import it before)")


def _subclasses(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [each for child in children for each in (child, *_subclasses(child))]
