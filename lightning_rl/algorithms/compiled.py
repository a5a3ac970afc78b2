"""Compile losses with torch's own compiler, for `compile: true`, and `auto` where a run is long enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from lightning_rl.errors import SettingError
from lightning_rl.types import Tree, tree_map


class CompiledLoss:
    """A loss of an algorithm, called as the method is. Only the first element of what it returns has a gradient.

    The first call with tensors of some shapes compiles, which takes seconds. Scheduled settings go in as tensors, so that new values do not
    compile again; arrays, such as the places of rows in a buffer, do not go in.

    Args:
        name: what errors call it.
        loss: the method, which returns a scalar or a tuple that begins with it.
    """

    def __init__(self, name: str, loss: Callable[..., Any]) -> None:
        self.name = name

        def compute(*batch: Any) -> Any:
            returned = loss(*batch)
            return (returned[0], *tree_map(torch.Tensor.detach, returned[1:])) if isinstance(returned, tuple) else returned

        self.compute = torch.compile(compute, fullgraph=True, dynamic=False)

    def __call__(self, *batch: Any) -> Any:
        """Compute the loss.

        Raises:
            SettingError: it cannot be compiled.
        """
        try:
            return self.compute(*tree_map(as_input, batch))
        except TorchDynamoException as error:
            raise SettingError(f"compile: {self.name} cannot be compiled: {why(error)}") from error


def as_input(leaf: Any) -> Tree:
    """Return what a compiled function takes in place of a leaf of a batch."""
    if isinstance(leaf, Tensor) or leaf is None:
        return leaf
    return torch.tensor(leaf) if isinstance(leaf, float) else ()


def compiled_losses(algorithm: Any) -> dict[str, CompiledLoss]:
    """Return the compiled losses of an algorithm by the names of their methods.

    Raises:
        SettingError: there is no such method.
    """
    kind = type(algorithm).__name__
    for name in algorithm.losses:
        if not hasattr(algorithm, name):
            raise SettingError(f"compile: {kind} has no method {name}; name its losses in the attribute `losses`")
    return {name: CompiledLoss(f"{kind}.{name}", getattr(algorithm, name)) for name in algorithm.losses}


def why(error: BaseException) -> str:
    """Return in one line why something cannot be compiled."""
    causes = [error]
    while following := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(following)
    if any(type(cause).__name__ == "InvalidCxxCompiler" for cause in causes):
        return "there is no C++ compiler on this machine; install g++, or leave compile out"
    if "data-dependent" in str(error):
        return "Python decides by the value of a tensor"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
