"""Run the slow tests: the share of a day, or all of them.

    python .ci/slow.py [--date 2026-12-24] [--processes 2]    # the share of today or of that day, about an hour
    python .ci/slow.py --all [--processes 2]                  # every test that has no row of this commit; an interrupted call continues
    python .ci/slow.py --table                                # the rows by file, as Markdown

Tests are dealt to shares of an hour each by the seconds that they took, and days take the shares in turn, so that each test runs once in as
many days as there are shares. `tests/slow_tests.csv` holds one row for each test function, all its cases together; `--all` writes it, a
share does not. Until a test has a row, it counts as a minute, so shares may take longer. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "slow_tests.csv"
COLUMNS = ("test", "cases", "failed", "skipped", "seconds", "commit", "date")
SECONDS_OF_A_SHARE = 3600
ADDOPTS = "addopts=--strict-markers --import-mode importlib"
"""Those of setup.cfg, without its choice of tests."""
DEFAULT_SECONDS = 60.0
"""Estimate for a test that has no row yet."""
Row = dict[str, str]


def collect() -> Counter[str]:
    """Return the test functions that are marked as slow, each with its number of cases."""
    command = [sys.executable, "-m", "pytest", "-o", ADDOPTS, "--collect-only", "-q", "-m", "slow"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return Counter(line.split("[")[0] for line in output.splitlines() if "::" in line)


def read_rows() -> dict[str, Row]:
    """Return the rows of earlier calls by test."""
    return {row["test"]: row for row in csv.DictReader(RESULTS.read_text().splitlines())} if RESULTS.exists() else {}


def write_rows(rows: dict[str, Row]) -> None:
    """Write the rows in the order of their tests."""
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[test] for test in sorted(rows))


def deal(seconds: dict[str, float], limit: float) -> list[list[str]]:
    """Divide tests into as few shares as their sum needs, the longest first, each to the share that is shortest so far."""
    shares: list[list[str]] = [[] for _ in range(max(1, math.ceil(sum(seconds.values()) / limit)))]
    sums = [0.0] * len(shares)
    for test in sorted(seconds, key=lambda test: (-seconds[test], test)):
        shortest = sums.index(min(sums))
        shares[shortest].append(test)
        sums[shortest] += seconds[test]
    return shares


def commit() -> str:
    """Return the current commit."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def run(tests: list[str], processes: int) -> dict[str, Row]:
    """Run all slow cases of tests, and return a row for each test that ran."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = [
            "-o",
            ADDOPTS,
            "-q",
            "-m",
            "slow",
            "-n",
            str(processes),
            "--dist",
            "worksteal",
            f"--junitxml={report}",
        ]
        subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT)
        cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ()
        results: dict[str, list[tuple[float, set[str]]]] = defaultdict(list)
        for case in cases:
            test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').split('[')[0]}"
            results[test].append((float(case.get("time", 0)), {child.tag for child in case}))
    made = {"commit": commit(), "date": date.today().isoformat()}
    return {test: summarize(test, results[test]) | made for test in tests if test in results}


def summarize(test: str, cases: list[tuple[float, set[str]]]) -> Row:
    """Add up the cases of a test."""
    failed = sum(bool(tags & {"failure", "error"}) for _, tags in cases)
    skipped = sum("skipped" in tags for _, tags in cases)
    seconds = sum(seconds for seconds, _ in cases)
    return {"test": test, "cases": str(len(cases)), "failed": str(failed), "skipped": str(skipped), "seconds": f"{seconds:.1f}"}


def table(rows: dict[str, Row]) -> str:
    """Return the rows by file as a Markdown table."""
    files: dict[str, list[Row]] = defaultdict(list)
    for row in rows.values():
        files[row["test"].split("::")[0]].append(row)
    lines = ["| file | cases | failed | skipped | minutes | commits |", "|---|---|---|---|---|---|"]
    for file, group in [*sorted(files.items()), ("all", list(rows.values()))]:
        cases, failed, skipped, seconds = (sum(float(row[column]) for row in group) for column in COLUMNS[1:5])
        commits = " ".join(sorted({row["commit"] for row in group}))
        lines.append(f"| {file} | {cases:.0f} | {failed:.0f} | {skipped:.0f} | {seconds / 60:.1f} | {commits} |")
    return "\n".join(lines)


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run all slow tests, and keep their rows")
    parser.add_argument("--table", action="store_true", help="print the rows by file")
    parser.add_argument("--date", type=date.fromisoformat, default=date.today(), help="the day whose share is run")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="tests at the same time")
    arguments = parser.parse_args()
    rows = read_rows()
    if arguments.table:
        print(table(rows))
        return 0
    tests = collect()
    seconds = {test: float(rows[test]["seconds"]) if test in rows else DEFAULT_SECONDS for test in tests}
    if not arguments.all:
        shares = deal(seconds, SECONDS_OF_A_SHARE * arguments.processes)
        number = arguments.date.toordinal() % len(shares)
        print(f"share {number + 1} of {len(shares)}: {len(shares[number])} tests", flush=True)
        results = run(shares[number], arguments.processes)
        return int(any(row["failed"] != "0" for row in results.values()) or not results)
    rows = {test: row for test, row in rows.items() if test in tests}
    for test in sorted(tests, key=lambda test: (test in rows, seconds[test], test)):  # those that never ran come first
        if test not in rows or rows[test]["commit"] != commit():
            rows |= run([test], arguments.processes)
            write_rows(rows)
    return int(any(row["failed"] != "0" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
