"""Off-policy experience: datasets of batches from a replay buffer, filled by acting and learning in turn, or in advance (offline)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_rl.checkpoints.validation import MAPPING, NUMBER, ROWS, Rules
from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.data.replay.sampling import Window
from lightning_rl.data.replay.segments import SegmentStore
from lightning_rl.data.rollout import ExperienceDataset, RunCollector, StepCollector
from lightning_rl.errors import SettingError
from lightning_rl.networks.memory import Memory
from lightning_rl.types import Experience, State, Transition, Tree, tree_map, tree_to_torch

PROGRESS = ("learning_starts", "random_until", "phases")
"""Attributes that track the warm-up and the learning phases of a run; checkpoints save them."""


@dataclass(frozen=True)
class ReplaySettings:
    """When to act and when to learn; `training.settings.ReplayFields` describes and checks each field."""

    buffer_size: int
    batch_size: int
    learning_starts: int
    train_freq: int
    gradient_steps: int
    steps_per_iteration: int
    n_steps: int
    warmup: str
    memory: Memory | None = None

    def __post_init__(self) -> None:
        if self.gradient_steps == 0:
            raise SettingError("gradient_steps 0 would never learn; use a number of updates, or -1 for as many as environment steps")
        length = 1 if self.memory is None else self.memory.sequence_length
        if length > self.batch_size:
            raise SettingError(f"memory.sequence_length {length} is longer than batch_size {self.batch_size}; lower it")
        if rest := self.batch_size % length:
            sizes = f"{self.batch_size - rest} or {self.batch_size - rest + length}"
            raise SettingError(f"batch_size {self.batch_size} is no multiple of memory.sequence_length {length}; use {sizes}")


class SampledDataset(ExperienceDataset):
    """Endless iterations, each an iterator over batches that are sampled from a replay buffer.

    Args:
        signals: the S reward signals, by name, see `rewards/signal.py`.
        settings: size of batches and their steps.
    """

    def __init__(
        self,
        collector: RunCollector,
        buffer: ReplayBuffer,
        signals: Mapping[str, Any],
        settings: ReplaySettings,
        device: torch.device,
        iterations: int,
    ) -> None:
        super().__init__(collector, iterations)
        self.buffer, self.signals, self.settings, self.device = buffer, dict(signals), settings, device
        powers = np.arange(settings.n_steps)[:, None]
        gamma = np.array([signal.gamma for signal in signals.values()])
        self.powers: tuple[Tensor, ...] = torch.tensor(gamma**powers, dtype=torch.float32, device=device).unbind(1)
        """γ⁰ … γⁿ⁻¹ of each signal."""
        self.discounts = np.concatenate([np.zeros((1, len(gamma))), gamma ** (powers + 1)]).astype(np.float32)
        """Discount of each signal after k steps, `[n + 1, S]`; 0 after 0 steps, which stands for a termination."""
        self.ignore_done = np.array([signal.ignore_done for signal in signals.values()])
        self.needs_steps = any(signal.sees or signal.ignore_done for signal in signals.values())
        self.progress = 0.0
        self.rows = np.zeros(0, dtype=np.int64)
        self.mean_rewards: dict[str, Tensor] = {}
        """Mean reward per step of each signal in the newest batch, if there are others than the environment's reward."""

    def __iter__(self) -> Iterator[Iterator[Transition]]:
        while True:
            self.is_whole = False
            yield self._iteration()

    def _iteration(self) -> Iterator[Transition]:
        raise NotImplementedError

    def sample(self) -> Transition:
        """Draw a batch of transitions, with the current rewards of all signals."""
        window = self.buffer.sample(self.settings.batch_size, self.progress)
        self.rows = window.rows
        arrays = (window.obs, window.action, window.reward, self.discounts[window.steps], window.next_obs, window.weight)
        masks, sequences = (window.action_mask, window.next_action_mask), (window.episode_start, window.memory, window.successor)
        (obs, action, reward, discount, next_obs, weight), masks, sequences = tree_to_torch((arrays, masks, sequences), self.device)
        if self.needs_steps:
            experience, discount = self._steps(window)
            streams = [signal(experience) * (experience.weight > 0) for signal in self.signals.values()]
            counted = (experience.weight > 0).sum()
            self.mean_rewards = {name: stream.sum() / counted for name, stream in zip(self.signals, streams, strict=True)}
        else:
            streams = [signal(Experience((), (), (), reward)) for signal in self.signals.values()]
        if self.settings.n_steps > 1:
            streams = [(stream * power).sum(-1, keepdim=True) for stream, power in zip(streams, self.powers, strict=True)]
        reward = streams[0] if len(streams) == 1 else torch.cat(streams, -1)
        self.batch = Transition(obs, action, reward, discount, next_obs, weight, window.rows, *masks, *sequences)
        if self.needs_steps:
            self.batch = self.batch._replace(experience=tree_map(lambda leaf: leaf.flatten(0, 1), experience))
        return self.batch

    def _steps(self, window: Window) -> tuple[Experience, Tensor]:
        """Return the steps of all windows, `[B, n]`, and the discount of each stream after them, `[B, S]`."""
        row, following, length = self.buffer.steps(window.source if len(window.source) else window.rows)
        n = self.settings.n_steps
        weight = window.weight[:, None] * (np.arange(n) < length[:, None]) / length[:, None]
        weight = weight.astype(np.float32).reshape(-1)
        steps = Experience(row.observation.obs, row.action, following.obs, row.reward, row.terminated, weight)
        steps = tree_map(lambda leaf: leaf.reshape(-1, n, *leaf.shape[1:]), steps)
        terminated = (window.steps == 0)[:, None] & ~self.ignore_done
        discount = np.where(terminated, 0, self.discounts[length]).astype(np.float32)
        return tree_to_torch((steps, discount), self.device)

    def observations(self) -> Iterator[Tree]:
        """Yield all stored observations, including those of `demonstration_share`, in batches of a few thousand."""
        for buffer in (self.buffer, *([] if self.buffer.demonstrations is None else [self.buffer.demonstrations])):
            stored = np.concatenate([buffer.stored(env) for env in range(len(buffer.envs))])
            for rows in np.array_split(stored, max(1, len(stored) // 4096)):
                yield tree_to_torch(buffer.layout.read(rows, rows)[0].observation.obs, self.device)

    def reward_metrics(self) -> dict[str, float]:
        """Return `rewards/<signal>` if there are signals other than the environment's reward."""
        return {f"rewards/{name}": float(mean) for name, mean in self.mean_rewards.items()}


class ReplayDataset(SampledDataset):
    """Endless iterations of experience; each steps the environments between its batches.

    Once `learning_starts` steps were made, every `train_freq` environment steps, counted over all environments of this rank, are followed
    by `gradient_steps` batches (-1: as many as steps). Missed batches are not made up for: a run that is resumed with an empty buffer first
    fills it with `learning_starts` steps of its policy.

    Args:
        collector: the collector of this rank, whose `n_steps` are those of one iteration.
        ranks: number of ranks that share the environment steps.
        resumed: whether the run continues another: its policy then acts from the first step, without a random warm-up.
        buffer, signals, settings, device, iterations: as in `SampledDataset`.
    """

    state_rules: ClassVar[Rules] = {
        "learning_starts?": NUMBER.or_null(),
        "random_until?|phases?": NUMBER,
        "rows?": ROWS.or_null(),
        "replay?": MAPPING.or_null(),
    }
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    collector: StepCollector

    def __init__(
        self,
        collector: StepCollector,
        buffer: ReplayBuffer,
        signals: Mapping[str, Any],
        settings: ReplaySettings,
        device: torch.device,
        iterations: int,
        ranks: int,
        resumed: bool = False,
    ) -> None:
        super().__init__(collector, buffer, signals, settings, device, iterations)
        self.ranks, self.resumed = ranks, resumed
        self.steps = 0.0
        self.learning_starts: float | None = None
        self.random_until, self.phases = 0.0, 0
        self.store: SegmentStore | None = None
        """Where the buffer is saved, or None."""

    def begin_iteration(self, count: int, progress: float) -> None:
        self.steps, self.progress = count / self.ranks, progress
        if self.learning_starts is None:
            wanted = self.settings.learning_starts / self.ranks
            begin = 0.0 if self.resumed and len(self.buffer) else self.steps
            self.learning_starts = begin + max(wanted, self.buffer.open_rows)
            self.random_until = begin + wanted if self.settings.warmup == "random" and not self.resumed else 0.0
            self.phases = max(0, self._phases())

    def _iteration(self) -> Iterator[Transition]:
        if self.learning_starts is None:  # used without a run, which would have begun the iteration
            self.begin_iteration(0, 0.0)
        collector, settings = self.collector, self.settings
        updates = settings.train_freq if settings.gradient_steps < 0 else settings.gradient_steps
        for step in collector.transitions(math.ceil((self.random_until - self.steps) / collector.num_envs)):
            self.buffer.add(*step)
            self.steps += collector.num_envs
            due = self._phases() - self.phases
            if due > 0:
                self.phases += due
                for _ in range(due * updates):
                    yield self.sample()

    def _phases(self) -> int:
        """Return how many times `train_freq` steps were completed since learning started; equal on all ranks."""
        assert self.learning_starts is not None
        return int((self.steps - self.learning_starts) // self.settings.train_freq)

    def cut_episodes(self) -> None:
        self.buffer.cut()

    def end_iteration(self) -> None:
        rollout = self.collector.rollout()
        for signal in self.signals.values():
            signal.gather(tree_map(lambda leaf: leaf.to(self.device), rollout) if signal.sees else rollout)

    def metrics(self) -> dict[str, float]:
        """Return `replay/size`, `replay/mean_picks` (draws per row), `replay/age_mean` (transitions newer than a drawn row), and
        `rewards/<signal>` if there are signals other than the environment's reward."""
        age = {"replay/age_mean": float(self.buffer.age(self.rows).mean())} if len(self.rows) else {}
        return {**self.reward_metrics(), **self.buffer.statistics(), **age}

    def begin_save(self) -> None:
        if self.store is not None:
            self.store.save(self.buffer)

    def end_save(self, saved: bool) -> None:
        if self.store is not None:
            self.store.end_save(saved)

    def load_buffer(self, manifest: dict[str, Any], folder: Path) -> None:
        """Restore the rows that a checkpoint saved in a folder next to it."""
        store = self.store if self.store is not None and self.store.folder == folder else SegmentStore(folder)
        store.load(manifest, self.buffer)

    def own_state(self) -> State:
        rewards = {name: float(mean) for name, mean in self.mean_rewards.items()}
        manifest = None if self.store is None else self.store.manifest
        return {**{name: getattr(self, name) for name in (*PROGRESS, "rows")}, "mean_rewards": rewards, "replay": manifest}

    def set_own_state(self, state: State, new_episodes: str | None) -> None:
        if state["replay"] is not None:
            self.rows = state["rows"]
            self.mean_rewards = {name: torch.tensor(mean) for name, mean in state.get("mean_rewards", {}).items()}
        if len(self.buffer):  # else it is filled again before learning continues
            for name in PROGRESS:
                setattr(self, name, state[name])
        if new_episodes is not None:
            self.buffer.cut()


class OfflineDataset(SampledDataset):
    """Endless iterations of batches from a buffer with a fixed dataset; no environment is stepped.

    Args:
        collector: a `NoCollector`.
        updates_per_iteration: batches per iteration; the last iteration has the remaining ones.
        max_updates: total number of batches in the run.
        buffer, signals, settings, device: as in `SampledDataset`.
    """

    restart_notice = "transitions are drawn in another order"
    state_rules: ClassVar[Rules] = {"sampling?": MAPPING}

    def __init__(
        self,
        collector: RunCollector,
        buffer: ReplayBuffer,
        signals: Mapping[str, Any],
        settings: ReplaySettings,
        device: torch.device,
        updates_per_iteration: int,
        max_updates: int,
    ) -> None:
        super().__init__(collector, buffer, signals, settings, device, -(-max_updates // updates_per_iteration))
        self.updates_per_iteration, self.max_updates = updates_per_iteration, max_updates
        self.updates = updates_per_iteration

    def begin_iteration(self, count: int, progress: float) -> None:
        self.updates, self.progress = min(self.updates_per_iteration, self.max_updates - count), progress

    def _iteration(self) -> Iterator[Transition]:
        for _ in range(self.updates):
            yield self.sample()

    def metrics(self) -> dict[str, float]:
        """Return `train/epochs`, how many times each transition was drawn on average."""
        return {**self.reward_metrics(), "train/epochs": self.buffer.drawn / len(self.buffer)}

    def own_state(self) -> State:
        return {"sampling": self.buffer.sampling_state()}

    def set_own_state(self, state: State, new_episodes: str | None) -> str | None:
        """Continue the random draws; the dataset itself is read again."""
        return self.buffer.set_sampling_state(state["sampling"])
