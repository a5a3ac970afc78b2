"""Ratings of players from game results: Elo's, updated after each game, and Bradley and Terry's, fitted to all games.

Elo (1978), *The Rating of Chessplayers*; Bradley & Terry (1952), *Rank analysis of incomplete block designs*. A result is 1 for a win, ½
for a draw and 0 for a loss; a difference of 400 rating points means odds of 10 to 1.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np

Player = TypeVar("Player", int, tuple[str, int])
POINTS = 400 / math.log(10)
"""Rating points of one unit of log-odds."""
PRIOR_POINTS = 800.0
"""Standard deviation of the prior around the anchors; it keeps the rating of a player who won all games finite."""
NEWTON_STEPS = 50


def expected_result(own: float, other: float) -> float:
    """Return the expected result of a player rated `own` against one rated `other`: 1 / (1 + 10^((other − own) / 400))."""
    return logistic((own - other) / POINTS)


def logistic(x: float) -> float:
    """Return 1 / (1 + e^−x), for any x."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def elo_change(own: float, other: float, result: float) -> float:
    """Return what a game adds to a player's rating and subtracts from the other's: result − expected (K = 1)."""
    return result - expected_result(own, other)


class Score(NamedTuple):
    """The games of one player against another: their number, and the sum of results (a draw counts ½)."""

    games: int
    points: float

    def add(self, result: float) -> "Score":
        """Return the score after another game."""
        return Score(self.games + 1, self.points + result)


class Rating(NamedTuple):
    """A fitted rating, and half the width of its 95 % interval."""

    value: float
    margin: float


def fit_ratings(scores: Mapping[tuple[Player, Player], Score], anchors: Mapping[Player, float]) -> dict[Player, Rating]:
    """Fit the most likely ratings to all results; the order of games does not matter.

    The log-odds of a win are the difference of two ratings. Each free rating has a wide Gaussian prior around the mean of the anchors.

    Args:
        scores: of player i against player j, keyed by (i, j).
        anchors: players with a fixed rating, at least one, which fix the scale.
    """
    players = sorted({player for pair in scores for player in pair} - anchors.keys())
    centre = sum(anchors.values()) / len(anchors)
    place = {player: row for row, player in enumerate(players)}
    # ratings of anchors, as log-odds relative to the center
    fixed = {player: (value - centre) / POINTS for player, value in anchors.items()}
    theta, precision = np.zeros(len(players)), (POINTS / PRIOR_POINTS) ** 2
    hessian = np.eye(len(players)) * precision
    for _ in range(NEWTON_STEPS if players else 0):
        gradient, hessian = -precision * theta, np.eye(len(players)) * precision
        for (one, two), score in scores.items():
            own, other = (theta[place[each]] if each in place else fixed[each] for each in (one, two))
            chance = logistic(own - other)
            slope, curve = score.points - score.games * chance, score.games * chance * (1 - chance)
            for each, sign in ((one, 1), (two, -1)):
                if each in place:
                    gradient[place[each]] += sign * slope
                    hessian[place[each], place[each]] += curve
            if one in place and two in place:
                hessian[place[one], place[two]] -= curve
                hessian[place[two], place[one]] -= curve
        step = np.linalg.solve(hessian, gradient)
        theta += np.clip(step, -2.0, 2.0)
        if np.abs(step).max() < 1e-9:
            break
    margins = 1.96 * POINTS * np.sqrt(np.diag(np.linalg.inv(hessian))) if players else theta
    ratings = {player: Rating(centre + POINTS * float(theta[row]), float(margins[row])) for player, row in place.items()}
    return {**ratings, **{player: Rating(value, 0.0) for player, value in anchors.items()}}
