"""Rock-paper-scissors and Kuhn poker: what they pay and show."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_rl.envs.games.small import BiasedRockPaperScissors, KuhnPoker, RockPaperScissors
from tests.envs.games.test_boards import play, seen

PASS, BET = 0, 1


JACK, QUEEN, KING = range(3)


@pytest.mark.parametrize(
    ("cls", "table"),
    [(RockPaperScissors, [[0, -1, 1], [1, 0, -1], [-1, 1, 0]]), (BiasedRockPaperScissors, [[0, -1, 2], [1, 0, -1], [-2, 1, 0]])],
)
def test_rock_paper_scissors_pays_by_its_table_and_is_over(cls, table):
    game, moves = cls(9), np.indices((3, 3)).reshape(2, 9).T
    game.reset(seed=0)
    rewards = game.step(game.all, moves)
    assert rewards[:, 0].reshape(3, 3).tolist() == table and (rewards[:, 1] == -rewards[:, 0]).all() and game.over.all()
    assert seen(game).tolist() == [[1]] * 9 and game.draw_text(1) == "rock paper"


@pytest.mark.parametrize(
    ("moves", "paid"),
    [
        ([PASS, PASS], 1),
        ([PASS, BET, PASS], -1),
        ([PASS, BET, BET], 2),
        ([BET, PASS], 1),
        ([BET, BET], 2),
    ],
)
def test_kuhn_poker_pays_what_was_staked(moves, paid):
    game = KuhnPoker(1)
    higher = KuhnPoker.deals.tolist().index([KING, QUEEN])
    game.open(game.all, np.array([higher]))
    assert play(game, *moves) == ([0] * (len(moves) - 1) + [paid], True)
    game.open(game.all, np.array([KuhnPoker.deals.tolist().index([JACK, QUEEN])]))
    folded = moves in ([PASS, BET, PASS], [BET, PASS])
    assert play(game, *moves) == ([0] * (len(moves) - 1) + [paid if folded else -paid], True)


def test_kuhn_players_see_their_card_and_the_moves_and_the_deals_are_equally_likely():
    game = KuhnPoker(6)
    game.open(game.all, game.all)
    assert game.cards.tolist() == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]]
    assert seen(game)[3].tolist() == [0, 1, 0, 0, 0, 0, 0]
    game.step(game.all, np.zeros(6, int))
    game.step(game.all, np.ones(6, int))
    assert seen(game)[3].tolist() == [0, 1, 0, 1, 0, 0, 1] and seen(game, 1)[3].tolist() == [0, 0, 1, 1, 0, 0, 1]
    many = KuhnPoker(6000)
    many.reset(seed=0)
    counts = np.unique(many.cards @ [3, 1], return_counts=True)[1]
    assert len(counts) == 6 and counts.min() > 900 and counts.max() < 1100
    assert many.draw_text(0).replace("J", "Q").replace("K", "Q") == "Q Q:"
