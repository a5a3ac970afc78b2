"""Workers in processes: answers, weights that are not torn, and what is done about those that raise, die or freeze."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
import torch

from lightning_rl import SettingError
from lightning_rl.actors.processes import Processes
from lightning_rl.actors.shared_memory import FOLDER, SharedWeights, Slot, SlotWriter
from lightning_rl.actors.workers import InThreads, InTurn, WorkerError


class Echo:
    """A worker that answers what the tests ask."""

    def __init__(self, index, restarts, network):
        self.index, self.restarts, self.network = index, restarts, network

    def say(self, value):
        return value

    def fill(self, value):
        return np.full(10_000, value)

    def who(self):
        return self.index, self.restarts

    def weight(self):
        return float(self.network.weight.detach().sum())

    def modules(self):
        return sorted(sys.modules)

    def wait(self, seconds):
        time.sleep(seconds)
        return self.index

    def die_once(self):
        if self.restarts == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.who()

    def freeze_once(self):
        if self.restarts == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1_000)
        return self.who()

    def fail(self):
        return {}["nothing"]

    def close(self):
        pass


def network(weight=1.0):
    module = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(module.weight, weight)
    return module


@pytest.fixture(scope="module")
def workers():
    both = Processes(Echo, 2, network(), timeout=60.0, max_restarts=1)
    yield both
    pids = [each.process.pid for each in both.processes if each is not None]
    blocks = [both.weights.name, *(slot.name for slots in both.slots for slot in slots if slot.name is not None)]
    both.close()
    for block in blocks:
        with pytest.raises(FileNotFoundError):
            SharedMemory(block)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def ask(workers, *calls):
    for worker, method, *arguments in calls:
        workers.call(worker, method, *arguments)
    return [workers.receive() for _ in calls]


def test_each_call_is_answered_once_and_those_of_a_worker_in_their_order(workers):
    answers = ask(workers, (0, "say", 1), (1, "say", 2), (0, "say", 3), (0, "say", 4))
    assert [answer.value for answer in answers if answer.worker == 0] == [1, 3, 4]
    assert [(answer.method, answer.value) for answer in answers if answer.worker == 1] == [("say", 2)]
    assert [answer.value for answer in ask(workers, (0, "who"), (1, "who"))] in ([(0, 0), (1, 0)], [(1, 0), (0, 0)])


def test_large_arrays_come_through_shared_memory_and_belong_to_who_asked(workers):
    arrays = {"a": np.arange(100_000, dtype=np.float32), "b": (np.ones((3, 5), dtype=bool), "text")}
    first, second = (ask(workers, (0, "say", arrays))[0].value for _ in range(2))
    for answer in (first, second):  # the first one came through the pipe and made room for the others
        np.testing.assert_array_equal(answer["a"], arrays["a"])
        assert answer["b"][0].all() and answer["b"][1] == "text"
    for _ in range(3):
        ask(workers, (0, "say", {"a": np.zeros(100_000, dtype=np.float32)}))
    assert second["a"][-1] == 99_999 and second["a"].flags.writeable
    if FOLDER.exists():
        assert any(slot.block is not None and slot.block.size >= 400_000 for slot in workers.slots[0])


def test_answers_that_wait_are_not_overwritten(workers):
    for _ in range(2):  # the first ones make room for the others
        answers = ask(workers, *((0, "fill", k) for k in range(6)))
        assert [(answer.value.min(), answer.value.max()) for answer in answers] == [(k, k) for k in range(6)]


def test_a_call_sees_the_newest_weights_that_were_published_before_it_began(workers):
    for version in (1, 2):
        torch.nn.init.constant_(workers.network.weight, float(version))
        workers.publish(version)
        assert [(answer.version, answer.value) for answer in ask(workers, (0, "weight"), (1, "weight"))] == [(version, 3.0 * version)] * 2


def test_workers_import_no_lightning(workers):
    ((*_, modules, _),) = ask(workers, (0, "modules"))
    assert "torch" in modules and not {"pytorch_lightning", "lightning_rl.algorithms", "lightning_rl.training.trainer"} & set(modules)


def test_a_worker_that_dies_or_freezes_is_started_anew_and_asked_again(workers):
    assert [answer.value for answer in ask(workers, (0, "die_once"))] == [(0, 1)]
    assert workers.restarts == 1 and workers.notices == ["actor 0 was started anew: it died with exit code -9"]
    workers.notices.clear()
    workers.timeout = 0.5
    try:
        answers = ask(workers, (1, "wait", 0.01), (1, "freeze_once"), (1, "say", "after it"))
    finally:
        workers.timeout = 60.0
    assert [answer.value for answer in answers] == [1, (1, 1), "after it"]
    assert workers.notices == ["actor 1 was started anew: no answer in 0.5 s (actors.timeout)"]


def test_a_worker_that_fails_too_often_ends_the_run(workers):
    os.kill(workers.processes[0].process.pid, signal.SIGKILL)  # once more than max_restarts
    with pytest.raises(WorkerError, match=r"actor 0 failed more than 1 times in an hour; last: it died with exit code -9"):
        ask(workers, (0, "say", 1))


def test_shared_memory_that_is_full_is_told_once(workers, monkeypatch):
    monkeypatch.setattr("lightning_rl.actors.shared_memory.shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 0))
    array = np.arange(1_000_000)
    workers.notices.clear()
    for _ in range(2):
        assert ask(workers, (1, "say", array))[0].value[-1] == 999_999
    assert workers.notices == ["shared memory is full: what actor 1 answers goes through pipes"]
    workers.notices.clear()


def test_what_a_worker_raises_is_raised_here_with_its_traceback(workers):
    with pytest.raises(WorkerError, match="actor 1 raised KeyError: 'nothing'") as error:
        ask(workers, (1, "fail"))
    assert 'return {}["nothing"]' in str(error.value.__cause__)


@pytest.mark.parametrize("kind", [InTurn, InThreads])
def test_workers_of_this_process_answer_alike(kind):
    module = network()
    both = kind(Echo, 2, module)
    assert sorted(answer.value for answer in ask(both, (1, "who"), (0, "who"))) == [(0, 0), (1, 0)]
    torch.nn.init.constant_(module.weight, 5.0)
    both.publish(7)
    assert [(answer.version, answer.value) for answer in ask(both, (0, "weight"))] == [(7, 15.0)]
    with pytest.raises(KeyError):
        ask(both, (0, "fail"))
    both.close()


def test_workers_in_threads_have_the_weights_of_before_until_others_are_published():
    module = network(1.0)
    both = InThreads(Echo, 1, module)
    torch.nn.init.constant_(module.weight, 5.0)
    assert ask(both, (0, "weight"))[0].value == 3.0
    both.publish(1)
    assert ask(both, (0, "weight"))[0].value == 15.0
    both.close()


def test_workers_in_threads_are_heard_in_the_order_in_which_they_finish():
    both = InThreads(Echo, 2, network())
    for worker in (1, 0):
        both.call(worker, "who")
        while both.num_ready() < 2 - worker:
            time.sleep(0.001)
    both.call(1, "who")
    assert [both.receive().worker for _ in range(3)] == [1, 0, 1]
    both.close()


def test_torn_weights_are_read_again():
    module, reader = network(1.0), network(0.0)
    weights = SharedWeights(module)
    other = SharedWeights(reader, weights.name)
    weights.write(module, 4)
    assert other.read(reader) == 4
    weights.begun.fill_(5)  # a writer is at work
    found = []
    thread = threading.Thread(target=lambda: found.append(other.read(reader)))
    thread.start()
    time.sleep(0.05)
    assert not found
    torch.nn.init.constant_(module.weight, 2.0)
    weights.write(module, 5)
    thread.join(5.0)
    assert found == [5] and torch.equal(reader.weight, module.weight)
    other.close()
    weights.close(unlink=True)


def test_weights_of_all_kinds_come_over():
    module = torch.nn.BatchNorm1d(3)
    module.double()
    module.num_batches_tracked.fill_(17)
    weights, reader = SharedWeights(module), torch.nn.BatchNorm1d(3).double()
    weights.write(module, 1)
    weights.read(reader)
    assert all(torch.equal(mine, other) for mine, other in zip(module.state_dict().values(), reader.state_dict().values(), strict=True))
    weights.close(unlink=True)


@pytest.mark.skipif(not FOLDER.exists(), reason="shared memory lies elsewhere")
def test_shared_memory_that_is_promised_is_taken_and_too_little_for_a_network_is_told(monkeypatch):
    slot = Slot()
    assert slot.grow(1 << 20)
    assert (FOLDER / slot.name).stat().st_blocks * 512 >= 1 << 20
    slot.close()
    monkeypatch.setattr("lightning_rl.actors.shared_memory.shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(SettingError, match=r"^/dev/shm has no room for a network of 0 MB"):
        SharedWeights(network())


def test_an_answer_that_does_not_fit_its_slot_goes_another_way():
    slot, writer = Slot(), SlotWriter()
    header, sizes, inline = writer.dump(slot.name, np.arange(10))
    np.testing.assert_array_equal(pickle.loads(header, buffers=inline), np.arange(10))
    assert slot.grow(4096)
    for length in (10, 512):
        header, sizes, inline = writer.dump(slot.name, np.arange(length))
        assert inline is None
        np.testing.assert_array_equal(slot.load(header, sizes), np.arange(length))
    assert writer.dump(slot.name, np.arange(513))[2] is not None
    writer.close()
    slot.close()
    with suppress(FileNotFoundError):
        SlotWriter()._attach("psm_is_not_there")
