"""The sync vector environment returns what gymnasium's own does, without infos that are not read."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lightning_rl.envs.make import make_vector_env
from lightning_rl.envs.sync import READ, TurnVectorEnv
from lightning_rl.types import tree_map
from tests.environments import ScriptedDict


def same(a, b):
    tree_map(np.testing.assert_array_equal, a, b)


ENVS = {
    "vectors": partial(gym.make, "CartPole-v1"),
    "actions in a box, infos at each step": partial(gym.make, "HalfCheetah-v5", max_episode_steps=7),
    "numbers, masks in infos": partial(gym.make, "Taxi-v4", max_episode_steps=9),
    "nested observations": ScriptedDict,
}


@pytest.mark.parametrize("name", ENVS)
def test_sync_steps_equal_those_of_gymnasium(name):
    ours = TurnVectorEnv([ENVS[name]] * 3)
    theirs = SyncVectorEnv([ENVS[name]] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    (obs, info), (expected, _) = ours.reset(seed=3), theirs.reset(seed=3)
    same(obs, expected)
    ours.action_space.seed(4)
    ended = 0
    for _ in range(60):
        action = ours.action_space.sample()
        obs, reward, terminated, truncated, info = ours.step(action)
        expected = theirs.step(action)
        same((obs, reward, terminated, truncated), expected[:4])
        asked = {key: value for key, value in expected[4].items() if key.removeprefix("_") in ("final_obs", "final_info", *READ)}
        if "final_info" in asked:
            asked["final_info"] = {key: value for key, value in asked["final_info"].items() if key.removeprefix("_") in READ}
        assert info.keys() == asked.keys()
        for i in np.flatnonzero(terminated | truncated):
            ended += 1
            same(info["final_obs"][i], asked["final_obs"][i])
        for key in info.keys() - {"final_obs"}:
            same(info[key], asked[key])
    assert ended >= 2


def test_environments_built_by_functions_use_the_same_vector_environment():
    assert isinstance(make_vector_env(ENVS["vectors"], 2), TurnVectorEnv)
