"""From a checkpoint to a file that needs no part of this package, checked before it takes its name."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.algorithms.loading import best_of, stored_name
from lightning_rl.algorithms.policy import Policy
from lightning_rl.cpu_threads import torch_threads
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, check_choice
from lightning_rl.exporting.checking import TOLERANCE, Parity, check
from lightning_rl.exporting.formats import FORMATS, check_packages
from lightning_rl.exporting.graph import PolicyGraph
from lightning_rl.saving.atomic import SaveFailed, Staged, stage, taking_its_place
from lightning_rl.saving.files import previous_path
from lightning_rl.saving.manifest import damage, manifest_path, written_by
from lightning_rl.spaces import Spaces, to_plain

FORMAT_VERSION = 1


def export_policy(ckpt_path: str | Path, out: str | Path | None = None, format: str | None = None) -> Path:
    """Write a checkpoint's policy as a file of another kind, and beside it `<file>.json`, which describes it. Returns the file.

    The file is written under a temporary name and must do what the policy does at 1,000 observations (see `exporting/checking.py`) before
    it takes its own; otherwise nothing is left of it, and what lay there before stays.

    Args:
        ckpt_path: a `.ckpt` file, or a run's folder: its `checkpoints/best.ckpt`.
        out: the file; beside the checkpoint unless given.
        format: `onnx`, `torch` (a program of `torch.export`) or `safetensors` (weights alone); what the suffix of `out` says unless given.

    Raises:
        SettingError: no such format, a package is missing, the checkpoint cannot be loaded, the policy cannot be traced, what was written
            differs from the policy, or the file cannot be saved.
    """
    ckpt_path = best_of(ckpt_path)
    format = format or _format_of(out)
    check_choice("format", format, FORMATS)
    path = ckpt_path.parent / f"{ckpt_path.stem}{FORMATS[format].suffix}" if out is None else Path(out)
    if path.is_dir() or path.suffix == ".ckpt":
        raise SettingError(f"out {path.name!r} is {'a folder' if path.is_dir() else 'a checkpoint'}; name another file")
    implied = next((name for name, kind in FORMATS.items() if kind.suffix == path.suffix), format)
    if implied != format:
        way_out = f"leave the format out, or name a file that ends in {FORMATS[format].suffix}"
        raise SettingError(f"out {path.name!r} is a name for the format {implied}, not {format}; {way_out}")
    if not path.parent.is_dir():
        raise SettingError(f"out {path.name!r}: there is no folder {path.parent}; make it first")
    check_packages(format)
    algorithm = Algorithm.load_from_checkpoint(ckpt_path)
    with torch_threads(1):
        try:
            _write(path, format, algorithm, _source(ckpt_path))
        except SaveFailed as error:
            raise SettingError(str(error)) from error
    return path


def _format_of(out: str | Path | None) -> str:
    """By its suffix; onnx for no file."""
    suffixes = {each.suffix: name for name, each in FORMATS.items()}
    suffix = ".onnx" if out is None else Path(out).suffix
    if suffix not in suffixes:
        raise SettingError(f"out {Path(out or '').name!r} does not tell its format; give one, or a suffix {', '.join(suffixes)}")
    return suffixes[suffix]


def _source(ckpt_path: Path) -> dict[str, Any]:
    """The file that was loaded: the generation before where a checkpoint is missing or damaged."""
    whole = ckpt_path.is_file() and damage(ckpt_path) is None
    path = ckpt_path if whole else previous_path(ckpt_path)
    with path.open("rb") as file:
        return {"file": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _write(path: Path, format: str, algorithm: Algorithm, source: dict[str, Any]) -> None:
    policy, kind = Policy(algorithm.network, algorithm.spaces), FORMATS[format]
    with _one_line(f"this policy cannot be written as {format}"):
        graph = PolicyGraph(algorithm.network, algorithm.spaces)
        metadata = describe(algorithm, graph, format, source)
        data = kind.write(graph, algorithm.spaces, json.dumps(metadata, allow_nan=False))
    staged = stage(path, lambda file: file.write(data))
    with taking_its_place(staged, path.name):
        with _one_line(f"the exported policy cannot be run by {format}"):
            parity = check(kind.read(staged.temporary.read_bytes(), graph), policy)
        beside = stage_description(staged, metadata, parity)
        try:
            beside.path.unlink(missing_ok=True)  # the file is never beside the description of another
            staged.commit()
            beside.commit()
        finally:
            beside.discard()


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Exporters and what runs their files raise whatever they meet."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:
        raise SettingError(f"{what} ({shorten(f'{type(error).__name__}: {error}', 100, placeholder=' …')})") from error


def stage_description(file: Staged, metadata: dict[str, Any], parity: Parity) -> Staged:
    """What lies beside a file: its description, its size and hash, and what the check found."""
    found = {**parity._asdict(), "tolerance": TOLERANCE}
    content = {**metadata, "size": file.size, "sha256": file.sha256, "check": found}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    return stage(manifest_path(file.path), lambda beside: beside.write(text.encode()))


def describe(algorithm: Algorithm, graph: PolicyGraph, format: str, source: dict[str, Any]) -> dict[str, Any]:
    """Plain data that says what a policy takes and gives, and where it comes from; nothing of the machine."""
    spaces: Spaces = algorithm.spaces
    env = algorithm.env if isinstance(algorithm.env, EnvConfig) else None
    return {
        "format_version": FORMAT_VERSION,
        "format": format,
        "algorithm": stored_name(type(algorithm)),
        "environment": env and env.id,
        "environment_kwargs": _finite(env.kwargs) if env else {},
        algorithm.counter: algorithm.count,
        "observation_space": _finite(to_plain(spaces.observation)),
        "action_space": _finite(to_plain(spaces.action)),
        "inputs": [{**port._asdict(), "shape": ["batch", *port.shape]} for port in graph.inputs],
        "outputs": [{**port._asdict(), "shape": ["batch", *port.shape]} for port in graph.outputs],
        "begin_episode": "zeros in a row of each memory input" if any(port.role == "memory" for port in graph.inputs) else None,
        "versions": {**written_by()["versions"], **{name: version(name) for name in FORMATS[format].packages}},
        "checkpoint": source,
    }


def _finite(plain: Any) -> Any:
    """Infinite bounds as `"inf"` and `"-inf"`: JSON knows none."""
    if isinstance(plain, dict):
        return {key: _finite(child) for key, child in plain.items()}
    if isinstance(plain, list):
        return [_finite(child) for child in plain]
    return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain
