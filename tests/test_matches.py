"""Matches between policies and scripted players."""

import pytest

import lightning_rl as lrl
from lightning_rl import PPO, SettingError
from lightning_rl.envs.games import tic_tac_toe
from lightning_rl.matches import describe_matches, play_matches
from tests.data.test_opponents import fit, game, last_legal

another_tic_tac_toe = tic_tac_toe
GAME = "lightning_rl.envs.games.tic_tac_toe"
MINIMAX = "lightning_rl.envs.games.players.minimax"


@pytest.mark.thorough
def test_matches_in_two_environments_say_so(tmp_path):
    for name in ("lightning_rl.envs.games.tic_tac_toe", f"{__name__}.another_tic_tac_toe"):
        fit(game(name, max_env_steps=64), tmp_path / name)
    files = [
        next((tmp_path / each).rglob("last.ckpt")) for each in ("lightning_rl.envs.games.tic_tac_toe", f"{__name__}.another_tic_tac_toe")
    ]
    shown = describe_matches(play_matches(files, 4))
    assert (
        f"they were trained in several environments, 1 in lightning_rl.envs.games.tic_tac_toe, 2 in {__name__}.another_tic_tac_toe; a pair"
        in shown
    )
    assert "several environments" not in describe_matches(play_matches([files[0], "random"], 4))


def test_each_of_three_seats_counts_alike():
    model = PPO("tests.agents.InTurn", n_steps=8, batch_size=8)  # the last seat wins by far, the first loses, whoever plays them
    found = lrl.evaluate(model, 6, opponent="random", deterministic=False)
    assert (found["points"], found["win_rate"], found["draw_rate"]) == (0.5, pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_matches_without_a_policy_are_refused():
    with pytest.raises(SettingError, match=r"random and no\.such are none"):
        play_matches(["random", "no.such"])


@pytest.mark.thorough
def test_two_scripted_players_meet_in_matches(tmp_path):
    fit(game(max_env_steps=64), tmp_path)
    matches = play_matches([next(tmp_path.rglob("last.ckpt")), last_legal, MINIMAX, "random"], 20)
    assert {pair: score.games for pair, score in matches.scores.items()} == {(i, j): 20 for i in range(4) for j in range(4) if i != j}
    assert matches.scores[1, 2].points <= 10 <= matches.scores[2, 1].points  # nobody beats perfect play
    assert matches.scores[2, 3].points > 15
