"""Compile losses and their gradients with torch's own compiler, for `compile: true`, and `auto` where a run is long enough."""

import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_rl.errors import SettingError, causes_of
from lightning_rl.optimization import parameters_of, with_gradient
from lightning_rl.threads import has_convolutions
from lightning_rl.types import Tree, tree_leaves, tree_map

MIN_UPDATES = {"cpu": 40_000, "cuda": 20_000}
"""Fewest updates of a run that `auto` compiles: the first time on a machine compiling takes 16 to 25 s on a CPU, repaid at 0.4 ms an update
of narrow layers and 0.5 to 3.6 of wide ones, and 14 s on an H100, repaid at 2.9 where a launch takes 10 µs (benchmarks/notes.md)."""


class CompiledLoss:
    """A loss of an algorithm and its gradient in one compiled function, called as the method is.

    The first call with tensors of some shapes compiles, which takes seconds; on a GPU later ones are a CUDA graph each. Scheduled settings
    go in as tensors, so that new values do not compile again; arrays, such as the places of rows in a buffer, do not go in. Only the first
    element of what it returns has a gradient.

    Args:
        loss: the method, which returns a scalar or a tuple that begins with it.
        optimizer: of the parameters that it has a gradient for, zeros where it does not reach them; no tensor that goes in may need one.
        scaler: of 16-bit precision, by whose scale the loss is multiplied before it is differentiated; a disabled one does nothing.
        say: prints that the loss is computed without compiling where it cannot be compiled; None: that is an error.
    """

    def __init__(
        self,
        name: str,
        loss: Callable[..., Any],
        optimizer: Optimizer,
        scaler: GradScaler,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.loss, self.optimizer, self.scaler, self.say = name, loss, optimizer, scaler, say
        self._begin()

    def _begin(self) -> None:
        """Prepare to compile for what the optimizer moves now."""
        self.num_groups, self.parameters = len(self.optimizer.param_groups), parameters_of(self.optimizer)
        loss, parameters = self.loss, self.parameters

        def compute(scale: Tensor | None, *batch: Any, **named: Any) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
            returned = loss(*batch, **named)
            value, *others = returned if isinstance(returned, tuple) else (returned,)
            gradients = torch.autograd.grad(value if scale is None else value * scale, parameters, materialize_grads=True)
            rest = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tuple(others))
            return value.detach(), torch.cat([each.flatten() for each in gradients]), rest

        self.graphs = bool(parameters) and parameters[0].is_cuda
        options: Any = {"mode": "reduce-overhead"} if self.graphs else {}
        self.compute: Callable[..., Any] | None = torch.compile(compute, fullgraph=True, dynamic=False, **options)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Compute the loss. Raises `SettingError`: it cannot be compiled."""
        if self.compute is None or not torch.is_grad_enabled():
            return self.loss(*batch, **named)
        if len(self.optimizer.param_groups) != self.num_groups:
            self._begin()
        device = self.parameters[0].device if self.graphs else None
        scale = torch.full((), self.scaler.get_scale(), device=device) if self.scaler.is_enabled() else None
        try:
            to_input = partial(as_input, device=device)
            value, gradient, rest = self.compute(scale, *tree_map(to_input, batch), **tree_map(to_input, named))
        except (TorchDynamoException, FailOnRecompileLimitHit, GraphOutsideError) as error:
            line = f"{self.name} cannot be compiled: {why(error)}"
            if self.say is None:
                raise SettingError(f"compile: {line}") from error
            self.say(f"compile auto: {line}; it runs as it is written")
            self.compute = None
            return self.loss(*batch, **named)
        if self.graphs:  # the next call overwrites what this one returned
            value, gradient, rest = copy_all((value, gradient, rest))
        value = with_gradient(value, gradient, self.parameters, self.optimizer, scale)
        return (value, *rest) if rest else value


class GraphOutsideError(Exception):
    """A tensor that goes into a compiled loss needs a gradient itself, which the compiled function does not compute."""


def as_input(leaf: Any, device: torch.device | None = None) -> Tree:
    """Return what a compiled function takes in place of a leaf of a batch, numbers as tensors on a device. Raises `GraphOutsideError`."""
    if isinstance(leaf, np.ndarray):
        return ()
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        raise GraphOutsideError("a tensor that it is given needs a gradient; compute it in the loss, or detach it")
    return torch.full((), leaf, device=device) if isinstance(leaf, float) else leaf


def copy_all(tree: Tree) -> Any:
    """Copy the tensors of a tree that begins with a number, all numbers like it at once."""
    leaves = tree_leaves(tree)

    def is_alike(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and not leaf.dim() and (leaf.dtype, leaf.device) == (leaves[0].dtype, leaves[0].device)

    numbers = iter(torch.stack(list(filter(is_alike, leaves))).unbind())
    return tree_map(lambda leaf: next(numbers) if is_alike(leaf) else leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def compiled_losses(algorithm: Any) -> dict[str, CompiledLoss]:
    """Return the compiled losses of an algorithm by the names of their methods; none where `auto` would not repay the seconds it takes.

    Raises `SettingError`: there is no such method, no optimizer for it, or torch is too old.
    """
    if algorithm.compile is False or (algorithm.compile == "auto" and not repays(algorithm)):
        return {}
    if reason := why_not(algorithm):
        if algorithm.compile is True:
            raise SettingError(f"compile: {reason}")
        algorithm.say(f"compile auto: {reason}; losses run as they are written")
        return {}
    if algorithm.compile == "auto":
        takes = "in some 20 s the first time on a machine, in 4 later"
        algorithm.say(f"compile auto: losses are compiled when first used, {takes}; compile false runs them as they are written")
    torch.compiler.reset()  # else the losses of earlier runs in this process count towards the limit of what is kept
    torch._dynamo.config.trace_autograd_ops = True  # a loss is compiled with its gradient
    kind, say = type(algorithm).__name__, algorithm.say if algorithm.compile == "auto" else None
    return {
        name: CompiledLoss(f"{kind}.{name}", getattr(algorithm, name), optimizer, algorithm.scaler, say)
        for name, optimizer in zip(algorithm.losses, algorithm.own_optimizers, strict=False)
    }


def why_not(algorithm: Any) -> str:
    """Return why the losses of an algorithm cannot be compiled; nothing where they may be."""
    kind, losses, num = type(algorithm).__name__, algorithm.losses, len(algorithm.own_optimizers)
    for name in losses:
        if not hasattr(algorithm, name):
            return f"{kind} has no method {name}; name its losses in the attribute `losses`"
    if len(losses) > num:
        names = f"{kind}.losses names {len(losses)}, {', '.join(losses)}"
        return f"{names}, for {num} optimizer{'s'[: num != 1]}; name one for each, in their order"
    return "" if hasattr(torch._dynamo.config, "trace_autograd_ops") else f"torch {torch.__version__} cannot compile gradients; update it"


def repays(algorithm: Any) -> bool:
    """Whether compiling is repaid, by the settings alone: in a long run, on a CPU without convolutions and where there is a compiler."""
    is_cut, device = algorithm.trainer.fast_dev_run or algorithm.trainer.max_steps != -1, algorithm.device.type
    if is_cut or algorithm.memory is not None or algorithm.planned_updates < MIN_UPDATES.get(device, math.inf):
        return False
    return device != "cpu" or not (has_convolutions(algorithm) or shutil.which(os.environ.get("CXX", "g++")) is None)


def why(error: BaseException) -> str:
    """Return in one line why something cannot be compiled."""
    if any(type(cause).__name__ == "InvalidCxxCompiler" for cause in causes_of(error)):
        return "there is no C++ compiler on this machine; install g++, or leave compile out"
    if "data-dependent" in str(error):
        return "Python decides by the value of a tensor"
    lines = [line for line in str(error).strip().splitlines() if not line.endswith("raised:")]
    line = next(iter(lines), type(error).__name__)
    return f"{line} (compile false shows where)" if line.startswith(("Observed exception", "Hard failure")) else line
