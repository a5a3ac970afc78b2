"""Actors in threads and in other processes act as what learns after each change of a run, or one line names it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

import lightning_rl as lrl
from lightning_rl.actors import config as actors
from lightning_rl.actors import evaluator
from lightning_rl.actors.processes import ProcessWorkers
from lightning_rl.actors.ray_workers import RayWorkers
from lightning_rl.actors.workers import RemoteWorker, RemoteWorkers, ThreadWorkers, set_weights, weights_of
from lightning_rl.networks.normalization import eval_mode
from lightning_rl.processes.children import WorkerError
from tests.fitting import TINY, fit, weights
from tests.own_code.changes import (
    ALGORITHMS,
    ELSEWHERE,
    EQUAL,
    IN_TORCH,
    NAMED,
    NETWORK,
    PARAMETRIZED,
    PRUNED,
    REFUSED,
    RUNS,
    expected,
    in_a_thread,
    mark_of_run,
    note,
)
from tests.own_code.test_changes import inputs, run, same, without_fast_paths
from tests.own_code.test_changes_in_all_places import Answers, build, outputs
from tests.own_code.test_changes_in_all_places import inputs as random_inputs

THREADED = [
    (name, kind)
    for name, change in RUNS.items()
    for kind in change.to
    if expected(name, kind.__name__)["another process"] in (in_a_thread(EQUAL), in_a_thread(NAMED))
]
LOST = "actors act without what was changed after they started: "


def cases(pairs, fast=()):
    """The pairs of a change and an algorithm with their marks; a few are fast."""
    return [pytest.param(*pair, marks=() if pair in fast else mark_of_run(*pair), id=f"{pair[0]}-{pair[1].__name__}") for pair in pairs]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "algorithm"), cases(THREADED, fast=[("a loss overridden", lrl.PPO)]))
def test_what_acts_in_a_thread_is_what_learns(name, algorithm, monkeypatch, capsys):
    change, published, acted = RUNS[name], {}, {}
    monkeypatch.setitem(TINY, algorithm, {**TINY[algorithm], "threaded": True})
    publish, answer = ThreadWorkers.publish, ThreadWorkers._answer
    obs = torch.stack(list(map(torch.as_tensor, inputs(change.make(algorithm)[0]))))

    def acts(network):
        with torch.no_grad(), eval_mode(network.modules()):
            return outputs(network, obs)

    def look_and_publish(workers, version):
        publish(workers, version)
        published[version] = acts(workers.network)

    def look_and_answer(workers, worker, version, *call):
        answered = answer(workers, worker, version, *call)
        acted[version] = acts(workers.copies[worker])
        return answered

    monkeypatch.setattr(ThreadWorkers, "publish", look_and_publish)
    monkeypatch.setattr(ThreadWorkers, "_answer", look_and_answer)
    ours = run(change.make(algorithm))
    equal = [all(map(np.array_equal, found, published[version])) for version, found in acted.items()]
    named = LOST in capsys.readouterr().out
    assert len(equal) > 4 and all(equal) != named
    if not named:
        with without_fast_paths():
            assert [*same(ours, run(change.make(algorithm)))] == [True, True]
    note(name, algorithm.__name__, "another process", in_a_thread(NAMED if named else EQUAL))


# ---------------------------------------------------------------- other processes

WORKERS: dict[int, RemoteWorker] = {}
"""Those of the other process."""


def start(i: int, restarts: int, made_of: bytes) -> None:
    WORKERS[i] = RemoteWorker(i, restarts, made_of)


def end(i: int) -> None:
    if i in WORKERS and (worker := WORKERS.pop(i).worker) is not None:
        worker.close()


def answer(i, version, weights, method, arguments):
    def update(network):
        set_weights(network, weights)
        return version

    try:
        return WORKERS[i].answer(update, method, arguments)
    except Exception as error:
        return WORKERS[i].describe_error(error)


class OneProcess(RemoteWorkers):
    """Workers in one other process that all tests share, so that only the first has to wait for it."""

    pool: ProcessPoolExecutor

    def _open(self):
        self.publish(0)

    def publish(self, version):
        super().publish(version)
        self.version = version
        self.weights = {name: tensor.detach().clone() for name, tensor in weights_of(self.network).items()}

    def _start(self, i, restarts, made_of):
        self.pool.submit(start, i, restarts, made_of).result()

    def _end(self, i):
        self.pool.submit(end, i).result()

    def close(self):
        for i in range(self.num):
            self._end(i)

    def _send(self, i, call):
        call.handle = self.pool.submit(answer, i, self.version, self.weights, call.method, call.arguments)

    def _wait(self, busy, seconds):
        wait([self.calls[i][0].handle for i in busy], seconds, FIRST_COMPLETED)
        return [i for i in busy if self.calls[i][0].handle.done()]

    def _answer(self, i, call):
        found = call.handle.result()
        return found if isinstance(found, WorkerError | str) else (call.asked, found)


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def one_process(pool, monkeypatch):
    monkeypatch.setattr(OneProcess, "pool", pool, raising=False)
    monkeypatch.setattr(actors, "ProcessWorkers", OneProcess)


@pytest.mark.parametrize(("name", "algorithm"), cases(ELSEWHERE))
def test_what_acts_in_another_process_is_what_learns(name, algorithm, one_process, monkeypatch, capsys):
    def learned(backend):
        ordered = {"ordered": True} if algorithm is lrl.IMPALA else {}
        monkeypatch.setitem(TINY, algorithm, {**TINY[algorithm], "actors": {"num_actors": 1, "backend": backend, **ordered}})
        return run(RUNS[name].make(algorithm))

    here = learned("in_process")
    assert LOST not in capsys.readouterr().out
    if (name, algorithm) == (PRUNED, lrl.EvolutionStrategies):
        with pytest.raises(lrl.SettingError, match=r"^evaluators have no .*weight_orig: .*; change it before fit$"):
            learned("processes")
        return note(name, algorithm.__name__, "another process", REFUSED)
    there = learned("processes")
    equal, named = all(map(torch.equal, here.weights, there.weights)), LOST in capsys.readouterr().out
    assert len(here.weights) == len(there.weights) > 3 and equal != named
    return note(name, algorithm.__name__, "another process", NAMED if named else EQUAL)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode", "ignore:There is a performance drop because")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(each, marks=pytest.mark.slow if number % 6 else pytest.mark.thorough)
        for number, each in enumerate(NETWORK)
        if each not in IN_TORCH
    ],
)
def test_evaluators_act_as_the_network_that_was_changed_wherever_they_are(change, one_process, monkeypatch):
    def learned(backend):
        torch.manual_seed(0)
        settings = {"net_arch": [8, 8], "episodes_per_generation": 8, "sigma": 0.5, "learning_rate": 0.1, "normalize_obs": "running"}
        model = lrl.EvolutionStrategies("CartPole-v1", **settings, actors={"num_actors": 1, "backend": backend})
        for parameter in model.network.parameters():
            nn.init.normal_(parameter, std=0.5)
        NETWORK[change](model.network)
        fit(model, max_steps=3)
        return weights(model)

    here = learned("in_process")
    assert torch.equal(here, learned("threads"))
    if change in PARAMETRIZED:
        with pytest.raises(lrl.SettingError, match=r"^the policy or its environment cannot be sent to actors: .*parametrized modules"):
            learned("processes")
    else:
        assert torch.equal(here, learned("processes"))
    monkeypatch.setattr(evaluator, "fits_numpy", lambda *arguments: False)
    torch.testing.assert_close(learned("in_process"), here, atol=1e-5, rtol=1e-4)
    note(change, "EvolutionStrategies", "another process", REFUSED if change in PARAMETRIZED else EQUAL)


@pytest.mark.thorough
@pytest.mark.parametrize("change", sorted(PARAMETRIZED))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_cannot_be_sent_to_another_process_is_refused_in_one_line_and_reaches_a_thread(name, change):
    networks = nn.ModuleList([build(name).network.eval()])
    NETWORK[change](networks[0])
    obs = torch.from_numpy(random_inputs(build(name)))
    with closing(ThreadWorkers(Answers, 1, networks)) as workers, torch.no_grad():
        for version in (1, 2):
            workers.publish(version)
            workers.call(0, "outputs", 0, obs)
            assert all(map(np.array_equal, workers.receive().value, outputs(networks[0], obs)))
            for parameter in networks.parameters():
                parameter.mul_(0.9)
    check_refusals(networks, [ProcessWorkers])
    note(change, name, "another process", REFUSED)


def check_refusals(networks: nn.Module, kinds: list[Callable[..., RemoteWorkers]]) -> None:
    for kind in kinds:
        with pytest.raises(lrl.SettingError, match=r"^the policy or its environment cannot be sent to actors: .*parametrized modules"):
            kind(Answers, 1, networks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's
def test_ray_refuses_what_cannot_be_sent_too_and_its_actors_act_as_the_changed_network():
    ray = pytest.importorskip("ray")
    parametrized = nn.ModuleList([build("actor").network])
    NETWORK["weight norm"](parametrized[0])
    check_refusals(parametrized, [RayWorkers])
    assert not ray.is_initialized()
    sent = [change for change in NETWORK if change not in IN_TORCH | PARAMETRIZED]
    networks = nn.ModuleList(build("actor").network.eval() for _ in sent)
    for change, network in zip(sent, networks, strict=True):
        NETWORK[change](network)
    obs = torch.from_numpy(random_inputs(build("actor")))
    with closing(RayWorkers(Answers, 1, networks)) as workers, torch.no_grad():
        for version in (1, 2):
            workers.publish(version)
            for number, (change, network) in enumerate(zip(sent, networks, strict=True)):
                workers.call(0, "outputs", number, obs)
                for found, its in zip(workers.receive().value, outputs(network, obs), strict=True):
                    np.testing.assert_allclose(found, its, atol=1e-6, err_msg=change)
            for parameter in networks.parameters():
                parameter.mul_(0.9)
