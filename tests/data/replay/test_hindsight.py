"""Which goals take the place of others in drawn rows, and what rows pay and end for them."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.data.replay.hindsight import GoalReward, RelabelConfig, make_goal_reward
from lightning_rl.data.replay.segments import SegmentStore
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import probe_spaces
from lightning_rl.errors import SettingError
from lightning_rl.types import EnvStep
from tests.data.recordings import LAYOUTS
from tests.environments import Goals

STRATEGIES = ("future", "final", "episode")
NOWHERE = -5.0
"""The goal of every row as it is stored, which nothing reaches; such rows pay -7."""


def equal(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return (achieved == desired).all(-1)


def pay(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return np.where(equal(achieved, desired), 0.0, -1.0)


PAYS, ENDS = GoalReward(pay), GoalReward(pay, equal)
"""An environment without `compute_terminated`, and one with it."""


def seen(place: float, goal: float = NOWHERE) -> dict[str, np.ndarray]:
    return {name: np.float32([goal if name == "desired_goal" else place]) for name in Goals.observation_space}


def episode(number: int, length: int, terminated: bool = False, goal: float = NOWHERE) -> list[dict[str, Any]]:
    """Steps that lead from 100 · number to 100 · number + length."""
    return [
        {
            "obs": seen(100 * number + t, goal),
            "action": 0,
            "reward": -7.0,
            "next_obs": seen(100 * number + t + 1, goal),
            "terminated": terminated and t + 1 == length,
            "truncated": not terminated and t + 1 == length,
        }
        for t in range(length)
    ]


def buffer_of(*episodes: list[Any], goal_reward: GoalReward = PAYS, capacity: int = 100, n_steps: int = 1, **config: Any) -> ReplayBuffer:
    relabel = {"k": 10_000} | config.pop("relabel", {})  # all but every ten-thousandth
    settings: dict[str, Any] = {"n_steps": n_steps, "goal_reward": goal_reward}
    buffer = ReplayBuffer(Goals.observation_space, np.int64(0), capacity, config=ReplayConfig(relabel=relabel, **config), **settings)
    for each in episodes:
        buffer.extend(each, lambda action: action)
    return buffer


def drawn(buffer: ReplayBuffer, size: int = 2_000) -> dict[int, set[int]]:
    """The goals that rows were given, by where they began."""
    window = buffer.sample(size)
    goals: dict[int, set[int]] = {}
    for place, goal, following in zip(window.obs["observation"], window.obs["desired_goal"], window.next_obs["desired_goal"], strict=True):
        assert goal == following
        if goal != NOWHERE:
            goals.setdefault(int(place[0]), set()).add(int(goal[0]))
    return goals


@pytest.mark.parametrize("thrifty", LAYOUTS)
def test_goals_are_reached_in_the_same_episode_by_the_row_or_later_or_last_or_at_any_time(thrifty):
    goals = {}
    for strategy in STRATEGIES:
        buffer = buffer_of(episode(1, 3), episode(2, 1), episode(3, 2), relabel={"strategy": strategy}, optimize_memory_usage=thrifty)
        goals[strategy] = drawn(buffer)
    first = {100: {101, 102, 103}, 101: {102, 103}, 102: {103}}
    assert goals["future"] == first | {200: {201}, 300: {301, 302}, 301: {302}}
    assert goals["final"] == {100: {103}, 101: {103}, 102: {103}, 200: {201}, 300: {302}, 301: {302}}
    whole, pair = {101, 102, 103}, {301, 302}
    assert goals["episode"] == {100: whole, 101: whole, 102: whole, 200: {201}, 300: pair, 301: pair}


def test_all_goals_of_a_strategy_are_equally_likely():
    window = buffer_of(episode(1, 4)).sample(40_000)
    first = window.obs["desired_goal"][window.obs["observation"] == 100]
    assert np.bincount(first[first != NOWHERE].astype(int))[101:] / len(first) == pytest.approx([0.25] * 4, abs=0.02)


@pytest.mark.parametrize(("k", "share"), [(1, 0.5), (4, 0.8), (9, 0.9)])
def test_k_of_k_plus_one_rows_get_another_goal(k, share):
    window = buffer_of(episode(1, 50), relabel={"k": k}).sample(20_000)
    assert (window.obs["desired_goal"] != NOWHERE).mean() == pytest.approx(share, abs=0.015)


def test_a_relabelled_row_pays_what_compute_reward_says_and_others_what_they_paid():
    window = buffer_of(episode(1, 5), relabel={"k": 2}).sample(3_000)
    goal, reached, reward = window.obs["desired_goal"][:, 0], window.next_obs["achieved_goal"][:, 0], window.reward[:, 0]
    own = goal == NOWHERE
    assert set(reward[own]) == {-7.0} and set(reward[~own]) == {0.0, -1.0}
    assert np.array_equal(reward[~own] == 0, (goal == reached)[~own])
    assert window.reward.dtype == np.float32


def test_the_stored_rows_keep_their_goals():
    buffer = buffer_of(episode(1, 5))
    before = buffer.layout.records.copy()
    buffer.sample(500)
    assert np.array_equal(buffer.layout.records, before)


def test_a_row_terminates_where_it_did_unless_the_environment_says_where_other_goals_end():
    reached = episode(1, 3, terminated=True, goal=103)  # because of its goal
    fell = episode(2, 3, terminated=True)  # for another reason
    window = buffer_of(reached, fell, relabel={"strategy": "episode"}).sample(3_000)
    last = np.isin(window.obs["observation"][:, 0], [102, 202])
    assert np.array_equal(window.steps == 0, last)
    window = buffer_of(reached, fell, goal_reward=ENDS, relabel={"strategy": "episode"}).sample(3_000)
    place, goal = window.obs["observation"][:, 0], window.obs["desired_goal"][:, 0]
    relabelled = goal != NOWHERE
    expected = (window.next_obs["achieved_goal"][:, 0] == goal) | (place == 202)
    assert np.array_equal((window.steps == 0)[relabelled], expected[relabelled])
    assert {int(each) for each in goal[(place == 102) & (window.steps == 1)]} == {101, 102}  # it goes on after the goal it had


def test_a_window_pays_for_one_goal_up_to_where_it_ends():
    for goal_reward, after in ((PAYS, -1.0), (ENDS, 0.0)):
        window = buffer_of(episode(1, 5), goal_reward=goal_reward, n_steps=3).sample(3_000)
        for place, goal, reward, steps, following in zip(
            window.obs["observation"][:, 0],
            window.obs["desired_goal"][:, 0],
            window.reward.tolist(),
            window.steps,
            window.next_obs["achieved_goal"][:, 0],
            strict=True,
        ):
            if goal == NOWHERE:
                continue
            length = int(min(3, 105 - place))
            away = int(goal - place)  # the goal is reached by this step of the window, counted from 1
            expected = [-1.0] * length + [0.0] * (3 - length)
            if away <= length:
                expected[away - 1] = 0.0
                expected[away:length] = [after] * (length - away)
            assert reward == expected and following == place + length
            assert steps == (0 if goal_reward is ENDS and away <= length else length)


class Diary:
    """What a buffer of several environments was told, in lists: places reached in each episode, of rows that are still there."""

    def __init__(self, num_envs: int, length: int) -> None:
        self.length = length
        self.rows: list[list[tuple[int, int]]] = [[] for _ in range(num_envs)]

    def note(self, env: int, episode: int, place: int) -> None:
        self.rows[env] = [*self.rows[env], (episode, place)][-self.length :]

    def goals(self, strategy: str) -> dict[int, set[int]]:
        found = {}
        for rows in self.rows:
            for number, place in rows:
                places = [each for other, each in rows if other == number]
                some = {"future": [each for each in places if each >= place], "final": places[-1:], "episode": places}[strategy]
                found[place - 1] = set(some)
        return found


@pytest.mark.variants
@pytest.mark.parametrize("thrifty", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goals_come_only_from_rows_of_the_episode_that_are_there_whatever_is_overwritten_cut_or_restored(strategy, thrifty):
    rng = np.random.default_rng(3)
    num_envs, length = 3, 7
    settings = {"num_envs": num_envs, "goal_reward": PAYS}
    config = ReplayConfig(relabel=RelabelConfig(strategy, 10_000), optimize_memory_usage=thrifty)
    buffer = ReplayBuffer(Goals.observation_space, np.int64(0), num_envs * length, config=config, **settings)
    diary, number, place = Diary(num_envs, length), np.arange(num_envs), 1_000 * np.arange(num_envs)
    for t in range(120):
        valid = rng.random(num_envs) < 0.95
        ended = (rng.random(num_envs) < 0.15) & valid
        obs = {name: np.float32(place[:, None]) for name in Goals.observation_space} | {"desired_goal": np.full((num_envs, 1), NOWHERE)}
        step_obs = obs | {name: np.float32(place[:, None] + 1) for name in ("observation", "achieved_goal")}
        final = {name: leaf[ended] for name, leaf in step_obs.items()} if ended.any() else None
        none = np.zeros(num_envs, bool)
        step = EnvStep(step_obs, np.full(num_envs, -7.0), none, ended, valid, ended, np.flatnonzero(ended), final, {})
        buffer.add(obs, np.zeros(num_envs, np.int64), step)
        for env in np.flatnonzero(valid):
            diary.note(env, number[env], place[env] + 1)
        place += 1
        number[ended | ~valid] += num_envs
        place[ended | ~valid] += 10
        if t % 17 == 16:
            buffer.cut()
            number += num_envs
        if t % 29 == 28:
            restored = ReplayBuffer(Goals.observation_space, np.int64(0), num_envs * length, config=config, **settings)
            restore(buffer, restored)
            assert np.array_equal(copy.deepcopy(buffer).sample(64).obs["desired_goal"], restored.sample(64).obs["desired_goal"])
        if t % 3 == 0 and t > 10:
            assert drawn(buffer, 1_500) == diary.goals(strategy)


def restore(buffer: ReplayBuffer, other: ReplayBuffer) -> None:
    """Give another buffer all rows and the position of one."""
    other.continue_from(copy.deepcopy(buffer.position()))
    numbers = [np.arange(max(0, written - buffer.slots + buffer.layout.ahead), written) for written in buffer.written]
    rows = np.concatenate([first + each % buffer.slots for first, each in zip(buffer.first, numbers, strict=True)])
    after = buffer.first + buffer.written % buffer.slots
    other.layout.restore(rows, after, buffer.layout.parts(rows, after))


def test_a_saved_buffer_draws_the_same_goals(tmp_path):
    def made() -> ReplayBuffer:
        return buffer_of(capacity=12, relabel={"k": 1}, prioritized=True)

    buffer, other = made(), made()
    for each in (episode(1, 5), episode(2, 4), episode(3, 6)):
        buffer.extend(each, lambda action: action)
        buffer.sample(8)
    store = SegmentStore(tmp_path / "last.ckpt.d" / "rank0")
    manifest = store.save(buffer)
    SegmentStore(tmp_path / "last.ckpt.d" / "rank0").load(manifest, other)
    for _ in range(5):
        mine, theirs = buffer.sample(32), other.sample(32)
        assert np.array_equal(mine.rows, theirs.rows) and np.array_equal(mine.obs["desired_goal"], theirs.obs["desired_goal"])


def test_demonstrations_get_goals_of_their_own_episodes_too():
    demonstrations = buffer_of(episode(7, 3))
    settings = {"demonstrations": demonstrations, "share": 0.5, "goal_reward": PAYS}
    config = ReplayConfig(relabel=RelabelConfig(k=10_000))
    buffer = ReplayBuffer(Goals.observation_space, np.int64(0), 20, config=config, **settings)
    buffer.extend(episode(1, 2), lambda action: action)
    later = {700: {701, 702, 703}, 701: {702, 703}, 702: {703}}
    assert drawn(buffer) == {100: {101, 102}, 101: {102}} | later


# ---------------------------------------------------------------- the environment


def spaces_of(env: Any) -> Any:
    return probe_spaces(env)


@pytest.mark.parametrize("settings", [{}, {"vectorization": "async"}, {"autoreset": "NEXT_STEP"}])
def test_the_reward_function_of_an_environment_is_found_wherever_it_steps(settings):
    env = EnvConfig("tests.environments:Goals-v0", num_envs=2, **settings)
    found = make_goal_reward(env, spaces_of(env))
    assert found.reward(np.float32([[3], [4]]), np.float32([[3], [3]])).tolist() == [0, -1] and found.terminated is None
    ready = SyncVectorEnv([Goals, Goals])
    assert make_goal_reward(ready, spaces_of(ready)).reward(np.ones((1, 1)), np.ones((1, 1))).tolist() == [0]
    assert make_goal_reward(Goals, spaces_of(Goals)).reward(np.ones((1, 1)), np.ones((1, 1))).tolist() == [0]


class OneByOne(Goals):
    """Compares goals as a whole, which is right for one row alone; without termination of its own until asked."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> float:
        return 0.0 if np.linalg.norm(achieved_goal - desired_goal) < 0.5 else -1.0

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> bool:
        return bool(np.linalg.norm(achieved_goal - desired_goal) < 0.5)


def test_functions_of_one_row_are_called_for_each_row():
    found = make_goal_reward(OneByOne, spaces_of(OneByOne))
    assert found.reward(np.float32([[3], [4]]), np.float32([[3], [3]])).tolist() == [0, -1]
    assert found.terminated is not None
    assert found.terminated(np.float32([[3], [4]]), np.float32([[3], [3]])).tolist() == [True, False]


class Squeezes(Goals):
    """Ends at its goal; drops dimensions of length 1, and needs a row."""

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        reached = np.stack([np.all(a == b) for a, b in zip(np.atleast_2d(achieved_goal), np.atleast_2d(desired_goal), strict=True)])
        return reached.squeeze()


def test_terminations_are_computed_for_one_row_and_not_for_none():
    found = make_goal_reward(Squeezes, spaces_of(Squeezes))
    window = buffer_of(episode(1, 2), goal_reward=found).sample(1)
    assert window.steps[0] == (window.next_obs["achieved_goal"] != window.obs["desired_goal"])
    ended = buffer_of(episode(1, 1, terminated=True), goal_reward=found).sample(1)
    assert ended.steps.tolist() == [0] and ended.reward.tolist() == [[0]]


class NoReward(gym.Env):
    observation_space = Goals.observation_space
    action_space = Goals.action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return seen(0), {}

    def step(self, action: Any) -> Any:
        return seen(0), 0.0, False, False, {}


class ReadsInfo(NoReward):
    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> float:
        return float(info["far"])


class EndsByInfo(Goals):
    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> bool:
        return bool(info["near"])


class OtherShapes(NoReward):
    observation_space = Dict({"achieved_goal": Box(0, 1, (2,)), "desired_goal": Box(0, 1, (3,))})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"achieved_goal": np.zeros(2, np.float32), "desired_goal": np.zeros(3, np.float32)}, {}


def doubled() -> gym.Env:
    return gym.wrappers.TransformReward(Goals(), lambda reward: 2 * reward)


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("gymnasium_robotics") is None, reason="needs the extra robotics")
def test_goals_of_gymnasium_robotics_are_found_by_their_ids(capfd):
    env = EnvConfig("PointMaze_UMaze-v3", kwargs={"continuing_task": False})
    found = make_goal_reward(env, spaces_of(env))
    achieved, desired = np.float32([[0, 0], [1, 1], [2, 2]]), np.float32([[0, 0.4], [1, 1.5], [2, 2]])  # 0.45 is near
    assert found.reward(achieved, desired).tolist() == [1, 0, 1]
    assert found.terminated is not None and found.terminated(achieved, desired).tolist() == [True, False, True]
    assert capfd.readouterr().err == ""


GOALS = "tests.environments:Goals-v0"
REFUSED = [
    ("CartPole-v1", "replay.relabel needs observations with achieved_goal and desired_goal of one shape, got"),
    (OtherShapes, "replay.relabel needs observations with achieved_goal and desired_goal of one shape, got"),
    (NoReward, "replay.relabel needs an environment with compute_reward, but NoReward has none"),
    (ReadsInfo, "replay.relabel: compute_reward of ReadsInfo fails with an empty info (KeyError: 'far')"),
    (EndsByInfo, "replay.relabel: compute_terminated of EndsByInfo fails with an empty info (KeyError: 'near')"),
    (doubled, "replay.relabel: a step of Goals gives -2 but compute_reward returns -1"),
    (EnvConfig(GOALS, frame_stack=2), "replay.relabel cannot be combined with env.frame_stack"),
    (EnvConfig(GOALS, parameters={"goal": 2.0}), "replay.relabel cannot be combined with env.parameters"),
]


@pytest.mark.parametrize(("env", "words"), REFUSED)
def test_an_environment_whose_goals_cannot_be_replaced_is_refused_in_one_line(env, words):
    env = EnvConfig(env) if isinstance(env, str) else env
    with pytest.raises(SettingError) as error:
        make_goal_reward(env, spaces_of(env))
    assert str(error.value).startswith(words) and "\n" not in str(error.value)


def test_ready_environments_in_processes_are_refused():
    envs = AsyncVectorEnv([Goals, Goals])
    try:
        with pytest.raises(SettingError, match="cannot call compute_reward in a AsyncVectorEnv; pass an id"):
            make_goal_reward(envs, spaces_of(envs))
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"k": 0}, "replay.relabel.k must be >= 1, got 0"),
        ({"k": 1.5}, "replay.relabel.k must be an integer >= 1, got 1.5"),
        ({"strategy": "futur"}, "replay.relabel.strategy must be one of future, final, episode, got 'futur'; did you mean future?"),
        ({"n": 4}, "replay.relabel.n is not a setting; choose from k, strategy"),
        (4, "replay.relabel must be RelabelConfig(…) or a mapping of its settings, got 4"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(setting, words):
    with pytest.raises(SettingError) as error:
        ReplayConfig(relabel=setting)
    assert words in str(error.value)
