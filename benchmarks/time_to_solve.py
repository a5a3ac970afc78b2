"""Seconds until CartPole-v1 is solved: ours with its packaged config beside Stable-Baselines3 with its zoo's settings.

    python benchmarks/install.py --peers ours sb3
    python benchmarks/time_to_solve.py [--seeds 1 2 3 4 5] [--threads 1] [--out benchmarks/results]

A run is solved when the mean return of its last 100 training episodes is at least 475, looked at after each iteration; then it stops. Ours
is `lightning-rl fit --config ppo/cartpole --evaluation null` with its progress bar, loggers and checkpoints; Stable-Baselines3 logs and
saves nothing. Seeds alternate, each run in a fresh process; a run that ends unsolved counts as infinite. The ratio is that of medians.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report
from install import python_of
from throughput import check_installed, environment

GOAL = 0.5
UNSOLVED = {"seconds": math.inf, "seconds_from_launch": math.inf, "env_steps": math.inf}
Figures = dict[str, float]


def run(command: list[str | Path], threads: int) -> Figures:
    """The figures of one run, which prints them when it is solved."""
    result = subprocess.run(command, capture_output=True, text=True, env=environment(threads))
    if result.returncode:
        raise SystemExit(f"a run failed: {' '.join(map(str, command))}\n{result.stderr[-2000:]}")
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"seconds"')]
    return json.loads(lines[-1]) if lines else UNSOLVED


def ours(seed: int, threads: int) -> Figures:
    """As a user runs it, and a callback that stops."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"config": "ppo/cartpole", "seed_everything": seed, "evaluation": "null"}
        settings |= {"trainer.default_root_dir": folder, "trainer.torch_threads": threads}
        settings |= {"trainer.callbacks+": "peers.solve_ours.StopWhenSolved", "trainer.callbacks.launched": repr(time.time())}
        return run([sys.executable, "-m", "lightning_rl", "fit", *(f"--{name}={value}" for name, value in settings.items())], threads)


def sb3(seed: int, threads: int) -> Figures:
    """The same of Stable-Baselines3."""
    settings = {"seed": seed, "threads": threads, "launched": repr(time.time())}
    return run([python_of("sb3"), "-m", "peers.solve_sb3", *(f"--{name}={value}" for name, value in settings.items())], threads)


def render(runs: dict[str, list[Figures]], head: list[str]) -> str:
    """The report."""
    rows = []
    for peer, figures in runs.items():
        middle = {key: statistics.median(each[key] for each in figures) for key in UNSOLVED}
        unsolved = sum(math.isinf(each["seconds"]) for each in figures)
        numbers = [f"{middle['seconds']:.1f}", f"{middle['seconds_from_launch']:.1f}", f"{middle['env_steps']:,.0f}", str(unsolved)]
        rows.append([peer, *numbers, " ".join(f"{each['seconds']:.1f}" for each in figures)])
    columns = ["peer", "seconds of training", "seconds from launch", "env steps", "unsolved", "seconds of each seed"]
    ratios = [f"{measure.replace('_', ' ')} {ratio(runs, measure):.2f}" for measure in ("seconds", "seconds_from_launch")]
    reached = "reached" if ratio(runs, "seconds") <= GOAL else "not reached"
    verdict = f"Ours ÷ Stable-Baselines3: {', '.join(ratios)}. The goal, at most {GOAL:.2f} of the seconds of training, is {reached}."
    return "\n".join(["# Time to solve CartPole-v1", "", *head, "", report.table(columns, rows), "", verdict])


def ratio(runs: dict[str, list[Figures]], measure: str) -> float:
    """Ours ÷ theirs, of medians; not a number if neither was solved."""
    mine, theirs = (statistics.median(each[measure] for each in runs[peer]) for peer in ("ours", "sb3"))
    return mine / theirs


def finite(figures: Figures) -> dict[str, float | None]:
    """As JSON can say it."""
    return {name: None if math.isinf(value) else value for name, value in figures.items()}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    check_installed(["sb3"])
    runs: dict[str, list[Figures]] = {"ours": [], "sb3": []}
    for seed in options.seeds:
        runs["ours"].append(ours(seed, options.threads))
        runs["sb3"].append(sb3(seed, options.threads))
    head = [*report.machine(options.threads), report.libraries(["sb3"]), f"Seeds {' '.join(map(str, options.seeds))}."]
    figures = {peer: [finite(each) for each in found] for peer, found in runs.items()}
    report.write("time_to_solve", render(runs, head), {"head": head, "runs": figures}, options.out)


if __name__ == "__main__":
    main()
