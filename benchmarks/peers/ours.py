"""lightning_rl as a user runs it: progress bar, CSV and TensorBoard loggers and checkpoints on, evaluation off as no peer has one."""

from __future__ import annotations

import tempfile
from typing import Any

import pytorch_lightning as pl
import torch
from cases import Case
from clock import Clock, measure

import lightning_rl as lrl


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    pl.seed_everything(1)
    env = lrl.EnvConfig(case.env, num_envs=case.num_envs, atari=case.atari, vectorization=case.vectorization)
    normalize = {"normalize_obs": "running", "normalize_reward": True} if case.normalize else {}
    algorithm = getattr(lrl, case.algorithm)(env=env, max_env_steps=case.steps, **case.settings, **normalize, **case.ours)
    clock.follow(algorithm, "end_update")
    with tempfile.TemporaryDirectory() as folder:
        flags: dict[str, Any] = {"torch_threads": torch.get_num_threads(), "accelerator": device, "precision": case.precision}
        trainer = lrl.Trainer(default_root_dir=folder, evaluation=None, **flags)
        clock.start()
        trainer.fit(algorithm)
        clock.stop()
    return algorithm.env_steps, algorithm.updates


if __name__ == "__main__":
    measure(train)
