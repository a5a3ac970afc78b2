"""Attributes that a user's classes and callbacks add are saved with a run, or a line names them."""

import json
import subprocess
import sys
from collections import deque

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

import lightning_rl as lrl
from lightning_rl.errors import SettingError

ENV = lrl.EnvConfig("CartPole-v1", num_envs=1)


class Counting(nn.Module):
    """An encoder that counts its calls in learning."""

    def __init__(self, space, features):
        super().__init__()
        self.body, self.features, self.calls = nn.Linear(4, 8), 8, 0

    def forward(self, obs):
        self.calls += self.training
        return self.body(obs).tanh()


class Keeps(lrl.PPO):
    """A subclass that keeps all kinds of state."""

    temperature: float = 2.0

    def __post_init__(self):
        super().__post_init__()
        self.doubled = 2 * self.learning_rate
        self.lengths, self.sums, self.kinds = deque(maxlen=3), np.zeros(2), {"even": set(), "odd": set()}
        self.generator_of_mine, self.moving = np.random.default_rng(0), torch.zeros(2)

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.iteration = getattr(self, "iteration", 0) + 1
        self.lengths.append(self.iteration)
        self.sums += [1, self.generator_of_mine.random()]
        self.kinds["odd" if self.iteration % 2 else "even"].add(self.iteration)
        self.moving = 0.9 * self.moving + batch.reward.mean()
        self.record(**{"mine/noise": self.generator_of_mine.normal()})


class Notes(pl.Callback):
    """A callback that puts an attribute into the algorithm."""

    def on_train_batch_end(self, trainer, algorithm, *arguments):
        algorithm.noted = [*getattr(algorithm, "noted", []), algorithm.env_steps]


def make(steps=256, kind=Keeps, **settings):
    pl.seed_everything(1)
    return kind(ENV, n_steps=64, batch_size=64, n_epochs=1, max_env_steps=steps, encoder=Counting, **settings)


def fit(algorithm, folder, ckpt_path=None):
    trainer = lrl.Trainer(default_root_dir=folder, run_name="run", callbacks=[Notes()], evaluation=None, enable_progress_bar=False)
    trainer.fit(algorithm, ckpt_path=ckpt_path)
    return trainer.run_folder


def kept(algorithm):
    names = ("iteration", "lengths", "sums", "kinds", "moving", "noted")
    return {name: getattr(algorithm, name) for name in names} | {
        "calls": [each.calls for each in algorithm.modules() if hasattr(each, "calls")]
    }


@pytest.mark.thorough
def test_a_resumed_run_has_the_attributes_of_an_uninterrupted_one(tmp_path):
    whole = make()
    fit(whole, tmp_path / "whole")
    fit(make(128), tmp_path / "parts")
    resumed = make()
    fit(resumed, tmp_path / "parts", "last")
    assert repr(kept(resumed)) == repr(kept(whole)) and resumed.iteration == 4 and resumed.lengths.maxlen == 3
    assert resumed.noted == [64, 128, 192, 256] and resumed.kinds == {"even": {2, 4}, "odd": {1, 3}}
    assert resumed.generator_of_mine.random() == whole.generator_of_mine.random()
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_loaded_algorithm_has_the_attributes_that_changed_and_computes_the_others_from_its_settings(tmp_path):
    folder = fit(make(128), tmp_path)
    loaded = Keeps.load_from_checkpoint(folder / "checkpoints" / "last.ckpt", learning_rate=1.0)
    assert loaded.iteration == 2 and list(loaded.lengths) == [1, 2] and loaded.doubled == 2.0


def test_what_is_not_plain_data_is_named_once_when_it_is_first_saved(tmp_path, capsys):
    class Opaque(lrl.PPO):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.weights_then = self.network.state_dict()
            self.average = sum(p.mean() for p in self.network.parameters())
            self.frozen_client = object()

    fit(make(256, Opaque), tmp_path)
    said = [line for line in capsys.readouterr().out.splitlines() if "checkpoints do not hold" in line]
    assert [line.split()[4] for line in sorted(said)] == ["Opaque.average", "Opaque.frozen_client", "Opaque.weights_then"]


@pytest.mark.parametrize("name", ["env_steps", "training_step", "_modules", "network", "trainer", "__class__", "a b"])
def test_a_file_cannot_set_what_is_not_a_users_attribute(name):
    from lightning_rl.training.state import write_attributes

    with pytest.raises(SettingError, match="not one of a user's class"):
        write_attributes(make(), {"": {name: 3}})


@pytest.mark.parametrize("kind", [lrl.PPO, lrl.A2C, lrl.SAC, lrl.TD3, lrl.DQN, lrl.TRPO, lrl.PQN, lrl.IMPALA])
def test_no_attribute_of_the_package_counts_as_a_users(kind, tmp_path):
    from lightning_rl.training.state import own_attributes

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer, algorithm, *arguments):
            self.found = own_attributes(algorithm)

    discrete = kind in (lrl.DQN, lrl.PQN)
    looks = Looks()
    algorithm = kind("CartPole-v1" if discrete else "Pendulum-v1", max_env_steps=200)
    lrl.Trainer(default_root_dir=tmp_path, callbacks=[looks], max_steps=1, enable_progress_bar=False, evaluation=None).fit(algorithm)
    assert looks.found == {}


TWO_RANKS = """
import json, sys
import pytorch_lightning as pl
import lightning_rl as lrl

class Keeps(lrl.PPO):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.sums = [*getattr(self, "sums", []), self.global_rank + float(batch.obs.sum())]

if __name__ == "__main__":
    folder, *parts = sys.argv[1:]
    for k, steps in enumerate(parts):
        pl.seed_everything(1)
        algorithm = Keeps(lrl.EnvConfig("CartPole-v1", num_envs=1), n_steps=32, batch_size=32, n_epochs=1, max_env_steps=int(steps))
        ranks = dict(devices=2, accelerator="cpu")
        trainer = lrl.Trainer(default_root_dir=folder, run_name="run", evaluation=None, enable_progress_bar=False, **ranks)
        trainer.fit(algorithm, ckpt_path="last" if k else None)
    with open(f"{folder}.{algorithm.global_rank}.json", "w") as file:
        json.dump(algorithm.sums, file)
"""


@pytest.mark.slow
def test_each_rank_continues_with_its_own_attributes(tmp_path):
    (tmp_path / "script.py").write_text(TWO_RANKS)
    for folder, parts in {"whole": ["256"], "parts": ["128", "256"]}.items():
        done = subprocess.run([sys.executable, "script.py", folder, *parts], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    sums = {file.name: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert len(sums) == 4 and sums["whole.0.json"] != sums["whole.1.json"] and len(sums["whole.0.json"]) == 4
    assert all(sums[f"parts.{rank}.json"] == sums[f"whole.{rank}.json"] for rank in (0, 1))
