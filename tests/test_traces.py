"""What every algorithm computes is pinned in `traces.json`: a change of behaviour changes that file.

    python -m tests.test_traces --write        # on purpose, after a change that is meant to change what is learned

Bit for bit where the processor and the versions of torch, numpy and gymnasium are those of the file, else the losses of the first
iterations to 1e-4: processors with the same instructions but other caches round sums differently.
"""

from __future__ import annotations

import csv
import hashlib
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from tests.experts import at_random
from tests.fitting import Rows, fit

FILE = Path(__file__).with_name("traces.json")
REPLAY = {"learning_starts": 32, "batch_size": 32, "buffer_size": 500, "steps_per_iteration": 32, "net_arch": [32, 32]}
CASES = {
    "PPO discrete": (lrl.PPO, "CartPole-v1", {"n_steps": 32, "batch_size": 64}),
    "PPO continuous": (lrl.PPO, "Pendulum-v1", {"n_steps": 32, "batch_size": 64, "normalize_obs": "running", "normalize_reward": True}),
    "A2C": (lrl.A2C, "CartPole-v1", {}),
    "IMPALA": (lrl.IMPALA, "CartPole-v1", {}),
    "SAC continuous": (lrl.SAC, "Pendulum-v1", REPLAY),
    "SAC discrete": (lrl.SAC, "CartPole-v1", REPLAY),
    "DQN": (lrl.DQN, "CartPole-v1", REPLAY | {"train_freq": 1, "target_update_interval": 20, "learning_rate": 1e-3}),
    "DQN with everything": (
        lrl.DQN,
        "CartPole-v1",
        REPLAY | {"double": True, "dueling": True, "noisy": True, "distribution": "c51", "n_steps": 3, "replay": {"prioritized": True}},
    ),
    "TD3": (lrl.TD3, "Pendulum-v1", REPLAY),
    "EvolutionStrategies": (lrl.EvolutionStrategies, "CartPole-v1", {"episodes_per_generation": 8, "normalize_obs": "running"}),
    "BehavioralCloning": (
        lrl.BehavioralCloning,
        "CartPole-v1",
        {"dataset": at_random("CartPole-v1", "{}"), "max_updates": 96, "updates_per_iteration": 16, "batch_size": 32},
    ),
}
FIRST = 3
"""Iterations with updates whose losses other machines reproduce."""


def processor() -> str:
    """Return the vendor, family, model, stepping and cache of the processor where Linux reports them."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().split("\n\n")[0].splitlines() if file.exists() else []
    facts = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    return " ".join(facts.get(name, "").strip() for name in ("vendor_id", "cpu family", "model", "stepping", "cache size"))


def machine() -> dict[str, object]:
    """What decides the last bits."""
    features = np._core._multiarray_umath.__cpu_features__  # type: ignore[attr-defined]
    flags = " ".join(sorted(name for name, present in features.items() if present))
    versions = {name: version(name) for name in ("torch", "numpy", "gymnasium")}
    return {
        "architecture": platform.machine(),
        "processor": processor(),
        "flags": flags,
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
        **versions,
    }


def trace(name: str) -> dict[str, object]:
    """Train for some iterations: the losses of the first, and the parameters after the last."""
    algorithm, env_id, settings = CASES[name]
    rows, threads = Rows(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pl.seed_everything(1, verbose=False)
        env = lrl.EnvConfig(env_id, num_envs=4)
        model = algorithm(env, **({f"max_{algorithm.counter}": 640, "log_interval": 1} | settings))
        fit(model, logger=rows)
    finally:
        torch.set_num_threads(threads)
    losses = [{key: value for key, value in row.items() if key.endswith("loss")} for _, row in rows.rows]
    state = {key: tensor.detach().contiguous() for key, tensor in sorted(model.state_dict().items())}
    digest = hashlib.sha256(b"".join(key.encode() + tensor.numpy().tobytes() for key, tensor in state.items())).hexdigest()
    floats = [tensor.double() for tensor in state.values() if tensor.is_floating_point()]
    return {
        "updates": model.updates,
        "sha256": digest,
        "sum": float(sum(tensor.sum() for tensor in floats)),
        "sum_of_squares": float(sum(tensor.square().sum() for tensor in floats)),
        "losses": [row for row in losses if row][:FIRST],
    }


@pytest.mark.variants
@pytest.mark.parametrize("name", CASES)
def test_what_is_learned_is_what_the_file_says(name):
    pinned, found = json.loads(FILE.read_text()), trace(name)
    way_out = "if this is meant: python -m tests.test_traces --write"
    if pinned["machine"] == machine():
        assert found == pinned["traces"][name], way_out
        return
    expected = pinned["traces"][name]
    assert found["updates"] == expected["updates"], way_out
    for row, wanted in zip(found["losses"], expected["losses"], strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-4), way_out


def test_the_file_holds_these_traces_and_no_others():
    assert json.loads(FILE.read_text())["traces"].keys() == CASES.keys()


def run(folder: Path, algorithm: type, env_id: str, vectorization: str) -> tuple[torch.Tensor, list[dict[str, str]]]:
    """All weights and all metrics but those of time, of a run with everything on."""
    pl.seed_everything(3, verbose=False)
    env = lrl.EnvConfig(env_id, num_envs=2, vectorization=vectorization)
    settings = {"n_steps": 16, "batch_size": 32} if algorithm is lrl.PPO else REPLAY
    model = algorithm(env, max_env_steps=128, log_interval=1, **settings)
    evaluation = {"every_n_env_steps": 64, "episodes": 2, "num_envs": 2, "max_episode_steps": 20}
    trainer = lrl.Trainer(default_root_dir=folder, evaluation=evaluation, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(model)
    with (trainer.run_folder / "metrics.csv").open(newline="") as stream:
        rows = [{key: value for key, value in row.items() if not key.startswith("time/")} for row in csv.DictReader(stream)]
    rows += [{"evaluations": (trainer.run_folder / "evaluations.csv").read_text()}]
    return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()]), rows


@pytest.mark.variants
@pytest.mark.parametrize(
    "algorithm, env_id, vectorization",
    [
        (lrl.PPO, "CartPole-v1", "sync"),
        (lrl.SAC, "Pendulum-v1", "async"),
        pytest.param(lrl.PPO, "CartPole-v1", "async", marks=pytest.mark.slow),
        pytest.param(lrl.SAC, "Pendulum-v1", "sync", marks=pytest.mark.slow),
    ],
)
def test_the_same_seed_gives_the_same_bits(algorithm, env_id, vectorization, tmp_path):
    first, second = (run(tmp_path / str(k), algorithm, env_id, vectorization) for k in range(2))
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] and len(first[1]) > 4


@pytest.mark.thorough
def test_environments_in_processes_of_their_own_change_no_bit(tmp_path):
    here, apart = (run(tmp_path / each, lrl.PPO, "CartPole-v1", each) for each in ("sync", "async"))
    assert torch.equal(here[0], apart[0]) and here[1] == apart[1]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    FILE.write_text(json.dumps({"machine": machine(), "traces": {name: trace(name) for name in CASES}}, indent=1) + "\n")
