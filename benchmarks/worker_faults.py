"""A training run whose environments die, freeze and raise in their processes: it must go on, and leave nothing behind.

    python benchmarks/worker_faults.py [--faults 100] [--num_envs 8] [--seed 0]

`fit` runs with `vectorization: async`; every so often a worker is killed (SIGKILL), stopped (SIGSTOP) or told to raise. Counts the
rows that were lost (stepped, but no experience), and processes and shared memory that are still there when the run is over.
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
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

FLAGS = "WORKER_FAULTS_FOLDER"
N_STEPS, TIMEOUT = 64, 2.0


class Faulty(CartPoleEnv):
    """CartPole that raises once when there is a file with the number of its process."""

    def step(self, action: Any) -> Any:
        flag = Path(os.environ.get(FLAGS, "/nowhere"), str(os.getpid()))
        if flag.exists():
            flag.unlink()
            raise RuntimeError("a fault was asked for")
        return super().step(action)


gym.register("Faulty-v0", f"{__name__}:Faulty", max_episode_steps=500)


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    listed = subprocess.run(["ps", "--no-headers", "-o", "pid", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(each) for each in listed.stdout.split()]


def workers(pid: int, num_envs: int) -> list[int]:
    """The workers, which are forked and so have their parent's command line; fewer than there are environments while one is replaced."""
    try:
        own = Path(f"/proc/{pid}/cmdline").read_bytes()
        return [each for each in children(pid) if Path(f"/proc/{each}/cmdline").read_bytes() == own][-num_envs:]
    except OSError:
        return []


def last_row(root: Path) -> dict[str, str]:
    """The newest row of the run's metrics."""
    for file in root.rglob("metrics.csv"):
        with file.open(newline="") as stream:
            table = list(csv.DictReader(stream))
        if table:
            return table[-1]
    return {}


def shared_memory() -> set[str]:
    """What lies in shared memory."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def main() -> int:
    """Train, disturb, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--num_envs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, before = random.Random(options.seed), shared_memory()
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        root, flags = Path(folder, "runs"), Path(folder, "flags")
        flags.mkdir()
        settings = (
            f"--model PPO --model.env.id {Path(__file__).stem}:Faulty-v0 --model.env.num_envs {options.num_envs} "
            f"--model.env.vectorization async --model.env.step_timeout {TIMEOUT} --model.env.max_restarts 100000 "
            f"--model.n_steps {N_STEPS} --model.batch_size {N_STEPS * options.num_envs} --model.max_env_steps 1000000000 "
            f"--model.log_interval 1 --trainer.accelerator cpu --trainer.enable_progress_bar false --trainer.default_root_dir {root} "
            "--evaluation.every_n_env_steps 1000000000 --checkpoint.every_n_env_steps 50000"
        )
        environment = {**os.environ, FLAGS: str(flags), "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "lightning_rl", "fit", *settings.split()]
        output = Path(folder, "output")
        with output.open("w") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        every: set[int] = set()
        row: dict[str, str] = {}
        while sum(done.values()) < options.faults and process.poll() is None:
            alive = workers(process.pid, options.num_envs)
            every |= set(alive)
            if len(alive) < options.num_envs or not last_row(root):
                time.sleep(0.05)
                continue
            kind, victim, steps = rng.choice(["kill", "freeze", "raise"]), rng.choice(alive), last_row(root)["env_steps"]
            if kind == "raise":
                (flags / str(victim)).touch()
            else:
                os.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            done[kind] += 1
            until = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < until:  # it is replaced, and learning goes on
                gone = victim not in workers(process.pid, options.num_envs)
                if gone and int(last_row(root)["env_steps"]) > int(steps):
                    break
                time.sleep(0.02)
            else:
                print(f"after {kind} of {victim} the run did not go on", file=sys.stderr)
                break
            time.sleep(rng.uniform(0, 0.3))
        went_on = process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        row = last_row(root)
        time.sleep(1)
        left = [each for each in every if os.path.exists(f"/proc/{each}")]
        made = int(float(row["time/iterations"])) * N_STEPS * options.num_envs
        lost, memory = made - int(row["env_steps"]), sorted(shared_memory() - before)
        if not went_on or process.returncode != 143:
            print(output.read_text()[-2000:], file=sys.stderr)
    head = [
        "faults",
        "kill",
        "freeze",
        "raise",
        "environment steps",
        "rows lost",
        "a fault",
        "processes left",
        "shared memory left",
        "status",
    ]
    total = sum(done.values())
    cells = [total, *(done[kind] for kind in ("kill", "freeze", "raise")), row["env_steps"], lost, f"{lost / max(1, total):.2f}"]
    print(
        f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n| {' | '.join(map(str, [*cells, len(left), len(memory), process.returncode]))} |"
    )
    return int(not went_on or bool(left) or bool(memory) or total < options.faults)


if __name__ == "__main__":
    sys.exit(main())
