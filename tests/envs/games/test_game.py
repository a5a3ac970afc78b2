"""Games of our own: their rules, in arrays over all copies and as one copy in PettingZoo's form."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.test import api_test, parallel_api_test

from lightning_rl import SettingError
from lightning_rl.envs import games
from lightning_rl.envs.agents.copies import is_packaged
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.games import GAMES
from lightning_rl.envs.games.boards import ConnectFour, TicTacToe
from lightning_rl.envs.games.one_copy import ParallelGame, TurnGame
from lightning_rl.envs.games.small import BiasedRockPaperScissors, KuhnPoker, RockPaperScissors
from lightning_rl.envs.make import find_user_module, make_env, probe_spaces

PREFIX = "lightning_rl.envs.games."
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


# -------------------------------------------------------------------- tic-tac-toe


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


# -------------------------------------------------------------------- connect four


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


# -------------------------------------------------------------------- small games


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env_id", GAMES)
def test_one_copy_keeps_to_the_interface_of_pettingzoo(env_id, capsys):
    cls = GAMES[env_id]
    if cls.in_turn:
        api_test(type("Official", (TurnGame, AECEnv), {})(cls), 200)
    else:
        parallel_api_test(type("Official", (ParallelGame, ParallelEnv), {})(cls), 20)


@pytest.mark.parametrize("env_id", GAMES)
def test_one_copy_is_drawn_as_text_and_as_a_picture(env_id):
    for mode, kind in (("ansi", str), ("rgb_array", np.ndarray)):
        env = make_env(EnvConfig(env_id, kwargs={"render_mode": mode}))
        env.reset(seed=0)
        env.step(env.unwrapped.random_actions(0))
        picture = env.render()
        assert isinstance(picture, kind)
        if mode == "rgb_array":
            assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3


def test_ids_may_stand_in_checkpoints_and_others_of_the_package_may_not():
    assert all(is_packaged(env_id) and find_user_module(env_id) is None for env_id in GAMES)
    assert set(GAMES) == {f"{PREFIX}{name}" for name, value in vars(games).items() if callable(getattr(value, "func", None))}
    assert not is_packaged(f"{PREFIX}judges") and not is_packaged(f"{PREFIX}tic_tac_toe.x")
    with pytest.raises(SettingError, match=r"there is no 'tictactoe' in .*did you mean tic_tac_toe"):
        probe_spaces(EnvConfig(f"{PREFIX}tictactoe"))
    with pytest.raises(SettingError, match="cannot be built"):
        probe_spaces(EnvConfig(f"{PREFIX}connect_four", kwargs={"height": 8}))


def test_spaces_are_those_of_a_player():
    board, cards = probe_spaces(EnvConfig(f"{PREFIX}connect_four")), probe_spaces(EnvConfig(f"{PREFIX}kuhn_poker"))
    assert board.masked and board.one_learns and board.agents == ("player_0", "player_1") and board.observation.shape == (6, 7, 2)
    assert not cards.masked and cards.action.n == 2 and not probe_spaces(EnvConfig(f"{PREFIX}rock_paper_scissors")).one_learns


@pytest.mark.thorough
def test_pettingzoo_is_not_needed():
    code = "import sys; sys.modules['pettingzoo'] = None\n" + (
        "from lightning_rl.envs.config import EnvConfig; from lightning_rl.envs.make import probe_spaces\n"
        f"print(*[probe_spaces(EnvConfig({PREFIX!r} + name)).action.n for name in ('tic_tac_toe', 'rock_paper_scissors')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "9 3"
