"""Build environments and step them the same way, whatever their vectorization and autoreset mode. A few small environments are included."""

from collections.abc import Sequence

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from lightning_rl.errors import SettingError

SUCCESS = ("is_success", "success")
"""Info keys that may report the success of an episode."""
PARAMETERS, LESSONS = "env_parameters", "env_lessons"
"""Info keys at the start and at the end of an episode: the values drawn for its parameters, and the lesson of each."""

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
