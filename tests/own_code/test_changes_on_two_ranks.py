"""What a user adds to a network has its effect on two ranks: buffers are the same, and hooks of gradients see their mean."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

import lightning_rl as lrl
from tests.fitting import TINY
from tests.test_ranks import two_processes

ENVIRONMENTS = {lrl.PPO: "CartPole-v1", lrl.SAC: "Pendulum-v1"}


class Averages(nn.Module):
    """An encoder with torch's running statistics and one of its own, which its checkpoints leave out."""

    def __init__(self, space, features):
        super().__init__()
        self.num_features = space.shape[0]
        self.norm = nn.BatchNorm1d(self.num_features)
        self.register_buffer("mean", torch.zeros(self.num_features), persistent=False)

    def forward(self, obs):
        if self.training:
            self.mean.lerp_(obs.detach().flatten(0, -2).mean(0), 0.1)
        return self.norm(obs.flatten(0, -2)).view_as(obs) - self.mean


def train(folder: Path) -> None:
    """Train each algorithm on this rank, and keep its buffers at each save and its gradients in each hook."""
    for algorithm, env in ENVIRONMENTS.items():
        buffers, gradients = [], []

        class Looks(pl.Callback):
            def on_save_checkpoint(self, trainer, module, checkpoint, kept=buffers):
                kept.append({name: each.clone() for name, each in module.named_buffers()})

            def on_after_backward(self, trainer, module, kept=gradients):
                kept.append([p.grad.clone() for p in module.network.parameters() if p.grad is not None])

        torch.manual_seed(0)
        settings = TINY[algorithm] | {"net_arch": [8], "max_env_steps": 128, "encoder": Averages}
        model = algorithm(lrl.EnvConfig(env, num_envs=2), **settings)
        trainer = lrl.Trainer(
            devices=2, strategy="ddp", accelerator="cpu", default_root_dir=folder / algorithm.__name__, logger=False, evaluation=None,
            enable_progress_bar=False, callbacks=[Looks()], checkpoint=lrl.CheckpointConfig(every_n_env_steps=32),
        )  # fmt: skip
        trainer.fit(model)
        torch.save((buffers, gradients), folder / f"{algorithm.__name__}.{os.environ['LOCAL_RANK']}.pt")


@pytest.mark.thorough
def test_buffers_are_equal_at_each_save_and_hooks_after_backward_see_the_mean_gradient(tmp_path):
    ranks = two_processes(tmp_path, f"-m tests.own_code.test_changes_on_two_ranks {tmp_path}")
    said = [rank.communicate(timeout=300) for rank in ranks]
    for algorithm in ENVIRONMENTS:
        files = [tmp_path / f"{algorithm.__name__}.{rank}.pt" for rank in (0, 1)]
        assert all(file.exists() for file in files), (said[0][1][-3000:], said[1][1][-3000:])
        (ours, gradients), (theirs, others) = (torch.load(file, weights_only=True) for file in files)
        assert len(ours) == len(theirs) >= 2 and len(gradients) == len(others) > 4
        for mine, other in zip(ours, theirs, strict=True):
            assert [name for name in mine if not torch.equal(mine[name], other[name])] == []
        assert any(name.endswith("norm.running_mean") and each.abs().sum() > 0 for name, each in ours[-1].items())
        for mine, other in zip(gradients, others, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
