"""Stable-Baselines3, or its contrib, with its defaults, which log and save nothing and print nothing."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import sb3_contrib
import stable_baselines3
from cases import Case
from clock import Clock, measure
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    policy = "CnnPolicy" if case.atari else "MlpPolicy"
    envs = make_envs(case)
    library = stable_baselines3 if hasattr(stable_baselines3, case.algorithm) else sb3_contrib
    model = getattr(library, case.algorithm)(policy, envs, seed=1, device=device, **case.settings)
    clock.follow_torch()
    clock.start()
    model.learn(case.steps)
    clock.stop()
    envs.close()
    return model.num_timesteps, case.updates


def make_envs(case: Case) -> VecEnv:
    """Environments in one process, as the library makes them unless told otherwise; games in a process each."""
    if case.atari:
        make = partial(make_game, case.env)
        envs = make_atari_env(make, case.num_envs, seed=1, vec_env_cls=SubprocVecEnv, env_kwargs={"frameskip": 1})
        return VecFrameStack(envs, 4)
    plain = make_vec_env(case.env, n_envs=case.num_envs, seed=1)
    return VecNormalize(plain, gamma=0.99) if case.normalize else plain


def make_game(env_id: str, **settings: Any) -> Any:
    """A game in a worker process, which knows only what it imports."""
    import gymnasium

    gymnasium.register_envs(importlib.import_module("ale_py"))
    return gymnasium.make(env_id, **settings)


if __name__ == "__main__":
    measure(train)
