"""The replay buffer of a run, and the demonstrations in it or beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lightning_rl.algorithms.demonstrations import read_demonstrations
from lightning_rl.data.memory import memory_in_words
from lightning_rl.data.mixed_replay import MixedReplay
from lightning_rl.data.replay import ReplayBuffer
from lightning_rl.data.replay_config import ReplayConfig
from lightning_rl.data.replay_dataset import ReplaySettings
from lightning_rl.data.sequences import Sequences
from lightning_rl.demonstrations.dataset import Demonstration, summarize, transitions
from lightning_rl.envs.make import stacked_frames
from lightning_rl.envs.masks import make_masks
from lightning_rl.errors import SettingError
from lightning_rl.types import tree_index, tree_to_numpy


def make_replay_buffer(algorithm: Any, settings: ReplaySettings, config: ReplayConfig, saved: bool) -> ReplayBuffer:
    """The buffer of this rank, empty, or with demonstrations in it or beside it; what it takes and holds is said in a line each.

    Args:
        algorithm: whose experience it will hold.
        settings: its size, and what a batch is.
        config: how it keeps rows and draws them.
        saved: whether a checkpoint brings its rows.

    Raises:
        SettingError: it is too large or too small, or the demonstrations cannot be used.
    """
    spaces, distribution = algorithm.spaces, algorithm.network.distribution
    x = torch.zeros(1, distribution.num_inputs, device=next(algorithm.network.parameters()).device)
    action = tree_index(tree_to_numpy(distribution.random(x)), 0)
    frames = stacked_frames(algorithm.env)
    memory = tree_to_numpy(tree_index(algorithm.network.initial_memory(1), 0))
    sequences = None if settings.memory is None else Sequences(settings.memory.burn_in, settings.memory.sequence_length, memory)
    node = algorithm.trainer.world_size // algorithm.trainer.num_nodes
    algorithm.say(memory_in_words(spaces, action, settings.buffer_size, config, node, frames, memory))
    rows = {"space": spaces.observation, "action": action, "n_steps": settings.n_steps}
    rows |= {"frames": frames, "sequences": sequences, "action_mask": spaces.masks()}
    seed = torch.initial_seed() + algorithm.global_rank
    own = {**rows, "capacity": settings.buffer_size, "num_envs": algorithm.num_envs, "config": config, "seed": seed}
    if config.demonstration_share is not None:
        return buffer_beside(algorithm, settings.batch_size, config, rows, own)
    buffer = ReplayBuffer(**own)
    if not saved:
        fill_first(algorithm, buffer, read_demonstrations(algorithm, "replay.demonstrations", config.demonstrations))
    return buffer


def fill_first(algorithm: Any, buffer: ReplayBuffer, episodes: list[Demonstration]) -> None:
    """Demonstrations before anything else, said in a line.

    Raises:
        SettingError: they do not all fit.
    """
    if not episodes:
        return
    write(algorithm, buffer, episodes)
    if buffer.added > len(buffer):
        rings = f"{len(buffer.envs)} x {buffer.length:,} rows (env.num_envs x …)"
        raise SettingError(f"replay.demonstrations: {summarize(episodes)}; they do not fit into {rings}, raise buffer_size")
    algorithm.say(f"demonstrations: {summarize(episodes)}; they fill the replay buffer first")


def buffer_beside(algorithm: Any, batch_size: int, config: ReplayConfig, rows: dict[str, Any], own: dict[str, Any]) -> MixedReplay:
    """A buffer beside demonstrations that are kept for good, said in a line.

    Args:
        algorithm: whose experience it will hold.
        batch_size: rows of a batch.
        config: how it keeps rows and draws them.
        rows: what both have in common, arguments of `ReplayBuffer`.
        own: those of its own.

    Raises:
        SettingError: there are no demonstrations, or a batch takes none of them, nothing else, or more than there are.
    """
    assert config.demonstration_share is not None
    episodes = read_demonstrations(algorithm, "replay.demonstrations", config.demonstrations)
    if not episodes:
        raise SettingError(f"replay.demonstration_share {config.demonstration_share:g} is a share of nothing: name replay.demonstrations")
    sequences, n_steps = rows["sequences"], rows["n_steps"]
    least = n_steps + 1 if sequences is None else sequences.slots(n_steps)
    capacity = max(least, sum(len(each.reward) for each in episodes))
    seed = int(np.random.SeedSequence([torch.initial_seed(), algorithm.global_rank, 1]).generate_state(1)[0])
    shown = ReplayBuffer(**rows, capacity=capacity, config=replace(config, prioritized=False), seed=seed)
    write(algorithm, shown, episodes)
    buffer = MixedReplay(**own, shown=shown, share=config.demonstration_share)
    drawn = buffer.shown_rows(batch_size)
    what, length = ("rows", 1) if sequences is None else ("sequences", sequences.length)
    needed = 1 if config.replace else drawn // length
    if shown.ready < needed:
        found = f"{summarize(episodes)}, of which {shown.ready} {what} can be drawn"
        raise SettingError(f"replay.demonstrations: {found}; a batch needs {needed}")
    algorithm.say(f"demonstrations: {summarize(episodes)}; {drawn} of {batch_size} rows of each batch")
    return buffer


def write(algorithm: Any, buffer: ReplayBuffer, episodes: list[Demonstration]) -> None:
    """Keep all their steps, actions as the policy samples them, converted an episode at a time."""
    sampled = [each._replace(action=algorithm.network.distribution.from_env(each.action)) for each in episodes]
    buffer.extend(transitions(sampled), lambda action: action, make_masks(algorithm.spaces, "step {} of the demonstrations"))
