"""Connect Four for one player: PettingZoo's game, judged by looking for four in a row."""

from __future__ import annotations

import importlib
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from lightning_rl import PPO
from tests.fitting import fit, tiny

ID = "lightning_rl/ConnectFour-v0"
GAMES = range(60)


def make():
    return gym.make(ID, disable_env_checker=True)


def has_four(pieces):
    """Whether four pieces lie in a row, a column or a diagonal."""
    steps = ((0, 1), (1, 0), (1, 1), (1, -1))
    lines = [[(r + k * down, c + k * right) for k in range(4)] for r in range(6) for c in range(7) for down, right in steps]
    return any(all(r < 6 and 0 <= c < 7 and pieces[r, c] for r, c in line) for line in lines)


def play(env, seed, choose):
    """All observations and rewards of a game."""
    obs, _ = env.reset(seed=seed)
    seen, rewards, terminated = [obs], [], False
    while not terminated:
        obs, reward, terminated, truncated, info = env.step(choose(obs))
        seen.append(obs)
        rewards.append(reward)
        assert not truncated and info == {}
    return seen, rewards


def any_legal(rng):
    """Plays any column that is not full."""
    return lambda obs: int(rng.choice(np.flatnonzero(obs["action_mask"])))


def test_it_keeps_gymnasiums_rules():
    check_env(make().unwrapped, skip_render_check=True)


@pytest.mark.thorough
def test_who_has_four_in_a_row_wins_and_nothing_is_paid_before():
    env, rng, ends = make(), np.random.default_rng(0), set()
    for seed in GAMES:
        seen, rewards = play(env, seed, any_legal(rng))
        boards = [obs["observation"] for obs in seen]
        assert not any(has_four(board[..., side]) for board in boards[:-1] for side in (0, 1))
        ours, theirs = (has_four(boards[-1][..., side]) for side in (0, 1))
        assert rewards == [0.0] * (len(rewards) - 1) + [float(ours) - float(theirs)] and not (ours and theirs)
        assert ours or theirs or boards[-1].sum() == 42
        ends.add(rewards[-1])
    assert ends >= {-1, 1}


def test_pieces_fall_upon_each_other_and_both_sides_take_turns():
    env, rng = make(), np.random.default_rng(1)
    for seed in GAMES:
        for obs in play(env, seed, any_legal(rng))[0][:-1]:
            board = obs["observation"]
            filled, pieces = board.sum(-1), board.sum((0, 1))
            assert (np.diff(filled, axis=0) >= 0).all() and filled.max() <= 1  # nothing hangs in the air, and no place is taken twice
            assert pieces[1] - pieces[0] in (0, 1)
            assert (obs["action_mask"] == (filled[0] == 0)).all()


def test_the_opponent_begins_about_half_of_the_games_and_the_seed_decides_which():
    env = make()
    begins = [int(env.reset(seed=seed)[0]["observation"][..., 1].sum()) for seed in range(100)]
    assert set(begins) == {0, 1} and 35 <= sum(begins) <= 65
    assert begins == [int(env.reset(seed=seed)[0]["observation"][..., 1].sum()) for seed in range(100)]


def test_four_in_a_column_win_unless_the_opponent_is_in_the_way():
    env = make()
    returns = [
        sum(play(env, seed, lambda obs: 3 if obs["action_mask"][3] else any_legal(np.random.default_rng(0))(obs))[1]) for seed in GAMES
    ]
    assert returns.count(1.0) > 40  # of 60: a piece of the other's in one of four turns prevents it


def test_a_piece_in_a_full_column_loses_at_once_and_changes_nothing():
    env = make()
    for seed in GAMES:
        obs, _ = env.reset(seed=seed)
        for turn in range(7):
            before, full = obs, not obs["action_mask"][turn % 2]
            obs, reward, terminated, _, _ = env.step(turn % 2)
            if full:
                assert (reward, terminated) == (-1.0, True) and (obs["observation"] == before["observation"]).all()
                return
            if terminated:
                break
    pytest.fail("no column was ever full")


def test_it_imports_nothing_that_pettingzoo_deprecates(monkeypatch, recwarn):
    for name in [name for name in sys.modules if name.partition(".")[0] == "pettingzoo"] + ["lightning_rl.envs.examples"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("lightning_rl.envs.examples")
    assert "pettingzoo" in sys.modules and [str(each.message) for each in recwarn if each.category is DeprecationWarning] == []


@pytest.mark.thorough
def test_a_policy_learns_from_it():
    model = tiny(PPO, ID)
    fit(model)
    assert model.updates == 24
