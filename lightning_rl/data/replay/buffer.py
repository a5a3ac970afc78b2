"""Replay buffer (Lin 1992; Mnih et al. 2015), and an estimate of its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from torch import Tensor

from lightning_rl.data.replay.sampling import Prioritized, Sequences, Uniform, Window
from lightning_rl.data.replay.storage import ReplayConfig, Row, Seen, check_counts
from lightning_rl.envs.masks import Masks, NoMasks
from lightning_rl.errors import SettingError
from lightning_rl.spaces import MASK, Spaces, allocate
from lightning_rl.types import EnvStep, Tree, tree_index, tree_leaves, tree_map

NO_MASKS = NoMasks("demonstration {}")


class ReplayBuffer:
    """The newest transitions of N environments, those of each in a ring of its own.

    A row is the start of a window of up to `n_steps` steps that an episode's end cuts short; it can be drawn once its window is complete.
    For a network that remembers it is the start of a sequence, which may hold the end of an episode and go on with the next one.

    Args:
        space: observation space.
        action: an action of one environment as sampled, a tree of arrays.
        capacity: transitions of all environments, rounded down to a multiple of N.
        num_envs: N.
        n_steps: n, the longest window.
        config: how to keep rows and draw them.
        frames: how many frames the environment stacks along the first dimension of its observations, so that each can be stored once.
        seed: of the draws.
        sequences: how to draw sequences instead of rows.
        action_mask: a mask of one environment, `[M]`; () if it rules out nothing.
    """

    def __init__(
        self,
        space: Space,
        action: Tree,
        capacity: int,
        num_envs: int = 1,
        *,
        n_steps: int = 1,
        config: ReplayConfig = ReplayConfig(),
        frames: int = 1,
        seed: int = 0,
        sequences: Sequences | None = None,
        action_mask: Tree = (),
    ) -> None:
        length = capacity // num_envs
        self.sequences = sequences
        self.lag = 0 if sequences is None else sequences.slots(n_steps) - 1
        """How many of each ring's newest rows begin no sequence yet."""
        rows = max(n_steps, self.lag) + 1
        if length < rows:
            needed = "(n_steps + 1)" if sequences is None else "(burn_in + sequence_length + n_steps)"
            least = f"num_envs * {needed} = {num_envs} * {rows} = {num_envs * rows}"
            raise SettingError(f"buffer_size must be at least {least}, got {capacity}")
        self.template = row_template(space, action, () if sequences is None else sequences.memory, action_mask)
        directory = None if config.directory is None else Path(config.directory)
        self.layout = config.layout(self.template, num_envs, length, directory, frames)
        self.length, self.slots, self.n_steps = length, length + self.layout.spare, n_steps
        rows = num_envs * self.slots
        self.sampler = Prioritized(rows, config.alpha, config.beta) if config.prioritized else Uniform(rows, config.replace)
        self.rng = np.random.default_rng(seed)
        self.envs = np.arange(num_envs)
        self.first = self.envs * self.slots
        self.head = np.zeros(num_envs, dtype=np.int64)
        """The slot of each ring that is written next."""
        self.count = np.zeros(num_envs, dtype=np.int64)
        self.open = np.zeros(num_envs, dtype=np.int64)
        """How many of each ring's newest rows have no complete window."""
        self.written = np.zeros(num_envs, dtype=np.int64)
        """How many rows each ring has had; row number w lies in slot w modulo the number of slots."""
        self.drawn = 0

    def __len__(self) -> int:
        return int(self.count.sum())

    @property
    def added(self) -> int:
        """How many rows were ever kept."""
        return int(self.written.sum())

    @property
    def nbytes(self) -> int:
        """What it takes, full or empty."""
        return self.layout.nbytes + self.sampler.nbytes

    @property
    def ready(self) -> int:
        """How many rows can be drawn."""
        return int(self._drawable().sum())

    def _drawable(self) -> np.ndarray:
        """Of each ring."""
        return np.maximum(self.count - self.lag, 0) if self.lag else self.count - self.open

    def add(self, obs: Tree, action: Tree, step: EnvStep, memory: Tree = (), action_mask: Tree = ()) -> None:
        """Keep one step of all environments, and the policy's memory and the masks before it, without rows that are no experience.

        Such a row in the middle of an episode means that steps were lost: what comes next does not follow the row before.
        """
        next_seen = Seen(step.obs, step.mask)
        if len(step.ended):
            next_seen = tree_map(np.array, next_seen)
            tree_map(lambda leaf, final: leaf.__setitem__(step.ended, final), next_seen, Seen(step.final_obs, step.final_mask))
        row = Row(Seen(obs, action_mask), action, step.reward, step.terminated, step.terminated | step.truncated, memory)
        if step.valid.all():
            self.write(self.envs, row, next_seen)
        else:
            envs = np.flatnonzero(step.valid)
            self.write(envs, *tree_index((row, next_seen), envs))
            self.cut(np.flatnonzero(~step.valid))

    def write(self, envs: np.ndarray, row: Row, next_seen: Seen) -> None:
        """Keep one transition in each of some rings."""
        first, head = self.first[envs], self.head[envs]
        rows = first + head
        self.layout.write(rows, row, next_seen)
        self.sampler.remove(first + (head + self.layout.spare) % self.slots if self.layout.spare else rows)
        self.head[envs] = (head + 1) % self.slots
        self.count[envs] = np.minimum(self.count[envs] + 1, self.length)
        self.written[envs] += 1
        if self.lag:
            begins = self.count[envs] > self.lag
            self.sampler.complete((first + (head - self.lag) % self.slots)[begins])
            return
        if self.n_steps == 1:
            self.sampler.complete(rows)
            return
        self.open[envs] += 1
        self._complete(envs, row.ended)

    def _complete(self, envs: np.ndarray, ended: np.ndarray) -> None:
        """Windows of n steps, and all where an episode ended, can be drawn from now on."""
        still_open = np.where(ended, 0, np.minimum(self.open[envs], self.n_steps - 1))
        age = np.arange(self.n_steps)
        ring, age = ((still_open[:, None] <= age) & (age < self.open[envs][:, None])).nonzero()
        self.sampler.complete(self.first[envs[ring]] + (self.head[envs[ring]] - 1 - age) % self.slots)
        self.open[envs] = still_open

    def cut(self, envs: np.ndarray | None = None) -> None:
        """End the episodes under way, in some rings or all, as a truncation would: what comes next does not follow them."""
        envs = self.envs if envs is None else envs
        envs = envs[self.count[envs] > 0]
        newest = self.first[envs] + (self.head[envs] - 1) % self.slots
        under_way = ~self.layout.row.ended[newest]
        self.layout.cut(newest[under_way])
        self._complete(envs[under_way], np.ones(np.count_nonzero(under_way), dtype=bool))

    def extend(self, transitions: Iterable[Mapping[str, Any]], from_env: Callable[[Tree], Tree], masks: Masks | NoMasks = NO_MASKS) -> None:
        """Keep demonstrations: mappings with obs, action, reward, next_obs, terminated and truncated, in the order of their episodes.

        Each episode goes to the ring with the fewest rows; one that the list cuts off is truncated there, and so are episodes under way.

        Args:
            transitions: of one environment, actions in its own form.
            from_env: from the environment's actions `[1, ...]` to those that are stored.
            masks: reads what was legal: under `action_mask` and `next_action_mask`, or in the observations.
        """
        self.cut()
        rows = list(transitions)
        env = int(self.count.argmin())
        for i, (t, following) in enumerate(zip_longest(rows, rows[1:])):
            goes_on = following is not None and _equal(t["next_obs"], following["obs"])
            ended = bool(t["terminated"] or t["truncated"] or not goes_on)
            next_info = {MASK: t[f"next_{MASK}"]} if f"next_{MASK}" in t else {}
            seen, next_seen = masks.one(t["obs"], t, i), masks.one(t["next_obs"], next_info, i, over=bool(t["terminated"]))
            seen, next_seen, action = tree_map(lambda leaf: np.asarray(leaf)[None], (Seen(*seen), Seen(*next_seen), t["action"]))
            flags = np.array([bool(t["terminated"])]), np.array([ended])
            memory = tree_map(lambda leaf: leaf[None], self.template.memory)  # none is known
            self.write(np.array([env]), Row(seen, from_env(action), np.array([t["reward"]]), *flags, memory), next_seen)
            if ended:
                env = int(self.count.argmin())

    @property
    def open_rows(self) -> int:
        """How many rows there may be before one can be drawn; of sequences, resets that are no rows may take every other step."""
        return max(self.n_steps - 1, 2 * self.lag) * len(self.envs)

    def sample(self, batch_size: int, progress: float = 0.0) -> Window:
        """Draw rows, or sequences of `batch_size` rows in all; `progress` of the run anneals the importance weights.

        Raises:
            SettingError: there are none, or fewer than `batch_size` without replacement.
        """
        if not self.ready:
            raise SettingError(f"there is nothing to learn from yet with n_steps {self.n_steps}: raise learning_starts")
        if self.sequences is not None:
            return self.sequences.draw(self, batch_size, progress)
        rows, weight = self.sampler.draw(self, batch_size, progress)
        self.drawn += batch_size
        if self.n_steps == 1:
            row, next_seen = self.layout.read(rows, rows)
            reward, steps = row.reward[:, None], np.where(row.terminated, 0, 1)
        else:
            reward, steps, _, last = self.windows(rows)
            row, next_seen = self.layout.read(rows, last)
        seen = row.seen
        return Window(
            seen.obs, row.action, reward, steps, next_seen.obs, weight, rows, action_mask=seen.mask, next_action_mask=next_seen.mask
        )

    def update(self, rows: np.ndarray, errors: Callable[[], Tensor]) -> None:
        """What the errors of drawn rows were when they were learned from, `[B]`, which is asked only where they matter."""
        self.sampler.update(rows, errors)

    def ahead(self, rows: np.ndarray, steps: int) -> np.ndarray:
        """The rows of a window of so many steps from each row of its ring, `[B, steps]`."""
        slot = rows % self.slots
        return (rows - slot)[:, None] + (slot[:, None] + np.arange(steps)) % self.slots

    def windows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Up to n steps from each row, to the end of its episode.

        Rewards `[B, n]`; how many steps the next observation lies ahead, 0 if terminated; how many there are; and the last row.
        """
        window = self.ahead(rows, self.n_steps)
        ended = self.layout.row.ended[window]
        length = np.where(ended.any(1), ended.argmax(1) + 1, self.n_steps)
        last = window[np.arange(len(rows)), length - 1]
        reward = self.layout.row.reward[window] * (np.arange(self.n_steps) < length[:, None])
        return reward.astype(np.float32), np.where(self.layout.row.terminated[last], 0, length), length, last

    def steps(self, rows: np.ndarray) -> tuple[Row, Tree, np.ndarray]:
        """All steps of the windows that begin with rows, one by one `[B · n]`: what is stored, what was seen next, and how many count."""
        window = self.ahead(rows, self.n_steps).reshape(-1)
        row, next_seen = self.layout.read(window, window)
        return row, next_seen, self.windows(rows)[2]

    def locate(self, number: np.ndarray) -> np.ndarray:
        """The rows of numbers 0 … ready − 1, which count the rows that can be drawn, oldest first, environment by environment."""
        if len(self.head) == 1 and self.count[0] < self.length:  # nothing is overwritten yet
            return number
        ready = self._drawable()
        ends = ready.cumsum()
        env = ends.searchsorted(number, side="right")
        place = number - (ends - ready)[env]
        return self.first[env] + (self.head[env] - self.count[env] + place) % self.slots

    def age(self, rows: np.ndarray) -> np.ndarray:
        """How many transitions of its own environment are newer than each row."""
        return (self.head[rows // self.slots] - 1 - rows) % self.slots

    def statistics(self) -> dict[str, float]:
        """The number of rows, and how often a row that was added has been drawn, on average."""
        return {"replay/size": float(len(self)), "replay/mean_picks": self.drawn / max(1, self.added)}

    def position(self) -> dict[str, Any]:
        """Where it stands, without its rows: counts, windows that are open, and what the next draws depend on."""
        own = {name: getattr(self, name) for name in ("written", "open", "drawn")}
        return {**own, "rng": self.rng.bit_generator.state, "layout": self.layout.position(), "sampler": self.sampler.position()}

    def draw_anew(self, seed: int) -> None:
        """Draw from now on as a buffer that is made with this seed."""
        self.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state

    def continue_from(self, position: Mapping[str, Any]) -> None:
        """The inverse, for a buffer made with the same arguments.

        Raises:
            ValueError: no buffer like this one can stand there.
        """
        written, opened = (check_counts(position[name], self.envs.shape) for name in ("written", "open"))
        count = np.minimum(written, self.length)
        if (opened > np.minimum(count, self.n_steps - 1)).any():
            raise ValueError(f"{opened.max()} open windows of {self.n_steps} steps")
        self.drawn = int(check_counts(position["drawn"], ()))
        self.rng.bit_generator.state = position["rng"]
        self.written[:], self.open[:], self.count[:], self.head[:] = written, opened, count, written % self.slots
        self.layout.continue_from(position["layout"])
        self.sampler.continue_from(position["sampler"])


def row_template(space: Space, action: Tree, memory: Tree = (), action_mask: Tree = ()) -> Row:
    """One row, as arrays of the right shapes and types."""
    flag = np.zeros((), dtype=bool)
    return Row(Seen(allocate(space), action_mask), tree_map(np.asarray, action), np.zeros((), dtype=np.float32), flag, flag, memory)


def _equal(a: Tree, b: Tree) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_in_words(
    spaces: Spaces, action: Tree, buffer_size: int, config: ReplayConfig, ranks: int, frames: int = 1, memory: Tree = ()
) -> str:
    """One line that says what the replay buffers of all ranks take.

    Raises:
        SettingError: more than 90 % of the machine's memory, or more than its disk has free.
    """
    template = row_template(spaces.observation, action, memory, spaces.masks())
    size = buffer_size * ranks * config.layout.bytes_per_row(template, frames)
    words = f"replay buffer: {buffer_size:,} transitions" + f" on each of {ranks} ranks" * (ranks > 1) + f", {in_words(size)}"
    if config.directory is not None:
        free = _free_disk(Path(config.directory))
        if size > free:
            raise SettingError(f"{words}, but the disk of replay.directory {config.directory} has {in_words(free)}; lower buffer_size")
        return f"{words} in {config.directory}"
    total = physical_memory()
    if size > 0.9 * total:
        instead = "lower buffer_size" if config.optimize_memory_usage else "lower buffer_size or set replay.optimize_memory_usage"
        raise SettingError(f"{words}, more than 90 % of this machine's {in_words(total)}; {instead}, or name a replay.directory")
    return f"{words} of {in_words(total)} memory"


def physical_memory() -> int:
    """Bytes this process may use: the machine's, or its container's if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUP_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def in_words(size: int) -> str:
    """Bytes as people write them."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _free_disk(folder: Path) -> int:
    folder = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
