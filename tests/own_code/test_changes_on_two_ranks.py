"""What a user changes has its effect on two ranks, as without fast paths; buffers are the same, and hooks see mean gradients.

Each change of the table is made on both ranks in each of its algorithms, all in one pair of processes.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import lightning_rl as lrl
from tests.fitting import TINY, fit
from tests.own_code.changes import ALGORITHMS, EQUAL, NETWORK, REFUSED, RUNS, expected, note, restore_torch
from tests.own_code.test_changes import without_fast_paths
from tests.processes.test_ranks import two_processes

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


def made_of(change, algorithm):
    """Make an algorithm, by its name in the table, with a change of the table on this rank, and its callbacks."""
    if change in NETWORK:
        torch.manual_seed(0)
        model = ALGORITHMS[algorithm](max_env_steps=256)
        NETWORK[change](model.network)
        return model, []
    return RUNS[change].make(getattr(lrl, algorithm))


def outcome(change: str, algorithm: str) -> object:
    """Apply a change in a run on this rank. Return its weights, or the line that refuses it."""
    try:
        with RUNS[change].around() if change in RUNS else nullcontext():
            model, callbacks = made_of(change, algorithm)
            torch.manual_seed(1)
            fit(model, devices=2, strategy="ddp", callbacks=callbacks, max_steps=2)
    except lrl.SettingError as error:
        return str(error)
    finally:
        restore_torch()
    return parameters_to_vector(model.parameters()).detach()


PAIRS = [(change, algorithm) for change in NETWORK for algorithm in ALGORITHMS]
PAIRS += [(name, kind.__name__) for name, change in RUNS.items() if "another rank" not in change.outcomes for kind in change.to]


def apply_all(folder: Path) -> None:
    """Apply each change with fast paths and without."""
    found = {pair: outcome(*pair) for pair in PAIRS}
    with without_fast_paths():
        slow = {pair: outcome(*pair) for pair in PAIRS}
    torch.save((found, slow), folder / f"changes.{os.environ['LOCAL_RANK']}.pt")


def on_two_ranks(folder: Path, what: str) -> list[str]:
    """Call a function of this module on two ranks. Return what they printed as errors."""
    ranks = two_processes(folder, f"-m tests.own_code.test_changes_on_two_ranks {what} {folder}")
    return [rank.communicate(timeout=1800)[1][-3000:] for rank in ranks]


@pytest.mark.thorough
def test_buffers_are_equal_at_each_save_and_hooks_after_backward_see_the_mean_gradient(tmp_path):
    errors = on_two_ranks(tmp_path, "train")
    for algorithm in ENVIRONMENTS:
        files = [tmp_path / f"{algorithm.__name__}.{rank}.pt" for rank in (0, 1)]
        assert all(file.exists() for file in files), errors
        (ours, gradients), (theirs, others) = (torch.load(file, weights_only=True) for file in files)
        assert len(ours) == len(theirs) >= 2 and len(gradients) == len(others) > 4
        for mine, other in zip(ours, theirs, strict=True):
            assert [name for name in mine if not torch.equal(mine[name], other[name])] == []
        assert any(name.endswith("norm.running_mean") and each.abs().sum() > 0 for name, each in ours[-1].items())
        for mine, other in zip(gradients, others, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.slow
def test_changes_count_on_two_ranks_as_without_fast_paths(tmp_path):
    errors = on_two_ranks(tmp_path, "apply_all")
    files = [tmp_path / f"changes.{rank}.pt" for rank in (0, 1)]
    assert all(file.exists() for file in files), errors
    (ours, slow), (theirs, _) = (torch.load(file, weights_only=True) for file in files)
    for pair, result in ours.items():
        if expected(*pair)["another rank"] == REFUSED:
            assert isinstance(result, str) and result == theirs[pair] == slow[pair], pair
            note(*pair, "another rank", REFUSED)
            continue
        assert not isinstance(result, str), (pair, result)
        assert torch.equal(result, theirs[pair]), pair
        torch.testing.assert_close(result, slow[pair], atol=1e-5, rtol=1e-4, msg=str(pair))
        note(*pair, "another rank", EQUAL)


if __name__ == "__main__":
    {"train": train, "apply_all": apply_all}[sys.argv[1]](Path(sys.argv[2]))
