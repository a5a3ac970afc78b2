"""One way to step a vector environment, for the three autoreset modes of gymnasium.

| mode | at the end of an episode `step` returns | the row after |
|---|---|---|
| SAME_STEP | the first observation of the next episode; the final one lies in `info["final_obs"]` | an ordinary row |
| NEXT_STEP | the final observation | the reset: reward 0, the action ignored; not experience, `valid` is False |
| DISABLED | the final observation, and we reset | an ordinary row |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError
from lightning_rl.types import Tree, tree_index, tree_leaves, tree_stack


class EnvStep(NamedTuple):
    """One step of N environments.

    obs: what to act on next, `[N, ...]`.  reward, terminated, truncated, valid: `[N]`; truncated excludes terminated.
    episode_start: whether `obs` is the first of an episode, `[N]`.  ended: the indices of the K environments whose episode ended.
    final_obs: their true last observations, `[K, ...]`, or None if K = 0.
    info: the environment's, of the row that ended where one did.
    """

    obs: Tree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    episode_start: np.ndarray
    ended: np.ndarray
    final_obs: Tree | None
    info: dict[str, Any]


class Stepper:
    """Steps a vector environment that resets in the same step (SAME_STEP), and what all modes share."""

    def __init__(self, envs: VectorEnv) -> None:
        self.envs = envs
        self.num_envs = envs.num_envs
        self.all_valid = np.ones(envs.num_envs, dtype=bool)

    def reset(self, seed: int | None = None) -> Tree:
        """Start an episode everywhere; the environments get seed, seed + 1, …"""
        obs, _ = self.envs.reset(seed=seed)
        return obs

    def step(self, action: Tree) -> EnvStep:
        """Step all environments with actions in their own form."""
        obs, reward, terminated, truncated, info = self.envs.step(action)
        truncated = truncated & ~terminated
        start, final_obs = terminated | truncated, None
        ended = np.flatnonzero(start)
        if len(ended):
            obs, final_obs, info = self.restart(obs, info, start, ended)
        return EnvStep(obs, reward, terminated, truncated, self.all_valid, start, ended, final_obs, info)

    def restart(self, obs: Tree, info: dict[str, Any], start: np.ndarray, ended: np.ndarray) -> tuple[Tree, Tree, dict[str, Any]]:
        """Where episodes ended: the first observations of the next ones, the final observations `[K, ...]`, and the info of the end."""
        final = info["final_obs"]
        final_obs = tree_stack([final[i] for i in ended]) if _is_object_array(final) else tree_index(final, ended)
        return obs, final_obs, info.get("final_info", info)

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()


class NextStepStepper(Stepper):
    """NEXT_STEP: the row after the end of an episode is the reset, and is not valid."""

    def __init__(self, envs: VectorEnv) -> None:
        super().__init__(envs)
        self.resetting = np.zeros(envs.num_envs, dtype=bool)

    def reset(self, seed: int | None = None) -> Tree:
        self.resetting = np.zeros(self.num_envs, dtype=bool)
        return super().reset(seed)

    def step(self, action: Tree) -> EnvStep:
        obs, reward, terminated, truncated, info = self.envs.step(action)
        start, valid = self.resetting, ~self.resetting
        terminated, truncated = terminated & valid, truncated & ~terminated & valid
        self.resetting = terminated | truncated
        ended = np.flatnonzero(self.resetting)
        final_obs = tree_index(obs, ended) if len(ended) else None
        return EnvStep(obs, reward, terminated, truncated, valid, start, ended, final_obs, info)


class DisabledStepper(Stepper):
    """DISABLED: we reset the environments whose episode ended."""

    def restart(self, obs: Tree, info: dict[str, Any], start: np.ndarray, ended: np.ndarray) -> tuple[Tree, Tree, dict[str, Any]]:
        final_obs = tree_index(obs, ended)  # indexing by an array copies
        obs, _ = self.envs.reset(options={"reset_mask": start})
        return obs, final_obs, info


STEPPERS = {AutoresetMode.SAME_STEP: Stepper, AutoresetMode.NEXT_STEP: NextStepStepper, AutoresetMode.DISABLED: DisabledStepper}


def make_stepper(envs: VectorEnv, config: EnvConfig | None = None) -> Stepper:
    """The stepper for the mode that a vector environment names in its metadata, or else its settings do.

    Raises:
        SettingError: neither names a mode.
    """
    mode = (envs.metadata or {}).get("autoreset_mode")
    if mode is None and config is not None and config.autoreset is not None:
        mode = config.autoreset
    if isinstance(mode, str):
        mode = next((each for each in AutoresetMode if mode in (each.name, each.value)), None)
    if not isinstance(mode, AutoresetMode):
        raise SettingError(
            f"{type(envs).__name__} does not say how it resets: its metadata has no autoreset_mode; set env.autoreset to name the mode"
        )
    return STEPPERS[mode](envs)


def _is_object_array(final: Any) -> bool:
    return next(tree_leaves(final)).dtype == object
