"""One team of a scene learns, and an opponent acts for the others."""

import numpy as np
import pytest

from tests.unity.scenes import agent, ended

TEAMS = ["Push/0/*", "Push/1/*"]


class Recorded:
    """An opponent that plays ones, and keeps what it is told."""

    def __init__(self):
        self.begun, self.finished, self.acted = [], [], []

    def reset(self, seed):
        pass

    def begin(self, copies, seats):
        self.begun.append((copies.tolist(), seats.tolist()))

    def finish(self, copies, results):
        self.finished += zip(copies.tolist(), results.tolist(), strict=True)

    def act(self, obs, mask, rows, start):
        self.acted.append((obs.ravel().tolist(), rows.tolist(), start.tolist()))
        return np.ones((len(rows), 1), dtype=np.float32)


def both(first, second):
    return {"Push?team=0": first, "Push?team=1": second}


@pytest.fixture
def play(opened):
    def open_(*messages, swap_steps=1_000, team_change=1_000, **settings):
        stepper = opened(*messages, teams=TEAMS, **settings)
        stepper.opponent, stepper.swap_steps, stepper.team_change = Recorded(), swap_steps, team_change
        return stepper

    return open_


def step(stepper):
    return stepper.step(np.zeros((stepper.num_envs, 1), dtype=np.float32))


def test_one_team_learns_and_the_opponent_acts_for_the_other(play):
    stepper = play(both([agent(0, 1)], [agent(1, 2)]), both([agent(0, 3, reward=0.5)], [agent(1, 4, reward=-7.0)]))
    assert stepper.num_envs == 1
    assert stepper.reset(seed=0)[0].tolist() == [[1]]
    made = step(stepper)
    assert (made.obs.tolist(), made.reward.tolist(), made.valid.tolist()) == ([[3]], [0.5], [True])
    assert stepper.opponent.acted == [([2.0], [1], [True])]
    step(stepper)
    assert stepper.opponent.acted[1] == ([4.0], [1], [False])
    assert stepper.opponent.begun == [([0], [0])]


@pytest.mark.thorough
def test_the_last_reward_of_an_episode_tells_who_won(play):
    def game(reward):
        return both([ended(0, 3, reward), agent(0, 1)], [ended(1, 4, -reward), agent(1, 2)])

    stepper = play(both([agent(0, 1)], [agent(1, 2)]), game(2.0), game(-0.5), game(0.0))
    stepper.reset(seed=0)
    assert step(stepper).ended.tolist() == [0]
    for _ in range(2):
        step(stepper)
    assert stepper.opponent.finished == [(0, 1.0), (0, 0.0), (0, 0.5)]


@pytest.mark.thorough
def test_a_group_has_won_when_its_last_member_has_ended(play):
    def member(agent_id, seen, **more):
        return agent(agent_id, seen, group=1 + agent_id // 2, **more)

    def last(agent_id, reward):
        return member(agent_id, 9, done=True, group_reward=reward)

    everybody = both([member(0, 1), member(1, 2)], [member(2, 3), member(3, 4)])
    stepper = play(
        everybody,
        both([last(0, 0.0), member(1, 5)], [member(2, 6), member(3, 7)]),
        both([last(1, 1.0), *everybody["Push?team=0"]], [last(2, -1.0), last(3, -1.0), *everybody["Push?team=1"]]),
        by_group=True,
    )
    assert stepper.group_size == 2
    stepper.reset(seed=0)
    step(stepper)
    assert stepper.opponent.finished == []
    step(stepper)
    assert stepper.opponent.finished == [(0, 1.0)]


@pytest.mark.thorough
def test_the_opponent_is_drawn_anew_after_steps_of_its_own(play):
    here = both([agent(0, 1)], [agent(1, 2)])
    stepper = play(here, here, swap_steps=2)
    stepper.reset(seed=0)
    for _ in range(5):
        step(stepper)
    assert stepper.opponent.begun == [([0], [0])] * 3, "at the beginning, and after two and four steps"


@pytest.mark.thorough
def test_the_next_team_learns_from_new_episodes_on(play):
    stepper = play(both([agent(0, 1)], [agent(1, 2)]), both([agent(0, 3, reward=0.5)], [agent(1, 4)]), team_change=2)
    stepper.reset(seed=0)
    assert not step(stepper).truncated.any()
    changed = step(stepper)
    assert (changed.truncated.tolist(), changed.final_obs.tolist(), changed.reward.tolist()) == ([True], [[3]], [0.5])
    assert (changed.obs.tolist(), changed.episode_start.tolist()) == ([[2]], [True]), "team 1, and the scene begins again"
    assert stepper.opponent.begun == [([0], [0]), ([0], [1])]
    assert stepper.opponent.finished == [], "a game that was broken off has no result"
    assert step(stepper).obs.tolist() == [[4]]
    assert stepper.opponent.acted[-1] == ([1.0], [0], [True])


@pytest.mark.thorough
def test_each_player_begins_with_another_team(play):
    stepper = play(both([agent(0, 1)], [agent(1, 2)]), num_envs=2)
    assert stepper.reset(seed=0)[0].tolist() == [[1], [2]]
