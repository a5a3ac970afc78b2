"""All ways to step environments give the same transitions."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from lightning_rl.data.episodes import EpisodeStatistics
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_vector_env
from lightning_rl.envs.stepping import Stepper, make_stepper
from lightning_rl.errors import SettingError
from lightning_rl.types import Tree, tree_index, tree_leaves, tree_map
from tests.environments import ENDINGS, Scripted

NUM_ENVS = 4
STEPS = 60
"""Steps of each environment."""

ENVIRONMENTS = {
    "CartPole": EnvConfig("CartPole-v1"),
    "Pendulum": EnvConfig("Pendulum-v1", max_episode_steps=20),
    "MountainCar": EnvConfig("MountainCar-v0", max_episode_steps=7),
    "Scripted": EnvConfig("tests.environments:Scripted-v0"),
    "ScriptedDict": EnvConfig("tests.environments:ScriptedDict-v0", kwargs={"period": 1}),
}
WAYS = [(vectorization, mode) for vectorization in ("sync", "async") for mode in ("SAME_STEP", "NEXT_STEP", "DISABLED")]


class Transition(NamedTuple):
    """One row of experience of one environment, all leaves copied."""

    obs: Tree
    action: Any
    reward: float
    next_obs: Tree
    terminated: bool
    truncated: bool


def scripted_actions(stepper: Stepper, steps: int) -> np.ndarray:
    """`[steps, N, ...]`, the same whatever steps them."""
    space = stepper.envs.single_action_space
    space.seed(1)
    return np.array([[space.sample() for _ in range(stepper.num_envs)] for _ in range(steps)])


def transitions(stepper: Stepper, steps: int, statistics: EpisodeStatistics | None = None) -> list[list[Transition]]:
    """The first `steps` valid transitions of each environment. The k-th of an environment takes its k-th scripted action."""
    actions = scripted_actions(stepper, steps + 1)
    rows: list[list[Transition]] = [[] for _ in range(stepper.num_envs)]
    obs, start = tree_map(np.copy, stepper.reset(seed=3)[0]), np.ones(stepper.num_envs, dtype=bool)
    while min(map(len, rows)) < steps:
        action = np.stack([actions[min(len(row), steps), i] for i, row in enumerate(rows)])
        step = stepper.step(action)
        if statistics is not None:
            statistics.update(step)
        following = tree_map(np.copy, step.obs)
        successor = tree_map(np.copy, following)
        if step.final_obs is not None:
            tree_map(lambda leaf, final, ended=step.ended: leaf.__setitem__(ended, final), successor, step.final_obs)
        assert sorted(step.ended) == list(np.flatnonzero(step.terminated | step.truncated))
        assert not (step.terminated & step.truncated).any() and not start[~step.valid].any()
        for i in np.flatnonzero(step.valid):
            before, after = tree_index(obs, i), tree_index(successor, i)
            rows[i].append(Transition(before, action[i], step.reward[i], after, bool(step.terminated[i]), bool(step.truncated[i])))
        obs, start = following, step.episode_start
    return [row[:steps] for row in rows]


def story(config: EnvConfig, vectorization: str, mode: str, steps: int = STEPS) -> list[list[Transition]]:
    arguments = vars(config) | {"num_envs": NUM_ENVS, "vectorization": vectorization, "autoreset": mode}
    stepper = make_stepper(make_vector_env(EnvConfig(**arguments)))
    try:
        return transitions(stepper, steps)
    finally:
        stepper.close()


def same(a: list[list[Transition]], b: list[list[Transition]]) -> bool:
    leaves = ([leaf for rows in each for row in rows for leaf in tree_leaves(row)] for each in (a, b))
    return all(np.array_equal(x, y) for x, y in zip(*leaves, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_all_autoreset_modes_give_the_same_transitions_with_sync_and_async(name):
    first, *others = (story(ENVIRONMENTS[name], *way) for way in WAYS)
    assert [len(rows) for rows in first] == [STEPS] * NUM_ENVS
    assert any(row.terminated or row.truncated for rows in first for row in rows)
    for way, other in zip(WAYS[1:], others, strict=True):
        assert same(first, other), f"{way} differs from {WAYS[0]}"


@pytest.mark.parametrize("vectorization, mode", WAYS)
@pytest.mark.parametrize("period", [1, 3])
def test_each_transition_is_what_the_script_says(vectorization, mode, period):
    config = EnvConfig("tests.environments:Scripted-v0", kwargs={"period": period})
    for rows in story(config, vectorization, mode, steps=12):
        for k, row in enumerate(rows):
            episode, t = divmod(k, period)
            ending = ENDINGS[episode % 3] if t == period - 1 else None
            assert row.obs.tolist() == [episode, t] and row.next_obs.tolist() == [episode, t + 1]
            assert row.reward == pytest.approx(10 * episode + t + row.action / 10)
            assert (row.terminated, row.truncated) == (ending in ("termination", "both"), ending == "truncation")


@pytest.mark.thorough
def test_nested_final_observations_keep_their_tree_and_types():
    config = EnvConfig("tests.environments:ScriptedDict-v0", kwargs={"period": 3})
    for way in WAYS:
        for rows in story(config, *way, steps=6):
            final = rows[5].next_obs
            assert final.keys() == {"where", "image"} and final["where"].keys() == {"episode", "t"}
            assert (final["where"]["episode"], final["where"]["t"]) == (1, 3)
            assert final["image"].dtype == np.uint8 and (final["image"] == 13).all()


def cartpole_moves(row: Transition) -> bool:
    """x' = x + 0.02 ẋ, and the episode goes on while |x| <= 2.4 and |θ| <= 12°; EnvPool calls a fall in the last step a truncation."""
    inside = abs(row.next_obs[0]) <= 2.4 and abs(row.next_obs[2]) <= 12 * np.pi / 180
    return abs(row.next_obs[0] - row.obs[0] - 0.02 * row.obs[1]) < 1e-5 and (row.truncated or row.terminated != inside)


def pendulum_moves(row: Transition) -> bool:
    """θ' = θ + 0.05 θ̇', without end."""
    turn = np.arctan2(row.next_obs[1], row.next_obs[0]) - np.arctan2(row.obs[1], row.obs[0]) - 0.05 * row.next_obs[2]
    return abs((turn + np.pi) % (2 * np.pi) - np.pi) < 1e-4 and not row.terminated


@pytest.mark.parametrize(
    "config, moves",
    [
        (EnvConfig("CartPole-v1", 3, "native", max_episode_steps=30), cartpole_moves),
        (EnvConfig("CartPole-v1", 3, "envpool", kwargs={"max_episode_steps": 30}), cartpole_moves),
        (EnvConfig("Pendulum-v1", 3, "envpool", max_episode_steps=20), pendulum_moves),
    ],
    ids=["native CartPole", "EnvPool CartPole", "EnvPool Pendulum"],
)
def test_native_and_envpool_give_true_transitions_and_no_reset_rows(config, moves):
    stepper = make_stepper(make_vector_env(config), config)
    statistics = EpisodeStatistics(stepper.num_envs)
    rows = transitions(stepper, 200, statistics)
    stepper.close()
    limit = config.max_episode_steps or config.kwargs["max_episode_steps"]
    lengths, returns = [], []
    for each in rows:
        length, total = 0, 0.0
        for k, row in enumerate(each):
            assert moves(row)  # a reset row would jump, and so would a final observation that is the next episode's first
            length, total = length + 1, total + row.reward
            assert row.truncated == (length == limit and not row.terminated)
            if row.terminated or row.truncated:
                lengths.append(length)
                returns.append(total)
                length, total = 0, 0.0
            elif k + 1 < len(each):
                assert np.array_equal(row.next_obs, each[k + 1].obs)
    assert len(lengths) >= 10
    # the statistics ran a few steps longer, as some environments had more resets to sit out
    assert sum(lengths) <= sum(statistics.lengths) and set(lengths) <= set(statistics.lengths)
    assert max(statistics.lengths) <= limit
    for length, total in zip(lengths, returns, strict=True):
        pairs = zip(statistics.lengths, statistics.returns, strict=True)
        assert any(length == other and total == pytest.approx(value, abs=1e-3) for other, value in pairs)


@pytest.mark.parametrize("vectorization", ["sync", "async", "native", "envpool"])
def test_the_seed_decides_how_episodes_start(vectorization):
    stepper = make_stepper(make_vector_env(EnvConfig("CartPole-v1", 2, vectorization)))
    first, again, other = (np.copy(stepper.reset(seed)[0]) for seed in (5, 5, 6))
    stepper.close()
    assert np.array_equal(first, again) and not np.isclose(first, other).any()
    assert not np.isclose(first[0], first[1]).any()


class Untagged(SyncVectorEnv):
    """Resets in the same step, and does not say so."""

    def __init__(self) -> None:
        super().__init__([Scripted] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        del self.metadata["autoreset_mode"]


def test_a_vector_environment_that_does_not_name_its_mode_is_rejected():
    with pytest.raises(SettingError, match=r"^Untagged .* no autoreset_mode; .* or set env\.autoreset$"):
        make_stepper(Untagged())


def test_the_settings_name_the_mode_of_a_vector_environment_that_does_not():
    stepper = make_stepper(Untagged(), EnvConfig("Scripted-v0", autoreset="SAME_STEP"))
    assert stepper.mode is AutoresetMode.SAME_STEP
    assert all(row.next_obs.tolist() == [k // 3, k % 3 + 1] for rows in transitions(stepper, 9) for k, row in enumerate(rows))


def test_the_mode_that_a_vector_environment_names_wins_over_the_settings():
    envs = SyncVectorEnv([Scripted], autoreset_mode=AutoresetMode.NEXT_STEP)
    assert make_stepper(envs, EnvConfig("Scripted-v0", autoreset="SAME_STEP")).mode is AutoresetMode.NEXT_STEP


class Dense(SyncVectorEnv):
    """As ALE's own vector environment does it: `final_obs` is one array, and there is no `final_info`."""

    def step(self, actions):
        *rest, info = super().step(actions)
        if "final_obs" in info:
            info = {"final_obs": np.stack([np.zeros(2, np.float32) if each is None else each for each in info["final_obs"]])}
        return *rest, info


@pytest.mark.parametrize("cls", [Dense, SyncVectorEnv])
def test_final_observations_may_come_as_one_array_or_as_an_array_of_objects(cls):
    stepper = make_stepper(cls([Scripted, lambda: Scripted(period=2)], autoreset_mode=AutoresetMode.SAME_STEP))
    first, second = transitions(stepper, 6)
    assert [row.next_obs.tolist() for row in first] == [[0, 1], [0, 2], [0, 3], [1, 1], [1, 2], [1, 3]]
    assert [row.next_obs.tolist() for row in second] == [[0, 1], [0, 2], [1, 1], [1, 2], [2, 1], [2, 2]]


class Reusing(gym.Env):
    """Returns its own array, which its next reset writes into."""

    observation_space, action_space = Box(-10, 10, (1,), np.float32), Discrete(2)

    def __init__(self):
        self.state = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state[:] = 0
        return self.state, {}

    def step(self, action):
        self.state += 1
        return self.state, 1.0, False, self.state[0] >= 3, {}


gym.register("Reusing-v0", Reusing)


@pytest.mark.parametrize(("vectorization", "mode"), WAYS)
def test_the_last_observation_of_an_episode_is_not_what_the_next_reset_writes_into_the_same_array(vectorization, mode):
    config = EnvConfig("Reusing-v0", 1, vectorization, mode)
    stepper = make_stepper(make_vector_env(config), config)
    stepper.reset(0)
    assert [stepper.step(np.zeros(1, int)).final_obs for _ in range(3)][-1].tolist() == [[3.0]]
    stepper.close()


class Flagged(VectorEnv):
    """Resets one step late, and says by numbers how episodes end; each has 3 steps."""

    def __init__(self, kind):
        self.kind, self.num_envs, self.metadata = kind, 1, {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = Box(0, 99, (1,)), Discrete(2)
        self.observation_space, self.action_space = batch_space(self.single_observation_space), batch_space(self.single_action_space)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros((1, 1), np.float32), {}

    def step(self, actions):
        self.t = (self.t + 1) % 4
        return np.full((1, 1), self.t, np.float32), np.ones(1), np.array([self.t == 3], self.kind), np.zeros(1, self.kind), {}


@pytest.mark.parametrize("kind", [bool, np.uint8, np.int64, np.float32])
def test_flags_may_be_numbers(kind):
    stepper = make_stepper(Flagged(kind))
    stepper.reset(0)
    steps = [stepper.step(np.zeros(1, int)) for _ in range(8)]
    assert [bool(step.valid[0]) for step in steps] == [True, True, True, False] * 2
    assert [bool(step.terminated[0]) for step in steps] == [False, False, True, False] * 2
