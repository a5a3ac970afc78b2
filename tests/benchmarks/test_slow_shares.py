"""The slow tests are dealt to days, and what they did is kept."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / ".ci" / "slow.py"


@pytest.fixture
def slow():
    spec = spec_from_file_location("slow", FILE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shares_hold_each_test_once_and_take_about_equally_long(slow):
    seconds = {"a": 50.0, "b": 40.0, "c": 30.0, "d": 20.0, "e": 10.0}
    assert slow.deal(seconds, 60) == [["a"], ["b", "e"], ["c", "d"]]  # 150 seconds are three shares of at most 60


def test_a_test_that_is_longer_than_a_share_is_a_share(slow):
    assert slow.deal({"long": 100.0, "short": 10.0}, 60) == [["long"], ["short"]]


def test_without_slow_tests_there_is_one_empty_share(slow):
    assert slow.deal({}, 60) == [[]]


@pytest.mark.thorough
def test_all_runs_each_slow_test_and_continues_with_those_that_have_no_row_of_the_commit(slow, monkeypatch, tmp_path, capfd):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('n', [1, 2, 3])\ndef test_a(n):\n    assert n < 3\n"
        "@pytest.mark.slow\ndef test_b():\n    pytest.skip()\ndef test_fast():\n    pass\n"
    )
    monkeypatch.setattr(slow, "ROOT", tmp_path)
    monkeypatch.setattr(slow, "RESULTS", tmp_path / "rows.csv")
    monkeypatch.setattr(slow, "commit", lambda: "0123456789")
    monkeypatch.setattr(sys, "argv", ["slow.py", "--all", "--processes", "0"])
    assert slow.main() == 1
    rows = slow.read_rows()
    assert {test: (row["cases"], row["failed"], row["skipped"]) for test, row in rows.items()} == {
        "test_some.py::test_a": ("3", "1", "0"),
        "test_some.py::test_b": ("1", "0", "1"),
    }
    (tmp_path / "test_some.py").write_text((tmp_path / "test_some.py").read_text().replace("def test_b", "def test_c"))
    capfd.readouterr()
    assert slow.main() == 1
    assert set(slow.read_rows()) == {"test_some.py::test_a", "test_some.py::test_c"}
    assert "1 skipped" in (printed := capfd.readouterr().out) and "failed" not in printed
    monkeypatch.setattr(sys, "argv", ["slow.py", "--table"])
    assert slow.main() == 0 and "| test_some.py | 4 | 1 | 1 |" in capfd.readouterr().out
