"""How costs grow: steps with the number of environments, a replay buffer with its size, memory with steps; and what start-up takes.

    python benchmarks/install.py --peers ours sb3
    benchmarks/.venvs/ours/bin/pip install -c constraints.txt envpool    # for that of `environments`; not before `throughput.py`
    python benchmarks/scale.py [--parts environments replay startup several_agents self_play] [--repeats 3] [--out benchmarks/results]

* Environments: CartPole-v1, microseconds of a vector step of our collector, whose policy of 64 x 64 acts, and of the bare vector
  environment; medians. All reset in the step after an episode's end.
* Replay: HalfCheetah's rows added one by one until the buffer is full, then batches of 256 drawn as tensors.
* Start-up: seconds from launch, medians. The first update is PPO's on CartPole, 8 x 128, as in `throughput.py`.
* Several agents: what a process has in memory after each tenth of at least a million steps of agents, run once. PPO learns VMAS's
  simple_spread with 64 copies, and MultiAgent a game in Python by PPO and by SAC, whose replay buffer is full before the first tenth ends.
* Self-play: CPU microseconds of a step and memory in the second and the last tenth of a run of tic-tac-toe with a thousand snapshots, for
  windows of 10 and of 1,000, run once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from install import python_of
from throughput import check_installed, environment, measure

NUM_ENVS = (1, 8, 64, 512)
VECTORIZATIONS = ("auto", "sync", "native", "envpool")
AGENT_STEPS = 1_000_000
SELF_PLAY_STEPS = 128_000
ROWS = (10_000, 100_000, 1_000_000, 5_000_000)
PYTHONS = {peer: python_of(peer) for peer in ("ours", "sb3")}
STARTS = {
    "import lightning_rl": ("ours", "-c", "import lightning_rl"),
    "import stable_baselines3": ("sb3", "-c", "import stable_baselines3"),
    "import torch": ("ours", "-c", "import torch"),
    "lightning-rl --help": ("ours", "-m", "lightning_rl", "--help"),
}
Part = Callable[[int, int], tuple[str, Any]]
"""Measures with so many repeats and threads. Returns a section of the report, and its figures."""


def output(peer: str, arguments: list[str], threads: int) -> str:
    """The last line of a fresh process."""
    command = [PYTHONS[peer], *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(threads))
    if result.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{result.stderr[-2000:]}")
    return result.stdout.strip().splitlines()[-1] if result.stdout.strip() else ""


def medians(call: Callable[[], dict[str, float]], repeats: int) -> dict[str, float]:
    """Of each figure over repeats."""
    found = [call() for _ in range(repeats)]
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def environments(repeats: int, threads: int) -> tuple[str, Any]:
    """A line for each kind and number of environments."""
    figures: dict[str, Any] = {}
    rows = []
    for vectorization in VECTORIZATIONS:
        for num_envs in NUM_ENVS:
            arguments = ["-m", "peers.collecting", vectorization, str(num_envs), "--threads", str(threads)]
            found = medians(lambda given=arguments: json.loads(output("ours", given, threads)), repeats)
            figures[f"{vectorization} {num_envs}"] = found
            both = found["collector"], found["bare"]
            rows.append([vectorization, str(num_envs), *(f"{each:,.1f}" for each in both), *(f"{each / num_envs:,.2f}" for each in both)])
    head = ["vectorization", "environments", "µs a vector step, ours", "bare", "µs an environment step, ours", "bare"]
    return "## Environments\n\n" + report.table(head, rows), figures


def replay(repeats: int, threads: int) -> tuple[str, Any]:
    """A line for each library and size, measured once: it takes long, and averages over all rows."""
    figures: dict[str, Any] = {}
    rows = []
    for size in ROWS:
        for peer in ("ours", "sb3"):
            found = json.loads(output(peer, ["-m", "peers.replaying", peer, str(size)], threads))
            figures[f"{peer} {size}"] = found
            rows.append([f"{size:,}", peer, f"{found['memory_mb']:,.0f}", f"{found['add_us']:.1f}", f"{found['draw_us']:.0f}"])
    return "## Replay\n\n" + report.table(["rows", "library", "MB", "µs to add one", "µs to draw 256"], rows), figures


def startup(repeats: int, threads: int) -> tuple[str, Any]:
    """A line for each way to start."""
    figures: dict[str, list[float]] = {name: [] for name in (*STARTS, "first update, ours", "first update, sb3")}
    for _ in range(repeats):
        for name, (peer, *arguments) in STARTS.items():
            start = time.perf_counter()
            output(peer, arguments, threads)
            figures[name].append(time.perf_counter() - start)
        for peer in PYTHONS:
            figures[f"first update, {peer}"].append(measure(peer, "ppo_cartpole", 0.0, threads, "cpu")["first_update_s"])
    rows = [[name, f"{statistics.median(each):.2f}", " ".join(f"{one:.2f}" for one in each)] for name, each in figures.items()]
    return "## Start-up\n\n" + report.table(["what", "seconds", "all"], rows), figures


def several_agents(repeats: int, threads: int) -> tuple[str, Any]:
    """A line for each run, measured once: it takes long."""
    figures: dict[str, Any] = {}
    rows = []
    for run in ("ppo", "multi_agent"):
        found = json.loads(output("ours", ["-m", "peers.growing", run, str(AGENT_STEPS), "--threads", str(threads)], threads))
        figures[run] = found
        first, *_, last = found["memory_mb"]
        numbers = first, last, last - first, max(found["memory_mb"]), found["peak_mb"]
        rows.append([run, f"{found['agent_steps']:,}", *(f"{each:,.1f}" for each in numbers)])
    head = ["run", "steps of agents", "MB after a tenth", "at the end", "more", "most at a tenth's end", "peak"]
    return "## Several agents\n\n" + report.table(head, rows), figures


def self_play(repeats: int, threads: int) -> tuple[str, Any]:
    """A line for each window, measured once: it takes long."""
    figures: dict[str, Any] = {}
    rows = []
    for window in (10, 1_000):
        arguments = ["-m", "peers.growing", f"self_play_{window}", str(SELF_PLAY_STEPS), "--threads", str(threads)]
        found = figures[f"window {window}"] = json.loads(output("ours", arguments, threads))
        tenth = found["agent_steps"] / len(found["cpu_s"])
        early, late = ((found["cpu_s"][k] - found["cpu_s"][k - 1]) / tenth * 1e6 for k in (1, -1))
        memory = found["memory_mb"][1], found["memory_mb"][-1]
        rows.append([f"{window:,}", *(f"{each:,.0f}" for each in (early, late)), f"{late / early:.2f}"])
        rows[-1] += [*(f"{each:,.0f}" for each in memory), f"{memory[1] / memory[0]:.2f}"]
    head = ["window", "µs a step, second tenth", "last tenth", "ratio", "MB, second tenth", "last tenth", "ratio"]
    return "## Self-play\n\n" + report.table(head, rows), figures


PARTS: dict[str, Part] = {
    "environments": environments,
    "replay": replay,
    "startup": startup,
    "several_agents": several_agents,
    "self_play": self_play,
}


def main() -> None:
    """Measure and write, after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    peers = [] if {*options.parts} <= {"several_agents", "self_play"} else ["sb3"]
    check_installed(peers)
    head = [*report.machine(options.threads), *filter(None, [report.libraries(peers)]), f"{options.repeats} repeats."]
    sections, figures = ["# Scale", "\n".join(head)], {}
    for part in options.parts:
        section, figures[part] = PARTS[part](options.repeats, options.threads)
        sections.append(section)
        report.write("scale", "\n\n".join(sections), {"head": head, **figures}, options.out)


if __name__ == "__main__":
    main()
