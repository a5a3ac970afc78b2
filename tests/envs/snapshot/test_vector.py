"""Equal settings have the same fingerprint in every process, and different ones have not."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.snapshot.vector import fingerprint, normalize
from tests.environments import Scripted

ENVS = SyncVectorEnv([Scripted])
CONFIG = EnvConfig("CartPole-v1", kwargs={"a": 1, "b": {"c": (1, 2), "d": None}})


def of(config: EnvConfig) -> str:
    return fingerprint(ENVS, config)


@pytest.mark.parametrize(
    "same",
    [
        {"num_envs": 3},
        {"autoreset": "DISABLED"},
        {"kwargs": {"b": {"d": None, "c": [1, 2]}, "a": 1.0}},
        {"kwargs": {**CONFIG.kwargs, "render_mode": "human"}},
        {"vectorization": "async", "step_timeout": 3.0, "max_restarts": 1},
    ],
)
def test_equal_settings_and_those_of_vectorization_have_the_same_fingerprint(same):
    first = replace(CONFIG, vectorization=same.get("vectorization", "sync"))
    assert of(replace(CONFIG, **same)) == of(first)


@pytest.mark.parametrize(
    "other",
    [
        {"id": "CartPole-v0"},
        {"vectorization": "async"},
        {"kwargs": {"a": 1.5, "b": {"c": (1, 2), "d": None}}},
        {"kwargs": {**CONFIG.kwargs, "env": "maze"}},
        {"kwargs": {**CONFIG.kwargs, "num_envs": 2}},
        {"wrappers": ["NormalizeReward"]},
        {"max_episode_steps": 7},
        {"frame_stack": 2},
    ],
)
def test_every_other_setting_changes_the_fingerprint(other):
    assert of(replace(CONFIG, **other)) != of(CONFIG)


def test_fingerprints_contain_no_addresses_and_compare_numbers_of_any_type():
    assert normalize([object(), Scripted, lambda: 1]) == normalize([object(), Scripted, lambda: 1])
    assert " at 0x" not in repr(normalize({"a": object(), "b": [ENVS], "c": len}))
    assert normalize(np.float32(2.0)) != normalize(np.float32(3.0)) and normalize(float("inf")) == float("inf")
    assert repr(normalize({3, "b", 1})) == repr(normalize({1, 3, "b"})) and repr(normalize(float("nan"))) == "nan"
    assert normalize(np.zeros((2, 3))) != normalize(np.zeros((3, 2)))
    assert repr(normalize(True)) != repr(normalize(1))


def test_stepping_an_environment_does_not_change_its_fingerprint():
    def build() -> gym.Env:
        return gym.wrappers.NormalizeObservation(gym.make("Pendulum-v1", max_episode_steps=5))

    fresh, used = SyncVectorEnv([build]), SyncVectorEnv([build])
    used.reset(seed=3)
    for _ in range(12):
        used.step(np.zeros((1, 1), np.float32))
    assert fingerprint(fresh) == fingerprint(used)
