"""Small environments: two with a known best return, modelled on ML-Agents' test environments, and Connect Four."""

import math
from collections.abc import Sequence

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from pettingzoo.classic.connect_four.connect_four import raw_env

from lightning_rl.errors import SettingError, check_range
from lightning_rl.types import Info, Options, StepResult, Tree

ENTITIES_SHAPE = (10, 5)
"""Entities in a set, and numbers of an entity."""


class Simple1D(gym.Env):
    """Walk to the goal, which is -1 or 1, drawn for each episode; every observation is filled with it.

    Each dimension or branch of an action moves one position, which starts at 0. A continuous dimension moves it by its value, at most
    `step_size`; a binary branch moves it by `step_size` to the left (0) or right (1). Positions stay in [-1, 1]. An episode terminates when
    every position is at -1 or 1.
    The reward of the last step is (1 + min_steps · time_penalty) · mean(position · goal), that of every other step -`time_penalty`. The
    best return is 1.02, in 5 steps. With the first defaults of ML-Agents (`step_size` 0.1, `time_penalty` 0.001, `min_steps` 11) it is
    1.001, in 11 steps, because ten times 0.1 is a little less than 1.

    A single observation is a Box; several are a Dict with the keys `vector_0`, `visual_0`, `entities_0`, … The action space is a Box, a
    Discrete, a MultiDiscrete, or, with both kinds of actions, a Dict with the keys `continuous` and `discrete`.

    Args:
        num_vector: number of vectors to observe.
        num_visual: number of images to observe.
        num_var_len: number of sets to observe, each of 10 entities with 5 numbers.
        vis_size: height, width and channels of an image.
        vec_size: length of a vector.
        action: number of continuous dimensions and of binary branches.
        step_size: the largest move in one step.
        time_penalty: the cost of a step.
        min_steps: the number of steps whose cost the last one pays back.

    Raises:
        SettingError: nothing to observe, nothing to do, or an invalid size.
    """

    last_shown_step = math.inf
    """Last step of an episode at which the goal is observed; later observations are filled with 0."""

    def __init__(
        self,
        num_vector: int = 1,
        num_visual: int = 0,
        num_var_len: int = 0,
        vis_size: Sequence[int] = (20, 20, 3),
        vec_size: int = 1,
        action: Sequence[int] = (1, 0),
        step_size: float = 0.2,
        time_penalty: float = 0.01,
        min_steps: int = 6,
    ) -> None:
        check_range("step_size", step_size, 0, open_low=True)
        shapes = {"vector": (num_vector, (vec_size,)), "visual": (num_visual, tuple(vis_size)), "entities": (num_var_len, ENTITIES_SHAPE)}
        self.shapes = {f"{kind}_{i}": shape for kind, (number, shape) in shapes.items() for i in range(number)}
        if not self.shapes:
            raise SettingError("there is nothing to observe; raise num_vector, num_visual or num_var_len")
        boxes: dict[str, gym.Space] = {name: Box(-1.0, 1.0, shape, np.float32) for name, shape in self.shapes.items()}
        self.observation_space = Dict(boxes) if len(boxes) > 1 else next(iter(boxes.values()))
        self.action_space = make_action_space(*action)
        self.kind = "continuous" if action[0] else "discrete"
        self.position = np.zeros(sum(action))
        self.step_size, self.time_penalty = step_size, time_penalty
        self.success = 1 + min_steps * time_penalty

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        super().reset(seed=seed)
        self.goal = 2 * int(self.np_random.integers(2)) - 1
        self.position[:] = 0
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Tree) -> StepResult:
        self.position += np.clip(self.directions(action), -self.step_size, self.step_size)
        self.position.clip(-1, 1, out=self.position)
        self.steps += 1
        terminated = bool((np.abs(self.position) == 1).all())
        reward = self.success * float(self.position.mean()) * self.goal if terminated else -self.time_penalty
        return self.observe(), reward, terminated, False, {}

    def directions(self, action: Tree) -> np.ndarray:
        """Return the move of each position that an action asks for: a continuous value, or -1 or 1."""
        parts = action if isinstance(action, dict) else {self.kind: action}
        return np.concatenate([np.ravel(parts.get("continuous", ())), 2.0 * np.ravel(parts.get("discrete", ())) - 1])

    def observe(self) -> Tree:
        """Return all observations, each filled with the same number."""
        shown = self.goal if self.steps <= self.last_shown_step else 0.0
        obs = {name: np.full(shape, shown, np.float32) for name, shape in self.shapes.items()}
        return obs if len(obs) > 1 else obs.popitem()[1]


class Memory1D(Simple1D):
    """`Simple1D` that shows the goal in the first three observations of an episode, and zeros afterwards. Arguments are the same."""

    last_shown_step = 2


def make_action_space(continuous: int, branches: int) -> gym.Space:
    """Make an action space of this many continuous dimensions and binary branches."""
    parts: dict[str, gym.Space] = {}
    if continuous:
        parts["continuous"] = Box(-1.0, 1.0, (continuous,), np.float32)
    if branches:
        parts["discrete"] = Discrete(2) if branches == 1 else MultiDiscrete([2] * branches)
    if not parts:
        raise SettingError("there is nothing to do; action counts continuous dimensions and binary branches, such as [1, 0]")
    return Dict(parts) if len(parts) > 1 else parts.popitem()[1]


class BitFlipping(gym.Env):
    """Turn a word of bits into another by flipping one bit at each step (Andrychowicz et al. 2017, sect. 3.1).

    Both words are drawn for each episode. The reward is 0 at the goal, which ends the episode, and -1 otherwise. Episodes are truncated
    after 10 steps; with more bits, set `max_episode_steps` to their number.

    Args:
        bits: number of bits in a word.
    """

    def __init__(self, bits: int = 10) -> None:
        check_range("bits", bits, 1, whole=True)
        word = Box(0.0, 1.0, (bits,), np.float32)
        self.observation_space = Dict({"observation": word, "achieved_goal": word, "desired_goal": word})
        self.action_space = Discrete(bits)
        self.bits = bits

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        super().reset(seed=seed)
        self.word, self.goal = self.np_random.integers(2, size=(2, self.bits)).astype(np.float32)
        return self.observe(), {}

    def step(self, action: Tree) -> StepResult:
        self.word[action] = 1 - self.word[action]
        reward = float(self.compute_reward(self.word, self.goal, {}))
        return self.observe(), reward, reward == 0, False, {"is_success": reward == 0}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: object) -> np.ndarray:
        """Return the rewards `[...]` of reaching words `[..., bits]` with goals `[..., bits]`."""
        return np.where((achieved_goal == desired_goal).all(-1), 0.0, -1.0)

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: object) -> np.ndarray:
        """Return where words equal goals."""
        return (achieved_goal == desired_goal).all(-1)

    def observe(self) -> Tree:
        """Return both words; the achieved goal is the current word."""
        return {"observation": self.word.copy(), "achieved_goal": self.word.copy(), "desired_goal": self.goal.copy()}


class ConnectFour(gym.Env):
    """PettingZoo's `connect_four_v3` for one player against a random opponent; the first player is drawn for each episode.

    Observations are a Dict: `observation [6, 7, 2]`, the pieces of the player and of the opponent, and `action_mask [7]`, the columns that
    are not full. Four in a row end the episode with reward 1, four of the opponent's with -1, and a draw with 0. A piece in a full column
    loses immediately.
    """

    metadata = raw_env.metadata

    def __init__(self, render_mode: str | None = None) -> None:
        self.game = raw_env(render_mode=render_mode)
        self.render_mode = render_mode
        self.player, self.opponent = self.game.possible_agents
        self.observation_space = self.game.observation_space(self.player)
        self.action_space = self.game.action_space(self.player)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        super().reset(seed=seed)
        self.game.reset()
        order = self.game.possible_agents
        self.player, self.opponent = order if self.np_random.integers(2) else order[::-1]
        self.play_opponent()
        return self.game.observe(self.player), {}

    def step(self, action: Tree) -> StepResult:
        before = self.game.observe(self.player)
        if not before["action_mask"][action]:
            return before, -1.0, True, False, {}
        self.game.step(action)
        self.play_opponent()
        return self.game.observe(self.player), float(self.game.rewards[self.player]), self.game.terminations[self.player], False, {}

    def play_opponent(self) -> None:
        """Make a random move if it is the opponent's turn."""
        if self.game.agent_selection == self.opponent and not self.game.terminations[self.opponent]:
            legal = np.flatnonzero(self.game.observe(self.opponent)["action_mask"])
            self.game.step(self.np_random.choice(legal))

    def render(self) -> Tree:
        return self.game.render()

    def close(self) -> None:
        self.game.close()
