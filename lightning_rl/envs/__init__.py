"""Build environments and step them the same way, whatever their vectorization and autoreset mode. A few small environments are included."""

from typing import Any, SupportsFloat

import gymnasium as gym

Info = dict[str, Any]
"""What an environment returns in addition to observations and rewards."""
Options = dict[str, Any] | None
"""Options of a reset."""
StepResult = tuple[Any, SupportsFloat, bool, bool, Info]
"""Observation, reward, terminated, truncated and info of one environment."""
SUCCESS = ("is_success", "success")
"""Info keys that may report the success of an episode."""
PARAMETERS, LESSONS = "env_parameters", "env_lessons"
"""Info keys at the start and at the end of an episode: the values drawn for its parameters, and the lesson of each."""

gym.register("lightning_rl/Simple1D-v0", "lightning_rl.envs.examples:Simple1D", max_episode_steps=200)
gym.register("lightning_rl/Memory1D-v0", "lightning_rl.envs.examples:Memory1D", max_episode_steps=200)
gym.register("lightning_rl/BitFlipping-v0", "lightning_rl.envs.examples:BitFlipping", max_episode_steps=10)
gym.register("lightning_rl/ConnectFour-v0", "lightning_rl.envs.examples:ConnectFour")
