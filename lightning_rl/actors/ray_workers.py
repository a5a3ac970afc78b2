"""Workers that Ray places, on this machine or on many (https://docs.ray.io)."""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import socket
import time
import traceback
from collections import deque
from contextlib import redirect_stderr
from textwrap import shorten
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import nn

from lightning_rl.actors.workers import START_TIMEOUT, Answer, Build, Failures, RemoteTraceback, WorkerError, own_copy
from lightning_rl.errors import Interrupted, SettingError, missing_extra
from lightning_rl.startup import restoring_signal_handlers
from lightning_rl.threads import one_thread
from lightning_rl.types import tree_to_numpy, tree_to_torch


class RayWorker:
    """A worker where Ray put it."""

    def __init__(self, index: int, restarts: int, made_of: bytes) -> None:
        torch.set_num_threads(1)
        one_thread()
        build, self.network = pickle.loads(made_of)
        self.version, self.made, self.build = -1, None, lambda: build(index, restarts, self.network)

    def answer(self, version: int, weights: dict[str, Any], method: str, arguments: bytes) -> tuple[float, bool, bytes]:
        """When it was ready, whether it worked, and the answer, or what was raised and where."""
        began = time.monotonic()
        try:
            if version != self.version:
                self.network.load_state_dict(tree_to_torch({name: array.copy() for name, array in weights.items()}))
                self.version = version
            if self.made is None:
                self.made = self.build()
            value = getattr(self.made, method)(*pickle.loads(arguments))
            return time.monotonic() - began, True, pickle.dumps(value, 5)
        except Exception as error:  # an environment of others may raise anything
            said = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" …"), traceback.format_exc()
            return 0.0, False, pickle.dumps(said)


class Call(NamedTuple):
    """One that is not answered."""

    method: str
    arguments: bytes
    version: int
    promise: Any
    asked: float


class RayWorkers:
    """Workers that are Ray's actors. One that vanishes or freezes is replaced, and its calls are made again.

    Arguments as `Processes`, and the address of a cluster; without one, a local cluster lives as long as these workers.

    Raises:
        SettingError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(
        self,
        build: Build,
        num: int,
        network: nn.Module,
        timeout: float = 60.0,
        max_restarts: int = 10,
        address: str | None = None,
        name: str = "actor",
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise missing_extra("ray", "ray", "actors.backend ray") from error
        self.ray, self.build, self.num, self.network, self.name = ray, build, num, network, name
        self.timeout, self.failures = timeout, Failures(name, num, max_restarts)
        self.restarts, self.notices = 0, list[str]()
        self.began = not ray.is_initialized()
        if self.began:
            self._join(address, num)
        self.calls: list[deque[Call]] = [deque() for _ in range(num)]
        self.deadlines = [0.0] * num
        everywhere = {"scheduling_strategy": "SPREAD", "num_cpus": 0.01}  # Ray does not spread actors that ask for nothing
        self._remote = ray.remote(RayWorker).options(**everywhere)
        self.publish(0)
        self.workers = [self._start(i) for i in range(num)]

    def _join(self, address: str | None, num: int) -> None:
        here = {"num_cpus": num, "include_dashboard": False} if address is None else {"address": address}
        try:
            host, _, port = (address or "").rpartition(":")
            if host and "/" not in host and port.isdecimal():
                socket.create_connection((host, int(port)), 10.0).close()  # Ray itself would try for a long time
            with redirect_stderr(io.StringIO()), restoring_signal_handlers():  # errors are raised; at SIGTERM it would dump its stack
                self.ray.init(**here, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except SystemExit as error:  # Ray's answer to a SIGTERM while it begins
            os.kill(os.getpid(), signal.SIGTERM)
            raise Interrupted from error
        except (OSError, ValueError, RuntimeError) as error:
            said = shorten(str(error), 120, placeholder=" …")
            raise SettingError(f"actors.address {address!r}: there is no Ray cluster to join ({said})") from error

    def publish(self, version: int) -> None:
        self.version, self.weights = version, self.ray.put(tree_to_numpy(dict(self.network.state_dict())))

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        self._make(worker, method, cloudpickle.dumps(arguments))

    def receive(self) -> Answer:
        while True:
            oldest = sorted((calls[0].asked, i) for i, calls in enumerate(self.calls) if calls)  # else the first ones always win
            waited_for = {self.calls[i][0].promise: i for _, i in oldest}
            patience = max(0.0, min(self.deadlines[i] for i in waited_for.values()) - time.monotonic())
            ready, _ = self.ray.wait(list(waited_for), num_returns=1, timeout=patience)
            for promise in ready:
                answer = self._answer(waited_for[promise])
                if answer is not None:
                    return answer
            for i in waited_for.values():
                if not ready and time.monotonic() > self.deadlines[i]:
                    self._replace(i, f"no answer in {self.timeout:g} s (actors.timeout)")

    def num_ready(self) -> int:
        promises = [call.promise for calls in self.calls for call in calls]
        return len(self.ray.wait(promises, num_returns=len(promises), timeout=0)[0]) if promises else 0

    def close(self) -> None:
        for worker in self.workers:
            self.ray.kill(worker)
        self.workers = []
        if self.began:
            self.began = False
            self.ray.shutdown()

    def _start(self, i: int) -> Any:
        self.deadlines[i] = time.monotonic() + max(self.timeout, START_TIMEOUT)
        return self._remote.remote(i, len(self.failures.times[i]), cloudpickle.dumps((self.build, own_copy(self.network))))

    def _make(self, i: int, method: str, arguments: bytes) -> None:
        if not self.calls[i]:
            self.deadlines[i] = max(self.deadlines[i], time.monotonic() + self.timeout)
        promise = self.workers[i].answer.remote(self.version, self.weights, method, arguments)
        self.calls[i].append(Call(method, arguments, self.version, promise, time.monotonic()))

    def _answer(self, i: int) -> Answer | None:
        """The answer to a worker's first call, which is ready; None if it is gone."""
        call = self.calls[i][0]
        try:
            seconds, worked, pickled = self.ray.get(call.promise)
        except self.ray.exceptions.RayError as error:
            self._replace(i, shorten(str(error).splitlines()[0], 100, placeholder=" …"))
            return None
        value = pickle.loads(pickled)
        if not worked:
            raise WorkerError(f"{self.name} {i} raised {value[0]}") from RemoteTraceback(value[1])
        self.calls[i].popleft()
        self.deadlines[i] = time.monotonic() + self.timeout
        return Answer(i, call.method, call.version, value, seconds)

    def _replace(self, i: int, failure: str) -> None:
        """Start a worker anew.

        Raises:
            WorkerError: it failed too often.
        """
        self.ray.kill(self.workers[i])
        self.notices.append(self.failures.add(i, failure))
        self.restarts += 1
        self.workers[i] = self._start(i)
        again = list(self.calls[i])
        self.calls[i].clear()
        for call in again:
            self._make(i, call.method, call.arguments)
