"""Environments of other packages: whether they install, train, resume after being killed, and can be evaluated.

    python benchmarks/third_party.py [--packages minigrid highway-env …] [--folder FOLDER] [--out FILE]

One virtual environment holds torch, as in `constraints.txt`, and this checkout with the newest of all else; each package is installed in
one of its own on top of it. A short run is then trained twice on an environment of the package. The second is killed after a save and
continued by `--ckpt_path last`; its weights, metrics (without `time/*`) and evaluations are compared with those of the first, bit for bit.
The last checkpoint is evaluated. Prints a row for each package, and keeps all rows in `benchmarks/results/third_party.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from install import FOLDER, line_of
from kill_and_continue import differences, newest, result

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "third_party.md"
PIP_SECONDS, RUN_SECONDS = 600, 300
RUN = (
    "--model.env.num_envs 2 --model.n_steps 32 --model.batch_size 64 --model.n_epochs 1 --model.max_env_steps 640 --model.log_interval 1 "
    "--checkpoint.every_n_env_steps 64 --evaluation.every_n_env_steps 320 --evaluation.episodes 1 --evaluation.num_envs 1 "
    "--evaluation.max_episode_steps 20 --trainer.accelerator cpu --trainer.enable_progress_bar false --seed_everything 1"
)
"""Ten iterations of PPO, saved after each."""
HEAD = ("package", "environment", "trained", "resumed after a kill", "evaluated", "what was printed")


@dataclass(frozen=True)
class Case:
    """An environment of a package.

    Args:
        env_id: as in `env.id`.
        module: the module that registers the id.
        options: further options of `fit`.
        needs: packages without which the package cannot be imported.
    """

    env_id: str
    module: str = ""
    options: str = ""
    needs: tuple[str, ...] = ()


CASES = {
    "gym-electric-motor": Case("Cont-CC-PMSM-v0", "gym_electric_motor"),
    "nle": Case("NetHackScore-v0", "nle"),
    "magent2": Case("magent2.environments.battle_v4", "magent2.environments", "--model.env.num_envs 1 --model.env.kwargs '{map_size: 12}'"),
    "tetris-gymnasium": Case("tetris_gymnasium/Tetris", "tetris_gymnasium.envs"),
    "gymnasium-sudoku": Case("sudoku-v0", "gymnasium_sudoku"),
    "panda-gym": Case("PandaReach-v3", "panda_gym"),
    "pybullet-envs-gymnasium": Case("HopperBulletEnv-v0", "pybullet_envs_gymnasium"),
    "metaworld": Case("Meta-World/MT1", "metaworld", "--model.env.kwargs '{env_name: reach-v3}'"),
    "mo-gymnasium": Case("mo-mountaincar-v0", "mo_gymnasium", "--model.env.wrappers '[mo_gymnasium.wrappers.LinearReward]'"),
    "highway-env": Case("highway-fast-v0", "highway_env"),
    "flappy-bird-gymnasium": Case("FlappyBird-v0", "flappy_bird_gymnasium"),
    "gymnasium-2048": Case("gymnasium_2048/TwentyFortyEight-v0", "gymnasium_2048"),
    "popgym": Case("popgym-RepeatPreviousEasy-v0", "popgym"),
    "vizdoom": Case("VizdoomBasic-v1", "vizdoom.gymnasium_wrapper"),
    "memory-gym": Case("MortarMayhem-Grid-v0", "memory_gym"),
    "minigrid": Case("MiniGrid-Empty-5x5-v0", "minigrid", "--model.env.wrappers '[minigrid.wrappers.FlatObsWrapper]'"),
}


def last_line(output: str) -> str:
    """Return what a failed command says in the end, for a cell of a table."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"lightning-rl\b|ERROR|error:|[\w.]*(Error|Exception)\b", line)]
    last = (errors or lines or ["nothing was printed"])[-1]
    return re.sub(r"/\S*/site-packages/", "", last).replace("|", "\\|")[:200]


def make_base(folder: Path) -> Path:
    """Install torch and this checkout where they are not yet; return the Python that has them."""
    python = folder / "third_party" / "base" / "bin" / "python"
    if not python.with_name("lightning-rl").exists():
        venv.create(python.parents[1], clear=True, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, line_of("torch", HERE.parent / "constraints.txt")], check=True)
        subprocess.run([*pip, "-e", HERE.parent], check=True)
    return python


def install(package: str, case: Case, folder: Path, base: Path) -> Path:
    """Install a package on top of the base; return its Python. Raises `RuntimeError` with pip's last line."""
    home = folder / "third_party" / package
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        venv.create(home, clear=True)
        below = next(base.parents[1].glob("lib/python*/site-packages"))
        (next(home.glob("lib/python*/site-packages")) / "base.pth").write_text(f"{below}\n{HERE.parent}\n")
        command = [base, "-m", "pip", "--python", python, "install", "--quiet", package, *case.needs]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PIP_SECONDS)
        if done.returncode:
            raise RuntimeError(f"pip: {last_line(done.stdout)}")
        (home / "installed").touch()
    return python


class Program:
    """The command line in the environment of a package, in a process of its own."""

    def __init__(self, python: Path, command: str, case: Case, *arguments: object) -> None:
        words = [command, *(["--import", case.module] if case.module else []), *map(str, arguments)]
        self.output = os.memfd_create("output")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [python, "-m", "lightning_rl", *words], stdout=self.output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def read(self) -> str:
        """Return what was printed so far."""
        return os.pread(self.output, os.fstat(self.output).st_size, 0).decode(errors="replace")

    def wait(self) -> str:
        """Return what was printed. Raises `RuntimeError` if it failed or takes too long."""
        try:
            status = self.process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"no end after {RUN_SECONDS} s") from None
        if status:
            raise RuntimeError(last_line(self.read()))
        return self.read()

    def kill(self) -> None:
        """Kill it, with the processes that its environment started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def kill_after_a_save(program: Program, root: Path) -> None:
    """Kill a run that has logged rows which its newest checkpoint lacks. Raises `RuntimeError` if it ended before."""
    for name in ("last.ckpt", "last.ckpt", "metrics.csv"):
        before = [path.stat().st_mtime_ns for path in root.rglob(name)]
        deadline = time.monotonic() + RUN_SECONDS
        while [path.stat().st_mtime_ns for path in root.rglob(name)] in ([], before):
            if program.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"not killed in time: {last_line(program.read())}")
            time.sleep(0.002)
    program.kill()


def try_package(package: str, case: Case, folder: Path, base: Path) -> tuple[str, ...]:
    """Return the cells of a row: how far an environment of a package came."""
    cells = [package, f"`{case.env_id}`"]
    try:
        python = install(package, case, folder, base)
        version = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
        cells[0] += " " + subprocess.check_output([python, "-c", version], text=True).strip()
        options = ["--model", "PPO", "--model.env.id", case.env_id, *shlex.split(RUN), *shlex.split(case.options)]
        with tempfile.TemporaryDirectory() as temporary:
            whole, killed = (Path(temporary, name) for name in ("whole", "killed"))
            Program(python, "fit", case, *options, f"--trainer.default_root_dir={whole}").wait()
            cells.append("yes")
            again = [*options, f"--trainer.default_root_dir={killed}", "--ckpt_path=last"]
            kill_after_a_save(Program(python, "fit", case, *again), killed)
            resumed = Program(python, "fit", case, *again).wait()
            notices = [line for line in resumed.splitlines() if "new episodes" in line]
            different = differences(result(killed), result(whole))
            cells.append(("new episodes" if notices else f"{', '.join(different)} differ") if different else "bit for bit")
            last = newest(killed) / "checkpoints" / "last.ckpt"
            options = ["--ckpt_path", last, "--episodes", 2, "--max_episode_steps", 20, "--json"]
            score = json.loads(Program(python, "evaluate", case, *options).wait().splitlines()[-1])
            cells += [f"return {score['return_mean']:.3g}", (notices or [""])[-1].replace("|", "\\|")]
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        cells += ["no"] if len(cells) < len(HEAD) - 1 else []
        cells += [""] * (len(HEAD) - 1 - len(cells)) + [str(error)]
    return tuple(cells)


def main() -> int:
    """Try the packages, print their rows, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where virtual environments are made and kept")
    parser.add_argument("--out", type=Path, default=OUT, help="the table; rows of other packages in it are kept")
    options = parser.parse_args()
    base = make_base(options.folder)
    old = options.out.read_text().splitlines()[2:] if options.out.exists() else []
    rows = {line.split()[1]: line for line in old if line.startswith("| ")}
    for package in options.packages:
        rows[package] = f"| {' | '.join(try_package(package, CASES[package], options.folder, base))} |"
        print(rows[package], flush=True)
        table = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *(rows[name] for name in CASES if name in rows)]
        options.out.write_text("\n".join(table) + "\n")
    return int(any(" | no | " in rows[package] for package in options.packages))


if __name__ == "__main__":
    sys.exit(main())
