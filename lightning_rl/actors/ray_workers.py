"""Workers placed by Ray, on this machine or on many (https://docs.ray.io)."""

import io
import logging
import os
import pickle
import signal
import socket
from contextlib import redirect_stderr
from textwrap import shorten
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
from torch import nn

from lightning_rl.actors.workers import Answer, Build, Call, RemoteWorker, RemoteWorkers, set_weights, weights_of
from lightning_rl.errors import RunStoppedError, SettingError, missing_extra
from lightning_rl.processes.children import ANSWER_TIMEOUT, MAX_RESTARTS, WorkerError
from lightning_rl.processes.startup import restoring_signal_handlers
from lightning_rl.types import tree_to_numpy, tree_to_torch


class RayWorker:
    """A worker in a Ray actor. Arguments as in `RemoteWorker`."""

    def __init__(self, index: int, restarts: int, made_of: bytes) -> None:
        self.remote, self.version = RemoteWorker(index, restarts, made_of), -1

    def answer(self, version: int, weights: dict[str, np.ndarray], method: str, arguments: bytes) -> Answer | WorkerError | str:
        """Answer a call with the published weights; the value is pickled, because its arrays would otherwise be read-only."""

        def update_weights(network: nn.Module) -> int:
            if version != self.version:
                set_weights(network, tree_to_torch({name: array.copy() for name, array in weights.items()}))
                self.version = version
            return version

        try:
            answer = self.remote.answer(update_weights, method, pickle.loads(arguments))
            return answer._replace(value=pickle.dumps(answer.value, 5))
        except Exception as error:  # user code may raise anything
            return self.remote.describe_error(error)


class RayWorkers(RemoteWorkers):
    """Workers in Ray actors. Arguments as in `RemoteWorkers`, and the address of a cluster (default: start a local one).

    Raises `SettingError`: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(
        self,
        build: Build,
        num: int,
        network: nn.Module,
        timeout: float = ANSWER_TIMEOUT,
        max_restarts: int = MAX_RESTARTS,
        address: str | None = None,
    ) -> None:
        self.address = address
        super().__init__(build, num, network, timeout, max_restarts)

    def _open(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise missing_extra("ray", "ray", "actors.backend ray") from error
        self.ray, self.has_started_ray = ray, not ray.is_initialized()
        if self.has_started_ray:
            join_cluster(ray, self.num, self.address, "actors.address")
        everywhere = {"scheduling_strategy": "SPREAD", "num_cpus": 0.01}  # Ray does not spread actors that request no CPU
        self.actor_class = ray.remote(RayWorker).options(**everywhere)
        self.workers: dict[int, Any] = {}
        self.publish(0)

    def publish(self, version: int) -> None:
        super().publish(version)
        self.version, self.weights = version, self.ray.put(tree_to_numpy(weights_of(self.network)))

    def close(self) -> None:
        while self.workers:
            self._end(next(iter(self.workers)))
        if self.has_started_ray:
            self.has_started_ray = False
            self.ray.shutdown()

    def _start(self, i: int, restarts: int, made_of: bytes) -> None:
        self.workers[i] = self.actor_class.remote(i, restarts, made_of)

    def _end(self, i: int) -> None:
        self.ray.kill(self.workers.pop(i))

    def _send(self, i: int, call: Call) -> None:
        call.handle = self.workers[i].answer.remote(self.version, self.weights, call.method, cloudpickle.dumps(call.arguments))

    def _wait(self, busy: list[int], seconds: float) -> list[int]:
        workers = {self.calls[i][0].handle: i for i in busy}
        self.ray.wait(list(workers), num_returns=1, timeout=seconds)
        ready, _ = self.ray.wait(list(workers), num_returns=len(workers), timeout=0)
        return [workers[handle] for handle in ready]

    def _answer(self, i: int, call: Call) -> tuple[float, Answer] | WorkerError | str:
        try:
            answer: Answer | WorkerError | str = self.ray.get(call.handle)
        except self.ray.exceptions.RayError as error:
            return shorten(str(error).splitlines()[0], 100, placeholder=" …")
        return answer if isinstance(answer, WorkerError | str) else (call.asked, answer._replace(value=pickle.loads(answer.value)))


def join_cluster(ray: ModuleType, cpus: int, address: str | None, setting: str) -> None:
    """Join a Ray cluster, or start one on this machine.

    Args:
        ray: the package, which is optional.
        cpus: cores of a cluster on this machine.
        address: address of a running cluster; None starts one.
        setting: name of the setting of the address, for the error.

    Raises:
        SettingError: there is no cluster at the address.
        RunStoppedError: a SIGTERM arrived.
    """
    cluster: dict[str, object] = {"num_cpus": cpus, "include_dashboard": False} if address is None else {"address": address}
    try:
        host, _, port = (address or "").removeprefix("ray://").rpartition(":")
        if host and "/" not in host and port.isdecimal():
            socket.create_connection((host, int(port)), 10.0).close()  # fail early: Ray itself would retry for a long time
        with redirect_stderr(io.StringIO()), restoring_signal_handlers():  # errors are raised; at SIGTERM Ray would dump its stack
            ray.init(**cluster, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except SystemExit as error:  # raised by Ray at a SIGTERM during startup
        os.kill(os.getpid(), signal.SIGTERM)
        raise RunStoppedError from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = shorten(str(error), 120, placeholder=" …")
        raise SettingError(f"{setting} {address!r}: there is no Ray cluster to join ({reason})") from error
