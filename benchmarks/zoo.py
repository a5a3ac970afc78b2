"""Train packaged configs with several seeds, judge what they learned, and write the table of docs/zoo.md.

    python benchmarks/zoo.py run [--configs ppo/cartpole a2c/*] [--seeds 1 2 3] [--processes 2] [--folder zoo_runs] [--again]
    python benchmarks/zoo.py check ppo/cartpole:1 [a2c/acrobot:3 …]
    python benchmarks/zoo.py keep ppo/cartpole:1 […] [--folder zoo_runs]
    python benchmarks/zoo.py equal [--configs …] [--seeds 1 2 3] [--processes 2] [--folder zoo_runs]
    python benchmarks/zoo.py pack ppo/bipedalwalker:1 […] [--folder zoo_runs]
    python benchmarks/zoo.py table

`run` trains each config with each seed as a user does (`lightning-rl fit --config NAME --seed_everything SEED`), judges its best checkpoint
over episodes that no run has seen (`evaluate --seed 50000`), and writes a row to `benchmarks/results/<algorithm>_<config>.csv`: what was
found, and the commit, processor and versions that found it. Rows that exist are kept, with `--again` those of the current commit; an
interrupted run continues. `check` trains and judges rows again and compares: with the processor, the versions and the code of a row the
return is the same, elsewhere it may be lower than every seed's by no more than the seeds differ. `keep` makes the best checkpoints of runs
the agents that come with the package (`zoo:ppo/cartpole`). `equal` trains configs that take more steps than their references with as many,
and writes rows to `benchmarks/results/equal_steps`. `pack` archives runs that have not ended in `benchmarks/unfinished`, to be
committed; `run` goes on with them there, on any machine, and removes the archive when the row is written. `table` writes the rows between
the marks in docs/zoo.md, with the figures of `references.py`, and in short into README.md.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

import yaml
from references import ATTEMPTS, KNOWN, REFERENCES, Reference
from report import put_between
from zoo_unfinished import archive_of, pack, unpack

from lightning_rl.sharing.agent import write_agent
from lightning_rl.training.loading import read_checkpoint

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PEERS = "peers"
"""The folder in it with what `peers/zoo_sb3.py` and `peers/offline_d3rlpy.py` found."""
EQUAL = "equal_steps"
"""The folder in it with rows of configs that were trained with the steps of their references."""
MORE_STEPS = 1.1
"""Up to how many times the reference's steps count as equally many: runs end with whole iterations."""
BEGIN, END = "<!-- zoo: begin -->", "<!-- zoo: end -->"
FIGURES = ("return_mean", "return_std", "episodes", "best_env_steps", "env_steps", "minutes", "processes")
MACHINE = ("processor", "python", "torch", "numpy", "gymnasium", "mujoco", "box2d")
"""What decides a return to its last digit, beside the commit and the seed."""
COLUMNS = ("config", "seed", *FIGURES, "commit", "lightning_rl", *MACHINE, "command")
EPISODES = 100
WRITING = Lock()
"""Two seeds may end at once."""
Row = dict[str, str]


def results_file(config: str, folder: str = "") -> Path:
    """Where the results of a config stand, those with the steps of its reference in the folder `equal_steps`."""
    return RESULTS / folder / f"{config.replace('/', '_')}.csv"


def rows_of(config: str, folder: str = "") -> list[Row]:
    """Return the results of a config, one a seed; what an older row does not hold is empty."""
    return [dict.fromkeys(COLUMNS, "") | row for row in read_rows(results_file(config, folder))]


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file, none if there is no file."""
    return list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []


def call(*arguments: object) -> str:
    """What `lightning-rl` prints, which must end well."""
    result = subprocess.run([sys.executable, "-m", "lightning_rl", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        raise RuntimeError(result.stderr.strip() or f"lightning-rl {arguments[0]} ended with exit status {result.returncode}")
    return result.stdout


def minutes_of(metrics: Path) -> float:
    """What a run took, as its last row says; an evaluation has a row of its own, which does not, where nothing else is logged."""
    return max(float(row["time/time_elapsed"] or 0) for row in csv.DictReader(metrics.read_text().splitlines())) / 60


def commit() -> str:
    """Return the commit that is measured; `+` marks changes to the package or its configs that are in no commit."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "--", "lightning_rl", "configs"], capture_output=True, text=True, check=True)
    return name + ("+" if changed.stdout else "")


def machine() -> dict[str, str]:
    """Return the processor and the versions that a row is measured with."""
    file = Path("/proc/cpuinfo")
    facts = dict(line.split(":", 1) for line in file.read_text().split("\n\n")[0].splitlines() if ":" in line) if file.exists() else {}
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    processor = " ".join(facts[name] for name in ("model name", "cpu family", "model", "stepping") if name in facts)
    versions = {name: version(name) for name in MACHINE[2:]}
    return {"processor": f"{processor or platform.processor()}, {os.cpu_count()} cores", "python": platform.python_version(), **versions}


def train(config: str, seed: int, folder: Path, processes: int, steps: int | None = None) -> Row:
    """Train and judge one row, on request with another number of steps; the minutes are those of training, evaluations included."""
    home, name, measured_at = folder / config, f"seed_{seed}", commit()
    command = ["fit", "--config", config, "--seed_everything", seed, *([] if steps is None else ["--model.max_env_steps", steps])]
    call(*command, "--trainer.default_root_dir", home, "--trainer.run_name", name, "--ckpt_path", "last")
    (best,) = home.rglob(f"{name}/checkpoints/best.ckpt")
    last = best.with_name("last.ckpt")
    judge = ["evaluate", *imports_of(config), "--json", "--ckpt_path"]
    judged = json.loads(call(*judge, best, "--episodes", EPISODES, "--seed", 50_000).splitlines()[-1])
    made_steps = json.loads(call(*judge, last, "--episodes", 1).splitlines()[-1])["env_steps"]
    figures = {"return_mean": round(judged["return_mean"], 3), "return_std": round(judged["return_std"], 3), "episodes": EPISODES}
    figures |= {"best_env_steps": judged["env_steps"], "env_steps": made_steps}
    figures |= {"minutes": round(minutes_of(best.parents[1] / "metrics.csv"), 2), "processes": processes}
    made = {"commit": measured_at, "lightning_rl": version("lightning_rl"), **machine()}
    row = {"config": config, "seed": seed, **figures, **made, "command": "lightning-rl " + " ".join(map(str, command))}
    print(f"{config} seed {seed}: {figures['return_mean']:.1f} in {figures['minutes']:.1f} min", flush=True)
    return {name: str(value) for name, value in row.items()}


def write(row: Row, folder: str = "") -> None:
    """Put a row into its file, in the place of an older one of the same seed."""
    file = results_file(row["config"], folder)
    file.parent.mkdir(exist_ok=True)
    with WRITING:
        others = [each for each in rows_of(row["config"], folder) if each["seed"] != row["seed"]]
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted([*others, row], key=lambda each: int(each["seed"])))
    if not folder:
        archive_of(row["config"], int(row["seed"])).unlink(missing_ok=True)


def run(options: argparse.Namespace) -> None:
    """Measure all rows that are not there yet, the configs in turn; those with the steps of their references, if `equal` asks for them."""
    configs = [name for pattern in options.configs for name in REFERENCES if fnmatch.fnmatch(name, pattern)]
    place = EQUAL if options.command == "equal" else ""
    if place:
        configs = [name for name in configs if (share := steps_beside(name)) is not None and share > MORE_STEPS]
    if missing := [pattern for pattern in options.configs if not fnmatch.filter(REFERENCES, pattern)]:
        raise SystemExit(f"error: {missing[0]} is none of the configs in references.py: {', '.join(REFERENCES)}")
    current = commit()
    kept = {(name, row["seed"]) for name in configs for row in rows_of(name, place) if not options.again or row["commit"] == current}
    todo = [(name, seed) for name in configs for seed in options.seeds if (name, str(seed)) not in kept]
    folder = options.folder.resolve() / place
    failed = 0

    def measure(name: str, seed: int) -> None:
        reference = REFERENCES[name]
        write(train(name, seed, folder, options.processes, reference.count if place and reference else None), place)

    with ThreadPoolExecutor(options.processes) as pool:
        for name, seed in todo if not place else ():
            unpack(folder, name, seed)
        futures = {pool.submit(measure, *row): row for row in todo}
        for future, (name, seed) in futures.items():
            if (error := future.exception()) is not None:
                failed += 1
                print(f"{name} seed {seed} failed: {error}", file=sys.stderr, flush=True)
    raise SystemExit(1 if failed else 0)


def check(options: argparse.Namespace) -> None:
    """Measure rows again and compare them with what is written."""
    wrong = 0
    for name in options.rows:
        config, _, seed = name.partition(":")
        rows = {row["seed"]: row for row in (rows_of(config) if config in REFERENCES else [])}
        if seed not in rows:
            raise SystemExit(f"error: there is no row {name}; a row is named config:seed, such as ppo/cartpole:1")
        with tempfile.TemporaryDirectory() as folder:
            found = train(config, int(seed), Path(folder), 1)
        fine, line = compare(rows, rows[seed], found)
        wrong += not fine
        print(line, flush=True)
    raise SystemExit(1 if wrong else 0)


def keep(options: argparse.Namespace) -> None:
    """Write the best checkpoints of runs as packaged agents."""
    for name in options.rows:
        config, _, seed = name.partition(":")
        (best,) = (options.folder.resolve() / config).rglob(f"seed_{seed}/checkpoints/best.ckpt")
        folder = ROOT / "zoo" / config
        folder.mkdir(parents=True, exist_ok=True)
        weights = write_agent(folder, read_checkpoint(best))
        print(f"zoo:{config}: {sum(file.stat().st_size for file in folder.iterdir()):,} bytes, {weights.parent}", flush=True)


def pack_runs(options: argparse.Namespace) -> None:
    """Archive runs that have not ended."""
    for name in options.rows:
        config, _, seed = name.partition(":")
        try:
            archive = pack(options.folder.resolve(), config, int(seed))
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
        print(f"{archive.relative_to(ROOT)}: {archive.stat().st_size:,} bytes", flush=True)


def code_differs(old: str, new: str) -> bool:
    """Return whether what learns changed between two commits; `+` marks changes that are in no commit."""
    if old == new:
        return False
    paths = ["lightning_rl", "configs"]
    return subprocess.run(["git", "-C", str(ROOT), "diff", "--quiet", old, new, "--", *paths], stderr=subprocess.DEVNULL).returncode != 0


def compare(rows: dict[str, Row], old: Row, new: Row) -> tuple[bool, str]:
    """Return whether a row that was measured again confirms the old one, of all `rows` of its config by their seeds, and a line."""
    values = f"{new['config']} seed {new['seed']}: {old['return_mean']} at {old['commit'] or '?'}, {new['return_mean']} at {new['commit']}"
    if old["return_mean"] == new["return_mean"] and old["best_env_steps"] == new["best_env_steps"]:
        return True, f"{values}: the same"
    others = [name for name in MACHINE if old[name] != new[name]] + ["the code"] * code_differs(old["commit"], new["commit"])
    if not others:
        return False, f"{values}: differs on the same processor with the same versions and code"
    returns = [float(row["return_mean"]) for row in rows.values()]
    error = 2 * float(new["return_std"]) / math.sqrt(EPISODES)
    least = min(returns) - (max(returns) - min(returns)) - error
    return float(new["return_mean"]) >= least, f"{values}: may differ, as {', '.join(others)} did; at least {least:.1f} is expected"


def steps_beside(config: str) -> float | None:
    """Return how many times the steps of its reference a config takes, None if either is unknown."""
    reference, made = REFERENCES[config], [float(row["env_steps"]) for row in rows_of(config)]
    return None if reference is None or reference.count is None or not any(made) else max(made) / reference.count


def returns_of(rows: list[Row]) -> list[float]:
    """Return what each seed reached."""
    return [float(row["return_mean"]) for row in sorted(rows, key=lambda row: int(row["seed"]))]


def mean_of(config: str) -> float:
    """Of its seeds; minus infinity if none was measured."""
    returns = returns_of(rows_of(config))
    return statistics.mean(returns) if returns else -math.inf


def peer_rows(config: str) -> list[Row]:
    """Return what Stable-Baselines3 reached here with rl-zoo's settings, or d3rlpy from the same dataset; none if it was not measured."""
    return read_rows(RESULTS / PEERS / results_file(config).name)


def env_settings(config: str) -> dict[str, Any]:
    """Return the settings of what a config learns."""
    env = yaml.safe_load((ROOT / "configs" / f"{config}.yaml").read_text("utf-8"))["model"]["init_args"]["env"]
    return {"id": env} if isinstance(env, str) else env


def environment_of(config: str) -> str:
    """What a config learns."""
    return str(env_settings(config)["id"])


def imports_of(config: str) -> list[str]:
    """Return the options by which a checkpoint is allowed to import the modules of its environment's wrappers."""
    wrappers = (str(each["class_path"] if isinstance(each, dict) else each) for each in env_settings(config).get("wrappers", []))
    modules = dict.fromkeys(each.rpartition(".")[0] for each in wrappers if "." in each)
    return [option for module in modules for option in ("--import", module)]


def verdict(config: str, reference: Reference | None) -> str:
    """Whether the mean is within two standard errors of the reference's own runs or episodes; if not, which of our configs is the best."""
    if reference is None:
        return ""
    if reference.error is None:
        return "no error published"
    least = reference.mean - 2 * reference.error
    if mean_of(config) >= least - 1e-9:
        return "; ".join(["yes", *describe_equal(config, reference)])
    best = max((name for name in REFERENCES if environment_of(name) == environment_of(config)), key=mean_of)
    short = f"no: below {least:.1f}" + (f", which {best} reaches" if mean_of(best) >= least - 1e-9 else "")
    return "; ".join(filter(None, [short, beside_peer(returns_of(rows_of(config)), returns_of(peer_rows(config)))]))


def describe_equal(config: str, reference: Reference) -> list[str]:
    """Say how many times the reference's steps a config takes if they are more, and what it reaches with as many."""
    share = steps_beside(config)
    if share is None or share <= MORE_STEPS or reference.error is None:
        return []
    words, rows = [f"with {share:.1f} times the steps"], rows_of(config, EQUAL)
    if rows:
        least = reference.mean - 2 * reference.error
        words.append(f"with {reference.steps}: {each_of(rows)}, {'as good' if statistics.mean(returns_of(rows)) >= least else 'less'}")
    return words


def describe_peer(peers: list[Row]) -> str:
    """Return who else learned this here, how long, and the return of each seed; nothing for no rows."""
    if not peers:
        return ""
    who, count = ("d3rlpy", "updates") if "d3rlpy" in peers[0] else ("Stable-Baselines3", "env_steps")
    return f"{who} here, {int(peers[0][count]):,}: {each_of(peers)}"


def beside_peer(ours: list[float], theirs: list[float]) -> str:
    """Whether the mean is within two standard errors of what Stable-Baselines3 reached on the same machine, of its seeds."""
    if not ours or len(theirs) < 2:
        return ""
    least = statistics.mean(theirs) - 2 * statistics.stdev(theirs) / math.sqrt(len(theirs))
    return "as good as Stable-Baselines3 here" if statistics.mean(ours) >= least - 1e-9 else f"Stable-Baselines3 here: above {least:.1f}"


def line(config: str) -> str:
    """A row of the table."""
    reference, rows = REFERENCES[config], sorted(rows_of(config), key=lambda row: int(row["seed"]))
    theirs = "; ".join(filter(None, ["" if reference is None else f"{reference}", describe_peer(peer_rows(config))]))
    if not rows:
        return f"| {config} | *not yet measured* | | | | {theirs} | {ATTEMPTS.get(config, '')} |"
    returns = returns_of(rows)
    places = 1 if abs(mean_of(config)) >= 2 else 2
    spread = f" ± {statistics.stdev(returns):.{places}f}" if len(returns) > 1 else ""
    note = "; ".join(filter(None, [verdict(config, reference), ATTEMPTS.get(config, "")]))
    commits = " ".join(dict.fromkeys(row["commit"] or "before 45c9fa8" for row in rows))
    return f"| {config} | {mean_of(config):.{places}f}{spread} ({each_of(rows)}) | {costs_of(rows)} | {commits} | {theirs} | {note} |"


def short_line(config: str) -> str:
    """A row of README's table."""
    reference, rows = REFERENCES[config], sorted(rows_of(config), key=lambda row: int(row["seed"]))
    theirs = "" if reference is None else f"{reference.mean:.4g} in {reference.steps}"
    return f"| {config} | {each_of(rows)} | {costs_of(rows)} | {theirs} |"


def each_of(rows: list[Row]) -> str:
    """The return of each seed."""
    return " ".join(f"{value:.{0 if abs(value) >= 20 else 1 if abs(value) >= 2 else 2}f}" for value in returns_of(rows))


def costs_of(rows: list[Row]) -> str:
    """Two columns: environment steps, of which a run from a dataset alone makes none, and minutes."""
    made = [float(row["env_steps"]) for row in rows]
    steps = span(made, "{:,.0f}") if any(made) else "none"
    return f"{steps} | {span([float(row['minutes']) for row in rows], '{:.1f}')}"


def span(values: list[float], show: str) -> str:
    """From the least to the most, one number where they are shown alike."""
    return " to ".join(dict.fromkeys([show.format(min(values)), show.format(max(values))]))


def table() -> str:
    """All rows, in the order of `references.py`."""
    head = "| config | return, mean ± standard deviation over seeds (each seed) | environment steps | minutes | commit | reference |"
    head += " as good? |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *map(line, REFERENCES)])


def short_table() -> str:
    """README's."""
    head = "| config | return of the best checkpoint, one number per seed | environment steps | minutes | reference, in its steps |"
    return "\n".join([head, "|---|---|---|---|---|", *(short_line(config) for config in KNOWN)])


PAGES = {"docs/zoo.md": table, "README.md": short_table}
"""Where tables stand."""


def write_tables() -> None:
    """Put them in their places."""
    for name, make in PAGES.items():
        put_between(ROOT / name, BEGIN, END, make())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train and judge")
    equals = commands.add_parser("equal", help="train with the steps of the references")
    for each in (runs, equals):
        each.add_argument("--configs", nargs="+", default=["*"], help="names or patterns (*)")
        each.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="(1 2 3)")
        each.add_argument("--processes", type=int, default=2, help="runs at once (2)")
        each.add_argument("--folder", type=Path, default=Path("zoo_runs"), help="where runs lie (zoo_runs)")
        each.add_argument("--again", action="store_true", help="measure rows of other commits again")
    checks = commands.add_parser("check", help="measure rows again and compare")
    checks.add_argument("rows", nargs="+", metavar="CONFIG:SEED")
    keeps = commands.add_parser("keep", help="package agents")
    keeps.add_argument("rows", nargs="+", metavar="CONFIG:SEED")
    keeps.add_argument("--folder", type=Path, default=Path("zoo_runs"), help="where runs lie (zoo_runs)")
    packs = commands.add_parser("pack", help="archive runs that have not ended")
    packs.add_argument("rows", nargs="+", metavar="CONFIG:SEED")
    packs.add_argument("--folder", type=Path, default=Path("zoo_runs"), help="where runs lie (zoo_runs)")
    commands.add_parser("table", help="write the tables")
    options = parser.parse_args()
    {"run": run, "equal": run, "check": check, "keep": keep, "pack": pack_runs, "table": lambda _: write_tables()}[options.command](options)


if __name__ == "__main__":
    main()
