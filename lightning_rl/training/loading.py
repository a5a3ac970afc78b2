"""Algorithms and weights from checkpoints: plain data only, and no module that the file alone names."""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl import ALGORITHMS
from lightning_rl.checkpoints.content import check_content, check_environment, check_names, check_weights
from lightning_rl.checkpoints.files import last_generation, previous_path, read_verified, shown
from lightning_rl.checkpoints.validation import check_optimizers, check_run
from lightning_rl.errors import SettingError, nearest
from lightning_rl.spaces import Spaces, allocate, from_plain, observation_leaves

BROKEN = (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError, MemoryError, RecursionError)
"""What settings of the wrong kind raise somewhere inside."""


def load(path: str | Path, wanted: type, base: type, map_location: Any = "cpu", **overrides: Any) -> Any:
    """An algorithm from a checkpoint alone: no configuration, no environment is built.

    Args:
        path: a `.ckpt` file, or a run's folder: its `checkpoints/best.ckpt`.
        wanted: what the file must hold, this class or a subclass.
        base: the base of all algorithms.
        map_location: the device to load to.
        overrides: settings that win over the stored ones.

    Raises:
        SettingError: no such file, not one of our checkpoints, or one that names a module which was not imported.
    """
    path = best_of(path)
    checkpoint = read_checkpoint(path, map_location)
    name, stored = checkpoint["lightning_rl"]["algorithm"], checkpoint["hyper_parameters"]
    cls: Any = algorithm_class(name, base)
    if not issubclass(cls, wanted):
        raise SettingError(f"ckpt_path {shown(path)} holds {name}, not {wanted.__name__}; load it with {name}.load_from_checkpoint")
    settings = {**stored, "replay": without_new_folders(stored["replay"])} if "replay" in stored else stored
    settings = {**settings, **overrides}
    try:
        check_names({key: value for key, value in stored.items() if key not in overrides}, path)
        own = checkpoint["lightning_rl"]
        observation, action = map(from_plain, own["spaces"])
        if "env" not in overrides:
            numbers = sum(math.prod(leaf.shape) for leaf in observation_leaves(observation))
            check_environment(stored.get("env"), numbers, path)
        spaces = Spaces(observation, action, own.get("masked", False))
        settings = {"spaces": spaces, **settings}
        sketch = _sketch(cls, settings)
        if sketch is not None:
            check_weights(checkpoint["state_dict"], sketch, path)
        algorithm = cls(**settings)
        check_weights(checkpoint["state_dict"], algorithm.state_dict(), path)
        algorithm.load_state_dict(checkpoint["state_dict"])
        algorithm.on_load_checkpoint(checkpoint)
    except BROKEN as error:
        reason = shorten(f"{type(error).__name__}: {error}", 80, placeholder=" …")
        raise SettingError(f"ckpt_path {shown(path)} does not hold what a {name[:40]} needs ({reason})") from error
    return algorithm


def read_checkpoint(path: str | Path, map_location: Any = "cpu", say: Callable[[str], None] = print) -> dict[str, Any]:
    """A checkpoint as plain data, or the generation before where it is damaged; code in it never runs.

    Raises:
        SettingError: no such file, or not one of our checkpoints.
    """
    path = Path(path)
    if not path.is_file() and not previous_path(path).is_file():
        beside = [each.name for each in path.parent.glob("*.ckpt")]
        raise SettingError(f"ckpt_path {shown(path)} is not a file; checkpoints lie in RUN/checkpoints{nearest(path.name, beside)}")
    checkpoint = read_verified(path, map_location, say)
    check_content(checkpoint, path)
    return checkpoint


def best_of(path: str | Path) -> Path:
    """The best checkpoint of a run's folder; another path as it is."""
    path = Path(path)
    return checkpoint_of(path, "ckpt_path", "best.ckpt") if path.is_dir() else path


def checkpoint_of(source: Path, option: str, name: str) -> Path:
    """The checkpoint of that name of a run's folder, or the one that `source` is."""
    if source.is_file():
        return source
    if not source.is_dir():
        raise SettingError(f"{option} {shown(source)} is neither a run's folder nor a checkpoint")
    found = last_generation(source / "checkpoints", name) or last_generation(source, name)
    if found is None:
        raise SettingError(f"{option} {shown(source)} has no checkpoints/{name}; name a run's folder or a checkpoint")
    return found


def check_fits(algorithm: Any, path: str | Path) -> int:
    """The count at which a checkpoint stands: its environment steps, or its updates.

    Raises:
        SettingError: it cannot be read, or it holds another algorithm or other weights than this one.
    """
    checkpoint = read_checkpoint(path)
    stored, name = checkpoint["lightning_rl"]["algorithm"], stored_name(type(algorithm))
    if stored != name:
        way_out = f"; continue it with --model {stored}" if stored in ALGORITHMS else ""
        raise SettingError(f"ckpt_path {shown(path)} holds {stored[:60]}, not {name}{way_out}")
    check_names(checkpoint["hyper_parameters"], path, imported=False)
    check_weights(checkpoint["state_dict"], algorithm.state_dict(), path)
    check_run(checkpoint, path)
    optimizers = _optimizers(algorithm)
    if optimizers is not None:
        check_optimizers(checkpoint["optimizer_states"], optimizers, path)
    expected = _shapes(allocate(algorithm.spaces.observation, algorithm.num_envs))
    for rank in checkpoint["lightning_rl"].get("ranks", []):
        episodes = rank["data"]["collector"]["episodes"]
        if rank["num_envs"] == algorithm.num_envs and episodes is not None and _shapes(episodes["obs"]) != expected:
            raise SettingError(f"ckpt_path {shown(path)} holds observations of other shapes than the environments give")
    return checkpoint["lightning_rl"][algorithm.counter]


def _optimizers(algorithm: Any) -> list[Optimizer] | None:
    """The optimizers that an algorithm will have, which is as it was after this; None if only Lightning can tell."""
    kept = [(parameter, parameter.data, parameter.grad) for parameter in algorithm.parameters()]
    try:
        configured = algorithm.configure_optimizers()
    except Exception:  # one of others may ask its trainer, which it has not yet
        return None
    finally:
        for parameter, data, gradient in kept:
            parameter.data, parameter.grad = data, gradient
    configured = list(configured) if isinstance(configured, list | tuple) else [configured]
    return configured if all(isinstance(each, Optimizer) for each in configured) else None


def _shapes(tree: Any) -> Any:
    """A tree of arrays as one of their shapes."""
    if isinstance(tree, dict):
        return {key: _shapes(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return [_shapes(child) for child in tree]
    return tuple(tree.shape) if hasattr(tree, "shape") else None


def without_new_folders(replay: Any) -> Any:
    """Settings of a replay buffer that use a folder only if it is there: a file names none to make."""
    folder = replay.get("directory") if isinstance(replay, dict) else None
    return {**replay, "directory": None} if folder is not None and not (isinstance(folder, str) and Path(folder).is_dir()) else replay


def _sketch(cls: Any, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The names, shapes and types of an algorithm's weights, which take no memory; None where it cannot be built like that."""
    try:
        with torch.device("meta"):
            return cls(**settings).state_dict()
    except Exception:  # an algorithm of others may look at its weights; a wrong setting comes up again where they are real
        return None


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
        raise SettingError(f"there is no algorithm {name[:60]!r} (one of your own needs --import its_module){nearest(name, names)}")
    return imported[name]


def _subclasses(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [each for child in children for each in (child, *_subclasses(child))]


def take_weights(algorithm: Any, source: str | Path) -> list[str]:
    """Take the weights of another run, layer by layer where they fit; counters, optimizers and environments start anew.

    Args:
        algorithm: whose weights are replaced.
        source: a run's folder, whose last checkpoint is taken, or a checkpoint.

    Returns:
        One line for each layer that keeps its first weights, and why.

    Raises:
        SettingError: there is no checkpoint, or no layer of it fits.
    """
    path = checkpoint_of(Path(source), "init_from", "last.ckpt")
    theirs, ours = read_checkpoint(path)["state_dict"], algorithm.state_dict()
    layers: dict[str, list[str]] = defaultdict(list)
    for name in ours:
        layers[name.rpartition(".")[0]].append(name)
    lines = []
    for layer, names in layers.items():
        reason = next((why for name in names if (why := misfit(theirs.get(name), ours[name]))), None)
        if reason is None:
            for name in names:
                ours[name].copy_(theirs[name])
        else:
            lines.append(f"init_from: {layer} starts anew: {reason}")
    if len(lines) == len(layers):
        raise SettingError(f"init_from {str(source)!r}: none of its weights fit this model; use the same network settings")
    return lines


def misfit(theirs: Tensor | None, ours: Tensor) -> str | None:
    """Why a parameter cannot be taken."""
    if theirs is None:
        return "it is not in the checkpoint"
    if theirs.shape != ours.shape:
        return f"{list(theirs.shape)} in the checkpoint, {list(ours.shape)} here"
    return None if not theirs.is_floating_point() or bool(torch.isfinite(theirs).all()) else "it is not finite in the checkpoint"
