"""Elo's rating and the fitted one, against numbers worked by hand."""

import numpy as np
import pytest

from lightning_rl.ratings import POINTS, Score, elo_change, expected_result, fit_ratings


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
    fitted = fit_ratings({(1, 0): Score(10_000, 7_500.0)}, {0: 1200.0})
    assert fitted[1].value == pytest.approx(1390.8485, abs=0.1)
    assert fitted[0] == (1200.0, 0.0)
    # the deviation of a logit of p = ¾ over n games is 1 / √(n p (1 − p)) = 0.0231; 1.96 · 173.72 · 0.0231 = 7.86
    assert fitted[1].margin == pytest.approx(7.86, abs=0.01)


def test_fitted_ratings_do_not_depend_on_who_is_named_first():
    one = fit_ratings({(1, 0): Score(40, 30.0), (2, 1): Score(20, 15.0)}, {0: 1200.0})
    two = fit_ratings({(1, 2): Score(20, 5.0), (0, 1): Score(40, 10.0)}, {0: 1200.0})
    assert all(one[player].value == pytest.approx(two[player].value) for player in (1, 2))
    assert one[2].value > one[1].value > 1200


def test_a_player_who_won_every_game_has_a_finite_rating_with_a_wide_interval():
    fitted = fit_ratings({(1, 0): Score(5, 5.0)}, {0: 1200.0})
    assert 1300 < fitted[1].value < 2500
    assert fitted[1].margin > 500


def test_ratings_of_a_long_chain_of_players_are_the_most_likely_ones():
    # 200 players, each against the three before it: several blocks of the banded system
    scores = {(k, j): Score(12, 6.0 + (k + 2 * j) % 4) for k in range(1, 201) for j in range(max(0, k - 3), k)}
    fitted = fit_ratings(scores, {0: 1200.0})
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
    assert fit_ratings(scores, {0: 1200.0}, [200, 0]) == {200: pytest.approx(fitted[200]), 0: fitted[0]}


def test_ratings_hang_between_two_anchors():
    # even against 1000 and against 1400: the middle
    fitted = fit_ratings({(2, 0): Score(100, 50.0), (2, 1): Score(100, 50.0)}, {0: 1000.0, 1: 1400.0})
    assert fitted[2].value == pytest.approx(1200, abs=1e-6)


def test_ratings_far_apart_are_certain_results():
    assert expected_result(1e6, -1e6) == 1.0 and expected_result(-1e6, 1e6) == 0.0
    assert fit_ratings({(0, 1): Score(3, 3.0)}, {0: 1e5, 1: -1e5})[0].value == 1e5
