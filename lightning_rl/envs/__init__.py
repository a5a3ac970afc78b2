"""Build environments and step them in the same way, whatever their vectorization and autoreset mode; plus a few small environments."""

from typing import Any, SupportsFloat

import gymnasium as gym

Info = dict[str, Any]
"""What an environment reports next to observations and rewards."""
Options = dict[str, Any] | None
"""Options of a reset."""
StepResult = tuple[Any, SupportsFloat, bool, bool, Info]
"""Observation, reward, terminated, truncated and info of one environment."""
SUCCESS = ("is_success", "success")
"""Under which names infos report the success of an episode."""
PARAMETERS, LESSONS = "env_parameters", "env_lessons"
"""Keys of the info at the beginning and at the end of an episode: the numbers drawn, and the lesson of each."""

gym.register("lightning_rl/Simple1D-v0", "lightning_rl.envs.examples:Simple1D", max_episode_steps=200)
gym.register("lightning_rl/Memory1D-v0", "lightning_rl.envs.examples:Memory1D", max_episode_steps=200)
gym.register("lightning_rl/BitFlipping-v0", "lightning_rl.envs.examples:BitFlipping", max_episode_steps=10)
gym.register("lightning_rl/ConnectFour-v0", "lightning_rl.envs.examples:ConnectFour")
