"""Small games whose equilibria are known: rock-paper-scissors and Kuhn poker."""

from itertools import permutations
from typing import ClassVar

import numpy as np
from gymnasium.spaces import Box

from lightning_rl.envs.games.game import Game


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
