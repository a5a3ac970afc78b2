"""Demonstrations as algorithms use them: read, checked, as rows of their policy, and in minibatches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_rl.data.demonstration_dataset import DemonstrationDraws
from lightning_rl.data.demonstrations import EpisodeRows, Rows, read_episode
from lightning_rl.demonstrations.dataset import Demonstration, load_demonstrations, steps_of, summarize
from lightning_rl.errors import SettingError
from lightning_rl.rewards.gail import GAIL
from lightning_rl.types import tree_leaves, tree_to_torch


def read_demonstrations(algorithm: Any, setting: str, source: Any) -> list[Demonstration]:
    """The episodes of a dataset by its name, or given ones; none where none are wanted.

    Args:
        algorithm: whose environment they are of.
        setting: that names them, for messages.
        source: its value.

    Raises:
        SettingError: there is no such dataset, or they do not fit the environment.
    """
    if isinstance(source, str):
        return load_demonstrations(source, algorithm.spaces)
    if not isinstance(source, list | tuple | None):
        raise SettingError(f"{setting} must be the name of a dataset, got {source!r}")
    for k, each in enumerate(source or ()):
        check_demonstration(f"demonstration {k}", setting, each, algorithm)
    return list(source or ())


def check_demonstration(who: str, setting: str, given: Any, algorithm: Any) -> None:
    """Raise `SettingError` for what is no episode of an algorithm's environment."""
    if not isinstance(given, Demonstration):
        raise SettingError(f"{who} of {setting} is a {type(given).__name__}, no lightning_rl.Demonstration")
    read_episode(who, given.obs, given.action, None, algorithm.spaces, algorithm.network.distribution)
    steps = {len(np.atleast_1d(each)) for each in (given.reward, given.terminated, given.truncated)}
    rows = len(tree_leaves(given.action)[0])
    if steps != {rows} or not np.isfinite(given.reward).all():
        raise SettingError(f"{who} must have a reward that is a number, terminated and truncated for each of its {rows} actions")


def demonstrated_rows(algorithm: Any, setting: str, source: Any) -> list[Rows]:
    """The same, as the algorithm's policy learns from them: actions as sampled, with what was legal.

    Raises:
        SettingError: as before, or an action is not legal.
    """
    episodes = read_demonstrations(algorithm, setting, source)
    masks = [each.action_mask[: len(each.reward)] if len(each.action_mask) else None for each in episodes]
    rows = [
        read_episode(f"demonstration {k}", each.obs, each.action, mask, algorithm.spaces, algorithm.network.distribution)
        for k, (each, mask) in enumerate(zip(episodes, masks, strict=True))
    ]
    return rows if any(mask is not None for mask in masks) else [each._replace(action_mask=()) for each in rows]


def demonstration_draws(algorithm: Any, rows: EpisodeRows, batch_size: int) -> DemonstrationDraws:
    """Minibatches of rows, this rank's share of them."""
    seed = int(np.random.SeedSequence([torch.initial_seed(), algorithm.count]).generate_state(1)[0])
    return DemonstrationDraws(rows, batch_size, seed, algorithm.device, algorithm.global_rank, algorithm.trainer.world_size)


def show_demonstrations(algorithm: Any) -> None:
    """Give each reward signal that imitates what its demonstrations saw and did.

    Raises:
        SettingError: there are none, or they do not fit the environment.
    """
    for signal in algorithm.reward_signals.values():
        if isinstance(signal, GAIL):
            if getattr(getattr(algorithm, "replay", None), "demonstrations", None) is not None:
                raise SettingError("reward_signals.gail beside replay.demonstrations would take these for the policy's own: use one")
            episodes = read_demonstrations(algorithm, "reward_signals.gail.demo_path", signal.demo_path)
            if not episodes:
                raise SettingError("reward_signals.gail.demo_path: there are no demonstrations to imitate")
            algorithm.say(f"demonstrations: {summarize(episodes)}; gail pays for doing the same")
            obs, action, terminated = tree_to_torch(steps_of(episodes, algorithm.network.distribution.from_env))
            signal.show(obs, action, terminated, algorithm.seed)
