"""`lrl.evaluate`: evaluate a policy from Python."""

from __future__ import annotations

import json
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

import lightning_rl as lrl
from lightning_rl import A2C, PPO, SettingError
from tests.command_line import run
from tests.environments import Scripted
from tests.fitting import fit, tiny


@pytest.fixture
def model(folder):
    model = tiny(PPO, "CartPole-v1", max_env_steps=16)
    fit(model).save_checkpoint(folder / "best.ckpt")
    return model


@pytest.mark.thorough
def test_python_and_the_command_line_find_the_same(model, capfd):
    arguments = {"episodes": 7, "seed": 3, "num_envs": 2, "max_episode_steps": 30}
    options = " ".join(f"--{name} {value}" for name, value in arguments.items())
    for deterministic in (True, False):
        status, out, err = run(f"evaluate --ckpt_path best.ckpt {options} --json {'' if deterministic else '--stochastic'}", capfd)
        assert (status, err) == (0, "")
        found = [lrl.evaluate(each, deterministic=deterministic, **arguments) for each in ("best.ckpt", model)]
        assert found == [json.loads(out)] * 2 and (found[0]["episodes"], found[0]["env_steps"]) == (7, 16)


@pytest.mark.thorough
def test_the_defaults_of_python_are_those_of_the_command_line(model, capfd):
    assert lrl.evaluate("best.ckpt") == json.loads(run("evaluate --ckpt_path best.ckpt --json", capfd)[1])


def test_what_a_function_builds_is_played_and_nothing_else_notices(folder):
    model = tiny(A2C, max_env_steps=16)
    model.env = partial(Scripted)
    torch.manual_seed(5)
    np.random.seed(5)
    model.network.train()
    before, threads = (torch.get_rng_state(), np.random.get_state()[1].copy()), torch.get_num_threads()
    assert lrl.evaluate(model, episodes=3)["episodes"] == 3
    assert torch.get_rng_state().equal(before[0]) and (np.random.get_state()[1] == before[1]).all()
    assert model.network.training and torch.get_num_threads() == threads


@pytest.mark.parametrize(
    "given, words",
    [
        ({"episodes": 0}, "^episodes must be >= 1, got 0"),
        ({"num_envs": 1.5}, "^num_envs must be an integer >= 1, got 1.5"),
        ({"seed": -1}, "^seed must be >= 0 and <= .*, got -1"),
        ({"max_episode_steps": 0}, "^max_episode_steps must be >= 1, got 0"),
        ({"deterministic": "no"}, "^deterministic must be true or false, got 'no'"),
        ({"checkpoint_or_algorithm": "best.ckp"}, "'best.ckp' is not a file; .*did you mean best.ckpt"),
        ({"checkpoint_or_algorithm": 3}, "^evaluate takes a checkpoint, a run's folder or an algorithm, got int"),
    ],
)
def test_wrong_arguments_are_named(given, words, model):
    with pytest.raises(SettingError, match=words):
        lrl.evaluate(**{"checkpoint_or_algorithm": model, **given})


def test_a_policy_is_shown_with_its_network_and_spaces():
    assert repr(lrl.load_policy(PPO("CartPole-v1"))) == "Policy(ActorCritic, from Box(4) to Discrete(2))"


@pytest.mark.thorough
def test_a_ready_environment_is_refused(folder):
    model = PPO(gym.make_vec("CartPole-v1", 2), n_steps=8, batch_size=8, n_epochs=1, max_env_steps=16, net_arch=[8])
    with pytest.raises(SettingError, match="evaluate cannot build a ready environment again; train on an id"):
        lrl.evaluate(model)
    fit(model).save_checkpoint(folder / "a.ckpt")
    with pytest.raises(SettingError, match=r"a\.ckpt was trained on a ready environment.*; give env= from Python, or --env ID where"):
        lrl.evaluate(folder / "a.ckpt")


def test_the_policy_of_a_model_in_memory_acts_as_its_checkpoint_and_stays_when_the_model_learns_on(model):
    acting, stored = lrl.load_policy(model), lrl.load_policy("best.ckpt")
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    before = acting.act(obs)[0]
    assert np.array_equal(before, stored.act(obs)[0])
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.zero_()
    assert np.array_equal(acting.act(obs)[0], before) and not np.array_equal(lrl.load_policy(model).act(obs)[0], before)
