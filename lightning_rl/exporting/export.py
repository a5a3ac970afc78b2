"""Export a checkpoint's policy, checked against the original before the file takes its name."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.checkpoints.atomic import SaveFailed, Staged, committing, stage
from lightning_rl.checkpoints.files import previous_path
from lightning_rl.checkpoints.manifest import damage, manifest_path, written_by
from lightning_rl.distributions.distribution import split_mask
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, check_choice
from lightning_rl.exporting.formats import FORMATS, PolicyGraph, Run, check_packages
from lightning_rl.policy import Policy
from lightning_rl.spaces import Spaces, allocate, choice_sizes, limits, samples, to_plain
from lightning_rl.threads import torch_threads
from lightning_rl.training.loading import best_of, stored_name
from lightning_rl.types import Tree, tree_leaves, tree_map, tree_to_numpy, tree_to_torch

STEPS, ROWS = 10, (99, 1)
"""1,000 observations."""
TOLERANCE = 1e-5
DRIFT = 100
"""How many times that a memory may differ by."""
HUGE = 1e18
"""Numbers whose squares are nearly infinite in float32: a bound from here on is none."""


class Parity(NamedTuple):
    """What a check found: on how many observations, the greatest difference of numbers of actions and of memories, the greatest as a share
    of what is allowed, and how many other choices passed as ties."""

    observations: int
    max_abs_difference: float
    max_abs_difference_of_memory: float
    max_share_of_allowed: float
    ties: int


def check(run: Run, policy: Policy, seed: int = 0) -> Parity:
    """Compare what an exported policy does with what the policy does.

    Raises:
        SettingError: they differ.
    """
    found = Check(policy, seed)
    for rows in ROWS:
        found.play(run, rows)
    return Parity(sum(ROWS) * STEPS, found.difference, found.drift, found.share, found.ties)


class Check:
    """A comparison under way. `difference`, `drift`, `share` and `ties` as in `Parity`."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy, self.spaces, self.random = policy, policy.spaces, np.random.default_rng(seed)
        self.spaces.observation.seed(seed)
        self.distribution = policy.network.distribution
        self.difference, self.drift, self.share, self.ties = 0.0, 0.0, 0.0, 0

    def play(self, run: Run, rows: int) -> None:
        """Ten steps in a row, `rows` at once."""
        memory: Tree = None
        theirs = tree_leaves(tree_to_numpy(self.policy.network.initial_memory(rows)))
        for _ in range(STEPS):
            obs, mask = tree_map(self.readable, samples(self.spaces.observation, rows)), legal_masks(self.spaces, rows, self.random)
            given = [*tree_leaves(obs), *tree_leaves(mask), *theirs]
            action, after = self.policy.act(obs, memory, action_mask=None if isinstance(mask, tuple) else mask)
            outputs = list(run(given))
            expected = [*self.distribution.flat(action), *tree_leaves(tree_to_numpy(after))]
            for ours, other in zip(expected, outputs, strict=True):
                if (ours.shape, ours.dtype) != (other.shape, other.dtype):
                    raise refusal(f"gives {other.dtype}{list(other.shape)} for {ours.dtype}{list(ours.shape)}")
            count = len(expected) - len(theirs)
            self.compare_actions(expected[:count], outputs[:count], obs, mask, memory)
            for ours, other in zip(expected[count:], outputs[count:], strict=True):
                self.drift = max(self.drift, self.compare(ours, other, DRIFT * np.maximum(1, np.abs(ours)), "a memory"))
            memory, theirs = after, outputs[count:]

    def readable(self, leaf: np.ndarray) -> np.ndarray:
        """What was drawn between bounds as wide as float32 reaches, drawn as if there were none."""
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        return np.where(np.abs(leaf.astype(float)) < HUGE, leaf, self.random.standard_normal(leaf.shape)).astype(leaf.dtype)

    def compare_actions(self, expected: list[np.ndarray], given: list[np.ndarray], obs: Tree, mask: Tree, memory: Tree) -> None:
        """The leaves of an action, choices apart from numbers."""
        leaves, bounds = self.distribution.leaves(), self.distribution.flat(limits(self.spaces.action))
        for i, (leaf, ours, other) in enumerate(zip(leaves, expected, given, strict=True)):
            if not leaf.sizes:
                low, high = bounds[i].astype(float).clip(-HUGE, HUGE)
                scale = np.where(high - low < HUGE, high - low, np.abs(ours))
                self.difference = max(self.difference, self.compare(ours, other, scale, "an action"))
            elif not np.array_equal(ours, other):
                x, legal = self.asked(obs, mask, memory)[i]
                gap = [leaf.evaluate(x, torch.from_numpy(leaf.from_env(each)), legal)[0] for each in (ours, other)]
                if not bool(((gap[0] - gap[1]).abs() <= TOLERANCE * max(1.0, float(x.abs().max()))).all()):
                    raise refusal(f"makes other choices in {int((ours != other).sum())} of {ours.size} cases")
                self.ties += int((ours != other).sum())

    @torch.no_grad()
    def asked(self, obs: Tree, mask: Tree, memory: Tree) -> list[tuple[Tensor, Tree]]:
        """The input of each leaf of the distribution, and its part of the mask."""
        rows = len(tree_leaves(obs)[0])
        stored = tree_map(lambda kept, leaf: leaf.astype(kept.dtype), allocate(self.spaces.observation), obs)
        network = self.policy.network
        x, _ = network.policy(tree_to_torch(stored), network.initial_memory(rows) if memory is None else memory, None)
        leaves = self.distribution.leaves()
        masks = split_mask(tree_to_torch(mask), [leaf.mask_width for leaf in leaves])
        return list(zip(x.split([leaf.num_inputs for leaf in leaves], -1), masks, strict=True))

    def compare(self, ours: np.ndarray, other: np.ndarray, scale: np.ndarray, what: str) -> float:
        """The greatest difference of numbers, of which `scale` is the width or the magnitude."""
        difference = np.abs(ours.astype(float) - other)
        allowed = np.maximum(TOLERANCE * np.maximum(1, scale), np.spacing(np.abs(ours)))
        shares = difference / allowed
        worst = np.unravel_index(shares.argmax(), shares.shape)
        if not shares[worst] <= 1:
            raise refusal(f"differs by {difference[worst]:.3g} in {what}, where {allowed[worst]:.3g} is allowed")
        self.share = max(self.share, float(shares[worst]))
        return float(difference.max())


def legal_masks(spaces: Spaces, num: int, random: np.random.Generator) -> Tree:
    """Random masks `[num, M]` that leave a choice in each part; () where the environment rules out nothing."""
    if not spaces.masked:
        return ()
    parts = []
    for size in choice_sizes(spaces.action):
        parts.append(random.random((num, size)) < 0.5)
        parts[-1][np.arange(num), random.integers(size, size=num)] = True
    return np.concatenate(parts, 1)


def refusal(how: str) -> SettingError:
    """That an exported policy is not the one it was exported from."""
    return SettingError(f"the exported policy {how}; it is not what the checkpoint's policy does, so nothing was written")


FORMAT_VERSION = 1


def export_policy(ckpt_path: str | Path, out: str | Path | None = None, format: str | None = None) -> Path:
    """Write a checkpoint's policy as a file of another kind, and beside it `<file>.json`, which describes it. Returns the file.

    The file is written under a temporary name and must do what the policy does at 1,000 observations (see `exporting/export.py`) before
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
    with committing(path.name, staged):
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
