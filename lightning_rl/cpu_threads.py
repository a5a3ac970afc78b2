"""How many CPU threads torch and numpy compute with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


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
