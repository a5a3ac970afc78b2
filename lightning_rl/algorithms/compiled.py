"""Losses compiled together with their gradients, for `compile: true`.

A loss is run once on a batch and written down as a graph, autograd's way back included (`traced.py`), of which inductor makes one function.
`torch.compile` would do the same and then ask at every call whether all that the loss saw in Python is as it was, which costs small
networks a part of the gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.algorithms.run_log import Metric
from lightning_rl.algorithms.traced import Seen, Traced, tensors_of
from lightning_rl.errors import SettingError
from lightning_rl.networks.flat import FlatParameters
from lightning_rl.networks.numpy_mlp import has_hooks
from lightning_rl.networks.tape import wait
from lightning_rl.types import tree_leaves, tree_map


def compiled_losses(algorithm: Any, names: Sequence[str]) -> dict[str, CompiledLoss]:
    """The losses of these names, for the algorithm's optimizers in their order.

    Raises:
        SettingError: the precision, an optimizer, or a hook does not allow it, or there is no such method.
    """
    if algorithm.trainer.precision == "16-mixed":
        raise SettingError("compile does not go with trainer.precision 16-mixed, which scales losses; use bf16-mixed")
    for name in names:
        if not hasattr(algorithm, name):
            raise SettingError(f"compile: {type(algorithm).__name__} has no method {name}; name its losses in the attribute `losses`")
    if has_hooks(algorithm.network):
        raise SettingError("compile: the network has hooks, which a compiled loss does not call; leave out one of them")
    pairs = zip(names, algorithm.raw_optimizers(), strict=False)
    return {name: CompiledLoss(algorithm, getattr(algorithm, name), optimizer) for name, optimizer in pairs}


REASONS = {
    ".numpy()": "it computes something in numpy",
    "_local_scalar_dense": "it takes a number out of a tensor",
    "data-dependent": "Python decides by a number that changes",
    "nonzero": "its shapes depend on numbers that change",
}
"""What torch says of the common ones, in words."""


class CompiledLoss:
    """A loss of an algorithm, called as the method is. What it returns is a leaf, whose gradient `gradient_step` carries on to parameters.

    The first call with tensors of some shapes compiles, which takes seconds.

    Args:
        algorithm: whose it is.
        loss: the method, which returns a scalar, or a tuple that begins with it. Functions that it returns or records are called at once.
        optimizer: of one `FlatParameters`, whose gradient is meant.

    Raises:
        SettingError: another optimizer, and, when it is called, a loss that cannot be compiled.
    """

    def __init__(self, algorithm: Any, loss: Callable[..., Any], optimizer: Optimizer) -> None:
        self.algorithm, self.loss, self.name = algorithm, loss, f"{type(algorithm).__name__}.{loss.__name__}"
        self.vector = vector_of(optimizer)
        if not isinstance(self.vector, FlatParameters):
            raise SettingError(f"compile: the optimizer of {self.name} must have FlatParameters, as FlatAdam does")
        self.programs: dict[Any, Any] = {}

    def begin(self) -> None:
        """Updates begin."""

    def __call__(self, *batch: Any) -> Any:
        leaves = tree_leaves(batch)
        tensors, shapes = tensors_of(leaves), shapes_of(leaves)
        if shapes not in self.programs:
            traced = Traced(self.algorithm, self.loss, self.vector, batch)
            try:
                self.programs[shapes] = Program(traced)
            except Exception as error:
                raise SettingError(f"compile: {self.name} cannot be compiled: {why(error)}") from error
        program = self.programs[shapes]
        return self.play(program.seen, batch, *program(tensors))

    def play(self, seen: Seen, batch: Any, gradient: Tensor, loss: Tensor, others: Sequence[Metric]) -> Any:
        """Do what the method does beside its arithmetic, and return what it returns."""
        wait(loss.requires_grad_(), self.vector.ids, self._pull, gradient)
        algorithm = self.algorithm
        for name in seen.checked:
            loss = algorithm.finite(name, loss)
        values = iter([loss, *others])
        returned = tree_map(lambda called: _function(next(values)) if called else _tensor(next(values)), seen.returned)
        algorithm.record(**{name: next(values) for name in seen.recorded})
        for errors in values:
            algorithm.learned(batch[0], _function(errors))
        return returned

    def _pull(self, factor: Tensor, gradient: Tensor) -> None:
        assert self.vector.grad is not None
        self.vector.grad.addcmul_(gradient, factor)


class Program:
    """A loss and its gradient as one function, for batches of one shape."""

    def __init__(self, traced: Traced) -> None:
        module, used = traced.written_down()
        with torch.no_grad():
            self.function: Any = torch._inductor.compile(module, [traced.examples[k] for k in used], {"fallback_random": True})
        self.sources = [traced.sources[k] for k in used]
        self.seen = traced.seen

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """The gradient, the loss, and what else there is, for the tensors of a batch."""
        with torch.no_grad():
            gradient, loss, *others = self.function(*[source(tensors) for source in self.sources])
        return gradient, loss, others


def shapes_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What a program is made for: shapes, and whatever else of a batch a loss may see, but not the places of its rows in a buffer."""
    return tuple([(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves])


def vector_of(optimizer: Optimizer) -> Any:
    """The first of what it moves: all there is, with `FlatParameters`."""
    return optimizer.param_groups[0]["params"][0]


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, bool | int | float | str) else type(leaf)


def _function(value: Metric) -> Callable[[], Tensor]:
    return value if callable(value) else partial(_itself, value.clone())


def _tensor(value: Metric) -> Tensor:
    return value() if callable(value) else value.clone()


def _itself(value: Tensor) -> Tensor:
    return value


def why(error: BaseException) -> str:
    """In one line."""
    causes = [error]
    while following := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(following)
    if any(type(cause).__name__ == "InvalidCxxCompiler" for cause in causes):
        return "there is no C++ compiler on this machine; install g++, or leave compile out"
    line = next(iter(str(error).strip().splitlines()), "no reason given")
    return next((reason for word, reason in REASONS.items() if word in line), f"{type(error).__name__}: {line}")
