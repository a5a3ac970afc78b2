"""Build environments and step them the same way, whatever their vectorization and autoreset mode. A few small environments are included."""

import gymnasium as gym

SUCCESS = ("is_success", "success")
"""Info keys that may report the success of an episode."""
PARAMETERS, LESSONS = "env_parameters", "env_lessons"
"""Info keys at the start and at the end of an episode: the values drawn for its parameters, and the lesson of each."""

gym.register("lightning_rl/Simple1D-v0", "lightning_rl.envs.examples:Simple1D", max_episode_steps=200)
gym.register("lightning_rl/Memory1D-v0", "lightning_rl.envs.examples:Memory1D", max_episode_steps=200)
gym.register("lightning_rl/BitFlipping-v0", "lightning_rl.envs.examples:BitFlipping", max_episode_steps=10)
gym.register("lightning_rl/ConnectFour-v0", "lightning_rl.envs.examples:ConnectFour")
