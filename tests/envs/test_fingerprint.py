"""What means the same looks the same, in every process, and what means something else does not."""

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
def test_settings_that_are_not_of_one_environment_or_only_look_different_do_not_count(same):
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
def test_every_other_setting_counts(other):
    assert of(replace(CONFIG, **other)) != of(CONFIG)


def test_objects_show_no_address_and_numbers_may_be_of_any_type():
    assert normalize([object(), Scripted, lambda: 1]) == normalize([object(), Scripted, lambda: 1])
    assert " at 0x" not in repr(normalize({"a": object(), "b": [ENVS], "c": len}))
    assert normalize(np.float32(2.0)) != normalize(np.float32(3.0)) and normalize(float("inf")) == float("inf")
    assert repr(normalize({3, "b", 1})) == repr(normalize({1, 3, "b"})) and repr(normalize(float("nan"))) == "nan"
    assert normalize(np.zeros((2, 3))) != normalize(np.zeros((3, 2)))
    assert repr(normalize(True)) != repr(normalize(1))


def test_what_happened_to_an_environment_does_not_count():
    def build() -> gym.Env:
        return gym.wrappers.NormalizeObservation(gym.make("Pendulum-v1", max_episode_steps=5))

    fresh, used = SyncVectorEnv([build]), SyncVectorEnv([build])
    used.reset(seed=3)
    for _ in range(12):
        used.step(np.zeros((1, 1), np.float32))
    assert fingerprint(fresh) == fingerprint(used)
