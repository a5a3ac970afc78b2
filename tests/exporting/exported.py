"""Playing exported policies in tests with numpy and what reads the file alone, whatever the check of the export thought of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from lightning_rl import load_policy
from lightning_rl.exporting.export import legal_masks
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.types import tree_leaves, tree_map
from tests.fitting import fit


def save(model: Any, path: Path) -> Path:
    """A checkpoint after a short run; where the last layer of the policy starts small it is stretched, so that observations matter."""
    trainer = fit(model)
    if isinstance(model.network, ActorCritic):
        with torch.no_grad():
            model.network.actor[-1].weight.mul_(20)
    trainer.save_checkpoint(path)
    return path


def described(path: Path) -> dict[str, Any]:
    """What lies beside a file, in strict JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(Path(f"{path}.json").read_text(), parse_constant=refuse)


def runner(path: Path):
    """From arrays to arrays, in the order of the description."""
    ports = described(path)
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        names = [[port["name"] for port in ports[side]] for side in ("inputs", "outputs")]
        return lambda arrays: session.run(names[1], dict(zip(names[0], arrays, strict=True)))
    module = torch.export.load(io.BytesIO(path.read_bytes())).module()
    return lambda arrays: [each.numpy() for each in module(*map(torch.from_numpy, arrays))]


def flat(space: dict[str, Any], action: Any) -> list[np.ndarray]:
    """The leaves of an action in the order of its space."""
    if space["type"] == "Dict":
        return [leaf for key, child in space["spaces"].items() for leaf in flat(child, action[key])]
    if space["type"] == "Tuple":
        return [leaf for child, part in zip(space["spaces"], action, strict=True) for leaf in flat(child, part)]
    return [action]


def play_both(checkpoint: Path, path: Path, rows: int = 7, steps: int = 4) -> tuple[float, int]:
    """Play `load_policy(checkpoint)` and the file side by side: the greatest difference of numbers, and how many choices differ.

    Rows begin an episode at the first step, and every other one again at the third.
    """
    policy, run, ports = load_policy(checkpoint), runner(path), described(path)
    space, random = policy.spaces.observation, np.random.default_rng(5)
    space.seed(17)
    memory, theirs = None, [np.zeros((rows, *port["shape"][1:]), port["dtype"]) for port in ports["inputs"] if port["role"] == "memory"]
    difference, others = 0.0, 0
    for step in range(steps):
        if step == 2 and theirs:
            goes_on = np.arange(rows)[:, None] % 2
            memory = tree_map(lambda leaf, goes_on=goes_on: leaf * torch.from_numpy(goes_on), memory)
            theirs = [(state * goes_on).astype(state.dtype) for state in theirs]
        drawn = [tree_leaves(space.sample()) for _ in range(rows)]
        seen = [np.stack(leaves) for leaves in zip(*drawn, strict=True)]
        obs = refold(space.sample(), iter(seen))
        masks = [legal_masks(policy.spaces, rows, random)] if policy.spaces.masked else []
        action, memory = policy.act(obs, memory, action_mask=masks[0] if masks else None)
        outputs = run([*seen, *masks, *theirs])
        expected = flat(ports["action_space"], action)
        theirs = outputs[len(expected) :]
        for ours, other in zip([*expected, *tree_leaves(memory)], outputs, strict=True):
            ours = np.asarray(ours)
            assert (ours.shape, ours.dtype) == (other.shape, other.dtype)
            if np.issubdtype(ours.dtype, np.floating):
                difference = max(difference, float(np.abs(ours.astype(float) - other).max()))
            else:
                others += int((ours != other).sum())
    return difference, others


def refold(template: Any, leaves: Any) -> Any:
    """A tree of the same shape from leaves in the order of sorted keys."""
    if isinstance(template, dict):
        return {key: refold(template[key], leaves) for key in sorted(template, key=str)}
    return tuple(refold(child, leaves) for child in template) if isinstance(template, tuple) else next(leaves)
