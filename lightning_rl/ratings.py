"""Ratings of players from game results: Elo's, updated after each game, and Bradley and Terry's, fitted to all games.

Elo (1978), *The Rating of Chessplayers*; Bradley & Terry (1952), *Rank analysis of incomplete block designs*. A result is 1 for a win, ½
for a draw and 0 for a loss; a difference of 400 rating points means odds of 10 to 1.
"""

import math
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

Player = TypeVar("Player", bound=int | tuple[str, int])
POINTS = 400 / math.log(10)
"""Rating points of one unit of log-odds."""
PRIOR_POINTS = 800.0
"""Standard deviation of the prior around the anchors; it keeps the rating of a player who won all games finite."""
NEWTON_STEPS = 50
MIN_BLOCK = 32
"""Rows of a block of `solve_banded`, of which smaller ones take no less time."""


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


def fit_ratings(
    scores: Mapping[tuple[Player, Player], Score], anchors: Mapping[Player, float], asked: Collection[Player] | None = None
) -> dict[Player, Rating]:
    """Fit the most likely ratings to all results; the order of games does not matter.

    The log-odds of a win are the difference of two ratings. Each free rating has a wide Gaussian prior around the mean of the anchors.
    For P players who only meet others at most W numbers away, a fit takes O(P · W²) operations.

    Args:
        scores: of player i against player j, keyed by (i, j).
        anchors: players with a fixed rating, at least one, which fix the scale.
        asked: players whose ratings are returned; None: all.
    """
    free: list[Player] = sorted({player for pair in scores for player in pair} - anchors.keys(), key=by_number)
    num, centre, precision = len(free), sum(anchors.values()) / len(anchors), (POINTS / PRIOR_POINTS) ** 2
    place = {player: row for row, player in enumerate([*free, *anchors])}
    # log-odds relative to the center
    theta = np.array([*[0.0] * num, *((value - centre) / POINTS for value in anchors.values())])
    one, two = np.fromiter((place[player] for pair in scores for player in pair), np.int64).reshape(-1, 2).T
    games, points = np.fromiter((value for score in scores.values() for value in score), float).reshape(-1, 2).T
    both = np.flatnonzero((one < num) & (two < num))
    width = int(np.abs(one - two)[both].max(initial=MIN_BLOCK))
    for _ in range(NEWTON_STEPS if num else 0):
        chance = np.exp(-np.logaddexp(0, theta[two] - theta[one]))
        slope, curve = points - games * chance, games * chance * (1 - chance)
        gradient = np.bincount(one, slope, len(theta)) - np.bincount(two, slope, len(theta))
        degree = np.bincount(one, curve, len(theta)) + np.bincount(two, curve, len(theta))
        hessian = np.diag(degree[:num] + precision)
        np.subtract.at(hessian, (one[both], two[both]), curve[both])
        np.subtract.at(hessian, (two[both], one[both]), curve[both])
        step = solve_banded(hessian, (gradient - precision * theta)[:num, None], width)[:, 0]
        theta[:num] += np.clip(step, -2.0, 2.0)
        if np.abs(step).max() < 1e-9:
            break
    asked = [*place] if asked is None else asked
    own = [place[player] for player in asked if player not in anchors]
    variances = solve_banded(hessian, np.eye(num)[:, own], width)[own, range(len(own))] if own else np.zeros(0)
    margins = 1.96 * POINTS * np.sqrt(variances)
    fitted = {free[k]: Rating(float(centre + POINTS * theta[k]), float(margin)) for k, margin in zip(own, margins, strict=True)}
    return {player: fitted[player] if player in fitted else Rating(anchors[player], 0.0) for player in asked}


def by_number(player: int | tuple[str, int]) -> tuple[int, str]:
    """Return the key that sorts players by number, so that those who meet are close to each other."""
    return (player, "") if isinstance(player, int) else (player[1], player[0])


def solve_banded(matrix: np.ndarray, right: np.ndarray, width: int) -> np.ndarray:
    """Solve A x = b for a symmetric matrix `[P, P]` with zeros beyond `width` places from its diagonal, and right sides `[P, R]`.

    In blocks of `width` rows, A is block tridiagonal: eliminate block after block, and substitute back.
    """
    blocks = [slice(k, k + width) for k in range(0, len(matrix), width)]
    solved: list[tuple[np.ndarray, np.ndarray]] = []
    diagonal, side = matrix[blocks[0], blocks[0]], right[blocks[0]]
    for block, following in pairwise(blocks):
        below = matrix[following, block]
        coupling, own = np.split(np.linalg.solve(diagonal, np.hstack([below.T, side])), [len(below)], axis=1)
        solved.append((coupling, own))
        diagonal, side = matrix[following, following] - below @ coupling, right[following] - below @ own
    found = [np.linalg.solve(diagonal, side)]
    for coupling, own in reversed(solved):
        found.append(own - coupling @ found[-1])
    return np.concatenate(found[::-1])
