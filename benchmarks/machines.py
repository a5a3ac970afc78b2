"""Runs over several machines, which this script makes of one: each has its own network, processes, host name, /tmp and /dev/shm.

    python benchmarks/machines.py ray|ddp|kills [--seed 0]

The machines are Linux namespaces that see each other over a bridge and nothing else: no route leads outside, and what listens on every
interface, as `ray start` does, is not reachable from here. They share the disk, as machines with a network file system do, and are removed
in any case. Needs root, `ip` and `unshare`, and the extra `ray` for its trial.

    ray    IMPALA and evolution strategies with actors on a cluster of three machines: one is killed, one is added, another is killed
    ddp    two ranks on two machines by torchrun: learn as two ranks on one do, end when the other is killed, continue with one and with two
    kills  two ranks that are killed at random moments ten times and continued: equal to an undisturbed run bit for bit

Prints a table; exits with status 1 if anything in it is not as it should be.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kill_and_continue import differences, newest, result, rows, wait

ROOT = Path(__file__).parent.parent
PATIENCE = 300.0
"""Seconds that anything may take."""
WEIGHTS_OF_RANKS = """
import hashlib, os
import pytorch_lightning as pl

class WeightsOfRanks(pl.Callback):
    '''Writes what each rank learned into a file of its own.'''

    def on_train_end(self, trainer, algorithm):
        weights = b"".join(value.numpy().tobytes() for _, value in sorted(algorithm.state_dict().items()))
        file = f"{os.uname().nodename}.rank{trainer.global_rank}.{algorithm.env_steps}"
        open(os.path.join(trainer.default_root_dir, file), "w").write(hashlib.sha256(weights).hexdigest())
"""


def sh(command: str) -> None:
    """Run a command of this machine that must work."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")


def child_of(pid: int) -> int:
    """Return the only child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


class Machine:
    """A machine of a network.

    Args:
        name: of its network namespace.
        number: the last part of its address.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address, self.host = name, f"10.213.0.{number}", f"machine{number}"
        mounts = "mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm"
        boot = f"{mounts} && hostname {self.host} && echo up && exec sleep infinity"
        space = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        command = ["ip", "netns", "exec", name, *space, "sh", "-c", boot]
        self.boots = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.boots.stdout is not None
        if self.boots.stdout.readline() != "up\n":
            raise SystemExit("this kernel does not allow namespaces of mounts and processes")
        self.init = child_of(self.boots.pid)

    def start(self, arguments: str, folder: Path, **env: str) -> subprocess.Popen[str]:
        """Start Python with arguments in a folder."""
        command = ["nsenter", "--target", str(self.init), "--net", "--mount", "--pid", "--uts", "sh", "-c", 'cd "$0" && exec "$@"']
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{folder}", "GLOO_SOCKET_IFNAME": "eth0"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MASTER_", "PL_"))}
        return subprocess.Popen(
            [*command, str(folder), sys.executable, *arguments.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=inherited | own | env,
        )

    def run(self, arguments: str, folder: Path, **env: str) -> str:
        """Run Python, which must work, and return what it printed."""
        return finished(self.start(arguments, folder, **env))[0]

    def count(self, title: str) -> int:
        """How many processes have a title that begins like this."""
        listed = subprocess.run(
            ["nsenter", "--target", str(self.init), "--mount", "--pid", "ps", "-eo", "args"], capture_output=True, text=True
        )
        return sum(line.startswith(title) for line in listed.stdout.splitlines())

    def kill_all(self) -> None:
        """Kill all programs (SIGKILL); the machine stays."""
        subprocess.run(["nsenter", "--target", str(self.init), "--pid", "--mount", "kill", "-9", "-1"], capture_output=True)

    @property
    def is_up(self) -> bool:
        """Whether it was not killed."""
        return self.boots.poll() is None

    def stop(self) -> None:
        """Kill the machine: every process of it, at once."""
        if self.is_up:
            os.kill(self.init, signal.SIGKILL)
        self.boots.wait()


class Network:
    """Machines that see each other and nothing else; removed at the end of a `with`."""

    def __init__(self) -> None:
        self.prefix = f"lrl{os.getpid()}"
        self.switch = f"{self.prefix}s"
        self.spaces: list[str] = []
        self.machines: list[Machine] = []

    def __enter__(self) -> Network:
        self._space(self.switch)
        sh(f"ip -n {self.switch} link add bridge type bridge")
        sh(f"ip -n {self.switch} link set bridge up")
        return self

    def __exit__(self, *error: object) -> None:
        for machine in self.machines:
            machine.stop()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space])

    def _space(self, name: str) -> None:
        sh(f"ip netns add {name}")
        self.spaces.append(name)

    def add(self) -> Machine:
        """Start another machine."""
        number = len(self.machines) + 1
        name, port = f"{self.prefix}m{number}", f"port{number}"
        self._space(name)
        sh(f"ip -n {name} link add eth0 type veth peer name {port} netns {self.switch}")
        sh(f"ip -n {self.switch} link set {port} master bridge up")
        sh(f"ip -n {name} addr add 10.213.0.{number}/24 dev eth0")
        sh(f"ip -n {name} link set eth0 up")
        sh(f"ip -n {name} link set lo up")
        self.machines.append(Machine(name, number))
        return self.machines[-1]


def communicate(program: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what a program printed until it ended, or until it was killed because it did not."""
    try:
        return program.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        program.kill()
        return program.communicate()


def finished(program: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    """Return what a program printed until it ended, with a status that it must have."""
    out, err = communicate(program)
    if program.returncode != status:
        raise SystemExit(f"status {program.returncode}, not {status}, of {' '.join(program.args[-40:])}\n{out[-2000:]}\n{err[-4000:]}")  # type: ignore[index]
    return out, err


def until(happened: Callable[[], Any], program: subprocess.Popen[str] | None = None) -> float:
    """Wait until something has happened while a program runs. Returns the seconds it took."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > PATIENCE:
            raise SystemExit("what was waited for did not happen")
        if program is not None and program.poll() is not None:
            finished(program, -1)
        time.sleep(0.2)
    return time.monotonic() - began


class Table:
    """Rows of what was shown, printed as they come."""

    def __init__(self, *head: str) -> None:
        self.failed = False
        print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)

    def row(self, *cells: Any, right: bool = True) -> None:
        self.failed |= not right
        print(f"| {' | '.join(map(str, cells))} |{'' if right else ' WRONG'}", flush=True)


@contextmanager
def work() -> Iterator[Path]:
    """A folder that all machines share, which /tmp is not."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="machines") as folder:
        yield Path(folder)


def last_row(root: Path) -> dict[str, str]:
    """The newest row of the newest run."""
    run = newest(root)
    found = rows(run, "metrics.csv") if run is not None else []
    return found[-1] if found else {}


def steps(root: Path) -> int:
    """How far the newest run is."""
    return int(last_row(root).get("env_steps", 0))


# ---------------------------------------------------------------- ray

CASES = {
    "IMPALA": "--config impala/cartpole --model.max_env_steps 1e9 --model.log_interval 2000 --model.env.num_envs 2",
    "EvolutionStrategies": "--config es/cartpole --model.max_env_steps 1e9 --model.log_interval 2000",
}
ACTORS = "ray::RayWorker"
"""What Ray calls the processes of our actors."""


def join(machine: Machine, head: Machine, folder: Path, token: Mapping[str, str]) -> None:
    """Start Ray on a machine of a cluster."""
    role = "--head --port 6379 --include-dashboard false" if machine is head else f"--address {head.address}:6379"
    limits = "--num-cpus 2 --object-store-memory 100000000 --disable-usage-stats"
    machine.run(f"-m ray.scripts.scripts start {role} --node-ip-address {machine.address} {limits}", folder, **token)


def lose_actors(case: str, table: Table, folder: Path, network: Network) -> None:
    """Run with actors on three machines: one is killed, one is added, another one is killed."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    machines = [network.add() for _ in range(3)]
    for machine in machines:
        join(machine, machines[0], folder, token)
    quiet = "--trainer.enable_progress_bar false --trainer.accelerator cpu --evaluation null"
    actors = "--model.actors.backend ray --model.actors.address auto --model.actors.num_actors 6"
    root = folder / "runs"
    run = machines[0].start(f"-m lightning_rl fit {CASES[case]} {actors} {quiet} --trainer.default_root_dir {root}", folder, **token)

    def places() -> list[int]:
        return [machine.count(ACTORS) if machine.is_up else 0 for machine in machines]

    def restarts() -> float:
        return float(last_row(root).get("env/actor_restarts") or 0)

    def show(what: str, seconds: float, right: bool = True) -> None:
        mean = float(last_row(root)["rollout/ep_rew_mean"])
        table.row(case, what, places(), f"{steps(root):,}", f"{restarts():g}", f"{mean:.0f}", f"{seconds:.0f}", right=right)

    seconds = until(lambda: steps(root) > 0 and sum(places()) == 6, run)
    show("three machines", seconds, all(places()))
    for victim in (2, 1):
        goal = restarts() + places()[victim]
        machines[victim].stop()
        seconds = until(lambda goal=goal: restarts() >= goal and sum(places()) == 6, run)
        show(f"machine {victim + 1} is killed", seconds)
        if victim == 2:
            machines.append(network.add())
            began = time.monotonic()
            join(machines[3], machines[0], folder, token)
            show("machine 4 is added", time.monotonic() - began)
    os.kill(child_of(run.pid), signal.SIGTERM)
    out, _ = finished(run, 143)
    told = sum("was restarted" in line for line in out.splitlines())
    show(f"stopped by SIGTERM; {told} lines about restarts", 0, told == restarts() and not any(places()))


def ray_trial(options: argparse.Namespace) -> bool:
    """Actors on three machines, of algorithms that learn from rollouts and from whole episodes."""
    table = Table("run", "what happened", "actors on each machine", "environment steps", "actor restarts", "mean return", "seconds")
    for case in CASES:
        with work() as folder, Network() as network:
            lose_actors(case, table, folder, network)
    return table.failed


# ---------------------------------------------------------------- ddp

PPO = "--model PPO --model.env.id CartPole-v1 --model.env.num_envs 4 --model.n_steps 64 --model.batch_size 128 --model.log_interval 1"
RUN = "--seed_everything 1 --trainer.accelerator cpu --trainer.strategy ddp --trainer.enable_progress_bar false"
TOLD = "--import weights_of_ranks --trainer.callbacks+=weights_of_ranks.WeightsOfRanks"


def weights(root: Path) -> dict[str, str]:
    """What each rank wrote of its weights: by machine, rank, and the run's steps."""
    return {file.name: file.read_text() for file in sorted(root.glob("machine*"))}


def torchrun(machines: list[Machine], folder: Path, root: Path, ranks: int, more: str) -> list[subprocess.Popen[str]]:
    """Start torchrun on each machine, with so many ranks in all."""
    here = ranks // len(machines)
    common = (
        f"-m torch.distributed.run --nnodes {len(machines)} --nproc_per_node {here} --master_addr {machines[0].address} --master_port 29500"
    )
    fit = f"{PPO} {RUN} {TOLD} --trainer.num_nodes {len(machines)} --trainer.devices {here} --trainer.default_root_dir {root} {more}"
    return [machine.start(f"{common} --node_rank {number} -m lightning_rl fit {fit}", folder) for number, machine in enumerate(machines)]


def returns(root: Path) -> str:
    """The mean return of each evaluation."""
    run = newest(root)
    assert run is not None
    return ", ".join(f"{float(row['eval/mean_reward']):.0f}" for row in rows(run, "metrics.csv") if row.get("eval/mean_reward"))


def ddp_trial(options: argparse.Namespace) -> bool:
    """Two ranks on two machines: learn, lose one, continue with one and with two."""
    table = Table("what happened", "ranks", "environment steps", "weights of the ranks", "returns of evaluations", "status and last line")
    short = "--model.max_env_steps 40960 --evaluation.every_n_env_steps 10240 --evaluation.episodes 10"
    endless = "--model.max_env_steps 1e8 --evaluation null --checkpoint.every_n_env_steps 1024"
    with work() as folder, Network() as network:
        (folder / "weights_of_ranks.py").write_text(WEIGHTS_OF_RANKS)
        pair = [network.add(), network.add()]
        found: dict[str, set[str]] = {}
        for name, machines in {"one machine": pair[:1], "two machines": pair}.items():
            root = folder / name.replace(" ", "_")
            root.mkdir()
            for program in torchrun(machines, folder, root, 2, short):
                finished(program)
            told = weights(root)
            found[name] = set(told.values())
            same = "equal" if len(found[name]) == 1 and len(told) == 2 else str(told)
            right = same == "equal" and len(set().union(*found.values())) == 1
            as_before = ", those of one machine" if name == "two machines" and right else ""
            where = ", ".join(file.rpartition(".")[0] for file in told)
            table.row(name, where, f"{steps(root):,}", same + as_before, returns(root), "0", right=right)
        for victim in (1, 0):
            root = folder / f"lost{victim}"
            root.mkdir()
            programs = torchrun(pair, folder, root, 2, endless)
            until(lambda: steps(root) > 4096, programs[0])  # noqa: B023
            began = time.monotonic()
            pair[victim].kill_all()
            _, err = finished(programs[1 - victim], 1)
            seconds = time.monotonic() - began
            (line,) = [line for line in err.splitlines() if line.startswith("error: ")] or [err[-500:]]
            programs[victim].wait()
            cells = (f"programs of machine {victim + 1} are killed", 2, f"{steps(root):,}", "", "", f"1 after {seconds:.1f} s: `{line}`")
            table.row(*cells, right="another process of this run died" in line and seconds < 60)
        for ranks in (2, 1):
            reached = steps(root)
            goal = reached // 512 * 512 + 8192
            more = f"--model.max_env_steps {goal} --evaluation.every_n_env_steps 4096 --ckpt_path last"
            out = [finished(program)[0] for program in torchrun(pair[:ranks], folder, root, ranks, more)]
            told = {name: value for name, value in weights(root).items() if name.endswith(f".{steps(root)}")}
            same = "equal" if len(set(told.values())) == 1 and len(told) == ranks else str(told)
            line = next((line for line in out[0].splitlines() if "new episodes" in line), "")
            right = steps(root) == goal and same == "equal" and bool(line) == (ranks == 1)
            table.row(f"continued with {ranks}", ranks, f"{steps(root):,}", same, returns(root), f"0 {line and f'`{line}`'}", right=right)
    return table.failed


# ---------------------------------------------------------------- kills


def until_it_learns(root: Path, program: subprocess.Popen[str]) -> None:
    """Wait until a run that begins or continues writes rows: before that it only cuts those back that no checkpoint holds."""
    lowest = steps(root)
    while (now := steps(root)) <= lowest and program.poll() is None:
        lowest = now
        time.sleep(0.05)


def kills_trial(options: argparse.Namespace) -> bool:
    """Two ranks that are killed at random moments and continued, beside two that nobody disturbed."""
    table = Table("run", "killed", "at environment steps", "the other rank ended with", "seconds until then")
    rng, done = random.Random(options.seed), 0
    often = "--checkpoint.every_n_env_steps 2048 --evaluation.every_n_env_steps 10240 --evaluation.episodes 2"
    length = f"--model.max_env_steps 61440 {often} --evaluation.max_episode_steps 50"
    with work() as folder, Network() as network:
        pair = [network.add(), network.add()]

        def start(root: Path) -> list[subprocess.Popen[str]]:
            """Begin or continue, each rank by itself, as on two machines without torchrun."""
            fit = f"{PPO} {RUN} {length} --trainer.num_nodes 2 --trainer.devices 1 --trainer.default_root_dir {root} --ckpt_path last"
            place = {"MASTER_ADDR": pair[0].address, "MASTER_PORT": "29500"}
            return [machine.start(f"-m lightning_rl fit {fit}", folder, **place, NODE_RANK=str(k)) for k, machine in enumerate(pair)]

        for program in start(folder / "whole"):
            finished(program)
        expected = result(folder / "whole")
        number = 0
        while done < options.kills:
            number += 1
            root = folder / f"run{number}"
            while True:
                programs = start(root)
                how = rng.choice(["training", "training", "save", "anywhen"])
                if how != "anywhen":
                    until_it_learns(root, programs[0])
                if done >= options.kills or not wait(programs[0], root, rng, how, 8.0 if how == "anywhen" else 4.0):
                    for program in programs:
                        finished(program)
                    break
                # one that is killed before the ranks have met is waited for
                victims = [0, 1] if how == "anywhen" else rng.choice([[0], [1], [0, 1]])
                at = steps(root)
                began, done = time.monotonic(), done + 1
                for victim in victims:
                    pair[victim].kill_all()
                ended = []
                for rank, program in enumerate(programs):
                    _, err = communicate(program)
                    if rank not in victims:
                        said = [line for line in err.splitlines() if not line.startswith("[W")]  # torch misses a name server
                        ended.append(f"{program.returncode}: `{' '.join(said)}`")
                seconds = time.monotonic() - began
                right = all(each.startswith("1: `error: ") and each.count("error: ") == 1 for each in ended) and seconds < 60
                ranks = " and ".join(f"rank {victim}" for victim in victims)
                table.row(number, f"{ranks}, {how}", f"{at:,}", ", ".join(ended), f"{seconds:.1f}", right=right)
            different = differences(result(root), expected)
            table.row(number, "none", f"{steps(root):,}", f"0: {', '.join(different) or 'weights, metrics and evaluations are equal'}", "")
            table.failed |= bool(different)
    return table.failed


TRIALS = {"ray": ray_trial, "ddp": ddp_trial, "kills": kills_trial}


def main() -> int:
    """Run a trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", choices=TRIALS)
    parser.add_argument("--kills", type=int, default=10, help="of trial kills (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of trial kills")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # so that everything is removed then too
    return int(TRIALS[options.trial](options))


if __name__ == "__main__":
    sys.exit(main())
