"""`Simple1D` and `Memory1D`: observations, rewards and ends of episodes, worked by hand."""

from __future__ import annotations

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from gymnasium.utils.env_checker import check_env

import lightning_rl as lrl
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_env, make_vector_env
from lightning_rl.envs.stepping import make_stepper
from lightning_rl.errors import SettingError
from tests.fitting import fit, tiny

IDS = ("lightning_rl/Simple1D-v0", "lightning_rl/Memory1D-v0")
FIRST = {"step_size": 0.1, "time_penalty": 0.001, "min_steps": 11}
"""The figures of ML-Agents' first version."""
VIEWS = {
    "vector": ({}, Box(-1, 1, (1,), np.float32)),
    "long vector": ({"vec_size": 3}, Box(-1, 1, (3,), np.float32)),
    "image": ({"num_vector": 0, "num_visual": 1}, Box(-1, 1, (20, 20, 3), np.float32)),
    "small image": ({"num_vector": 0, "num_visual": 1, "vis_size": [5, 6, 1]}, Box(-1, 1, (5, 6, 1), np.float32)),
    "entities": ({"num_vector": 0, "num_var_len": 1}, Box(-1, 1, (10, 5), np.float32)),
    "all": (
        {"num_vector": 2, "num_visual": 1, "num_var_len": 1},
        Dict(
            vector_0=Box(-1, 1, (1,), np.float32),
            vector_1=Box(-1, 1, (1,), np.float32),
            visual_0=Box(-1, 1, (20, 20, 3), np.float32),
            entities_0=Box(-1, 1, (10, 5), np.float32),
        ),
    ),
}
ACTIONS = {
    (1, 0): Box(-1, 1, (1,), np.float32),
    (2, 0): Box(-1, 1, (2,), np.float32),
    (0, 1): Discrete(2),
    (0, 3): MultiDiscrete([2, 2, 2]),
    (1, 1): Dict(continuous=Box(-1, 1, (1,), np.float32), discrete=Discrete(2)),
    (1, 2): Dict(continuous=Box(-1, 1, (1,), np.float32), discrete=MultiDiscrete([2, 2])),
}


def towards(side, continuous, branches):
    """An action that walks to a side in all dimensions and branches."""
    far, bits = np.full(continuous, side, np.float32), np.full(branches, side > 0, np.int64)
    if continuous and branches:
        return {"continuous": far, "discrete": bits if branches > 1 else bits[0]}
    return far if continuous else bits if branches > 1 else bits[0]


def play(env, goal_side=1, seed=0, kinds=(1, 0)):
    """Rewards of an episode that always walks to the goal's side, or away from it."""
    env.reset(seed=seed)
    action, rewards = towards(goal_side * env.unwrapped.goal, *kinds), []
    while True:
        _, reward, terminated, truncated, info = env.step(action)
        rewards.append(reward)
        assert info == {} and not truncated
        if terminated:
            return rewards


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("action", ACTIONS, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_every_variant_has_its_spaces_and_keeps_gymnasiums_rules(env_id, action, view):
    kwargs, space = VIEWS[view]
    env = gym.make(env_id, action=action, disable_env_checker=True, **kwargs)
    assert env.observation_space == space and env.action_space == ACTIONS[action]
    check_env(env.unwrapped, skip_render_check=True)  # warnings are errors here


@pytest.mark.parametrize("action", ACTIONS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_the_best_play_takes_five_steps_and_returns_1_02(action, seed):
    env = gym.make(IDS[0], action=action)
    rewards = play(env, seed=seed, kinds=action)
    assert rewards == pytest.approx([-0.01] * 4 + [1.06])
    assert sum(rewards) == pytest.approx(1.02)


@pytest.mark.parametrize("action", [(1, 0), (0, 1)])
def test_ten_times_a_tenth_is_less_than_one_so_that_the_eleventh_step_ends_it(action):
    rewards = play(gym.make(IDS[0], action=action, **FIRST), kinds=action)
    assert rewards == pytest.approx([-0.001] * 10 + [1.011])
    assert sum(rewards) == pytest.approx(1.001)


def test_the_wrong_side_ends_the_episode_too_and_costs_as_much_as_the_right_one_pays():
    assert play(gym.make(IDS[0]), goal_side=-1) == pytest.approx([-0.01] * 4 + [-1.06])


def test_one_position_at_each_end_pays_nothing_and_all_must_have_arrived():
    env = gym.make(IDS[0], action=(1, 1), step_size=0.5)
    env.reset(seed=0)
    rows = [env.step({"continuous": np.array([far], np.float32), "discrete": 1}) for far in (-0.25, -0.5, -0.125, -0.125)]
    assert [row[1] for row in rows] == pytest.approx([-0.01] * 3 + [0])
    assert [row[2] for row in rows] == [False, False, False, True]


def test_a_continuous_action_moves_as_far_as_its_value_and_at_most_one_step():
    env = gym.make(IDS[0])
    env.reset(seed=0)
    seen = []
    for far in (0.05, 1.0, -0.1, -1.0):
        env.step(np.array([far], np.float32))
        seen.append(float(env.unwrapped.position[0]))
    assert seen == pytest.approx([0.05, 0.25, 0.15, -0.05])


@pytest.mark.parametrize("env_id", IDS)
def test_an_episode_is_truncated_after_200_steps(env_id):
    env = gym.make(env_id, action=(0, 1))
    env.reset(seed=0)
    ends = [env.step(t % 2)[2:4] for t in range(200)]
    assert ends == [(False, False)] * 199 + [(False, True)]


def test_both_goals_are_drawn_and_a_seed_decides_which():
    env = gym.make(IDS[0])
    first = [float(env.reset(seed=seed)[0][0]) for seed in range(20)]
    assert set(first) == {-1, 1} and first == [float(env.reset(seed=seed)[0][0]) for seed in range(20)]


def shown(env, steps):
    """What observations are filled with, from the first of an episode on; all leaves alike."""
    obs = env.reset(seed=0)[0]
    values = []
    for t in range(steps + 1):
        leaves = list(obs.values()) if isinstance(obs, dict) else [obs]
        (value,) = {float(number) for leaf in leaves for number in leaf.flat}
        values.append(value * env.unwrapped.goal)
        obs = env.step(t % 2)[0]
    return values


@pytest.mark.parametrize("view", VIEWS)
def test_the_goal_fills_every_observation_and_the_one_with_memory_shows_it_three_times(view):
    simple, memory = (gym.make(env_id, action=(0, 1), **VIEWS[view][0]) for env_id in IDS)
    assert shown(simple, 6) == [1] * 7
    assert shown(memory, 6) == [1, 1, 1, 0, 0, 0, 0]
    assert shown(memory, 6) == [1, 1, 1, 0, 0, 0, 0]  # in each episode


def test_their_state_is_their_attributes():
    config = EnvConfig(IDS[1], 1)
    stepper = make_stepper(make_vector_env(config), config)
    stepper.reset(0)
    assert stepper.state_dict()["states"]["envs"][0]["way"] == "attributes"
    stepper.close()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_vector": 0}, "there is nothing to observe; raise num_vector, num_visual or num_var_len"),
        ({"action": [0, 0]}, "there is nothing to do; action counts continuous dimensions and binary branches"),
        ({"step_size": 0}, "step_size must be > 0, got 0"),
    ],
)
def test_invalid_settings_are_reported_in_one_line(kwargs, message):
    with pytest.raises(SettingError, match="cannot be built: ") as error:
        make_env(EnvConfig(IDS[0], kwargs=kwargs))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.thorough
def test_importing_the_package_registers_them_without_torch():
    code = "import sys, lightning_rl, gymnasium; print('torch' in sys.modules); gymnasium.make('lightning_rl/Memory1D-v0')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("algorithm", [lrl.PPO, lrl.SAC])
def test_mixed_actions_and_several_views_are_learned_from(algorithm):
    model = tiny(algorithm, IDS[0], env={"kwargs": {"num_vector": 2, "action": [1, 2]}})
    fit(model)
    assert model.env_steps == 96 and model.updates > 0
