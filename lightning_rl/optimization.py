"""Gradient steps: flat parameters, torch's optimizers for them, and the step from a loss to new weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Self, SupportsIndex

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd import profiler
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer
from torch.optim.adam import adam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_rl.checkpoints.validation import check_optimizer
from lightning_rl.distributed import mean_over_ranks
from lightning_rl.errors import SettingError
from lightning_rl.networks.mlp import EnsembleLinear
from lightning_rl.types import State


class FlatParameters(nn.Parameter):
    """One vector `[P]` that holds all trainable parameters of a module, for its optimizer.

    The module's parameters become views of the vector, so the module and its `state_dict` work as before. An optimizer step, gradient
    clipping and the mean over ranks are a few operations on one tensor instead of a few on each parameter. For the small networks of
    control tasks, the number of calls dominates the cost. Create the vector after the module is moved to its device.
    """

    parts: tuple[nn.Parameter, ...]

    def __new__(cls, module: nn.Module) -> Self:
        return cls.of([parameter for parameter in module.parameters() if parameter.requires_grad])

    @classmethod
    def of(cls, parts: Sequence[nn.Parameter]) -> Self:
        """Return the vector that holds these parameters."""
        vector = super().__new__(cls, torch.cat([part.detach().flatten() for part in parts]))
        for part, view in zip(parts, vector.detach().split([part.numel() for part in parts]), strict=True):
            part.data = view.view_as(part)
        vector.parts = tuple(parts)
        vector.clear()
        return vector

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the vector that holds the copied module's parameters."""
        return memo.setdefault(id(self), type(self).of(deepcopy(self.parts, memo)))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Pickle as the vector of the pickled module's parameters."""
        return type(self).of, (self.parts,)

    def clear(self) -> None:
        """Set the gradient to zeros; the gradients of the parts are views of it."""
        if self.grad is not None and self.parts[0].grad is not None:
            self.grad.zero_()
            return
        self.grad = torch.zeros_like(self)
        for part, view in zip(self.parts, self.grad.split([part.numel() for part in self.parts]), strict=True):
            part.grad = view.view_as(part)


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer of one `FlatParameters`.

    Its learning rate is not an argument: it follows the `learning_rate` of the algorithm.
    """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradient to zeros, never to None: the gradients of the module's parameters are views of it."""
        self.param_groups[0]["params"][0].clear()

    def load_state_dict(self, state_dict: State) -> None:
        """Restore a state. Raises `SettingError`: the state does not belong to an optimizer of this vector."""
        check_optimizer(state_dict, self)
        super().load_state_dict(state_dict)


class FlatAdam(FlatOptimizer, torch.optim.Adam):
    """`torch.optim.Adam(…, fused=True)` (Kingma and Ba 2015) on one `FlatParameters`.

    `Optimizer.step` spends a tenth of a small network's update on hooks and bookkeeping (benchmarks/notes.md). Without hooks, profiler and
    `GradScaler`, a step calls torch's functional Adam directly, with the same result.
    """

    def __init__(self, module: nn.Module, eps: float = 1e-8, beta1: float = 0.9) -> None:
        super().__init__([FlatParameters(module)], betas=(beta1, 0.999), eps=eps, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make the same step as `torch.optim.Adam.step`."""
        group = self.param_groups[0]
        weights = group["params"][0]
        state = self.state[weights]
        hooks = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks
        is_watched = any(hooks) or profiler._is_profiler_enabled or hasattr(self, "grad_scale")
        is_usual = len(self.param_groups) == len(group["params"]) == 1 and weights.grad is not None and not group["amsgrad"]
        if closure is not None or not state or is_watched or not is_usual:
            step = torch.optim.Adam.step
            return (step if hasattr(step, "hooked") else self.profile_hook_step(step))(self, closure)
        moments = [state["exp_avg"]], [state["exp_avg_sq"]]
        settings = {name: group[name] for name in ("lr", "weight_decay", "decoupled_weight_decay", "eps", "maximize", "amsgrad")}
        beta1, beta2 = group["betas"]
        settings["found_inf"] = getattr(self, "found_inf", None)
        adam([weights], [weights.grad], *moments, [], [state["step"]], fused=True, beta1=beta1, beta2=beta2, **settings)
        return None

    step.hooked = True  # type: ignore[attr-defined]  # else torch would wrap it

    def step_if_finite(self, number: Tensor) -> Tensor:
        """Make a step if a number on the weights' device is finite, without synchronizing. Return whether it is finite, as a tensor."""
        finite = number.isfinite()
        self.found_inf = 1.0 - finite.float()  # read by torch's fused Adam
        self.step()
        del self.found_inf
        return finite


class FlatRAdam(FlatOptimizer, torch.optim.RAdam):
    """`torch.optim.RAdam` (Liu et al. 2020) on one `FlatParameters`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__([FlatParameters(module)])


class FlatRMSprop(FlatOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` (Tieleman and Hinton 2012) on one `FlatParameters`."""

    def __init__(self, module: nn.Module, alpha: float = 0.99, eps: float = 1e-8) -> None:
        super().__init__([FlatParameters(module)], alpha=alpha, eps=eps)


class FlatSGD(FlatOptimizer, torch.optim.SGD):
    """Gradient descent with momentum μ on one `FlatParameters`: v ← μ v + (1 − μ) g, θ ← θ − η v, with v = 0 at first."""

    def __init__(self, module: nn.Module, momentum: float) -> None:
        weights = FlatParameters(module)
        super().__init__([weights], momentum=momentum, dampening=momentum)
        # otherwise torch starts with the first gradient, which is 1/(1 − μ) times too long
        self.state[weights]["momentum_buffer"] = torch.zeros_like(weights)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the network parameters that an optimizer updates, one by one."""
    return [part for group in optimizer.param_groups for each in group["params"] for part in getattr(each, "parts", (each,))]


class KnownGradient(torch.autograd.Function):
    """A node in torch's graph for a loss whose gradient is already computed."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradient: Tensor, *parameters: Tensor) -> Tensor:
        ctx.gradient, ctx.shapes = gradient, [parameter.shape for parameter in parameters]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        parts = (ctx.gradient * factor).split([shape.numel() for shape in ctx.shapes])
        return None, None, *(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


def with_gradient(
    loss: Tensor, gradient: Tensor, parameters: Sequence[Tensor], optimizer: Optimizer, scale: Tensor | None = None
) -> Tensor:
    """Attach a known gradient to a loss, as if the loss had been computed from the parameters in torch's graph.

    The `gradient_step` of a `FlatOptimizer` uses the gradient directly, without a backward pass, if the loss is passed on unchanged.

    Args:
        gradient: of the loss times `scale`, for all parameters one after another, `[P]`.
        parameters: all parameters that the optimizer updates.
        scale: of a `GradScaler`; None: 1.
    """
    whole = KnownGradient.apply(loss, gradient if scale is None else gradient / scale, *parameters)
    whole.known_gradient = optimizer, gradient, whole.grad_fn
    return whole


def takes_gradients(optimizer: Optimizer, parts: Sequence[Tensor], scaler: GradScaler) -> bool:
    """Return whether an optimizer can use a known gradient directly: no loss scaling, and no hooks on the gradients of its parameters."""
    has_hooks = any(part._backward_hooks or getattr(part, "_post_accumulate_grad_hooks", None) for part in parts)
    return isinstance(optimizer, FlatOptimizer) and len(optimizer.param_groups) == 1 and not has_hooks and not scaler.is_enabled()


def gradient_step(
    loss: Tensor,
    optimizer: Optimizer,
    scaler: GradScaler,
    max_norm: float,
    world_size: int,
    hooks: Callable[..., object] = lambda name, *arguments: None,
    waits: bool = True,
) -> tuple[Tensor, bool | Tensor]:
    """Run the backward pass, average over ranks, clip, and step the optimizer; skip the step if any rank has a non-finite loss or gradient.

    Args:
        optimizer: of parameters, or of the `FlatParameters` of one network.
        scaler: for 16-bit precision; a disabled one does nothing. While its scale is above 1, it may itself cause non-finite gradients: it
            skips these steps and halves the scale, and they count as finite.
        max_norm: clip the gradient to this Euclidean norm.
        world_size: number of ranks, each with its own gradient.
        hooks: calls the Lightning hooks of a given name; gradients are not clipped yet in `on_before_optimizer_step`.
        waits: wait for a GPU to report whether loss and gradient are finite; otherwise `FlatAdam` skips a bad step on the GPU.

    Returns:
        The gradient's norm before clipping, and whether loss and gradient were finite: a tensor if the host did not wait.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moves, gradient, node = getattr(loss, "known_gradient", (optimizer, None, None))
    if moves is not optimizer:
        raise SettingError(
            "a compiled loss has no gradient for this optimizer: name losses in the order of optimizers, or set compile to false"
        )
    hooks("on_before_zero_grad", optimizer)
    for parameter in parameters:
        if isinstance(parameter, FlatParameters):
            parameter.clear()
        else:
            parameter.grad = None
    hooks("on_before_backward", loss)
    parts = [part for each in parameters for part in getattr(each, "parts", (each,))]
    if gradient is not None and node is loss.grad_fn and takes_gradients(optimizer, parts, scaler):
        parameters[0].grad.copy_(gradient)
    else:
        scaler.scale(loss).backward(inputs=parts)
    hooks("on_after_backward")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    loss = loss.detach()
    if world_size > 1:
        loss = loss.clone()  # do not change the caller's
        tensors = [*gradients, loss]  # in one collective
        means = mean_over_ranks(torch.cat([tensor.flatten() for tensor in tensors]))
        for tensor, mean in zip(tensors, means.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))
    scaler.unscale_(optimizer)
    hooks("on_before_optimizer_step", optimizer)
    norm = torch.linalg.vector_norm(gradients[0]) if len(gradients) == 1 else torch.nn.utils.get_total_norm(gradients)
    if max_norm < math.inf and (norm.device.type != "cpu" or norm.item() > max_norm):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
    if not waits and norm.is_cuda and isinstance(optimizer, FlatAdam) and not scaler.is_enabled():
        return norm, optimizer.step_if_finite(loss + norm)
    scale = scaler.get_scale()
    finite = math.isfinite((loss if scale > 1 else loss + norm).item())
    if finite:
        scaler.step(optimizer)
        scaler.update()
    else:
        scaler.update(scale)  # a bad loss does not mean that the scale is too large
    return norm, finite


def parameters_in(optimizers: Iterable[Optimizer], module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module that optimizers update, or the vectors that hold them."""
    own = {id(parameter) for parameter in module.parameters()}
    parameters = [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in parameters if own & {id(part) for part in (parameter, *getattr(parameter, "parts", ()))}]


def check_optimizers(
    optimizers: Sequence[Optimizer], schedulers: Iterable[object], needed: int, name: str, learning_rate: object
) -> str | None:
    """Check the optimizers and schedulers of `configure_optimizers`. Return a line if the setting `learning_rate` is not used.

    Raises `SettingError`: there are fewer optimizers than needed, or a scheduler needs a metric.
    """
    if len(optimizers) < needed:
        found = f"{name} needs {needed} optimizers, got {len(optimizers)}"
        raise SettingError(f"{found}: override configure_optimizers in a subclass, or leave it out")
    if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers):
        raise SettingError(
            "ReduceLROnPlateau needs a metric, and schedulers are stepped once per iteration without one; "
            "remove it from configure_optimizers and step it in on_evaluation_end"
        )
    rate = first_rate(optimizers)
    if rate in (None, learning_rate) or isinstance(optimizers[0], FlatOptimizer):
        return None
    own = f"{type(optimizers[0]).__name__} of configure_optimizers has its own, {rate:g}"
    return f"learning_rate {learning_rate} is not used: {own}; FlatAdam follows it"


def first_rate(optimizers: Sequence[Optimizer]) -> float | None:
    """Return the learning rate of the first optimizer; None if there is no optimizer or it has no learning rate."""
    groups = [group for optimizer in optimizers[:1] for group in getattr(optimizer, "param_groups", [])]
    return groups[0].get("lr") if groups else None


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Set the precision of float32 matrix multiplication inside a context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def best_matmul(modules: Iterable[nn.Module], device: torch.device) -> str:
    """Return the best setting of `torch.set_float32_matmul_precision` for a network's updates.

    For layers of width 256 or more, "medium" uses another kernel on many processors without matrix units: half the time, with the error of
    float32 arithmetic. Other processors would round to bfloat16, so the error is measured. Narrow layers would get slower.
    """
    before = torch.get_float32_matmul_precision()
    weights = [module.weight for module in modules if isinstance(module, nn.Linear | EnsembleLinear)]
    if device.type != "cpu" or not any(min(weight.shape[-2:]) >= 256 for weight in weights):
        return before
    a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ b.double()
    with matmul_precision("medium"):
        error = (a @ b - exact).abs().max() / exact.abs().max()
    return "medium" if error < 2e-6 else before
