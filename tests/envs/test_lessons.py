"""Parameters and lessons from settings, and one-line errors for invalid ones."""

import pytest

from lightning_rl import EnvConfig
from lightning_rl.envs.lessons import CompletionCriteria, Constant, Uniform, as_parameters
from lightning_rl.errors import SettingError

EASY = {"name": "easy", "value": 0.5, "completion_criteria": {"measure": "reward", "threshold": 100, "min_lesson_length": 20}}
HARD = {"name": "hard", "value": {"sampler_type": "uniform", "sampler_parameters": {"min_value": 1, "max_value": 2}}}


def criteria(**settings):
    return {"length": {"curriculum": [EASY | {"completion_criteria": settings}, HARD]}}


def test_a_number_a_sampler_and_lessons_are_read():
    found = as_parameters({"gravity": 9.8, "mass": HARD["value"], "length": {"curriculum": [EASY, HARD], "replay_old_lessons": 0.1}})
    assert [found[name].lessons[0].value for name in ("gravity", "mass")] == [Constant(9.8), Uniform(1, 2)]
    easy, hard = found["length"].lessons
    assert (easy.name, easy.value, hard.name, hard.value) == ("easy", Constant(0.5), "hard", Uniform(1, 2))
    assert easy.completion_criteria == CompletionCriteria("reward", 100, 20)
    assert hard.completion_criteria is None and found["length"].replay_old_lessons == 0.1


def test_criteria_have_the_defaults_of_ml_agents():
    easy = as_parameters(criteria(measure="progress"))["length"].lessons[0].completion_criteria
    assert (easy.threshold, easy.min_lesson_length, easy.signal_smoothing, easy.require_reset) == (0.0, 0, True, False)


def test_a_rating_is_a_measure_as_ml_agents_writes_it():
    easy = as_parameters(criteria(measure="Elo", threshold=1500))["length"].lessons[0].completion_criteria
    assert (easy.measure, easy.threshold) == ("elo", 1500)


def test_a_null_parameter_is_ignored():
    assert list(as_parameters({"length": None, "gravity": 9.8})) == ["gravity"]
    with pytest.raises(SettingError, match=r"env\.observe_parameters needs"):
        EnvConfig("CartPole-v1", parameters={"length": None}, observe_parameters=True)


def test_a_length_may_be_written_as_a_whole_float():
    assert as_parameters(criteria(min_lesson_length=1e2))["length"].lessons[0].completion_criteria.min_lesson_length == 100


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        ([1], "env.parameters must be a mapping of names to values, got [1]"),
        ({"length": {"curiculum": []}}, "got the key 'curiculum'; did you mean curriculum?"),
        ({"length": {"curriculum": []}}, "env.parameters.length.curriculum must be a list of lessons, got []"),
        ({"length": {"curriculum": {"easy": 1}}}, "env.parameters.length.curriculum must be a list of lessons"),
        ({"length": {"curriculum": [3]}}, "env.parameters.length.curriculum[0] must be a lesson"),
        ({"length": {"curriculum": [HARD, HARD]}}, "curriculum[0].completion_criteria is missing; every lesson but the last one needs it"),
        ({"length": {"curriculum": [{"name": "x"}]}}, "curriculum[0].value is missing; a lesson needs a number or a sampler"),
        ({"length": {"curriculum": [EASY | {"valeu": 1}, HARD]}}, "curriculum[0].valeu is not a setting; did you mean value?"),
        ({"length": {"curriculum": [HARD], "replay_old_lessons": 2}}, "length.replay_old_lessons must be >= 0 and <= 1, got 2"),
        ({"length": {"curriculum": [HARD], "replay_old": 0.1}}, "length.replay_old is not a setting; did you mean replay_old_lessons?"),
        ({"length": {}}, "env.parameters.length must be a number, a sampler or {curriculum: [lessons]}, got nothing"),
        ({"": 3}, "env.parameters has a value 3 without a name"),
        (
            criteria(measure="progress", threshold=1),
            "completion_criteria.threshold must be < 1: a lesson ends when progress exceeds it; got 1",
        ),
        (criteria(measure="success", threshold=1.5), "completion_criteria.threshold must be < 1: a lesson ends when success exceeds it"),
        (criteria(measure="success", threshold=-1), "completion_criteria.threshold must be >= 0, got -1"),
        (criteria(behavior=3), "completion_criteria.behavior must be the name of a behavior, got 3"),
        (
            criteria(measure="rewards"),
            "completion_criteria.measure must be one of reward, progress, success, elo, got 'rewards'; did you mean reward?",
        ),
        (criteria(treshold=3), "completion_criteria.treshold is not a setting; did you mean threshold?"),
        (criteria(min_lesson_length=-1), "completion_criteria.min_lesson_length must be >= 0, got -1"),
        (criteria(signal_smoothing="yes"), "completion_criteria.signal_smoothing must be true or false, got 'yes'"),
        ({"length": {"sampler_type": "uniform"}}, "env.parameters.length needs a sampler_parameters"),
    ],
)
def test_invalid_parameters_are_reported_in_one_line_with_their_full_name(parameters, line):
    with pytest.raises(SettingError) as error:
        EnvConfig("CartPole-v1", parameters=parameters)
    assert line in str(error.value) and str(error.value).startswith("env.parameters") and "\n" not in str(error.value)


@pytest.mark.parametrize("vectorization", ["native", "envpool"])
def test_native_and_envpool_reject_parameters(vectorization):
    with pytest.raises(SettingError, match=f"env.parameters does not work with vectorization {vectorization}; use sync or async"):
        EnvConfig("CartPole-v1", vectorization=vectorization, parameters={"length": 1.0})
