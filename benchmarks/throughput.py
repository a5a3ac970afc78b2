"""Environment steps per second of ours and of Stable-Baselines3, side by side in one run.

    pip install -r benchmarks/requirements.txt
    python benchmarks/throughput.py [--cases ppo_cartpole a2c_cartpole ppo_cheetah8] [--repeats 5]

Same hyper-parameters, network, environments and threads; repeats alternate, each in a process of its own; medians. The clock runs over
training alone: all environment steps over the wall time of `fit` or `learn`, first update and saving included, imports and construction
excluded. Ours runs as a user runs it: progress bar, CSV and TensorBoard loggers and checkpoints on (no evaluation, the peer has none);
Stable-Baselines3 runs with its defaults, which log and save nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
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
}
NUM_ENVS = 8


def ours(case: dict[str, Any], threads: int) -> float:
    """Seconds of `Trainer.fit`."""
    import pytorch_lightning as pl

    import lightning_rl as lrl

    pl.seed_everything(1)
    normalize = {"normalize_obs": "running", "normalize_reward": True} if case.get("normalize") else {}
    env = lrl.EnvConfig(case["env"], num_envs=NUM_ENVS)
    algorithm = getattr(lrl, case["algorithm"])(env=env, max_env_steps=case["steps"], **case["settings"], **normalize)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lrl.Trainer(default_root_dir=folder, evaluation=None, torch_threads=threads, accelerator="cpu")
        start = time.perf_counter()
        trainer.fit(algorithm)
        return time.perf_counter() - start


def sb3(case: dict[str, Any], threads: int) -> float:
    """Seconds of `learn`."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(threads)
    envs = make_vec_env(case["env"], n_envs=NUM_ENVS, seed=1)
    if case.get("normalize"):
        envs = VecNormalize(envs)
    model = getattr(stable_baselines3, case["algorithm"])("MlpPolicy", envs, seed=1, device="cpu", **case["settings"])
    start = time.perf_counter()
    model.learn(case["steps"])
    return time.perf_counter() - start


PEERS = {"ours": ours, "sb3": sb3}


def measure(peer: str, case: str, threads: int) -> float:
    """Environment steps per second, in a fresh process."""
    command = [sys.executable, __file__, "--worker", peer, "--cases", case, "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return CASES[case]["steps"] / float(result.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure and print a table, then the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(PEERS[options.worker](CASES[options.cases[0]], options.threads))
        return
    packages = ("torch", "pytorch-lightning", "gymnasium", "stable-baselines3")
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {options.threads} thread(s), Python {platform.python_version()}"
    )
    print(", ".join(f"{name} {version(name)}" for name in packages))
    print("\n| case | ours, steps/s | SB3, steps/s | ratio of medians | ours, all | SB3, all |\n|---|---|---|---|---|---|")
    rows = {}
    for case in options.cases:
        rates: dict[str, list[float]] = {peer: [] for peer in PEERS}
        for _ in range(options.repeats):
            for peer, values in rates.items():
                values.append(measure(peer, case, options.threads))
        medians = {peer: statistics.median(values) for peer, values in rates.items()}
        rows[case] = {"rates": rates, "ratio": medians["ours"] / medians["sb3"]}
        every = " | ".join(" ".join(f"{rate:,.0f}" for rate in rates[peer]) for peer in PEERS)
        print(f"| {case} | {medians['ours']:,.0f} | {medians['sb3']:,.0f} | {rows[case]['ratio']:.2f} | {every} |", flush=True)
    print("\n" + json.dumps(rows))


if __name__ == "__main__":
    main()
