"""Environment steps per second of ours and of Stable-Baselines3, side by side in one run.

    pip install -r benchmarks/requirements.txt
    python benchmarks/throughput.py [--cases ppo_cartpole sac_cheetah …] [--repeats 5] [--device cuda]

Same hyper-parameters, network, environments and threads; repeats alternate, each in a process of its own; medians. The clock runs over
training alone: all environment steps over the wall time of `fit` or `learn`, first update and saving included, imports and construction
excluded. Ours runs as a user runs it: progress bar, CSV and TensorBoard loggers and checkpoints on (no evaluation, the peer has none);
Stable-Baselines3 runs with its defaults, which log and save nothing. The off-policy cases make one update after each step but the first
100, so that their rates are those of updates too; SAC's have a third column, the bare loop of `bare_sac.py`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "ppo_cartpole": {
        "algorithm": "PPO",
        "env": "CartPole-v1",
        "steps": 200_000,
        "settings": {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 3e-4},
    },
    "a2c_cartpole": {"algorithm": "A2C", "env": "CartPole-v1", "steps": 100_000, "settings": {"n_steps": 5, "learning_rate": 7e-4}},
    "ppo_cheetah8": {
        "algorithm": "PPO",
        "env": "HalfCheetah-v5",
        "steps": 131_072,
        "settings": {"n_steps": 2048, "batch_size": 512, "n_epochs": 10, "learning_rate": 3e-4},
        "normalize": True,
    },
    "ppo_pong": {
        "algorithm": "PPO",
        "env": "ALE/Pong-v5",
        "steps": 16_384,
        "settings": {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 2.5e-4},
        "atari": True,
    },
    "sac_pendulum": {
        "algorithm": "SAC",
        "env": "Pendulum-v1",
        "steps": 10_000,
        "num_envs": 1,
        "settings": {"learning_rate": 1e-3, "learning_starts": 100, "batch_size": 256},
        "bare": True,
    },
    "sac_cheetah": {
        "algorithm": "SAC",
        "env": "HalfCheetah-v5",
        "steps": 10_000,
        "num_envs": 1,
        "settings": {"learning_rate": 3e-4, "learning_starts": 100, "batch_size": 256},
        "bare": True,
    },
    "dqn_cartpole": {
        "algorithm": "DQN",
        "env": "CartPole-v1",
        "steps": 60_000,
        "num_envs": 1,
        "settings": {"learning_rate": 1e-3, "learning_starts": 100, "batch_size": 64, "train_freq": 1, "buffer_size": 100_000},
    },
}


def ours(case: dict[str, Any], threads: int, device: str) -> float:
    """Seconds of `Trainer.fit`."""
    import pytorch_lightning as pl

    import lightning_rl as lrl

    pl.seed_everything(1)
    normalize = {"normalize_obs": "running", "normalize_reward": True} if case.get("normalize") else {}
    atari = case.get("atari", False)
    env = lrl.EnvConfig(case["env"], num_envs=case.get("num_envs", 8), atari=atari, vectorization="async" if atari else "sync")
    normalize |= {"net_arch": [], "clip_reward": 1} if atari else {}
    algorithm = getattr(lrl, case["algorithm"])(env=env, max_env_steps=case["steps"], **case["settings"], **normalize)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lrl.Trainer(default_root_dir=folder, evaluation=None, torch_threads=threads, accelerator=device)
        start = time.perf_counter()
        trainer.fit(algorithm)
        return time.perf_counter() - start


def sb3(case: dict[str, Any], threads: int, device: str) -> float:
    """Seconds of `learn`."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack, VecNormalize

    torch.set_num_threads(threads)
    num_envs = case.get("num_envs", 8)
    if case.get("atari"):
        envs = make_atari_env(
            partial(make_atari_game, case["env"]), num_envs, seed=1, vec_env_cls=SubprocVecEnv, env_kwargs={"frameskip": 1}
        )
        envs = VecFrameStack(envs, 4)
    else:
        envs = make_vec_env(case["env"], n_envs=num_envs, seed=1)
    if case.get("normalize"):
        envs = VecNormalize(envs)
    policy = "CnnPolicy" if case.get("atari") else "MlpPolicy"
    model = getattr(stable_baselines3, case["algorithm"])(policy, envs, seed=1, device=device, **case["settings"])
    start = time.perf_counter()
    model.learn(case["steps"])
    return time.perf_counter() - start


def make_atari_game(env_id: str, **settings: Any) -> Any:
    """A game in a worker process of the peer, which knows only what it imports."""
    import gymnasium

    gymnasium.register_envs(importlib.import_module("ale_py"))
    return gymnasium.make(env_id, **settings)


def bare(case: dict[str, Any], threads: int, device: str) -> float:
    """Seconds of a hand-written loop."""
    import torch
    from bare_sac import bare_sac

    torch.set_num_threads(threads)
    return bare_sac(case["env"], case["steps"], case["settings"]["learning_starts"], case["settings"]["learning_rate"])


PEERS = {"ours": ours, "sb3": sb3, "bare": bare}


def measure(peer: str, case: str, threads: int, device: str) -> float:
    """Environment steps per second, in a fresh process."""
    command = [sys.executable, __file__, "--worker", peer, "--cases", case, "--threads", str(threads), "--device", device]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return CASES[case]["steps"] / float(result.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure and print a table, then the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[case for case in CASES if case != "ppo_pong"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(PEERS[options.worker](CASES[options.cases[0]], options.threads, options.device))
        return
    packages = ("torch", "pytorch-lightning", "gymnasium", "stable-baselines3")
    cores = f"{os.cpu_count()} cores, {options.threads} thread(s), {options.device}"
    print(f"{platform.processor() or platform.machine()}, {cores}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version(name)}" for name in packages))
    head = ["case", "ours, steps/s", "SB3", "bare", "ours / SB3", "ours / bare", "ours, all", "SB3, all", "bare, all"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    rows = {}
    for case in options.cases:
        rates: dict[str, list[float]] = {peer: [] for peer in PEERS if peer != "bare" or CASES[case].get("bare")}
        for _ in range(options.repeats):
            for peer, values in rates.items():
                values.append(measure(peer, case, options.threads, options.device))
        medians = {peer: statistics.median(values) for peer, values in rates.items()}
        ratios = {peer: medians["ours"] / medians[peer] for peer in ("sb3", "bare") if peer in medians}
        rows[case] = {"rates": rates, "ratios": ratios}
        cells = [f"{medians[peer]:,.0f}" if peer in medians else "" for peer in PEERS]
        cells += [f"{ratios[peer]:.2f}" if peer in ratios else "" for peer in ("sb3", "bare")]
        cells += [" ".join(f"{rate:,.0f}" for rate in rates.get(peer, [])) for peer in PEERS]
        print(f"| {case} | {' | '.join(cells)} |", flush=True)
    print("\n" + json.dumps(rows))


if __name__ == "__main__":
    main()
