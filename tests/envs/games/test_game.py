"""Games of our own: their rules, in arrays over all copies and as one copy in PettingZoo's form."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_rl.envs.games import GAMES
from lightning_rl.envs.games.two_players import ConnectFour, KuhnPoker, RockPaperScissors, TicTacToe

JACK, QUEEN, KING = range(3)


# -------------------------------------------------------------------- tic-tac-toe


# -------------------------------------------------------------------- connect four


# -------------------------------------------------------------------- small games


# -------------------------------------------------------------------- copies, and one of them


@pytest.mark.parametrize("cls", GAMES.values(), ids=list(GAMES))
def test_a_game_goes_on_from_its_state_as_the_one_that_was_saved(cls):
    def go_on(game, times):
        made, generator = [], np.random.default_rng(5)
        for _ in range(times):
            shape = (game.num_copies,) if cls.in_turn else (game.num_copies, 2)
            actions = generator.integers(cls.num_actions, size=shape)
            if cls.masked:
                mask = game.masks(game.all, game.mover)
                actions = np.where(mask, generator.random(mask.shape), -1).argmax(1)
            made.append((game.step(game.all, actions), game.observe(game.all, game.mover), game.over.copy()))
            assert game.are_possible().all()
            game.reset(np.flatnonzero(game.over))
        return made

    saved, other = cls(5), cls(5)
    saved.reset(seed=3)
    go_on(saved, 7)
    other.set_state(saved.get_state())
    for left, right in zip(go_on(saved, 20), go_on(other, 20), strict=True):
        assert all(np.array_equal(one, another) for one, another in zip(left, right, strict=True))
    with pytest.raises(ValueError, match="shape"):
        cls(4).set_state(saved.get_state())


@pytest.mark.parametrize(
    ("cls", "change"),
    [
        (TicTacToe, {"stones": [0b111_0111_0111, 0b111_0111_0111]}),  # two on each cell
        (TicTacToe, {"stones": [-1, 0]}),
        (TicTacToe, {"stones": [0b1000, 0]}),  # between the columns
        (TicTacToe, {"stones": [1, 0]}),  # the first player has moved and is to move
        (TicTacToe, {"over": True}),
        (TicTacToe, {"stones": [0b111, 0b110_0000], "mover": 1}),  # the game was won, but is not over
        (TicTacToe, {"stones": [0b111, 0b111_0000], "mover": 0, "over": True}),  # the second player moved after the first had won
        (ConnectFour, {"stones": [0b10, 0], "mover": 1}),  # in the air
        (RockPaperScissors, {"moves": [0, 3]}),
        (KuhnPoker, {"cards": [QUEEN, QUEEN]}),
        (KuhnPoker, {"moves": [2, 2, 0], "count": 2}),  # both have bet, which ends the game
        (KuhnPoker, {"moves": [1, 2, 1], "count": 3, "mover": 1}),
        (KuhnPoker, {"moves": [0, 1, 0], "count": 1, "mover": 1}),
        (KuhnPoker, {"count": -1, "mover": 1}),
    ],
)
def test_a_state_that_no_moves_lead_to_is_refused(cls, change):
    game = cls(1)
    game.reset(seed=0)
    state = game.get_state()
    game.set_state(state)
    for name, value in change.items():
        state["arrays"][name][0] = value
    with pytest.raises(ValueError, match="no moves lead to this state"):
        game.set_state(state)
