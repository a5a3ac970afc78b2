"""CPU threads, choice of device, and malloc settings for training."""

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from gymnasium.spaces import Space

from lightning_rl.envs.config import EnvConfig
from lightning_rl.networks.acting import PolicyNetwork
from lightning_rl.networks.mlp import EnsembleLinear, NoisyLinear
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.types import tree_to_torch

MIN_WIDTH = 256
"""Minimum inputs and outputs of a layer for which a second thread may help."""
BATCH_ROWS = 64
MEASURED_SECONDS = 0.3
MAX_TIME_RATIO = 0.85
"""More threads are used if they take at most this fraction of the time of one thread."""
MALLOC_OPTIONS = {-3: 32 << 20, -1: 256 << 20}
"""M_MMAP_THRESHOLD (the maximum that glibc itself adapts to) and M_TRIM_THRESHOLD, by their numbers in malloc.h, in bytes."""
MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Set the number of torch's CPU threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB of freed memory for the next update, unless environment variables configure its `malloc`.

    By default, glibc returns more than a few megabytes at the end of its heap to the kernel, which zeroes each page on the next use. That
    takes a third of the time of TQC, whose loss has arrays of 2.4 MB (benchmarks/notes.md). Other C libraries are not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None and not any(name in os.environ for name in MALLOC_VARIABLES):
        for option, size in MALLOC_OPTIONS.items():
            mallopt(option, size)


def is_wide(network: torch.nn.Module) -> bool:
    """Return whether a network has convolutions, or layers of width 256 or more."""
    layers = (torch.nn.Linear, EnsembleLinear, NoisyLinear)
    widths = [min(module.weight.shape[-2:]) for module in network.modules() if isinstance(module, layers)]
    return has_convolutions(network.modules()) or max(widths, default=0) >= MIN_WIDTH


def has_convolutions(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether some modules of a network are convolutions."""
    return any(isinstance(module, torch.nn.Conv2d) for module in modules)


def suits_cpu(model: object) -> bool:
    """Return whether an algorithm probably learns faster on a CPU: its network is narrow, and its environments are not on the GPU.

    A PPO update launches 240 kernels, at about 10 µs each on the host of an H100 (benchmarks/notes.md).
    """
    env, network = getattr(model, "env", None), getattr(model, "network", None)
    on_device = env.lives_on_device if isinstance(env, EnvConfig) else hasattr(env, "device")
    return not on_device and isinstance(network, PolicyNetwork) and not is_wide(network)


def choose_threads(model: object) -> tuple[int, str | None]:
    """Return the number of threads for an algorithm's updates, and a line about the choice if it was measured.

    This is 1, or torch's default if the network learns clearly faster with it.
    """
    most, network, spaces = torch.get_num_threads(), getattr(model, "network", None), getattr(model, "spaces", None)
    if most == 1 or not isinstance(network, PolicyNetwork) or not isinstance(spaces, Spaces) or not is_wide(network):
        return 1, None
    one, many = measure_seconds(learning_step(network, spaces.observation), most)
    number = most if many < MAX_TIME_RATIO * one else 1
    times = f"{1e3 * one:.3g} ms with 1, {1e3 * many:.3g} ms with {most}"
    return number, f"trainer.torch_threads {number} (measured: {BATCH_ROWS} rows forward and backward take {times})"


def learning_step(network: PolicyNetwork, space: Space) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass of a copy of the policy on a batch of zeros."""
    network = deepcopy(network).eval()
    obs, memory = tree_to_torch(allocate(space, BATCH_ROWS)), network.initial_memory(BATCH_ROWS)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]

    def step() -> None:
        x, _ = network.policy(obs, memory, torch.ones(BATCH_ROWS, dtype=torch.bool))
        torch.autograd.grad(x.sum(), parameters, allow_unused=True)

    return step


def measure_seconds(step: Callable[[], None], most: int) -> tuple[float, float]:
    """Return the mean times of a step with 1 and with `most` threads, alternating: the mean includes the cost of rare long waits."""
    spent, rounds = {1: 0.0, most: 0.0}, -1
    start = time.perf_counter()
    while rounds < 1 or time.perf_counter() - start < MEASURED_SECONDS:
        for number in spent:
            with torch_threads(number):
                before = time.perf_counter()
                step()
                spent[number] += time.perf_counter() - before if rounds >= 0 else 0.0  # the first round is a warm-up
        rounds += 1
    return spent[1] / rounds, spent[most] / rounds
