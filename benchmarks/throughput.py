"""Environment steps a second, updates a second, peak memory and start-up of ours beside other libraries, in one run.

    python benchmarks/install.py
    python benchmarks/throughput.py [--repeats 5] [--threads 1] [--out benchmarks/results]      the whole table
    python benchmarks/throughput.py --cases ppo_cartpole [--peers ours sb3 bare_ppo]             one case

Same hyper-parameters, network, environments and threads (`cases.py`); repeats alternate over the peers, each measurement in a process of
its own and an environment of its own, which holds nothing else. Ours runs as a user runs it: progress bar, CSV and TensorBoard loggers and
checkpoints on, evaluation off. Libraries run with their defaults: Stable-Baselines3 and SBX log and save nothing. A `bare` loop is
written by hand in torch with the arithmetic of ours and nothing around it, in torch throughout. What else differs, each file in `peers/`
says in its head.

* A step of several agents is one action of one agent: three agents in 64 copies make 192 at once.
* The rate is that of training from the end of the first update on: imports, which some libraries make as late as then, construction and
  compiling are in nobody's.
* The first update is the first gradient step, in seconds from the launch of the process to its end.
* Memory is the peak of the process, and what the processes below it, such as workers, had to themselves after the first update.
* A ratio ours ÷ peer is the median of those within each repeat, whose parts lie close in time; rates are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import report
from cases import CASES, Case, Goal
from install import HERE, LIBRARIES, home_of, python_of

Figures = dict[str, float]
XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads={}"
MEASURES = {"rate": "steps/s", "memory_mb": "peak memory", "first_update_s": "first update"}


def check_installed(peers: list[str]) -> None:
    """End the program if a library has no environment."""
    missing = [home for home in dict.fromkeys(map(home_of, ["ours", *peers])) if not python_of(home).exists()]
    if missing:
        print(f"not installed: {' '.join(missing)}; python benchmarks/install.py --peers {' '.join(missing)}", file=sys.stderr)
        raise SystemExit(2)


def environment(threads: int) -> dict[str, str]:
    """Variables of a process that is measured."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "XLA_FLAGS": XLA_FLAGS.format(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        "PYTHONSAFEPATH": "1",  # else `python -m` would prefer the package of the current folder
        "PYTHONWARNINGS": "ignore",
        "PYTHONDONTWRITEBYTECODE": "",  # a checkout is compiled once, as what is installed is
    }


def measure(peer: str, name: str, share: float, threads: int, device: str) -> Figures:
    """One run in a fresh process."""
    command = [python_of(home_of(peer)), "-m", f"peers.{peer}", name, "--share", str(share), "--threads", str(threads), "--device", device]
    launched = ["--launched", repr(time.time())]
    result = subprocess.run([*command, *launched], capture_output=True, text=True, env=environment(threads))
    if result.returncode:
        raise SystemExit(f"{peer} failed in {name}:\n{result.stderr[-2000:]}")
    figures: Figures = json.loads(result.stdout.strip().splitlines()[-1])
    return figures | rates(CASES[name], figures)


def rates(case: Case, figures: Figures) -> Figures:
    """Environment steps and updates a second, after the first update."""
    seconds = figures["seconds_after"]
    return {"rate": (figures["env_steps"] - case.before_learning) / seconds, "update_rate": (figures["updates"] - 1) / seconds}


def ratio(runs: dict[str, list[Figures]], peer: str, measure: str) -> float:
    """Ours ÷ peer, the median over repeats."""
    return statistics.median(ours[measure] / theirs[measure] for ours, theirs in zip(runs["ours"], runs[peer], strict=True))


def case_rows(name: str, runs: dict[str, list[Figures]]) -> list[list[str]]:
    """A line for each peer."""
    rows = []
    for peer, figures in runs.items():
        middle = {key: statistics.median(each[key] for each in figures) for key in figures[0]}
        numbers = [f"{middle['rate']:,.0f}", f"{middle['update_rate']:,.0f}"]
        numbers += ["" if peer == "ours" else f"{ratio(runs, peer, 'rate'):.2f}"]
        numbers += [f"{middle['memory_mb']:,.0f}", f"{middle['first_update_s']:.1f}", " ".join(f"{each['rate']:,.0f}" for each in figures)]
        rows.append([name, peer, *numbers])
    return rows


def goal_rows(name: str, runs: dict[str, list[Figures]], goals: tuple[Goal, ...]) -> list[list[str]]:
    """A line for each goal whose peer was measured."""
    rows = []
    for goal in (each for each in goals if each.peer in runs):
        found = ratio(runs, goal.peer, goal.measure)
        sign = "≥" if goal.measure == "rate" else "≤"
        rows.append(
            [name, MEASURES[goal.measure], goal.peer, f"{sign} {goal.ratio:.2f}", f"{found:.2f}", "yes" if goal.reached(found) else "no"]
        )
    return rows


def render(results: dict[str, dict[str, list[Figures]]], head: list[str]) -> str:
    """The report."""
    columns = ["case", "peer", "steps/s", "updates/s", "ours ÷ it", "peak MB", "first update, s", "steps/s of each repeat"]
    rows = [row for name, runs in results.items() for row in case_rows(name, runs)]
    goals = [row for name, runs in results.items() for row in goal_rows(name, runs, CASES[name].goals)]
    shown = report.table(["case", "measure", "peer", "goal", "ours ÷ peer", "reached"], goals)
    return "\n".join(["# Throughput", "", *head, "", report.table(columns, rows), "", "## Goals", "", shown])


def main() -> None:
    """Measure; write after each case, so that nothing is lost when a later one fails."""
    known = sorted({"ours", *(peer for case in CASES.values() for peer in case.peers)})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peers", nargs="+", choices=known, help="ours is always among them; all of a case unless given")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of ours and Stable-Baselines3")
    parser.add_argument("--share", type=float, default=1.0, help="of each case's steps, to try out")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    peers = {name: [peer for peer in CASES[name].peers if peer in (options.peers or CASES[name].peers)] for name in options.cases}
    everyone = list(dict.fromkeys(peer for each in peers.values() for peer in each))
    check_installed(everyone)
    repeats = f"{options.repeats} alternating repeats, {options.share:g} of each case's steps, device {options.device}."
    head = [*report.machine(options.threads), report.libraries(everyone), repeats]
    results: dict[str, Any] = {}
    for name in options.cases:
        runs: dict[str, list[Figures]] = {peer: [] for peer in ("ours", *peers[name])}
        for _ in range(options.repeats):
            for peer, figures in runs.items():
                figures.append(measure(peer, name, options.share, options.threads, options.device))
        results[name] = runs
        text = render(results, head)
        report.write("throughput", text, {"head": head, "packages": everyone_packages(everyone), "cases": results}, options.out)


def everyone_packages(peers: list[str]) -> dict[str, dict[str, str]]:
    """The packages of each library's environment."""
    return {peer: report.packages_of(peer) for peer in peers if peer in LIBRARIES}


if __name__ == "__main__":
    main()
