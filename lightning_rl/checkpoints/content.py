"""What a checkpoint must hold before anything in it is used, and what it may name.

A file that passes `torch.load(weights_only=True)` can still name modules and folders, or sizes that no machine has; it is data of others.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from lightning_rl.checkpoints.files import shown
from lightning_rl.errors import SettingError

FORMAT_VERSION = 1
KEYS = ("state_dict", "hyper_parameters", "lightning_rl")
LARGEST_SPACE = 1 << 26
"""Numbers in an observation."""
UNTRUSTED_WRAPPERS = {"RecordVideo": "writes files where the checkpoint says", "HumanRendering": "opens a window"}
"""Wrappers that do more than to change what is observed, done and paid, and what they do."""

FRAME_STACK = "FrameStackObservation"
"""The wrapper that repeats observations as often as it is asked to."""


def check_content(checkpoint: Any, path: str | Path) -> None:
    """Raise `SettingError` unless a file holds one of our checkpoints, of a format that this version reads."""
    if not isinstance(checkpoint, dict) or not all(isinstance(checkpoint.get(key), dict) for key in KEYS):
        raise SettingError(f"ckpt_path {shown(path)} is not a checkpoint of lightning_rl; those have a {', '.join(KEYS)}")
    own, weights, settings = (checkpoint[key] for key in ("lightning_rl", "state_dict", "hyper_parameters"))
    version = own.get("format_version", 1)
    if type(version) is not int or version < 1:
        raise _wrong(path, f"format_version {version!r}")
    if version > FORMAT_VERSION:
        raise SettingError(
            f"ckpt_path {shown(path)} has format {version}, this version reads {FORMAT_VERSION}: install a newer lightning_rl"
        )
    if not isinstance(own.get("algorithm"), str):
        raise SettingError(f"ckpt_path {shown(path)} is not a checkpoint of lightning_rl; those name their algorithm")
    for name in ("env_steps", "updates", "episodes"):
        if type(own.get(name)) is not int or own[name] < 0:
            raise _wrong(path, f"{name} {own.get(name)!r}")
    if not isinstance(own.get("spaces"), list | tuple) or len(own["spaces"]) != 2:
        raise _wrong(path, "spaces that are not two")
    if type(own.get("masked", False)) is not bool:
        raise _wrong(path, f"masked {own['masked']!r}")
    for space in mappings(own["spaces"]):
        if not _has_sane_shape(space.get("shape", space.get("n"))):
            raise _wrong(path, f"a space of shape {space.get('shape', space.get('n'))!r}")
    for name, weight in weights.items():
        if not isinstance(name, str) or not isinstance(weight, Tensor) or weight.layout is not torch.strided:
            raise _wrong(path, f"{name!r} among its weights")
    for name in settings:
        if not isinstance(name, str) or name.startswith("_"):
            raise _wrong(path, f"the setting {name!r}")


TRUSTED = ("gymnasium", "lightning_rl")
"""Packages that a file may name."""


def check_names(settings: Mapping[str, Any], path: str | Path, imported: bool = True) -> None:
    """Refuse modules that a file names and the user did not: a checkpoint must not choose what is imported.

    Args:
        settings: the hyper-parameters of a file, or what else may name classes.
        path: the file.
        imported: whether modules that were not imported are refused too, or only what no environment or wrapper can be.
    """
    for module, name in _named(settings, path):
        package = module.partition(".")[0]
        if package in sys.stdlib_module_names or not package.isidentifier():
            said = shorten(repr(module), 40)
            raise SettingError(f"{shown(path)} names {said} as a module of an environment or wrapper, which it is not: do not trust it")
        if name in UNTRUSTED_WRAPPERS:
            raise SettingError(f"{shown(path)} names the wrapper {name}, which {UNTRUSTED_WRAPPERS[name]}; pass env yourself")
        if imported and package not in TRUSTED and module not in sys.modules:
            raise SettingError(f"{shown(path)} names the module {module!r}; if you trust it, add --import {module} (or import it before)")


def check_environment(env: Any, numbers: int, path: str | Path) -> None:
    """Refuse an environment that opens a window, or that stacks more frames than its observations have numbers.

    Args:
        env: the settings in a file, of which `check_names` refused none.
        numbers: how many an observation has by the same file.
        path: the file.
    """
    for each in mappings(env):
        if each.get("render_mode") == "human":
            raise SettingError(f"{shown(path)} names the render_mode human, which opens a window; pass env yourself")
    for name, frames in _stacked_frames(env):
        if isinstance(frames, int | float) and frames > numbers:
            raise SettingError(f"{shown(path)} holds env.{name} {frames}, and its observations have {numbers} numbers")


def foreign_modules(settings: Mapping[str, Any], path: str | Path) -> list[str]:
    """The modules of others that the settings in a file name, which are not imported for its sake."""
    return [module for module, _ in _named(settings, path) if module.partition(".")[0] not in TRUSTED]


def check_weights(stored: Mapping[str, Tensor], own: Mapping[str, Tensor], path: str | Path) -> None:
    """Raise `SettingError` unless a file's weights have the names, shapes and types of a model's, and are numbers."""
    shapes, here = ({name: tuple(value.shape) for name, value in each.items()} for each in (stored, own))
    for name in sorted(shapes.keys() | here.keys()):
        if shapes.get(name) != here.get(name):
            raise SettingError(
                f"ckpt_path {shown(path)} does not fit the model: {name} is {shapes.get(name)} there and {here.get(name)} here; "
                "use the same settings"
            )
        if stored[name].dtype != own[name].dtype:
            said = f"{stored[name].dtype} there and {own[name].dtype} here"
            raise SettingError(f"ckpt_path {shown(path)} does not fit the model: {name} is {said}")
        if not own[name].is_meta and not _is_finite(stored[name]) and _is_finite(own[name]):
            raise SettingError(f"ckpt_path {shown(path)} is of no use: {name} holds numbers that are none (NaN or infinite)")


def mappings(tree: Any) -> Iterator[Mapping[Any, Any]]:
    """All mappings in plain data, from the outside in."""
    stack = [tree]
    while stack:
        each = stack.pop()
        if isinstance(each, Mapping):
            yield each
            stack.extend(each.values())
        elif isinstance(each, list | tuple):
            stack.extend(each)


def _named(settings: Mapping[str, Any], path: str | Path) -> Iterator[tuple[str, str]]:
    """Module and name of all that settings ask to import."""
    env = settings.get("env")
    if isinstance(env, str):
        env = {"id": env}
    if env is not None:
        if not isinstance(env, Mapping) or not isinstance(env.get("id"), str) or not isinstance(env.get("wrappers") or [], list | tuple):
            raise _wrong(path, "an environment without an id")
        if ":" in env["id"]:
            module, _, name = env["id"].rpartition(":")
            yield module, name
        for wrapper in env.get("wrappers") or []:
            if not isinstance(wrapper, Mapping | str):
                raise _wrong(path, f"{wrapper!r} as a wrapper")
            if isinstance(wrapper, str):
                yield wrapper.rpartition(".")[0] or "gymnasium", wrapper.rpartition(".")[2]
    for each in mappings(settings):
        for key in ("class_path", "_instantiator"):
            if key in each:
                if not isinstance(each[key], str):
                    raise _wrong(path, f"{each[key]!r} as a {key}")
                module, _, name = each[key].rpartition(".")
                yield module or "gymnasium", name


def _stacked_frames(env: Any) -> Iterator[tuple[str, Any]]:
    """Find the settings that multiply an environment's observations; its own arguments may have the same names and mean anything."""
    if not isinstance(env, Mapping):
        return
    yield "frame_stack", env.get("frame_stack")
    for wrapper in env.get("wrappers") or []:
        if isinstance(wrapper, Mapping) and str(wrapper.get("class_path")).rpartition(".")[2] == FRAME_STACK:
            for arguments in mappings(wrapper.get("init_args")):
                yield "stack_size", arguments.get("stack_size")


def _has_sane_shape(shape: Any) -> bool:
    sizes = shape if isinstance(shape, list | tuple) else [1]
    return all(type(size) is int and size >= 0 for size in sizes) and math.prod(sizes) <= LARGEST_SPACE


def _is_finite(weight: Tensor) -> bool:
    return not (weight.is_floating_point() or weight.is_complex()) or bool(torch.isfinite(weight).all())


def _wrong(path: str | Path, what: str) -> SettingError:
    return SettingError(f"ckpt_path {shown(path)} holds {shorten(what, 60, placeholder=' …')}, which none of lightning_rl does")
