"""Replay buffer (Lin 1992; Mnih et al. 2015), and an estimate of its memory."""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Space
from torch import Tensor

from lightning_rl.data.replay.hindsight import GoalReward, Hindsight, RelabelConfig
from lightning_rl.data.replay.sampling import Prioritized, Sequences, Window, concatenate
from lightning_rl.data.replay.storage import Observation, ReplayConfig, Row, check_counts, make_row_template
from lightning_rl.envs.masks import Masks, NoMasks
from lightning_rl.errors import SettingError
from lightning_rl.spaces import MASK, Spaces
from lightning_rl.types import EnvStep, State, Tree, tree_index, tree_leaves, tree_map

NO_MASKS = NoMasks("demonstration {}")


class ReplayBuffer:
    """The newest transitions of N environments, in a ring of rows for each environment.

    A row is the start of a window of up to `n_steps` steps, which ends early at the end of an episode. The row can be drawn once its window
    is complete. With a memory, a row is the start of a sequence, which may contain the end of an episode and continue with the next one.

    Args:
        action: an action of one environment as sampled, a tree of arrays.
        capacity: transitions of all environments, rounded down to a multiple of N.
        n_steps: n, the longest window.
        config: how to store and draw rows.
        frames: number of frames that the environment stacks along the first dimension of its observations, so that each can be stored once.
        sequences: how to draw sequences instead of rows.
        action_mask: a mask of one environment, `[M]`; () without masks.
        demonstrations: a second, read-only buffer with the same kind of rows. Each batch holds rows of both, its own first (Ball et al.
            2023, https://arxiv.org/abs/2302.02948, where half of them are demonstrations). Metrics of this buffer are about its own rows,
            and only these can have priorities.
        share: share of each batch from `demonstrations`, in whole rows or whole sequences; each batch has at least one of each kind.
        goal_reward: rewards for other goals, for `config.relabel`.
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
        demonstrations: Self | None = None,
        share: float = 0.0,
        goal_reward: GoalReward | None = None,
    ) -> None:
        length = capacity // num_envs
        self.sequences = sequences
        self.lag = 0 if sequences is None else sequences.slots(n_steps) - 1
        """Number of each ring's newest rows that cannot start a sequence yet."""
        rows = max(n_steps, self.lag) + 1
        if length < rows:
            needed = "(n_steps + 1)" if sequences is None else "(burn_in + sequence_length + n_steps)"
            least = f"num_envs * {needed} = {num_envs} * {rows} = {num_envs * rows}"
            raise SettingError(f"buffer_size must be at least {least}, got {capacity}")
        self.template = make_row_template(space, action, () if sequences is None else sequences.memory, action_mask)
        directory = None if config.directory is None else Path(config.directory)
        self.layout = config.layout(self.template, num_envs, length, directory, frames)
        self.length, self.slots, self.n_steps = length, length + self.layout.spare, n_steps
        rows = num_envs * self.slots
        self.priorities = Prioritized(rows, config.alpha, config.beta) if config.prioritized else None
        """None: draw uniformly."""
        self.replace = config.replace
        self.hindsight = None if goal_reward is None else Hindsight(config.relabel or RelabelConfig(), goal_reward, num_envs, self.slots)
        """None: keep the original goals."""
        self.rng = np.random.default_rng(seed)
        self.envs = np.arange(num_envs)
        self.first = self.envs * self.slots
        self.head = np.zeros(num_envs, dtype=np.int64)
        """The next slot to write in each ring."""
        self.count = np.zeros(num_envs, dtype=np.int64)
        self.open = np.zeros(num_envs, dtype=np.int64)
        """Number of each ring's newest rows without a complete window or sequence."""
        self.written = np.zeros(num_envs, dtype=np.int64)
        """Number of rows ever written to each ring; row number w is in slot w modulo the number of slots."""
        self.drawn = 0
        self.demonstrations, self.share = demonstrations, share
        self.first_demonstration = num_envs * self.slots
        """Index of the first row of the second buffer."""

    def __len__(self) -> int:
        return int(self.count.sum())

    @property
    def ready(self) -> int:
        """Return the number of rows that can be drawn."""
        return int((self.count - self.open).sum())

    @property
    def open_rows(self) -> int:
        """Return the maximum number of steps before a row can be drawn; with sequences, every other step may be a reset, not a row."""
        return max(self.n_steps - 1, 2 * self.lag) * len(self.envs)

    @property
    def added(self) -> int:
        """Return the number of rows ever written."""
        return int(self.written.sum())

    def add(self, obs: Tree, action: Tree, step: EnvStep, memory: Tree = (), action_mask: Tree = ()) -> None:
        """Store one step of all environments, with the policy's memory and the masks before it, except rows that are not experience.

        A row that is not experience cuts the episode: the row after it does not follow the row before it.
        """
        next_observation = Observation(step.obs, step.mask)
        if len(step.ended):
            next_observation = tree_map(np.array, next_observation)
            for leaf, final in zip(tree_leaves(next_observation), tree_leaves((step.final_obs, step.final_mask)), strict=True):
                leaf[step.ended] = final
        row = Row(Observation(obs, action_mask), action, step.reward, step.terminated, step.terminated | step.truncated, memory)
        if step.valid.all():
            self.write(self.envs, row, next_observation)
        else:
            envs = np.flatnonzero(step.valid)
            self.write(envs, *tree_index((row, next_observation), envs))
            self.cut(np.flatnonzero(~step.valid))

    def write(self, envs: np.ndarray, row: Row, next_observation: Observation) -> None:
        """Write one transition into each of these rings."""
        first, head = self.first[envs], self.head[envs]
        rows = first + head
        self.layout.write(rows, (row, next_observation))
        overwritten = first + (head + self.layout.spare) % self.slots if self.layout.spare else rows
        self.head[envs] = (head + 1) % self.slots
        self.count[envs] = np.minimum(self.count[envs] + 1, self.length)
        self.written[envs] += 1
        if self.lag:
            self.open[envs] = np.minimum(self.count[envs], self.lag)
            rows = (first + (head - self.lag) % self.slots)[self.count[envs] > self.lag]
        elif self.n_steps > 1:
            self.open[envs] += 1
            rows = self._close_windows(envs, row.ended)
        if self.priorities is not None:
            self.priorities.admit(rows, overwritten)

    def _close_windows(self, envs: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Close windows of n steps, and all windows of ended episodes; return their rows."""
        still_open = np.where(ended, 0, np.minimum(self.open[envs], self.n_steps - 1))
        age = np.arange(self.n_steps)
        ring, age = ((still_open[:, None] <= age) & (age < self.open[envs][:, None])).nonzero()
        self.open[envs] = still_open
        return self.first[envs[ring]] + (self.head[envs[ring]] - 1 - age) % self.slots

    def cut(self, envs: np.ndarray | None = None) -> None:
        """Truncate the current episodes in some rings (default: all), so that the next rows do not follow them."""
        envs = self.envs if envs is None else envs
        envs = envs[self.count[envs] > 0]
        newest = self.first[envs] + (self.head[envs] - 1) % self.slots
        running = ~self.layout.row.ended[newest]
        self.layout.cut(newest[running])
        closed = self._close_windows(envs[running], np.array(True)) if not self.lag else None
        if closed is not None and self.priorities is not None:
            self.priorities.admit(closed)

    def extend(self, transitions: Iterable[Mapping[str, Any]], from_env: Callable[[Tree], Tree], masks: Masks | NoMasks = NO_MASKS) -> None:
        """Store demonstrations: mappings with obs, action, reward, next_obs, terminated and truncated, in the order of their episodes.

        Each episode goes to the ring with the fewest rows. Incomplete episodes are truncated at their last transition, and so are the
        current episodes of the buffer.

        Args:
            transitions: transitions of one environment, with actions in its own format.
            from_env: converts the environment's actions `[1, ...]` to the stored format.
            masks: reads masks under `action_mask` and `next_action_mask`, or from the observations.
        """
        self.cut()
        rows = list(transitions)
        env = int(self.count.argmin())
        memory = tree_map(lambda leaf: leaf[None], self.template.memory)  # unknown
        for i, (t, following) in enumerate(zip_longest(rows, rows[1:])):
            leaves = () if following is None else zip(tree_leaves(t["next_obs"]), tree_leaves(following["obs"]), strict=True)
            goes_on = following is not None and all(np.array_equal(a, b) for a, b in leaves)
            terminated = bool(t["terminated"])
            ended = terminated or bool(t["truncated"]) or not goes_on
            next_info = {MASK: t[f"next_{MASK}"]} if f"next_{MASK}" in t else {}
            seen = Observation(*masks.one(t["obs"], t, i)), Observation(*masks.one(t["next_obs"], next_info, i, over=terminated))
            (observation, next_observation), action = tree_map(lambda leaf: np.asarray(leaf)[None], (seen, t["action"]))
            row = Row(observation, from_env(action), np.array([t["reward"]]), np.array([terminated]), np.array([ended]), memory)
            self.write(np.array([env]), row, next_observation)
            if ended:
                env = int(self.count.argmin())

    def demonstration_rows(self, batch_size: int) -> int:
        """Return the number of demonstration rows in a batch; raise `SettingError` if it is none or all of the rows."""
        length = 1 if self.sequences is None else self.sequences.length
        drawn = round(self.share * (batch_size // length))
        if not 0 < drawn < batch_size // length:
            kind = "rows" if self.sequences is None else f"sequences of {length} rows"
            share = f"replay.demonstration_share {self.share:g} of {batch_size // length} {kind} is {drawn}"
            raise SettingError(f"{share}; a batch must hold both demonstrations and the run's own")
        return drawn * length

    def sample(self, batch_size: int, progress: float = 0.0) -> Window:
        """Draw `batch_size` rows, or sequences with this number of rows in total; `progress` of the run anneals the importance weights.

        Raises `SettingError`: there are no rows, or fewer than `batch_size` without replacement.
        """
        shown = 0 if self.demonstrations is None else self.demonstration_rows(batch_size)
        if self.sequences is not None:
            batch = self._sample_sequences(self.sequences, batch_size - shown, progress)
        else:
            rows, weight = self._draw(batch_size - shown, progress)
            self.drawn += len(rows)
            if self.n_steps == 1:
                row, following = self.layout.read(rows, rows)
                reward, steps = row.reward[:, None], np.where(row.terminated, 0, 1)
            else:
                reward, steps, _, last = self.windows(rows)
                row, following = self.layout.read(rows, last)
            (obs, mask), (next_obs, next_mask) = row.observation, following
            batch = Window(obs, row.action, reward, steps, next_obs, weight, rows, action_mask=mask, next_action_mask=next_mask)
            if self.hindsight is not None:
                self.hindsight.relabel(batch, self)
        return batch if self.demonstrations is None else concatenate(batch, self.demonstrations.sample(shown), self.first_demonstration)

    def _draw(self, number: int, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows to learn from. Return them and their weights, which sum to 1 if all rows are equally likely."""
        ready = self.ready
        if not ready:
            raise SettingError(f"there is nothing to learn from yet with n_steps {self.n_steps}: raise learning_starts")
        if self.priorities is not None:
            return self.priorities.draw(self.rng, ready, number, progress)
        if not self.replace and ready < number:
            raise SettingError(f"{number} rows without replacement of {ready}: raise learning_starts or lower batch_size")
        drawn = self.rng.integers(0, ready, number) if self.replace else self.rng.choice(ready, number, replace=False, shuffle=False)
        return self.locate(drawn), np.full(number, 1 / number, dtype=np.float32)

    def _sample_sequences(self, sequences: Sequences, batch_size: int, progress: float) -> Window:
        """Draw N = `batch_size` / `length` sequences, in time-major order, B = T · N."""
        starts, weight = self._draw(batch_size // sequences.length, progress)
        num, steps = len(starts), sequences.slots(self.n_steps)
        self.drawn += num * sequences.length
        window = self.ahead(starts, steps).T
        rows, final = sequences.arrange(window, self.layout.row.ended[window])
        flat = rows.reshape(-1)
        row, following = self.layout.read(flat, flat)
        at = final.reshape(-1)
        for leaf, last in zip(tree_leaves(row.observation), tree_leaves(following), strict=True):
            leaf[at] = last[at]
        reward, ahead, length, _ = self.windows(flat)
        slot = np.arange(steps)[:, None]
        learned = ~final & (slot >= sequences.burn_in) & (slot < sequences.burn_in + sequences.length)
        (obs, mask), successor = row.observation, np.minimum(slot + length.reshape(steps, num), steps - 1) * num + np.arange(num)
        return Window(
            obs=obs,
            action=row.action,
            reward=reward,
            steps=ahead,
            next_obs=obs,
            weight=(weight * learned * (num / max(1, learned.sum()))).astype(np.float32).reshape(-1),
            rows=starts,
            episode_start=np.concatenate([np.zeros((1, num), dtype=bool), final[:-1]]),
            memory=tree_index(row.memory, slice(num)),
            successor=successor.reshape(-1),
            # slots of final observations hold the action before, which may be illegal there
            action_mask=mask if isinstance(mask, tuple) else mask | at[:, None],
            next_action_mask=mask,
            source=flat,
        )

    def update(self, rows: np.ndarray, errors: Callable[[], Tensor]) -> None:
        """Set the priorities of drawn rows, own ones or demonstrations, by a function that returns their errors `[B]`."""
        assert self.priorities is not None
        collected = rows[rows < self.first_demonstration]
        self.priorities.update(collected, errors if self.demonstrations is None else lambda: errors()[: len(collected)])

    def ahead(self, rows: np.ndarray, steps: int) -> np.ndarray:
        """Return the rows of the window of `steps` steps that begins with each row, `[B, steps]`."""
        slot = rows % self.slots
        return (rows - slot)[:, None] + (slot[:, None] + np.arange(steps)) % self.slots

    def windows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Follow up to n steps from each row, to the end of its episode.

        Returns rewards `[B, n]`, the number of steps to the next observation (0 if terminated), the number of steps, and the last row.
        """
        window = self.ahead(rows, self.n_steps)
        ended = self.layout.row.ended[window]
        length = np.where(ended.any(1), ended.argmax(1) + 1, self.n_steps)
        last = window[np.arange(len(rows)), length - 1]
        reward = self.layout.row.reward[window] * (np.arange(self.n_steps) < length[:, None])
        return reward.astype(np.float32), np.where(self.layout.row.terminated[last], 0, length), length, last

    def steps(self, rows: np.ndarray) -> tuple[Row, Observation, np.ndarray]:
        """Return the steps of the windows that begin with rows, `[B · n]`: rows, the observations after them, and each window's length.

        The last row of a window that is shorter than n is repeated.
        """
        collected = rows < self.first_demonstration
        if self.demonstrations is not None and not collected.all():
            parts = self.steps(rows[collected]), self.demonstrations.steps(rows[~collected] - self.first_demonstration)

            def merge(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
                places = collected.repeat((len(mine) + len(other)) // len(collected))
                both = np.empty((len(places), *mine.shape[1:]), mine.dtype)
                both[places], both[~places] = mine, other
                return both

            return tree_map(merge, *parts)
        length = self.windows(rows)[2]
        steps = np.minimum(np.arange(self.n_steps), length[:, None] - 1)  # slots beyond a window's end may be empty
        window = np.take_along_axis(self.ahead(rows, self.n_steps), steps, 1).reshape(-1)
        row, following = self.layout.read(window, window)
        return row, following, length

    def stored(self, env: int) -> np.ndarray:
        """Return all rows of an environment, oldest first, including those that cannot be drawn yet."""
        return self.first[env] + (self.head[env] - self.count[env] + np.arange(self.count[env])) % self.slots

    def locate(self, number: np.ndarray) -> np.ndarray:
        """Convert numbers 0 … ready − 1 to rows; they enumerate the drawable rows, oldest first, environment by environment."""
        if len(self.head) == 1 and self.count[0] < self.length:  # nothing is overwritten yet
            return number
        ready = self.count - self.open
        ends = ready.cumsum()
        env = ends.searchsorted(number, side="right")
        place = number - (ends - ready)[env]
        return self.first[env] + (self.head[env] - self.count[env] + place) % self.slots

    def age(self, rows: np.ndarray) -> np.ndarray:
        """Return for each own row the number of newer transitions of the same environment."""
        rows = rows[rows < self.first_demonstration]
        return (self.head[rows // self.slots] - 1 - rows) % self.slots

    def statistics(self) -> dict[str, float]:
        """Return the number of rows, and the mean number of draws per added row."""
        return {"replay/size": float(len(self)), "replay/mean_picks": self.drawn / max(1, self.added)}

    def position(self) -> State:
        """Return the buffer's state without its rows: counts, open windows, and what the next draws depend on."""
        opened = np.zeros_like(self.open) if self.lag else self.open  # for sequences it follows from the counts
        state = {"written": self.written, "open": opened, "drawn": self.drawn, "rng": self.rng.bit_generator.state}
        state |= {} if self.demonstrations is None else {"shown": self.demonstrations.rng.bit_generator.state}
        return {**state, "layout": self.layout.position(), "sampler": {} if self.priorities is None else self.priorities.position()}

    def continue_from(self, position: State) -> None:
        """Restore the `position` of a buffer made with the same arguments; raise `ValueError` for invalid values."""
        written, opened = (check_counts(position[name], self.envs.shape) for name in ("written", "open"))
        count = np.minimum(written, self.length)
        if (opened > np.minimum(count, self.n_steps - 1)).any():
            raise ValueError(f"{opened.max()} open windows of {self.n_steps} steps")
        self.drawn = int(check_counts(position["drawn"], ()))
        self.rng.bit_generator.state = position["rng"]
        self.written[:], self.count[:], self.head[:] = written, count, written % self.slots
        self.open[:] = np.minimum(count, self.lag) if self.lag else opened
        self.layout.continue_from(position["layout"])
        if self.priorities is not None:
            self.priorities.continue_from(position["sampler"])
        if self.demonstrations is not None and "shown" in position:  # a run may be resumed with demonstrations although it began without
            self.demonstrations.rng.bit_generator.state = position["shown"]

    def sampling_state(self) -> State:
        """Return what the next draws depend on except the rows, which do not change."""
        if self.priorities is None:
            sampler: State = {}
        else:
            sampler = {**self.priorities.position(), "priorities": self.priorities.priorities(self.locate(np.arange(self.ready)))}
        return {"ready": self.ready, "drawn": self.drawn, "rng": self.rng.bit_generator.state, "sampler": sampler}

    def set_sampling_state(self, state: State) -> str | None:
        """Restore the result of `sampling_state`. Return the reason if that is impossible, else None; raise `ValueError` for bad values."""
        if state["ready"] != self.ready:
            return f"the checkpoint has {state['ready']:,} transitions, not {self.ready:,}"
        if bool(state["sampler"]) != (self.priorities is not None):
            return f"the checkpoint has {'no ' if self.priorities is not None else ''}priorities"
        self.drawn = int(check_counts(state["drawn"], ()))
        self.rng.bit_generator.state = state["rng"]
        if self.priorities is not None:
            self.priorities.continue_from(state["sampler"])
            self.priorities.restore(self.locate(np.arange(self.ready)), state["sampler"]["priorities"])
        return None

    def reseed(self, seed: int) -> None:
        """Continue the draws like a new buffer with this seed."""
        self.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        if self.demonstrations is not None:
            self.demonstrations.reseed(seed + 1)


CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def describe_memory(
    spaces: Spaces, action: Tree, buffer_size: int, config: ReplayConfig, ranks: int, frames: int = 1, memory: Tree = ()
) -> str:
    """Describe in one line the memory or disk space that the replay buffers of all ranks take.

    Raises `SettingError`: it is more than 90 % of the machine's memory, or more than the free disk space.
    """
    template = make_row_template(spaces.observation, action, memory, spaces.masks())
    size = buffer_size * ranks * config.layout.bytes_per_row(template, frames)
    words = f"replay buffer: {buffer_size:,} transitions" + f" on each of {ranks} ranks" * (ranks > 1) + f", {format_bytes(size)}"
    if config.directory is not None:
        folder = Path(config.directory).absolute()
        free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.is_dir())).free
        if size > free:
            raise SettingError(f"{words}, but the disk of replay.directory {config.directory} has {format_bytes(free)}; lower buffer_size")
        return f"{words} in {config.directory}"
    total = get_memory_limit()
    if size > 0.9 * total:
        instead = "lower buffer_size" if config.optimize_memory_usage else "lower buffer_size or set replay.optimize_memory_usage"
        raise SettingError(f"{words}, more than 90 % of this machine's {format_bytes(total)}; {instead}, or name a replay.directory")
    return f"{words} of {format_bytes(total)} memory"


def get_memory_limit() -> int:
    """Return the memory in bytes that this process may use: the machine's, or its container's if that is less."""
    texts = [path.read_text().strip() for path in CGROUP_LIMITS if path.is_file()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *(int(text) for text in texts if text.isdigit())])


def format_bytes(size: int) -> str:
    """Format a number of bytes as MB or GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
