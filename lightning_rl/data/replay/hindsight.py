"""Hindsight Experience Replay (Andrychowicz et al. 2017, https://arxiv.org/abs/1707.01495): learn from goals that were reached by chance.

An environment with goals observes a Dict with `achieved_goal` and `desired_goal`, and has a method
`compute_reward(achieved_goal, desired_goal, info)`. What a row pays for another goal is computed when it is drawn; stored rows keep theirs.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

from lightning_rl.data.replay.sampling import Window
from lightning_rl.envs.config import EnvConfig, single_env_config
from lightning_rl.envs.make import make_env
from lightning_rl.errors import SettingError, check_choice, check_range
from lightning_rl.spaces import Spaces, observation_leaves, short

Strategy = Literal["future", "final", "episode"]
ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
RowFunction = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Of achieved and desired goals `[B, ...]`, returns `[B]`."""


@dataclass(frozen=True)
class RelabelConfig:
    """Which goals take the place of those that drawn rows had, and how often.

    Args:
        strategy: goals that were reached in the same episode: `future` by the row or after it, `final` last, `episode` at any time.
        k: relabelled rows for each one with its own goal: a drawn row is relabelled with probability k / (k + 1).
    """

    strategy: Strategy = "future"
    k: int = 4

    def __post_init__(self) -> None:
        check_choice("replay.relabel.strategy", self.strategy, get_args(Strategy))
        check_range("replay.relabel.k", self.k, 1, whole=True)


class Rings(Protocol):
    """What relabelling reads of a replay buffer."""

    layout: Any
    rng: np.random.Generator
    first: np.ndarray
    count: np.ndarray
    written: np.ndarray
    slots: int
    n_steps: int

    def ahead(self, rows: np.ndarray, steps: int) -> np.ndarray: ...
    def windows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...


class GoalReward:
    """What an environment pays for other goals, and where it would terminate, by its own functions.

    terminated: None without `compute_terminated`: rows terminate where they did.
    """

    def __init__(self, reward: RowFunction, terminated: RowFunction | None = None) -> None:
        self.reward, self.terminated = reward, terminated


class Hindsight:
    """Relabels drawn rows of a replay buffer with N rings of `slots` rows.

    Goals are those of rows in the same episode that are still in the buffer; of an episode in progress, those up to its newest row.
    """

    def __init__(self, config: RelabelConfig, goal_reward: GoalReward, num_envs: int, slots: int) -> None:
        self.strategy, self.share, self.goal_reward = config.strategy, config.k / (config.k + 1), goal_reward
        self.start = np.zeros(num_envs * slots, dtype=np.int64)
        """Of each row whose episode has ended, the number of the episode's first row in its ring; and `stop`, one more than its last."""
        self.stop = np.zeros(num_envs * slots, dtype=np.int64)
        self.current = np.zeros(num_envs, dtype=np.int64)
        """The number of the first row of each ring's episode in progress."""
        self.seen = np.zeros(num_envs, dtype=np.int64)
        """How many rows of each ring `find_ends` has looked at."""

    def relabel(self, window: Window, buffer: Rings) -> None:
        """Give k of k + 1 rows, drawn at random, another goal, in place: in both observations, the rewards, and where they terminate."""
        self.find_ends(buffer)
        chosen = np.flatnonzero(buffer.rng.random(len(window.rows)) < self.share)
        if not len(chosen):
            return
        rows, n = window.rows[chosen], buffer.n_steps
        steps = buffer.ahead(rows, n).reshape(-1)
        read = np.concatenate([steps, self.draw(rows, buffer)])
        row, following = buffer.layout.read(read, read)
        achieved, goal = np.split(following.obs[ACHIEVED], [len(steps)])
        desired = goal.repeat(n, 0)
        length = buffer.windows(rows)[2]
        if self.goal_reward.terminated is not None:
            ended = self.goal_reward.terminated(achieved, desired)
            some = np.flatnonzero(row.terminated[: len(steps)])  # for another reason than their goal?
            ended[some] |= ~self.goal_reward.terminated(achieved[some], following.obs[DESIRED][some])
            ended = ended.reshape(-1, n) & (np.arange(n) < length[:, None])
            window.steps[chosen] = np.where(ended.any(1), 0, length)
            length = np.where(ended.any(1), ended.argmax(1) + 1, length)
        reward = self.goal_reward.reward(achieved, desired).reshape(-1, n)
        window.reward[chosen] = np.where(np.arange(n) < length[:, None], reward, 0)
        for observation in (window.obs, window.next_obs):
            observation[DESIRED][chosen] = goal

    def draw(self, rows: np.ndarray, buffer: Rings) -> np.ndarray:
        """Draw for each row one of its episode after which a goal had been reached."""
        ring, slot = np.divmod(rows, buffer.slots)
        written = buffer.written[ring]
        number = written - 1 - (written - 1 - slot) % buffer.slots
        in_progress = number >= self.current[ring]
        start = np.where(in_progress, self.current[ring], self.start[rows])
        stop = np.where(in_progress, written, self.stop[rows])
        if self.strategy == "final":
            goal = stop - 1
        else:
            oldest = np.maximum(start, written - buffer.count[ring])
            goal = buffer.rng.integers(number if self.strategy == "future" else oldest, stop)
        return buffer.first[ring] + goal % buffer.slots

    def find_ends(self, buffer: Rings) -> None:
        """Note where episodes ended since the last time. After a buffer was restored that is all of it."""
        for ring in np.flatnonzero(buffer.written > self.seen):
            written, first = buffer.written[ring], buffer.first[ring]
            oldest = written - buffer.count[ring]
            numbers = np.arange(max(self.seen[ring] - 1, oldest), written)  # the newest row may have been cut after it was seen
            for end in numbers[buffer.layout.row.ended[first + numbers % buffer.slots]]:
                start = max(self.current[ring], oldest)
                episode = first + np.arange(start, end + 1) % buffer.slots
                self.start[episode], self.stop[episode] = start, end + 1
                self.current[ring] = end + 1
            self.seen[ring] = written


def make_goal_reward(env: Any, spaces: Spaces) -> GoalReward:
    """Find what an environment pays for other goals, by building one and stepping it once; it stays open.

    Args:
        env: settings, a function that builds one, or a ready vector environment that holds its environments.
        spaces: its spaces.

    Raises:
        SettingError: it has no goals, or its rewards are not those of its `compute_reward`.
    """
    if spaces.agents:
        raise SettingError("replay.relabel is for environments of one agent; leave it out")
    shapes = {leaf.name: leaf.shape for leaf in observation_leaves(spaces.observation)}
    if {ACHIEVED, DESIRED} - shapes.keys() or shapes[ACHIEVED] != shapes[DESIRED]:
        observed = short(spaces.observation)
        raise SettingError(f"replay.relabel needs observations with {ACHIEVED} and {DESIRED} of one shape, got {observed}")
    if isinstance(env, EnvConfig):
        for name in ("frame_stack", "atari", "parameters"):
            if getattr(env, name):
                raise SettingError(f"replay.relabel does not go with env.{name}, of which compute_reward knows nothing; leave one out")
    if isinstance(env, VectorEnv):
        copies = getattr(env.unwrapped, "envs", None)
        if not copies:
            kind = type(env.unwrapped).__name__
            raise SettingError(f"replay.relabel cannot call compute_reward in a {kind}; pass an id, an EnvConfig or a function as env")
        return goal_reward_of(copies[0])
    if env is None:
        raise SettingError("this algorithm was loaded without an environment; pass env= to train it")
    return goal_reward_of(make_env(single_env_config(env)))


def goal_reward_of(env: gym.Env) -> GoalReward:
    """Return what one environment pays for other goals; it is reset and stepped once. Raises `SettingError` as `make_goal_reward`."""
    name = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
    if not env.has_wrapper_attr("compute_reward"):
        raise SettingError(f"replay.relabel needs an environment with compute_reward, and {name} has none")
    compute_reward = env.get_wrapper_attr("compute_reward")
    first, _ = env.reset(seed=0)
    env.action_space.seed(0)
    obs, paid, *_ = env.step(env.action_space.sample())
    achieved = np.stack([obs[ACHIEVED], first[ACHIEVED]])
    desired = np.stack([obs[DESIRED], obs[ACHIEVED]])
    try:
        computed = float(compute_reward(achieved[0], desired[0], {}))
        reward = over_rows(compute_reward, achieved, desired, float)
    except Exception as error:  # user code may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise SettingError(f"replay.relabel: compute_reward of {name} fails with an empty info ({reason})") from error
    if not np.isclose(computed, float(paid), rtol=1e-4, atol=1e-5):
        why = "relabelled rows would be paid otherwise; leave out wrappers that change rewards"
        raise SettingError(f"replay.relabel: a step of {name} pays {float(paid):g} where compute_reward returns {computed:g}: {why}")
    terminated = None
    if env.has_wrapper_attr("compute_terminated"):
        with suppress(NotImplementedError):
            terminated = over_rows(env.get_wrapper_attr("compute_terminated"), achieved, desired, bool)
    return GoalReward(reward, terminated)


def over_rows(function: Callable[..., Any], achieved: np.ndarray, desired: np.ndarray, kind: type) -> RowFunction:
    """Return a function of one row as one of many, which calls it once if that gives the same for the given rows, else for each row.

    Rows have no info: it is empty.
    """

    def at_once(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return np.array(function(achieved, desired, [{}] * len(achieved)), kind)

    def one_by_one(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return np.array([function(*goals, {}) for goals in zip(achieved, desired, strict=True)], kind)

    expected = one_by_one(achieved, desired)
    with suppress(Exception):
        found = at_once(achieved, desired)
        if found.shape == expected.shape and np.allclose(found, expected):
            return at_once
    return one_by_one
