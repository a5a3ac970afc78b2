"""Observations that only critics get: by name, of all agents of a copy, or the state of the environment."""

import json
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from gymnasium.spaces import Box, Dict, Discrete

import lightning_rl as lrl
from lightning_rl.envs.make import make_env
from lightning_rl.envs.stepping import make_fitting_stepper
from lightning_rl.errors import SettingError
from lightning_rl.types import tree_map
from tests.agents import Mortal, Together
from tests.algorithms.test_multi_agent import StopAt, different, fit

SMALL = {"compile": False, "net_arch": [8]}
ON_POLICY = {"n_steps": 8, "batch_size": 16, **SMALL}
OFF_POLICY = {"learning_starts": 8, "batch_size": 8, "steps_per_iteration": 8, "buffer_size": 200, **SMALL}


class Told(gym.Env):
    """Observes a number, and under `answer` the action that pays 1: the number's sign. Episodes have four steps."""

    observation_space = Dict({"answer": Box(-1, 1, (3,), np.float32), "number": Box(-1, 1, (2,), np.float32)})
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self):
        number = self.np_random.uniform(-1, 1)
        self.answer = int(number > 0)
        return {"answer": np.full(3, self.answer, np.float32), "number": np.full(2, number, np.float32)}

    def step(self, action):
        paid, self.t = float(action == self.answer), self.t + 1
        return self.observe(), paid, self.t == 4, False, {}


class Stated(Mortal):
    """Mortal with a state: the step, twice."""

    def state(self):
        return np.array([[self.t], [2 * self.t]])


class Turned(Together):
    """Together, whose agents observe a mask too."""

    observation: ClassVar = Dict({"seen": Box(-100, 100, (2,), np.float32), "action_mask": Box(0, 1, (2,), np.int8)})

    def observe(self, agent):
        return {"seen": super().observe(agent), "action_mask": np.ones(2, np.int8)}


def told(algorithm, **settings):
    pl.seed_everything(1, verbose=False)
    own = OFF_POLICY if algorithm is lrl.SAC else {**SMALL, "n_steps": 8} | ({"batch_size": 16} if algorithm is lrl.PPO else {})
    return algorithm(Told, max_env_steps=256, critic_obs=["answer"], **own, **settings)


@pytest.mark.parametrize("algorithm", [lrl.PPO, lrl.A2C, lrl.SAC])
def test_the_policy_does_not_read_what_only_the_critic_gets(algorithm):
    model = told(algorithm)
    obs = {"answer": torch.zeros(5, 3), "number": torch.rand(5, 2)}
    other = obs | {"answer": torch.ones(5, 3)}
    assert torch.equal(model.network.policy(obs, (), None)[0], model.network.policy(other, (), None)[0])
    if algorithm is lrl.SAC:
        assert not torch.equal(model.critic(obs), model.critic(other))
    else:
        assert not torch.equal(model.network.value(obs), model.network.value(other))


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [lrl.PPO, lrl.A2C, lrl.SAC])
@pytest.mark.parametrize("normalize_obs", ["off", "running"])
def test_a_policy_acts_without_what_only_the_critic_gets(algorithm, normalize_obs, tmp_path):
    model = told(algorithm, normalize_obs=normalize_obs)
    trainer = fit(model, tmp_path, evaluation=lrl.EvaluationConfig(episodes=2, every_n_env_steps=128))
    policy, number = lrl.load_policy(trainer.run_folder), np.array([0.5, 0.5], np.float32)
    alone = policy.act({"number": number})[0]
    assert alone == policy.act({"number": number, "answer": np.ones(3, np.float32)})[0]
    assert alone == lrl.load_policy(trainer.run_folder).act({"number": number[None]})[0][0]
    assert model({"number": number[None]}).shape == (1,)


@pytest.mark.thorough
def test_a_policy_with_a_memory_and_a_critic_that_sees_more_trains_and_continues_exactly(tmp_path):
    settings = {"memory": lrl.LSTM(4, 4)}
    whole, parts, again = (told(lrl.PPO, **settings) for _ in range(3))
    fit(whole, tmp_path / "whole")
    fit(parts, tmp_path / "parts", StopAt(2))
    fit(again, tmp_path / "parts", ckpt_path="last")
    assert different(whole, again) == [] and whole.env_steps == 256


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"critic_obs": ["anser"]}, "critic_obs: there is no observation 'anser'; did you mean answer?"),
        ({"critic_obs": ["answer", "number"]}, "critic_obs: these are all observations"),
        ({"critic_obs": ["answer"], "share_encoder": True}, "share_encoder true would show critic_obs to the policy"),
        ({"critic_obs": "all"}, "critic_obs all is for environments of several agents"),
    ],
)
def test_a_critic_obs_that_cannot_be_is_one_line(settings, line):
    with pytest.raises(SettingError) as error:
        lrl.PPO(Told, **ON_POLICY, **settings)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_critics_see_all_agents_zeros_for_who_is_not_there_and_who_is():
    model = lrl.PPO({"id": "tests.algorithms.test_critic_obs.Stated", "num_envs": 1}, critic_obs="all", **ON_POLICY)
    stepper = make_fitting_stepper(model.env, model.spaces, 0)
    obs, _ = stepper.reset(0)
    assert obs["own"].tolist() == [[0, 0], [1, 0]] and obs["joint"].tolist() == [[0, 0, 1, 0, 1, 1]] * 2
    stepper.step(np.zeros(2, int))
    step = stepper.step(np.zeros(2, int))  # b dies
    assert step.final_obs["joint"].tolist() == [[0, 2, 1, 2, 1, 1]]
    assert step.obs["joint"].tolist() == [[0, 2, 0, 0, 1, 0], [0] * 6]


def test_critics_see_the_state_of_the_environment():
    model = lrl.SAC({"id": "tests.algorithms.test_critic_obs.Stated", "num_envs": 1}, critic_obs="state", **OFF_POLICY)
    stepper = make_fitting_stepper(model.env, model.spaces, 0)
    assert stepper.reset(0)[0]["joint"].tolist() == [[0, 0]] * 2
    assert stepper.step(np.zeros(2, int)).obs["joint"].tolist() == [[1, 2]] * 2


def test_masks_are_no_part_of_what_critics_see_jointly():
    env = make_env(Turned)
    env.reset(seed=0)
    assert env.look_jointly("all").tolist() == [0, 0, 1, 0, 1, 1]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["all", "state"])
@pytest.mark.parametrize("algorithm", [lrl.PPO, lrl.SAC])
def test_agents_whose_critics_see_more_train_act_and_continue_exactly(tmp_path, kind, algorithm):
    own = OFF_POLICY if algorithm is lrl.SAC else ON_POLICY

    def made():
        pl.seed_everything(2, verbose=False)
        return algorithm({"id": "tests.algorithms.test_critic_obs.Stated", "num_envs": 2}, max_env_steps=96, critic_obs=kind, **own)

    whole, again = made(), made()
    fit(whole, tmp_path / "whole")
    fit(made(), tmp_path / "parts", StopAt(2))
    last = fit(again, tmp_path / "parts", ckpt_path="last").run_folder / "checkpoints" / "last.ckpt"
    assert different(whole, again) == []
    assert lrl.load_policy(last).act(np.zeros(2, np.float32))[0] in (0, 1) and lrl.evaluate(last, episodes=2)["episodes"] == 2


@pytest.mark.thorough
def test_each_behavior_has_a_critic_of_its_own_kind(tmp_path):
    def learner(**settings):
        return {"class_path": "PPO", "init_args": {"n_steps": 8, "batch_size": 16, **SMALL, **settings}}

    model = lrl.MultiAgent(
        {"id": "tests.algorithms.test_critic_obs.Stated", "num_envs": 2},
        {"a": {"agents": "a", "learner": learner(critic_obs="all")}, "b": {"agents": "b", "learner": learner()}},
        64,
    )
    assert model.sides["a"].joint == "all" and model.sides["b"].joint == ""
    trainer = fit(model, tmp_path, evaluation=lrl.EvaluationConfig(episodes=2, every_n_env_steps=32))
    assert lrl.load_policy(trainer.run_folder, behavior="a").act(np.zeros(2, np.float32))[0] in (0, 1)


class Remembered(gym.Wrapper):
    """Memory1D whose goal stands under `goal` in every observation."""

    def __init__(self):
        super().__init__(gym.make("lightning_rl/Memory1D-v0", action=[0, 1]))
        self.observation_space = Dict({"goal": Box(-1, 1, (1,), np.float32), "seen": self.env.observation_space})

    def observe(self, obs):
        return {"goal": np.full(1, self.unwrapped.goal, np.float32), "seen": obs}

    def reset(self, **settings):
        obs, info = self.env.reset(**settings)
        return self.observe(obs), info

    def step(self, action):
        obs, *rest = self.env.step(action)
        return self.observe(obs), *rest


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_critic_that_is_shown_the_goal_helps_a_policy_that_must_remember_it(seed, tmp_path):
    pl.seed_everything(seed, verbose=False)
    memory = lrl.LSTM(16, 16)
    settings = {"n_steps": 128, "batch_size": 128, "learning_rate": 3e-3, "ent_coef": 5e-3, "net_arch": [32], "memory": memory}
    model = lrl.PPO(Remembered, max_env_steps=10_000, critic_obs=["goal"], compile=False, **settings)
    fit(model, tmp_path)
    assert lrl.evaluate(model, episodes=50)["return_mean"] >= 1.0  # 1.02 at best


def test_hidden_observations_are_copied_nowhere_else():
    space = Dict({"answer": Box(-1, 1, (3,), np.float32), "number": Box(-1, 1, (2,), np.float32)})
    from lightning_rl.spaces import add_hidden

    given = {"number": np.ones((4, 2))}
    assert tree_map(np.shape, add_hidden(space, given, ["answer"])) == {"answer": (4, 3), "number": (4, 2)}
    assert given.keys() == {"number"}


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [lrl.PPO, lrl.SAC])
def test_an_exported_policy_has_no_input_for_what_only_the_critic_gets(algorithm, tmp_path):
    trainer = fit(told(algorithm), tmp_path, evaluation=lrl.EvaluationConfig(episodes=2, every_n_env_steps=128))
    described = json.loads(lrl.export_policy(trainer.run_folder).with_name("best.onnx.json").read_text())
    assert [(port["name"], port["shape"]) for port in described["inputs"]] == [("number", ["batch", 2])]


@pytest.mark.thorough
def test_the_policy_of_one_behavior_is_exported_under_its_name(tmp_path):
    learner = {"class_path": "PPO", "init_args": {"n_steps": 8, "batch_size": 16, "critic_obs": "all", **SMALL}}
    behaviors = {name: {"agents": name, "learner": learner} for name in "ab"}
    model = lrl.MultiAgent({"id": "tests.agents.Together", "num_envs": 2}, behaviors, 64)
    trainer = fit(model, tmp_path, evaluation=lrl.EvaluationConfig(episodes=2, every_n_env_steps=32))
    file = lrl.export_policy(trainer.run_folder, behavior="b")
    described = json.loads(file.with_name("best.b.onnx.json").read_text())
    assert file.name == "best.b.onnx" and [port["shape"] for port in described["inputs"]] == [["batch", 2]]
    with pytest.raises(SettingError, match="name a behavior, --behavior: this run has a, b"):
        lrl.export_policy(trainer.run_folder)
