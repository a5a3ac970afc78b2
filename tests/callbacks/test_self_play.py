"""The ratings of a policy that plays against its past selves."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_rl import SettingError
from lightning_rl.callbacks.self_play import SelfPlay
from lightning_rl.data.self_play import NEWEST, Game, SelfPlayConfig, Snapshots


def made(**settings):
    callback = SelfPlay(SelfPlayConfig(**settings), Snapshots(nn.Linear(1, 1), 3))
    callback.elos[0] = callback.elo
    callback.snapshots.take()
    return callback


def test_a_win_against_an_equal_moves_half_a_point_to_the_winner():
    callback = made()
    callback.rate(Game(0, 1.0))
    assert (callback.elo, callback.elos[0]) == (1200.5, 1199.5)


def test_a_game_against_the_newest_weights_moves_no_rating():
    callback = made()
    callback.rate(Game(NEWEST, 1.0))
    assert callback.elo == 1200 and callback.run_metrics() == {"self_play/elo": 1200.0, "self_play/snapshots": 1.0}


def test_a_fixed_opponent_keeps_its_rating():
    callback = made(opponents=["random"])
    callback.rate(Game(NEWEST - 1, 1.0))
    assert (callback.elo, callback.elos[NEWEST - 1]) == (1200.5, 1200.0)
    metrics = callback.run_metrics()
    assert metrics["self_play/win_rate/random"] == 1.0 and "self_play/win_rate" not in metrics


def test_win_and_draw_rates_are_those_since_the_last_row():
    callback = made()
    for result in (1.0, 1.0, 0.5, 0.0):
        callback.rate(Game(0, result))
    metrics = callback.run_metrics()
    assert (metrics["self_play/win_rate"], metrics["self_play/draw_rate"]) == (0.5, 0.25)
    callback.rate(Game(0, 0.0))
    assert callback.run_metrics()["self_play/win_rate"] == 0.0


def test_three_wins_in_four_games_are_191_points_once_there_are_many():
    callback = made()
    for _ in range(2_500):
        for result in (1.0, 1.0, 0.5, 0.5):
            callback.rate(Game(0, result))
    metrics = callback.run_metrics()
    assert metrics["self_play/rating"] == pytest.approx(1200 + 190.85, abs=0.2)
    assert metrics["self_play/rating_margin"] == pytest.approx(7.86, abs=0.05)


def test_what_is_saved_comes_back():
    callback = made(opponents=["random"])
    for game in (Game(0, 1.0), Game(NEWEST - 1, 0.5)):
        callback.rate(game)
    callback.taken_at = 640

    class Run:
        saves_run = True

    callback.run = Run()
    other = SelfPlay(callback.config, Snapshots(nn.Linear(1, 1), 3))
    other.load_state_dict(callback.state_dict())
    assert other.run_metrics() == callback.run_metrics()
    assert (other.elos, other.taken_at, other.snapshots.taken) == (callback.elos, 640, 1)
    assert (
        other.results[""].rows.tolist() == [[1, 0, 1, 1.0], [1, NEWEST - 1, 1, 0.5]]
        and other.results[""].places == callback.results[""].places
    )
    weights = callback.snapshots.weights[0]["weight"]
    assert torch.equal(other.snapshots.weights[0]["weight"], weights)


@pytest.mark.parametrize("name", [(), ("",)], ids=["0.1.0", "with_behavior"])
def test_a_state_whose_scores_are_a_list_continues(name):
    callback = made()

    class Run:
        saves_run = True

    callback.run = Run()
    for result in (1.0, 0.5, 1.0):
        callback.rate(Game(0, result))
    other = SelfPlay(callback.config, Snapshots(nn.Linear(1, 1), 3))
    other.load_state_dict({**callback.state_dict(), "scores": [(1, 0, 3, 2.5, *name)]})
    assert other.run_metrics() == callback.run_metrics()
    other.rate(Game(0, 0.0))
    assert other.state_dict()["scores"][""].tolist() == [[1, 0, 4, 2.5]]


@pytest.mark.parametrize("row", [(2, 0, 3, 2.5), (1, 2, 3, 2.5), (1, NEWEST - 1, 3, 2.5), (1 << 50, 0, 3, 2.5)], ids=str)
def test_results_of_players_that_the_checkpoint_lacks_are_one_line(row):
    callback = made()

    class Run:
        saves_run = True

    callback.run = Run()
    other = SelfPlay(callback.config, Snapshots(nn.Linear(1, 1), 3))
    other.load_state_dict({**callback.state_dict(), "scores": {"": torch.tensor([row], dtype=torch.float64)}})
    with pytest.raises(SettingError, match="results of players that it lacks"):
        other.on_train_start(None, SimpleNamespace(run=SimpleNamespace(algorithms={"": None})))


def test_scores_are_saved_as_one_tensor_for_each_behavior_whatever_the_number_of_games():
    callback = made()
    for number in range(300):
        callback.snapshots.taken = number + 1
        callback.rate(Game(number, 1.0))
    (scores,) = callback.state_dict()["scores"].values()
    assert scores.shape == (300, 4) and scores.dtype == torch.float64


def test_a_file_of_weights_alone_holds_no_snapshots():
    callback = made()

    class Run:
        saves_run = False

    callback.run = Run()
    assert callback.state_dict()["snapshots"] == {}


DAMAGES = [
    *(
        {"elo": "high"},
        {"elo": math.inf},
        {"elos": {0: math.nan}},
        {"scores": [1]},
        {"scores": [(0, 1, 3, math.nan)]},
        {"scores": {"": torch.zeros(1, 3)}},
        {"taken": 2},
    ),
    *({"games": [([], 1.0)]}, {"games": [(0, 1.5)]}, {"games": [(0, 1.0, [])]}),
    *({"snapshots": {0: {"weight": [[1.0, 2.0]]}}}, {"snapshots": {"abc": {}}}, {"snapshots": {0: {"weight": [[1.0], [2.0, 3.0]]}}}),
    *({"snapshots": {0: {"weight": [[math.nan]], "bias": [0.0]}}}, {"opponents": ["random"]}),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_one_line(damage):
    callback = made()

    class Run:
        saves_run = True

    callback.run = Run()
    with pytest.raises(SettingError, match="self_play"):
        SelfPlay(callback.config, Snapshots(nn.Linear(1, 1), 3)).load_state_dict({**callback.state_dict(), **damage})


def test_a_game_of_a_behavior_that_is_not_there_is_an_error():
    with pytest.raises(SettingError, match="state of self_play is damaged: a game against 'nobody'"):
        made().rate(Game(0, 1.0, "nobody"))


@pytest.mark.parametrize("value", ["x", math.nan, math.inf, 1e9])
def test_an_initial_elo_that_is_no_usual_number_is_refused(value):
    with pytest.raises(SettingError, match="initial_elo"):
        SelfPlayConfig(initial_elo=value)
