"""The tasks of Stable-Baselines3's and sb3-contrib's own tests, in our words: what is to be learned is known."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from tests.environments import Reset, Step


class Circle(gym.Env):
    """Four places one after the other, for ever, and a reward of 1 for each step; cut off by `period`, by truncation or `termination`."""

    observation_space = Discrete(4)
    action_space = Box(-1, 1, (2,), np.float32)

    def __init__(self, period: int = 8, ending: str = "truncation") -> None:
        self.period, self.ending = period, ending

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.t = 0
        return np.int64(0), {}

    def step(self, action: Any) -> Step:
        self.t += 1
        end = self.t == self.period
        return np.int64(self.t % 4), 1.0, end and self.ending == "termination", end and self.ending == "truncation", {}


class PaidAtTheEnd(gym.Env):
    """Episodes of `period` steps that observe how much of them is over; the last step pays 1 and terminates."""

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Box(-1, 1, (2,), np.float32)

    def __init__(self, period: int = 16) -> None:
        self.period = period

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> Step:
        self.t += 1
        end = self.t == self.period
        return self.observe(), float(end), end, False, {}

    def observe(self) -> np.ndarray:
        return np.array([self.t / self.period], np.float32)


class Identity(gym.Env):
    """Pays 1 for the action that equals the observation, of a Box for one within 0.5 of it; both are drawn anew in each of 100 steps."""

    spaces = {  # noqa: RUF012
        "discrete": Discrete(4),
        "multi-discrete": MultiDiscrete([4, 4]),
        "multi-binary": MultiBinary(4),
        "box": Box(-1, 1, (1,), np.float32),
    }

    def __init__(self, kind: str = "discrete") -> None:
        self.observation_space = self.action_space = self.spaces[kind]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t, self.seen = 0, self.observation_space.sample()
        return self.seen, {}

    def step(self, action: Any) -> Step:
        tolerance = 0.5 if isinstance(self.action_space, Box) else 0
        reward = float(np.all(np.abs(np.subtract(action, self.seen, dtype=np.float64)) <= tolerance))
        self.t, self.seen = self.t + 1, self.observation_space.sample()
        return self.seen, reward, False, self.t == 100, {}


class CartPoleWithoutVelocities(CartPoleEnv):
    """CartPole-v1 that shows where cart and pole are, not how fast they move."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Box(-self.observation_space.high[::2], self.observation_space.high[::2])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        obs, info = super().reset(seed=seed, options=options)
        return obs[::2], info

    def step(self, action: Any) -> Step:
        obs, *rest = super().step(action)
        return obs[::2], *rest


for environment in (Circle, PaidAtTheEnd, Identity, CartPoleWithoutVelocities):
    limit = 500 if environment is CartPoleWithoutVelocities else None
    gym.register(f"{environment.__name__}-v0", f"{__name__}:{environment.__name__}", max_episode_steps=limit)
