"""Starting from what another run learned."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rl.algorithms.loading import checkpoint_of, read_checkpoint
from lightning_rl.errors import SettingError


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
