"""Compile losses and their gradients with `torch.compile`."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import compress

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_rl.errors import SettingError, causes_of
from lightning_rl.networks.changes import GLOBAL_HOOKS
from lightning_rl.optimization import parameters_of, with_gradient
from lightning_rl.types import Tree, tree_leaves, tree_map

MIN_UPDATES = {"cpu": 40_000, "cuda": 20_000}
"""Minimum number of updates in a run for `auto` to compile. On a CPU, the first compilation on a machine takes 16 to 25 s and saves 0.4 ms
per update for narrow layers and 0.5 to 3.6 ms for wide ones. On an H100 it takes 14 s and saves 2.9 ms where a kernel launch takes 10 µs
(benchmarks/notes.md)."""


def can_compile_gradients() -> bool:
    """Return whether this torch compiles a loss with its gradient."""
    return hasattr(torch._dynamo.config, "trace_autograd_ops")


def begin_compiling() -> None:
    """Prepare the compiler for the losses of a run."""
    torch.compiler.reset()  # or the losses of earlier runs in this process would count towards the cache limit
    torch._dynamo.config.trace_autograd_ops = True  # a loss is compiled with its gradient


class CompiledLoss:
    """A loss of an algorithm and its gradient in one compiled function, called like the loss method.

    The first call with new tensor shapes compiles, which takes seconds. On a GPU, each later call replays a CUDA graph. Scheduled settings
    are passed as tensors, so that new values do not trigger recompilation. Arrays, such as row indices into a buffer, are not passed. Only
    the first element of the result has a gradient.

    Args:
        loss: the method, which returns a scalar or a tuple that begins with one.
        optimizer: of the parameters to differentiate for. No input tensor may require a gradient.
        scaler: for 16-bit precision; its scale multiplies the loss before differentiation. A disabled one does nothing.
        say: prints that a loss cannot be compiled and runs uncompiled; None: raise an error instead.
    """

    def __init__(
        self,
        name: str,
        loss: Callable[..., Tree],
        optimizer: Optimizer,
        scaler: GradScaler,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.loss, self.optimizer, self.scaler, self.say = name, loss, optimizer, scaler, say
        self.begin()

    def begin(self) -> None:
        """Prepare to compile for the optimizer's current parameters."""
        self.parameters = parameters_of(self.optimizer)
        loss, parameters = self.loss, self.parameters

        def compute(scale: Tensor | None, *batch: Tree, **named: Tree) -> tuple[Tensor, Tensor, list[bool], tuple[Tree, ...]]:
            returned = loss(*batch, **named)
            value, *others = returned if isinstance(returned, tuple) else (returned,)
            gradients = torch.autograd.grad(value if scale is None else value * scale, parameters, allow_unused=True)
            used = [gradient is not None for gradient in gradients]
            rest = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tuple(others))
            return value.detach(), torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]), used, rest

        self.graphs = bool(parameters) and parameters[0].is_cuda
        mode = "reduce-overhead" if self.graphs else None
        self.compute: Callable[..., tuple[Tensor, Tensor, list[bool], tuple[Tree, ...]]] | None = torch.compile(
            compute, fullgraph=True, dynamic=False, mode=mode
        )

    def __call__(self, *batch: Tree, **named: Tree) -> Tree:
        """Compute the loss. Raises `SettingError`: it cannot be compiled."""
        if self.compute is None or not torch.is_grad_enabled() or any(GLOBAL_HOOKS):  # torch compiles without these
            return self.loss(*batch, **named)
        if list(map(id, parameters_of(self.optimizer))) != list(map(id, self.parameters)):  # one was added or frozen
            self.begin()
        device = self.parameters[0].device if self.graphs else None
        scale = torch.full((), self.scaler.get_scale(), device=device) if self.scaler.is_enabled() else None
        try:
            to_input = partial(as_input, device=device)
            value, gradient, used, rest = self.compute(scale, *tree_map(to_input, batch), **tree_map(to_input, named))
        except (TorchDynamoException, FailOnRecompileLimitHit, GraphOutsideError) as error:
            line = f"{self.name} cannot be compiled: {why(error)}"
            if self.say is None:
                raise SettingError(f"compile: {line}") from error
            self.say(f"compile auto: {line}; it runs uncompiled")
            self.compute = None
            return self.loss(*batch, **named)
        if self.graphs:  # the next call overwrites the outputs of this one
            value, gradient, rest = copy_all((value, gradient, rest))
        value = with_gradient(value, gradient if scale is None else gradient / scale, list(compress(self.parameters, used)))
        return (value, *rest) if rest else value


class GraphOutsideError(Exception):
    """An input of a compiled loss requires a gradient, which the compiled function does not compute."""


def compile_again(losses: Mapping[str, CompiledLoss]) -> None:
    """Forget what was compiled; torch compiles the hooks of modules into it, and does not notice when they change."""
    torch.compiler.reset()
    for loss in losses.values():
        loss.begin()


def as_input(leaf: object, device: torch.device | None = None) -> Tree:
    """Convert a leaf of a batch to an input of a compiled function, with floats as tensors on a device. Raises `GraphOutsideError`."""
    if isinstance(leaf, np.ndarray):
        return ()
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        raise GraphOutsideError("an input tensor requires a gradient; compute it in the loss, or detach it")
    return torch.full((), leaf, device=device) if isinstance(leaf, float) else leaf


def copy_all(tree: Tree) -> Tree:
    """Copy the tensors of a tree that begins with a scalar; all scalars of its dtype and device are copied together."""
    leaves = tree_leaves(tree)

    def is_alike(leaf: object) -> bool:
        return isinstance(leaf, Tensor) and not leaf.dim() and (leaf.dtype, leaf.device) == (leaves[0].dtype, leaves[0].device)

    numbers = iter(torch.stack(list(filter(is_alike, leaves))).unbind())
    return tree_map(lambda leaf: next(numbers) if is_alike(leaf) else leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def why(error: BaseException) -> str:
    """Return a one-line reason why something cannot be compiled."""
    if any(type(cause).__name__ == "InvalidCxxCompiler" for cause in causes_of(error)):
        return "there is no C++ compiler on this machine; install g++, or leave compile out"
    if "data-dependent" in str(error):
        return "Python decides by the value of a tensor"
    lines = [line for line in str(error).strip().splitlines() if not line.endswith("raised:")]
    line = next(iter(lines), type(error).__name__)
    return f"{line} (compile false shows where)" if line.startswith(("Observed exception", "Hard failure")) else line
