"""PPO of Stable-Baselines3 on CartPole with the settings of its zoo, evaluated as a run of ours is, into a folder that `compare` reads."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import gymnasium as gym
import torch
from stable_baselines3.common.callbacks import BaseCallback

from peers.solve_sb3 import STEPS, ZOO, make_model

EVERY, EPISODES, FIRST_SEED = 5_000, 10, 10_000


class Evaluate(BaseCallback):
    """Plays the same episodes after each rollout that passes another multiple of `EVERY` steps, and writes their returns."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.next = file, EVERY
        self.env = gym.make("CartPole-v1")

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self.next:
            self.next += EVERY
            self.evaluate()

    def _on_training_end(self) -> None:
        self.evaluate()

    def evaluate(self) -> None:
        """Play and write."""
        with self.file.open("a", newline="") as stream:
            for seed in range(FIRST_SEED, FIRST_SEED + EPISODES):
                (obs, _), done, total, length = self.env.reset(seed=seed), False, 0.0, 0
                while not done:
                    obs, reward, terminated, truncated, _ = self.env.step(self.model.predict(obs, deterministic=True)[0])
                    total, length, done = total + float(reward), length + 1, terminated or truncated
                csv.writer(stream).writerow([self.num_timesteps, seed, total, length, ""])


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True)
    model = {"class_path": "Stable-Baselines3.PPO (Stable-Baselines3)", "init_args": {"env": {"id": "CartPole-v1"}}}
    (options.folder / "config.yaml").write_text(json.dumps({"seed_everything": options.seed, "model": model}))
    (options.folder / "evaluations.csv").write_text("env_steps,seed,return,length,success\n")
    learner = make_model(ZOO, options.seed)
    learner.learn(STEPS, callback=Evaluate(options.folder / "evaluations.csv"))


if __name__ == "__main__":
    main()
