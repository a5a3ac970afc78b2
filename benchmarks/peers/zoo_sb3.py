"""Train what rl-baselines3-zoo tunes for an environment, and judge it as `zoo.py` judges our rows: for rows that fall short of a reference.

    pip install rl_zoo3==2.9.2 "gymnasium[box2d]"     # in an environment of its own
    PYTHONPATH=benchmarks python -m peers.zoo_sb3 ppo/acrobot [a2c/pendulum …] [--seeds 1 2 3] [--folder peer_runs]

Trains with the settings and the step count of rl_zoo3's file, on our versions of the environments, and plays five episodes twenty times in
a run; our runs evaluate at most as often, with 5 to 50 episodes as each config says. The best of those, with the statistics of its
normalization, plays 100 episodes. A row a seed is written to `benchmarks/results/peers/<algorithm>_<config>.csv`, which `zoo.py table`
shows.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import rl_zoo3
import torch
import yaml
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import ALGOS
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecNormalize

from peers.rows import EPISODES, EVALUATIONS, measure_rows

ENVIRONMENTS = {
    "acrobot": "Acrobot-v1",
    "cartpole": "CartPole-v1",
    "cartpole_novel": "CartPoleNoVel-v1",
    "lunarlander": "LunarLander-v3",
    "lunarlander_continuous": "LunarLanderContinuous-v3",
    "mountaincar": "MountainCar-v0",
    "mountaincar_continuous": "MountainCarContinuous-v0",
    "mountaincar_continuous_novel": "MountainCarContinuousNoVel-v0",
    "pendulum": "Pendulum-v1",
    "pendulum_novel": "PendulumNoVel-v1",
}
"""By the names of our configs; `…_novel`, without velocities, are entries of ppo_lstm, to compare an imported config with. Settings of
MuJoCo's are for v4 there, which is not what we measure."""
COLUMNS = ("config", "seed", "return_mean", "return_std", "episodes", "best_env_steps", "env_steps", "minutes", "rl_zoo3")


def train(algorithm: str, env: str, seed: int, folder: Path) -> ExperimentManager:
    """Train with the zoo's settings. Its last step is left out: it replaces the best model's statistics by the last ones."""
    file = Path(rl_zoo3.__file__).parent / "hyperparams" / f"{algorithm}.yml"
    steps = int(yaml.safe_load(file.read_text())[env]["n_timesteps"])
    settings: dict[str, object] = {"seed": seed, "eval_freq": steps // EVALUATIONS, "verbose": 0, "device": "cpu", "log_interval": -2}
    manager = ExperimentManager(argparse.Namespace(), algorithm, env, str(folder), n_timesteps=-1, **settings)
    model, _ = manager.setup_experiment()
    manager.learn(model)
    return manager


def judge(manager: ExperimentManager) -> tuple[float, float, int]:
    """Return mean and deviation of the best model over new episodes, and its step."""
    statistics = Path(manager.params_path) / "vecnormalize.pkl"
    normalized, manager.normalize = manager.normalize, False
    env = manager.create_envs(1, eval_env=True)
    if normalized:
        env = VecNormalize.load(str(statistics), env)
        env.training = env.norm_reward = False
    env.seed(50_000)
    best = ALGOS[manager.algo].load(Path(manager.save_path) / "best_model.zip", device="cpu")
    returns, _ = evaluate_policy(best, env, EPISODES, deterministic=manager.deterministic_eval, return_episode_rewards=True)
    with np.load(Path(manager.save_path) / "evaluations.npz") as evaluations:
        at = int(evaluations["timesteps"][evaluations["results"].mean(1).argmax()])
    return float(np.mean(returns)), float(np.std(returns)), at


def measure(config: str, seed: int, folder: Path) -> tuple[object, ...]:
    """Return a row."""
    algorithm, _, name = config.partition("/")
    set_random_seed(seed)
    began = time.monotonic()
    manager = train(algorithm, ENVIRONMENTS[name], seed, folder)
    minutes = (time.monotonic() - began) / 60
    mean, deviation, at = judge(manager)
    return config, seed, round(mean, 3), round(deviation, 3), EPISODES, at, manager.n_timesteps, round(minutes, 2), version("rl_zoo3")


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure_rows(__doc__, COLUMNS, measure)
