"""Rows of the history of speed, and the line that shows them."""

import csv
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def history(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("history")
    monkeypatch.setattr(module, "FILE", tmp_path / "history.csv")
    monkeypatch.setattr(module, "README", tmp_path / "README.md")
    module.README.write_text("before\n<!-- history: begin -->\nold\n<!-- history: end -->\nafter\n")
    return module


def test_a_row_holds_medians_and_the_median_of_the_ratios_within_each_repeat(history):
    row = history.row_of("abc", "ppo_cartpole", "steps/s", [10.0, 40.0, 90.0], [10.0, 20.0, 30.0])
    assert (row["ours"], row["sb3"], row["ratio"], row["repeats"]) == ("40", "20", "2", "3")


def test_a_commit_that_is_measured_again_replaces_its_rows_and_the_readme_shows_the_newest(history):
    for number in range(6):
        history.write([history.row_of(f"commit{number}aa", "time_to_solve", "seconds", [4.0 + number], [8.0])])
    history.write([history.row_of("commit5aa", "time_to_solve", "seconds", [2.0], [8.0])])
    with history.FILE.open() as stream:
        assert [row["commit"] for row in csv.DictReader(stream)] == [f"commit{number}aa" for number in range(6)]
    text = history.README.read_text()
    assert "commit0" not in text and "2.0 at commit5 (median ratio to Stable-Baselines3: 0.25)." in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text


def test_a_commit_is_measured_and_not_the_files_in_the_current_folder(history, monkeypatch, tmp_path):
    package = tmp_path / "lightning_rl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("print('of the commit')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(FOLDER.parent)
    command = [sys.executable, "-m", "lightning_rl"]
    found = subprocess.run(command, capture_output=True, text=True, env=history.time_to_solve.environment(1))
    assert found.stdout == "of the commit\n"
