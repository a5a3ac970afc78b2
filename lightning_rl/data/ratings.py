"""Ratings of players from game results: Elo's, updated after each game, and Bradley and Terry's, fitted to all games.

Elo (1978), *The Rating of Chessplayers*; Bradley & Terry (1952), *Rank analysis of incomplete block designs*. A result is 1 for a win, ½
for a draw and 0 for a loss; a difference of 400 rating points means odds of 10 to 1.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

POINTS = 400 / math.log(10)
"""Rating points of one unit of log-odds."""
PRIOR_POINTS = 800.0
"""Standard deviation of the prior around the anchors; it keeps the rating of a player who won all games finite."""
FIXED = 1e12
"""Precision of the prior of anchors in log-odds, which holds them in their place."""
NEWTON_STEPS = 50
GROUPS = 64
"""Groups of players whose common shift `Hessian.precondition` solves exactly; fewer players are each a group."""


def expected_result(rating: float, other: float) -> float:
    """Return the expected result of a player against another: 1 / (1 + 10^((other − rating) / 400))."""
    return logistic((rating - other) / POINTS)


def logistic(x: float) -> float:
    """Return 1 / (1 + e^−x), for any x."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def elo_change(rating: float, other: float, result: float) -> float:
    """Return what a game adds to a player's rating and subtracts from the other's: result − expected (K = 1)."""
    return result - expected_result(rating, other)


class Score(NamedTuple):
    """The games of one player against another: their number, and the sum of results (a draw counts ½)."""

    games: int
    points: float


class Results:
    """Sums of the results of players against each other.

    Args:
        rows: of two players, their number of games, and the points of the first, `[N, 4]`; a row for each pair.
    """

    def __init__(self, rows: np.ndarray | None = None) -> None:
        self.rows = np.zeros((0, 4)) if rows is None else rows
        self.places = {(int(one), int(two)): k for k, (one, two, *_) in enumerate(self.rows.tolist())}

    def add(self, one: int, two: int, result: float) -> None:
        """Add a game."""
        place = self.places.setdefault((one, two), len(self.rows))
        if place == len(self.rows):
            self.rows = np.vstack([self.rows, (one, two, 0, 0)])
        self.rows[place, 2:] += 1, result


class Rating(NamedTuple):
    """A fitted rating, and half the width of its 95 % interval."""

    value: float
    margin: float


def fit_ratings(results: np.ndarray, anchors: Mapping[int, float], asked: Collection[int] | None = None) -> dict[int, Rating]:
    """Fit the most likely ratings to all results; the order of games does not matter.

    The log-odds of a win are the difference of two ratings. Each free rating has a wide Gaussian prior around the mean of the anchors.
    A step of the fit takes O(N + P) operations for N pairs of P players.

    Args:
        results: rows of two players, numbered from 0, their number of games, and the points of the first, `[N, 4]`.
        anchors: players with a fixed rating, at least one, which fix the scale.
        asked: players whose ratings are returned; None: all.
    """
    games, points = results[:, 2:].T.copy()  # contiguous
    one, two = results[:, :2].T.astype(np.int64, order="C")
    num, centre = 1 + max(one.max(initial=0), two.max(initial=0), *anchors), sum(anchors.values()) / len(anchors)
    precision, mean = np.full(num, (POINTS / PRIOR_POINTS) ** 2), np.zeros(num)
    for player, value in anchors.items():
        precision[player], mean[player] = FIXED, (value - centre) / POINTS
    log_odds = mean.copy()
    for _ in range(NEWTON_STEPS):
        chance = np.exp(-np.logaddexp(0, log_odds[two] - log_odds[one]))
        slope, hessian = points - games * chance, Hessian(one, two, games * chance * (1 - chance), precision)
        gradient = np.bincount(one, slope, num) - np.bincount(two, slope, num) - precision * (log_odds - mean)
        step = hessian.solve(gradient, 1e-3)
        log_odds += np.clip(step, -2.0, 2.0)
        if np.abs(step).max() < 1e-7:
            break
    fitted = {}
    for player in range(num) if asked is None else asked:
        variance = hessian.solve((np.arange(num) == player).astype(float), 1e-8)[player]
        value, margin = centre + POINTS * log_odds[player], 1.96 * POINTS * math.sqrt(variance)
        fitted[player] = Rating(anchors[player], 0.0) if player in anchors else Rating(float(value), margin)
    return fitted


class Hessian:
    """The matrix of second derivatives of a fit, H = diag(precision) + Σ curve · (e_one − e_two)(e_one − e_two)ᵀ over all pairs.

    Args:
        one, two: the players of each pair, `[N]`.
        curve: the weight of each pair, `[N]`.
        precision: of the prior of each player, `[P]`.
    """

    def __init__(self, one: np.ndarray, two: np.ndarray, curve: np.ndarray, precision: np.ndarray) -> None:
        self.one, self.two, self.curve, self.precision, num = one, two, curve, precision, len(precision)
        self.diagonal = precision + np.bincount(one, curve, num) + np.bincount(two, curve, num)
        self.size = min(num, GROUPS)
        self.group = np.arange(num) * self.size // num
        diagonal = np.bincount(self.group, self.diagonal, self.size)
        between = np.bincount(self.group[one] * self.size + self.group[two], curve, self.size**2).reshape(self.size, self.size)
        self.coarse = np.linalg.inv(np.diag(diagonal) - between - between.T) - np.diag(1 / diagonal)

    def times(self, vector: np.ndarray) -> np.ndarray:
        """Return H v."""
        force, num = self.curve * (vector[self.one] - vector[self.two]), len(vector)
        return self.precision * vector + np.bincount(self.one, force, num) - np.bincount(self.two, force, num)

    def precondition(self, vector: np.ndarray) -> np.ndarray:
        """Return about H⁻¹ v: exactly for shifts of whole groups of players with neighbouring numbers, else by the diagonal.

        So a long chain of players, each of whom met only a few before it, takes few steps.
        """
        return vector / self.diagonal + (self.coarse @ np.bincount(self.group, vector, self.size))[self.group]

    def solve(self, right: np.ndarray, tolerance: float) -> np.ndarray:
        """Return H⁻¹ b, relative to its first estimate within about a tolerance, by conjugate gradients (Hestenes & Stiefel, 1952)."""
        solution, residual = np.zeros(len(right)), right
        direction = estimate = self.precondition(residual)
        product, limit = residual @ estimate, max(1e-10, tolerance * np.abs(estimate).max())
        for _ in range(4 * len(right)):
            if np.abs(estimate).max() < limit:
                break
            image = self.times(direction)
            length = product / (direction @ image)
            solution, residual = solution + length * direction, residual - length * image
            estimate = self.precondition(residual)
            last, product = product, residual @ estimate
            direction = estimate + product / last * direction
        return solution
