"""Numbers over seeds, worked by hand."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from lightning_rl.errors import SettingError
from lightning_rl.reports.tables import improvement_interval, iqm, iqm_interval, probability_of_improvement, rliable


def test_the_interquartile_mean_of_five_seeds_is_that_of_the_middle_three():
    assert iqm(np.array([0.0, 90, 20, 1000, 10])) == 40  # (10 + 20 + 90) / 3
    assert iqm(np.array([3.0, 6, 0])) == 3  # of three seeds nothing is cut
    assert iqm(np.array([[1.0, 8], [2, 2], [3, 4], [9, 3]])).tolist() == [2.5, 3.5]  # each point of a curve by itself


@pytest.mark.parametrize("seeds", range(1, 13))
def test_the_interquartile_mean_is_that_of_rliable(seeds):
    from rliable import metrics

    scores = np.random.default_rng(seeds).normal(size=(seeds, 3))
    np.testing.assert_allclose(iqm(scores), [metrics.aggregate_iqm(scores[:, point, None]) for point in range(3)])


def test_intervals_of_a_curve_are_drawn_alike_each_time_and_leave_the_global_generator_as_it_was():
    curves = np.array([[0.0, 5], [1, 5], [2, 5], [10, 5]])
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    interval = iqm_interval(curves)
    assert np.random.random() == expected
    many = np.random.default_rng(0).normal(size=(7, 30))
    before = iqm_interval(many)
    np.random.seed(4)
    assert np.array_equal(before, iqm_interval(many))
    assert interval.shape == (2, 2) and interval[:, 1].tolist() == [5, 5]
    assert 0 <= interval[0, 0] < iqm(curves)[0] < interval[1, 0] <= 10


def test_two_seeds_draw_one_of_three_means():
    # (0, 0), (0, 10), (10, 10) with 1/4, 1/2, 1/4: both ends lie in the 95 %
    assert iqm_interval(np.array([[0.0], [10.0]])).ravel().tolist() == [0, 10]


def test_one_seed_has_no_interval():
    assert iqm_interval(np.array([[1.0, 2.0]])) is None
    assert improvement_interval(np.array([2.0]), np.array([1.0, 2, 3])) is None


@pytest.mark.thorough
def test_the_probability_of_improvement_counts_pairs_with_ties_as_halves():
    from rliable import metrics

    x, y = np.array([1.0, 2, 3]), np.array([0.0, 2, 2])
    # 1 beats 0; 2 beats 0 and ties twice; 3 beats all: (1 + 2 + 3) / 9
    assert probability_of_improvement(x, y) == pytest.approx(6 / 9) == metrics.probability_of_improvement(x[:, None], y[:, None])
    assert probability_of_improvement(np.array([2.0]), np.array([1.0, 2, 3])) == 0.5
    interval = improvement_interval(x, y).ravel()
    assert 0 <= interval[0] < 6 / 9 < interval[1] <= 1 and np.array_equal(interval, improvement_interval(x, y).ravel())
    assert improvement_interval(np.array([5.0, 6]), np.array([1.0, 2])).ravel().tolist() == [1, 1]


def test_a_library_that_cannot_be_imported_is_reported_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "rliable").mkdir()
    (tmp_path / "rliable/__init__.py").write_text("")
    (tmp_path / "rliable/library.py").write_text("raise TypeError('pandas is too new')")
    for module in [name for name in sys.modules if name.partition(".")[0] == "rliable"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingError, match=r'\(TypeError: pandas is too new\); run: pip install "lightning_rl\[plots\]"'):
        rliable("compare")
