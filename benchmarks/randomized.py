"""What a policy that was trained on randomized parameters loses where others were not seen, beside one that was not.

    python benchmarks/randomized.py [--seeds 1 2 3] [--steps 100000]

PPO on CartPole-v1, once as it is and once with the pole's length in [0.25, 3] and the force in [5, 15] anew for each episode. Both are
judged on the usual values and on 20 pairs of values that no training saw, five episodes each, most likely actions.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from contextlib import redirect_stdout
from typing import Any

import gymnasium as gym
import numpy as np
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl.envs.lessons import as_parameters
from lightning_rl.envs.parameters import EnvParameters

RANGES = {"length": (0.25, 3.0), "force_mag": (5.0, 15.0)}
SETTINGS = {
    "n_steps": 32,
    "batch_size": 256,
    "n_epochs": 20,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "clip_range": {"schedule": "linear", "start": 0.2, "end": 0.0},
    "learning_rate": {"schedule": "linear", "start": 1e-3, "end": 0.0},
}


def train(seed: int, steps: int, parameters: dict[str, Any]) -> Any:
    """The last policy of a run."""
    pl.seed_everything(seed, verbose=False)
    off = {"evaluation": None, "checkpoint": None, "logger": False, "enable_progress_bar": False}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(None):
        model = lrl.PPO(lrl.EnvConfig("CartPole-v1", parameters=parameters), max_env_steps=steps, **SETTINGS)
        lrl.Trainer(default_root_dir=folder, accelerator="cpu", torch_threads=1, **off).fit(model)
    return model.network


def judge(network: Any, values: dict[str, float], episodes: int = 5) -> float:
    """The mean return with these values."""
    env = EnvParameters(gym.make("CartPole-v1"), as_parameters(values))
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=9000 + episode)
        returns.append(0.0)
        over = False
        while not over:
            with torch.no_grad():
                action, _ = network.sample(torch.as_tensor(obs)[None], deterministic=True)
            obs, reward, terminated, truncated, _ = env.step(int(action[0]))
            returns[-1] += float(reward)
            over = terminated or truncated
    return float(np.mean(returns))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    rng = np.random.default_rng(12345)
    held_out = [{name: float(rng.uniform(*bounds)) for name, bounds in RANGES.items()} for _ in range(20)]
    drawn = {name: {"sampler_type": "uniform", "sampler_parameters": {"min_value": a, "max_value": b}} for name, (a, b) in RANGES.items()}
    print("| trained on | seed | usual values | 20 held out, mean | least | loss |\n|---|---|---|---|---|---|", flush=True)
    for name, parameters in (("usual values", {}), ("randomized ones", drawn)):
        for seed in options.seeds:
            network = train(seed, options.steps, parameters)
            usual, returns = judge(network, {}), [judge(network, values) for values in held_out]
            mean = float(np.mean(returns))
            print(f"| {name} | {seed} | {usual:.1f} | {mean:.1f} | {min(returns):.1f} | {usual - mean:.1f} |", flush=True)


if __name__ == "__main__":
    main()
