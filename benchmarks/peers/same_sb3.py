"""Train Stable-Baselines3 with the settings and the steps of our config, and judge it as `zoo.py` judges our rows.

For rows whose reference had more steps:

    python benchmarks/install.py --peers sb3; benchmarks/.venvs/sb3/bin/pip install "gymnasium[box2d]" pyyaml
    cd benchmarks; .venvs/sb3/bin/python -m peers.same_sb3 sac/lunarlander_continuous [--seeds 1 2 3] [--folder peer_runs]

Every setting of the config must be one of Stable-Baselines3's, under the same name. Five episodes are played twenty times in a run; the
best of those policies plays 100. A row a seed is written to `benchmarks/results/peers/<algorithm>_<config>.csv`, which `zoo.py table`
shows.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import stable_baselines3
import torch
import yaml
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from peers.rows import EPISODES, EVALUATIONS, measure_rows

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
COLUMNS = ("config", "seed", "return_mean", "return_std", "episodes", "best_env_steps", "env_steps", "minutes", "stable_baselines3")


def measure(config: str, seed: int, folder: Path) -> tuple[object, ...]:
    """Return a row."""
    torch.set_num_threads(1)
    model = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())["model"]
    settings = dict(model["init_args"])
    env, steps, learner = settings.pop("env"), int(settings.pop("max_env_steps")), getattr(stable_baselines3, model["class_path"])
    numbers = {name: float(value) if isinstance(value, str) else value for name, value in settings.items()}  # YAML 1.1 reads 1e-4 as text
    began = time.monotonic()
    judge, every = make_vec_env(env["id"], seed=seed + 10_000), max(1, steps // EVALUATIONS // env["num_envs"])
    callback = EvalCallback(judge, n_eval_episodes=5, eval_freq=every, best_model_save_path=str(folder), verbose=0)
    agent = learner("MlpPolicy", make_vec_env(env["id"], n_envs=env["num_envs"], seed=seed), seed=seed, device="cpu", **numbers)
    agent.learn(steps, callback)
    minutes = (time.monotonic() - began) / 60
    judged = make_vec_env(env["id"], seed=50_000)
    best = learner.load(folder / "best_model.zip", device="cpu")
    returns, _ = evaluate_policy(best, judged, EPISODES, deterministic=True, return_episode_rewards=True)
    found = round(float(np.mean(returns)), 3), round(float(np.std(returns)), 3)
    return config, seed, *found, EPISODES, best.num_timesteps, steps, round(minutes, 2), version("stable-baselines3")


if __name__ == "__main__":
    measure_rows(__doc__, COLUMNS, measure)
