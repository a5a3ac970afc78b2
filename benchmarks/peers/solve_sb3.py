"""PPO of Stable-Baselines3 on CartPole with the settings of its zoo, or with those of our packaged config, until it is solved."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from solving import solved
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

STEPS = 100_000
COMMON = {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "ent_coef": 0.0}
ZOO, OURS = {"num_envs": 8, "n_epochs": 20, "learning_rate": 1e-3}, {"num_envs": 16, "n_epochs": 10, "learning_rate": 2e-3}
"""Where the two differ."""


class StopWhenSolved(BaseCallback):
    """Looks at the last 100 training episodes after each rollout has been learned from, which is when the next one begins."""

    def __init__(self, launched: float) -> None:
        super().__init__()
        self.launched, self.began = launched, float("nan")

    def _on_training_start(self) -> None:
        self.began = time.time()

    def _on_step(self) -> bool:
        return not self.is_solved

    def _on_rollout_start(self) -> None:
        self.is_solved = solved([episode["r"] for episode in self.model.ep_info_buffer])
        if self.is_solved:
            now = time.time()
            figures = {"seconds": now - self.began, "seconds_from_launch": now - self.launched, "env_steps": self.num_timesteps}
            print(json.dumps(figures), flush=True)


def make_model(settings: dict[str, Any], seed: int) -> PPO:
    """PPO with the settings that both have and these."""
    envs = make_vec_env("CartPole-v1", n_envs=settings["num_envs"], seed=seed)
    falling = {"learning_rate": lambda left: settings["learning_rate"] * left, "clip_range": lambda left: 0.2 * left}
    return PPO("MlpPolicy", envs, n_epochs=settings["n_epochs"], seed=seed, device="cpu", **COMMON, **falling)


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--launched", type=float, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--same", action="store_true", help="take the settings of our config")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = make_model(OURS if options.same else ZOO, options.seed)
    model.learn(STEPS, callback=StopWhenSolved(options.launched))


if __name__ == "__main__":
    main()
