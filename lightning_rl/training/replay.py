"""Replay buffers of a run: build, fill with demonstrations, load from a checkpoint, and read as episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from gymnasium.spaces import Space

from lightning_rl.actors.config import ActorsConfig
from lightning_rl.checkpoints.archive import Checkpoint
from lightning_rl.data.dataset import OfflineDataset, ReplayDataset, ReplaySettings
from lightning_rl.data.demonstrations import NoCollector
from lightning_rl.data.replay.buffer import ReplayBuffer, describe_memory
from lightning_rl.data.replay.hindsight import GoalReward, make_goal_reward
from lightning_rl.data.replay.sampling import Sequences
from lightning_rl.data.replay.segments import SegmentStore
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.demonstrations.dataset import Demonstration, empty_arrays, summarize, transitions
from lightning_rl.envs.make import count_stacked_frames
from lightning_rl.envs.masks import make_masks
from lightning_rl.errors import SettingError
from lightning_rl.training.experience import make_actor_pool, make_collector, planned_iterations, read_demonstrations, seed_draws
from lightning_rl.training.learning import LearningModule
from lightning_rl.types import State, Tree, tree_index, tree_map, tree_to_numpy


class RowForm(TypedDict):
    """The arguments of `ReplayBuffer` that describe rows, and their rewards for other goals."""

    space: Space
    action: Tree
    n_steps: int
    action_mask: Tree
    frames: int
    sequences: Sequences | None
    goal_reward: GoalReward | None


def replay(algorithm: LearningModule, settings: ReplaySettings, config: ReplayConfig, actors: ActorsConfig | None = None) -> ReplayDataset:
    """Return experience from this rank's replay buffer."""
    ranks = algorithm.world_size
    saved = saved_buffer(algorithm) is not None
    buffer = make_replay_buffer(algorithm, settings, config, saved)
    steps = max(1, settings.steps_per_iteration // (algorithm.num_envs * ranks))
    if algorithm.has_trainer and getattr(algorithm.trainer, "fast_dev_run", False):
        # the first iteration must run all losses; TD3's policy only learns from the second update on
        enough = buffer.open_rows + settings.batch_size
        settings = replace(settings, learning_starts=min(settings.learning_starts, enough * ranks))
        steps = max(steps, -(-(enough + 2 * settings.train_freq) // algorithm.num_envs))
    if settings.learning_starts >= algorithm.max_env_steps:
        algorithm.say(f"learning_starts {settings.learning_starts:,}: a run of {algorithm.max_env_steps:,} steps ends before it learns")
    resumed = algorithm.env_steps > 0
    if resumed and not saved:
        goes_on = "with the demonstrations" if len(buffer) else f"after {settings.learning_starts:,} steps"
        continues = algorithm.has_trainer and algorithm.trainer.ckpt_path is not None
        why = "the checkpoint holds no replay buffer" if continues else "the replay buffer starts empty"
        algorithm.say(f"{why}: learning continues {goes_on}")
    collector: Any = make_collector(algorithm, steps, False) if actors is None else make_actor_pool(algorithm, steps, actors)
    signals = dict(algorithm.reward_signals.items())
    return ReplayDataset(collector, buffer, signals, settings, algorithm.device, planned_iterations(algorithm, collector), ranks, resumed)


def make_replay_buffer(algorithm: LearningModule, settings: ReplaySettings, config: ReplayConfig, saved: bool) -> ReplayBuffer:
    """Make this rank's replay buffer, empty or with demonstrations in it or in a second buffer, and report its memory and contents.

    Args:
        algorithm: the algorithm whose experience it stores.
        settings: size and batches.
        config: how rows are stored and sampled.
        saved: a checkpoint contains its rows.

    Raises:
        SettingError: the buffer is too large or too small, or the demonstrations cannot be used.
    """
    rows = rows_of(algorithm, settings, config)
    node = algorithm.world_size // algorithm.trainer.num_nodes if algorithm.has_trainer else 1
    memory = () if rows["sequences"] is None else rows["sequences"].memory
    algorithm.say(describe_memory(algorithm.spaces, rows["action"], settings.buffer_size, config, node, rows["frames"], memory))
    seed = torch.initial_seed() + algorithm.global_rank
    make = partial(ReplayBuffer, **rows, capacity=settings.buffer_size, num_envs=algorithm.num_envs, config=config, seed=seed)
    if config.demonstration_share is not None:
        return make_mixed_buffer(algorithm, settings.batch_size, config, rows, make)
    buffer = make()
    if not saved:
        fill_first(algorithm, buffer, read_demonstrations(algorithm, "replay.demonstrations", config.demonstrations))
    return buffer


def rows_of(algorithm: LearningModule, settings: ReplaySettings, config: ReplayConfig) -> RowForm:
    """Return the form of an algorithm's rows, with actions and memory as its network samples them."""
    spaces, distribution = algorithm.spaces, algorithm.network.distribution
    x = torch.zeros(1, distribution.num_inputs, device=next(algorithm.network.parameters()).device)
    action = tree_index(tree_to_numpy(distribution.random(x)), 0)
    memory = tree_to_numpy(tree_index(algorithm.network.initial_memory(1), 0))
    sequences = None if settings.memory is None else Sequences(settings.memory.burn_in, settings.memory.sequence_length, memory)
    return {
        "space": spaces.observation,
        "action": action,
        "n_steps": settings.n_steps,
        "action_mask": spaces.masks(),
        "goal_reward": None if config.relabel is None else find_goal_reward(algorithm, settings),
        "frames": count_stacked_frames(algorithm.env),
        "sequences": sequences,
    }


def find_goal_reward(algorithm: LearningModule, settings: ReplaySettings) -> GoalReward:
    """Return the environment's reward function for other goals; raise `SettingError` if relabeling is not possible."""
    if settings.memory is not None:
        raise SettingError("replay.relabel cannot be combined with memory, which has seen the original goals; leave one out")
    for name, signal in algorithm.reward_signals.items():
        if signal.sees or signal.ignore_done:
            what = ", which learns from the original goals" if signal.sees else ".ignore_done"
            raise SettingError(f"replay.relabel cannot be combined with reward_signals.{name}{what}; leave one out")
    return make_goal_reward(algorithm.env, algorithm.spaces)


def fill_first(algorithm: LearningModule, buffer: ReplayBuffer, episodes: list[Demonstration]) -> None:
    """Write demonstrations into an empty buffer, and report them.

    Raises:
        SettingError: they do not fit.
    """
    if not episodes:
        return
    write(algorithm, buffer, episodes)
    if buffer.added > len(buffer):
        rings = f"{len(buffer.envs)} x {buffer.length:,} rows (env.num_envs x …)"
        raise SettingError(f"replay.demonstrations: {summarize(episodes)}; they do not fit into {rings}, raise buffer_size")
    algorithm.say(f"demonstrations: {summarize(episodes)}; they fill the replay buffer first")


def make_mixed_buffer(
    algorithm: LearningModule, batch_size: int, config: ReplayConfig, rows: RowForm, make: Callable[..., ReplayBuffer]
) -> ReplayBuffer:
    """Make a buffer that samples a share of each batch from demonstrations, which are never dropped, and report it.

    Args:
        algorithm: the algorithm whose experience it stores.
        batch_size: rows of a batch.
        config: how rows are stored and sampled.
        rows: the form of the rows of both buffers.
        make: makes the buffer of experience.

    Raises:
        SettingError: there are no demonstrations; or a batch contains none of them, only them, or more than there are.
    """
    assert config.demonstration_share is not None
    episodes = read_demonstrations(algorithm, "replay.demonstrations", config.demonstrations)
    if not episodes:
        raise SettingError(f"replay.demonstration_share {config.demonstration_share:g} needs demonstrations: name replay.demonstrations")
    sequences = rows["sequences"]
    demonstrations = make_full_buffer(algorithm, episodes, rows, replace(config, prioritized=False))
    buffer = make(demonstrations=demonstrations, share=config.demonstration_share)
    drawn = buffer.demonstration_rows(batch_size)
    what, length = ("rows", 1) if sequences is None else ("sequences", sequences.length)
    needed = 1 if config.replace else drawn // length
    if demonstrations.ready < needed:
        available = f"{summarize(episodes)}, of which {demonstrations.ready} {what} can be sampled"
        raise SettingError(f"replay.demonstrations: {available}; a batch needs {needed}")
    algorithm.say(f"demonstrations: {summarize(episodes)}; {drawn} of {batch_size} rows of each batch")
    return buffer


def make_full_buffer(algorithm: LearningModule, episodes: list[Demonstration], rows: RowForm, config: ReplayConfig) -> ReplayBuffer:
    """Make a buffer that is full of demonstrations."""
    least = rows["n_steps"] + 1 if rows["sequences"] is None else rows["sequences"].slots(rows["n_steps"])
    capacity = max(least, sum(len(episode.reward) for episode in episodes))
    seed = int(np.random.SeedSequence([torch.initial_seed(), algorithm.global_rank, 1]).generate_state(1)[0])
    buffer = ReplayBuffer(**rows, capacity=capacity, config=config, seed=seed)
    write(algorithm, buffer, episodes)
    return buffer


def write(algorithm: LearningModule, buffer: ReplayBuffer, episodes: list[Demonstration]) -> None:
    """Write all steps of demonstrations into a buffer, with actions as sampled, converting one episode at a time."""
    sampled = [episode._replace(action=algorithm.network.distribution.from_env(episode.action)) for episode in episodes]
    buffer.extend(transitions(sampled), lambda action: action, make_masks(algorithm.spaces, "step {} of the demonstrations"))


def make_offline(algorithm: Any) -> OfflineDataset:
    """Return batches of the transitions of a dataset.

    Raises:
        SettingError: there is no dataset, or it does not fit the environment.
    """
    episodes = read_demonstrations(algorithm, "dataset", algorithm.source)
    if not episodes:
        raise SettingError("dataset: name one to learn from, such as pendulum/medium-v0, or set online to learn from the environment")
    seed_draws(algorithm)
    settings, lengths = algorithm.replay_settings, (algorithm.updates_per_iteration, algorithm.max_updates)
    buffer = make_full_buffer(algorithm, episodes, rows_of(algorithm, settings, algorithm.replay), algorithm.replay)
    if not buffer.ready:
        raise SettingError(f"dataset: {summarize(episodes)}, of which nothing can be sampled; its episodes are too short")
    algorithm.say(f"dataset: {summarize(episodes)}")
    nowhere = NoCollector(algorithm.spaces.observation)
    signals = dict(algorithm.reward_signals.items())
    return OfflineDataset(nowhere, buffer, signals, settings, algorithm.device, *lengths)


def saved_buffer(algorithm: LearningModule) -> tuple[State, int] | None:
    """Return the manifest of this rank's replay buffer in the checkpoint that is resumed, and the rank that saved it.

    That may be another rank if their number has changed. Return None if there is no buffer, or it has another number of environments.
    """
    ranks = algorithm.run.data_of_ranks(algorithm.behavior)
    if not ranks:
        return None
    number = algorithm.global_rank % len(ranks)
    data, num_envs = ranks[number]
    manifest = data.get("replay")
    return None if manifest is None or num_envs != algorithm.num_envs else (manifest, number)


def load_buffer(algorithm: LearningModule, continues: bool) -> None:
    """Load this rank's replay buffer from a checkpoint, if there is one; `continues`: with the episodes in progress."""
    if (saved := saved_buffer(algorithm)) is not None:
        manifest, number = saved
        folder = Path(str(algorithm.trainer.ckpt_path)).parent / "last.ckpt.d" / f"rank{number}" / algorithm.behavior
        assert isinstance(algorithm.dataset, ReplayDataset)
        algorithm.dataset.load_buffer(manifest, folder)
        if not continues:
            algorithm.dataset.buffer.cut()
            algorithm.dataset.buffer.reseed(algorithm.seed)  # several ranks may have loaded the same one


def stored_episodes(algorithm: Any, checkpoint: Checkpoint, folder: Path) -> list[Demonstration]:
    """Return all steps in the replay buffer of a checkpoint, rank by rank and environment by environment, oldest first.

    Steps that a full buffer has dropped are missing; episodes in progress count as truncated.

    Args:
        checkpoint: the checkpoint's contents.
        folder: the folder of its segments, `last.ckpt.d`.

    Raises:
        SettingError: the checkpoint contains no replay buffer, or it cannot be read.
    """
    episodes: list[Demonstration] = []
    ranks = checkpoint["lightning_rl"].get("ranks", [])
    if not ranks or any(state["data"].get("replay") is None for state in ranks):
        raise SettingError("--replay: this checkpoint holds no replay buffer; name a run with replay, or its last.ckpt")
    settings, config = algorithm.replay_settings, replace(algorithm.replay, directory=None)
    rows = rows_of(algorithm, settings, config)
    for number, state in enumerate(ranks):
        buffer = ReplayBuffer(**rows, capacity=settings.buffer_size, num_envs=state["num_envs"], config=config)
        SegmentStore(folder / f"rank{number}" / algorithm.behavior).load(state["data"]["replay"], buffer)
        episodes += read_episodes(algorithm, buffer)
    return episodes


def read_episodes(algorithm: LearningModule, buffer: ReplayBuffer) -> Iterator[Demonstration]:
    """Yield the episodes in a buffer with the environment's actions and dtypes; those in progress end as truncated."""
    buffer.cut()
    forms = empty_arrays(algorithm.spaces.observation), empty_arrays(algorithm.spaces.action)
    for env in range(len(buffer.envs)):
        places = buffer.stored(env)
        row, following = buffer.layout.read(places, places)
        action = algorithm.network.distribution.to_env(row.action)
        for start, stop in pairwise([0, *(np.flatnonzero(row.ended) + 1)]):
            steps = slice(start, stop)
            before, last = tree_index(row.observation, steps), tree_index(following, slice(stop - 1, stop))
            obs, mask = tree_map(lambda *leaves: np.concatenate(leaves), before, last)
            obs, taken = tree_map(lambda leaf, form: leaf.astype(form.dtype), (obs, tree_index(action, steps)), forms)
            terminated = row.terminated[steps]
            yield Demonstration(obs, taken, row.reward[steps].astype(np.float64), terminated, row.ended[steps] & ~terminated, mask)
