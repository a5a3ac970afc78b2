"""Compile losses with torch's own compiler, for `compile: true`, and `auto` where a run is long enough."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from lightning_rl.errors import SettingError
from lightning_rl.threads import is_wide
from lightning_rl.types import Tree, tree_map

MIN_UPDATES = 50_000
"""Fewest updates of a run that `auto` compiles: about 4 s of compiling are repaid at 0.1 ms an update (benchmarks/notes.md)."""


class CompiledLoss:
    """A loss of an algorithm, called as the method is. Only the first element of what it returns has a gradient.

    The first call with tensors of some shapes compiles, which takes seconds. Scheduled settings go in as tensors, so that new values do not
    compile again; arrays, such as the places of rows in a buffer, do not go in.

    Args:
        loss: the method, which returns a scalar or a tuple that begins with it.
        say: prints that the loss is computed without compiling where it cannot be compiled; None: that is an error.
    """

    def __init__(self, name: str, loss: Callable[..., Any], say: Callable[[str], None] | None = None) -> None:
        self.name, self.loss, self.say = name, loss, say

        def compute(*batch: Any, **named: Any) -> Any:
            returned = loss(*batch, **named)
            if not isinstance(returned, tuple):
                return returned
            return returned[0], *tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, returned[1:])

        self.compute: Callable[..., Any] | None = torch.compile(compute, fullgraph=True, dynamic=False)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Compute the loss. Raises `SettingError`: it cannot be compiled."""
        if self.compute is None:
            return self.loss(*batch, **named)
        try:
            return self.compute(*tree_map(as_input, batch), **tree_map(as_input, named))
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            line = f"{self.name} cannot be compiled: {why(error)}"
            if self.say is None:
                raise SettingError(f"compile: {line}") from error
            self.say(f"compile auto: {line}; it runs as it is written")
            self.compute = None
            return self.loss(*batch, **named)


def as_input(leaf: Any) -> Tree:
    """Return what a compiled function takes in place of a leaf of a batch."""
    if isinstance(leaf, np.ndarray):
        return ()
    return torch.tensor(leaf) if isinstance(leaf, float) else leaf


def compiled_losses(algorithm: Any) -> dict[str, CompiledLoss]:
    """Return the compiled losses of an algorithm by the names of their methods; none where `auto` would not repay the seconds it takes.

    Raises `SettingError`: there is no such method.
    """
    if algorithm.compile is False or (algorithm.compile == "auto" and not repays(algorithm)):
        return {}
    kind, say = type(algorithm).__name__, algorithm.say if algorithm.compile == "auto" else None
    for name in algorithm.losses:
        if not hasattr(algorithm, name):
            raise SettingError(f"compile: {kind} has no method {name}; name its losses in the attribute `losses`")
    torch.compiler.reset()  # else the losses of earlier runs in this process count towards the limit of what is kept
    return {name: CompiledLoss(f"{kind}.{name}", getattr(algorithm, name), say) for name in algorithm.losses}


def repays(algorithm: Any) -> bool:
    """Whether compiling is repaid, by the settings alone: in a long run of narrow layers on a CPU where there is a compiler."""
    is_cut = algorithm.trainer.fast_dev_run or algorithm.trainer.max_steps != -1
    is_long = algorithm.planned_updates >= MIN_UPDATES and not is_cut and algorithm.memory is None
    return is_long and algorithm.device.type == "cpu" and not is_wide(algorithm) and shutil.which(os.environ.get("CXX", "g++")) is not None


def why(error: BaseException) -> str:
    """Return in one line why something cannot be compiled."""
    causes = [error]
    while following := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(following)
    if any(type(cause).__name__ == "InvalidCxxCompiler" for cause in causes):
        return "there is no C++ compiler on this machine; install g++, or leave compile out"
    if "data-dependent" in str(error):
        return "Python decides by the value of a tensor"
    lines = [line for line in str(error).strip().splitlines() if not line.endswith("raised:")]
    return next(iter(lines), type(error).__name__)
