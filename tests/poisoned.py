"""An environment that says something bad once, or from then on."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from tests.environments import Reset, Step

VECTOR = Box(-np.inf, np.inf, (3,), np.float32)
OBSERVATIONS = {
    "vector": VECTOR,
    "double": Box(-np.inf, np.inf, (3,), np.float64),
    "nested": Dict({"where": Tuple((Discrete(5), VECTOR)), "bits": Box(0, 255, (2,), np.uint8)}),
}
ACTIONS = {"discrete": Discrete(3), "box": Box(-1, 1, (2,), np.float32)}


class Poisoned(gym.Env):
    """Episodes of 5 steps; step `at`, counted over all of them, returns `value` at the `door`: observation, reward or reset.

    An observation at the end of an episode is a final one. `length` steps are bad, one unless given.
    """

    def __init__(self, door: str, value: float, at: int, observation: str = "vector", action: str = "discrete", length: int = 1) -> None:
        self.observation_space, self.action_space = OBSERVATIONS[observation], ACTIONS[action]
        self.door, self.value, self.bad, self.steps = door, value, range(at, at + length), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(self.door == "reset"), {}

    def step(self, action: Any) -> Step:
        self.steps, self.t = self.steps + 1, self.t + 1
        bad = self.steps in self.bad
        reward = self.value if bad and self.door == "reward" else 1.0
        return self.observe(bad and self.door == "observation"), reward, self.t == 5, False, {}

    def observe(self, bad: bool) -> Any:
        vector = np.full(3, self.t / 5, self.observation_space.dtype or np.float32)
        if bad:
            vector[1] = self.value
        return {"where": (np.int64(self.t % 5), vector), "bits": np.zeros(2, np.uint8)} if self.observation_space.dtype is None else vector


gym.register("Poisoned-v0", f"{__name__}:Poisoned")


def two(door: str, value: float, at: int, apart: bool = False, mode: str = "SAME_STEP", **settings: Any) -> VectorEnv:
    """Two environments, of which the second is poisoned; `apart` in processes of their own."""
    made = [partial(Poisoned, "none", 0.0, 0, **settings | {"length": 0}), partial(Poisoned, door, value, at, **settings)]
    return (AsyncVectorEnv if apart else SyncVectorEnv)(made, autoreset_mode=AutoresetMode[mode])
