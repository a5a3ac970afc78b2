"""Export a checkpoint's policy, and compare it with the original before the file gets its final name."""

import hashlib
import importlib
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

from lightning_rl.checkpoints.atomic import committing, stage
from lightning_rl.checkpoints.files import previous_path
from lightning_rl.checkpoints.manifest import damage, manifest_path, written_by
from lightning_rl.distributions.distribution import split_mask
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, check_choice, missing_extra
from lightning_rl.exporting.formats import Onnx, PolicyGraph, Run, Safetensors, Torch
from lightning_rl.exporting.unity import Unity, UnityGraph
from lightning_rl.networks.changes import copy_network, list_changes
from lightning_rl.networks.normalization import eval_mode
from lightning_rl.policy import Env, Policy, load_run
from lightning_rl.settings.yaml_files import Plain
from lightning_rl.sharing.hub import is_address, is_agent, is_zip
from lightning_rl.spaces import Spaces, allocate, choice_sizes, limits, samples, to_plain
from lightning_rl.training.hooks import RunModule
from lightning_rl.training.learning import LearningModule, choose_behavior
from lightning_rl.training.loading import best_of, stored_name
from lightning_rl.training.threads import torch_threads
from lightning_rl.types import Tree, tree_leaves, tree_map, tree_to_numpy, tree_to_torch

FORMATS: dict[str, Any] = {"onnx": Onnx(), "torch": Torch(), "safetensors": Safetensors(), "unity": Unity()}
FORMAT_VERSION = 1
NUM_STEPS, BATCH_SIZES = 10, (99, 1)
"""1,000 observations."""
TOLERANCE = 1e-5
MEMORY_FACTOR = 100
"""Tolerance of a memory, as a multiple of the tolerance of an action."""
UNBOUNDED = 1e18
"""A bound of this size counts as infinite: squares of such numbers nearly overflow in float32."""


def export_policy(
    ckpt_path: str | Path | RunModule,
    out: str | Path | None = None,
    format: str | None = None,
    behavior: str | None = None,
    env: Env | None = None,
) -> Path:
    """Export the policy of a checkpoint or an algorithm to a file, with a description in `<file>.json`. Returns the path of the file.

    The file is written under a temporary name, and gets its final name only if it does the same as the policy for 1,000 observations (see
    `exporting/export.py`). Otherwise it is deleted, and an existing file of that name stays unchanged.

    Args:
        ckpt_path: as in `load_policy`; an algorithm's policy is exported as it is now.
        out: the file to write; default: next to the checkpoint. Required for an agent on the hub and for an algorithm.
        format: `onnx`, `torch` (a program of `torch.export`), `safetensors` (only the weights) or `unity` (ONNX as Unity's ML-Agents reads
            it, see `exporting/unity.py`); default: from the suffix of `out`.
        behavior: which policy, if the run has several.
        env: as in `load_policy`.

    Raises:
        SettingError: no such format, a package is missing, the checkpoint cannot be loaded or does not hold all of the policy, the policy
            cannot be traced, the exported policy differs from the original, or the file cannot be saved.
    """
    if out is None and (isinstance(ckpt_path, RunModule) or is_address(ckpt_path)):
        name = type(ckpt_path).__name__ if isinstance(ckpt_path, RunModule) else ckpt_path
        raise SettingError(f"{name} is not a run on this machine: name a file to write, out")
    file = None if isinstance(ckpt_path, RunModule) else best_of(ckpt_path)
    suffixes = {export_format.suffix: name for name, export_format in FORMATS.items() if name != "unity"}
    if format is None:
        suffix = ".onnx" if out is None else Path(out).suffix
        if suffix not in suffixes:
            raise SettingError(f"out {Path(out or '').name!r} does not imply a format; give one, or a suffix {', '.join(suffixes)}")
        format = suffixes[suffix]
    check_choice("format", format, FORMATS)
    if out is None and file is not None:
        parts = [file.stem, *([] if behavior is None else [behavior]), *(["unity"] if format == "unity" else [])]
        path = file.with_name(".".join(parts) + FORMATS[format].suffix)
    else:
        path = Path(out or "")
    is_source = file is not None and path.exists() and file.exists() and path.samefile(file)
    kinds = {"a folder": path.is_dir(), "a checkpoint": path.suffix == ".ckpt", "the source itself": is_source, "an agent": is_agent(path)}
    what = next((kind for kind, found in kinds.items() if found), None)
    if what is not None:
        raise SettingError(f"out {path.name!r} is {what}; name another file")
    implied = suffixes.get(path.suffix, format)
    if FORMATS[implied].suffix != FORMATS[format].suffix:
        way_out = f"leave the format out, or name a file that ends in {FORMATS[format].suffix}"
        raise SettingError(f"out {path.name!r} is a name for the format {implied}, not {format}; {way_out}")
    if not path.parent.is_dir():
        raise SettingError(f"out {path.name!r}: there is no folder {path.parent}; make it first")
    check_packages(format)
    loaded = ckpt_path if isinstance(ckpt_path, RunModule) else load_run(ckpt_path, env=env)
    if loaded.run.additions.lost:
        what = f"this checkpoint does not hold what had been changed in its policy: {list_changes(loaded.run.additions.lost)}"
        raise SettingError(f"{what}; export the algorithm itself, lrl.export_policy(algorithm, {path.name!r})")
    if format == "safetensors" and (changes := [*loaded.run.changes.values()]):
        raise SettingError(f"format safetensors holds only weights, not {list_changes(changes)}; use onnx or torch")
    algorithm, source = choose_behavior(loaded, behavior), None if file is None else describe_source(file)
    with torch_threads(1), eval_mode(algorithm.network.modules()):
        write_checked(path, format, algorithm, loaded.env, source)
    return path


def write_checked(path: Path, format: str, algorithm: LearningModule, env: object, source: Plain | None) -> None:
    """Write a file and its description if the file does what the policy does, which is in evaluation mode.

    `env`: that of the algorithm's run. `source`: the description of the file that was loaded, if any.
    """
    network, kind = algorithm.network, FORMATS[format]
    policy = Policy(network if algorithm.device.type == "cpu" else copy_network(network).cpu().eval(), algorithm.spaces)
    with one_line_errors(f"this policy cannot be written as {format}"):
        graph = kind.graph(policy.network, policy.spaces)
        policy.network = graph.network  # without what the format leaves out
        description = describe(algorithm, graph, env, format, source)
        data = kind.write(graph, json.dumps(description, allow_nan=False))
    staged = stage(path, lambda file: file.write(data))
    with committing(path.name, staged):
        with one_line_errors(f"the exported policy cannot be run by {format}"):
            parity = check(kind.read(staged.temporary.read_bytes(), graph), policy)
        content = {**description, "size": staged.size, "sha256": staged.sha256, "check": {**parity._asdict(), "tolerance": TOLERANCE}}
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        staged_description = stage(manifest_path(path), lambda file: file.write(text.encode()))
        try:
            staged_description.path.unlink(missing_ok=True)  # a file must never have the description of another
            staged.commit()
            staged_description.commit()
        finally:
            staged_description.discard()


def check_packages(name: str) -> None:
    """Raise `SettingError` unless the packages of a format are installed."""
    for package in FORMATS[name].packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise missing_extra(package, "export", f"export to {name}") from error


@contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Turn whatever exporters and runtimes raise into a `SettingError`."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:
        raise SettingError(f"{what} ({shorten(f'{type(error).__name__}: {error}', 100, placeholder=' …')})") from error


class Parity(NamedTuple):
    """The result of a check.

    observations: how many were compared.  max_abs_difference, max_abs_difference_of_memory: greatest differences of numbers in actions and
    in memories.  max_share_of_allowed: the greatest difference as a share of its tolerance.  ties: different choices that passed as ties.
    """

    observations: int
    max_abs_difference: float
    max_abs_difference_of_memory: float
    max_share_of_allowed: float
    ties: int


def check(run: Run, policy: Policy, seed: int = 0) -> Parity:
    """Compare an exported policy with the original. Raises `SettingError`: they differ."""
    check = Check(policy, seed)
    for rows in BATCH_SIZES:
        check.play(run, rows)
    return Parity(sum(BATCH_SIZES) * NUM_STEPS, check.difference, check.drift, check.share, check.ties)


class Check:
    """A comparison in progress. `difference`, `drift`, `share` and `ties` are the fields of `Parity` in their order."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy, self.spaces, self.random = policy, policy.spaces, np.random.default_rng(seed)
        self.spaces.observation.seed(seed)
        self.distribution = policy.network.distribution
        self.difference, self.drift, self.share, self.ties = 0.0, 0.0, 0.0, 0

    def play(self, run: Run, rows: int) -> None:
        """Play ten steps with a batch of `rows`."""
        memory: Tree = None
        their_memory = tree_leaves(tree_to_numpy(self.policy.network.initial_memory(rows)))
        for _ in range(NUM_STEPS):
            obs, mask = tree_map(self.bounded, samples(self.spaces.observation, rows)), legal_masks(self.spaces, rows, self.random)
            action, after = self.policy.act(obs, memory, action_mask=None if isinstance(mask, tuple) else mask)
            outputs = list(run([*tree_leaves(obs), *tree_leaves(mask), *their_memory]))
            expected = [*self.distribution.flat(action), *tree_leaves(tree_to_numpy(after))]
            for ours, theirs in zip(expected, outputs, strict=True):
                if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                    raise refusal(f"gives {theirs.dtype}{list(theirs.shape)} for {ours.dtype}{list(ours.shape)}")
            count = len(expected) - len(their_memory)
            self.compare_actions(expected[:count], outputs[:count], obs, mask, memory)
            for ours, theirs in zip(expected[count:], outputs[count:], strict=True):
                self.drift = max(self.drift, self.compare(ours, theirs, MEMORY_FACTOR * np.maximum(1, np.abs(ours)), "a memory"))
            memory, their_memory = after, outputs[count:]

    def bounded(self, leaf: np.ndarray) -> np.ndarray:
        """Replace huge numbers, sampled between bounds as wide as float32, by samples of an unbounded space."""
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        return np.where(np.abs(leaf.astype(float)) < UNBOUNDED, leaf, self.random.standard_normal(leaf.shape)).astype(leaf.dtype)

    def compare_actions(self, expected: list[np.ndarray], outputs: list[np.ndarray], obs: Tree, mask: Tree, memory: Tree) -> None:
        """Compare the leaves of an action: numbers by their difference, choices by their log-probability under the policy."""
        leaves, bounds = self.distribution.leaves(), self.distribution.flat(limits(self.spaces.action))
        inputs = self.leaf_inputs(obs, mask, memory)
        for i, (leaf, ours, theirs, (x, legal)) in enumerate(zip(leaves, expected, outputs, inputs, strict=True)):
            size = max(1.0, float(x.abs().max()))  # what float32 rounds before an action is clipped
            if not leaf.sizes:
                low, high = bounds[i].astype(float).clip(-UNBOUNDED, UNBOUNDED)
                scale = np.maximum(size, np.where(high - low < UNBOUNDED, high - low, np.abs(ours)))
                self.difference = max(self.difference, self.compare(ours, theirs, scale, "an action"))
            elif not np.array_equal(ours, theirs):
                first, second = (leaf.evaluate(x, torch.from_numpy(leaf.from_env(chosen)), legal)[0] for chosen in (ours, theirs))
                if not bool(((first - second).abs() <= TOLERANCE * size).all()):
                    raise refusal(f"makes other choices in {int((ours != theirs).sum())} of {ours.size} cases")
                self.ties += int((ours != theirs).sum())

    @torch.no_grad()
    def leaf_inputs(self, obs: Tree, mask: Tree, memory: Tree) -> list[tuple[Tensor, Tree]]:
        """Return the input of each leaf of the distribution, and its part of the mask."""
        rows = len(tree_leaves(obs)[0])
        stored = tree_map(lambda kept, leaf: leaf.astype(kept.dtype), allocate(self.spaces.observation), obs)
        network = self.policy.network
        x, _ = network.policy(tree_to_torch(stored), network.initial_memory(rows) if memory is None else memory, None)
        leaves = self.distribution.leaves()
        masks = split_mask(tree_to_torch(mask), [leaf.mask_width for leaf in leaves])
        return list(zip(x.split([leaf.num_inputs for leaf in leaves], -1), masks, strict=True))

    def compare(self, ours: np.ndarray, theirs: np.ndarray, scale: np.ndarray, what: str) -> float:
        """Return the greatest difference of numbers whose range or magnitude is `scale`; raise `SettingError` if it is not allowed."""
        difference = np.abs(ours.astype(float) - theirs)
        allowed = np.maximum(TOLERANCE * np.maximum(1, scale), np.spacing(np.abs(ours)))
        shares = difference / allowed
        worst = np.unravel_index(shares.argmax(), shares.shape)
        if not shares[worst] <= 1:
            raise refusal(f"differs by {difference[worst]:.3g} in {what}, where {allowed[worst]:.3g} is allowed")
        self.share = max(self.share, float(shares[worst]))
        return float(difference.max())


def legal_masks(spaces: Spaces, num: int, random: np.random.Generator) -> Tree:
    """Draw masks `[num, M]` with at least one legal choice in each part; () if the environment has no masks."""
    if not spaces.masked:
        return ()
    parts = []
    for size in choice_sizes(spaces.action):
        parts.append(random.random((num, size)) < 0.5)
        parts[-1][np.arange(num), random.integers(size, size=num)] = True
    return np.concatenate(parts, 1)


def refusal(how: str) -> SettingError:
    """Build the error for an exported policy that differs from the original."""
    return SettingError(f"the exported policy {how}; it differs from the checkpoint's policy, so nothing was written")


def describe_source(ckpt_path: Path) -> Plain:
    """Describe the file that was loaded: the previous generation if a checkpoint is missing or damaged."""
    intact = is_agent(ckpt_path) or is_zip(ckpt_path) or (ckpt_path.is_file() and damage(ckpt_path) is None)
    path = ckpt_path if intact else previous_path(ckpt_path)
    with path.open("rb") as file:
        return {"file": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def describe(algorithm: LearningModule, graph: PolicyGraph | UnityGraph, env: object, format: str, source: Plain | None) -> Plain:
    """Describe a policy's inputs, outputs and origin as plain data, with nothing about the machine."""
    spaces = graph.spaces
    named = env if isinstance(env, EnvConfig) else None
    inputs, outputs = ([{**port._asdict(), "shape": ["batch", *port.shape]} for port in ports] for ports in (graph.inputs, graph.outputs))
    return {
        "format_version": FORMAT_VERSION,
        "format": format,
        "algorithm": stored_name(type(algorithm)),
        "environment": named and named.path,
        "environment_kwargs": finite(named.kwargs) if named else {},
        algorithm.counter: algorithm.count,
        "observation_space": finite(to_plain(spaces.observation)),
        "action_space": finite(to_plain(spaces.action)),
        "inputs": inputs,
        "outputs": outputs,
        "begin_episode": "zeros in a row of each memory input" if any(port.role == "memory" for port in graph.inputs) else None,
        "versions": {**written_by()["versions"], **{name: version(name) for name in FORMATS[format].packages}},
        "checkpoint": source,
    }


def finite(plain: object) -> object:
    """Replace infinite bounds by `"inf"` and `"-inf"`, because JSON has no infinity."""
    if isinstance(plain, dict):
        return {key: finite(child) for key, child in plain.items()}
    if isinstance(plain, list):
        return [finite(child) for child in plain]
    return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain
