"""Rules, observations and rewards of the games; the boards are those of PettingZoo."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from lightning_rl.envs import games
from lightning_rl.envs.games.two_players import BiasedRockPaperScissors, ConnectFour, KuhnPoker, RockPaperScissors, TicTacToe

PASS, BET = 0, 1
JACK, QUEEN, KING = range(3)


def has_row(board, stone, length):
    """Whether a board has so many stones in a row, looked for in a plain loop."""
    places = {(int(r), int(c)) for r, c in np.argwhere(board == stone)}
    ways = ((0, 1), (1, 0), (1, 1), (1, -1))
    return any(all((r + k * down, c + k * right) in places for k in range(length)) for r, c in places for down, right in ways)


def play(game, *moves):
    """Make moves in the only copy; all rewards of the first player, and whether the game is over."""
    rewards = [game.step(game.all, np.array([move]))[0].tolist() for move in moves]
    assert all(first == -second for first, second in rewards)
    return [first for first, _ in rewards], bool(game.over[0])


def seen(game, agent=0):
    return game.observe(game.all, np.full(game.num_copies, agent))


def random_move(game, generator):
    """Random legal moves in all copies that are not over; their numbers, the moves, and the rewards."""
    copies = np.flatnonzero(~game.over)
    mask = game.masks(copies, game.mover[copies])
    actions = np.where(mask, generator.random(mask.shape), -1).argmax(1)
    return copies, actions, game.step(copies, actions)


def test_three_in_a_row_win_tic_tac_toe():
    game = TicTacToe(1)
    assert play(game, 0, 4, 1, 5) == ([0, 0, 0, 0], False)
    assert game.draw_text(0) == "X X .\n. O O\n. . ."
    assert play(game, 2) == ([1], True)
    game.reset()
    assert play(game, 8, 0, 4, 3, 5, 6) == ([0, 0, 0, 0, 0, -1], True)  # O has the left column


@pytest.mark.parametrize("row", ["012", "345", "678", "036", "147", "258", "048", "246"])
def test_every_row_wins_and_no_other_three_stones_do(row):
    cells = [int(cell) for cell in row]
    stones = TicTacToe.read(np.array([[np.isin(np.arange(9), cells), np.zeros(9)]]).reshape(1, 2, 3, 3).transpose(0, 2, 3, 1))
    assert TicTacToe.wins(stones[:, 0]).all()
    assert not any(TicTacToe.wins(stones[:, 0] & ~TicTacToe.place(np.zeros(1, int), np.array([cell]))).any() for cell in cells)


def test_a_full_board_is_a_draw():
    assert play(TicTacToe(1), 0, 1, 2, 4, 3, 5, 7, 6, 8) == ([0] * 9, True)


def test_a_player_sees_the_own_stones_first_and_may_move_where_nothing_is():
    game = TicTacToe(1)
    play(game, 0, 5)
    assert np.argwhere(seen(game, 0)[0]).tolist() == [[0, 0, 0], [1, 2, 1]]
    assert np.argwhere(seen(game, 1)[0]).tolist() == [[0, 0, 1], [1, 2, 0]]
    both = np.arange(2)
    assert game.masks(both * 0, both).astype(int).tolist() == [[0, 1, 1, 1, 1, 0, 1, 1, 1], [0] * 9]


def test_pieces_fall_to_the_ground_and_full_columns_are_closed():
    game = ConnectFour(1)
    assert play(game, 3, 3, 3, 3, 3, 3, 0) == ([0] * 7, False)
    assert game.draw_text(0).splitlines() == [*[". . . O . . .", ". . . X . . ."] * 2, ". . . O . . .", "X . . X . . ."]
    assert game.masks(game.all, game.mover).tolist() == [[True, True, True, False, True, True, True]]
    with pytest.raises(ValueError, match="action 3 is illegal"):
        play(game, 3)


def test_the_winner_of_connect_four_gets_1_and_the_loser_minus_1():
    assert play(ConnectFour(1), 0, 1, 0, 1, 0, 1, 0) == ([0] * 6 + [1], True)
    assert play(ConnectFour(1), 6, 0, 1, 1, 2, 2, 2, 6, 3, 3, 3, 3)[0][-1] == 0
    assert play(ConnectFour(1), 6, 0, 6, 1, 6, 2, 5, 3) == ([0] * 7 + [-1], True)


def test_every_four_in_a_row_win_and_three_do_not():
    rows = [
        [(r + k * down, c + k * right) for k in range(4)]
        for down, right in ((0, 1), (1, 0), (1, 1), (-1, 1))
        for r in range(6)
        for c in range(7)
        if 0 <= r + 3 * down < 6 and c + 3 * right < 7
    ]
    assert len(rows) == 69
    for row in rows:
        stones = sum(1 << int(ConnectFour.cells[cell]) for cell in row)
        assert ConnectFour.wins(np.array([stones])).all()
        assert not any(ConnectFour.wins(np.array([stones - (1 << int(ConnectFour.cells[cell]))])).any() for cell in row)


@pytest.mark.variants
@pytest.mark.parametrize("cls", [TicTacToe, ConnectFour])
def test_random_games_go_as_a_plain_loop_says(cls):
    game, generator, draws = cls(300), np.random.default_rng(0), 0
    game.reset(seed=0)
    boards = [np.zeros((cls.height, cls.width), int) for _ in game.all]
    for t in range(cls.height * cls.width):
        copies, actions, rewards = random_move(game, generator)
        for e, action, paid in zip(copies, actions, rewards, strict=True):
            board = boards[e]
            row, column = divmod(action, 3) if cls is TicTacToe else (np.flatnonzero(board[:, action] == 0)[-1], action)
            assert board[row, column] == 0
            board[row, column] = 1 + t % 2
            won, full = has_row(board, 1 + t % 2, cls.length), (board > 0).all()
            expected = [0, 0] if not won else [1, -1] if t % 2 == 0 else [-1, 1]
            assert paid.tolist() == expected and game.over[e] == (won or full)
            draws += full and not won
        for agent in range(2):
            mine, others = (np.array([board == 1 + player for board in boards]) for player in (agent, 1 - agent))
            assert np.array_equal(seen(game, agent), np.stack((mine, others), -1))
        legal = np.array([board.ravel() == 0 if cls is TicTacToe else board[0] == 0 for board in boards]) & ~game.over[:, None]
        assert np.array_equal(game.masks(game.all, game.mover), legal)
    assert game.over.all() and draws > 0


@pytest.mark.parametrize(("name", "theirs"), [("tic_tac_toe", "tictactoe_v3"), ("connect_four", "connect_four_v3")])
def test_boards_are_those_of_pettingzoo(name, theirs):
    ours, other = getattr(games, name)(), importlib.import_module(f"pettingzoo.classic.{theirs}").env()
    generator = np.random.default_rng(1)
    for _ in range(10):
        ours.reset(), other.reset()
        while other.agents and not other.last()[2]:
            obs, reward, *_ = other.last()
            mine, paid, *_, info = ours.last()
            assert np.array_equal(obs["observation"], mine) and np.array_equal(obs["action_mask"], info["action_mask"]) and paid == reward
            action = generator.choice(np.flatnonzero(info["action_mask"]))
            ours.step(action), other.step(action)
        assert list(ours.rewards.values()) == list(other.rewards.values()) and all(ours.terminations.values())


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
