"""Runs that are killed again and again and continue, beside one that nobody disturbed: weights and curves must be equal bit for bit.

    python benchmarks/kill_and_continue.py [--algorithm PPO SAC …] [--kills 100] [--signal KILL|TERM] [--seed 0]

A run is started by the command line, gets the signal at a random moment (half of them aimed at a save: as soon as something changes among
the checkpoints), and is started again with `--ckpt_path last`, until it ends. Then its weights, those of its past selves and their
ratings, `metrics.csv` without `time/*`, and `evaluations.csv` are compared. After SIGTERM the exit status must be 143 and the checkpoint at
most one iteration beyond the one in which the signal came. Prints a row an algorithm; exits with status 1 if anything differed or could not
be read.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ON = "--model.env.num_envs 4 --model.max_env_steps 60000"
WORLD = "--model.env.num_envs 2"
AGENTS = "--model.env.num_envs 2 --model.max_env_steps 18000 --model.net_arch [32,32]"
OFF = "--model.env.num_envs 2 --model.net_arch [32,32] --model.learning_starts 200 --model.buffer_size 4000 --model.batch_size 32"
BEHAVIORS = (
    '{"adversary":{"agents":"adversary_*","learner":{"class_path":"SAC","init_args":{"train_freq":8,"steps_per_iteration":20,'
    '"learning_starts":100,"net_arch":[32,32],"buffer_size":4000,"batch_size":32}}},'
    '"good":{"agents":"agent_*","learner":{"class_path":"PPO","init_args":{"n_steps":25,"batch_size":50,"net_arch":[32]}}}}'
)
RECURRENT = '--model.memory={"class_path":"GRU","init_args":{"memory_size":8,"sequence_length":8}}'
PAST = f'{RECURRENT} --model.self_play={{"window":4,"save_steps":256,"opponents":["random"]}}'
CASES = {
    "PPO": (f"--model PPO --model.env.id CartPole-v1 {ON} --model.n_steps 64 --model.batch_size 128", 256),
    "A2C": (f"--model A2C --model.env.id CartPole-v1 {ON} --model.n_steps 16", 64),
    "SAC": (f"--model SAC --model.env.id Pendulum-v1 {OFF} --model.max_env_steps 6000", 100),
    "DQN": (f"--model DQN --model.env.id CartPole-v1 {OFF} --model.max_env_steps 12000 --model.train_freq 2", 100),
    "agents": (f"--model PPO --model.env.id mpe2.simple_spread_v3 {AGENTS} --model.n_steps 25 --model.batch_size 50", 150),
    "turns": (f"--model PPO --model.env.id pettingzoo.classic.tictactoe_v3 {AGENTS} --model.n_steps 32 --model.batch_size 64", 64),
    "self_play": (
        f"--model PPO --model.env.id lightning_rl.envs.games.tic_tac_toe {AGENTS} --model.n_steps 32 --model.batch_size 64 {PAST}",
        64,
    ),
    "groups": (
        f"--model POCA --model.env.id lightning_rl.envs.games.sacrifice {AGENTS} --model.n_steps 64 --model.batch_size 32 {RECURRENT}",
        256,
    ),
    "MultiAgent": (
        f"--model MultiAgent --model.env.id mpe2.simple_adversary_v3 {WORLD} --model.max_env_steps 9000 --model.behaviors={BEHAVIORS}",
        50,
    ),
    "TD3": (f"--model TD3 --model.env.id Pendulum-v1 {OFF} --model.max_env_steps 6000", 100),
}
"""Options, and the environment steps of an iteration."""
COMMON = (
    "--evaluation.episodes 2 --evaluation.num_envs 2 --evaluation.max_episode_steps 50 --trainer.accelerator cpu --model.log_interval 1"
)
STATUS = {"KILL": -signal.SIGKILL, "TERM": 143}


@dataclass
class Count:
    """What happened to the runs of one algorithm."""

    runs: int = 0
    equal: int = 0
    signals: int = 0
    aimed: int = 0
    unreadable: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


def start(case: str, root: Path, last: bool) -> subprocess.Popen[str]:
    """Fit, in a process of its own."""
    every = int(CASES[case][1]) * 4
    options = f"{CASES[case][0]} {COMMON} --checkpoint.every_n_env_steps {every} --evaluation.every_n_env_steps {every * 5}".split()
    command = [sys.executable, "-m", "lightning_rl", "fit", *options, f"--trainer.default_root_dir={root}"]
    command += ["--trainer.enable_progress_bar=false", "--seed_everything=1", *(["--ckpt_path=last"] if last else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def newest(root: Path) -> Path | None:
    """The folder of the newest run."""
    runs = sorted(root.rglob("version_*"), key=lambda path: int(path.name[8:]))
    return runs[-1] if runs else None


def rows(run: Path, name: str) -> list[dict[str, str]]:
    """A table of a run without what the clock says."""
    if not (run / name).exists():
        return []
    with (run / name).open(newline="") as stream:
        return [{key: value for key, value in row.items() if not str(key).startswith("time/")} for row in csv.DictReader(stream)]


def result(root: Path) -> dict[str, Any]:
    """What a finished run learned and wrote."""
    run = newest(root)
    assert run is not None
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    past_selves = checkpoint["callbacks"].get("SelfPlay", {})
    of_past = {f"{number}.{name}": weight for number, own in past_selves.get("snapshots", {}).items() for name, weight in own.items()}
    return {
        "weights": checkpoint["state_dict"] | of_past,
        "ratings": past_selves.get("elos"),
        "metrics": rows(run, "metrics.csv"),
        "evaluations": rows(run, "evaluations.csv"),
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Which of them are not the same bits."""
    weights = found["weights"].keys() == expected["weights"].keys() and all(
        torch.equal(value, expected["weights"][name]) for name, value in found["weights"].items()
    )
    return [*([] if weights else ["weights"]), *(name for name in ("ratings", "metrics", "evaluations") if found[name] != expected[name])]


def listing(root: Path) -> list[tuple[str, int]]:
    """The files beside the checkpoints, and when each was changed."""
    found = []
    for folder in root.glob("*/*/version_*/checkpoints"):
        for entry in os.scandir(folder):
            try:
                found.append((entry.path, entry.stat().st_mtime_ns))
            except FileNotFoundError:  # renamed meanwhile
                found.append((entry.path, 0))
    return sorted(found)


def wait(process: subprocess.Popen[str], root: Path, rng: random.Random, how: str, seconds: float) -> bool:
    """Wait for the moment of the next signal, whether aimed at a save or not; False if the run ended before."""
    if how != "anywhen":  # once it trains
        began = time.time()
        while not any(path.stat().st_mtime > began for path in root.glob("*/*/version_*/metrics.csv")):
            if process.poll() is not None:
                return False
            time.sleep(0.01)
    until = time.monotonic() + rng.uniform(0, seconds)
    while time.monotonic() < until:
        if process.poll() is not None:
            return False
        time.sleep(0.005)
    if how == "save":
        before = listing(root)
        while listing(root) == before:
            if process.poll() is not None:
                return False
        time.sleep(rng.choice([0, rng.uniform(0, 0.005), rng.uniform(0, 0.05)]))
    return process.poll() is None


def disturbed(case: str, root: Path, rng: random.Random, name: str, left: int, count: Count) -> None:
    """A run to its end, with at most `left` signals on its way."""
    seconds, sent = 3.0, 0
    while True:
        process = start(case, root, last=True)
        how = ("save", rng.choice(["training", "anywhen" if name == "KILL" else "training"]))[sent % 2]
        if sent >= left or not wait(process, root, rng, how, 8.0 if how == "anywhen" else seconds):
            _, err = process.communicate()
            if process.returncode != 0:
                raise RuntimeError(f"status {process.returncode}: {err[-400:]}")
            return
        run = newest(root)
        logged = rows(run, "metrics.csv") if run is not None else []
        process.send_signal(getattr(signal, f"SIG{name}"))
        out, err = process.communicate()
        ended = name == "TERM" and "evaluate it: " in out and "stopped by " not in out  # the signal came when the run was over
        if process.returncode == 0 or ended:
            return
        sent, count.signals, count.aimed = sent + 1, count.signals + 1, count.aimed + (how == "save")
        if process.returncode != STATUS[name]:
            raise RuntimeError(f"status {process.returncode} after SIG{name}: {err[-400:] or out[-400:]}")
        if name == "TERM" and run is not None and logged:
            saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["lightning_rl"]["env_steps"]
            if saved - int(logged[-1]["env_steps"]) > 2 * CASES[case][1]:  # the row of the one before may be on its way, too
                count.late.append(f"signal after {logged[-1]['env_steps']} steps, saved at {saved}")


def main() -> int:
    """Kill, continue, compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kills", type=int, default=100, help="signals an algorithm (100)")
    parser.add_argument("--signal", choices=STATUS, default="KILL")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    rng, failed = random.Random(options.seed), False
    head = ["algorithm", "runs", "equal", f"SIG{options.signal}", "aimed at saves", "unreadable states", "saved late", "minutes"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for case in options.algorithm:
        count, began = Count(), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            whole = start(case, Path(folder, "whole"), last=False)
            _, err = whole.communicate()
            if whole.returncode:
                raise SystemExit(f"{case} does not run undisturbed: {err}")
            expected = result(Path(folder, "whole"))
            while count.signals < options.kills and len(count.unreadable) < 10:
                root = Path(folder, f"run_{count.runs}")
                count.runs += 1
                try:
                    disturbed(case, root, rng, options.signal, options.kills - count.signals, count)
                    different = differences(result(root), expected)
                except Exception as error:
                    count.unreadable.append(str(error))
                    print(f"run {count.runs} of {case}: {error}", file=sys.stderr, flush=True)
                    continue
                count.equal += not different
                for each in different:
                    print(f"run {count.runs} of {case}: {each} differ", file=sys.stderr, flush=True)
        for late in count.late:
            print(f"{case}: {late}", file=sys.stderr)
        minutes = (time.monotonic() - began) / 60
        cells = [case, count.runs, count.equal, count.signals, count.aimed, len(count.unreadable), len(count.late), f"{minutes:.1f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        failed |= count.equal < count.runs or bool(count.late)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
