"""A scripted source of demonstrations, after the `Record1D` of ML-Agents' tests."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from lightning_rl.demonstrations.recorder import RecordEpisodes
from lightning_rl.errors import check_range
from lightning_rl.types import Tree, tree_map


def record_1d(n_demos: int = 100, seed: int = 0, **settings: Any) -> RecordEpisodes:
    """Play the best action in `lightning_rl/Simple1D-v0`, straight to the goal: `record_1d().save("simple1d/expert-v0")`.

    Args:
        n_demos: how many steps to record; the last of them truncates its episode.
        seed: of the goals.
        settings: of `Simple1D`, such as `action=[1, 2]` or `num_visual=1`.

    Raises:
        SettingError: `n_demos` is no number of steps.
    """
    check_range("n_demos", n_demos, 1, whole=True)
    env = RecordEpisodes(gym.make("lightning_rl/Simple1D-v0", **settings))
    env.reset(seed=seed)
    for _ in range(n_demos):
        _, _, terminated, truncated, _ = env.step(best_action(env))
        if terminated or truncated:
            env.reset()
    env.cut()
    return env


def best_action(env: RecordEpisodes) -> Tree:
    """As far to the goal as an action can say: the goal itself in every dimension, and its side in every branch."""
    goal = env.get_wrapper_attr("goal")
    return tree_map(lambda form: np.full(form.shape[1:], goal if form.dtype.kind == "f" else goal > 0, form.dtype), env.forms[1])
