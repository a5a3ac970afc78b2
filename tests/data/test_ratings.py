"""Elo's rating and the fitted one, against numbers worked by hand."""

import numpy as np
import pytest

from lightning_rl.data.ratings import GROUPS, POINTS, Hessian, Results, elo_change, expected_result, fit_ratings


def fit(scores, *args):
    """Fit ratings to (games, points) by pair of players."""
    return fit_ratings(np.array([(*pair, *score) for pair, score in scores.items()], float), *args)


@pytest.mark.parametrize(
    ("own", "other", "result", "change"),
    [
        (1200, 1200, 1, 0.5),
        (1200, 1400, 1, 0.759747),
        (1400, 1200, 0, -0.759747),
        (1200, 1400, 0.5, 0.259747),
        (1200, 1200, 0.5, 0.0),
        (1400, 1200, 1, 0.240253),
        (1400, 1200, 0.5, -0.259747),
        (1000, 1200, 0, -0.240253),
    ],
)
def test_a_game_moves_elo_by_the_result_minus_what_was_expected(own, other, result, change):
    assert elo_change(own, other, result) == pytest.approx(change, abs=1e-6)


def test_a_hundred_wins_against_a_player_who_stays_at_1200_give_1246_6():
    rating = 1200.0
    for _ in range(100):
        rating += elo_change(rating, 1200, 1)
    assert rating == pytest.approx(1246.6099, abs=1e-4)


def test_a_thousand_results_of_three_quarters_are_still_far_from_their_asymptote():
    rating = 1200.0
    for _ in range(1000):
        rating += elo_change(rating, 1200, 0.75)
    assert rating == pytest.approx(1335.0010, abs=1e-4)


def test_fitted_ratings_reach_the_asymptote_that_elo_approaches():
    # log-odds ln 3 are 190.85 points; 10,000 games make the prior of 800 points negligible
    fitted = fit({(1, 0): (10_000, 7_500.0)}, {0: 1200.0})
    assert fitted[1].value == pytest.approx(1390.8485, abs=0.1)
    assert fitted[0] == (1200.0, 0.0)
    # the deviation of a logit of p = ¾ over n games is 1 / √(n p (1 − p)) = 0.0231; 1.96 · 173.72 · 0.0231 = 7.86
    assert fitted[1].margin == pytest.approx(7.86, abs=0.01)


def test_fitted_ratings_do_not_depend_on_who_is_named_first():
    one = fit({(1, 0): (40, 30.0), (2, 1): (20, 15.0)}, {0: 1200.0})
    two = fit({(1, 2): (20, 5.0), (0, 1): (40, 10.0)}, {0: 1200.0})
    assert all(one[player].value == pytest.approx(two[player].value) for player in (1, 2))
    assert one[2].value > one[1].value > 1200


def test_a_player_who_won_every_game_has_a_finite_rating_with_a_wide_interval():
    fitted = fit({(1, 0): (5, 5.0)}, {0: 1200.0})
    assert 1300 < fitted[1].value < 2500
    assert fitted[1].margin > 500


def test_ratings_of_a_long_chain_of_players_are_the_most_likely_ones():
    # 200 players, each against the three before it: more than groups
    scores = {(k, j): (12, 6.0 + (k + 2 * j) % 4) for k in range(1, 201) for j in range(max(0, k - 3), k)}
    fitted = fit(scores, {0: 1200.0})
    precision, hessian = (1 / 800) ** 2, np.zeros((200, 200))
    slopes = np.array([-precision * (fitted[k].value - 1200) for k in range(1, 201)])
    for (one, two), (games, points) in scores.items():
        chance = expected_result(fitted[one].value, fitted[two].value)
        curve = games * chance * (1 - chance) / POINTS**2
        for player, other, sign in ((one, two, 1), (two, one, -1)):
            if player:
                slopes[player - 1] += sign * (points - games * chance) / POINTS
                hessian[player - 1, player - 1] += curve
            if player and other:
                hessian[player - 1, other - 1] -= curve
    assert abs(slopes).max() < 1e-9
    margins = 1.96 * np.sqrt(np.diag(np.linalg.inv(hessian + precision * np.eye(200))))
    assert [fitted[k].margin for k in range(1, 201)] == pytest.approx(margins, rel=1e-6)
    assert fit(scores, {0: 1200.0}, [200, 0]) == {200: pytest.approx(fitted[200]), 0: fitted[0]}


def test_ratings_hang_between_two_anchors():
    # even against 1000 and against 1400: the middle
    fitted = fit({(2, 0): (100, 50.0), (2, 1): (100, 50.0)}, {0: 1000.0, 1: 1400.0})
    assert fitted[2].value == pytest.approx(1200, abs=1e-6)


def test_ratings_far_apart_are_certain_results():
    assert expected_result(1e6, -1e6) == 1.0 and expected_result(-1e6, 1e6) == 0.0
    assert fit({(0, 1): (3, 3.0)}, {0: 1e5, 1: -1e5})[0].value == 1e5


def test_ratings_of_three_players_in_a_row_are_sums_of_their_log_odds():
    # 3 : 1 between neighbours is ln 3, 190.85 points, and twice as much over two; a million games make the prior negligible
    fitted = fit({(1, 0): (1e6, 7.5e5), (2, 1): (1e6, 7.5e5)}, {0: 1200.0})
    assert (fitted[1].value, fitted[2].value) == (pytest.approx(1200 + 190.8485, abs=0.01), pytest.approx(1200 + 381.6970, abs=0.01))
    # variances of independent links add up
    assert fitted[2].margin == pytest.approx(fitted[1].margin * 2**0.5, rel=1e-3)


def random_results(players, window, games=60):
    """Rows of each player's games against at most ten that are evenly spaced among the last of a window."""
    random, results = np.random.default_rng(0), Results()
    skill = np.cumsum(random.normal(1, 10, players + 1))
    for own in range(1, players + 1):
        known = range(max(0, own - window), own)
        for other in random.choice(known[:: -(-len(known) // 10)], games).tolist():
            results.add(own, other, float(random.random() < expected_result(skill[own], skill[other])))
    return results.rows


def solved_densely(rows, num):
    """Return the most likely ratings and their margins by whole matrices, with player 0 at 1200."""
    value, hessian = np.zeros(num), np.eye(num)
    one, two = rows[:, :2].T.astype(int)
    links = np.zeros((len(rows), num))
    links[np.arange(len(rows)), one], links[np.arange(len(rows)), two] = 1, -1
    for _ in range(8):
        chance = 1 / (1 + np.exp(-links @ value / POINTS))
        slope = links.T @ (rows[:, 3] - rows[:, 2] * chance) / POINTS - value / 800**2
        hessian = links.T @ (links * (rows[:, 2] * chance * (1 - chance))[:, None]) / POINTS**2 + np.eye(num) / 800**2
        value[1:] += np.clip(np.linalg.solve(hessian[1:, 1:], slope[1:]), -300, 300)
    variance = np.linalg.inv(hessian[1:, 1:])
    return 1200 + value, 1.96 * np.sqrt([0, *np.diag(variance)])


@pytest.mark.parametrize("window", [10, 1000])
@pytest.mark.parametrize("players", [5, GROUPS + 1, *(pytest.param(num, marks=pytest.mark.thorough) for num in (GROUPS - 1, 150))])
def test_ratings_of_random_games_are_those_of_whole_matrices(players, window):
    rows = random_results(players, window)
    values, margins = solved_densely(rows, players + 1)
    fitted = fit_ratings(rows, {0: 1200.0}, [players, players // 2])
    for player in (players, players // 2):
        assert fitted[player] == (pytest.approx(values[player], abs=1e-6), pytest.approx(margins[player], abs=1e-5))


@pytest.mark.parametrize("window", [10, 1000])
def test_a_fit_of_800_players_takes_at_most_a_hundred_passes_over_their_pairs(window, monkeypatch):
    multiply, sizes = Hessian.times, []
    monkeypatch.setattr(Hessian, "times", lambda self, vector: [sizes.append(len(self.curve)), multiply(self, vector)][1])
    fit_ratings(random_results(800, window, 20), {0: 1200.0}, [800])
    assert len(sizes) <= 100 and max(sizes) <= 10 * 800
