"""Several seeds at once: each run is the one that is trained alone, and a run that fails, a signal and a kill lose nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lightning_rl.loggers import read_rows
from tests.apart import Apart
from tests.command_line import TINY, run, run_apart

CARTPOLE = f"fit --model.env.id CartPole-v1 {TINY}"
RUNS = Path("runs/PPO/CartPole-v1")
FAULTY = """
import os
import gymnasium as gym, numpy as np

class Faulty(gym.Env):
    '''Fails in its thirtieth step in the runs of the seeds 1 and 2.'''

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t, self.steps = self.t + 1, self.steps + 1
        if self.steps == 30 and os.environ["PL_GLOBAL_SEED"] == "1":
            raise RuntimeError("no more coins")
        if self.steps == 30 and os.environ["PL_GLOBAL_SEED"] == "2":
            os._exit(9)
        return np.full(2, self.t / 10, np.float32), 1.0, self.t == 5, False, {}

gym.register("Faulty-v0", f"{__name__}:Faulty")
"""


def left_by(folder):
    """The weights of a run, its evaluations, and its metrics without times."""
    weights = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    rows = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in read_rows(folder / "metrics.csv")]
    return {name: each.tolist() for name, each in weights.items()}, (folder / "evaluations.csv").read_text(), rows


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.thorough
def test_each_run_is_the_one_that_is_trained_alone_and_a_table_shows_all(folder, capfd):
    for seed in (3, 4):
        assert run(f"{CARTPOLE} --seed_everything {seed} --trainer.run_name alone_{seed}", capfd)[0] == 0
    status, out, err = run(f"{CARTPOLE} --seed_everything 3 --seeds 2", capfd)
    assert (status, err) == (0, "")
    for seed in (3, 4):
        assert left_by(RUNS / f"seed_{seed}") == left_by(RUNS / f"alone_{seed}")
        assert f"seed {seed}  ended at 64" in out and f"seed {seed}  64/64 steps" not in out
        assert f"length        64 environment steps, seed {seed}" in (RUNS / "logs" / f"seed_{seed}.txt").read_text()
    assert left_by(RUNS / "seed_3") != left_by(RUNS / "seed_4")
    header, *rows = [line.split() for line in out.splitlines() if line.startswith("  ") and "seed" in line][-3:]
    assert header == ["seed", "return", "at", "folder"] and [row[3] for row in rows] == [str(RUNS / f"seed_{seed}") for seed in (3, 4)]
    assert "2 seeds: mean " in out and f"lightning-rl compare {RUNS}/seed_3 {RUNS}/seed_4 --out report.html" in out


@pytest.mark.thorough
def test_seeds_are_named_run_one_after_the_other_and_those_that_ended_stay_as_they_are(folder, capfd):
    command = f"{CARTPOLE} --trainer.run_name mine --jobs 1"
    status, out, err = run(f"{command} --seeds [7,2]", capfd)
    assert (status, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("seed ")]
    assert lines == ["seed 7  starts", "seed 7  ended at 64", "seed 2  starts", "seed 2  ended at 64"]
    before = {seed: stamps(RUNS / f"mine_seed_{seed}") for seed in (7, 2)}
    for again in ("--seeds [7,2]", "--seeds [7,2,1] --ckpt_path last"):
        status, out, err = run(f"{command} {again}", capfd)
        assert (status, err) == (0, "") and f"{RUNS}/mine_seed_2" in out and "seed 7  starts" not in out
        assert {seed: stamps(RUNS / f"mine_seed_{seed}") for seed in (7, 2)} == before
    assert f"no last.ckpt in {RUNS}/mine_seed_1: starting a new run" in out and "seed 1  ended at 64" in out
    status, out, err = run(f"{command} --seeds [7] --ckpt_path last --model.max_env_steps 96", capfd)
    assert (status, err) == (0, "") and "seed 7  ended at 96" in out

    status, out, err = run(f"{command} --seeds [1,2] --model.gamma 0.5", capfd)
    refused = f"there is a run in {RUNS}/mine_seed_1 with another model.init_args.gamma"
    assert (status, out, err) == (2, "", f"error: {refused}: --ckpt_path last continues it, --force deletes it\n")
    assert run(f"{command} --seeds [2] --model.gamma 0.5 --force", capfd)[0] == 0
    assert stamps(RUNS / "mine_seed_2") != before[2]


@pytest.mark.thorough
def test_the_run_of_a_seed_that_saved_its_best_weights_alone_begins_again_only_with_the_same_settings(folder, capfd):
    command = f"{CARTPOLE} --seeds [7]"
    assert run(command, capfd)[0] == 0
    home = RUNS / "seed_7"
    ended = left_by(home)
    for file in home.glob("checkpoints/last*"):
        file.unlink()
    before = stamps(home)
    status, _, err = run(f"{command} --ckpt_path last --model.gamma 0.5", capfd)
    assert (status, err) == (2, f"error: there is a run in {home} without last.ckpt: --force starts again and deletes it\n")
    assert stamps(home) == before
    assert run(f"{command} --ckpt_path last", capfd)[0] == 0 and left_by(home) == ended


@pytest.mark.thorough
def test_runs_that_fail_leave_the_others_alone_and_one_line_names_them(folder, capfd):
    (folder / "faulty.py").write_text(FAULTY)
    command = f"fit --model.env.id faulty:Faulty-v0 {TINY} --seeds 3 --jobs 2"
    status, out, err = run(command, capfd)
    assert status == 2 and err.count("\n") == 1 and err.startswith("error: seed 1 (and 1 more) failed: ")
    assert "no more coins" in err and err.endswith("; see runs/PPO/Faulty-v0/logs/seed_1.txt\n")
    assert "seed 2  failed: it died with exit code 9" in out and "seed 0  ended at 64" in out
    assert (folder / "runs/PPO/Faulty-v0/seed_0/checkpoints/best.ckpt").is_file()


BAD = {
    "--seeds 0": "--seeds must be >= 1, got 0",
    "--seeds x": "--seeds must be a number of runs, such as 4, or a list of seeds, such as [3,7,11], got 'x'",
    "--seeds []": "--seeds must be a number of runs",
    "--seeds 1.5": "--seeds must be a number of runs",
    "--seeds true": "--seeds must be a number of runs",
    "--seeds": "--seeds needs a value",
    "--seeds 3 7 11": "'7' is not an option; write a list in brackets, such as [3,7,11]",
    "--seeds [3,7,3]": "--seeds has 3 twice",
    "--seeds [3,-7]": "--seeds must be >= 0 and <= 4294967295, got -7",
    "--seeds [3,7] --seed_everything 3": "--seeds [3, 7] names all seeds: leave out --seed_everything",
    "--seeds 2 --seed_everything 4294967295": "the last of --seeds must be >= 0 and <= 4294967295, got 4294967296",
    "--seeds 2 --seed_everything false": "--seeds 2 counts from seed_everything, which must be a number, got False",
    "--jobs 2": "--jobs sets how many runs are trained at a time: add --seeds",
    "--seeds 2 --jobs 0": "--jobs must be >= 1, got 0",
    "--seeds 2 --trainer.devices 2": "--seeds trains each run in one process: leave out trainer.devices and strategy",
    "--seeds 2 --ckpt_path runs": "--seeds continues each run from its own checkpoint: --ckpt_path last, not runs",
    "--seeds 2 --ckpt_path last --init_from runs": "ckpt_path continues a run and init_from begins one",
    "--seeds 2 --init_from nowhere": "init_from 'nowhere'",
    "--seeds 2 --model.n_steps 0": "model.n_steps must be >= 1",
    "--sedes 2": "--sedes is not a setting; did you mean seeds?",
}


@pytest.mark.variants
@pytest.mark.parametrize("options", BAD)
def test_wrong_options_are_one_line_before_anything_runs(options, folder, capfd):
    status, out, err = run(f"{CARTPOLE} {options}", capfd)
    assert (status, out) == (2, "") and err.startswith(f"error: {BAD[options]}") and err.count("\n") == 1
    assert list(folder.iterdir()) == []


def test_other_subcommands_take_no_seeds(folder, capfd):
    status, _, err = run("evaluate --ckpt_path last.ckpt --seeds 4", capfd)
    assert (status, err) == (2, "error: unrecognized arguments: --seeds; did you mean --seed?\n")
    (folder / "a.yaml").write_text("seeds: 4")
    status, _, err = run("fit --config a.yaml", capfd)
    assert status == 2 and err.startswith("error: seeds in a.yaml is not a setting")


def test_settings_are_printed_as_those_of_one_run(folder, capfd):
    status, out, err = run(f"{CARTPOLE} --seeds 4 --print_config", capfd)
    assert (status, err) == (0, "") and "seed_everything: 0" in out and "n_steps: 16" in out


LONG = (
    f"{CARTPOLE} --seeds 3 --jobs 2 --model.n_steps 64 --model.batch_size 128 --model.max_env_steps 12800 "
    "--checkpoint.every_n_env_steps 640 --evaluation.every_n_env_steps 1280"
)


def start(folder):
    """Seeds 0 and 1, when one of them has saved something."""
    program = Apart(f"-m lightning_rl {LONG}", folder)
    until = time.monotonic() + 120
    while not any((folder / RUNS).glob("seed_*/checkpoints/last.ckpt")):
        assert time.monotonic() < until and program.poll() is None, program.communicate()
        time.sleep(0.01)
    return program


def trainers(folder):
    """The processes that train below a folder, and what they started."""
    listed = subprocess.run(["ps", "-e", "--no-headers", "-o", "pid"], capture_output=True, text=True).stdout.split()
    found = []
    for pid in listed:
        with suppress(OSError):  # it has just ended
            if os.readlink(f"/proc/{pid}/cwd") == str(folder) and "forkserver" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.thorough),
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGKILL)),
    ],
    ids=lambda number: number.name,
)
def test_runs_that_a_signal_ended_go_on_as_if_nothing_had_happened(number, folder):
    program = start(folder)
    program.send_signal(number)
    out, err = program.communicate(timeout=60)
    until = time.monotonic() + 10
    while trainers(folder) and time.monotonic() < until:
        time.sleep(0.1)
    assert trainers(folder) == []
    if number == signal.SIGKILL:
        assert program.returncode == -signal.SIGKILL
        command = LONG
    else:
        assert (program.returncode, err) == (130 if number == signal.SIGINT else 143, "")
        said, command = out.splitlines()[-1].split("; continue: lightning-rl ")
        assert said == f"stopped by {number.name}"
        assert not (folder / RUNS / "seed_2").exists()
    status, out, err = run_apart(command, folder)
    assert (status, err) == (0, "") and all(f"seed {seed}  ended at 12,800" in out for seed in (0, 1, 2))
    alone = LONG.replace("--seeds 3 --jobs 2", "--seed_everything 1 --trainer.run_name alone")
    assert run_apart(alone, folder)[::2] == (0, "")
    assert left_by(folder / RUNS / "seed_1") == left_by(folder / RUNS / "alone")


@pytest.mark.thorough
def test_a_terminal_shows_a_line_for_each_run(folder):
    ours, terminal = os.openpty()
    program = Apart(f"-m lightning_rl {CARTPOLE} --seeds 2", folder, {**os.environ, "TERM": "xterm", "COLUMNS": "100"}, stdout=terminal)
    assert program.wait() == 0
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    for seed in (0, 1):
        assert f"seed {seed}  64/64 steps · return " in shown and f"seed {seed}  ended at 64" in shown
    assert "2 seeds: mean " in shown


LATE = '''
from pathlib import Path
import pytorch_lightning as pl

class Edit(pl.Callback):
    """Change the config file while the first run trains."""

    def on_train_start(self, trainer, pl_module):
        Path("mine.yaml").write_text("model: {init_args: {learning_rate: 1e-2}}")
'''


@pytest.mark.thorough
def test_a_config_file_that_changes_meanwhile_changes_no_later_run(folder, capfd):
    Path("late.py").write_text(LATE)
    Path("mine.yaml").write_text("model: {init_args: {learning_rate: 1e-3}}")
    status, out, err = run(f"{CARTPOLE} --config mine.yaml --import late --trainer.callbacks+=late.Edit --seeds 2 --jobs 1", capfd)
    assert status == 2 and "model.init_args.learning_rate has changed in a config file since these runs began" in err
    assert "seed 0  ended at 64" in out and not (RUNS / "seed_1" / "checkpoints").exists()
