"""A loss of one's own finds next observations on-policy if its class asks for them."""

import csv

import gymnasium as gym
import numpy as np
import pytest
import yaml

import lightning_rl as lrl
from tests.command_line import run


class Count(gym.Env):
    """Observes how many steps of an episode of five were made."""

    observation_space = gym.spaces.Box(0, 5, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.array([0], np.float32), {}

    def step(self, action):
        self.count += 1
        return np.array([self.count], np.float32), 1.0, self.count == 5, False, {}


class Watching(lrl.PPO):
    """PPO that keeps the minibatches of its loss."""

    def loss(self, minibatch, *arguments):
        self.seen.append(minibatch)
        return super().loss(minibatch, *arguments)


class WithNext(Watching):
    """The same with next observations."""

    needs_next_obs = True


@pytest.mark.parametrize("memory", [None, "LSTM"])
def test_each_row_has_the_next_observation_also_the_last_one_of_an_episode(memory):
    model = WithNext(Count, max_env_steps=32, n_steps=8, batch_size=64, n_epochs=1, memory=memory)
    model.seen = []
    lrl.Trainer(max_steps=1, evaluation=None, checkpoint=None, logger=False, enable_progress_bar=False).fit(model)
    (batch,) = model.seen
    real = batch.weight > 0
    assert real.sum() == 8 * 8
    assert (batch.next_obs[real] == batch.obs[real] + 1).all()
    assert (batch.terminated[real] == (batch.next_obs[real, 0] == 5)).all() and batch.terminated.any()


class Watched(lrl.PPO):
    """PPO that logs by how much observations change in a step."""

    needs_next_obs = True

    def loss(self, minibatch, *arguments):
        loss, metrics = super().loss(minibatch, *arguments)
        return loss, metrics | {"change": (minibatch.next_obs - minibatch.obs).mean()}


SETTINGS = {"n_steps": 8, "batch_size": 64, "n_epochs": 1, "max_env_steps": 128}


@pytest.mark.thorough
@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_loss_that_is_named_on_the_command_line_or_in_a_config_finds_them(in_a_file, folder, capfd):
    path, env = f"{__name__}.Watched", {"id": f"{__name__}.Count", "num_envs": 8}
    config = {"model": {"class_path": path, "init_args": SETTINGS | {"env": env}}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))
    options = " ".join(f"--model.{name} {value}" for name, value in SETTINGS.items())
    model = "--config mine.yaml" if in_a_file else f"--model {path} --model.env.id {env['id']} --model.env.num_envs 8 {options}"
    quiet = "--evaluation null --trainer.enable_progress_bar false --trainer.accelerator cpu"
    assert run(f"fit {model} {quiet}", capfd)[0] == 0
    with next(folder.rglob("metrics.csv")).open() as file:
        assert [float(row["train/change"]) for row in csv.DictReader(file)] == [1.0, 1.0]


def test_without_asking_there_are_none():
    model = Watching(Count, max_env_steps=32, n_steps=8, batch_size=64, n_epochs=1)
    model.seen = []
    lrl.Trainer(max_steps=1, evaluation=None, checkpoint=None, logger=False, enable_progress_bar=False).fit(model)
    assert model.seen[0].next_obs == ()
