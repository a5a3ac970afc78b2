"""What was computed beside autograd in an update, until its gradient is known.

The output of a small perceptron in numpy, or a compiled loss, is a leaf to autograd, which differentiates down to it. `gradient_step` takes
the leaves of the parameters that it moves and carries their gradients on. A leaf that such a step did not reach is spent with it, as its
parameters have changed since: a network is asked anew after each step of its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_rl.networks.numpy_mlp import MAX_WIDTH, NumpyMLP, as_numpy, has_hooks, is_plain


class Waiting(NamedTuple):
    """A leaf; the parameters that its gradient is for, by their `id`; and how it is carried on: `pull(gradient, seen)`."""

    leaf: Tensor
    parameters: frozenset[int]
    pull: Callable[[Tensor, Any], None]
    seen: Any


class Tape:
    """The leaves that wait for their gradients, the oldest first."""

    def __init__(self) -> None:
        self.known: dict[nn.Module, NumpyMLP | None] = {}
        self.waiting: list[Waiting] = []

    def run(self, layers: nn.Sequential, x: Tensor) -> Tensor | None:
        """The output `[..., out]` for `x [..., in]`, a leaf if there is a gradient to know; None if torch must compute it."""
        if layers not in self.known:
            self.known[layers] = as_numpy(layers) if is_plain(layers, MAX_WIDTH - 1) and not has_hooks(layers) else None
        mlp = self.known[layers]
        if mlp is None or x.requires_grad or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return None
        learns = [part.requires_grad for pair in mlp.parameters for part in pair]
        rows = x.numpy() if x.dim() == 2 else x.numpy().reshape(-1, x.shape[-1])
        if not (torch.is_grad_enabled() and any(learns)):
            y = torch.from_numpy(mlp(rows))
        elif all(learns):
            seen = mlp.outputs(rows)
            y = torch.from_numpy(seen[-1]).requires_grad_()
            self.waiting.append(Waiting(y, mlp.ids, mlp.pull, seen))
        else:
            return None
        return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)

    def end(self) -> None:
        """No step will come any more."""
        for each in self.waiting:
            _check(each.leaf)


tape: ContextVar[Tape | None] = ContextVar("tape", default=None)
"""That of the update under way, None outside."""


@contextmanager
def in_numpy() -> Iterator[None]:
    """Compute small perceptrons in numpy. With autograd on, gradients are then those that `gradient_step` makes, and no others.

    Raises:
        RuntimeError: gradients were asked for in another way.
    """
    current = Tape()
    token = tape.set(current)
    try:
        yield
        current.end()
    finally:
        tape.reset(token)


@contextmanager
def in_torch() -> Iterator[None]:
    """The opposite."""
    token = tape.set(None)
    try:
        yield
    finally:
        tape.reset(token)


def wait(leaf: Tensor, parameters: frozenset[int], pull: Callable[[Tensor, Any], None], seen: Any) -> None:
    """Have the gradient of another leaf carried on too, by the step that moves one of the parameters."""
    current = tape.get()
    assert current is not None
    current.waiting.append(Waiting(leaf, parameters, pull, seen))


def take(parameters: Collection[int]) -> list[Waiting]:
    """Take the leaves whose gradients are for any of these parameters, given by their `id`, off the tape."""
    current = tape.get()
    if current is None or not current.waiting:
        return []
    taken = [each for each in current.waiting if not each.parameters.isdisjoint(parameters)]
    current.waiting = [each for each in current.waiting if each.parameters.isdisjoint(parameters)]
    for each in taken:
        _check(each.leaf)
    return taken


def carry_on(taken: Sequence[Waiting]) -> None:
    """Carry the gradients of leaves on to their parameters."""
    for leaf, _, pull, seen in taken:
        if leaf.grad is not None:
            pull(leaf.grad, seen)


def _check(leaf: Tensor) -> None:
    if leaf.grad is not None:
        raise RuntimeError("within learning() gradients are made by step(loss, optimizer) alone, and not by backward()")
