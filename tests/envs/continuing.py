"""Steps environments, saves them, and goes on in new ones."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.stepping import Stepper, make_stepper
from lightning_rl.types import tree_leaves

PLAIN = (type(None), bool, int, float, str, bytes, np.ndarray)


def leaves(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for pair in state.items() for each in pair for leaf in leaves(each)]
    if isinstance(state, list | tuple):
        return [leaf for each in state for leaf in leaves(each)]
    return [state]


def saved(state: Any) -> Any:
    """Through a file; only plain data goes in."""
    for leaf in leaves(state):
        assert type(leaf) in PLAIN, f"{type(leaf)} is not plain"
        assert not isinstance(leaf, np.ndarray) or leaf.dtype.kind in "biuf"
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def rows(stepper: Stepper, actions: list[Any]) -> list[bytes]:
    """What happens in some steps, bit for bit."""
    told = []
    for action in actions:
        step = stepper.step(action)
        arrays = [*tree_leaves(step.obs), step.reward, step.terminated, step.truncated, step.valid, step.episode_start, step.ended]
        told.append(b"|".join(np.asarray(array).tobytes() for array in arrays))
    return told


def is_continued(build: Callable[[], VectorEnv], config: EnvConfig | None = None, before: int = 40, after: int = 60, seed: int = 3) -> str:
    """Step, save, go on; and go on from what was saved in new environments. Returns the line if that is refused."""
    first, second = (make_stepper(build(), config) for _ in range(2))
    try:
        space = first.envs.action_space
        space.seed(seed)
        actions = [space.sample() for _ in range(before + after)]
        first.reset(seed)
        rows(first, actions[:before])
        state = saved(first.state_dict())
        expected = rows(first, actions[before:])
        line = second.load_state_dict(state)
        if line is None:
            assert rows(second, actions[before:]) == expected
        return line
    finally:
        first.close()
        second.close()
