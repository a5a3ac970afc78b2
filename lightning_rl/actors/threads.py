"""Workers in threads of this process, for environments that wait for something else, such as a simulator."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.actors.workers import Answer, Build, own_copy

Published = tuple[int, dict[str, Tensor]]
"""Weights and their version."""


class InThreads:
    """Workers in a thread each, with a copy of the network each. A call has the weights of when it was made, so that what comes of it does
    not depend on when its thread begins."""

    restarts = 0

    def __init__(self, build: Build, num: int, network: nn.Module) -> None:
        self.num, self.network, self.notices = num, network, list[str]()
        self.copies = [own_copy(network) for _ in range(num)]
        self.workers = [build(i, 0, copy) for i, copy in enumerate(self.copies)]
        self.threads = [ThreadPoolExecutor(1, f"actor-{i}") for i in range(num)]
        self.calls: list[deque[tuple[str, Future[Any]]]] = [deque() for _ in range(num)]
        self.done: SimpleQueue[int] = SimpleQueue()
        """Whose calls were done, in the order in which they were."""
        self.publish(0)

    def publish(self, version: int) -> None:
        weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.network.state_dict().items()}
        self.published: Published = version, weights

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        answer = self.threads[worker].submit(self._answer, worker, self.published, method, arguments)
        self.calls[worker].append((method, answer))
        answer.add_done_callback(lambda _: self.done.put(worker))

    def receive(self) -> Answer:
        worker = self.done.get()
        method, answer = self.calls[worker].popleft()
        version, value, seconds = answer.result()
        return Answer(worker, method, version, value, seconds)

    def num_ready(self) -> int:
        return self.done.qsize()

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown(cancel_futures=True)
        for worker in self.workers:
            worker.close()

    def _answer(self, worker: int, published: Published, method: str, arguments: tuple[Any, ...]) -> tuple[int, Any, float]:
        began, (version, weights) = time.monotonic(), published
        load(self.copies[worker], weights)
        return version, getattr(self.workers[worker], method)(*arguments), time.monotonic() - began


@torch.no_grad()
def load(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into a network in place, where others have views of them."""
    for name, tensor in network.state_dict().items():
        tensor.copy_(weights[name])
