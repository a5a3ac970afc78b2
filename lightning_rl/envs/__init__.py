"""Building environments and stepping them alike, whatever their vectorization and autoreset mode; and a few of our own."""

import gymnasium as gym

gym.register("lightning_rl/Simple1D-v0", "lightning_rl.envs.examples:Simple1D", max_episode_steps=200)
gym.register("lightning_rl/Memory1D-v0", "lightning_rl.envs.examples:Memory1D", max_episode_steps=200)
gym.register("lightning_rl/ConnectFour-v0", "lightning_rl.envs.examples:ConnectFour")
