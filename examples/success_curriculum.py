"""PPO on a bridge, where a callback raises the wind as the policy learns to cross it.

python examples/success_curriculum.py        # stop it at any time: the same line resumes it
"""

import gymnasium as gym
import numpy as np
import pytorch_lightning as pl

import lightning_rl as lrl


class Bridge(gym.Env):
    """Cross a bridge in 20 steps, in wind of strength `wind`; to fall off the bridge is to fail."""

    observation_space, action_space = gym.spaces.Box(-2, 2, (2,), np.float32), gym.spaces.Discrete(3)

    def __init__(self, wind=0.0):
        self.wind = wind

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.way, self.side = 0, 0.0
        return self.observation(), {}

    def step(self, action):
        self.way += 1
        self.side += 0.3 * (action - 1) + self.wind * self.np_random.normal()
        crossed, fell = self.way == 20, abs(self.side) > 1
        return self.observation(), float(crossed and not fell), crossed or fell, False, {"is_success": crossed and not fell}

    def observation(self):
        return np.array([self.way / 10 - 1, self.side], np.float32)


class MoreWind(pl.Callback):
    """Raise the wind when two evaluations in a row have had a success rate of at least `threshold`."""

    def __init__(self, threshold=0.9):
        self.threshold, self.mastered = threshold, 0

    def on_evaluation_end(self, trainer, algorithm, metrics):
        self.mastered = self.mastered + 1 if metrics["eval/success_rate"] >= self.threshold else 0
        if self.mastered == 2:
            self.mastered = 0
            wind = algorithm.current_env.parameters["wind"] + 0.1
            algorithm.set_parameter("wind", wind)
            algorithm.say(f"wind {wind:.1f} from {algorithm.env_steps:,} environment steps on")

    def state_dict(self):  # saved in every checkpoint
        return {"mastered": self.mastered}

    def load_state_dict(self, state_dict):
        self.mastered = state_dict["mastered"]


if __name__ == "__main__":
    pl.seed_everything(1)
    env = lrl.EnvConfig(Bridge, num_envs=8, parameters={"wind": 0.0})
    model = lrl.PPO(env, n_steps=64, batch_size=128, learning_rate=1e-3, max_env_steps=24_000)
    evaluation, checkpoint = {"every_n_env_steps": 2_000, "episodes": 20}, {"every_n_env_steps": 2_000}
    lrl.Trainer(callbacks=[MoreWind()], evaluation=evaluation, checkpoint=checkpoint).fit(model, ckpt_path="last")
