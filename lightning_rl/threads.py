"""CPU threads that torch and numpy compute with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from lightning_rl.networks.acting import PolicyNetwork
from lightning_rl.networks.mlp import EnsembleLinear, NoisyLinear
from lightning_rl.spaces import allocate
from lightning_rl.types import tree_to_torch


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """A number of CPU threads for torch, and then the number before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> threadpool_limits:
    """From now on numpy multiplies in one thread, until the context that this is ends: small matrices lose time by more."""
    return threadpool_limits(limits=1, user_api="blas")


WIDE = 256
"""Inputs and outputs from which a layer is worth a second thread, if anything is."""
ROWS = 64
SECONDS = 0.3
"""Of measuring."""
CLEARLY = 0.85
"""More threads must take at most so much of the time of one."""


def is_wide(network: torch.nn.Module) -> bool:
    """Whether a network has convolutions, or layers of 256 and wider."""
    layers = (torch.nn.Linear, EnsembleLinear, NoisyLinear)
    return any(
        isinstance(module, torch.nn.Conv2d) or (isinstance(module, layers) and min(module.weight.shape[-2:]) >= WIDE)
        for module in network.modules()
    )


def choose_threads(model: Any) -> tuple[int, str | None]:
    """The threads for an algorithm's updates, and one line about it if it was measured: 1, or torch's own choice where its network learns
    clearly faster so.
    """
    most, network = torch.get_num_threads(), getattr(model, "network", None)
    if most == 1 or not isinstance(network, PolicyNetwork) or not is_wide(network):
        return 1, None
    one, many = seconds(learning(network, model.spaces.observation), most)
    number = most if many < CLEARLY * one else 1
    times = f"{1e3 * one:.3g} ms with 1, {1e3 * many:.3g} ms with {most}"
    return number, f"trainer.torch_threads {number}: {ROWS} rows forward and backward take {times}"


def learning(network: Any, space: Any) -> Callable[[], Any]:
    """Forward and backward of a copy of the policy, on a made-up batch."""
    network = deepcopy(network).eval()
    obs, memory = tree_to_torch(allocate(space, ROWS)), network.initial_memory(ROWS)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]

    def step() -> None:
        x, _ = network.policy(obs, memory, torch.ones(ROWS, dtype=torch.bool))
        torch.autograd.grad(x.sum(), parameters, allow_unused=True)

    return step


def seconds(step: Callable[[], Any], most: int) -> tuple[float, float]:
    """The mean time of a step with 1 thread and with the most, in turn. The mean, for a single wait may outweigh what all others gain."""
    spent, rounds = {1: 0.0, most: 0.0}, -1
    began = time.perf_counter()
    while rounds < 1 or time.perf_counter() - began < SECONDS:
        for number in spent:
            with torch_threads(number):
                before = time.perf_counter()
                step()
                spent[number] += time.perf_counter() - before if rounds >= 0 else 0.0  # the first round prepares kernels
        rounds += 1
    return spent[1] / rounds, spent[most] / rounds
