"""Schedules: their values over a run, and what they refuse."""

import pytest

from lightning_rl import PPO
from lightning_rl.errors import SettingError
from lightning_rl.schedules import as_points, constant, linear, make_schedule, piecewise


@pytest.mark.parametrize(("start", "end", "half"), [(3e-4, 1e-10, 1.5000005e-4), (0.2, 0.1, 0.15), (5e-3, 1e-5, 2.505e-3)])
def test_linear_is_the_mean_of_both_ends_at_half_way_and_stays_at_its_end(start, end, half):
    schedule = linear(start, end)
    assert [schedule(x) for x in (0, 0.5, 1, 1.7)] == pytest.approx([start, half, end, end])


def test_linear_goes_to_0_by_default_and_is_flat_before_its_start():
    assert [linear(0.4)(x) for x in (-0.1, 0, 0.25, 1)] == pytest.approx([0.4, 0.4, 0.3, 0])


def test_constant_does_not_change():
    assert [constant(0.3)(x) for x in (0, 0.5, 1)] == [0.3] * 3
    assert isinstance(make_schedule("x", {"schedule": "constant", "value": 1})(0.5), float)


def test_piecewise_interpolates_between_points_and_is_flat_outside():
    schedule = piecewise([[0.2, 1.0], [0.4, 3.0], [0.8, 0.0]])
    assert [schedule(x) for x in (0, 0.2, 0.3, 0.4, 0.6, 0.8, 1)] == pytest.approx([1, 1, 2, 3, 1.5, 0, 0])


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        (0.25, [0.25, 0.25, 0.25]),
        (1, [1, 1, 1]),
        ({"schedule": "constant", "value": 0.5}, [0.5, 0.5, 0.5]),
        ({"schedule": "linear", "start": 1.0}, [1, 0.5, 0]),
        ({"schedule": "linear", "start": 0.0, "end": 1.0}, [0, 0.5, 1]),
        ({"schedule": "piecewise", "points": [[0, 1], [0.5, 0.2], [1, 0]]}, [1, 0.2, 0]),
    ],
)
def test_settings_become_schedules(setting, values):
    schedule = make_schedule("epsilon", setting, 0, 1)
    assert [schedule(x) for x in (0, 0.5, 1)] == pytest.approx(values)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (2, "epsilon must be >= 0 and <= 1, got 2"),
        (float("nan"), "epsilon must be >= 0 and <= 1, got nan"),
        (True, "epsilon must be a number"),
        ("0.1", "epsilon must be a number"),
        (None, "epsilon must be a number"),
        ({"start": 1.0}, "epsilon.schedule must be one of constant, linear, piecewise, got None"),
        ({"schedule": "liner", "start": 1.0}, "did you mean linear?"),
        ({"schedule": "linear", "strat": 1.0}, "epsilon.strat is not a setting of the linear schedule; did you mean start?"),
        ({"schedule": "linear", "end": 0.0}, "epsilon.start is missing"),
        ({"schedule": "linear", "start": 1.0, "end": -0.1}, "epsilon.end must be >= 0"),
        ({"schedule": "constant", "value": 3}, "epsilon.value must be >= 0 and <= 1, got 3"),
        ({"schedule": "piecewise"}, "epsilon.points is missing"),
        ({"schedule": "piecewise", "points": []}, "epsilon.points must be a list"),
        ({"schedule": "piecewise", "points": [[0, 1, 2]]}, "epsilon.points must be a list of [progress, value] pairs"),
        ({"schedule": "piecewise", "points": [[0.5, 1], [0.2, 0]]}, "epsilon.points must be in order of progress"),
        ({"schedule": "piecewise", "points": [[0, 1], [1.5, 0]]}, "epsilon.points progress must be >= 0 and <= 1, got 1.5"),
        ({"schedule": "piecewise", "points": [[0, 7]]}, "epsilon.points value must be >= 0 and <= 1, got 7"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line_that_names_the_key(setting, words):
    with pytest.raises(SettingError) as error:
        make_schedule("epsilon", setting, 0, 1)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_function_of_progress_is_kept_as_its_values_at_every_hundredth():
    schedule = make_schedule("lr", lambda progress: (1 - progress) ** 2)
    assert [schedule(x) for x in (0, 0.5, 0.99, 1)] == pytest.approx([1, 0.25, 0.0001, 0])
    assert schedule(0.005) == pytest.approx((1 + 0.99**2) / 2)  # straight between 0 and 0.01
    assert as_points("lr", lambda progress: progress)["points"][37] == [0.37, 0.37]


@pytest.mark.parametrize(
    ("function", "says"),
    [(lambda progress: -progress, "must be >= 0"), (lambda: 1.0, "fails at 0"), (lambda progress: "fast", "fails at 0: ValueError")],
)
def test_a_function_that_is_no_schedule_is_refused_in_one_line(function, says):
    with pytest.raises(SettingError, match=f"^lr.*{says}"):
        make_schedule("lr", function)


@pytest.mark.parametrize(
    "function, says",
    [(lambda p: 0.25 if p < 0.505 else -0.25, "must be >= 0, got -0.25"), (lambda p: 1.0 if p < 0.505 else float("nan"), "got nan")],
)
def test_a_function_that_returns_an_invalid_value_is_reported_with_its_place(function, says):
    with pytest.raises(SettingError) as error:
        make_schedule("learning_rate", function)
    assert str(error.value).startswith("learning_rate at progress 0.51 must be >= 0") and str(error.value).endswith(says)


def test_a_run_with_a_function_saves_its_points_and_can_be_built_again_from_them():
    given = PPO("CartPole-v1", net_arch=[8], learning_rate=lambda progress: 1e-3 * (1 - progress))
    again = PPO(**given.hparams)
    assert [model.schedules["learning_rate"](0.25) for model in (given, again)] == pytest.approx([7.5e-4] * 2)
