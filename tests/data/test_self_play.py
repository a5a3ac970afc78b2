"""Past selves in the seats that do not learn: who is drawn, who acts where, and what of them is saved."""

from collections import Counter

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

from lightning_rl import GRU, PPO, SettingError
from lightning_rl.data.opponents import RandomMoves, ScriptedOpponent
from lightning_rl.data.self_play import NEWEST, Game, SelfPlayConfig, SelfPlayOpponent, Snapshots
from lightning_rl.envs.agents.stepper import points
from lightning_rl.types import tree_leaves

COPIES, AGENTS = 8, 2
ROWS = COPIES * AGENTS


def model(**settings):
    torch.manual_seed(0)
    return PPO("tests.agents.FirstWins", n_steps=8, batch_size=8, **settings)


def always(network, action):
    """Let a policy take one of two actions, whatever it sees."""
    for name, parameter in network.named_parameters():
        if parameter.shape == (2,) and "bias" in name:
            parameter.data[:] = 50.0 * (2 * torch.tensor([action == 0, action == 1]) - 1)
        elif parameter.shape[:1] == (2,):
            parameter.data.zero_()


def opponent(config=None, fixed=(), **settings):
    learner = model(**settings)
    always(learner.network, 0)
    snapshots = Snapshots(learner.network, 2)
    made = SelfPlayOpponent(snapshots, SelfPlayConfig(**(config or {})), list(fixed), ROWS, AGENTS)
    made.reset(0)
    return made


def script(function):
    return ScriptedOpponent(function, "a script", Discrete(2))


def everywhere(made):
    made.begin(np.arange(COPIES), np.zeros(COPIES, dtype=int))


def act(made, rows):
    rows = np.asarray(rows)
    return made.act(np.zeros((len(rows), 2), np.float32), (), rows, np.ones(len(rows), dtype=bool))


def test_with_a_ratio_of_one_the_newest_policy_plays_everywhere():
    made = opponent({"play_against_latest_model_ratio": 1})
    made.snapshots.take()
    everywhere(made)
    assert made.playing.tolist() == [NEWEST] * COPIES


def test_with_a_ratio_of_zero_only_snapshots_of_the_window_and_fixed_players_play():
    made = opponent({"play_against_latest_model_ratio": 0}, [script(lambda obs, mask, random: np.ones(len(obs), dtype=int))])
    for _ in range(5):
        made.snapshots.take()
    drawn = set()
    for _ in range(20):
        everywhere(made)
        drawn |= {*made.playing.tolist()}
    assert drawn == {3, 4, NEWEST - 1}


def test_of_a_large_window_ten_snapshots_play_at_the_same_time_and_each_has_its_turn():
    snapshots = Snapshots(model().network, 30)
    for _ in range(9):
        snapshots.take()
    assert [*snapshots.drawn] == [*range(9)]  # of a small window, all
    played = Counter()
    while snapshots.taken < 90:
        snapshots.take()
        assert len(snapshots.drawn) <= 10 and snapshots.drawn[-1] == snapshots.taken - 1
        played.update(snapshots.drawn)
    assert [played[number] for number in range(30, 60)] == [10] * 30  # of the 30 intervals that each is in the window
    snapshots.window = 1000
    assert [*snapshots.drawn] == [*range(8, 90, 9)]


def test_only_snapshots_that_play_have_a_network():
    made = opponent({"play_against_latest_model_ratio": 0})
    made.snapshots.window = 20
    for _ in range(20):
        made.snapshots.take()
        everywhere(made)
        act(made, np.arange(0, ROWS, AGENTS))
        made.snapshots.drop(made.playing.tolist())
    assert sorted(made.snapshots.weights) == [*range(20)]
    assert {*made.snapshots.networks} <= {*made.snapshots.drawn, *made.playing.tolist()}
    assert len(made.snapshots.networks) + len(made.snapshots.unused) <= 18  # the ten that are drawn, and those of eight copies


def test_before_the_first_snapshot_the_newest_policy_plays():
    made = opponent({"play_against_latest_model_ratio": 0})
    everywhere(made)
    assert made.playing.tolist() == [NEWEST] * COPIES


def test_each_player_acts_in_its_own_copies_only():
    made = opponent(fixed=[script(lambda obs, mask, random: np.ones(len(obs), dtype=int))])
    made.snapshots.take()  # takes action 0
    always(made.snapshots.network, 1)
    made.playing[:] = [0, NEWEST, 0, NEWEST - 1, NEWEST, 0, 0, NEWEST]
    rows = np.array([0, 3, 4, 6, 9, 10, 13, 15])  # one of each copy, the first or the second agent
    assert act(made, rows).tolist() == [0, 1, 0, 1, 1, 0, 0, 1]


def test_a_snapshot_stays_as_it_was_when_the_policy_learns_on():
    made = opponent()
    made.snapshots.take()
    always(made.snapshots.network, 1)
    made.playing[:] = 0
    assert act(made, [0, 2, 4]).tolist() == [0, 0, 0]


def test_a_snapshot_keeps_the_statistics_of_its_normalizer():
    made = opponent(normalize_obs="running")
    made.snapshots.take()
    before = made.snapshots.get_network(0).normalizer.state_dict()
    made.snapshots.network.normalizer.update(torch.full((64, 2), 7.0))
    after, newest = made.snapshots.get_network(0).normalizer.state_dict(), made.snapshots.network.normalizer.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not all(torch.equal(newest[name], before[name]) for name in before)


def test_a_snapshot_that_left_the_window_plays_its_episode_to_the_end():
    made = opponent()
    made.snapshots.take()
    made.playing[:] = [0, *[NEWEST] * 7]
    for _ in range(3):
        made.snapshots.take()
    made.snapshots.drop(made.playing.tolist())
    assert sorted(made.snapshots.weights) == [0, 2, 3]
    assert act(made, [0]).tolist() == [0]
    everywhere(made)
    made.snapshots.drop(made.playing.tolist())
    assert sorted(made.snapshots.weights) == [2, 3]


def test_the_memory_of_a_row_is_its_own_and_starts_with_its_episode():
    made = opponent(memory=GRU(4, 4))
    made.snapshots.take()
    made.playing[:] = [0, 0, *[NEWEST] * 6]
    seen = np.ones((2, 2), np.float32)
    made.act(seen, (), np.array([0, 2]), np.array([True, True]))
    remembered = tree_leaves(made.memory)[0].copy()
    assert remembered[[0, 2]].any() and not remembered[[1, 3, 4]].any()
    made.act(seen, (), np.array([0, 2]), np.array([True, False]))
    again = tree_leaves(made.memory)[0]
    assert np.array_equal(again[0], remembered[0]) and not np.array_equal(again[2], remembered[2])


def test_points_are_one_for_each_other_player_that_is_beaten_and_a_half_for_a_draw():
    returns = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [2.0, 2.0, 2.0]])
    for seat, expected in enumerate(([1.0, 0.25, 0.25, 0.5], [0.25, 1.0, 0.25, 0.5], [0.25, 0.25, 1.0, 0.5])):
        assert points(returns, np.full(4, seat)).tolist() == expected  # the mean of the first three is ½: nobody is better
    assert points(np.array([[0.1, 0.0], [-3.0, 0.0], [0.0, 0.0]]), np.zeros(3, int)).tolist() == [1.0, 0.0, 0.5]


def test_results_are_those_of_whole_episodes_and_draws_count_a_half():
    made = opponent()
    made.playing[:3] = [0, NEWEST, 1]
    made.finish(np.array([0, 1, 2]), np.array([1.0, 0.0, 0.5]))
    assert made.take_finished() == [Game(0, 1.0), Game(NEWEST, 0.0), Game(1, 0.5)]
    assert made.take_finished() == []


def test_a_restored_opponent_draws_and_plays_as_the_one_that_went_on():
    def play(made):
        moves = []
        for _ in range(5):
            everywhere(made)
            moves.append((made.playing.tolist(), act(made, np.arange(0, ROWS, 2)).tolist()))
        return moves

    def fresh():
        return opponent(fixed=[script(lambda obs, mask, random: random.integers(2, size=len(obs)))], memory=GRU(4, 4))

    one = fresh()
    for _ in range(4):
        one.snapshots.take()
    one.playing[0] = 0  # left the window, and plays
    state, window = one.get_state(), one.snapshots.get_weights(one.snapshots.numbers)
    assert set(state["retired"]) == {0}
    two = fresh()
    two.snapshots.taken = 4
    two.snapshots.set_weights(window)
    two.set_state(state)
    assert play(one) == play(two)


def test_weights_of_another_network_are_refused_in_one_line():
    made = opponent()
    with pytest.raises(SettingError, match="snapshot 3 of self_play does not fit this network"):
        made.snapshots.set_weights({3: {"weight": torch.zeros(2)}})


def test_random_moves_are_legal_and_all_of_them_occur():
    spaces = PPO("tests.agents.MaskedInTurn", n_steps=8, batch_size=8).spaces
    script, mask = RandomMoves(spaces), np.array([[False, True, True]] * 200)
    moves = script({"observation": np.zeros((200, 2))}, mask, np.random.default_rng(0))
    assert {*moves.tolist()} == {1, 2}


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ({"window": 0}, "self_play.window"),
        ({"save_steps": 0}, "self_play.save_steps"),
        ({"play_against_latest_model_ratio": 1.5}, "self_play.play_against_latest_model_ratio"),
        ({"opponents": "random"}, "self_play.opponents must be a list"),
        ({"windw": 3}, "windw"),
    ],
)
def test_a_bad_setting_is_one_line(setting, line):
    with pytest.raises(SettingError, match=line):
        model(self_play=setting)


def test_self_play_needs_a_game_of_several_agents():
    with pytest.raises(SettingError, match="self_play needs a multi-agent game"):
        PPO("CartPole-v1", self_play={})


def test_a_past_self_that_is_taken_after_a_change_of_the_network_plays_with_it():
    learner = model()
    snapshots = Snapshots(learner.network, 1)
    for number in range(3):
        if number == 2:
            learner.network.actor[-1].register_forward_hook(lambda module, given, output: output.flip(-1))
        snapshots.take()
        snapshots.drop([])
        obs = torch.ones(1, 2)
        assert torch.equal(snapshots.get_network(number).policy(obs, (), None)[0], learner.network.policy(obs, (), None)[0]), number
