"""Exact judges of games: golden numbers, equilibria, and players that cannot be beaten."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from lightning_rl.envs.games.judges import GameTree, best_moves, exploitability, find_tree, nash_conv
from lightning_rl.envs.games.players import minimax, random_legal, two_ply
from lightning_rl.envs.games.two_players import ConnectFour, TicTacToe

PREFIX = "lightning_rl.envs.games."
TIC_TAC_TOE, KUHN = f"{PREFIX}tic_tac_toe", f"{PREFIX}kuhn_poker"


def constant(*probs):
    return lambda obs, mask: np.tile(probs, (len(obs), 1))


def uniform(obs, mask):
    return mask / mask.sum(1, keepdims=True)


def optimal(obs, mask):
    return uniform(obs, best_moves(obs, mask))


def equilibrium(alpha):
    """Kuhn's equilibria, by how often the first player bets with a jack."""

    def policy(obs, mask):
        first = {0: alpha, 1: 0, 2: 3 * alpha}
        bets = []
        for row in obs.astype(int).tolist():
            card, moves = row[:3].index(1), (row[3:5], row[5:])
            if moves[0] == [0, 0]:
                bets.append(first[card])
            elif moves[1] == [0, 0]:
                bets.append({0: 1 / 3, 1: 0, 2: 1}[card] if moves[0] == [1, 0] else {0: 0, 1: 1 / 3, 2: 1}[card])
            else:
                bets.append({0: 0, 1: alpha + 1 / 3, 2: 1}[card])
        return np.stack((1 - np.array(bets), bets), 1)

    return policy


def match(game, first, second, generator):
    """Results of the first player of all copies."""
    game.reset(seed=0)
    results = np.zeros(game.num_copies)
    for t in range(game.height * game.width):
        copies = np.flatnonzero(~game.over)
        mover = np.full(len(copies), t % 2)
        obs, mask = game.observe(copies, mover), game.masks(copies, mover)
        results[copies] += game.step(copies, (first, second)[t % 2](obs, mask, generator))[:, 0]
    return results


def test_tic_tac_toe_has_4520_states_in_which_someone_moves():
    tree = find_tree(TIC_TAC_TOE)
    assert tree.num_states == 4520 and sum((level.mover == 0).sum() for level in tree.levels) == 2423
    assert [len(level.mover) for level in tree.levels][:3] == [1, 9, 72]


def test_random_tic_tac_toe_is_as_exploitable_as_it_should_be():
    tree = find_tree(TIC_TAC_TOE)
    assert_allclose(tree.outcomes(uniform), [0.584921, 0.126984, 0.288095], atol=1e-6)
    assert_allclose(tree.best_responses(uniform), [0.994792, 0.924868], atol=1e-6)
    assert_allclose(nash_conv(TIC_TAC_TOE, uniform), 1.919660, atol=1e-6)


def test_perfect_tic_tac_toe_is_a_draw_and_cannot_be_exploited():
    tree = find_tree(TIC_TAC_TOE)
    assert_allclose(tree.outcomes(optimal), [0, 1, 0], atol=1e-12)
    assert nash_conv(TIC_TAC_TOE, optimal) == 0


def test_no_player_beats_the_minimax_player():
    game, generator = TicTacToe(2000), np.random.default_rng(0)
    first, second = match(game, minimax, random_legal, generator), match(game, random_legal, minimax, generator)
    assert first.min() == 0 and first.mean() > 0.9 and second.max() == 0 and second.mean() < -0.7
    assert not match(game, minimax, minimax, generator).any()


def test_the_minimax_player_makes_any_of_the_best_moves():
    game = TicTacToe(1)
    for move in (0, 8):  # after opposite corners X wins by any other corner
        game.step(game.all, np.array([move]))
    obs, mask = game.observe(game.all, game.mover), game.masks(game.all, game.mover)
    assert np.flatnonzero(best_moves(obs, mask)[0]).tolist() == [2, 6]
    moves = minimax(obs.repeat(100, 0), mask.repeat(100, 0), np.random.default_rng(0))
    assert set(moves.tolist()) == {2, 6}


@pytest.mark.parametrize(("probs", "expected"), [((0.5, 0.5), 11 / 12), ((1, 0), 2)])
def test_kuhn_poker_has_its_golden_numbers(probs, expected):
    assert find_tree(KUHN).num_states == 24 and sum(level.information_set.max() + 1 for level in find_tree(KUHN).levels) == 12
    assert_allclose(nash_conv(KUHN, constant(*probs)), expected)


@pytest.mark.parametrize("alpha", [0, 0.2, 1 / 3])
def test_the_equilibria_of_kuhn_poker_cannot_be_exploited_and_pay_the_second_player(alpha):
    assert_allclose(nash_conv(KUHN, equilibrium(alpha)), 0, atol=1e-12)
    assert_allclose(find_tree(KUHN).best_responses(equilibrium(alpha)), [-1 / 18, 1 / 18])


def test_kuhn_poker_without_bluffs_that_fit_can_be_exploited():
    assert nash_conv(KUHN, equilibrium(0.3)) < 1e-9 < nash_conv(KUHN, equilibrium(0.34))


@pytest.mark.parametrize(
    ("game", "probs", "expected"),
    [
        *[("rock_paper_scissors", np.eye(3)[k], 1) for k in range(3)],
        ("rock_paper_scissors", [1 / 3] * 3, 0),
        ("biased_rock_paper_scissors", [1 / 3] * 3, 1 / 3),
        ("biased_rock_paper_scissors", [0.25, 0.5, 0.25], 0),
        *[("biased_rock_paper_scissors", np.eye(3)[k], most) for k, most in enumerate((1, 1, 2))],
    ],
)
def test_rock_paper_scissors_is_exploited_by_the_best_answer(game, probs, expected):
    assert_allclose(exploitability(PREFIX + game, constant(*probs)), expected, atol=1e-12)
    assert_allclose(nash_conv(PREFIX + game, constant(*probs)), 2 * expected, atol=1e-12)


def test_a_policy_that_gives_no_probabilities_of_legal_moves_is_refused():
    with pytest.raises(ValueError, match="do not sum to 1"):
        nash_conv(TIC_TAC_TOE, constant(*[1 / 9] * 9))


@pytest.mark.thorough
def test_connect_four_is_too_large_to_enumerate():
    with pytest.raises(ValueError, match="too many states"):
        GameTree(ConnectFour)


def look(*moves):
    game = ConnectFour(1)
    for move in moves:
        game.step(game.all, np.array([move]))
    return game.observe(game.all, game.mover), game.masks(game.all, game.mover)


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([0, 6, 0, 6, 0, 6], {0}),  # wins, though the other threatens too
        ([0, 6, 0, 6, 0], {0}),  # blocks
        ([1, 6, 2, 6, 3], {0, 4}),  # one of two threats
        ([3, 3, 3, 3, 3, 3], {0, 1, 2, 4, 5, 6}),  # any legal move
    ],
)
def test_the_two_ply_player_wins_else_blocks_else_moves_at_random(moves, expected):
    obs, mask = look(*moves)
    made = two_ply(obs.repeat(200, 0), mask.repeat(200, 0), np.random.default_rng(0))
    assert set(made.tolist()) == expected


def test_the_two_ply_player_beats_a_random_one():
    results = match(ConnectFour(500), two_ply, random_legal, np.random.default_rng(0))
    assert results.mean() > 0.9
