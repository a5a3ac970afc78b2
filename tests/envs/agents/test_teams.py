"""Games between teams: whose observations and rewards are in which rows, and who plays the others."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.spaces import Discrete
from numpy.testing import assert_allclose

from lightning_rl.envs.agents.stepper import SeatStepper
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import probe_spaces
from lightning_rl.envs.stepping import make_fitting_stepper
from lightning_rl.spaces import legal_sample

TEAMS = ("red_0", "red_1"), ("blue_0", "blue_1")


class Script:
    """Takes one action everywhere, the first legal one with masks, and notes what it is told."""

    def __init__(self, action=1):
        self.action, self.told, self.asked = action, [], []

    def reset(self, seed):
        pass

    def begin(self, copies, seats):
        self.told += [("begin", *each) for each in zip(copies.tolist(), seats.tolist(), strict=True)]

    def finish(self, copies, results):
        self.told += [("finish", *each) for each in zip(copies.tolist(), results.tolist(), strict=True)]

    def act(self, obs, mask, rows, start):
        self.asked.append(list(zip(rows.tolist(), start.tolist(), strict=True)))
        return np.array([np.flatnonzero(each)[0] for each in mask] if len(mask) else [self.action] * len(rows))

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


def stepper_of(name, num_envs=1, teams=TEAMS, **settings):
    config = EnvConfig(f"tests.agents.{name}", num_envs, **settings)
    stepper = make_fitting_stepper(config, probe_spaces(config)._replace(teams=teams), 0)
    stepper.opponent = Script()
    return stepper


def flags(step):
    """Valid, terminated, truncated and start of each row, as letters."""
    letters = {"v": step.valid, "t": step.terminated, "c": step.truncated, "s": step.episode_start}
    return ["".join(name for name, flag in letters.items() if flag[row]) for row in range(len(step.reward))]


def nobody(stepper):
    return np.zeros(stepper.num_envs, int)


def test_the_rows_of_a_copy_are_the_agents_of_the_team_that_learns():
    stepper = stepper_of("Squads", 2)
    assert type(stepper) is SeatStepper and stepper.num_envs == 4
    assert stepper.reset(0)[0].tolist() == [[0, 0], [2, 0], [1, 0], [3, 0]]  # red in the first copy, blue in the second
    step = stepper.step(np.array([0, 1, 1, 0]))
    assert_allclose(step.reward, [0, 20.1, 10.1, 30])
    assert flags(step) == ["v"] * 4 and step.obs.tolist() == [[0, 1], [2, 1], [1, 1], [3, 1]]
    assert stepper.present.tolist() == [True] * 4


def test_the_opponent_acts_for_all_agents_of_the_other_teams():
    stepper = stepper_of("Squads", 2)
    stepper.reset(0)
    stepper.step(nobody(stepper))
    stepper.step(nobody(stepper))
    assert stepper.opponent.asked == [[(1, True), (3, True), (4, True), (6, True)], [(1, False), (3, False), (4, False), (6, False)]]


def test_the_next_team_learns_in_the_next_episode():
    stepper = stepper_of("Squads")
    stepper.reset(0)
    for _ in range(3):
        stepper.step(nobody(stepper))
    step = stepper.step(np.array([1, 0]))
    assert_allclose(step.reward, [3.1, 23])
    assert flags(step) == ["vts", "vts"] and step.final_obs.tolist() == [[0, 4], [2, 4]]
    assert step.obs.tolist() == [[1, 0], [3, 0]]
    assert step.info["is_success"].tolist() == [1, 0]  # of red_0 and red_1
    step = stepper.step(np.array([1, 0]))
    assert_allclose(step.reward, [10.1, 30])
    assert flags(step) == ["v", "v"] and step.obs.tolist() == [[1, 1], [3, 1]]
    assert stepper.opponent.asked[-1] == [(0, True), (2, True)]


def test_a_game_is_won_by_the_team_with_the_higher_mean_return():
    stepper = stepper_of("Squads", 2)
    stepper.reset(0)
    for _ in range(4):
        stepper.step(nobody(stepper))
    # red_0 gets 0 + 1 + 2 + 3 and red_1 80 more, blue 40 and 120 more; four actions 1 of the opponent pay 0.1 each
    # so that red has 46 against 86.4 where it learns, and blue 86 against 46.4
    finished = {each[1]: each[2] for each in stepper.opponent.told if each[0] == "finish"}
    assert finished == {0: 0.0, 1: 1.0}
    begun = [each for each in stepper.opponent.told if each[0] == "begin"]
    assert begun == [("begin", 0, 0), ("begin", 1, 1), ("begin", 0, 1), ("begin", 1, 0)]


def test_equal_returns_are_a_draw_whatever_their_digits():
    stepper = stepper_of("Penalties", 2)
    stepper.reset(0)
    for _ in range(90):
        stepper.step(nobody(stepper))
    assert [each[2] for each in stepper.opponent.told if each[0] == "finish"] == [0.5] * 6


def test_members_who_have_died_or_have_not_come_are_no_experience():
    stepper = stepper_of("MortalSquads", 2)
    assert stepper.reset(0)[0].tolist() == [[0, 0], [0, 0], [1, 0], [3, 0]]
    assert stepper.present.tolist() == [True, False, True, True]
    steps = [stepper.step(np.ones(4, int)) for _ in range(4)]
    assert [flags(step) for step in steps] == [
        ["v", "s", "v", "v"],
        ["v", "v", "vts", "v"],  # red_1 has come, blue_0 has died
        ["v", "v", "s", "v"],
        ["vts", "vts", "s", "vts"],
    ]
    assert_allclose(
        [step.reward for step in steps], [[0.1, 0, 10.1, 30.1], [1.1, 21.1, 11.1, 31.1], [2.1, 22.1, 0, 32.1], [3.1, 23.1, 0, 33.1]]
    )
    assert steps[1].ended.tolist() == [2] and steps[1].final_obs.tolist() == [[1, 2]]
    assert steps[1].obs.tolist() == [[0, 2], [2, 2], [0, 0], [3, 2]]
    assert steps[3].obs.tolist() == [[1, 0], [3, 0], [0, 0], [0, 0]]  # the teams have changed, and red_1 has not come


def test_an_opponents_agent_acts_while_it_is_present_and_is_notified_when_it_begins():
    stepper = stepper_of("MortalSquads", 2)
    stepper.reset(0)
    for _ in range(4):
        stepper.step(nobody(stepper))
    assert stepper.opponent.asked == [
        [(1, True), (3, True), (4, True)],
        [(1, False), (3, False), (4, False), (6, True)],
        [(3, False), (4, False), (6, False)],
        [(3, False), (4, False), (6, False)],
    ]


def test_an_episode_ends_with_the_last_agent_of_the_team_that_learns():
    stepper = stepper_of("FallenSquads", 2)
    stepper.reset(0)
    first, second = (stepper.step(nobody(stepper)) for _ in range(2))
    assert flags(first) == ["v", "v", "vts", "v"] and flags(second) == ["v", "v", "s", "vts"]
    assert second.final_obs.tolist() == [[3, 2]]
    # red plays on alone where it learns; where blue learned, the next episode has begun and red learns
    assert second.obs.tolist() == [[0, 2], [2, 2], [0, 0], [2, 0]]
    assert stepper.opponent.told[2:] == [("finish", 1, 1.0), ("begin", 1, 0)]  # 10 + 61 against 0.1 + 1.1 + 20.1 + 21.1


def test_the_longest_episode_truncates_the_members_who_are_there():
    stepper = stepper_of("MortalSquads", 2, max_episode_steps=3)
    stepper.reset(0)
    step = [stepper.step(nobody(stepper)) for _ in range(3)][-1]
    assert flags(step) == ["vcs", "vcs", "s", "vcs"] and step.final_obs.tolist() == [[0, 3], [2, 3], [3, 3]]


def test_masks_are_those_of_the_team_that_learns_and_of_its_opponents():
    stepper, space = stepper_of("MaskedSquads", 3), Discrete(3, seed=0)
    obs, mask = stepper.reset(0)
    for _ in range(20):  # an illegal action of anyone raises
        step = stepper.step(np.array([legal_sample(space, each) for each in mask]))
        obs, mask = step.obs, step.mask
        there = stepper.present
        assert ((~mask[there]).argmax(1) == obs[there][:, 1] % 3).all() and mask[~there].all()


def test_restarting_games_lets_the_next_teams_learn():
    stepper = stepper_of("Squads", 2)
    stepper.reset(0)
    stepper.step(nobody(stepper))
    step = stepper.restart_all()
    assert flags(step) == ["s"] * 4 and step.obs.tolist() == [[1, 0], [3, 0], [0, 0], [2, 0]]
    assert [each[0] for each in stepper.opponent.told] == ["begin"] * 4  # abandoned, with no result


def test_a_team_may_be_one_agent_and_there_may_be_more_than_two():
    stepper = stepper_of("Squads", 1, (("red_0",), ("blue_0",), ("red_1",), ("blue_1",)))
    assert stepper.num_envs == 1 and stepper.reset(0)[0].tolist() == [[0, 0]]
    steps = [stepper.step(nobody(stepper)) for _ in range(4)]
    assert steps[-1].obs.tolist() == [[1, 0]] and len(stepper.opponent.asked[0]) == 3


@pytest.mark.parametrize("name", ["MortalSquads", "FallenSquads"])
def test_teams_and_returns_are_restored_in_the_middle_of_an_episode(name):
    saved, other = (stepper_of(name, 3) for _ in range(2))
    saved.reset(0)
    for k in range(6):
        saved.step(np.array([k % 2] * 6))
    assert other.load_state_dict(saved.state_dict()) is None
    saved.opponent.told.clear()
    saved.opponent.asked.clear()
    for k in range(9):
        left, right = (each.step(np.array([k % 2] * 6)) for each in (saved, other))
        assert left.reward.tolist() == right.reward.tolist() and flags(left) == flags(right) and left.obs.tolist() == right.obs.tolist()
    assert (saved.opponent.told, saved.opponent.asked) == (other.opponent.told, other.opponent.asked)


def test_a_state_of_an_earlier_version_holds_who_begins():
    saved, other = (stepper_of("MortalSquads", 3) for _ in range(2))
    saved.reset(0)
    for k in range(5):
        saved.step(np.array([k % 2] * 6))
    state = saved.state_dict()
    assert not state.pop("unpaid").any()
    assert other.load_state_dict({**state, "begins": ~state.pop("moved")}) is None
    saved.opponent.asked.clear()
    for k in range(9):
        left, right = (each.step(np.array([k % 2] * 6)) for each in (saved, other))
        assert left.reward.tolist() == right.reward.tolist() and flags(left) == flags(right) and left.obs.tolist() == right.obs.tolist()
    assert saved.opponent.asked == other.opponent.asked


def test_a_state_with_other_teams_is_refused():
    saved, other = stepper_of("Squads"), stepper_of("Squads", teams=TEAMS[::-1])
    saved.reset(0)
    assert other.load_state_dict(saved.state_dict()) == "their settings changed since they were saved"
