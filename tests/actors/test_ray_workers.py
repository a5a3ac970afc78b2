"""Workers that Ray places behave like processes; one local cluster for all of these tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from lightning_rl import SettingError
from lightning_rl.actors.ray_workers import RayWorkers
from lightning_rl.errors import RunStoppedError
from lightning_rl.processes.children import WorkerError
from tests.actors.test_processes import Echo, ask, network

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray starts for many seconds, and warns


@pytest.fixture(scope="module")
def workers():
    both = RayWorkers(Echo, 2, network(), timeout=60.0, max_restarts=1)
    yield both
    both.close()
    assert not ray.is_initialized()


def test_calls_use_the_newest_weights_and_return_arrays_that_belong_to_the_caller(workers):
    torch.nn.init.constant_(workers.network.weight, 2.0)
    workers.publish(3)
    answers = ask(workers, (0, "weight"), (1, "weight"), (0, "say", np.arange(1000)))
    values = {(answer.worker, answer.method): answer for answer in answers}
    assert values[0, "weight"].value == values[1, "weight"].value == 6.0 and values[0, "weight"].version == 3
    array = values[0, "say"].value
    assert array.flags.writeable and array.sum() == 499_500
    ((*_, modules, _),) = ask(workers, (0, "modules"))
    assert "pytorch_lightning" not in modules


def test_workers_that_die_or_freeze_are_restarted_and_asked_again(workers):
    assert [answer.value for answer in ask(workers, (0, "die_once"))] == [(0, 1)]
    workers.timeout = 1.0
    try:
        answers = ask(workers, (1, "wait", 0.01), (1, "freeze_once"), (1, "say", "after it"))
    finally:
        workers.timeout = 60.0
    assert [answer.value for answer in answers] == [1, (1, 1), "after it"]
    assert workers.restarts == 2 and workers.notices[1] == "actor 1 was restarted: no answer in 1 s (actors.timeout)"


def test_exceptions_are_raised_here_and_a_worker_that_fails_too_often_ends_the_run(workers):
    with pytest.raises(WorkerError, match="actor 1 raised KeyError: 'nothing'") as error:
        ask(workers, (1, "fail"))
    assert 'return {}["nothing"]' in "".join(error.value.__notes__)
    workers.calls[1].clear()
    with pytest.raises(WorkerError, match="actor 0 failed more than 1 times in an hour"):
        for _ in range(2):
            workers.call(0, "who")
            workers.ray.kill(workers.workers[0])
            workers.receive()


TERMINATED = """
import os, signal, time
from torch import nn
from lightning_rl.actors.ray_workers import RayWorkers
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
workers = RayWorkers(lambda index, restarts, network: None, 1, nn.Linear(2, 2))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
workers.close()
assert heard == [signal.SIGTERM]
"""


def test_the_program_receives_a_signal_after_ray_began(tmp_path):
    done = subprocess.run([sys.executable, "-c", TERMINATED], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "SIGTERM received" not in done.stderr, done.stderr


def test_the_program_receives_a_signal_while_ray_begins(monkeypatch):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))

    def begin(**settings):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ray, "init", begin)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    try:
        with pytest.raises(RunStoppedError):
            RayWorkers(Echo, 1, network())
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_missing_cluster_is_one_line(workers):
    workers.close()
    with pytest.raises(SettingError, match=r"^actors.address '127.0.0.1:1': there is no Ray cluster to join"):
        RayWorkers(Echo, 1, network(), address="127.0.0.1:1")
