"""Learn from the dataset of one of our offline configs with d3rlpy, and judge it as `zoo.py` judges our rows.

    pip install torch==2.13.0 d3rlpy==2.8.1 "minari[hdf5]" pyyaml      # in an environment of its own
    PYTHONPATH=benchmarks python -m peers.offline_d3rlpy iql/pendulum [cql/pendulum …] [--seeds 1 2 3] [--folder peer_runs]

The dataset, the number of updates, the width of the networks, the batch and the scale of rewards are those of the config, and actions are
scaled to [−1, 1] as ours are; all else is d3rlpy's own. Plays five episodes twenty times in a run, as our runs do. The best of those plays
100 episodes. A row a seed is written to `benchmarks/results/peers/`, which `zoo.py table` shows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import d3rlpy
import gymnasium as gym
import minari
import numpy as np
import torch
import yaml

from peers.rows import EPISODES, EVALUATIONS, measure_rows

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ALGORITHMS = {
    "IQL": (d3rlpy.algos.IQLConfig, ("actor_encoder_factory", "critic_encoder_factory", "value_encoder_factory")),
    "CQL": (d3rlpy.algos.CQLConfig, ("actor_encoder_factory", "critic_encoder_factory")),
    "TD3BC": (d3rlpy.algos.TD3PlusBCConfig, ("actor_encoder_factory", "critic_encoder_factory")),
    "AWAC": (d3rlpy.algos.AWACConfig, ("actor_encoder_factory", "critic_encoder_factory")),
    "BehavioralCloning": (d3rlpy.algos.BCConfig, ("encoder_factory",)),
}
"""By the names of ours, with their settings of networks."""
COLUMNS = ("config", "seed", "return_mean", "return_std", "episodes", "best_updates", "updates", "minutes", "d3rlpy")


def read_steps(dataset: str) -> d3rlpy.dataset.MDPDataset:
    """Return the steps of a Minari dataset, without the observation after the last step of an episode."""
    episodes = list(minari.load_dataset(dataset).iterate_episodes())
    parts = [(each.observations[:-1], each.actions, each.rewards, each.terminations, each.truncations) for each in episodes]
    steps, actions, rewards, ends, cuts = map(np.concatenate, zip(*parts, strict=True))
    return d3rlpy.dataset.MDPDataset(steps.astype(np.float32), actions.astype(np.float32), rewards, ends, cuts)


def make_algorithm(name: str, settings: Mapping[str, Any]) -> Any:
    """Return their algorithm with the sizes of our config."""
    kind, networks = ALGORITHMS[name]
    layers = d3rlpy.models.VectorEncoderFactory(hidden_units=settings.get("net_arch", [256, 256]))
    sizes: dict[str, Any] = dict.fromkeys(networks, layers)
    if (scale := settings.get("reward_scale", 1)) != 1:
        sizes["reward_scaler"] = d3rlpy.preprocessing.MultiplyRewardScaler(scale)
    if settings.get("normalize_obs", "off") != "off":
        sizes["observation_scaler"] = d3rlpy.preprocessing.StandardObservationScaler()
    scaler = d3rlpy.preprocessing.MinMaxActionScaler()
    return kind(batch_size=settings.get("batch_size", 256), action_scaler=scaler, **sizes).create(device="cpu:0")


def play(env: gym.Env, algorithm: Any, episodes: int, seed: int) -> np.ndarray:
    """Return the returns of episodes with the most likely actions."""
    returns = []
    for number in range(episodes):
        obs, _ = env.reset(seed=seed + number)
        total, ended = 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(algorithm.predict(np.asarray(obs, np.float32)[None])[0])
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    return np.array(returns)


def measure(config: str, seed: int, folder: Path) -> tuple[object, ...]:
    """Return a row."""
    model = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())["model"]
    settings = model["init_args"]
    d3rlpy.seed(seed)
    env = gym.make(settings["env"]["id"])
    algorithm, updates, best = make_algorithm(model["class_path"], settings), int(float(settings["max_updates"])), folder / "best.pt"
    folder.mkdir(parents=True, exist_ok=True)
    began, highest, at = time.monotonic(), -np.inf, 0
    run = algorithm.fitter(
        read_steps(settings["dataset"]),
        n_steps=updates,
        n_steps_per_epoch=updates // EVALUATIONS,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
        show_progress=False,
    )
    for epoch, _ in run:
        if (found := play(env, algorithm, 5, 10_000).mean()) > highest:
            highest, at = found, epoch * (updates // EVALUATIONS)
            algorithm.save_model(str(best))
    minutes = (time.monotonic() - began) / 60
    algorithm.load_model(str(best))
    returns = play(env, algorithm, EPISODES, 50_000)
    figures = round(returns.mean(), 3), round(returns.std(), 3), EPISODES, at, updates, round(minutes, 2)
    return config, seed, *figures, version("d3rlpy")


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure_rows(__doc__, COLUMNS, measure)
