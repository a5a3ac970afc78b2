"""The speed of commits: write that of one into benchmarks/history.csv, or compare two in one run.

    python benchmarks/install.py --peers ours sb3
    python benchmarks/history.py record [COMMIT] [--cases ppo_cartpole dqn_cartpole sac_pendulum] [--seeds 1 2 3] [--repeats 3]
    python benchmarks/history.py compare OLD NEW [--cases …] [--repeats 3]

`record` measures a commit (default: the current one) beside Stable-Baselines3, in turns: steps a second in cases of `throughput.py`, and
the seconds of `time_to_solve.py` until CartPole-v1 is solved. It writes a row for each with the ratio ours ÷ theirs, the median of those
within each repeat, and the line of README.md that shows the seconds by commit. `compare` measures two commits in turns and prints
NEW ÷ OLD. A commit is measured as it was, from a work tree of its own, by today's scripts: one whose settings have other names fails.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import report
import time_to_solve
from cases import CASES
from install import HERE
from throughput import check_installed, measure

FILE = HERE / "history.csv"
README = HERE.parent / "README.md"
BEGIN, END = "<!-- history: begin -->", "<!-- history: end -->"
COLUMNS = ("commit", "date", "case", "measure", "ours", "sb3", "ratio", "repeats", "processor")
SOLVE = "time_to_solve"
Row = dict[str, str]


def git(*arguments: str) -> str:
    """What a command of git prints."""
    return subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A work tree of a commit, while a context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def rate(case: str, tree: Path | None = None) -> float:
    """Steps a second in a case: of the package in a tree, or of Stable-Baselines3."""
    if tree is not None:
        os.environ["PYTHONPATH"] = str(tree)  # processes import the package from there
    return measure("sb3" if tree is None else "ours", case, 1.0, 1, "cpu")["rate"]


def row_of(commit: str, case: str, kind: str, ours: list[float], theirs: list[float]) -> Row:
    """A row of the file."""
    ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    numbers = {"ours": statistics.median(ours), "sb3": statistics.median(theirs), "ratio": ratio}
    shown = {name: f"{float(f'{value:.4g}'):.9g}" for name, value in numbers.items()}  # 19010, not 1.901e+04
    place = {"commit": commit, "date": date.today().isoformat(), "case": case, "measure": kind}
    return {**place, **shown, "repeats": str(len(ours)), "processor": report.processor()}


def record(options: argparse.Namespace) -> None:
    """Measure a commit, and write its rows."""
    check_installed(["sb3"])
    commit = git("rev-parse", "--short=10", options.commit)
    rows = []
    with checked_out(commit) as tree:
        for case in options.cases:
            pairs = [(rate(case, tree), rate(case)) for _ in range(options.repeats)]
            rows.append(row_of(commit, case, "steps/s", *map(list, zip(*pairs, strict=True))))
            print(rows[-1], flush=True)
        os.environ["PYTHONPATH"] = str(tree)
        solved = [(time_to_solve.ours(seed, 1)["seconds"], time_to_solve.sb3(seed, 1)["seconds"]) for seed in options.seeds]
        rows.append(row_of(commit, SOLVE, "seconds", *map(list, zip(*solved, strict=True))))
        print(rows[-1], flush=True)
    write(rows)


def write(rows: list[Row]) -> None:
    """Put rows into the file, in the place of older ones of the same commit and case, and the line into the README."""
    new = {(row["commit"], row["case"]) for row in rows}
    kept = [row for row in read() if (row["commit"], row["case"]) not in new]
    with FILE.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])
    report.put_between(README, BEGIN, END, line())


def read() -> list[Row]:
    """The rows of the file, oldest first."""
    return list(csv.DictReader(FILE.read_text().splitlines())) if FILE.exists() else []


def line() -> str:
    """The README's: seconds to solve CartPole-v1 of the last five commits measured."""
    rows = [row for row in read() if row["case"] == SOLVE][-5:]
    each = ", ".join(
        f"{float(row['ours']):.1f} at {row['commit'][:7]} (median ratio to Stable-Baselines3: {float(row['ratio']):.2f})" for row in rows
    )
    begins = "Seconds of training until CartPole-v1 is solved (475 over 100 episodes), packaged settings and those of its zoo"
    return f"{begins}, by commit: {each}."


def compare(options: argparse.Namespace) -> None:
    """Print the rates of two commits and their ratio."""
    check_installed([])
    with checked_out(options.old) as old, checked_out(options.new) as new:
        for case in options.cases:
            pairs = [(rate(case, old), rate(case, new)) for _ in range(options.repeats)]
            before, after = (statistics.median(each) for each in zip(*pairs, strict=True))
            ratio = statistics.median(two / one for one, two in pairs)
            print(f"{case}: {before:,.0f} steps/s at {options.old}, {after:,.0f} at {options.new}, {ratio:.2f}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    records = commands.add_parser("record", help="measure a commit")
    records.add_argument("commit", nargs="?", default="HEAD")
    records.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    compares = commands.add_parser("compare", help="measure two commits")
    compares.add_argument("old")
    compares.add_argument("new")
    for each in (records, compares):
        each.add_argument("--cases", nargs="+", choices=CASES, default=["ppo_cartpole", "dqn_cartpole", "sac_pendulum"])
        each.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    {"record": record, "compare": compare}[options.command](options)


if __name__ == "__main__":
    main()
