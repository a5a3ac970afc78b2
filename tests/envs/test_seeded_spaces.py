"""An environment that draws from its own spaces is reproducible: each copy's spaces are seeded with the copy."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import lightning_rl as lrl
from lightning_rl import PPO
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_env, make_vector_env
from lightning_rl.envs.stepping import make_stepper
from tests.envs.continuing import is_continued, leaves
from tests.fitting import fit


class Lottery(gym.Env):
    """Draws observations, and as rewards the numbers of a goal, each from a space of its own."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = Box(-1.0, 1.0, (2,)), Discrete(2)
        self.goal_space = Dict({"number": Discrete(1_000)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        reward = float(self.goal_space.sample()["number"])
        return self.observation_space.sample(), reward, self.t == 5, False, {}


class Drawing(gym.ActionWrapper):
    """Draws each action itself."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.action_space = Discrete(2)

    def action(self, action: Any) -> Any:
        return self.action_space.sample()


class Lots:
    """Agents whose observations are drawn from their spaces."""

    metadata: ClassVar[dict[str, Any]] = {}
    possible_agents = ("a", "b")

    def __init__(self) -> None:
        self.spaces = {agent: (Box(-1.0, 1.0, (2,)), Discrete(2)) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> gym.Space:
        return self.spaces[agent][0]

    def action_space(self, agent: str) -> gym.Space:
        return self.spaces[agent][1]

    def _observe(self) -> dict[str, Any]:
        return {agent: self.observation_space(agent).sample() for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t = list(self.possible_agents), 0
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        over = dict.fromkeys(self.possible_agents, self.t == 5)
        self.agents = [] if self.t == 5 else self.agents
        rewards = {agent: float(self.action_space(agent).sample()) for agent in self.possible_agents}
        return self._observe(), rewards, over, dict.fromkeys(over, False), {}

    def close(self) -> None:
        pass


gym.register("Lottery-v0", f"{__name__}:Lottery")
LOTTERY = EnvConfig("Lottery-v0", num_envs=2, wrappers=[Drawing])


def ready() -> SyncVectorEnv:
    return SyncVectorEnv([lambda: Drawing(Lottery())] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)


SOURCES = {
    "sync": lambda: LOTTERY,
    "sync-NEXT_STEP": lambda: EnvConfig("Lottery-v0", num_envs=2, autoreset="NEXT_STEP"),
    "sync-DISABLED": lambda: EnvConfig("Lottery-v0", num_envs=2, autoreset="DISABLED"),
    "async": lambda: EnvConfig("Lottery-v0", num_envs=2, vectorization="async"),
    "a function": lambda: lambda: Drawing(Lottery()),
    "ready copies": ready,
}


def rows(env: Any, seed: int, steps: int = 12) -> list[Any]:
    """What two copies return after a reset with a seed."""
    stepper = make_stepper(make_vector_env(env, 2), env if isinstance(env, EnvConfig) else None)
    with closing(stepper):
        seen = [np.array(stepper.reset(seed)[0])]
        for _ in range(steps):
            step = stepper.step(np.zeros(2, np.int64))
            seen += [np.array(step.obs), np.array(step.reward)]
    return seen


@pytest.mark.parametrize("name", SOURCES)
def test_copies_that_draw_from_their_spaces_repeat_with_their_seed_and_differ_from_each_other(name):
    first, again, other = (rows(SOURCES[name](), seed) for seed in (3, 3, 4))
    assert all(map(np.array_equal, first, again)) and not all(map(np.array_equal, first, other))
    assert all((obs[0] != obs[1]).any() for obs in first[:2])
    assert np.array_equal(first[0][1], other[0][0])  # copy 1 of seed 3 is copy 0 of seed 4


def test_workers_draw_what_copies_in_this_process_draw():
    assert all(map(np.array_equal, rows(SOURCES["async"](), 3), rows(EnvConfig("Lottery-v0", num_envs=2), 3)))


def test_agents_that_draw_from_their_spaces_repeat_with_their_seed():
    def play(seed: int) -> list[Any]:
        env = make_env(Lots)
        seen = [env.reset(seed=seed)[0], *(env.step({"a": 0, "b": 0})[:2] for _ in range(4))]
        return [np.asarray(leaf) for leaf in leaves(seen)]

    first, again, other = (play(seed) for seed in (3, 3, 4))
    assert all(map(np.array_equal, first, again)) and not all(map(np.array_equal, first, other))


CARTPOLES = EnvConfig("CartPole-v1", num_envs=8), EnvConfig("CartPole-v1", num_envs=2, vectorization="async")


@pytest.mark.parametrize("env", [*CARTPOLES, LOTTERY])
def test_the_saved_states_of_two_runs_of_one_seed_are_equal(env):
    states = []
    for _ in range(2):
        with closing(make_stepper(make_vector_env(env), env)) as stepper:
            stepper.reset(3)
            stepper.step(np.zeros(env.num_envs, np.int64))
            states.append(stepper.state_dict())
    assert repr(states[0]) == repr(states[1])


@pytest.mark.thorough
def test_an_evaluation_repeats_and_a_run_that_draws_from_its_spaces_resumes_exactly():
    algorithm = PPO(env=LOTTERY, n_steps=4, batch_size=8, max_env_steps=16)
    fit(algorithm)
    assert lrl.evaluate(algorithm, episodes=3) == lrl.evaluate(algorithm, episodes=3)
    assert is_continued(partial(make_vector_env, LOTTERY), LOTTERY, 7) is None
