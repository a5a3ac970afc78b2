"""What the tables of docs/zoo.md and README.md say of results and of what others report."""

from __future__ import annotations

import argparse
import csv
import importlib
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("zoo")


@pytest.fixture
def measured(zoo, monkeypatch, tmp_path):
    """Writes results of a config: returns and environment steps, a pair for each seed."""
    monkeypatch.setattr(zoo, "RESULTS", tmp_path)

    def measured(config, *seeds):
        with zoo.results_file(config).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, zoo.COLUMNS)
            writer.writeheader()
            for seed, (mean, steps) in enumerate(seeds):
                writer.writerow({"config": config, "seed": seed, "return_mean": mean, "env_steps": steps, "minutes": 1})

    return measured


@pytest.mark.parametrize("name", ["docs/zoo.md", "README.md"])
def test_the_table_of_a_page_is_what_the_script_makes(name, zoo):
    page = (ROOT / name).read_text("utf-8")
    assert page.partition(zoo.BEGIN)[2].partition(zoo.END)[0].strip() == zoo.PAGES[name](), "python benchmarks/zoo.py table"


def test_the_error_of_one_run_is_that_of_the_mean_over_its_episodes(zoo):
    # rl-zoo's benchmark.md: 750 episodes, mean -172.225, standard deviation 104.159
    assert zoo.REFERENCES["ppo/pendulum"].error == pytest.approx(104.159 / math.sqrt(750))
    assert str(zoo.REFERENCES["ppo/pendulum"]).startswith("-172.2 ± 3.8, 100,000, [rl-zoo]")


@pytest.mark.thorough
def test_a_mean_two_errors_below_the_reference_is_as_good_and_one_further_below_is_not(zoo, measured):
    reference = zoo.Reference(-172.0, 4.0, "100,000", "")
    measured("ppo/pendulum", (-150, 1), (-210, 1))  # -180
    assert zoo.verdict("ppo/pendulum", reference) == "yes"
    measured("ppo/pendulum", (-150, 1), (-210.2, 1))
    assert zoo.verdict("ppo/pendulum", reference) == "no: below -180.0"
    measured("sac/pendulum", (-179, 1), (-181, 1))
    measured("ppo/acrobot", (-70, 1))  # of another environment
    assert zoo.verdict("ppo/pendulum", reference) == "no: below -180.0, which sac/pendulum reaches"
    assert zoo.verdict("ppo/pendulum", None) == "" and zoo.verdict("ppo/pendulum", zoo.Reference(1, None, "", "")) == "no error published"


@pytest.mark.thorough
def test_a_row_below_its_reference_is_compared_with_stable_baselines3_here(zoo, measured, tmp_path):
    reference = zoo.Reference(-172.0, 4.0, "100,000", "")
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers/ppo_pendulum.csv").write_text("seed,return_mean,env_steps\n1,-170,100000\n2,-186,100000\n")  # −178 ± 8
    measured("ppo/pendulum", (-184, 1), (-204, 1))  # −194
    assert zoo.verdict("ppo/pendulum", reference) == "no: below -180.0; as good as Stable-Baselines3 here"
    assert "Stable-Baselines3 here, 100,000: -170 -186 |" in zoo.line("ppo/pendulum")
    measured("ppo/pendulum", (-184.2, 1), (-204, 1))
    assert zoo.verdict("ppo/pendulum", reference) == "no: below -180.0; Stable-Baselines3 here: above -194.0"


def test_an_evaluation_may_import_the_wrappers_of_its_config(zoo):
    assert zoo.imports_of("ppo/minigrid_doorkey_rnd") == ["--import", "minigrid.wrappers"] and zoo.imports_of("ppo/cartpole") == []


def test_lengths_of_all_seeds_are_reported(zoo, measured):
    measured("es/cartpole", (500, 542_794), (500, 520_932))
    assert zoo.line("es/cartpole").split(" | ")[1:4] == ["500.0 ± 0.0 (500 500)", "520,932 to 542,794", "1.0"]
    measured("es/cartpole", (500, 10_000))
    assert zoo.line("es/cartpole").split(" | ")[1:4] == ["500.0 (500)", "10,000", "1.0"]


def test_the_minutes_are_those_of_the_last_row_that_says_them(zoo, tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("env_steps,time/time_elapsed,eval/mean_reward\n100,90.0,\n200,180.0,\n250,,3.0\n")
    assert zoo.minutes_of(file) == 3.0


def row(seed=1, return_mean="500.0", **more):
    machine = {"processor": "A", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "gymnasium": "1.4.0", "mujoco": "4", "box2d": "2"}
    figures = {"return_mean": return_mean, "return_std": "10.0", "best_env_steps": "10000"}
    return {"config": "ppo/cartpole", "seed": str(seed), "commit": "abc", **figures, **machine, **more}


def test_a_row_measured_again_is_the_same_on_its_own_processor(zoo):
    rows = {"1": row(), "2": row(2, "490.0")}
    assert zoo.compare(rows, rows["1"], row(commit="def")) == (True, "ppo/cartpole seed 1: 500.0 at abc, 500.0 at def: the same")
    fine, line = zoo.compare(rows, rows["1"], row(return_mean="499.9"))
    assert not fine and line.endswith("differs on the same processor with the same versions and code")
    assert not zoo.compare(rows, rows["1"], row(best_env_steps="20000"))[0]


@pytest.mark.parametrize("found, fine", [("478.0", True), ("477.9", False)])
def test_a_row_measured_on_another_processor_may_be_lower_by_as_much_as_seeds_differ(zoo, found, fine):
    rows = {"1": row(), "2": row(2, "490.0")}  # 490 − (500 − 490) − 2 · 10 / √100
    assert zoo.compare(rows, rows["1"], row(return_mean=found, processor="B"))[0] is fine
    assert "as processor did; at least 478.0 is expected" in zoo.compare(rows, rows["1"], row(return_mean=found, processor="B"))[1]


def test_a_row_replaces_the_older_one_of_its_seed(zoo, measured):
    measured("ppo/cartpole", (1, 1), (2, 1), (3, 1))
    zoo.write(row(1, "7.0"))
    assert [(each["seed"], each["return_mean"], each["commit"]) for each in zoo.rows_of("ppo/cartpole")] == [
        ("0", "1", ""),
        ("1", "7.0", "abc"),
        ("2", "3", ""),
    ]


def test_a_row_that_is_not_there_is_refused_in_one_line(zoo, measured):
    measured("ppo/cartpole", (1, 1))
    for name in ("ppo/cartpole", "ppo/cartpole:4", "ppo/nothing:1"):
        with pytest.raises(SystemExit, match=f"^error: there is no row {name}; a row is named config:seed, such as ppo/cartpole:1$"):
            zoo.check(argparse.Namespace(rows=[name]))


def test_a_row_says_what_it_was_measured_with(zoo):
    assert zoo.machine().keys() == set(zoo.MACHINE) and all(zoo.machine().values())
