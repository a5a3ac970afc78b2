"""Games of two players: tic-tac-toe, connect four, and two with known equilibria, rock-paper-scissors and Kuhn poker."""

from itertools import permutations
from typing import ClassVar

import numpy as np
from gymnasium.spaces import Box

from lightning_rl.envs.games.game import Game


class Board(Game):
    """A board of H x W on which two players place stones in turn; `length` stones in a row win. Rewards: 1 and -1, or 0 for a draw.

    Observations are `[H, W, 2]`: the player's own stones and the other's. The first row is the top.

    A player's stones are the bits of an integer, column after column from the bottom up, with an empty row above each column, so that no
    row of stones runs from the top of one column into the next. Neighbours are then 1 (above), H + 1 (beside), H and H + 2 (diagonal) bits
    apart.

    Attributes:
        stones: stones of each player, as bits, `[E, 2]`.
    """

    masked = True
    arrays = ("over", "mover", "stones")
    height: ClassVar[int]
    width: ClassVar[int]
    length: ClassVar[int]
    cells: ClassVar[np.ndarray]
    """Bit index of each cell, `[H, W]`."""
    full: ClassVar[int]
    """Bits of a full board."""
    neighbours: ClassVar[np.ndarray]
    """Distances in bits of neighbours in the four directions."""

    def __init_subclass__(cls) -> None:
        rows, columns = np.mgrid[: cls.height, : cls.width]
        cls.cells = columns * (cls.height + 1) + cls.height - 1 - rows
        cls.full = int((1 << cls.cells).sum())
        cls.neighbours = np.array([1, cls.height, cls.height + 1, cls.height + 2])
        cls.observation = Box(0, 1, (cls.height, cls.width, 2), np.int8)

    def __init__(self, num_copies: int) -> None:
        super().__init__(num_copies)
        self.stones = np.zeros((num_copies, 2), dtype=np.int64)

    @classmethod
    def place(cls, occupied: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Return the bits of the stones that actions place on boards with the stones `occupied`; 0 for illegal actions."""
        raise NotImplementedError

    @classmethod
    def legal(cls, occupied: np.ndarray) -> np.ndarray:
        """Return which actions are legal, `[K, M]`."""
        return cls.place(occupied[:, None], np.arange(cls.num_actions)) > 0

    @classmethod
    def wins(cls, stones: np.ndarray) -> np.ndarray:
        """Return whether the stones of one player, an array of any shape, contain enough in a row."""
        rows = stones[..., None]
        for _ in range(cls.length - 1):  # starts of rows of two, then of three, …
            rows = rows & (rows >> cls.neighbours)
        return np.asarray(rows.any(-1))

    @classmethod
    def read(cls, observation: np.ndarray) -> np.ndarray:
        """Return the stones of both players in observations `[K, H, W, 2]` as bits, `[K, 2]`."""
        return (observation.astype(np.int64) << cls.cells[:, :, None]).sum((1, 2))

    def _play(self, copies: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mover, stones = self.mover[copies], self.stones[copies]
        occupied = stones.sum(1)
        placed = self.place(occupied, actions)
        if not placed.all() or self.over[copies].any():
            k = int(((placed == 0) | self.over[copies]).argmax())
            raise ValueError(f"{self.name}: action {actions[k]} is illegal")
        rows = np.arange(len(copies))
        mover_stones = self.stones[copies, mover] = stones[rows, mover] | placed
        won = self.wins(mover_stones)
        rewards = np.zeros((len(copies), 2))
        rewards[rows, mover] += won
        rewards[rows, 1 - mover] -= won
        return rewards, won | (occupied | placed == self.full)

    def observe(self, copies: np.ndarray, agents: np.ndarray) -> np.ndarray:
        stones = np.stack((self.stones[copies, agents], self.stones[copies, 1 - agents]), 1)
        return (stones[:, None, None] >> self.cells[:, :, None] & 1).astype(np.int8)

    def masks(self, copies: np.ndarray, agents: np.ndarray) -> np.ndarray:
        may_move = (self.mover[copies] == agents) & ~self.over[copies]
        return self.legal(self.stones[copies].sum(1)) & may_move[:, None]

    def are_possible(self) -> np.ndarray:
        (first, second), numbers = self.stones.T, np.bitwise_count(self.stones).astype(int)
        inside = (((first | second) & ~self.full) == 0) & (first & second == 0)
        won = self.wins(self.stones)
        over = won.any(1) | (first | second == self.full)
        moved_in_turn = (numbers[:, 0] - numbers[:, 1] == self.mover) & ~won[self.all, self.mover]  # nobody moves after a win
        return inside & moved_in_turn & (over == self.over)

    def draw_text(self, copy: int) -> str:
        first, second = (self.stones[copy, :, None, None] >> self.cells & 1).astype(bool)
        return "\n".join(" ".join(row) for row in np.where(first, "X", np.where(second, "O", ".")))


class TicTacToe(Board):
    """Tic-tac-toe. Action 3 · row + column, from the top left; the first player is X."""

    name = "tic_tac_toe"
    height = width = length = 3
    num_actions = 9

    @classmethod
    def place(cls, occupied: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return (1 << cls.cells.ravel()[actions]) & ~occupied


class ConnectFour(Board):
    """Connect four, 6 x 7. The action is a column, from the left."""

    name = "connect_four"
    height, width, length = 6, 7, 4
    num_actions = 7

    @classmethod
    def place(cls, occupied: np.ndarray, actions: np.ndarray) -> np.ndarray:
        ground = 1 << cls.cells[-1][actions]
        # adding to the lowest cell carries to the first empty one; a full column has none
        return (occupied + ground) & ~occupied & ground * ((1 << cls.height) - 1)

    def are_possible(self) -> np.ndarray:
        occupied, ground = self.stones[:, 0] | self.stones[:, 1], (1 << self.cells[-1]).sum()
        return super().are_possible() & (occupied & (occupied + ground) == 0)  # adding carries to the first empty cell of each column


class RockPaperScissors(Game):
    """Both players move once, simultaneously. The equilibrium is (⅓, ⅓, ⅓).

    Observations are `[1]`, always 1. Actions: rock, paper, scissors.
    """

    name = "rock_paper_scissors"
    in_turn = False
    num_actions = 3
    observation = Box(0, 1, (1,), np.float32)
    arrays = ("over", "mover", "moves")
    payoff: ClassVar[np.ndarray] = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
    """Reward of an action against another, `[own, other]`."""

    def __init__(self, num_copies: int) -> None:
        super().__init__(num_copies)
        self.moves = np.zeros((num_copies, 2), dtype=np.int64)
        """Actions of the last game, for rendering."""

    def _play(self, copies: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.moves[copies] = actions
        reward = self.payoff[actions[:, 0], actions[:, 1]]
        return np.stack((reward, self.payoff[actions[:, 1], actions[:, 0]]), 1), np.ones(len(copies), dtype=bool)

    def observe(self, copies: np.ndarray, agents: np.ndarray) -> np.ndarray:
        return np.ones((len(copies), 1), dtype=np.float32)

    def are_possible(self) -> np.ndarray:
        return np.asarray(np.isin(self.moves, range(self.num_actions)).all(1))

    def draw_text(self, copy: int) -> str:
        return " ".join(("rock", "paper", "scissors")[move] if self.over[copy] else "?" for move in self.moves[copy])


class BiasedRockPaperScissors(RockPaperScissors):
    """Rock against scissors counts double: the equilibrium is (¼, ½, ¼)."""

    name = "biased_rock_paper_scissors"
    payoff = np.array([[0.0, -1, 2], [1, 0, -1], [-2, 1, 0]])


class KuhnPoker(Game):
    """Kuhn poker (Kuhn 1950): both players pay 1 and get one of the cards jack, queen, king; the higher card wins.

    Actions: pass (0), or bet another 1 (1), which the other must call with a bet or lose. After two passes the cards are shown.
    Observations are `[7]`: the player's own card, and for each of the first two moves whether it was a pass and whether it was a bet.
    """

    name = "kuhn_poker"
    num_actions = 2
    observation = Box(0, 1, (7,), np.float32)
    deals: ClassVar[np.ndarray] = np.array(list(permutations(range(3), 2)))
    num_openings = len(deals)
    arrays = ("over", "mover", "cards", "moves", "count")

    def __init__(self, num_copies: int) -> None:
        super().__init__(num_copies)
        self.cards = np.zeros((num_copies, 2), dtype=np.int64)
        """Card of each player: 0 is the jack, 1 the queen, 2 the king."""
        self.moves = np.zeros((num_copies, 3), dtype=np.int64)
        """Moves so far: 1 is a pass, 2 a bet, 0 no move yet."""
        self.count = np.zeros(num_copies, dtype=np.int64)
        """Number of moves so far."""

    def _begin(self, copies: np.ndarray, openings: np.ndarray) -> None:
        self.cards[copies] = self.deals[openings]

    def _play(self, copies: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.moves[copies, self.count[copies]] = actions + 1
        self.count[copies] += 1
        moves, count, mover = self.moves[copies], self.count[copies], self.mover[copies]
        bet, answered = (moves == 2).any(1), count > 1
        last, before = actions, moves[np.arange(len(copies)), count - 2] - 1
        over = answered & ((last == 0) | (before == 1))  # two moves end the game except pass, bet
        folded = over & (last == 0) & (before == 1)
        first_wins = np.where(folded, mover == 1, self.cards[copies, 0] > self.cards[copies, 1])
        stake = np.where(over, np.where(bet & ~folded, 2.0, 1.0), 0.0)
        reward = np.where(first_wins, stake, -stake) * over
        return np.stack((reward, 0 - reward), 1), over

    def observe(self, copies: np.ndarray, agents: np.ndarray) -> np.ndarray:
        card = self.cards[copies, agents][:, None] == np.arange(3)
        moves = (self.moves[copies, :2, None] == np.array([1, 2])).reshape(-1, 4)
        return np.concatenate((card, moves), 1).astype(np.float32)

    def are_possible(self) -> np.ndarray:
        dealt = (self.cards[:, None] == self.deals).all(2).any(1)
        moved = np.where(np.arange(3) < self.count[:, None], np.isin(self.moves, (1, 2)), self.moves == 0).all(1)
        to_answer = (self.count == 2) & (self.moves[:, :2] == (1, 2)).all(1)
        goes_on = (self.count < 2) | to_answer
        return dealt & moved & (self.count >= 0) & (self.mover == self.count % 2) & (self.over != goes_on)

    def draw_text(self, copy: int) -> str:
        cards = " ".join("JQK"[card] for card in self.cards[copy])
        return f"{cards}: {' '.join(('pass', 'bet')[move - 1] for move in self.moves[copy] if move)}".rstrip()
