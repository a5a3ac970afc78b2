"""Build environments and step them the same way, whatever their vectorization and autoreset mode. A few small environments are included."""

from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from lightning_rl.errors import SettingError

SUCCESS = ("is_success", "success")
"""Info keys that may report the success of an episode."""
PARAMETERS, LESSONS = "env_parameters", "env_lessons"
"""Info keys at the start and at the end of an episode: the values drawn for its parameters, and the lesson of each."""
KEPT = "kept_info"
"""Info key at the end of an episode: the entries that `KeepInfo` names."""

gym.register("lightning_rl/Simple1D-v0", "lightning_rl.envs.examples:Simple1D", max_episode_steps=200)
gym.register("lightning_rl/Memory1D-v0", "lightning_rl.envs.examples:Memory1D", max_episode_steps=200)
gym.register("lightning_rl/BitFlipping-v0", "lightning_rl.envs.examples:BitFlipping", max_episode_steps=10)
gym.register("lightning_rl/ConnectFour-v0", "lightning_rl.envs.examples:ConnectFour")


class MaskObservation(gym.ObservationWrapper):
    """Set numbers of a vector observation to 0, such as velocities, so that a policy needs a memory; the shape stays the same.

    Args:
        indices: which numbers, counted from 0.

    Raises:
        SettingError: the observation is not a vector, or has no such number.
    """

    def __init__(self, env: gym.Env, indices: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        low, high = (np.asarray(getattr(space, name, 0)) for name in ("low", "high"))
        if low.ndim != 1:
            raise SettingError(f"MaskObservation is for a vector of numbers, got {space}")
        if (wrong := [k for k in indices if k not in range(len(low))]) or not indices:
            raise SettingError(f"MaskObservation: indices must be from 0 to {len(low) - 1}, got {wrong or 'none'}")
        self.indices = list(indices)
        self.observation_space = Box(self.observation(low), self.observation(high), dtype=low.dtype)

    def observation(self, obs: np.ndarray) -> np.ndarray:
        shown = obs.copy()
        shown[self.indices] = 0
        return shown


class KeepInfo(gym.Wrapper):
    """Keep numbers of the last info of an episode: in `finished_episodes()` for callbacks, and their means as metrics `info/<name>`.

    Wrap it outside of all wrappers that end episodes: it must see the end.

    Args:
        keywords: names of the entries.

    Raises:
        SettingError: `keywords` are not names; at the end of an episode: an entry is missing, or is not a finite number.
    """

    def __init__(self, env: gym.Env, keywords: Sequence[str]) -> None:
        super().__init__(env)
        if isinstance(keywords, str) or not keywords or not all(isinstance(name, str) for name in keywords):
            raise SettingError(f"keywords must be names of the info, got {keywords!r}")
        self.keywords = list(keywords)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            info = {**info, KEPT: {name: read_number(info, name) for name in self.keywords}}
        return obs, reward, terminated, truncated, info


def read_number(info: dict[str, Any], name: str) -> float:
    """Return a number of the last info of an episode; raise `SettingError` if it has none under this name."""
    if name not in info:
        entries = f"it has {', '.join(map(str, info))}" if info else "it is empty"
        raise SettingError(shorten(f"KeepInfo: the last info of an episode has no {name}; {entries}", 190, placeholder=" …"))
    number = np.asarray(info[name])
    if number.dtype.kind not in "biuf" or number.size != 1 or not np.isfinite(number).all():
        value = shorten(repr(info[name]), 60, placeholder=" …")
        raise SettingError(f"KeepInfo: {name} of the last info of an episode must be a finite number, got {value}")
    return float(number.item())
