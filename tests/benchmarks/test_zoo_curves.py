"""Learning curves of the zoo's rows."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path

import pytest
from matplotlib import image

from tests.reports.folders import write_run

ROOT = Path(__file__).parents[2]
CONFIGS = ("ppo/cartpole", "trpo/cartpole", "iql/pendulum")


@pytest.fixture
def curves(monkeypatch, tmp_path):
    """The script, on rows of two seeds of three configs."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script, zoo = importlib.import_module("zoo_curves"), importlib.import_module("zoo")
    monkeypatch.setattr(zoo, "RESULTS", tmp_path)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "CURVES", tmp_path / "curves")
    monkeypatch.setattr(script, "PICTURE", tmp_path / "picture.png")
    for config in CONFIGS:
        with zoo.results_file(config).open("w", newline="") as stream:
            csv.writer(stream).writerows([["config", "seed", "env_steps"], [config, 1, 200], [config, 2, 100]])
    return script


def test_the_curves_of_measured_runs_are_kept_and_those_of_other_seeds_stay(curves, tmp_path):
    write_run(tmp_path / "runs/ppo/cartpole/PPO/CartPole-v1/seed_1", {100: [1, 2], 200: [10, 20]})
    write_run(tmp_path / "runs/ppo/cartpole/PPO/CartPole-v1/seed_3", {100: [7]})  # has no row
    curves.keep("ppo/cartpole", tmp_path / "runs")
    write_run(tmp_path / "later/ppo/cartpole/PPO/CartPole-v1/seed_2", {100: [4]})
    write_run(tmp_path / "later/ppo/cartpole/PPO/CartPole-v1/seed_1", {100: [9]})  # measured again, and interrupted before its 200 steps
    curves.keep("ppo/cartpole", tmp_path / "later")
    rows = (tmp_path / "curves/ppo_cartpole.csv").read_text().splitlines()
    assert rows == ["seed,counted,count,return", "1,env_steps,100,1.5", "1,env_steps,200,15", "2,env_steps,100,4"]
    counted, kept = curves.read("ppo/cartpole")
    assert counted == "env_steps" and {seed: curve.tolist() for seed, curve in kept.items()} == {
        "1": [[100, 1.5], [200, 15]],
        "2": [[100, 4]],
    }


def test_a_run_that_counts_updates_is_left_out_until_it_has_made_them_all(curves, tmp_path):
    write_run(tmp_path / "runs/iql/pendulum/IQL/Pendulum-v1/seed_1", {}, counter="updates", max_updates=200)
    write_run(tmp_path / "runs/iql/pendulum/IQL/Pendulum-v1/seed_2", {100: [4]}, counter="updates", max_updates=200)
    curves.keep("iql/pendulum", tmp_path / "runs")
    assert curves.read("iql/pendulum") == ("env_steps", {})


@pytest.mark.thorough
def test_the_picture_has_a_panel_for_each_config_and_none_for_others(curves, tmp_path):
    for number, config in enumerate(CONFIGS):
        counter = "updates" if config.startswith("iql") else "env_steps"
        length = {"max_updates": 200} if counter == "updates" else {}
        write_run(tmp_path / "runs" / config / "any/any/seed_1", {100: [number], 200: [10]}, counter=counter, **length)
        curves.keep(config, tmp_path / "runs")
    curves.draw(list(CONFIGS))
    picture = image.imread(tmp_path / "picture.png")[..., :3]
    width = picture.shape[1] // 4
    centers = [picture[:, k * width + width // 3 : (k + 1) * width - width // 3] for k in range(4)]
    assert [bool((center == 1).all()) for center in centers] == [False, False, False, True]
    assert curves.read("dqn/cartpole") == ("env_steps", {})
