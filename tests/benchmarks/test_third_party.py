"""benchmarks/third_party.py: environments of other packages."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def third_party(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("third_party")


def test_the_table_has_rows_of_packages_that_the_script_tries_in_its_order(third_party):
    head, _, *rows = third_party.OUT.read_text().splitlines()
    assert head == f"| {' | '.join(third_party.HEAD)} |"
    packages = [row.split()[1] for row in rows]
    assert packages == [package for package in third_party.CASES if package in packages] != []
    assert {len(row.replace("\\|", "").split("|")) - 2 for row in rows} == {len(third_party.HEAD)}


def test_a_failed_command_is_told_by_its_error_in_a_cell_of_a_table(third_party):
    output = "Seed set to 1\nlightning-rl: error: env.id a|b is unknown\n[end of output]\n"
    assert third_party.last_line(output) == "lightning-rl: error: env.id a\\|b is unknown"
    assert third_party.last_line("Traceback …\n  x = 1 / 0\nZeroDivisionError: division by zero\n(--debug shows all calls)\n") == (
        "ZeroDivisionError: division by zero"
    )
    assert third_party.last_line("one\ntwo\n") == "two"
