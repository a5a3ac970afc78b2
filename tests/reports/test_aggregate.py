"""Several environments in one comparison, by numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

import lightning_rl as lrl
from tests.reports.folders import write_run


@pytest.fixture
def report(folder, monkeypatch):
    """PPO ends at 10 and 20 in one environment, at −1 and −3 in the other; A2C at 0, 10 and −5, −4; DQN ran in one alone."""
    monkeypatch.setattr("lightning_rl.reports.tables.REPS", 50)
    ends = {("PPO", "E1"): (10, 20), ("A2C", "E1"): (0, 10), ("PPO", "E2"): (-1, -3), ("A2C", "E2"): (-5, -4), ("DQN", "E2"): (-2,)}
    for (algorithm, env), finals in ends.items():
        for seed, final in enumerate(finals):
            write_run(folder / f"{algorithm}/{env}/v{seed}", {100: [final]}, seed=seed, algorithm=algorithm, env=env)
    return lrl.compare(".")


@pytest.mark.thorough
def test_scores_are_scaled_by_the_lowest_and_highest_run_of_each_environment(report):
    assert report.aggregate.environments == ["E1", "E2"] and list(report.aggregate.scores) == ["A2C", "PPO"]
    assert report.aggregate.scores["PPO"].tolist() == [[0.5, 1.0], [1.0, 0.5]]
    assert report.aggregate.scores["A2C"].tolist() == [[0.0, 0.0], [0.5, 0.25]]


def test_a_profile_is_the_share_of_runs_above_each_score(report):
    profiles = report.aggregate.profiles()
    at = [0, 24, 25, 49, 50, 99, 100]  # hundredths
    assert profiles["PPO"][0][at].tolist() == [1, 1, 1, 1, 0.5, 0.5, 0]
    assert profiles["A2C"][0][at].tolist() == [0.5, 0.5, 0.25, 0.25, 0, 0, 0]
    low, high = profiles["PPO"][1]
    assert np.all(low <= profiles["PPO"][0]) and np.all(profiles["PPO"][0] <= high)


def test_the_table_holds_interquartile_means_over_all_runs(report):
    rows = {row[0]: row for row in report.aggregate.table().rows}
    assert (rows["PPO"][1], rows["PPO"][2], rows["PPO"][4]) == ("2 × 2", "0.750", "0.750")
    assert (rows["A2C"][2], rows["A2C"][4]) == ("0.125", "0.188")  # the middle two of 0, 0, 0.25, 0.5; and their mean
    assert "scaled from 0, the lowest of all runs, to 1, the highest" in str(report)


@pytest.mark.thorough
def test_runs_beyond_the_fewest_of_an_environment_are_reported(report, folder):
    for seed in (2, 3):
        write_run(folder / f"PPO/E1/v{seed}", {100: [20]}, seed=seed, algorithm="PPO", env="E1")
    more, said = (
        lrl.compare("."),
        "The table over all environments counts the first 2 of 4 runs of PPO on E1: each environment counts alike.",
    )
    assert more.aggregate.scores["PPO"].tolist() == report.aggregate.scores["PPO"].tolist() and not report.aggregate.notes
    more.write("report.html")
    assert said in str(more) and said in (folder / "report.html").read_text() and said not in str(report)


@pytest.mark.thorough
def test_the_page_begins_with_the_profiles(report, folder):
    report.write("report.html")
    page = (folder / "report.html").read_text()
    assert page.index('alt="Performance profiles over all environments"') < page.index('alt="Learning curves on E1"')


def test_one_environment_has_no_aggregate(report):
    assert lrl.compare("PPO/E1", "A2C/E1").aggregate is None
    assert lrl.compare("PPO/E1", "DQN/E2").aggregate is None  # nobody ran in both
