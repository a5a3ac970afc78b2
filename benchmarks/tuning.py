"""Studies of `tune`: TPE against random trials, and a study that is killed against one that is not.

    python benchmarks/tuning.py compare [--case cartpole pendulum] [--studies 3] [--trials 20] [--seeds 1] [--retrained 8] [--equal steps]
    python benchmarks/tuning.py killed [--kills 5] [--out FOLDER]

`compare` draws trials at random, lets all of them end and takes the best, as a loop in a shell would, and lets `tune` search with its
defaults: TPE and pruning from the config's own values, and the best trials again with new seeds. `--equal steps` gives `tune` more trials
until it has made as many environment steps. What a study found is trained again with seeds that it has not seen, and the best checkpoint of
each such run plays 100 episodes that no evaluation has played: the value of a study itself is the highest of many noisy ones, and says
less. Prints a row a study, and the medians; repeating the command continues.

`killed` kills a study in its second trial, its third, and so on, at a random moment, and continues it each time. Compares all that it
recorded, and the evaluations of its runs, with an undisturbed study: exits with status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna

PROGRAM = [sys.executable, "-m", "lightning_rl"]
PENDULUM = """model.learning_rate: {low: 1e-4, high: 1e-2, log: true}
model.gamma: {choices: [0.9, 0.95, 0.98, 0.99, 0.995]}
model.batch_size: {choices: [32, 64, 128]}
model.learning_starts: {choices: [100, 500, 1000]}
model.tau: {low: 0.001, high: 0.08, log: true}
model.train_freq: {choices: [1, 2, 4, 8]}
model.policy_delay: {low: 1, high: 4}
model.action_noise: {low: 0.0, high: 0.5}
model.net_arch: {choices: [[32, 32], [64, 64]]}
"""
"""The packaged space of TD3 with smaller networks and batches, for a CPU."""
CARTPOLE = """model.learning_rate: {low: 1e-5, high: 1e-2, log: true}
model.gamma: {choices: [0.9, 0.95, 0.98, 0.99, 0.995]}
model.batch_size: {choices: [32, 64, 128]}
model.learning_starts: {choices: [100, 500, 1000]}
model.train_freq: {choices: [2, 4, 8, 16]}
model.gradient_steps: {choices: [1, 2, 4]}
model.target_update_interval: {choices: [10, 100, 600]}
model.exploration_fraction: {low: 0.05, high: 0.5}
model.exploration_final_eps: {low: 0.01, high: 0.2}
model.net_arch: {choices: [[32, 32], [64, 64]]}
"""
"""A space of DQN that is small enough for a CPU."""
CASES = {
    "cartpole": ("--config dqn/cartpole --model.max_env_steps 8000", CARTPOLE),
    "cartpole_ppo": ("--config ppo/cartpole --model.max_env_steps 20000", None),
    "pendulum": ("--model TD3 --model.env.id Pendulum-v1 --model.env.num_envs 1 --model.max_env_steps 5000", PENDULUM),
}
"""Options of `fit`, and the space; the packaged one by default."""
TRIALS = 6
"""Of the study that is killed."""
COMMON = "--trainer.accelerator cpu --evaluation.episodes 5 --evaluation.num_envs 5"


def call(arguments: list[str]) -> str:
    """Run a subcommand, and return what it prints."""
    done = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(arguments)}: {done.stderr or done.stdout}")
    return done.stdout


def study_options(case: str, folder: Path) -> list[str]:
    """Return the options of a case, whose space is written to a folder."""
    options, space = CASES[case]
    if space is None:
        return shlex.split(f"{options} {COMMON}")
    file = folder / f"{case}.yaml"
    file.write_text(space)
    return [*shlex.split(f"{options} {COMMON}"), "--space", str(file)]


def retrain(best: Path, root: Path, seed: int) -> float:
    """Train with a config and a seed; return the mean return of the best checkpoint over 100 new episodes."""
    run = root / f"seed_{seed}"
    named = ["--seed_everything", str(seed), "--trainer.default_root_dir", str(root), "--trainer.run_name", run.name, "--force"]
    call(["fit", "--config", str(best), *named, "--trainer.torch_threads", "1", "--trainer.enable_progress_bar", "false"])
    (folder,) = root.glob(f"*/*/{run.name}")
    return json.loads(call(["evaluate", "--ckpt_path", str(folder), "--episodes", "100", "--seed", "50000", "--json"]))["return_mean"]


def search(command: list[str], folder: Path, trials: int) -> list[dict[str, str]]:
    """Let a study have so many trials, also one that has fewer; return the rows of its trials."""
    call([*command, "--trials", str(trials), "--out", str(folder)])
    with (folder / "trials.csv").open() as lines:
        return list(csv.DictReader(lines))


def steps_of(folder: Path) -> int:
    """Return the environment steps that all runs of a study were trained for, as their evaluations say."""
    runs = [list(csv.DictReader(file.read_text().splitlines())) for file in folder.glob("*/*/trial_*/evaluations.csv")]
    return sum(int(rows[-1]["env_steps"]) for rows in runs if rows)


def measure(case: str, sampler: str, seed: int, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run a study, with `tpe` until it has made so many steps, and train again what it found."""
    folder: Path = options.out / f"{case}_{sampler}_{seed}"
    began = time.monotonic()
    drawn = ["--sampler", sampler, "--seed", str(seed), "--seeds", str(options.seeds)]
    drawn += shlex.split("--pruner none --confirm 0") * (sampler == "random")
    command = ["tune", *study_options(case, options.out), *drawn]
    trials = search(command, folder, options.trials)
    while steps_of(folder) < steps:
        trials = search(command, folder, len(trials) + 1)
    seconds = time.monotonic() - began
    again = [retrain(folder / "best.yaml", folder / "again", 1_000 + number) for number in range(options.retrained)]
    column = "confirmed" if any(row["confirmed"] for row in trials) else "value"
    found = max(float(row[column]) for row in trials if row[column] and row["state"] == "complete")
    states = [row["state"] for row in trials]
    return {
        **{"case": case, "sampler": sampler, "seed": seed, "found": found, "again": statistics.mean(again), "steps": steps_of(folder)},
        **{"complete": states.count("complete"), "pruned": states.count("pruned"), "failed": states.count("fail"), "seconds": seconds},
    }


def compare(options: argparse.Namespace) -> int:
    """Print a row for each study, and the medians of each sampler."""
    head = "| case | sampler | seed | value in the study | trained again | steps | complete | pruned | failed | seconds |"
    print(f"{head}\n|{'---|' * 10}", flush=True)
    rows = []
    for case in options.case:
        for seed in range(options.studies):
            for sampler in ("random", "tpe"):
                steps = rows[-1]["steps"] if sampler == "tpe" and options.equal == "steps" else 0
                rows.append(row := measure(case, sampler, seed, steps, options))
                cells = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row.values()]
                print(f"| {' | '.join(cells)} |", flush=True)
    for case in options.case:
        for sampler in ("tpe", "random"):
            own = [row for row in rows if (row["case"], row["sampler"]) == (case, sampler)]
            found, again = (statistics.median(row[name] for row in own) for name in ("found", "again"))
            print(f"{case}, {sampler}: median of {len(own)} studies {found:.1f} in the study, {again:.1f} trained again")
    return 0


def record(folder: Path) -> list[Any]:
    """Return what a study recorded but for times, and the evaluations of its runs."""
    study = optuna.load_study(study_name="study", storage=f"sqlite:///{folder / 'study.db'}")
    own = [(each.state, each.value, each.params, each.intermediate_values, each.user_attrs["evaluations"]) for each in study.trials]
    return [own, study.user_attrs["confirmation"], {file.parent.name: file.read_bytes() for file in folder.glob("*/*/*/evaluations.csv")}]


def is_end_of_trial(line: str) -> bool:
    """Return whether a study prints this when a trial has ended."""
    return re.match(r"trial \d+: ", line) is not None


def killed(options: argparse.Namespace) -> int:
    """Kill a study in its second trial, its third, …; return 1 if it ends in another way than an undisturbed one."""
    arguments = ["tune", *study_options("cartpole_ppo", options.out), "--trials", str(TRIALS), "--seeds", "2", "--startup_trials", "2"]
    began = time.monotonic()
    call([*arguments, "--out", str(options.out / "whole")])
    seconds, draw = time.monotonic() - began, random.Random(0)
    print(f"undisturbed: {seconds:.0f} s", flush=True)
    ended = 0
    for number in range(options.kills):
        study = subprocess.Popen([*PROGRAM, *arguments, "--out", str(options.out / "killed")], stdout=subprocess.PIPE, text=True)
        lines = iter(study.stdout or ())
        while ended <= number and (line := next(lines, "")):
            ended += is_end_of_trial(line)
        time.sleep(draw.uniform(0, 0.5 * seconds / TRIALS))
        study.send_signal(signal.SIGKILL)
        ended += sum(map(is_end_of_trial, lines))
        print(f"kill {number + 1}: exit status {study.wait()} when {ended} of {TRIALS} trials had ended", flush=True)
    call([*arguments, "--out", str(options.out / "killed")])
    equal = record(options.out / "killed") == record(options.out / "whole")
    print(f"{options.kills} kills: {'equal' if equal else 'DIFFERENT'}")
    return not equal


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compare", "killed"))
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--studies", type=int, default=3)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each trial of compare (1)")
    parser.add_argument("--retrained", type=int, default=8)
    parser.add_argument("--equal", choices=("trials", "steps"), default="trials", help="what the two samplers of compare share (trials)")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("studies"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return compare(options) if options.what == "compare" else killed(options)


if __name__ == "__main__":
    raise SystemExit(main())
