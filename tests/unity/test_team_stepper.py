"""One team of a scene learns, and an opponent acts for the others."""

import numpy as np
import pytest

from lightning_rl import PPO, SettingError
from lightning_rl.envs import LESSONS
from lightning_rl.training.behaviors import find_teams
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
        return np.ones((len(rows), obs.shape[1] // 2 or 1), dtype=np.float32)


def both(first, second):
    return {"Push?team=0": first, "Push?team=1": second}


@pytest.fixture
def play(opened):
    def open_(*messages, swap_steps=1_000, team_change=1_000, match="Push", **settings):
        stepper = opened(*messages, teams=[f"{match}/0/*", f"{match}/1/*"], **settings)
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
def test_the_opponent_is_drawn_again_after_steps_of_its_own(play):
    here = both([agent(0, 1)], [agent(1, 2)])
    stepper = play(here, here, swap_steps=2)
    stepper.reset(seed=0)
    for _ in range(5):
        step(stepper)
    assert stepper.opponent.begun == [([0], [0])] * 3, "at the beginning, and after two and four steps"
    assert [start for *_, start in stepper.opponent.acted] == [[True], [False], [True], [False], [True]], "its memory begins empty"


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


@pytest.mark.thorough
def test_lessons_of_episodes_are_known_when_the_team_changes(play):
    def message(first, second):
        return both([*first, agent(2, 5)], [*second, agent(3, 6)])

    stepper = play(
        message([agent(0, 1)], [agent(1, 2)]),
        message([ended(0, 3, 1.0), agent(0, 1)], [ended(1, 4, -1.0), agent(1, 2)]),
        team_change=2,
        parameters={"wind": 2.0},
    )
    stepper.reset(seed=0)
    changed = step(stepper)
    assert (changed.terminated.tolist(), changed.truncated.tolist()) == ([True, False], [False, True])
    assert changed.info[LESSONS]["wind"].tolist() == [0, 0]
    assert changed.final_obs.tolist() == [[3], [5]]


@pytest.mark.thorough
def test_others_play_on_while_no_learner_is_present(play):
    stepper = play(
        both([agent(0, 1)], [agent(1, 2)]),
        both([ended(0, 3, 1.0)], [agent(1, 4)]),
        both([], [agent(1, 5)]),
        both([agent(0, 6)], [agent(1, 7)]),
    )
    stepper.reset(seed=0)
    made = step(stepper)
    assert (made.ended.tolist(), made.reward.tolist(), made.obs.tolist()) == ([0], [1.0], [[6]])
    assert [seen for seen, *_ in stepper.opponent.acted] == [[2.0], [4.0], [5.0]]
    assert stepper.opponent.finished == [(0, 1.0)]


@pytest.mark.thorough
def test_a_player_that_crashes_loses_the_games_in_it(play):
    stepper = play(arguments=("--scene", "race", "--count", 2, "--crash-at", 3), match="Race")
    stepper.reset(seed=0)
    action = np.zeros((2, 2), dtype=np.float32)
    assert stepper.step(action).valid.all()
    lost = stepper.step(action)
    assert (lost.valid.any(), lost.episode_start.all(), stepper.opponent.finished) == (False, True, [])
    assert stepper.step(action).valid.all()


def test_a_group_is_not_divided_between_teams():
    agents = [f"Push/{team}/{seat}" for team in (0, 1) for seat in range(4)]
    assert find_teams(TEAMS, agents, group_size=2) == (tuple(agents[:4]), tuple(agents[4:]))
    with pytest.raises(SettingError, match=r"^self_play.teams: the members of a group are in one team, and not all in \[Push/0/0, "):
        find_teams(["*/[02]", "*/[13]"], agents, group_size=2)


@pytest.mark.thorough
def test_self_play_in_a_game_has_no_steps_between_opponents():
    with pytest.raises(SettingError, match=r"^self_play.swap_steps is for scenes of Unity; elsewhere an opponent plays whole episodes"):
        PPO("tests.agents.Buttons", self_play={"swap_steps": 5})
