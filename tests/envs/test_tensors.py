"""CartPole and Pendulum on a device move as gymnasium's do."""

from __future__ import annotations

from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch

from lightning_rl import PPO, SAC, EnvConfig, SettingError, Trainer
from lightning_rl.envs.make import make_vector_env
from lightning_rl.envs.snapshot.vector import make_keeper
from lightning_rl.envs.tensors import HostView, TorchCartPole, TorchPendulum
from tests.fitting import TINY


@pytest.mark.thorough
@pytest.mark.parametrize("kind, name, width", [(TorchCartPole, "CartPole-v1", 0.3), (TorchPendulum, "Pendulum-v1", 8.0)])
def test_transitions_are_gymnasiums(kind, name, width):
    envs, one, rng = kind(500, 10_000, "cpu"), gym.make(name).unwrapped, np.random.default_rng(0)
    envs.reset(seed=0)
    one.reset(seed=0)
    for _ in range(10):
        states = rng.uniform(-width, width, envs.state.shape)
        envs.state.copy_(torch.from_numpy(states))
        actions = np.array([envs.single_action_space.sample() for _ in range(500)])
        _, reward, terminated, truncated, info = envs.step(torch.from_numpy(actions))
        for i in range(500):
            one.state = states[i]
            one.steps_beyond_terminated = None
            obs, paid, over, *_ = one.step(actions[i])
            np.testing.assert_allclose(info["final_obs"][i].numpy(), obs, rtol=1e-6, atol=1e-6)
            assert reward[i].item() == pytest.approx(float(paid), rel=1e-6) and terminated[i].item() == over
        assert not truncated.any()


def test_episodes_start_again_where_they_end_and_nowhere_else():
    envs = TorchCartPole(64, 20, "cpu")
    before, _ = envs.reset(seed=3)
    assert before.abs().max() <= 0.05 and len(before.unique(dim=0)) == 64
    lengths, ends = torch.zeros(64), 0
    for _ in range(100):
        obs, _, terminated, truncated, info = envs.step(torch.ones(64, dtype=torch.int64))
        lengths += 1
        assert torch.equal(truncated, (lengths == 20) & ~terminated)
        ended = terminated | truncated
        assert obs[ended].abs().max() <= 0.05 if ended.any() else True
        assert torch.equal(obs[~ended], info["final_obs"][~ended])
        assert (info["final_obs"][terminated].abs() > torch.tensor([2.4, 9, 0.2, 9])).any(1).all()
        lengths[ended] = 0
        ends += int(ended.sum())
    assert ends > 500  # one side all the time: an episode takes about ten steps


def test_seeds_and_states_decide_what_follows():
    first, second, third = (TorchPendulum(5, 200, "cpu") for _ in range(3))
    actions = torch.rand(30, 5, 1, generator=torch.Generator().manual_seed(0)) * 4 - 2
    assert torch.equal(first.reset(seed=7)[0], second.reset(seed=7)[0])
    for action in actions[:10]:
        first.step(action)
    third.reset(seed=1)
    third.set_state(first.get_state())
    for action in actions[10:]:
        for one, other in zip(first.step(action)[:4], third.step(action)[:4], strict=True):
            assert torch.equal(one, other)
    assert torch.equal(first.reset()[0], third.reset()[0])


def test_a_reset_without_a_seed_begins_elsewhere_in_each_environment_and_one_with_a_seed_in_the_same_place():
    unseeded = [TorchCartPole(2, 500, "cpu").reset()[0] for _ in range(2)]
    seeded = [TorchCartPole(2, 500, "cpu").reset(seed=3)[0] for _ in range(2)]
    assert not torch.equal(*unseeded) and torch.equal(*seeded)


def test_what_environments_save_themselves_comes_back_whatever_tensors_they_hold():
    """As on a GPU, where no other way could save their tensors."""
    whole, rest = (TorchCartPole(3, 20, "cpu") for _ in range(2))
    for envs in (whole, rest):
        envs.low, envs.high = torch.stack([envs.low, envs.high])  # two views of the same memory
    actions = np.ones((30, 3), dtype=np.int64)
    first, second = HostView(whole), HostView(rest)
    first.reset(seed=5)
    for action in actions[:10]:
        first.step(action)
    assert make_keeper(second).set_states(make_keeper(first).get_states())
    for action in actions[10:]:
        for one, other in zip(first.step(action)[:4], second.step(action)[:4], strict=True):
            assert (one == other).all()


@pytest.mark.thorough
def test_the_device_is_an_argument_that_single_ones_take_too():
    config = EnvConfig("Torch/CartPole-v1", 3, kwargs={"device": "cpu"})
    assert make_vector_env(config).unwrapped.device == torch.device("cpu")
    model = PPO(config, max_env_steps=192, **TINY[PPO])
    Trainer(enable_progress_bar=False, logger=False, checkpoint=None).fit(model)
    assert model.updates > 0


def test_auto_steps_copies_on_the_device_unless_single_ones_are_asked_for():
    assert isinstance(make_vector_env(EnvConfig("Torch/CartPole-v1", 3)).unwrapped, TorchCartPole)
    wrapped = make_vector_env(EnvConfig("Torch/CartPole-v1", 3, wrappers=["gymnasium.wrappers.TimeAwareObservation"]))
    assert not isinstance(wrapped.unwrapped, TorchCartPole)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm, env", [(PPO, "Torch/CartPole-v1"), (SAC, "Torch/Pendulum-v1")])
def test_rollouts_and_replay_learn_from_them_and_are_evaluated_in_gymnasiums(algorithm, env, tmp_path):
    model = algorithm(EnvConfig(env, 16), max_env_steps=1024, **TINY[algorithm])
    trainer = Trainer(default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.fit(model)
    assert model.updates > 0 and np.isfinite(float(trainer.callback_metrics["eval/mean_reward"]))


class Faulty(TorchCartPole):
    """Whose first step is changed by a function."""

    def __init__(self, change):
        super().__init__(4, 500, "cpu")
        self.change = change

    def step(self, action):
        return self.change(*super().step(action))


MISTAKES = {
    "rewards must be a tensor [4], got a ndarray": lambda obs, reward, *rest: (obs, reward.numpy(), *rest),
    "rewards must be a tensor [4], got a tensor [4, 1]": lambda obs, reward, *rest: (obs, reward[:, None], *rest),
    "terminations must be a tensor [4], got a list": lambda obs, reward, over, *rest: (obs, reward, over.tolist(), *rest),
    "observations must be a tensor [4, 4], got a tensor [4, 3]": lambda obs, *rest: (obs[:, :3], *rest),
    'info["final_obs"] must be a tensor [4, 4], got a list': lambda *step: (*step[:4], {"final_obs": [None] * 4}),
    'info["is_success"] must be a tensor [4], got a int': lambda *step: (*step[:4], step[4] | {"is_success": 1}),
    "Faulty.step must return observations, rewards, terminations, truncations and an info": lambda *step: step[:4],
    "an action_mask, but the first reset had none": lambda *step: (*step[:4], {"action_mask": torch.ones(4, 2, dtype=torch.bool)}),
    "observations: trees differ: a leaf against the keys ['x']": lambda obs, *rest: ({"x": obs}, *rest),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_wrong_return_value_of_a_step_on_a_device_is_reported_in_one_line(line):
    model = PPO(Faulty(MISTAKES[line]), max_env_steps=64, n_steps=8, batch_size=8)
    with pytest.raises(SettingError) as error:
        Trainer(enable_progress_bar=False, logger=False, checkpoint=None, evaluation=None).fit(model)
    assert line in str(error.value) and "\n" not in str(error.value)


class Homeless(gym.vector.VectorEnv):
    """Gives tensors, and does not say where they live."""

    metadata: ClassVar[dict] = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    num_envs = 4
    single_observation_space, single_action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)
    observation_space, action_space = gym.spaces.Box(-1, 1, (4, 3)), gym.spaces.MultiDiscrete([2] * 4)

    def reset(self, *, seed=None, options=None):
        return torch.zeros(4, 3), {}


@pytest.mark.thorough
def test_an_environment_of_tensors_without_a_device_gets_an_error_that_asks_for_it():
    with pytest.raises(SettingError, match=r"^observations of Homeless are tensors: set its attribute `device` to their device$"):
        Trainer(enable_progress_bar=False, logger=False, checkpoint=None, evaluation=None).fit(PPO(Homeless(), n_steps=8, batch_size=8))
