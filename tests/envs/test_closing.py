"""An environment whose `close` raises or hangs costs one line, not the run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

import gymnasium as gym
import pytest

import lightning_rl as lrl
from lightning_rl.envs import sync
from lightning_rl.envs.sync import close_env
from tests.agents import Duel
from tests.command_line import TINY, run
from tests.environments import Scripted
from tests.fitting import fit

WAYS = {"raises": "raised RuntimeError: no window", "exits": "raised SystemExit: 0", "hangs": "did not return in 0.2 s"}


class Stuck(Scripted):
    """Cannot be closed, and does not let itself be interrupted by an `Exception`."""

    def __init__(self, way: str = "raises") -> None:
        super().__init__()
        self.way = way

    def close(self) -> None:
        if self.way == "raises":
            raise RuntimeError("no window")
        if self.way == "exits":
            sys.exit(0)
        while True:
            with suppress(Exception):
                threading.Event().wait()


class Unclosable(Duel):
    def close(self):
        raise RuntimeError("no window")


gym.register("Stuck-v0", "tests.envs.test_closing:Stuck")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(sync, "CLOSE_TIMEOUT", 0.2)
    monkeypatch.setattr(sync, "_failed", set())
    monkeypatch.setattr(sync, "_hung", set())


@pytest.mark.thorough
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("way", WAYS)
def test_an_environment_that_cannot_be_closed_costs_one_line_and_the_run_goes_on(folder, capfd, way, vectorization):
    settings = f"--model.env.id tests.envs.test_closing:Stuck-v0 --model.env.kwargs.way {way} --model.env.vectorization {vectorization}"
    status, out, err = run(f"fit {TINY}{settings}", capfd)  # probes, trains, evaluates and ends
    assert (status, err) == (0, "")
    assert out.count("close of ") == out.count(f"close of Stuck {WAYS[way]}") == 1 and "; the program continues" in out
    assert (folder / "runs/PPO/Stuck-v0/version_0/checkpoints/last.ckpt").is_file()
    assert "cannot be saved in the middle of an episode" not in out


def test_each_copy_is_closed_though_others_raise(capfd):
    closed = []

    class Noted(Scripted):
        def close(self):
            closed.append(self)
            raise RuntimeError("no window")

    fit(lrl.PPO(Noted, n_steps=8, batch_size=8, net_arch=[8], max_env_steps=64))
    assert len({id(env) for env in closed}) >= 8  # those of the run, and copies that were tried
    assert capfd.readouterr().out.count("close of Noted raised RuntimeError: no window") == 1


@pytest.mark.thorough
def test_copies_of_several_agents_and_vector_environments_that_cannot_be_closed_cost_one_line(capfd):
    class Copies(gym.vector.VectorWrapper):
        def close(self, **arguments):
            raise RuntimeError("no window")

    fit(lrl.PPO(Unclosable, n_steps=5, batch_size=5, net_arch=[8], max_env_steps=20))
    envs = gym.vector.SyncVectorEnv([Scripted] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    fit(lrl.PPO(Copies(envs), n_steps=8, batch_size=16, net_arch=[8], max_env_steps=32))
    out = capfd.readouterr().out
    assert out.count("close of Unclosable raised RuntimeError: no window") == 1
    assert out.count("close of SyncVectorEnv raised RuntimeError: no window") == 1


def test_a_time_limit_leaves_an_alarm_of_the_program_as_it_was():
    rang = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rang.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 100)
        close_env(Stuck("hangs"), say=rang.append)
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0.001)
        while len(rang) < 2:
            time.sleep(0.001)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rang[0].startswith("close of Stuck did not return in 0.2 s") and 0 < left <= 100 and rang[1] == signal.SIGALRM


def test_ctrl_c_while_an_environment_is_closed_is_not_taken_for_its_error(capfd):
    class Closing(Scripted):
        def close(self):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            close_env(Closing())
    finally:
        signal.signal(signal.SIGINT, before)
