"""What the processes of a run, its ranks, tell each other; a run of one process tells itself."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Thing = TypeVar("Thing")


def num_ranks() -> int:
    """How many processes learn together."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if together else 1


def sum_over_ranks(number: Tensor) -> Tensor:
    """The sum of a tensor over all ranks."""
    if num_ranks() == 1:
        return number
    total = number.detach().clone()
    torch.distributed.all_reduce(total)
    return total


def mean_over_ranks(number: Tensor) -> Tensor:
    """The mean of a tensor over all ranks."""
    return number if num_ranks() == 1 else sum_over_ranks(number) / num_ranks()


def of_all_ranks(thing: Thing) -> list[Thing]:
    """What each rank has, in their order."""
    if num_ranks() == 1:
        return [thing]
    things: list[Thing] = [thing] * num_ranks()
    torch.distributed.all_gather_object(things, thing)
    return things


def together(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of all ranks as one: the mean of those that have one; counts of what befell environments, `env/…`, add up."""
    ranks = of_all_ranks(metrics)
    if len(ranks) == 1:
        return metrics
    found = {name: [each[name] for each in ranks if name in each] for name in dict.fromkeys(name for each in ranks for name in each)}
    return {name: sum(values) / (1 if name.startswith("env/") else len(values)) for name, values in found.items()}
