"""Train packaged configs with several seeds, judge what they learned, and write the table of docs/zoo.md.

    python benchmarks/zoo.py run [--configs ppo/cartpole a2c/*] [--seeds 1 2 3] [--processes 2] [--folder zoo_runs]
    python benchmarks/zoo.py table

`run` trains each config with each seed as a user does (`lightning-rl fit --config NAME --seed_everything SEED`), judges its best checkpoint
over episodes that no run has seen (`evaluate --seed 50000`), and appends a line to `benchmarks/results/<algorithm>_<config>.csv`. Lines
that are there are not made again; a run that was interrupted continues where it stands. `table` writes what stands there between the marks
in docs/zoo.md, beside the figures of `references.py`, and in short into README.md.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import json
import math
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import yaml
from references import ATTEMPTS, REFERENCES, Reference

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- zoo: begin -->", "<!-- zoo: end -->"
COLUMNS = ("config", "seed", "return_mean", "return_std", "episodes", "env_steps", "minutes", "processes")
COLUMNS += ("lightning_rl", "torch", "command")
EPISODES = 100
WRITING = Lock()
"""Two seeds may end at once."""
Row = dict[str, str]


def results_file(config: str) -> Path:
    """Where the results of a config stand."""
    return RESULTS / f"{config.replace('/', '_')}.csv"


def rows_of(config: str) -> list[Row]:
    """Its results, one a seed."""
    file = results_file(config)
    return list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []


def call(*arguments: object) -> str:
    """What `lightning-rl` prints, which must end well."""
    result = subprocess.run([sys.executable, "-m", "lightning_rl", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        raise RuntimeError(result.stderr.strip())
    return result.stdout


def minutes_of(metrics: Path) -> float:
    """What a run took, as its last row says; an evaluation has a row of its own, which does not, where nothing else is logged."""
    return max(float(row["time/time_elapsed"] or 0) for row in csv.DictReader(metrics.read_text().splitlines())) / 60


def train(config: str, seed: int, folder: Path, processes: int) -> None:
    """One run and its judgement; the minutes are those of training, evaluations included."""
    home, name = folder / config, f"seed_{seed}"
    command = ["fit", "--config", config, "--seed_everything", seed]
    call(*command, "--trainer.default_root_dir", home, "--trainer.run_name", name, "--ckpt_path", "last")
    (best,) = home.rglob(f"{name}/checkpoints/best.ckpt")
    last = best.with_name("last.ckpt")
    judged = json.loads(call("evaluate", "--ckpt_path", best, "--episodes", EPISODES, "--seed", 50_000, "--json").splitlines()[-1])
    steps = json.loads(call("evaluate", "--ckpt_path", last, "--episodes", 1, "--json").splitlines()[-1])["env_steps"]
    figures = {"return_mean": round(judged["return_mean"], 3), "return_std": round(judged["return_std"], 3), "episodes": EPISODES}
    minutes = minutes_of(best.parents[1] / "metrics.csv")
    made = {"minutes": round(minutes, 2), "processes": processes, "lightning_rl": version("lightning_rl"), "torch": version("torch")}
    line = {"config": config, "seed": seed, **figures, "env_steps": steps, **made, "command": "lightning-rl " + " ".join(map(str, command))}
    file = results_file(config)
    file.parent.mkdir(exist_ok=True)
    with WRITING, file.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        if not stream.tell():
            writer.writeheader()
        writer.writerow(line)
    print(f"{config} seed {seed}: {judged['return_mean']:.1f} in {minutes:.1f} min", flush=True)


def run(options: argparse.Namespace) -> None:
    """All runs that have no result yet, the configs in turn."""
    configs = [name for pattern in options.configs for name in REFERENCES if fnmatch.fnmatch(name, pattern)]
    if missing := [pattern for pattern in options.configs if not fnmatch.filter(REFERENCES, pattern)]:
        raise SystemExit(f"error: {missing[0]} is none of the configs in references.py: {', '.join(REFERENCES)}")
    todo = [(name, seed) for name in configs for seed in options.seeds if str(seed) not in {row["seed"] for row in rows_of(name)}]
    folder = options.folder.resolve()
    failed = 0
    with ThreadPoolExecutor(options.processes) as pool:
        futures = {pool.submit(train, name, seed, folder, options.processes): (name, seed) for name, seed in todo}
        for future, (name, seed) in futures.items():
            if (error := future.exception()) is not None:
                failed += 1
                print(f"{name} seed {seed} failed: {error}", file=sys.stderr, flush=True)
    raise SystemExit(1 if failed else 0)


def mean_of(config: str) -> float:
    """Of its seeds; minus infinity if none was measured."""
    returns = [float(row["return_mean"]) for row in rows_of(config)]
    return statistics.mean(returns) if returns else -math.inf


def environment_of(config: str) -> str:
    """What a config learns."""
    env = yaml.safe_load((ROOT / "configs" / f"{config}.yaml").read_text("utf-8"))["model"]["init_args"]["env"]
    return env if isinstance(env, str) else str(env["id"])


def verdict(config: str, reference: Reference | None) -> str:
    """Whether the mean is within two standard errors of the reference's own runs or episodes; if not, which of our configs is the best."""
    if reference is None:
        return ""
    if reference.error is None:
        return "no error published"
    least = reference.mean - 2 * reference.error
    if mean_of(config) >= least - 1e-9:
        return "yes"
    best = max((name for name in REFERENCES if environment_of(name) == environment_of(config)), key=mean_of)
    return f"no: below {least:.1f}" + (f", which {best} reaches" if mean_of(best) >= least - 1e-9 else "")


def line(config: str) -> str:
    """A row of the table."""
    reference, rows = REFERENCES[config], sorted(rows_of(config), key=lambda row: int(row["seed"]))
    theirs = "" if reference is None else f"{reference}"
    if not rows:
        return f"| {config} | *not yet measured* | | | {theirs} | {ATTEMPTS.get(config, '')} |"
    returns = [float(row["return_mean"]) for row in rows]
    spread = f" ± {statistics.stdev(returns):.1f}" if len(returns) > 1 else ""
    note = "; ".join(filter(None, [verdict(config, reference), ATTEMPTS.get(config, "")]))
    return f"| {config} | {mean_of(config):.1f}{spread} ({each_of(rows)}) | {costs_of(rows)} | {theirs} | {note} |"


def short_line(config: str) -> str:
    """A row of README's table."""
    reference, rows = REFERENCES[config], sorted(rows_of(config), key=lambda row: int(row["seed"]))
    return f"| {config} | {each_of(rows)} | {costs_of(rows)} | {'' if reference is None else f'{reference.mean:.4g}'} |"


def each_of(rows: list[Row]) -> str:
    """The return of each seed."""
    returns = [float(row["return_mean"]) for row in rows]
    return " ".join(f"{value:.0f}" if abs(value) >= 20 else f"{value:.1f}" for value in returns)


def costs_of(rows: list[Row]) -> str:
    """Two columns: environment steps and minutes."""
    steps = span([float(row["env_steps"]) for row in rows], "{:,.0f}")
    return f"{steps} | {span([float(row['minutes']) for row in rows], '{:.1f}')}"


def span(values: list[float], show: str) -> str:
    """From the least to the most, one number where they are shown alike."""
    return " to ".join(dict.fromkeys([show.format(min(values)), show.format(max(values))]))


def table() -> str:
    """All rows, in the order of `references.py`."""
    head = "| config | return, mean ± standard deviation over seeds (each seed) | environment steps | minutes | reference | as good? |"
    return "\n".join([head, "|---|---|---|---|---|---|", *map(line, REFERENCES)])


def short_table() -> str:
    """README's: what is measured with three seeds or more."""
    head = "| config | return of the best checkpoint, a number a seed | environment steps | minutes | reference |"
    return "\n".join([head, "|---|---|---|---|---|", *(short_line(config) for config in REFERENCES if len(rows_of(config)) >= 3)])


PAGES = {"docs/zoo.md": table, "README.md": short_table}
"""Where tables stand."""


def write_tables() -> None:
    """Put them in their places."""
    for name, make in PAGES.items():
        page = ROOT / name
        before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise SystemExit(f"error: {name} has no {BEGIN} … {END}")
        page.write_text(f"{before}{BEGIN}\n{make()}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train and judge")
    runs.add_argument("--configs", nargs="+", default=["*"], help="names or patterns (*)")
    runs.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="(1 2 3)")
    runs.add_argument("--processes", type=int, default=2, help="runs at once (2)")
    runs.add_argument("--folder", type=Path, default=Path("zoo_runs"), help="where runs lie (zoo_runs)")
    commands.add_parser("table", help="write the tables")
    options = parser.parse_args()
    run(options) if options.command == "run" else write_tables()


if __name__ == "__main__":
    main()
