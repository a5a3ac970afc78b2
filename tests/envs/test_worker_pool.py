"""Environments in worker processes survive the failures of one another."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_vector_env
from lightning_rl.envs.stepping import Stepper, make_stepper
from lightning_rl.envs.worker_pool import WorkerVectorEnv
from lightning_rl.errors import SettingError
from tests.environments import Scripted

MODES = ("SAME_STEP", "NEXT_STEP", "DISABLED")


class Faulty(Scripted):
    """Raises at action 1 and freezes at action 2; an episode has 5 steps."""

    def __init__(self, name: str = "") -> None:
        super().__init__(period=5, endings=("truncation",))

    def step(self, action):
        if action == 1:
            raise ValueError("the motor\nis hot")
        if action == 2 and multiprocessing.current_process().name.startswith("environment"):  # not where ways to save it are tried
            time.sleep(60)
        return super().step(action)


class Broken(Faulty):
    """Cannot be reset a second time."""

    def reset(self, *, seed=None, options=None):
        if self.episode >= 0:
            raise RuntimeError("no power")
        return super().reset(seed=seed)


for cls in (Faulty, Broken):
    gym.register(f"{cls.__name__}Worker-v0", cls)


def faulty(mode: str = "SAME_STEP", **settings) -> Stepper:
    config = EnvConfig("FaultyWorker-v0", 3, "async", mode, **settings)
    return make_stepper(make_vector_env(config), config)


def shared_memory() -> set[str]:
    """Return the files of shared memory that this process has open and that have a name; other programs have some, too."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return {line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = shared_memory()
    yield
    assert multiprocessing.active_children() == []
    assert shared_memory() <= before


def kill(stepper: Stepper) -> np.ndarray:
    os.kill(stepper.envs.processes[1].pid, signal.SIGKILL)
    return np.array([0, 0, 0])


FAULTS = {
    "killed": (kill, "died with exit code -9"),
    "frozen": (lambda stepper: np.array([0, 2, 0]), "TimeoutError: no answer in 1 s"),
    "raising": (lambda stepper: np.array([0, 1, 0]), "ValueError: the motor is hot"),
}


@pytest.mark.variants("SAME_STEP")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_failing_worker_loses_one_row_and_starts_a_new_episode(mode, fault):
    stepper = faulty(mode, step_timeout=1.0 if fault == "frozen" else None)
    stepper.reset(0)
    for _ in range(2):
        stepper.step(np.array([0, 0, 0]))
    action, says = FAULTS[fault]
    step = stepper.step(action(stepper))
    assert step.valid.tolist() == [True, False, True] and step.episode_start.tolist() == [False, True, False]
    assert step.obs.tolist() == [[0, 3], [0, 0], [0, 3]] and step.reward.tolist() == [2, 0, 2]
    assert not step.terminated.any() and not step.truncated.any() and len(step.ended) == 0
    assert stepper.restarts == 1
    assert len(stepper.notices) == 1 and says in stepper.notices[0] and "worker 1 of FaultyWorker-v0" in stepper.notices[0]
    assert len(stepper.notices[0].splitlines()) == 1
    step = stepper.step(np.array([0, 0, 0]))
    assert step.valid.all() and step.obs.tolist() == [[0, 4], [0, 1], [0, 4]]
    step = stepper.step(np.array([0, 0, 0]))
    assert step.ended.tolist() == [0, 2] and step.truncated.tolist() == [True, False, True] and step.valid.all()
    assert step.final_obs.tolist() == [[0, 5], [0, 5]]
    stepper.close()


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_fails_when_episodes_end_loses_no_other_row(mode):
    stepper = faulty(mode)
    stepper.reset(0)
    for _ in range(4):
        stepper.step(np.array([0, 0, 0]))
    step = stepper.step(np.array([0, 1, 0]))
    assert step.ended.tolist() == [0, 2] and step.valid.tolist() == [True, False, True]
    step = stepper.step(np.array([0, 0, 0]))
    assert step.valid.tolist() == [mode != "NEXT_STEP", True, mode != "NEXT_STEP"] and step.obs[1].tolist() == [0, 1]
    stepper.close()


@pytest.mark.thorough
def test_a_new_worker_has_its_own_reproducible_seed():
    def story() -> list[list[float]]:
        config = EnvConfig("CartPole-v1", 2, "async")
        stepper = make_stepper(make_vector_env(config), config)
        obs = [stepper.reset(0)[0].copy()]
        for _ in range(2):
            os.kill(stepper.envs.processes[1].pid, signal.SIGKILL)
            obs.append(stepper.step(np.array([0, 0])).obs.copy())
        stepper.close()
        return [each[1].tolist() for each in obs]

    first = story()
    assert first == story()
    assert len({tuple(obs) for obs in first}) == 3


def test_a_worker_that_fails_too_often_ends_the_run_with_one_line():
    stepper = faulty(max_restarts=2)
    stepper.reset(0)
    for _ in range(2):
        stepper.step(np.array([0, 0, 1]))
    with pytest.raises(SettingError) as error:
        stepper.step(np.array([0, 0, 1]))
    expected = "worker 2 of FaultyWorker-v0 failed more than 2 times in an hour; last: ValueError: the motor is hot"
    assert re.fullmatch(rf"{expected} \(test_worker_pool\.py:\d+\)", str(error.value))
    stepper.close()


@pytest.mark.thorough
def test_restarts_of_more_than_an_hour_ago_do_not_count(monkeypatch):
    monkeypatch.setattr("lightning_rl.processes.children.HOUR", 0.0)
    stepper = faulty(max_restarts=1)
    stepper.reset(0)
    for _ in range(3):
        stepper.step(np.array([1, 0, 0]))
    assert stepper.restarts == 3
    stepper.close()


def test_more_workers_than_the_system_has_room_for_are_one_line_and_those_that_were_started_end():
    before, used = resource.getrlimit(resource.RLIMIT_NOFILE), set(map(int, os.listdir("/proc/self/fd")))
    twelfth = [number for number in range(len(used) + 12) if number not in used][11]
    resource.setrlimit(resource.RLIMIT_NOFILE, (twelfth, before[1]))
    line = (
        r"^process environment-\d could not be started \(Too many open files\): use fewer processes, or raise the limits, ulimit -n and -u$"
    )
    try:
        with pytest.raises(SettingError, match=line):
            WorkerVectorEnv(Scripted, 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("environment-")]


@pytest.mark.thorough
def test_an_environment_that_cannot_be_reset_ends_the_run_with_one_line():
    config = EnvConfig("BrokenWorker-v0", 2, "async", max_restarts=3)
    stepper = make_stepper(make_vector_env(config), config)
    stepper.reset(0)
    for _ in range(10):
        stepper.step(np.array([0, 0]))
        if stepper.restarts > 2:  # a new process can be reset once
            break
    assert stepper.restarts >= 2 and "RuntimeError: no power" in stepper.notices[0]
    stepper.close()


@pytest.mark.thorough
def test_a_worker_that_dies_between_two_steps_is_saved_in_its_new_episode():
    config = EnvConfig("CartPole-v1", 2, "async")
    stepper, other = (make_stepper(make_vector_env(config), config) for _ in range(2))
    stepper.reset(0)
    stepper.step(np.array([0, 0]))
    os.kill(stepper.envs.processes[0].pid, signal.SIGKILL)
    assert other.load_state_dict(stepper.state_dict()) is None and other.restarts == 1
    first, second = stepper.step(np.array([0, 0])), other.step(np.array([0, 0]))
    assert first.valid.tolist() == second.valid.tolist() == [False, True]
    assert np.array_equal(first.obs, second.obs) and first.obs[0].any()  # the new episode's first observation
    for _ in range(30):
        a, b = stepper.step(np.array([1, 1])), other.step(np.array([1, 1]))
        assert np.array_equal(a.obs, b.obs) and a.valid.all()
    stepper.close()
    other.close()


@pytest.mark.slow
def test_a_run_survives_a_hundred_failures():
    stepper = faulty(max_restarts=1000)
    stepper.reset(0)
    generator, valid = np.random.default_rng(0), 0
    for i in range(100):
        if i % 2:
            os.kill(stepper.envs.processes[generator.integers(3)].pid, signal.SIGKILL)
            step = stepper.step(np.zeros(3, int))
        else:
            step = stepper.step((np.arange(3) == generator.integers(3)).astype(int))
        valid += int(step.valid.sum())
    assert stepper.restarts == 100 and valid == 200 and len(stepper.notices) == 100
    stepper.close()


@pytest.mark.thorough
def test_closing_ends_frozen_and_dead_workers_too(monkeypatch):
    monkeypatch.setattr("lightning_rl.processes.children.CLOSE_TIMEOUT", 0.5)
    stepper = faulty()
    stepper.reset(0)
    processes = stepper.envs.processes
    pids = [process.pid for process in processes]
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGSTOP)
    started = time.monotonic()
    stepper.close()
    assert time.monotonic() - started < 10
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_workers_ignore_signals_that_the_parent_handles(name):
    config = EnvConfig("CartPole-v1", 3, "async")
    stepper = make_stepper(make_vector_env(config), config)
    stepper.reset(0)
    for _ in range(3):
        for process in stepper.envs.processes:
            os.kill(process.pid, getattr(signal, name))
        assert stepper.step(np.array([0, 0, 0])).valid.all() and stepper.restarts == 0
    assert stepper.state_dict()["states"] is not None and stepper.restarts == 0
    stepper.close()


class Server(Scripted):
    """Has a program of its own, which it ends as programs are ended."""

    def __init__(self) -> None:
        super().__init__()
        self.program = None

    def reset(self, *, seed=None, options=None):
        self.program = self.program or subprocess.Popen(["sleep", "60"])
        return super().reset(seed=seed)

    def ended(self) -> int:
        self.program.terminate()
        return self.program.wait(5)


def test_programs_that_an_environment_starts_can_still_be_terminated():
    envs = WorkerVectorEnv(Server, 1)
    envs.reset(seed=0)
    assert envs.call("ended") == [-signal.SIGTERM]
    envs.close()


ORPHANS = """
import sys, threading, time
import numpy as np
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_vector_env
from tests.envs.test_worker_pool import Faulty
envs = make_vector_env(EnvConfig("FaultyWorker-v0", 3, "async"))
envs.reset(seed=0)
print(*(process.pid for process in envs.processes), flush=True)
if sys.argv[1] == "exit":
    raise RuntimeError
envs.step(np.array([0, 2, 0]))  # freezes
"""


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["exit", "kill after a signal to all"])
def test_workers_end_with_their_parent(end):
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS, end], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    if end != "exit":
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
        assert all(map(alive, pids))
        parent.kill()
    parent.wait(20)
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


TRYING = """
import os, time
from lightning_rl.envs.stepping import make_stepper
from lightning_rl.envs.make import make_vector_env
from tests.environments import Scripted
class Endless(Scripted):
    def step(self, action):
        os.write(told, b"%d\\n" % os.getpid())
        while True:
            time.sleep(0.1)
told = os.dup(1)
make_stepper(make_vector_env(Endless, 1))
"""


@pytest.mark.thorough
def test_the_trial_process_ends_with_its_parent():
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", TRYING], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pid = int(parent.stdout.readline())
    assert pid != parent.pid
    parent.kill()
    parent.wait(20)
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("setting", ["step_timeout", "max_restarts"])
def test_worker_settings_are_rejected_without_workers(setting):
    with pytest.raises(SettingError, match=rf"^env\.{setting} needs vectorization async, but it is sync; remove it$"):
        EnvConfig("CartPole-v1", **{setting: 3})
    with pytest.raises(SettingError, match=rf"^env\.{setting} must be"):
        EnvConfig("CartPole-v1", vectorization="async", **{setting: -1})


@pytest.mark.parametrize("timeout", [1e7, float("inf")])
def test_a_worker_may_be_given_all_the_time_there_is(timeout):
    config = EnvConfig("CartPole-v1", 1, "async", step_timeout=timeout)
    stepper = make_stepper(make_vector_env(config), config)
    stepper.reset(0)
    assert stepper.step(np.zeros(1, int)).valid.all()
    stepper.close()
