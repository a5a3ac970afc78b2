"""Agents as rows: what the adapter and the steppers make of PettingZoo's two forms, in numbers worked by hand."""

from __future__ import annotations

import importlib
import re
import warnings
from collections import Counter
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from numpy.testing import assert_allclose, assert_array_equal

from lightning_rl import SettingError
from lightning_rl.envs.agents.copies import AgentsEnv, ParallelAgents, TurnAgents, wrap_agents
from lightning_rl.envs.agents.stepper import RowStepper, SeatStepper
from lightning_rl.envs.config import EnvConfig, is_path
from lightning_rl.envs.make import make_env, probe_spaces
from lightning_rl.envs.stepping import make_fitting_stepper, make_stepper
from lightning_rl.envs.sync import TurnVectorEnv
from lightning_rl.spaces import legal_sample
from lightning_rl.types import tree_map
from tests import agents
from tests.agents import PARALLEL, TURNS, FirstWins, InTurn, Mortal, Sealed, Together

CLASSIC = {
    "tictactoe_v3": {},
    "connect_four_v3": {},
    "rps_v2": {"max_cycles": 3},
    "leduc_holdem_v4": {},
    "texas_holdem_v4": {},
    "texas_holdem_no_limit_v6": {},
    "chess_v6": {},
    "go_v5": {"board_size": 5},
}
LONG = ("chess_v6", "go_v5", "texas_holdem_no_limit_v6")
GENERATED = {
    ParallelAgents: ("generated_agents_parallel_v0", "generated_agents_parallel_cust_agentid_v0"),
    TurnAgents: (
        "generated_agents_env_v0",
        "generated_agents_env_cust_agentid_v0",
        "generated_agents_env_action_mask_obs_v0",
        "generated_agents_env_action_mask_info_v0",
    ),
}


class Script:
    """An opponent that makes the same move in every seat, the first legal one where there are masks, or random legal ones of a space.

    It notes what it is asked, and when episodes begin and end.
    """

    def __init__(self, action=0, space=None):
        self.action, self.space, self.asked, self.told = action, space, [], []

    def reset(self, seed):
        if self.space is not None:
            self.space.seed(seed)

    def begin(self, copies, seats):
        self.told += [("begin", *each) for each in zip(copies.tolist(), seats.tolist(), strict=True)]

    def finish(self, copies, results):
        self.told += [("finish", *each) for each in zip(copies.tolist(), results.tolist(), strict=True)]

    def act(self, obs, mask, rows, start):
        self.told.append(("act", len(rows)))
        self.asked += list(zip(rows.tolist(), start.tolist(), strict=True))
        if self.space is None:
            return np.array([np.flatnonzero(each)[0] for each in mask] if len(mask) else [self.action] * len(rows))
        return np.array([legal_sample(self.space, each) if len(mask) else self.space.sample() for each in (mask if len(mask) else rows)])


def stepper_of(cls, num_envs=1, opponent=None, seats=None, **settings):
    config = EnvConfig(f"tests.agents.{cls}" if isinstance(cls, str) else f"tests.agents.{cls.__name__}", num_envs, **settings)
    stepper = make_fitting_stepper(config, probe_spaces(config), 0, seats)
    stepper.opponent = opponent or Script()
    return stepper


def place(obs):
    return obs["observation"] if isinstance(obs, dict) else obs


def flags(step):
    """Valid, terminated, truncated and start of each row, as letters."""
    letters = {"v": step.valid, "t": step.terminated, "c": step.truncated, "s": step.episode_start}
    return ["".join(name for name, flag in letters.items() if flag[row]) for row in range(len(step.reward))]


def test_agents_are_rows_and_a_dead_one_is_no_experience_until_the_next_episode():
    stepper = stepper_of(Mortal)
    assert type(stepper) is RowStepper and stepper.num_envs == 2
    obs, mask = stepper.reset(0)
    assert obs.tolist() == [[0, 0], [1, 0]] and mask == ()

    step = stepper.step(np.array([0, 1]))
    assert_allclose(step.reward, [0, 10.1])
    assert flags(step) == ["v", "v"] and step.valid.all() and step.obs.tolist() == [[0, 1], [1, 1]]

    step = stepper.step(np.array([1, 1]))
    assert_allclose(step.reward, [1.1, 11.1])
    assert flags(step) == ["v", "vts"] and step.obs.tolist() == [[0, 2], [0, 0]]
    assert step.ended.tolist() == [1] and step.final_obs.tolist() == [[1, 2]]
    assert step.info["is_success"].tolist() == [0, 0] and step.info["_is_success"].tolist() == [False, True]

    step = stepper.step(np.array([0, 1]))
    assert_allclose(step.reward, [2, 0])
    assert flags(step) == ["v", "s"] and step.obs.tolist() == [[0, 3], [0, 0]] and len(step.ended) == 0

    step = stepper.step(np.array([0, 1]))
    assert_allclose(step.reward, [3, 0])
    assert flags(step) == ["vts", "s"] and step.obs.tolist() == [[0, 0], [1, 0]]  # the next episode has begun
    assert step.final_obs.tolist() == [[0, 4]] and step.info["is_success"].tolist() == [1, 0]
    assert flags(stepper.step(np.zeros(2, int))) == ["v", "v"]


def test_an_agent_may_come_late_and_come_again_and_remembers_nothing():
    stepper = stepper_of("Visited")
    assert stepper.reset(0)[0].tolist() == [[0, 0], [0, 0]]
    steps = [stepper.step(np.zeros(2, int)) for _ in range(6)]
    assert [flags(step)[1] for step in steps] == ["s", "v", "vts", "s", "v", "vts"]
    assert [step.obs[1].tolist() for step in steps] == [[1, 1], [1, 2], [0, 0], [1, 4], [1, 5], [0, 0]]
    assert [step.reward[1] for step in steps] == [0, 11, 12, 0, 14, 15]
    assert flags(steps[5])[0] == "vts" and steps[5].final_obs.tolist() == [[0, 6], [1, 6]]


def start_again(stepper, copy):
    """Start an episode of one copy in the place of the running one."""
    stepper.world.start(np.array([copy]))
    stepper.world.look(np.array([copy]))


def test_copies_stand_one_after_the_other_and_end_apart():
    stepper = stepper_of(Mortal, 3)
    assert stepper.reset(0)[0].tolist() == [[0, 0], [1, 0]] * 3
    start_again(stepper, 1)
    stepper.step(np.zeros(6, int))
    start_again(stepper, 1)
    step = stepper.step(np.zeros(6, int))
    assert flags(step)[:2] == ["v", "vts"] and flags(step)[3] == "vs" and step.ended.tolist() == [1, 5]


def test_teams_that_end_together_begin_together():
    stepper = stepper_of("Teams", 2)
    stepper.reset(0)
    stepper.step(np.zeros(6, int))
    step = stepper.step(np.zeros(6, int))
    assert step.reward.tolist() == [1, 1, -2] * 2 and flags(step) == ["vts"] * 6 and step.obs[:, 1].tolist() == [0] * 6


def test_a_truncation_of_all_keeps_their_last_observations():
    stepper = stepper_of("Timed")
    stepper.reset(0)
    step = [stepper.step(np.zeros(2, int)) for _ in range(3)][-1]
    assert flags(step) == ["vcs"] * 2 and step.final_obs.tolist() == [[0, 3], [1, 3]]


def test_the_longest_episode_truncates_those_who_are_there():
    stepper = stepper_of(Mortal, max_episode_steps=3)
    stepper.reset(0)
    steps = [stepper.step(np.zeros(2, int)) for _ in range(3)]
    assert flags(steps[1]) == ["v", "vts"] and flags(steps[2]) == ["vcs", "s"] and steps[2].final_obs.tolist() == [[0, 3]]
    assert steps[2].obs.tolist() == [[0, 0], [1, 0]]


def test_a_death_in_the_step_that_is_the_last_one_is_no_truncation():
    stepper = stepper_of(Mortal, max_episode_steps=2)
    stepper.reset(0)
    stepper.step(np.zeros(2, int))
    assert flags(stepper.step(np.zeros(2, int))) == ["vcs", "vts"]


def test_restarting_abandons_all_episodes_and_is_no_experience():
    stepper = stepper_of(Mortal, 2)
    stepper.reset(0)
    stepper.step(np.zeros(4, int))
    step = stepper.restart_all()
    assert flags(step) == ["s"] * 4 and step.obs[:, 1].tolist() == [0] * 4 and step.reward.tolist() == [0] * 4 and len(step.ended) == 0
    assert flags(stepper.step(np.zeros(4, int))) == ["v"] * 4


def test_masks_of_the_absent_allow_everything():
    stepper = stepper_of("MaskedTogether")
    assert stepper.reset(0)[1].tolist() == [[False, True, True]] * 2
    assert stepper.step(np.array([1, 2])).mask.tolist() == [[True, False, True]] * 2
    step = stepper.step(np.array([0, 2]))
    assert step.mask.tolist() == [[True, True, False], [True] * 3] and step.final_mask.tolist() == [[True, True, False]]


def test_nested_observations_of_the_absent_are_zeros():
    stepper = stepper_of("Nested")
    stepper.reset(0)
    steps = [stepper.step(np.zeros(2, int)) for _ in range(2)]
    assert steps[1].obs["who"].tolist() == [0, 0] and steps[1].obs["where"]["t"].tolist() == [[2], [0]]
    assert steps[1].final_obs["who"].tolist() == [1] and steps[1].final_obs["where"]["t"].tolist() == [[2]]


def test_a_step_leaves_earlier_observations_as_they_were():
    stepper = stepper_of(Mortal)
    first, _ = stepper.reset(0)
    second = stepper.step(np.zeros(2, int)).obs
    stepper.step(np.zeros(2, int))
    assert first[:, 1].tolist() == [0, 0] and second[:, 1].tolist() == [1, 1]


# -------------------------------------------------------------------- in turn


def test_a_transition_runs_from_the_learners_move_to_its_next_and_adds_rewards_between():
    stepper = stepper_of(InTurn)
    assert type(stepper) is SeatStepper and stepper.num_envs == 1
    assert stepper.reset(0)[0].tolist() == [[0, 0]]
    made = []
    for action in (1, 0, 1, 0, 0, 0):
        step = stepper.step(np.array([action]))
        made.append((step.reward.tolist(), flags(step), step.obs.tolist(), None if step.final_obs is None else step.final_obs.tolist()))
    assert made == [
        ([2.0], ["v"], [[0, 3]], None),  # 1 for its move, 1 for the reply of p1
        ([1.0], ["vts"], [[1, 1]], [[0, 6]]),  # p1 replies, p2 ends it; then p0 has moved, and p1 learns
        ([102.0], ["v"], [[1, 4]], None),
        ([101.0], ["vts"], [[2, 2]], [[1, 6]]),
        ([201.0], ["v"], [[2, 5]], None),
        ([200.0], ["vts"], [[0, 0]], [[2, 6]]),  # nobody replies to the last move
    ]


def test_seats_are_taken_in_turn_and_differ_between_copies():
    stepper = stepper_of(InTurn, 4)
    assert stepper.reset(0)[0][:, 0].tolist() == [0, 1, 2, 0]
    stepper.step(np.zeros(4, int))
    assert stepper.step(np.zeros(4, int)).obs[:, 0].tolist() == [1, 2, 0, 1]


def test_opponents_are_notified_of_the_first_move_of_an_episode():
    opponent = Script()
    stepper = stepper_of(InTurn, opponent=opponent)
    stepper.reset(0)
    stepper.step(np.zeros(1, int))
    stepper.step(np.zeros(1, int))  # ends, and p0 begins the next one
    assert opponent.asked == [(1, True), (2, True), (1, False), (2, False), (0, True)]


def test_the_winning_move_of_the_other_is_in_the_learners_row():
    stepper = stepper_of(FirstWins)
    stepper.reset(0)
    step = stepper.step(np.array([0]))
    assert step.reward.tolist() == [-1] and flags(step) == ["vts"] and step.final_obs.tolist() == [[0, 2]]
    assert step.obs.tolist() == [[1, 1]]
    step = stepper.step(np.array([0]))  # as p1
    assert step.reward.tolist() == [1] and flags(step) == ["vts"] and step.obs.tolist() == [[0, 0]]


def test_a_game_that_ends_before_the_learner_could_move_is_not_its_episode():
    stepper = stepper_of(FirstWins, 2, Script(1))
    assert stepper.reset(0)[0].tolist() == [[0, 0], [0, 0]]  # the second learner was to be p1, and p0 won at once
    step = stepper.step(np.array([0, 1]))
    assert step.reward.tolist() == [-1, 1] and flags(step) == ["vts", "vts"] and step.obs.tolist() == [[0, 0]] * 2


def test_what_a_learner_gets_before_its_first_move_is_in_its_first_transition():
    stepper = stepper_of("Gift", 2)
    assert stepper.reset(0)[0][:, 0].tolist() == [0, 1]
    assert stepper.step(np.zeros(2, int)).reward.tolist() == [6, 106]


@pytest.mark.parametrize("cls", ["Elimination", "Slow"])
def test_a_learner_that_is_thrown_out_begins_elsewhere_and_one_that_is_not_plays_on(cls):
    stepper = stepper_of(cls, 2)
    stepper.reset(0)
    step = stepper.step(np.zeros(2, int))
    assert step.reward.tolist() == [1, 101] and flags(step) == ["v", "vts"]
    assert step.final_obs.tolist() == [[1, 3]] and step.obs.tolist() == [[0, 3], [2, 2]]
    assert stepper.step(np.zeros(2, int)).obs[0].tolist() == [0, 5]
    step = stepper.step(np.zeros(2, int))
    assert flags(step)[0] == "vts" and step.final_obs[0].tolist() == [0, 6]


def test_the_longest_game_counts_the_moves_of_all():
    stepper = stepper_of(InTurn, max_episode_steps=4)
    stepper.reset(0)
    stepper.step(np.zeros(1, int))
    step = stepper.step(np.zeros(1, int))
    assert flags(step) == ["vcs"] and step.final_obs.tolist() == [[0, 4]] and step.reward.tolist() == [0]


@pytest.mark.parametrize("cls", ["MaskedInTurn", "MaskedInfo"])
def test_masks_are_those_of_who_is_to_move(cls):
    space = Discrete(3, seed=0)
    stepper = stepper_of(cls, 3, Script(space=space))
    obs, mask = stepper.reset(0)
    assert place(obs).tolist() == [[0, 0], [1, 1], [2, 2]] and (~mask).astype(int).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    for _ in range(20):  # an illegal move of anyone raises
        step = stepper.step(np.array([legal_sample(space, each) for each in mask]))
        mask = step.mask
        assert (~mask).argmax(1).tolist() == (place(step.obs)[:, 1] % 3).tolist()
        assert len(step.final_mask) == len(step.ended)


def test_restarting_games_takes_the_next_seats():
    stepper = stepper_of(InTurn, 2)
    stepper.reset(0)
    stepper.step(np.zeros(2, int))
    step = stepper.restart_all()
    assert flags(step) == ["s", "s"] and step.obs.tolist() == [[1, 1], [2, 2]] and step.reward.tolist() == [0, 0]
    assert stepper.step(np.zeros(2, int)).reward.tolist() == [101, 201]


def test_opponents_are_notified_when_episodes_begin_and_end_and_who_won():
    opponent = Script()
    stepper = stepper_of(FirstWins, 2, opponent)
    stepper.reset(0)
    stepper.step(np.array([0, 0]))
    assert opponent.told == [
        *[("begin", 0, 0), ("begin", 1, 1), ("act", 1)],  # p0 moves in copy 1
        *[("finish", 1, 1.0), ("begin", 1, 0)],  # and the learner wins with its second move: 1 against -1
        *[("act", 1), ("finish", 0, 0.0), ("begin", 0, 1), ("act", 1)],  # p1 replies in copy 0 and wins; p0 begins the next episode
    ]
    opponent.told.clear()
    stepper.restart_all()
    assert opponent.told == [("begin", 0, 0), ("begin", 1, 1), ("act", 1)]  # abandoned, with no result


def test_a_learner_has_a_point_for_each_other_whom_it_beats():
    opponent = Script()
    stepper = stepper_of(InTurn, opponent=opponent)
    stepper.reset(0)
    for _ in range(6):
        stepper.step(np.array([1]))
    # p0 gets 2 · 1 for its actions and 2 for replies; p1 200 + 2; p2 400 + 1, as nobody replies to the last move
    assert [each[2] for each in opponent.told if each[0] == "finish"] == [0.0, 0.5, 1.0]


def test_an_episode_that_ends_before_the_learner_could_move_has_a_result_too():
    opponent = Script(1)
    stepper_of(FirstWins, 2, opponent).reset(0)
    assert opponent.told == [("begin", 0, 0), ("begin", 1, 1), ("act", 1), ("finish", 1, 0.0), ("begin", 1, 0)]


# -------------------------------------------------------------------- one learns where all move at once


def test_the_opponent_acts_at_the_same_time_for_all_but_the_learner():
    opponent = Script(1)
    stepper = stepper_of(Together, 2, opponent, seats=True)
    assert type(stepper) is SeatStepper and stepper.num_envs == 2 and stepper.num_seats == 4
    assert stepper.reset(0)[0].tolist() == [[0, 0], [1, 0]] and opponent.asked == []
    step = stepper.step(np.array([0, 0]))
    assert step.reward.tolist() == [0, 10] and flags(step) == ["v", "v"] and step.obs.tolist() == [[0, 1], [1, 1]]
    assert opponent.asked == [(1, True), (2, True)]
    steps = [stepper.step(np.array([0, 0])) for _ in range(3)]
    assert [step.reward.tolist() for step in steps] == [[1, 11], [2, 12], [3, 13]] and opponent.asked[2:4] == [(1, False), (2, False)]
    assert flags(steps[2]) == ["vts", "vts"] and steps[2].final_obs.tolist() == [[0, 4], [1, 4]]
    assert steps[2].obs.tolist() == [[1, 0], [0, 0]]
    # a gets 0 + 1 + 2 + 3, b 40 more, and each 4 · 0.1 for the action 1, which is the opponent's
    assert [each[2] for each in opponent.told if each[0] == "finish"] == [0.0, 1.0]
    assert opponent.told[-2:] == [("begin", 0, 1), ("begin", 1, 0)]


def test_an_episode_is_the_learners_where_others_stay_or_come():
    opponent = Script()
    stepper = stepper_of(Mortal, 2, opponent, seats=True)  # b dies in the second of four steps
    stepper.reset(0)
    steps = [stepper.step(np.array([0, 0])) for _ in range(4)]
    assert [flags(step) for step in steps] == [["v", "v"], ["v", "vts"], ["v", "v"], ["vts", "v"]]
    assert steps[1].final_obs.tolist() == [[1, 2]] and steps[1].obs.tolist() == [[0, 2], [0, 0]]
    assert opponent.asked == [(1, True), (2, True), (1, False), (2, False), (3, True), (3, False)]
    late = stepper_of("Visited", 2, seats=True)  # b comes at time 1
    assert late.reset(0)[0].tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("cls", ["MaskedTogether", "Nested", "Continuous"])
def test_one_learner_has_the_rows_that_it_has_among_all(cls):
    make = partial(EnvConfig, f"tests.agents.{cls}", 1)
    space = probe_spaces(make()).action
    all_, one = stepper_of(cls), stepper_of(cls, seats=True)
    opponent = one.opponent
    (obs, _), (seen, mask) = all_.reset(0), one.reset(0)
    assert tree_map(lambda leaf: leaf[:1].tolist(), obs) == tree_map(np.ndarray.tolist, seen)
    for _ in range(4):
        actions = np.array([legal_sample(space, mask[0]) if len(mask) else space.sample() for _ in range(2)])
        opponent.act = lambda obs, mask, rows, start, actions=actions: actions[rows]
        expected, found = all_.step(actions), one.step(actions[:1])
        mask = found.mask
        assert expected.reward[0] == found.reward[0] and flags(expected)[0] == flags(found)[0]
    assert tree_map(lambda leaf: leaf[:1].tolist(), expected.final_obs) == tree_map(np.ndarray.tolist, found.final_obs)


@pytest.mark.parametrize("cls", [Together, FirstWins])
def test_seats_and_returns_are_restored(cls):
    saved, other = (stepper_of(cls, 3, seats=True) for _ in range(2))
    for each in (saved, other):
        each.opponent.get_state, each.opponent.set_state = dict, lambda state: None
    saved.reset(0)
    for k in range(5):
        saved.step(np.array([k % 2] * 3))
    assert other.load_state_dict(saved.state_dict()) is None
    saved.opponent.told.clear()
    for k in range(9):
        left, right = (each.step(np.array([k % 2] * 3)) for each in (saved, other))
        assert left.reward.tolist() == right.reward.tolist() and flags(left) == flags(right) and left.obs.tolist() == right.obs.tolist()
    assert saved.opponent.told == other.opponent.told


def test_an_agent_that_comes_back_under_its_old_name_is_there_again():
    copy = wrap_agents(agents.Returning(), "Returning")
    copy.reset(seed=0)
    there = [list(copy.present)]
    while copy.present:
        copy.step({agent: 0 for agent in copy.to_move})
        there.append(list(copy.present))
    assert there[3] == ["p0", "p1", "p2"] and there[7] == ["p0", "p1", "p2"] and there[8] == [] and copy.terminated == {"p0", "p1", "p2"}


def test_an_opponent_that_comes_back_begins_anew():
    stepper = stepper_of(agents.Returning)
    stepper.reset(0)  # the learner is p0; the opponent moves p1 and p2, and p1 is thrown out with the move of p2
    for _ in range(2):
        stepper.step(np.array([0]))
    assert stepper.opponent.asked == [(1, True), (2, True), (1, True), (2, False)]


# -------------------------------------------------------------------- PettingZoo's own tests and games


@pytest.mark.parametrize("cls", [each for each in PARALLEL if each.__name__ not in ("Visited", "MaskedTogether")])
def test_our_parallel_probes_keep_to_the_interface(cls):  # which forbids to come back, and knows no masks here
    from pettingzoo.test import parallel_api_test

    parallel_api_test(cls(), 20)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", TURNS)
def test_our_probes_in_turn_keep_to_the_interface(cls):
    from pettingzoo.test import api_test

    api_test(cls(), 20)


def play(copy, seed):
    """Play one episode at random; the actions, and what each agent got."""
    copy.reset(seed=seed)
    moves, paid = [], Counter()
    while copy.present:
        actions = copy.random_actions(seed + len(moves))
        moves += actions.values()
        copy.step(actions)
        paid.update(copy.rewards)
    return moves, paid


def load_game(package, name):
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module(f"{package}.{name}")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in GENERATED.items() for name in names])
def test_unnamed_agents_come_and_go_in_the_adapter(kind, name):
    module = load_game("pettingzoo.test.example_envs", name)
    env = module.parallel_env() if kind is ParallelAgents else module.raw_env(max_cycles=10)
    copy, seen = kind(env, name), set()
    for seed in range(3):
        copy.reset(seed=seed)
        steps = 0
        while copy.present and steps < 60:  # the parallel ones do not end
            seen |= {str(agent) for agent in copy.present}
            assert set(copy.obs) == set(copy.to_move) <= set(copy.present)
            for agent in copy.to_move:
                assert copy.env.observation_space(agent).contains(copy.look(agent)[0])
            there = set(map(str, copy.present))
            copy.step({agent: copy.env.action_space(agent).sample() for agent in copy.to_move})
            steps += 1
            gone = there - set(map(str, copy.present))
            assert gone == {str(agent) for agent in copy.last} <= there | {str(agent) for agent in copy.last}
    assert steps > 20 and len(seen) > 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in CLASSIC])
def test_rewards_of_a_classic_game_are_those_of_its_own_loop(name):
    module = load_game("pettingzoo.classic", name)
    for seed in range(1 if name in LONG else 5):
        moves, paid = play(wrap_agents(module.env(**CLASSIC[name]), name), seed)
        env, waiting, expected = module.env(**CLASSIC[name]), iter(moves), Counter()
        env.reset(seed=seed)
        for agent in env.agent_iter():
            _, reward, terminated, truncated, _ = env.last()
            expected[agent] += reward
            env.step(None if terminated or truncated else next(waiting))
        assert next(waiting, None) is None and paid == expected, seed


class Ledger:
    """A game that notes what it pays each player in each episode."""

    def __init__(self, env):
        self.game, self.episodes = env, []

    def __getattr__(self, name):
        return getattr(self.game, name)

    def reset(self, **arguments):
        self.episodes.append(Counter())
        self.game.reset(**arguments)

    def step(self, action):
        self.game.step(action)
        if action is not None:
            self.episodes[-1].update(self.game.rewards)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in CLASSIC])
def test_a_learner_gets_what_the_game_pays_its_seat(name):
    module, ledgers = load_game("pettingzoo.classic", name), []

    def build():
        ledgers.append(Ledger(module.env(**CLASSIC[name])))
        return ledgers[-1]

    spaces = probe_spaces(build)
    stepper = make_fitting_stepper(build, spaces, 0)
    del ledgers[:-8]
    space = spaces.action
    stepper.opponent = Script(space=space)
    _, mask = stepper.reset(3)
    total, got, finished = np.zeros(8), [[] for _ in range(8)], 0
    for _ in range(200 if name in LONG else 60):
        step = stepper.step(np.array([legal_sample(space, each) for each in mask] if len(mask) else [space.sample() for _ in range(8)]))
        mask, total = step.mask, total + step.reward
        for e in step.ended:
            got[e].append(total[e])
            total[e], finished = 0.0, finished + 1
    assert finished > 8
    for e, (ledger, returns) in enumerate(zip(ledgers, got, strict=True)):
        seats = [stepper.side.agents[(e + k) % len(stepper.side.agents)] for k in range(len(ledger.episodes))]
        paid = [episode[seat] for seat, episode in zip(seats, ledger.episodes, strict=True)]
        # games that ended before the learner could move are not its episodes
        rest = iter(paid)
        assert all(any(abs(each - other) < 1e-9 for other in rest) for each in returns), (e, returns, paid)


# -------------------------------------------------------------------- errors


class Nameless(Together):
    def __init__(self):
        super().__init__()
        del self.possible_agents


class Unequal(Together):
    def action_space(self, agent):
        return Discrete(3) if agent == "b" else self.action


class Clueless(Together):
    def observation_space(self, agent):
        raise KeyError(agent)


class Raising(Together):
    def pay(self, agent, action):
        raise ValueError("no such move")


class Misshapen(Together):
    def observe(self, agent):
        return np.zeros(3 if agent == "b" and self.t == 1 else 2, np.float32)


class Unpaid(Together):
    def pay(self, agent, action):
        return None


class Talkative(Together):
    observation = Dict(where=Box(-100, 100, (2,), np.float32), mode=Discrete(4))

    def observe(self, agent):
        return {"where": super().observe(agent), "mode": 1} | ({"mood": 1} if self.t == 2 else {})


class Outside(Talkative):
    def observe(self, agent):
        return super().observe(agent) | ({"mode": 9} if self.t == 1 else {})


class Wrapping(Together):
    """Observes 300 in bytes."""

    observation = Box(0, 255, (2,), np.uint8)

    def observe(self, agent):
        return np.array([0, 300]) if self.t == 1 else np.zeros(2, np.uint8)


class Stuck(InTurn):
    """Its second player keeps the turn."""

    def step(self, action):
        if self.agent_selection != "p1":
            super().step(action)


class Unmasked(InTurn):
    def tell(self, agent):
        return {"action_mask": np.ones(2, np.int8)} if self.t < 3 else {}


class Vanishing(Mortal):
    """b leaves without a word."""

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        return obs, rewards, dict.fromkeys(terminated, False), truncated, info


class Stranger(Together):
    def there(self):
        return [*super().there(), "z"] if self.t == 1 else super().there()

    def observe(self, agent):
        return np.zeros(2, np.float32)


class Empty(Together):
    def there(self):
        return []


class Blind(InTurn):
    def observe(self, agent):
        if self.t == 2:
            raise RuntimeError("fog")
        return super().observe(agent)


class Forgetful(Together):
    """Its second step leaves out what it is told to of b."""

    forgets = ()

    def step(self, actions):
        told = super().step(actions)
        for number in self.forgets if self.t == 2 else ():
            del told[number]["b"]
        return told


class Unseen(Forgetful):
    forgets = (0,)


class Unrewarded(Forgetful):
    forgets = (1,)


class Unending(Forgetful):
    forgets = (2,)


class Uncut(Forgetful):
    forgets = (3,)


class Unborn(Together):
    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed, options)
        return {"a": obs["a"]}, info


class Old(Together):
    """As gym had it."""

    def step(self, actions):
        obs, rewards, terminated, _, info = super().step(actions)
        return obs, rewards, terminated, info


class OldReset(Together):
    def reset(self, seed=None, options=None):
        return super().reset(seed, options)[0]


class Told(Together):
    """Reports what it should not."""

    def told(self):
        return None

    def step(self, actions):
        *others, info = super().step(actions)
        return *others, dict.fromkeys(info, self.told())


class Boasting(Told):
    def told(self):
        return {"is_success": "yes"}


class Unclear(Together):
    """Ends as a text."""

    def step(self, actions):
        obs, rewards, terminated, *others = super().step(actions)
        return obs, rewards, dict.fromkeys(terminated, "no"), *others


class UnclearTurns(InTurn):
    def step(self, action):
        super().step(action)
        self.truncations = dict.fromkeys(self.truncations)


class Alone(Together):
    def step(self, actions):
        obs, _, *others = super().step(actions)
        return obs, 1.0, *others


@pytest.mark.parametrize(
    ("cls", "line"),
    [
        (Unseen, "environment 0 of Unseen: step returned no observation of agent b"),
        (Unrewarded, "environment 0 of Unrewarded: step returned no reward of agent b"),
        (Unending, "environment 0 of Unending: step returned no termination of agent b"),
        (Uncut, "environment 0 of Uncut: step returned no truncation of agent b"),
        (Unborn, "environment 0 of Unborn: reset returned no observation of agent b"),
        (
            Old,
            "environment 0 of Old: step returned 4 values, but must return 5: observations, rewards, terminations, truncations, infos",
        ),
        (OldReset, "environment 0 of OldReset: reset returned a dict, but must return 2: observations, infos"),
        (Told, "agent a of environment 0 of Told: the info is None, and must be a dict"),
        (Boasting, "agent a of environment 0 of Boasting: is_success of the info is 'yes', and must be true, false or a number"),
        (Unclear, "agent a of environment 0 of Unclear: terminated is 'no', and must be true or false"),
        (UnclearTurns, "agent p0 of environment 1 of UnclearTurns: truncated is None, and must be true or false"),
        (Alone, "environment 0 of Alone: step returned rewards as float instead of a dict by agent"),
        (Nameless, "Nameless has no possible_agents: list all agents that may ever be present, as each is a row"),
        (Unequal, "Unequal: the spaces of a and b differ; one policy needs equal spaces; for several policies use MultiAgent"),
        (Clueless, "environment 0 of Clueless raised KeyError: 'a'"),
        (Raising, "environment 0 of Raising raised ValueError: no such move"),
        (Misshapen, "agent b of environment 0 of Misshapen: the observation has shape (3,), and its space (2,)"),
        (Unpaid, "agent a of environment 0 of Unpaid: the reward is None, and must be a number"),
        (Talkative, "agent a of environment 0 of Talkative: the observation 'mood' is not in its space"),
        (Outside, "agent a of environment 0 of Outside: the observation 'mode' is 9, and its space Discrete(4)"),
        (Wrapping, "agent a of environment 0 of Wrapping: the observation is [ 0 300], and its space Box(0, 255, (2,), uint8)"),
        (
            Stuck,
            "environment 2 of Stuck: others made 10,000 moves and agent p2 none, and p1 moves next; does step pass the turn on?",
        ),
        (
            Unmasked,
            "agent p0 of environment 2 of Unmasked has no action_mask, but the model was made with masks: "
            "return one after every reset and step",
        ),
        (Vanishing, "environment 0 of Vanishing: agent b left without being terminated or truncated"),
        (Stranger, "environment 0 of Stranger: agent z is present, but is not one of its possible_agents"),
        (Empty, "environment 0 of Empty: no agent is present after a reset"),
        (Blind, "environment 2 of Blind raised RuntimeError: fog"),
    ],
)
def test_an_environment_that_breaks_the_interface_is_named_in_one_line(cls, line):
    with pytest.raises(SettingError) as raised:
        stepper = make_fitting_stepper(cls, probe_spaces(cls), 0)
        stepper.opponent = Script()
        stepper.reset(0)
        for _ in range(4):
            stepper.step(np.zeros(stepper.num_envs, int))
    assert re.sub(r" \(test_stepper\.py:\d+\)$", "", str(raised.value)) == line


class StateMember(Together):
    state = np.zeros(3)


@pytest.mark.parametrize("cls", [Together, StateMember, InTurn])
def test_a_critic_that_needs_a_missing_state_is_reported(cls):
    with pytest.raises(SettingError) as raised:
        probe_spaces(cls, "state")
    line = "has no state() that returns an array; write one, or use critic_obs all"
    assert str(raised.value) == f"critic_obs state: {cls.__name__} {line}"


@pytest.mark.parametrize(
    ("env_id", "line"),
    [
        ("no_such_module.env", "env.id 'no_such_module.env': there is no module 'no_such_module'"),
        ("mpe2.simple_sprad_v3", "env.id 'mpe2.simple_sprad_v3': there is no 'simple_sprad_v3' in mpe2; did you mean simple_spread_v3?"),
        ("tests.agents.Nobody", "env.id 'tests.agents.Nobody': there is no 'Nobody' in tests.agents"),
        ("tests.agents.ALWAYS", "env.id 'tests.agents.ALWAYS' is not an environment: it has neither parallel_env nor env"),
        ("tests.agents.Together.there", "env.id 'tests.agents.Together.there': there is no module 'tests.agents.Together'"),
    ],
)
def test_an_id_that_is_no_environment_is_refused_in_one_line(env_id, line):
    with pytest.raises(SettingError) as raised:
        probe_spaces(EnvConfig(env_id))
    assert str(raised.value).startswith(line) and "\n" not in str(raised.value)


def test_arguments_that_do_not_fit_are_named():
    with pytest.raises(SettingError, match=r"the environment tests.agents.Mortal cannot be built: .*env.kwargs are {'size': 3}"):
        probe_spaces(EnvConfig("tests.agents.Mortal", kwargs={"size": 3}))


@pytest.mark.parametrize(
    "settings",
    [
        {"wrappers": ["FlattenObservation"]},
        {"frame_stack": 2},
        {"atari": True},
        {"parameters": {"length": 4.0}, "observe_parameters": True},
        {"autoreset": "NEXT_STEP"},
        {"vectorization": "async"},
        {"vectorization": "native"},
        {"vectorization": "envpool"},
    ],
)
def test_settings_for_environments_of_one_agent_are_refused(settings):
    with pytest.raises(SettingError, match=rf"env\.{list(settings)[-1]} .*environments? of one agent"):
        probe_spaces(EnvConfig("tests.agents.Mortal", **settings))


def test_agents_take_no_lessons():
    with pytest.raises(SettingError, match=r"tests.agents.Mortal takes no lessons"):
        stepper_of(Mortal).set_lessons({})


def test_other_spaces_than_those_of_the_model_are_refused():
    config = EnvConfig("tests.agents.Mortal")
    with pytest.raises(SettingError, match="differ from those of the model"):
        make_fitting_stepper(config, probe_spaces(EnvConfig("tests.agents.Teams")), 0)


def test_an_id_that_gymnasium_knows_is_no_path():
    gym.register("dotted.name", entry_point=lambda: None)
    try:
        assert not is_path("dotted.name") and is_path("mpe2.simple_spread_v3") and not is_path("CartPole-v1")
        assert not is_path("tests.environments:Scripted-v0") and not is_path("ALE/Pong-v5")
    finally:
        del gym.registry["dotted.name"]


def test_an_attribute_of_a_class_is_not_taken_for_the_environment(monkeypatch):
    monkeypatch.setattr(Mortal, "env", property(lambda self: self), raising=False)
    assert isinstance(make_env(EnvConfig("tests.agents.Mortal")), AgentsEnv)


class Posthumous(Mortal):
    """Pays and reports everyone who is possible in every step, the dead too."""

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        missing = dict.fromkeys(set(self.names) - set(obs), 1)
        return obs, rewards | dict.fromkeys(missing, 7.0), terminated | dict.fromkeys(missing, True), truncated, info


def test_rewards_of_those_who_did_not_act_are_no_experience():
    stepper = make_fitting_stepper(Posthumous, probe_spaces(Posthumous), 0)
    stepper.reset(0)
    steps = [stepper.step(np.zeros(16, int)) for _ in range(3)]
    assert steps[2].reward[:2].tolist() == [2, 0] and flags(steps[2])[:2] == ["v", "s"]


# -------------------------------------------------------------------- state


@pytest.mark.variants
@pytest.mark.parametrize("cls", [*PARALLEL, *TURNS, Sealed])
def test_a_stepper_goes_on_from_its_state_as_the_one_that_was_saved(cls):
    saved, other = (stepper_of(cls, 2, max_episode_steps=5) for _ in range(2))
    assert saved.can_be_saved
    assert (saved.world.way == "attributes") == (cls is not Sealed)
    actions = partial(scripted_actions, saved)
    _, mask = saved.reset(1)
    for k in range(5):
        mask = saved.step(actions(k, mask)).mask
    saved.opponent.get_state, other.opponent.set_state = dict, lambda state: None
    assert other.load_state_dict(saved.state_dict()) is None
    for k in range(9):
        action = actions(k, mask)
        step, same = saved.step(action), other.step(action)
        mask = step.mask
        tree_map(assert_array_equal, step._replace(final_obs=(), info=()), same._replace(final_obs=(), info=()))
        if len(step.ended):
            tree_map(assert_array_equal, step.final_obs, same.final_obs)


def scripted_actions(stepper, k, mask):
    space = stepper.side.spaces.action
    if len(mask):
        return np.array([np.flatnonzero(each)[k % 2] for each in mask])
    return np.full((stepper.num_envs, *space.shape), k % 2, space.dtype)


def test_a_state_of_another_kind_of_environment_is_not_taken():
    ours, theirs = stepper_of(Mortal), make_stepper(TurnVectorEnv([partial(gym.make, "CartPole-v1")]))
    ours.reset(0), theirs.reset(0)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert ours.load_state_dict(other) is not None and theirs.load_state_dict(mine) is not None
    assert stepper_of(Mortal, 2).load_state_dict(mine) == "the checkpoint has 1 copies of the environment, not 2"


@pytest.mark.thorough
@pytest.mark.parametrize("env_id", ["pettingzoo.classic.connect_four_v3", "mpe2.simple_spread_v3"])
def test_a_saved_copy_with_a_number_in_the_place_of_an_environment_inside_it_starts_new_episodes(env_id):
    config = EnvConfig(env_id, 2)
    saved, other = (make_fitting_stepper(config, probe_spaces(config), 0) for _ in range(2))
    for each in (saved, other):
        each.opponent = Script()
        each.opponent.get_state, each.opponent.set_state = dict, lambda state: None
    saved.reset(0)
    state = saved.state_dict()
    inner = state["states"][1]
    places = list(places_of_environments(inner))
    assert len(places) >= 3
    for layer, name in places:
        whole, layer[name] = layer[name], np.inf
        assert other.load_state_dict(state) == f"{env_id} could not be restored exactly"
        layer[name] = whole
    assert other.load_state_dict(state) is None


def places_of_environments(tree):
    """Yield each mapping in a saved state that holds an environment inside another one, and its name there."""
    if isinstance(tree, dict):
        yield from ((tree, name) for name, value in tree.items() if name in ("env", "aec_env") and value[0] == "~object")
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        yield from places_of_environments(value)
