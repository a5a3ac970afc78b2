"""Synchronous vector environment, and the check that an environment keeps to gymnasium's contract."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from textwrap import shorten
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from lightning_rl.errors import SettingError, place_in_code, was_raised_in
from lightning_rl.spaces import MASK, is_outside, mismatches, misshape, unknown_parts

NUMBERS = frozenset((float, int, np.float64, np.float32, np.int64))
"""Types of rewards that need no closer look."""


class Contract:
    """Checks what an environment returns, with observations of a space; `who` names it in messages."""

    def __init__(self, space: gym.Space, who: str) -> None:
        self.space, self.shape, self.who = space, space.shape, who

    def check_keys(self, obs: Any) -> None:
        """Raise `SettingError` for a part of an observation that its space does not have, but for a mask."""
        for name in unknown_parts(self.space, obs):
            raise SettingError(f"{self.who}: the observation {name!r} is not in its space")

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
        """Return what the environment raised and where, in one line."""
        if isinstance(error, ValueError) and "to unpack" in str(error) and was_raised_in(error, gym):
            must = "step must return observation, reward, terminated, truncated and info, and reset observation and info"
            return SettingError(f"{self.who}: {must} ({error})")
        if isinstance(error, NotImplementedError) and not str(error):
            method = traceback.extract_tb(error.__traceback__)[-1].name
            return SettingError(f"{self.who} does not implement {method}{place_in_code(error)}")
        return SettingError(f"{self.who} raised {shorten(f'{type(error).__name__}: {error}', 130, placeholder=' …')}{place_in_code(error)}")

    @contextmanager
    def naming(self, *passed: type[Exception]) -> Iterator[None]:
        """Name the environment in what it raises, except in what is `passed`."""
        try:
            yield
        except SettingError:
            raise
        except passed:
            raise
        except Exception as error:  # a user's environment may raise anything
            raise self.failure(error) from error


class CheckedEnv(gym.Wrapper):
    """An environment that is checked, for vector environments that do not check."""

    def __init__(self, build: Callable[[], gym.Env], index: int) -> None:
        super().__init__(env := build())
        self.contract = contract_of(env, index)

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
    """Return the id of an environment, or its class where it was not made from an id."""
    return type(env.unwrapped).__name__ if env.spec is None else env.spec.id


def contract_of(env: gym.Env, index: int) -> Contract:
    """Return the contract of an environment; `index` says which of several it is, for messages."""
    return Contract(env.observation_space, f"environment {index} of {name_of(env)}")


class TurnVectorEnv(SyncVectorEnv):
    """gymnasium's `SyncVectorEnv` with episodes that are followed by the next one in the step that ends them, in less time.

    Of `info` it gathers what is told where episodes end, as `final_info`, and masks: nobody asks for the rest. Observations are overwritten
    by the next step.
    """

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]]) -> None:
        super().__init__(env_fns, autoreset_mode=AutoresetMode.SAME_STEP, copy=False)
        self.contracts = [contract_of(env, i) for i, env in enumerate(self.envs)]
        self.shape = self.single_observation_space.shape or ()
        self.latest: list[Any] = [None] * self.num_envs
        """The newest observation of each environment."""
        self.stacked: Any = create_empty_array(self.single_observation_space, self.num_envs)
        """All of them, in arrays that are used again."""

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        infos: dict[str, Any] = {}
        for i, (env, each, contract) in enumerate(zip(self.envs, seeds, self.contracts, strict=True)):
            with contract.naming():
                self.latest[i], info = env.reset(seed=each, options=options)
            contract.check_obs(self.latest[i])
            infos = self._add_info(infos, info, i)
        self.stacked = concatenate(self.single_observation_space, self.latest, self.stacked)
        return self.stacked, infos

    def _check_all(self) -> None:
        for contract, obs in zip(self.contracts, self.latest, strict=True):
            contract.check_obs(obs)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all environments. Return observations, rewards `[N]`, terminated `[N]`, truncated `[N]`, and infos."""
        ends, rewards, latest = np.zeros((2, self.num_envs), dtype=bool), np.zeros(self.num_envs), self.latest
        infos: dict[str, Any] = {}
        each = actions if isinstance(actions, np.ndarray) else iterate(self.action_space, actions)
        for i, (env, action) in enumerate(zip(self.envs, each, strict=True)):
            try:
                obs, reward, terminated, truncated, info = env.step(action)
                if terminated or truncated:
                    self.contracts[i].check_obs(obs)
                    ends[:, i] = terminated, truncated
                    infos = self._add_info(infos, {"final_obs": deepcopy(obs), "final_info": info}, i)  # which the reset may write into
                    obs, info = env.reset()
                    self.contracts[i].check_obs(obs)
                if MASK in info:
                    infos = self._add_info(infos, {MASK: info[MASK]}, i)
            except SettingError:
                raise
            except Exception as error:  # a user's environment may raise anything
                raise self.contracts[i].failure(error) from error
            if reward.__class__ not in NUMBERS:
                self.contracts[i].check_reward(reward)
            rewards[i], latest[i] = reward, obs
        if isinstance(self.stacked, np.ndarray):
            for row, obs in enumerate(latest):
                if obs.shape != self.shape if obs.__class__ is np.ndarray else self.shape or obs.__class__ not in NUMBERS:
                    self.contracts[row].check_obs(obs)
                self.stacked[row] = obs
            if is_outside(self.single_observation_space, self.stacked):
                self._check_all()
        else:
            try:
                self.stacked = concatenate(self.single_observation_space, latest, self.stacked)
            except Exception:
                self._check_all()
                raise
        return self.stacked, rewards, *ends, infos
