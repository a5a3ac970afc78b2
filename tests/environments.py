"""The small environments of the tests: scripted ones that tell where they are, and probes whose values are known.

Each is registered, so that `tests.environments:Scripted-v0` builds it by its id, in a worker process too.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.wrappers.utils import RunningMeanStd

Reset = tuple[Any, dict[str, Any]]
Step = tuple[Any, float, bool, bool, dict[str, Any]]

ENDINGS = ("termination", "truncation", "both")


class Scripted(gym.Env):
    """Observes (episode, t), pays 10 · episode + t + action / 10, and ends after `period` steps, in each of `endings` in turn.

    Success is to terminate. Episodes count from `first_episode`.
    """

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(3)

    def __init__(self, period: int = 3, endings: tuple[str, ...] = ENDINGS, first_episode: int = 0) -> None:
        self.period, self.endings, self.episode = period, endings, first_episode - 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action: Any) -> Step:
        reward = 10.0 * self.episode + self.t + float(np.sum(action)) / 10
        self.t += 1
        ending = self.endings[self.episode % len(self.endings)] if self.t == self.period else None
        terminated, truncated = ending in ("termination", "both"), ending in ("truncation", "both")
        return self.observe(), reward, terminated, truncated, {"is_success": terminated} if ending else {}

    def observe(self) -> Any:
        return np.array([self.episode, self.t], np.float32)


class ScriptedDict(Scripted):
    """The same with a nested observation: floats, integers and bytes."""

    observation_space = Dict(
        {
            "where": Dict({"episode": Box(-np.inf, np.inf, (1,), np.float32), "t": Discrete(100)}),
            "image": Box(0, 255, (5, 5, 1), np.uint8),
        }
    )

    def observe(self) -> Any:
        where = {"episode": np.array([self.episode], np.float32), "t": np.int64(self.t)}
        return {"where": where, "image": np.full((5, 5, 1), (10 * self.episode + self.t) % 256, np.uint8)}


class ScriptedBox(Scripted):
    """The same with two continuous actions."""

    action_space = Box(-1, 1, (2,), np.float32)


class Reported(gym.Wrapper):
    """Reports a success only when it happens: in the episodes whose seed is in `seeds`."""

    seeds: ClassVar[set[int]] = set()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        self.seed = seed
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:
        *rest, info = super().step(action)
        return *rest, {"is_success": True} if info and self.seed in self.seeds else {}


class Standardized(gym.ObservationWrapper):
    """Subtracts the mean of all observations so far, and divides by their standard deviation."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.statistics = RunningMeanStd(shape=env.observation_space.shape)

    def observation(self, observation: Any) -> Any:
        self.statistics.update(observation[None])
        return ((observation - self.statistics.mean) / np.sqrt(self.statistics.var + 1e-8)).astype(np.float32)


class Goals(Scripted):
    """A walk to a goal, whatever is done: 100 · episode + t is achieved after t steps, 100 · episode + `goal` pays 0 and all others -1."""

    observation_space = Dict({name: Box(-np.inf, np.inf, (1,), np.float32) for name in ("observation", "achieved_goal", "desired_goal")})

    def __init__(self, period: int = 4, endings: tuple[str, ...] = ENDINGS, first_episode: int = 0, goal: int = 3) -> None:
        super().__init__(period, endings, first_episode)
        self.goal = goal

    def observe(self) -> Any:
        places = {"observation": self.t, "achieved_goal": 100 * self.episode + self.t, "desired_goal": 100 * self.episode + self.goal}
        return {name: np.array([place], np.float32) for name, place in places.items()}

    def step(self, action: Any) -> Step:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(self.compute_reward(obs["achieved_goal"], obs["desired_goal"], {})), terminated, truncated, info

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return np.where((achieved_goal == desired_goal).all(-1), 0.0, -1.0)


class GoalsBox(Goals):
    """The same with a Box of actions."""

    action_space = Box(-1.0, 1.0, (2,), np.float32)


class Quits(Scripted):
    """Ends the program in one of its methods, at the `at`-th call of it in this process."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    calls = 0
    ends: ClassVar[dict[str, Callable[[], object]]] = {
        "exits": lambda: sys.exit(0),
        "interrupts": lambda: throw(KeyboardInterrupt()),
        "raises": lambda: throw(BaseException("window closed")),
        "is interrupted": lambda: signal.default_int_handler(signal.SIGINT, None),
    }

    def __init__(self, how: str = "exits", where: str = "step", at: int = 1, render_mode: str | None = None) -> None:
        super().__init__()
        self.how, self.where, self.at, self.render_mode = how, where, at, render_mode
        self.end("__init__")

    def end(self, where: str) -> None:
        if where == self.where:
            Quits.calls += 1
            if Quits.calls == self.at:
                self.ends[self.how]()

    def step(self, action: Any) -> Step:
        self.end("step")
        return super().step(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        self.end("reset")
        return super().reset(seed=seed, options=options)

    def render(self) -> Any:
        self.end("render")
        return np.zeros((8, 8, 3), np.uint8)


def throw(error: BaseException) -> None:
    raise error


class Image(Scripted):
    """The same seen as a picture: the upper half is as bright as the episode, the lower half as t."""

    observation_space = Box(0, 255, (6, 6, 3), np.uint8)

    def observe(self) -> Any:
        picture = np.full((6, 6, 3), 16 * self.t % 256, np.uint8)
        picture[:3] = 16 * self.episode % 256
        return picture


class ImageBox(Image):
    """The same with two continuous actions."""

    action_space = Box(-1, 1, (2,), np.float32)


class Crowd(Scripted):
    """The same seen in parts: an agent for each step gone, two pictures, a body, and as a goal how the episode will end."""

    observation_space = Dict(
        {
            "agents": Box(-np.inf, np.inf, (4, 2), np.float32),
            "body": Box(-np.inf, np.inf, (2,), np.float32),
            "goal": Discrete(3),
            "sight": Dict({"camera": Box(0, 255, (6, 6, 3), np.uint8), "map": Box(0, 1, (8, 8, 1), np.float32)}),
        }
    )

    def observe(self) -> Any:
        agents = np.array([[self.episode, i] for i in range(1, 5)], np.float32)
        agents[self.t :] = 0
        camera = np.full((6, 6, 3), 16 * self.t % 256, np.uint8)
        sight = {"camera": camera, "map": np.full((8, 8, 1), self.episode % 2, np.float32)}
        body = np.array([self.episode, self.t], np.float32)
        return {"agents": agents, "body": body, "goal": np.int64(self.episode % len(self.endings)), "sight": sight}


class CrowdBox(Crowd):
    """The same with two continuous actions."""

    action_space = Box(-1, 1, (2,), np.float32)


class Probe(gym.Env):
    """A few numbers to see, one thing to learn (after Andy Jones, andyljones.com/posts/rl-debugging.html)."""

    observation_space = Box(-1, 1, (1,), np.float32)
    action_spaces = {  # noqa: RUF012
        "discrete": Discrete(2),
        "box": Box(-1, 1, (1,), np.float32),
        "hybrid": Dict({"choice": Discrete(2), "turn": Box(-1, 1, (1,), np.float32)}),
    }

    def __init__(self, action: str = "discrete") -> None:
        self.action_space = self.action_spaces[action]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.t = 0
        self.seen = self.first()
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        return np.array([self.seen], np.float32)

    def first(self) -> float:
        return 0.0


class ConstantReward(Probe):
    """One step, reward 1."""

    def step(self, action: Any) -> Step:
        return self.observe(), 1.0, True, False, {}


class DelayedReward(Probe):
    """Two steps, at 0 and then at 1; the second pays 1."""

    def step(self, action: Any) -> Step:
        self.t += 1
        self.seen = 1.0
        return self.observe(), float(self.t == 2), self.t == 2, False, {}


class ObservedReward(Probe):
    """One step at -1 or at 1, which pays what was observed."""

    def first(self) -> float:
        return float(self.np_random.choice([-1.0, 1.0]))

    def step(self, action: Any) -> Step:
        return self.observe(), self.seen, True, False, {}


class ObservedAction(ObservedReward):
    """One step at -1 or at 1; the best action has the observation's sign: 1 if right and -1 if not, or minus the distance to half of it.

    A hybrid action is paid for both.
    """

    def step(self, action: Any) -> Step:
        parts, reward = action if isinstance(action, dict) else {"choice": action, "turn": action}, 0.0
        if not isinstance(self.action_space, Box):
            reward += 1.0 if (parts["choice"] == 1) == (self.seen > 0) else -1.0
        if not isinstance(self.action_space, Discrete):
            reward -= abs(float(parts["turn"][0]) - self.seen / 2)
        return self.observe(), reward, True, False, {}


class Recall(ObservedAction):
    """Two steps, the first at -1 or at 1 and the second at 0; only the second is paid, as `ObservedAction` is, for what was seen before."""

    def step(self, action: Any) -> Step:
        self.t += 1
        if self.t == 1:
            return np.zeros(1, np.float32), 0.0, False, False, {}
        return super().step(action)


class Endless(Probe):
    """Reward 1 in every step and nothing to see, or the time that passed; cut off after `period` steps, by truncation or `termination`."""

    def __init__(self, action: str = "discrete", ending: str = "truncation", period: int = 8, clock: bool = False) -> None:
        super().__init__(action)
        self.ending, self.period, self.clock = ending, period, clock

    def step(self, action: Any) -> Step:
        self.t += 1
        self.seen = self.t / self.period if self.clock else 0.0
        end = self.t == self.period
        return self.observe(), 1.0, end and self.ending == "termination", end and self.ending == "truncation", {}


class Anything(gym.Env):
    """Random observations of one kind, legal actions of another, and the same reward for all; an episode has 5 steps."""

    observation_spaces = {  # noqa: RUF012
        "vector": Box(-1, 1, (3,), np.float32),
        "image": Box(0, 255, (36, 36, 3), np.uint8),
        "one-hot": Discrete(5),
        "bits": MultiBinary(4),
        "dict": Dict({"where": Tuple((Box(-1, 1, (2,), np.float32), Discrete(3))), "picture": Box(0, 255, (8, 8, 1), np.uint8)}),
    }
    action_spaces = {  # noqa: RUF012
        "discrete": Discrete(3, start=1),
        "multi-discrete": MultiDiscrete([2, 3]),
        "multi-binary": MultiBinary(3),
        "box": Box(np.float32([-2, 0]), np.float32([1, 10])),
        "hybrid": Dict({"choice": Discrete(3), "turn": Box(-2, 2, (2,), np.float32)}),
        "nested": Tuple((Box(0, 1, (1,), np.float32), Dict({"bits": MultiBinary(2), "pair": MultiDiscrete([2, 4])}), Discrete(2))),
        "wrapped": Tuple((Dict({"turn": Box(-2, 2, (2,), np.float32)}),)),
    }

    def __init__(self, observation: str = "vector", action: str = "discrete", reward: float = 1.0) -> None:
        self.observation_space, self.action_space = self.observation_spaces[observation], self.action_spaces[action]
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Step:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is no action of {self.action_space}")
        self.t += 1
        return self.observation_space.sample(), self.reward, self.t == 5, False, {}


def legal(observation: Any, sizes: Sequence[int]) -> np.ndarray:
    """Which choices `Choosy` allows at (episode, t), branch after branch: every other one, beginning with that of the same parity."""
    parity = int(np.sum(observation))
    return np.concatenate([(np.arange(size) + branch + parity) % 2 == 0 for branch, size in enumerate(sizes)])


class Choosy(Scripted):
    """Allows about half of the choices, others in each step, and raises where another is taken.

    `way`: says so in the `info`, under a `key` of the observation (which has another key `where`), or by a `method`. Where an episode
    terminates it allows nothing, or raises when the method is asked. `form`: `flat`, or the `tree` of the action space. Nothing is legal
    in step `stuck`.
    """

    action_spaces = {  # noqa: RUF012
        "discrete": Discrete(4, start=1),
        "multi-discrete": MultiDiscrete([2, 3]),
        "multi-binary": MultiBinary(3),
        "hybrid": Dict({"choice": Discrete(3), "turn": Box(-2, 2, (2,), np.float32)}),
        "nested": Tuple((Box(0, 1, (1,), np.float32), Dict([("pair", MultiDiscrete([2, 4])), ("bits", MultiBinary(2))]), Discrete(2))),
    }
    sizes = {  # noqa: RUF012
        "discrete": [4],
        "multi-discrete": [2, 3],
        "multi-binary": [2, 2, 2],
        "hybrid": [3],
        "nested": [2, 4, 2, 2, 2],
    }

    def __init__(self, way: str = "info", action: str = "discrete", form: str = "flat", stuck: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.way, self.action, self.form, self.stuck, self.over = way, action, form, stuck, False
        self.action_space = self.action_spaces[action]
        if way == "key":
            mask: Any = Box(0, 1, (sum(self.sizes[action]),), np.int8)
            if form == "tree":
                mask = Tuple([Box(0, 1, (size,), np.int8) for size in self.sizes[action]])
            self.observation_space = Dict(action_mask=mask, where=Scripted.observation_space)

    def said(self) -> Any:
        """The mask in the environment's own form; nothing is legal when the episode has terminated."""
        sizes = self.sizes[self.action]
        mask = legal([self.episode, self.t], sizes) & (not self.over and self.t != self.stuck)
        if self.form == "flat":
            return mask.astype(np.int8)
        parts = tuple(part.astype(np.int8) for part in np.split(mask, np.cumsum(sizes)[:-1]))
        if self.action == "nested":
            return None, {"pair": parts[:2], "bits": parts[2:4]}, parts[4]
        trees = {"discrete": parts[0], "hybrid": {"choice": parts[0]}, "multi-discrete": parts, "multi-binary": parts}
        return trees[self.action]

    def __getattr__(self, name: str) -> Any:
        if name == "action_masks" and self.__dict__.get("way") == "method":
            return self.ask
        raise AttributeError(name)

    def ask(self) -> Any:
        """The method `action_masks`, where there is one."""
        if self.over:
            raise ValueError("the episode is over")
        return self.said()

    def observe(self) -> Any:
        where = super().observe()
        return {"where": where, "action_mask": self.said()} if self.way == "key" else where

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        self.over = False
        obs, info = super().reset(seed=seed, options=options)
        return obs, {**info, "action_mask": self.said()} if self.way == "info" else info

    def step(self, action: Any) -> Step:
        taken = self.taken(action)
        allowed = np.split(legal([self.episode, self.t], self.sizes[self.action]), np.cumsum(self.sizes[self.action])[:-1])
        if not all(part[choice] for part, choice in zip(allowed, taken, strict=True)):
            raise ValueError(f"{action} is illegal in step {self.t} of episode {self.episode}")
        _, reward, terminated, truncated, info = super().step(sum(taken))
        self.over = terminated
        return self.observe(), reward, terminated, truncated, {**info, "action_mask": self.said()} if self.way == "info" else info

    def taken(self, action: Any) -> list[int]:
        """The choices in an action, counted from 0."""
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is no action of {self.action_space}")
        if self.action == "nested":
            return [*action[1]["pair"], *action[1]["bits"], action[2]]
        if self.action == "hybrid":
            return [action["choice"]]
        return [action - 1] if self.action == "discrete" else list(action)


SCRIPTED = (Anything, Choosy, Scripted, ScriptedDict, ScriptedBox, Goals, GoalsBox, Quits, Image, ImageBox, Crowd, CrowdBox)
PROBES = (ConstantReward, DelayedReward, ObservedReward, ObservedAction, Recall, Endless)
for environment in SCRIPTED + PROBES:
    gym.register(f"{environment.__name__}-v0", f"{__name__}:{environment.__name__}")
