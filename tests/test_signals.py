"""Being asked to stop: the run ends at once, is saved, says how to go on, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback

from lightning_rl import PPO, Trainer, load_policy
from lightning_rl.callbacks.stopping import StopOnSignal, ignore
from lightning_rl.loggers import read_rows
from lightning_rl.processes.startup import is_program
from tests.apart import Apart
from tests.command_line import run, run_apart, run_python
from tests.fitting import tiny

FIT = (
    "fit --model PPO --model.env.id CartPole-v1 --model.env.num_envs 2 --model.n_steps 64 --model.batch_size 64 --model.log_interval 128 "
    "--model.compile false"  # else runs that are planned to be long would be compiled
)
STATUS = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGHUP: 143, signal.SIGINT: 130}


def start(folder, options):
    """A run in a process of its own, after its first row of metrics."""
    process = Apart(f"-m lightning_rl {FIT} {options}", folder)
    until = time.monotonic() + 180
    while not any(read_rows(file) for file in folder.rglob("metrics.csv")):
        if process.poll() is not None or time.monotonic() > until:
            process.kill()  # else its end would be awaited for minutes
            raise AssertionError(process.communicate())
        time.sleep(0.05)
    return process


def children(process):
    return subprocess.run(["ps", "--no-headers", "-o", "pid", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP))],
    ids=lambda number: number.name,
)
def test_a_signal_ends_a_run_within_an_iteration_saves_it_and_says_how_to_go_on(folder, number):
    process = start(folder, "--model.max_env_steps 1e7 --model.env.vectorization async")
    workers = children(process)
    assert len(workers) >= 2
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (STATUS[number], "")
    said = next(line for line in out.splitlines() if line.startswith(f"stopped by {number.name} at "))
    (run,) = folder.glob("runs/PPO/CartPole-v1/version_*")
    last_row = int(read_rows(run / "metrics.csv")[-1]["env_steps"])
    assert said.startswith(f"stopped by {number.name} at {last_row:,} environment steps; continue: lightning-rl fit --config ")
    assert [worker for worker in workers if os.path.exists(f"/proc/{worker}")] == []
    if number != signal.SIGTERM:
        return
    command = said.partition("continue: lightning-rl ")[2]
    more = f"--model.max_env_steps={last_row + 128} --trainer.enable_progress_bar=false"
    status, out, err = run_apart(f"{command} {more}", folder)
    assert (status, err) == (0, "") and "new episodes" not in out
    assert int(read_rows(run / "metrics.csv")[-1]["env_steps"]) == last_row + 128


@pytest.mark.slow
def test_a_signal_during_an_evaluation_gives_it_up_and_the_run_that_continues_makes_it(folder):
    evaluation = "--evaluation.every_n_env_steps 1024 --evaluation.episodes 3000 --evaluation.num_envs 1"
    process = start(folder, f"--model.max_env_steps 1e7 {evaluation}")
    time.sleep(2)  # in the first evaluation, which takes long
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "")
    (run,) = folder.glob("runs/PPO/CartPole-v1/version_*")
    assert "stopped by SIGTERM at 1,024 environment steps" in out and not (run / "evaluations.csv").exists()
    command = f"{FIT} --model.max_env_steps 1152 {evaluation} --evaluation.max_episode_steps 1 --ckpt_path last"
    status, _, err = run_apart(command, folder)
    assert (status, err) == (0, "")
    assert [int(row["env_steps"]) for row in read_rows(run / "evaluations.csv")] == [1024] * 3000 + [1152] * 3000


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "statuses"), [(signal.SIGTERM, [-signal.SIGTERM]), (signal.SIGINT, [130, -signal.SIGINT])])
def test_a_second_signal_is_not_waited_for_and_the_checkpoint_before_stays(folder, number, statuses):
    process = start(folder, "--model.max_env_steps 1e7 --model.n_epochs 1000 --checkpoint.every_n_env_steps 128")
    while not [*folder.rglob("last.ckpt")]:
        time.sleep(0.05)
    process.send_signal(number)
    time.sleep(0.1)
    assert process.poll() is None  # it would finish its epochs, which take seconds
    while process.poll() is None:  # on a busy machine two signals may arrive as one
        process.send_signal(number)
        time.sleep(0.1)
    assert process.communicate() and process.returncode in statuses  # a shell sees 130 for both of Ctrl-C's
    (run,) = folder.glob("runs/PPO/CartPole-v1/version_*")
    assert load_policy(run / "checkpoints" / "last.ckpt").act(np.zeros(4, np.float32))[0] in (0, 1)


def test_a_second_ctrl_c_is_a_keyboard_interrupt_that_leaves_the_programs_own_handler(folder):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    class Twice(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            Trainer(accelerator="cpu", evaluation=None, callbacks=[Twice()]).fit(tiny(PPO, compile=False))
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("least", [{"min_epochs": 1}, {"min_steps": 1000}])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_that_has_not_its_least_number_of_iterations_yet(folder, number, least):
    class Send(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                os.kill(os.getpid(), number)

    model = tiny(PPO, max_env_steps=10**6, compile=False)
    trainer = Trainer(accelerator="cpu", evaluation=None, callbacks=[Send()], **least)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trainer.fit(model)
    assert model.env_steps == 48
    assert {name: getattr(trainer, name) for name in least} == least  # for the next run


def test_a_run_whose_terminal_is_closed_is_saved(folder):
    ours, terminal = os.openpty()
    model = tiny(PPO, max_env_steps=10**6, compile=False)
    trainer = Trainer(accelerator="cpu", evaluation=None, checkpoint={"every_n_env_steps": 10**6})

    class CloseTerminal(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                os.close(ours)  # from here on the terminal takes nothing
                os.kill(os.getpid(), signal.SIGHUP)  # from the terminal
                os.kill(os.getpid(), signal.SIGHUP)  # and from its shell

    trainer.callbacks.insert(0, CloseTerminal())
    kept = os.dup(1)
    os.dup2(terminal, 1)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup have it ignored
    try:
        with redirect_stdout(open(1, "w", closefd=False)), pytest.raises(SystemExit) as ended:
            trainer.fit(model)
    finally:
        signal.signal(signal.SIGHUP, before)
        os.dup2(kept, 1)
    assert ended.value.code == 143
    saved = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["lightning_rl"]["env_steps"] == 48


def test_a_run_under_nohup_ignores_the_end_of_its_terminal(folder):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with (stop := StopOnSignal()).listening(ignore):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received is None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background may have it ignored
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["/usr/bin/lightning-rl", "evaluate", "--ckpt_path", "none"]
from lightning_rl.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["gymnasium", "torch"])
def test_ctrl_c_while_the_program_is_loaded_ends_it_with_its_status_and_without_a_traceback(tmp_path, module):
    assert run_python(("-c", INTERRUPTED.replace("MODULE", repr(module))), "", tmp_path) == (130, "", "")


@pytest.mark.parametrize(
    "command, ends",
    [
        ("python -m lightning_rl fit", True),
        ("python -X dev -m lightning_rl.__main__ fit", True),  # as Lightning begins the other ranks
        ("python -mlightning_rl", True),
        ("python -m mine.train -m lightning_rl", False),  # whose package imports ours
    ],
)
def test_ctrl_c_ends_only_our_own_program_immediately(monkeypatch, command, ends):
    words = command.split()
    first = next(place for place, word in enumerate(words) if word.startswith("-m"))
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", ["-m", *words[first + (2 if words[first] == "-m" else 1) :]])  # until the module is found
    assert is_program() == ends


@pytest.mark.parametrize("place", ["lightning_rl.cli.fit.read_arguments", "lightning_rl.algorithms.algorithm.probe_spaces"])
def test_ctrl_c_while_settings_are_read_or_environments_are_tried_ends_with_its_status(folder, capfd, monkeypatch, place):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    status, _, err = run(FIT, capfd)
    assert (status, err) == (130, "") and list(folder.iterdir()) == []
