"""Load algorithms and weights from checkpoints and shared agents, as plain data; modules that only a file names are not imported."""

from __future__ import annotations

import importlib
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import gymnasium as gym
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from lightning_rl.checkpoints.archive import Checkpoint, mappings
from lightning_rl.checkpoints.files import find_saved, last_generation, previous_path, read_verified, shown
from lightning_rl.checkpoints.validation import check_content, is_finite
from lightning_rl.envs.agents.copies import is_packaged
from lightning_rl.envs.config import EnvConfig, as_config, is_path
from lightning_rl.envs.make import probe_spaces
from lightning_rl.envs.unity.settings import PREFIX
from lightning_rl.errors import SettingError, check_path, nearest
from lightning_rl.networks.changes import list_changes
from lightning_rl.settings.names import MODELS, suggest_algorithm
from lightning_rl.sharing.agent import agent_of, read_agent
from lightning_rl.sharing.hub import download, is_address, is_agent, is_zip
from lightning_rl.sharing.sb3 import read_zip
from lightning_rl.spaces import Spaces, from_plain, observation_leaves

A = TypeVar("A", bound=pl.LightningModule)
BROKEN = (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError, MemoryError, RecursionError)
"""Errors that invalid settings raise somewhere inside."""
TRUSTED_PACKAGES = ("gymnasium", "lightning_rl")
UNTRUSTED_WRAPPERS = {"RecordVideo": "writes files where the checkpoint says", "HumanRendering": "opens a window"}


def load(
    path: str | Path, wanted: type[A], base: type[pl.LightningModule], map_location: str | torch.device = "cpu", **overrides: object
) -> A:
    """Load an algorithm from a checkpoint, without a config and without building an environment.

    Args:
        path: a `.ckpt` file, a run's folder (its `checkpoints/best.ckpt`), a shared agent (`hf://USER/NAME[@REVISION]` or its folder), or
            an agent that comes with this package, `zoo:NAME`.
        wanted: the expected class, or a base class of it.
        base: the base class of all runs.
        map_location: the device to load to.
        overrides: settings that replace the stored ones; an environment must have the stored spaces.

    Raises:
        SettingError: the file or agent does not exist, is not one of our checkpoints, or names a module that is not imported.
    """
    path = best_of(path)
    if overrides.get("env") is not None:
        overrides["env"] = as_config(overrides["env"])
    if isinstance(map_location, str | torch.device):
        try:
            torch.empty(0, device=map_location)
        except (RuntimeError, AssertionError) as error:  # a device that does not exist, or that torch was built without
            raise SettingError(f"map_location {str(map_location)!r}: {str(error).splitlines()[0]}") from error
    checkpoint = _read_zip(path, overrides.get("env")) if is_zip(path) else read_checkpoint(path, map_location)
    entries, stored = checkpoint["lightning_rl"], checkpoint["hyper_parameters"]
    name, changes = entries["algorithm"], entries.get("changes", ())
    cls = algorithm_class(name, base)
    if not issubclass(cls, wanted):
        raise SettingError(f"ckpt_path {shown(path)} holds {name}, not {wanted.__name__}; load it with {name}.load_from_checkpoint")
    try:
        check_names({key: value for key, value in stored.items() if key not in overrides}, path)
        spaces = stored_spaces(entries)
        observation = from_plain(entries["spaces"][0])
        if "env" not in overrides:
            check_environment(stored.get("env"), sum(math.prod(leaf.shape) for leaf in observation_leaves(observation)), path)
        elif isinstance(overrides["env"], EnvConfig) and isinstance(spaces, Spaces) and not is_zip(path):
            check_spaces(overrides["env"], spaces, path)
        settings = {"spaces": spaces, **_without_choices(stored), **overrides}
        with limited_weights(checkpoint["state_dict"], path):
            sketch = _sketch(cls, settings)
            if sketch is not None:
                check_weights(checkpoint["state_dict"], sketch, path, changes)
            algorithm = cls(**settings)
            algorithm.configure_model()
        check_weights(checkpoint["state_dict"], algorithm.state_dict(), path, changes)
        algorithm.load_state_dict(checkpoint["state_dict"])
        algorithm.on_load_checkpoint(checkpoint)
    except BROKEN as error:
        reason = shorten(f"{type(error).__name__}: {error}", 80, placeholder=" …")
        raise SettingError(f"ckpt_path {shown(path)} does not contain a valid {name[:40]} ({reason})") from error
    return algorithm


def _read_zip(path: Path, env: Any) -> Checkpoint:
    """Read an agent of Stable-Baselines3 for a given environment."""
    if env is None:
        raise SettingError(f"ckpt_path {shown(path)} names no environment: add --env CartPole-v1, or env= in Python")
    checkpoint = read_zip(path, probe_spaces(env))
    check_content(checkpoint, path)
    return checkpoint


def stored_spaces(entries: Checkpoint) -> Spaces | dict[str, Spaces]:
    """Return the spaces in a checkpoint, or those of each behavior."""
    return {name: _spaces(stored) for name, stored in entries["behaviors"].items()} if "behaviors" in entries else _spaces(entries)


def _spaces(entries: Checkpoint) -> Spaces:
    observation, action = map(from_plain, entries["spaces"])
    agents = tuple(entries.get("agents", ())), entries.get("in_turn", False), entries.get("joint", "")
    spaces = Spaces(observation, action, entries.get("masked", False), *agents, groups=entries.get("groups", 0))
    if spaces.groups and (not spaces.agents or len(spaces.agents) % spaces.groups):
        raise ValueError(f"{len(spaces.agents)} agents in {spaces.groups} groups of equal size")
    return spaces


def _without_choices(settings: dict[str, object]) -> dict[str, object]:
    """Remove what a checkpoint must not decide: a program that is the environment, and where the folder of a replay buffer is created."""
    settings = settings if find_program(settings) is None else {**settings, "env": None}
    replay = settings.get("replay")
    folder = replay.get("directory") if isinstance(replay, dict) else None
    is_new = folder is not None and not (isinstance(folder, str) and Path(folder).is_dir())
    return {**settings, "replay": {**replay, "directory": None}} if isinstance(replay, dict) and is_new else settings


def find_program(settings: Mapping[str, object]) -> str | None:
    """Return the id of the environment if it is a program, a build of Unity, which a checkpoint must not start."""
    env = settings.get("env")
    env_id = env.get("id") if isinstance(env, Mapping) else env
    return env_id if isinstance(env_id, str) and env_id.startswith(PREFIX) else None


class _TooManyWeightsError(SettingError):
    """The settings of a file are those of a network with many more weights than it holds."""


_rooms: list[list[int]] = []
"""How many weights, and numbers in them, may still be built, for each file that is being loaded: one may name another."""


@contextmanager
def limited_weights(stored: Mapping[str, Tensor], path: Path) -> Iterator[None]:
    """Raise `SettingError` for networks with many more weights than a file has, before they take all memory or minutes to build."""
    room = [100 + 10 * len(stored), 10**6 + 10 * sum(weight.numel() for weight in stored.values())]

    def count(module: nn.Module, name: str, weight: nn.Parameter) -> None:
        if room is _rooms[-1] and not is_lazy(weight):
            room[:] = room[0] - 1, room[1] - weight.numel()
            if min(room) < 0:
                raise _TooManyWeightsError(f"ckpt_path {shown(path)} does not fit its own settings, which have many more weights")

    _rooms.append(room)
    try:
        with register_module_parameter_registration_hook(count):
            yield
    finally:
        _rooms.pop()


def _sketch(cls: type[pl.LightningModule], settings: dict[str, object]) -> dict[str, Tensor] | None:
    """Return an algorithm's weights on the meta device, without allocating them; None if it cannot be built there."""
    try:
        with torch.device("meta"):
            algorithm = cls(**settings)
            algorithm.configure_model()
            return algorithm.state_dict()
    except _TooManyWeightsError:
        raise
    except Exception:  # a user's algorithm may read its weights; a wrong setting fails again with real weights
        return None


def read_checkpoint(path: str | Path, map_location: str | torch.device = "cpu") -> Checkpoint:
    """Read one of our checkpoints as plain data, or its previous generation if it is corrupt; code in it never runs."""
    path = Path(path)
    if is_zip(path):
        raise SettingError(
            f"ckpt_path {shown(path)} is an agent of Stable-Baselines3: it can act (--env), but not be trained or shared here"
        )
    if is_agent(path):
        checkpoint = read_agent(path)
        check_content(checkpoint, path)
        return checkpoint
    if not path.is_file() and not previous_path(path).is_file():
        others = [file.name for file in path.parent.glob("*.ckpt")]
        if path.suffix != ".ckpt" and (runs := [run.name for run in path.parent.glob("*") if (run / "checkpoints").is_dir()]):
            raise SettingError(f"ckpt_path {shown(path)}: there is no such run{nearest(path.name, runs)}")
        raise SettingError(f"ckpt_path {shown(path)} is not a file; checkpoints are in RUN/checkpoints{nearest(path.name, others)}")
    checkpoint = read_verified(path, map_location)
    check_content(checkpoint, path)
    return checkpoint


def best_of(path: str | Path) -> Path:
    """Return the best checkpoint of a run's folder, the downloaded file of an agent on the hub, or the path itself."""
    if not is_address(path):
        check_path("ckpt_path", path)
    return checkpoint_of(path, "ckpt_path", "best.ckpt") if is_address(path) or Path(path).is_dir() else Path(path)


def checkpoint_of(source: str | Path, option: str, name: str) -> Path:
    """Return a checkpoint by name from a run's folder, the weights of a shared agent, or `source` if it is a file."""
    if is_address(source):
        return download(source)
    source = Path(source)
    if (agent := agent_of(source)) is not None:
        return agent
    if source.is_file():
        return source
    if not source.is_dir():
        raise SettingError(f"{option} {shown(source)} is neither a run's folder nor a checkpoint")
    checkpoint = last_generation(source / "checkpoints", name) or last_generation(source, name)
    if checkpoint is None:
        saved = find_saved(source / "checkpoints")
        reason = ": no evaluation saved one" if name == "best.ckpt" and saved is not None else ""
        way_out = f"{reason}; name " + ("a run's folder or a checkpoint" if saved is None else shown(saved))
        raise SettingError(f"{option} {shown(source)} has no checkpoints/{name}{way_out}")
    return checkpoint


def stored_name(cls: type) -> str:
    """Return an algorithm's name in files: `PPO` for one of this package, `my_module.MyPPO` for others."""
    return cls.__name__ if cls.__module__ == MODELS.get(cls.__name__) else f"{cls.__module__}.{cls.__qualname__}"


def algorithm_class(name: str, base: type[A]) -> type[A]:
    """Return an algorithm of this package, or an imported one, by its class name or its stored name."""
    if name in MODELS:
        return getattr(importlib.import_module("lightning_rl"), name)
    imported = {key: cls for cls in (base, *_subclasses(base)) for key in (cls.__name__, stored_name(cls))}
    if name not in imported:
        names = {*MODELS, *(key for key, cls in imported.items() if cls.__module__.partition(".")[0] != "lightning_rl")}
        advice = "your own: import its module first, or --import its_module"
        raise SettingError(f"there is no algorithm {name[:60]!r} ({advice}){suggest_algorithm(name, names)}")
    return imported[name]


def _subclasses(cls: type[A]) -> list[type[A]]:
    children: list[type[A]] = cls.__subclasses__()
    return [heir for child in children for heir in (child, *_subclasses(child))]


def take_weights(algorithm: nn.Module, source: str | Path) -> list[str]:
    """Copy the weights of a checkpoint, or of a run's last one, for each layer that fits; other layers keep their initial weights.

    Returns:
        One line for each layer that keeps its initial weights, with the reason.

    Raises:
        SettingError: there is no checkpoint, or none of its layers fits.
    """
    path = checkpoint_of(source, "init_from", "last.ckpt")
    try:
        stored, current = read_checkpoint(path)["state_dict"], algorithm.state_dict()
    except SettingError as error:
        raise SettingError(f"init_from {str(error).removeprefix('ckpt_path ')}") from error
    layers: dict[str, list[str]] = defaultdict(list)
    for name in current:
        layers[name.rpartition(".")[0]].append(name)
    lines = []
    for layer, names in layers.items():
        reason = next((why for name in names if (why := _misfit(stored.get(name), current[name]))), None)
        if reason is None:
            for name in names:
                current[name].copy_(stored[name])
        else:
            lines.append(f"init_from: {layer} keeps its initial weights: {reason}")
    if len(lines) == len(layers):
        raise SettingError(f"init_from {str(source)!r}: none of its weights fit this model; use the same network settings")
    return lines


def check_spaces(env: EnvConfig, stored: Spaces, path: str | Path) -> None:
    """Raise `SettingError` unless an environment has the spaces that a policy was trained with."""
    spaces = probe_spaces(env, stored.joint)
    if (spaces.observation, spaces.action) != (stored.observation, stored.action):
        raise SettingError(f"{shown(path)} was trained with other observations or actions than {env.name} has")


def check_weights(stored: Mapping[str, Tensor], current: Mapping[str, Tensor], path: str | Path, changes: Sequence[str] = ()) -> None:
    """Raise `SettingError` unless a file's weights match a model's in names, shapes and dtypes, and are finite.

    `changes`: those to the networks that the file's algorithm had, which may be why they do not match.
    """
    way_out = f"these had been changed: {list_changes(changes)}" if changes else "use the same settings"
    for name in sorted(stored.keys() | current.keys()):
        reason = _misfit(stored.get(name), current.get(name))
        if reason is None and stored[name].dtype != current[name].dtype:
            reason = f"it is {stored[name].dtype} in the checkpoint, {current[name].dtype} here"
        if reason is not None:
            raise SettingError(f"ckpt_path {shown(path)} does not fit the model: {name}: {reason}; {way_out}")


def _misfit(stored: Tensor | None, current: Tensor | None) -> str | None:
    """Return why a weight cannot be copied; None if it can."""
    if stored is None or current is None:
        return f"it is not in the {'checkpoint' if stored is None else 'model'}"
    if stored.shape != current.shape:
        return f"{list(stored.shape)} in the checkpoint, {list(current.shape)} here"
    return "it is NaN or infinite in the checkpoint" if not current.is_meta and is_finite(current) and not is_finite(stored) else None


def describe_changes(algorithm: pl.LightningModule, path: str | Path) -> str | None:
    """Return a line with each setting that differs from a checkpoint's, and both values; None if none does. The length does not count."""
    changed = changed_settings(read_checkpoint(path)["hyper_parameters"], algorithm.hparams)
    changed.pop(f"max_{algorithm.counter}", None)
    both = [f"{name} {shorten(str(now), 60)} (was {shorten(str(before), 60)})" for name, (before, now) in changed.items()]
    return f"settings that differ from the checkpoint's: {', '.join(both)}" if both else None


def changed_settings(stored: Mapping[str, object], current: Mapping[str, object], prefix: str = "") -> dict[str, tuple[object, object]]:
    """Return the changed settings by name, such as `env.id`, with both values; settings that only one side has are left out."""
    changed: dict[str, tuple[object, object]] = {}
    for name in [name for name in stored if name in current and stored[name] != current[name]]:
        before, now = stored[name], current[name]
        if isinstance(before, Mapping) and isinstance(now, Mapping) and "class_path" not in before:
            changed |= changed_settings(before, now, f"{prefix}{name}.")
        else:
            changed[f"{prefix}{name}"] = before, now
    return changed


def check_names(settings: Mapping[str, object], path: str | Path, imported: bool = True) -> None:
    """Raise `SettingError` for names that cannot be an environment or wrapper, and with `imported`, for modules that are not imported."""
    for module, name in _named(settings, path):
        package = module.partition(".")[0]
        if package in sys.stdlib_module_names or not package.isidentifier():
            quoted = shorten(repr(module), 40)
            raise SettingError(f"{shown(path)} names {quoted} as a module of an environment or wrapper, which it is not: do not trust it")
        if name in UNTRUSTED_WRAPPERS:
            raise SettingError(f"{shown(path)} names the wrapper {name}, which {UNTRUSTED_WRAPPERS[name]}; pass env yourself")
        if imported and package not in TRUSTED_PACKAGES and module not in sys.modules:
            raise SettingError(f"{shown(path)} names the module {module!r}; if you trust it, add --import {module} (or import it before)")
    if imported and (env_id := _unpackaged_path(settings)) is not None and not _may_build(env_id):
        raise SettingError(f"{shown(path)} names {shorten(env_id, 60)} as its environment, which is part of a library; pass env yourself")
    for encoder in _own_encoders(settings):
        if imported and _is_library(encoder.partition(".")[0]):
            raise SettingError(f"{shown(path)} names {shorten(encoder, 60)} as an encoder, which is part of a library: do not trust it")
    for player in _scripted_players(settings):
        package = player.partition(".")[0]
        if imported and (package in sys.stdlib_module_names or _is_library(package)):
            raise SettingError(f"{shown(path)} names {shorten(player, 60)} as an opponent, which is part of a library: do not trust it")


def _scripted_players(settings: Mapping[str, object]) -> list[str]:
    """Return the scripted opponents in settings of self-play, without random moves and runs."""
    opponents = [mapping.get("opponents") for mapping in mappings(settings)]
    names = [name for opponent in opponents if isinstance(opponent, list | tuple) for name in opponent]
    return [name for name in names if isinstance(name, str) and name != "random" and not is_address(name) and not Path(name).exists()]


def _own_encoders(settings: Mapping[str, object]) -> list[str]:
    """Return the encoders that settings name by path."""
    named = [mapping.get("encoder") for mapping in mappings(settings)]
    return [name for name in named if isinstance(name, str) and "." in name]


def _unpackaged_path(settings: Mapping[str, object]) -> str | None:
    """Return the id of the environment if it is a path outside PettingZoo's packages."""
    env = settings.get("env")
    env_id = env.get("id") if isinstance(env, Mapping) else env
    return env_id if isinstance(env_id, str) and is_path(env_id) and not is_packaged(env_id) else None


def _is_library(package: str) -> bool:
    """Return whether an imported package is an installed library other than ours."""
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    installed = any({"site-packages", "dist-packages"} & {*Path(place).parts} for place in places if place)
    return installed and package not in TRUSTED_PACKAGES


def _may_build(env_id: str) -> bool:
    """Return whether a file may name this path in an imported module; in a library only modules and gymnasium's environments."""
    package = env_id.partition(".")[0]
    if package in sys.modules and package not in TRUSTED_PACKAGES and not _is_library(package):
        return True
    module, _, name = env_id.rpartition(".")
    try:
        has_environments = module.startswith(("gymnasium.envs.", "lightning_rl.envs."))
        attribute = getattr(importlib.import_module(module) if has_environments else sys.modules.get(module), name, None)
        if isinstance(attribute, type) and issubclass(attribute, gym.Env):
            return True
        return find_spec(env_id) is not None
    except (ImportError, ValueError, gym.error.DependencyNotInstalled):  # its parent is not a package, or lacks one
        return False


def check_environment(env: object, numbers: int, path: str | Path) -> None:
    """Raise `SettingError` for an environment that opens a window, or that stacks more frames than its observations have numbers."""
    if any(mapping.get("render_mode") == "human" for mapping in mappings(env)):
        raise SettingError(f"{shown(path)} names the render_mode human, which opens a window; pass env yourself")
    stacked = [("frame_stack", env.get("frame_stack"))] if isinstance(env, Mapping) else []
    for wrapper in (env.get("wrappers") or []) if isinstance(env, Mapping) else ():
        if isinstance(wrapper, Mapping) and str(wrapper.get("class_path")).rpartition(".")[2] == "FrameStackObservation":
            stacked += [("stack_size", mapping.get("stack_size")) for mapping in mappings(wrapper.get("init_args"))]
    for name, frames in stacked:
        if isinstance(frames, int | float) and frames > numbers:
            raise SettingError(f"{shown(path)} holds env.{name} {frames}, but its observations have {numbers} numbers")


def foreign_modules(settings: Mapping[str, object], path: str | Path) -> list[str]:
    """Return the modules of other packages that settings name."""
    return [module for module, _ in _named(settings, path) if module.partition(".")[0] not in TRUSTED_PACKAGES]


def _named(settings: Mapping[str, object], path: str | Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of everything that settings import."""
    env = settings.get("env")
    env = {"id": env or ""} if env is None or isinstance(env, str) else env
    env_id, wrappers = (env.get("id"), env.get("wrappers") or []) if isinstance(env, Mapping) else (None, None)
    if (
        not isinstance(env_id, str)
        or not isinstance(wrappers, list | tuple)
        or not all(isinstance(wrapper, Mapping | str) for wrapper in wrappers)
    ):
        raise SettingError(f"ckpt_path {shown(path)} is not a checkpoint of lightning_rl: its env is not an environment")
    module, colon, name = env_id.rpartition(":")
    if colon and not env_id.startswith(PREFIX):
        yield module, name
    elif is_path(env_id) and not is_packaged(env_id):
        yield env_id.rpartition(".")[0], ""
    paths: list[object] = [wrapper for wrapper in wrappers if isinstance(wrapper, str)]
    paths += [mapping[key] for mapping in mappings(settings) for key in ("class_path", "_instantiator") if key in mapping]
    paths += _own_encoders(settings)
    for named in paths:
        if not isinstance(named, str):
            raise SettingError(f"ckpt_path {shown(path)} is not a checkpoint of lightning_rl: a class_path must be a string")
        module, _, name = named.rpartition(".")
        yield module or "gymnasium", name
