"""Environments of this process, stepped in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, iterate

from lightning_rl.spaces import MASK


class TurnVectorEnv(SyncVectorEnv):
    """gymnasium's `SyncVectorEnv` with episodes that begin anew in the step that ends them, in less time.

    Of `info` it gathers what is told where episodes end, as `final_info`, and masks: nobody asks for the rest. Observations are overwritten
    by the next step.

    Args:
        env_fns: build one environment each.
    """

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]]) -> None:
        super().__init__(env_fns, autoreset_mode=AutoresetMode.SAME_STEP, copy=False)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all environments. Observations, rewards `[N]`, terminated `[N]`, truncated `[N]`, and infos."""
        ends, rewards, seen = np.zeros((2, self.num_envs), dtype=bool), self._rewards, self._env_obs
        infos: dict[str, Any] = {}
        each = actions if isinstance(actions, np.ndarray) else iterate(self.action_space, actions)
        for i, (env, action) in enumerate(zip(self.envs, each, strict=True)):
            obs, rewards[i], terminated, truncated, info = env.step(action)
            if terminated or truncated:
                ends[:, i] = terminated, truncated
                infos = self._add_info(infos, {"final_obs": obs, "final_info": info}, i)
                obs, info = env.reset()
            if MASK in info:
                infos = self._add_info(infos, {MASK: info[MASK]}, i)
            seen[i] = obs
        if isinstance(self._observations, np.ndarray):
            for row, obs in enumerate(seen):
                self._observations[row] = obs
        else:
            self._observations = concatenate(self.single_observation_space, seen, self._observations)
        return self._observations, rewards.copy(), *ends, infos
