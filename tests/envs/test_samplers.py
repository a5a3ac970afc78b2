"""Samplers: their statistics, their settings, and what they reject."""

import math

import numpy as np
import pytest

from lightning_rl.envs.lessons import Constant, Gaussian, MultiRangeUniform, Uniform, as_plain, as_sampler
from lightning_rl.errors import SettingError

DRAWS = 20_000


def sampler(kind, **parameters):
    return as_sampler("mass", {"sampler_type": kind, "sampler_parameters": parameters})


def draws(each):
    generator = np.random.default_rng(3)
    return np.array([each.draw(generator) for _ in range(DRAWS)])


def close(found, expected, deviation):
    """Within four standard errors of a mean."""
    return abs(found - expected) < 4 * deviation / math.sqrt(DRAWS)


def test_uniform_draws_have_the_mean_and_the_variance_of_their_interval():
    values = draws(sampler("uniform", min_value=2, max_value=5))
    assert values.min() >= 2 and values.max() <= 5
    assert close(values.mean(), 3.5, math.sqrt(9 / 12))
    assert close(values.var(), 9 / 12, math.sqrt(81 / 80 - 81 / 144))  # fourth moment (b - a)^4 / 80


def test_gaussian_draws_have_their_mean_and_standard_deviation():
    values = draws(sampler("gaussian", mean=-1, st_dev=0.5))
    assert close(values.mean(), -1, 0.5)
    assert close(values.var(), 0.25, math.sqrt(2) * 0.25)
    assert close((values < -1.5).mean(), 0.158655, math.sqrt(0.158655 * 0.841345))  # one deviation below


@pytest.mark.thorough
def test_intervals_are_chosen_by_their_length():
    values = draws(sampler("multirangeuniform", intervals=[[0, 1], [7, 10]]))
    below = values < 5
    assert close(below.mean(), 0.25, math.sqrt(0.25 * 0.75))  # 1 of 1 + 3
    assert values[below].max() <= 1 and values[~below].min() >= 7 and values.max() <= 10
    assert close(values.mean(), 0.25 * 0.5 + 0.75 * 8.5, values.std())


@pytest.mark.thorough
def test_intervals_without_length_have_equal_probability():
    values = draws(sampler("multirangeuniform", intervals=[[1, 1], [2, 2]]))
    assert close((values == 1).mean(), 0.5, 0.5) and set(values) == {1.0, 2.0}


@pytest.mark.parametrize("number", [10**400, 1e301, math.inf, math.nan])
def test_numbers_that_are_too_large_are_rejected(number):
    with pytest.raises(SettingError, match="mass must be a finite number"):
        as_sampler("mass", number)


def test_a_bare_number_is_a_constant():
    assert as_sampler("mass", 3) == Constant(3) == sampler("constant", value=3)
    assert set(draws(as_sampler("mass", 0.25))) == {0.25}


@pytest.mark.parametrize(
    ("each", "text"),
    [
        (Constant(9.8), "9.8"),
        (Uniform(0.5, 2), "uniform(0.5, 2)"),
        (Gaussian(), "gaussian(1, 1)"),
        (MultiRangeUniform(((0, 1), (2, 2.5)), seed=4), "multirangeuniform([0, 1], [2, 2.5])"),
    ],
)
def test_a_sampler_has_a_readable_text_and_becomes_plain_data_and_back(each, text):
    assert str(each) == text
    again = as_sampler("mass", as_plain(each))
    assert as_plain(again) == as_plain(each) and again.seed == each.seed and type(again) is type(each)


def test_both_spellings_of_several_ranges_mean_the_same():
    assert sampler("multirange_uniform", intervals=[[0, 2]]) == sampler("multirangeuniform", intervals=[[0, 2]])


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("heavy", "mass must be a finite number, got 'heavy'"),
        (float("nan"), "mass must be a finite number, got nan"),
        (True, "mass must be a finite number, got True"),
        ({"sampler_type": "uniform"}, "mass needs a sampler_parameters; a sampler is {sampler_type, sampler_parameters}"),
        ({"sampler_parameters": {}}, "mass needs a sampler_type; a sampler is {sampler_type, sampler_parameters}"),
        ({"sampler_typ": "uniform"}, "mass.sampler_typ is not a setting of a sampler; did you mean sampler_type?"),
        ({"sampler_type": "unifrom", "sampler_parameters": {}}, "mass.sampler_type 'unifrom' is not known; did you mean uniform?"),
        ({"sampler_type": "uniform", "sampler_parameters": [0, 1]}, "mass.sampler_parameters must be a mapping, got [0, 1]"),
        (
            {"sampler_type": "uniform", "sampler_parameters": {"min": 0}},
            "mass.sampler_parameters.min is not a setting of uniform; did you mean min_value?",
        ),
        (
            {"sampler_type": "uniform", "sampler_parameters": {"min_value": 2, "max_value": 1}},
            "mass.sampler_parameters.min_value must be <= max_value, got 2 and 1",
        ),
        ({"sampler_type": "gaussian", "sampler_parameters": {"st_dev": -1}}, "mass.sampler_parameters.st_dev must be >= 0, got -1"),
        (
            {"sampler_type": "multirangeuniform", "sampler_parameters": {"intervals": [[0, 1, 2]]}},
            "mass.sampler_parameters.intervals must each have two numbers [low, high], got [0, 1, 2]",
        ),
        (
            {"sampler_type": "multirangeuniform", "sampler_parameters": {"intervals": [[0, 1], [3, 2]]}},
            "mass.sampler_parameters.intervals must each have low <= high, got [3, 2]",
        ),
        (
            {"sampler_type": "multirangeuniform", "sampler_parameters": {"intervals": []}},
            "mass.sampler_parameters.intervals must be a list of [low, high], got []",
        ),
        ({"sampler_type": "constant", "sampler_parameters": {"seed": -2}}, "mass.sampler_parameters.seed must be >= -1, got -2"),
    ],
)
def test_an_invalid_sampler_is_reported_in_one_line(setting, line):
    with pytest.raises(SettingError) as error:
        as_sampler("mass", setting)
    assert str(error.value) == line
