"""Workers in processes: answers, weights that are read whole, and workers that raise, die or freeze."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory

import cloudpickle
import numpy as np
import pytest
import torch

from lightning_rl import SettingError
from lightning_rl.actors.processes import FOLDER, ProcessWorkers, SharedWeights, Slot, pack, work
from lightning_rl.actors.workers import LocalWorkers, ThreadWorkers
from lightning_rl.processes.children import WorkerError


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
    both = ProcessWorkers(Echo, 2, network(), timeout=60.0, max_restarts=1)
    yield both
    pids = [each.process.pid for each in both.processes.values()]
    blocks = [slot.name for slots in both.slots for slot in slots if slot.name is not None]
    assert len(pids) == 2
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


@pytest.mark.thorough
def test_each_call_is_answered_once_and_calls_of_one_worker_in_their_order(workers):
    answers = ask(workers, (0, "say", 1), (1, "say", 2), (0, "say", 3), (0, "say", 4))
    assert [answer.value for answer in answers if answer.worker == 0] == [1, 3, 4]
    assert [(answer.method, answer.value) for answer in answers if answer.worker == 1] == [("say", 2)]
    assert [answer.value for answer in ask(workers, (0, "who"), (1, "who"))] in ([(0, 0), (1, 0)], [(1, 0), (0, 0)])


@pytest.mark.thorough
def test_large_arrays_come_through_shared_memory_and_belong_to_the_caller(workers):
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


def test_waiting_answers_are_not_overwritten(workers):
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


@pytest.mark.thorough
def test_workers_that_die_or_freeze_are_restarted_and_asked_again(workers):
    workers.timeout = 0.5
    try:
        answers = ask(workers, (1, "wait", 0.01), (1, "freeze_once"), (1, "say", "after it"), (0, "die_once"))
    finally:
        workers.timeout = 60.0
    assert [answer.value for answer in answers if answer.worker == 0] == [(0, 1)]
    assert [answer.value for answer in answers if answer.worker == 1] == [1, (1, 1), "after it"]
    assert workers.restarts == 2 and sorted(workers.notices) == [
        "actor 0 was restarted: it died with exit code -9",
        "actor 1 was restarted: no answer in 0.5 s (actors.timeout)",
    ]


def test_full_shared_memory_is_reported_once(workers, monkeypatch):
    monkeypatch.setattr("lightning_rl.actors.processes.shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 0))
    array = np.arange(1_000_000)
    workers.notices.clear()
    for _ in range(2):
        assert ask(workers, (1, "say", array))[0].value[-1] == 999_999
    assert workers.notices == ["shared memory is full: answers of actor 1 go through pipes"]
    workers.notices.clear()


@pytest.mark.thorough
def test_an_exception_is_raised_here_with_its_traceback_and_a_worker_that_fails_too_often_ends_the_run():
    workers = ProcessWorkers(Echo, 1, network(), timeout=60.0, max_restarts=0)
    with pytest.raises(WorkerError, match="actor 0 raised KeyError: 'nothing'") as error:
        ask(workers, (0, "fail"))
    assert 'return {}["nothing"]' in "".join(error.value.__notes__)
    with pytest.raises(WorkerError, match=r"actor 0 failed more than 0 times in an hour; last: it died with exit code 0"):
        ask(workers, (0, "say", 1))
    workers.close()


@pytest.mark.parametrize("kind", [LocalWorkers, ThreadWorkers])
def test_workers_of_this_process_answer_alike_and_raise_what_they_raise(kind):
    module = network()
    both = kind(Echo, 2, module)
    assert sorted(answer.value for answer in ask(both, (1, "who"), (0, "who"))) == [(0, 0), (1, 0)]
    torch.nn.init.constant_(module.weight, 5.0)
    both.publish(7)
    assert [(answer.version, answer.value) for answer in ask(both, (0, "weight"))] == [(7, 15.0)]
    with pytest.raises(KeyError):
        ask(both, (0, "fail"))
    both.close()


@pytest.mark.parametrize("kind", [LocalWorkers, ThreadWorkers])
def test_all_workers_are_closed_where_one_cannot_be_built_or_closed(kind):
    closed = []

    class Stubborn(Echo):
        def close(self):
            closed.append(self.index)
            if self.index == 0:
                raise OSError("does not close")

    def build(index, restarts, network):
        if index == 2:
            raise ValueError("cannot be built")
        return Stubborn(index, restarts, network)

    with pytest.raises(OSError, match="does not close"):
        kind(build, 3, network())
    assert sorted(closed) == [0, 1]
    closed.clear()
    with pytest.raises(OSError, match="does not close"):
        kind(build, 2, network()).close()
    assert sorted(closed) == [0, 1]


def test_a_process_whose_run_has_ended_says_nothing_of_its_own_error():
    ours, theirs = multiprocessing.Pipe()
    ours.send(("fail", (), None))
    ours.close()
    assert work(0, 0, cloudpickle.dumps((Echo, network())), SharedWeights(network()), theirs) is None


def test_workers_in_threads_use_the_published_weights():
    module = network(1.0)
    both = ThreadWorkers(Echo, 1, module)
    torch.nn.init.constant_(module.weight, 5.0)
    assert ask(both, (0, "weight"))[0].value == 3.0
    both.publish(1)
    assert ask(both, (0, "weight"))[0].value == 15.0
    both.close()


def test_answers_of_threads_come_in_the_order_in_which_they_finish():
    both = ThreadWorkers(Echo, 2, network())
    for worker in (1, 0):
        both.call(worker, "who")
        while both.num_ready() < 2 - worker:
            time.sleep(0.001)
    both.call(1, "who")
    assert [both.receive().worker for _ in range(3)] == [1, 0, 1]
    both.close()


def test_half_written_weights_are_read_again():
    module, reader = network(1.0), network(0.0)
    weights = SharedWeights(module)
    weights.write(module, 4)
    assert weights.read(reader) == 4
    weights.begun.fill_(5)  # a writer is at work
    found = []
    thread = threading.Thread(target=lambda: found.append(weights.read(reader)))
    thread.start()
    time.sleep(0.05)
    assert not found
    torch.nn.init.constant_(module.weight, 2.0)
    weights.write(module, 5)
    thread.join(5.0)
    assert found == [5] and torch.equal(reader.weight, module.weight)


@pytest.mark.thorough
def test_weights_of_all_dtypes_are_shared():
    module = torch.nn.BatchNorm1d(3)
    module.double()
    module.num_batches_tracked.fill_(17)
    weights, reader = SharedWeights(module), torch.nn.BatchNorm1d(3).double()
    weights.write(module, 1)
    weights.read(reader)
    assert all(torch.equal(mine, other) for mine, other in zip(module.state_dict().values(), reader.state_dict().values(), strict=True))


@pytest.mark.thorough
@pytest.mark.skipif(not FOLDER.exists(), reason="shared memory is elsewhere")
def test_shared_memory_is_taken_at_once_and_too_little_for_a_network_is_an_error(monkeypatch):
    slot = Slot()
    assert slot.resize(1 << 20)
    assert (FOLDER / slot.name).stat().st_blocks * 512 >= 1 << 20
    slot.close()
    monkeypatch.setattr("lightning_rl.actors.processes.shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(SettingError, match=r"^/dev/shm has no room for a network of 0 MB"):
        SharedWeights(network())


@pytest.mark.thorough
def test_an_answer_that_does_not_fit_its_slot_is_sent_whole():
    slot = Slot()

    def send(length):
        packed = pack(np.arange(length), slot.name)
        np.testing.assert_array_equal(slot.load(packed), np.arange(length))
        return packed.arrays is not None

    assert send(10) and slot.resize(4096)
    assert [send(length) for length in (10, 512, 513)] == [False, False, True]
    slot.close()
