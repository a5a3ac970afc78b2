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
import csv
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

RESULTS = Path(__file__).resolve().parent.parent / "results" / "peers"
ENVIRONMENTS = {
    "acrobot": "Acrobot-v1",
    "cartpole": "CartPole-v1",
    "lunarlander": "LunarLander-v3",
    "lunarlander_continuous": "LunarLanderContinuous-v3",
    "mountaincar": "MountainCar-v0",
    "mountaincar_continuous": "MountainCarContinuous-v0",
    "pendulum": "Pendulum-v1",
}
"""By the names of our configs. Settings of MuJoCo's are for v4 there, which is not what we measure."""
COLUMNS = ("config", "seed", "return_mean", "return_std", "episodes", "best_env_steps", "env_steps", "minutes", "rl_zoo3")
EVALUATIONS, EPISODES = 20, 100


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


def measure(config: str, seed: int, folder: Path) -> dict[str, object]:
    """Return a row."""
    algorithm, _, name = config.partition("/")
    set_random_seed(seed)
    home = folder / config / f"seed_{seed}"
    began = time.monotonic()
    manager = train(algorithm, ENVIRONMENTS[name], seed, home)
    minutes = (time.monotonic() - began) / 60
    mean, deviation, at = judge(manager)
    found = (config, seed, round(mean, 3), round(deviation, 3), EPISODES, at, manager.n_timesteps, round(minutes, 2), version("rl_zoo3"))
    return dict(zip(COLUMNS, found, strict=True))


def main() -> None:
    """Measure the rows that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", help="algorithm of rl_zoo3 / environment as our configs name it")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="(1 2 3)")
    parser.add_argument("--folder", type=Path, default=Path("peer_runs"), help="where runs lie (peer_runs)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for config in options.configs:
        file = RESULTS / f"{config.replace('/', '_')}.csv"
        rows = list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []
        for seed in options.seeds:
            if str(seed) in {row["seed"] for row in rows}:
                continue
            row = {name: str(value) for name, value in measure(config, seed, options.folder.resolve()).items()}
            print(f"{config} seed {seed}: {row['return_mean']} in {row['minutes']} min", flush=True)
            rows.append(row)
            with file.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
