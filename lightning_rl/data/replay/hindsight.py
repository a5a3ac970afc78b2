"""Hindsight Experience Replay (Andrychowicz et al. 2017, https://arxiv.org/abs/1707.01495): learn from goals that were reached by chance.

An environment with goals has Dict observations with `achieved_goal` and `desired_goal`, and a method
`compute_reward(achieved_goal, desired_goal, info)`. The reward of a row for another goal is computed when the row is drawn; stored rows do
not change.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

from lightning_rl.data.replay.sampling import Window
from lightning_rl.envs.config import EnvConfig, single_env_config
from lightning_rl.envs.make import make_env
from lightning_rl.envs.sync import contract_of
from lightning_rl.errors import SettingError, keep_running
from lightning_rl.settings.fields import Range, read_fields
from lightning_rl.spaces import Spaces, observation_leaves, short

Strategy = Literal["future", "final", "episode"]
ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
RowFunction = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function of achieved and desired goals `[B, ...]` that returns `[B]`."""


@dataclass(frozen=True)
class RelabelConfig:
    """Which goals replace the original ones of drawn rows, and how often.

    Args:
        strategy: goals reached in the same episode: `future` by the row or after it, `final` at the end, `episode` at any time.
        k: relabelled rows for each row with its original goal: a drawn row is relabelled with probability k / (k + 1).
    """

    strategy: Strategy = "future"
    k: Annotated[int, Range(1)] = 4

    def __post_init__(self) -> None:
        read_fields(self, "replay.relabel.")


class Rings(Protocol):
    """The parts of a replay buffer that relabelling reads."""

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
    """The environment's own functions for rewards, and terminations, with other goals.

    terminated: None without `compute_terminated`: terminations do not change.
    """

    def __init__(self, reward: RowFunction, terminated: RowFunction | None = None) -> None:
        self.reward, self.terminated = reward, terminated


class Hindsight:
    """Relabels drawn rows of a replay buffer with N rings of `slots` rows.

    Goals are drawn from the rows of the same episode that are still in the buffer; in a running episode, from those up to its newest row.
    """

    def __init__(self, config: RelabelConfig, goal_reward: GoalReward, num_envs: int, slots: int) -> None:
        self.strategy, self.share, self.goal_reward = config.strategy, config.k / (config.k + 1), goal_reward
        self.start = np.zeros(num_envs * slots, dtype=np.int64)
        """For each row of an ended episode, the number of the episode's first row in its ring; `stop` is one more than its last."""
        self.stop = np.zeros(num_envs * slots, dtype=np.int64)
        self.current = np.zeros(num_envs, dtype=np.int64)
        """Number of the first row of each ring's running episode."""
        self.seen = np.zeros(num_envs, dtype=np.int64)
        """Number of rows of each ring that `find_ends` has processed."""

    def relabel(self, window: Window, buffer: Rings) -> None:
        """Relabel each row in place with probability k / (k + 1): the goals of both observations, the rewards, and the terminations."""
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
            some = np.flatnonzero(row.terminated[: len(steps)])  # did they terminate for a reason other than their goal?
            if len(some):
                ended[some] |= ~self.goal_reward.terminated(achieved[some], following.obs[DESIRED][some])
            ended = ended.reshape(-1, n) & (np.arange(n) < length[:, None])
            window.steps[chosen] = np.where(ended.any(1), 0, length)
            length = np.where(ended.any(1), ended.argmax(1) + 1, length)
        reward = self.goal_reward.reward(achieved, desired).reshape(-1, n)
        window.reward[chosen] = np.where(np.arange(n) < length[:, None], reward, 0)
        for observation in (window.obs, window.next_obs):
            observation[DESIRED][chosen] = goal

    def draw(self, rows: np.ndarray, buffer: Rings) -> np.ndarray:
        """Draw for each row a row of its episode whose next observation provides the goal."""
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
        """Record the episodes that ended since the last call; after a buffer was restored, all of them."""
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


def make_goal_reward(env: EnvConfig | Callable[[], gym.Env] | VectorEnv | None, spaces: Spaces) -> GoalReward:
    """Find an environment's rewards for other goals by building an environment and stepping it once; it stays open.

    Args:
        env: settings, a function that builds an environment, or a ready vector environment that holds its environments.
        spaces: its spaces.

    Raises:
        SettingError: it has no goals, or its rewards differ from those of its `compute_reward`.
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
                raise SettingError(f"replay.relabel cannot be combined with env.{name}, which compute_reward does not know; leave one out")
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
    """Return an environment's rewards for other goals; it is reset and stepped once. Raises `SettingError` as `make_goal_reward` does."""
    name = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
    if not env.has_wrapper_attr("compute_reward"):
        raise SettingError(f"replay.relabel needs an environment with compute_reward, but {name} has none")
    compute_reward = env.get_wrapper_attr("compute_reward")
    with contract_of(env, 0).naming():
        first, _ = env.reset(seed=0)
        env.action_space.seed(0)
        obs, step_reward, *_ = env.step(env.action_space.sample())
    achieved = np.stack([obs[ACHIEVED], first[ACHIEVED]])
    desired = np.stack([obs[DESIRED], obs[ACHIEVED]])
    try:
        computed = float(compute_reward(achieved[0], desired[0], {}))
        reward = over_rows(compute_reward, achieved, desired, float)
    except BaseException as error:  # user code may raise anything
        keep_running(error, name)
        raise describe_failure(f"compute_reward of {name}", error) from error
    if not np.isclose(computed, float(step_reward), rtol=1e-4, atol=1e-5):
        why = "relabelled rows would have other rewards; leave out wrappers that change rewards"
        raise SettingError(f"replay.relabel: a step of {name} gives {float(step_reward):g} but compute_reward returns {computed:g}: {why}")
    terminated = None
    if env.has_wrapper_attr("compute_terminated"):
        try:
            terminated = over_rows(env.get_wrapper_attr("compute_terminated"), achieved, desired, bool)
        except NotImplementedError:
            pass
        except BaseException as error:
            keep_running(error, name)
            raise describe_failure(f"compute_terminated of {name}", error) from error
    return GoalReward(reward, terminated)


def describe_failure(what: str, error: BaseException) -> SettingError:
    """Return the error for a function of an environment that cannot be called without infos."""
    return SettingError(f"replay.relabel: {what} fails with an empty info ({type(error).__name__}: {error})")


def over_rows(function: Callable[..., object], achieved: np.ndarray, desired: np.ndarray, kind: type) -> RowFunction:
    """Vectorize a function of one row: call it once for all rows if that gives the same results on these rows, else once per row.

    Infos are empty.
    """

    def at_once(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return np.array(function(achieved, desired, [{}] * len(achieved)), kind).reshape(len(achieved))

    def one_by_one(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return np.array([function(*goals, {}) for goals in zip(achieved, desired, strict=True)], kind)

    expected = one_by_one(achieved, desired)
    with suppress(Exception):
        if np.allclose(at_once(achieved, desired), expected):
            return at_once
    return one_by_one
