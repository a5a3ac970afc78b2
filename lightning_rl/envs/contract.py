"""What an environment must return. One that returns something else, or raises, is named in one line.

numpy would bend much of it into shape: a scalar fills a vector, `"1"` becomes 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import gymnasium as gym
import numpy as np

from lightning_rl.errors import SettingError
from lightning_rl.spaces import mismatches, misshape

NUMBERS = frozenset((float, int, np.float64, np.float32, np.int64))
"""Types that need no closer look."""


class Contract:
    """Reads what an environment returns.

    Args:
        env: the environment.
        index: which of several it is, for messages.
    """

    def __init__(self, env: gym.Env, index: int) -> None:
        self.space, self.shape = env.observation_space, env.observation_space.shape
        self.who = f"environment {index} of {name_of(env)}"

    def check_obs(self, obs: Any) -> None:
        """Raise `SettingError` unless an observation has the parts, shapes and kinds of its space."""
        if obs.__class__ is np.ndarray and obs.shape == self.shape and obs.dtype.kind in "fiub":
            return
        for what in mismatches(self.space, obs):
            raise SettingError(shorten(f"{self.who}: {what}", 190, placeholder=" …"))

    def check_reward(self, reward: Any) -> None:
        """Raise `SettingError` unless a reward is a number."""
        if reward.__class__ not in NUMBERS and (what := misshape(reward, ())):
            raise SettingError(shorten(f"{self.who}: the reward {what}, and must be a number", 190, placeholder=" …"))

    def failure(self, error: Exception) -> SettingError:
        """What the environment raised, in one line."""
        return SettingError(shorten(f"{self.who} raised {type(error).__name__}: {error}", 190, placeholder=" …"))

    @contextmanager
    def naming(self, *passed: type[Exception]) -> Iterator[None]:
        """Raise what the environment raises with its name, but for what is `passed`."""
        try:
            yield
        except SettingError:
            raise
        except passed:
            raise
        except Exception as error:  # an environment of others may raise anything
            raise self.failure(error) from error


class CheckedEnv(gym.Wrapper):
    """An environment that keeps to its contract, for vector environments that do not look."""

    def __init__(self, env: gym.Env, index: int) -> None:
        super().__init__(env)
        self.contract = Contract(env, index)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        with self.contract.naming():
            obs, info = self.env.reset(seed=seed, options=options)
        self.contract.check_obs(obs)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        with self.contract.naming():
            obs, reward, terminated, truncated, info = self.env.step(action)
        self.contract.check_obs(obs)
        self.contract.check_reward(reward)
        return obs, reward, terminated, truncated, info


def name_of(env: gym.Env) -> str:
    """The id of an environment, or its class where it was not made by one."""
    return type(env.unwrapped).__name__ if env.spec is None else env.spec.id
