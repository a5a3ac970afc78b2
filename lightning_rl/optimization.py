"""Gradient steps: torch's optimizers with the scheduled learning rate, and the step from a loss to new weights."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd import profiler
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_rl.checkpoints.validation import check_optimizer
from lightning_rl.errors import SettingError
from lightning_rl.networks.mlp import EnsembleLinear
from lightning_rl.processes.ranks import mean_over_ranks
from lightning_rl.types import State


class ScheduledOptimizer(Optimizer):
    """An optimizer without a learning rate of its own: it follows the setting `learning_rate` of the algorithm and its schedule."""

    def load_state_dict(self, state_dict: State) -> None:
        """Restore a state, also one of version 0.1.0. Raises `SettingError`: it belongs to an optimizer of other parameters."""
        state_dict = split_vectors(state_dict, self)
        check_optimizer(state_dict, self)
        super().load_state_dict(state_dict)


ONE = torch.ones((), device="cpu")
"""Added in place of a number, of which torch would make a tensor for each parameter: a third of the time for the same bits."""


class DirectOptimizer(ScheduledOptimizer):
    """A scheduled optimizer whose steps on a CPU call torch's kernels without its bookkeeping, which takes longer than small kernels."""

    implementation: ClassVar[str]
    """The option of a group that chooses torch's kernel."""
    unusual: ClassVar[tuple[str, ...]]
    """Options of a group with which torch makes the step itself."""

    def step(self, closure: Any = None) -> Any:
        """Make a step: torch's own if a hook, a profiler or a gradient scaler follows it, or if its groups are unusual."""
        group, *others = self.param_groups
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if parameter.grad.stride() != parameter.stride():  # torch's fused kernels would read it in the order of the parameter's memory
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        states = [self.state[parameter] for parameter in parameters]
        hooks = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks
        watched = any(hooks) or profiler._is_profiler_enabled or hasattr(self, "grad_scale")
        unusual = others or closure or any(group[name] for name in self.unusual)
        is_plain = group[self.implementation] and isinstance(group["lr"], float) and not unusual
        if watched or not (is_plain and all(states) and parameters and parameters[0].is_cpu):
            step = super().step.__func__  # type: ignore[attr-defined]  # torch wraps it, to call hooks, when its class is first built
            return (step if hasattr(step, "hooked") else self.profile_hook_step(step))(self, closure)
        with torch.no_grad():
            torch._foreach_add_([state["step"] for state in states], [ONE] * len(states))
            self.move(group, parameters, [parameter.grad for parameter in parameters], states)
        return None

    step.hooked = True  # type: ignore[attr-defined]  # otherwise torch would wrap it too

    def move(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Any], states: list[dict[str, Tensor]]) -> None:
        """Move the parameters and their moments, whose steps are counted, as torch would."""
        raise NotImplementedError


class ScheduledAdam(DirectOptimizer, torch.optim.Adam):
    """`torch.optim.Adam(…, fused=True)` (Kingma and Ba 2015) of the parameters of a module."""

    implementation = "fused"
    unusual = ("amsgrad", "capturable", "decoupled_weight_decay", "differentiable")

    def __init__(self, module: nn.Module | Iterable[Tensor], eps: float = 1e-8, beta1: float = 0.9) -> None:
        super().__init__(parameters_to_hold(module), betas=(beta1, 0.999), eps=eps, fused=True)

    def move(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Any], states: list[dict[str, Tensor]]) -> None:
        steps, moments, squares = ([state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq"))
        rate, (beta1, beta2), decay, eps = group["lr"], group["betas"], group["weight_decay"], group["eps"]
        rest: Any = {"weight_decay": decay, "eps": eps, "amsgrad": False, "maximize": group["maximize"]}
        torch._fused_adam_(parameters, gradients, moments, squares, [], steps, lr=rate, beta1=beta1, beta2=beta2, **rest)


class ScheduledRAdam(ScheduledOptimizer, torch.optim.RAdam):
    """`torch.optim.RAdam` (Liu et al. 2020) of the parameters of a module."""

    def __init__(self, module: nn.Module | Iterable[Tensor]) -> None:
        super().__init__(parameters_to_hold(module), foreach=True)


class ScheduledRMSprop(DirectOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` (Tieleman and Hinton 2012) of the parameters of a module."""

    implementation = "foreach"
    unusual = ("weight_decay", "momentum", "centered", "capturable", "differentiable", "maximize")

    def __init__(self, module: nn.Module | Iterable[Tensor], alpha: float = 0.99, eps: float = 1e-8) -> None:
        super().__init__(parameters_to_hold(module), alpha=alpha, eps=eps, foreach=True)

    def move(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Any], states: list[dict[str, Tensor]]) -> None:
        squares, alpha = [state["square_avg"] for state in states], group["alpha"]
        torch._foreach_mul_(squares, squares[0].new_tensor(alpha))  # torch would make a tensor of a number for each of them
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - alpha)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, [ONE] * len(roots), alpha=group["eps"])
        torch._foreach_addcdiv_(parameters, gradients, roots, value=-group["lr"])


class ScheduledSGD(ScheduledOptimizer, torch.optim.SGD):
    """Gradient descent with momentum μ of the parameters of a module: v ← μ v + (1 − μ) g, θ ← θ − η v, with v = 0 at first."""

    def __init__(self, module: nn.Module | Iterable[Tensor], momentum: float) -> None:
        parameters = parameters_to_hold(module)
        super().__init__(parameters, momentum=momentum, dampening=momentum, foreach=True)
        for parameter in parameters:  # otherwise torch starts with the first gradient, which is 1/(1 − μ) times too long
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def split_vectors(stored: State, optimizer: Optimizer) -> State:
    """Return an optimizer's state with one state for each parameter.

    Version 0.1.0 kept one vector `[P]` for all parameters of an optimizer's first group. Any other state is returned as it is.
    """
    try:
        (first, *others), states = stored["param_groups"], stored["state"]
        group, parameters = optimizer.param_groups[0], optimizer.param_groups[0]["params"]
        vectors = {name: value for name, value in states.get(0, {}).items() if name != "step"}
        total = sum(parameter.numel() for parameter in parameters)
        if first["params"] != [0] or not all(isinstance(value, Tensor) and value.shape == (total,) for value in vectors.values()):
            return stored
    except (TypeError, ValueError, KeyError, AttributeError):  # it is reported where it is checked
        return stored
    shift = len(parameters) - 1
    sizes = [parameter.numel() for parameter in parameters]
    split: dict[int, Any] = {number + shift: state for number, state in states.items() if number != 0}
    for number, parameter in enumerate(parameters) if 0 in states else ():
        split[number] = {name: value.split(sizes)[number].view_as(parameter).clone() for name, value in vectors.items()}
        if "step" in states[0]:
            split[number]["step"] = states[0]["step"].clone()
    implementation = {name: group[name] for name in ("foreach", "fused") if name in group}
    groups = [{**first, **implementation, "params": list(range(len(parameters)))}]
    groups += [{**other, "params": [number + shift for number in other["params"]]} for other in others]
    return {**stored, "state": split, "param_groups": groups}


def __getattr__(name: str) -> type[ScheduledOptimizer]:
    """Return an optimizer by its name in version 0.1.0, such as `FlatAdam`, with one line that gives today's."""
    today = name.replace("Flat", "Scheduled", 1)
    if not name.startswith("Flat") or not isinstance(cls := globals().get(today), type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is now {today}; import that from {__name__}", FutureWarning, stacklevel=2)
    return cls


def parameters_to_hold(module: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters of an optimizer: all of a module, so that those frozen now are learned once they are not."""
    return list(module.parameters() if isinstance(module, nn.Module) else module)


def trainable(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module that require gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer updates; those that are frozen at the moment are left out."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


class KnownGradient(torch.autograd.Function):
    """A node in torch's graph for a loss whose gradient is already computed."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradient: Tensor, *parameters: Tensor) -> Tensor:
        ctx.gradient, ctx.parameters = gradient, parameters
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *split_like(ctx.gradient * factor, ctx.parameters)


def split_like(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector `[P]` into parts with the shapes of tensors."""
    parts = vector.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def with_gradient(loss: Tensor, gradient: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Attach a known gradient to a loss, as if the loss had been computed from the parameters in torch's graph.

    Args:
        gradient: for all parameters one after another, `[P]`.
    """
    return KnownGradient.apply(loss, gradient, *parameters)


def set_known_gradient(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor | None:
    """Set the gradients of parameters without a backward pass, if they are known and no hook waits for them.

    Return the vector whose parts they are; None if they are not set.
    """
    known: Any = loss.grad_fn
    targets: tuple[Tensor, ...] = known.parameters
    waits = any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in targets)
    if waits or loss._backward_hooks or loss.retains_grad or not {*map(id, targets)} <= {*map(id, parameters)}:
        return None
    vector: Tensor = known.gradient
    for parameter, gradient in zip(targets, split_like(vector, targets), strict=True):
        parameter.grad = gradient
    return vector


def gradient_step(
    loss: Tensor,
    optimizer: Optimizer,
    scaler: GradScaler,
    max_norm: float,
    world_size: int,
    hooks: Callable[..., object] | None = None,
    waits: bool = True,
) -> tuple[Tensor, bool | Tensor]:
    """Run the backward pass, average over ranks, clip, and step the optimizer; skip the step if any rank has a non-finite loss or gradient.

    Args:
        optimizer: only its parameters get gradients.
        scaler: for 16-bit precision; a disabled one does nothing. While its scale is above 1, it may itself cause non-finite gradients: it
            skips these steps and halves the scale, and they count as finite.
        max_norm: clip the gradient to this Euclidean norm.
        world_size: number of ranks, each with its own gradient.
        hooks: calls the Lightning hooks of a given name, if there are any; gradients are not clipped yet in `on_before_optimizer_step`.
        waits: wait for a GPU to report whether loss and gradient are finite; otherwise a fused optimizer skips a bad step on the GPU.

    Raises:
        SettingError: the loss does not depend on the parameters.

    Returns:
        The gradient's norm before clipping, and whether loss and gradient were finite: a tensor if the host did not wait.
    """
    is_whole = hooks is None and world_size == 1
    hooks = hooks or (lambda name, *arguments: None)
    hooks("on_before_zero_grad", optimizer)
    parameters = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None  # as Optimizer.zero_grad does, in a tenth of its time
            if parameter.requires_grad:
                parameters.append(parameter)
    hooks("on_before_backward", loss)
    scaled = scaler.scale(loss)
    vector = set_known_gradient(scaled, parameters) if hasattr(scaled.grad_fn, "parameters") else None
    if parameters and vector is None:
        scaled.backward(inputs=parameters)
    loss = loss.detach()
    if world_size > 1:
        loss = average(loss, parameters)
    if parameters and all(parameter.grad is None for parameter in parameters):
        why = "they were replaced, or compiled losses have another order than optimizers"
        raise SettingError(f"a loss does not depend on its optimizer's parameters: {why}")
    hooks("on_after_backward")
    scaler.unscale_(optimizer)
    hooks("on_before_optimizer_step", optimizer)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if vector is not None and is_whole:  # nothing can have replaced its parts
        gradients = [vector]
    norms = torch._foreach_norm(gradients) if gradients else [torch.zeros(())]
    norm = torch.linalg.vector_norm(torch.stack(norms))  # as torch.nn.utils.get_total_norm, in half its time
    if max_norm < math.inf and (norm.device.type != "cpu" or norm.item() > max_norm):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)
    if not waits and norm.is_cuda and optimizer.param_groups[0].get("fused") and not scaler.is_enabled():
        return norm, step_if_finite(optimizer, loss + norm)
    scale = scaler.get_scale()
    finite = math.isfinite((loss if scale > 1 else loss + norm).item())
    if finite:
        scaler.step(optimizer)
        scaler.update()
    else:
        scaler.update(scale)  # a bad loss does not mean that the scale is too large
    return norm, finite


def average(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Average gradients and a loss over ranks in one collective. Return the mean loss.

    A parameter that no rank's loss uses keeps its gradient None, as in a single process.
    """
    used = loss.new_tensor([parameter.grad is not None for parameter in parameters], dtype=loss.dtype)
    tensors = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    means = mean_over_ranks(torch.cat([tensor.flatten() for tensor in (*tensors, used, loss)]))
    *gradients, used, loss = means.split([*(tensor.numel() for tensor in tensors), len(tensors), 1])
    for parameter, gradient, share in zip(parameters, gradients, used.tolist(), strict=True):
        parameter.grad = gradient.view_as(parameter) if share else None
    return loss.squeeze(0)


def step_if_finite(optimizer: Optimizer, number: Tensor) -> Tensor:
    """Make a step if a number on the weights' device is finite, without synchronizing. Return whether it is finite, as a tensor."""
    finite = number.isfinite()
    optimizer.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]  # read by torch's fused optimizers
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]
    return finite


def parameters_in(optimizers: Iterable[Optimizer], module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module that optimizers update."""
    ids = {id(parameter) for parameter in module.parameters()}
    return [parameter for optimizer in optimizers for parameter in parameters_of(optimizer) if id(parameter) in ids]


def check_optimizers(
    optimizers: Sequence[Optimizer], schedulers: Iterable[object], needed: int, name: str, learning_rate: object
) -> str | None:
    """Check the optimizers and schedulers of `configure_optimizers`. Return a line if the setting `learning_rate` is not used.

    Raises `SettingError`: there are fewer optimizers than needed, one needs a closure, or a scheduler needs a metric.
    """
    if len(optimizers) < needed:
        problem = f"{name} needs {needed} optimizers, got {len(optimizers)}"
        raise SettingError(f"{problem}: override configure_optimizers in a subclass, or leave it out")
    for optimizer in optimizers:
        closure = signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            raise SettingError(
                f"{type(optimizer).__name__} computes the loss several times in a step, by a closure, and "
                "`step(loss, optimizer)` gets it computed once; use an optimizer without one, such as torch.optim.Adam"
            )
    if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers):
        raise SettingError(
            "ReduceLROnPlateau needs a metric, and schedulers are stepped once per iteration without one; "
            "remove it from configure_optimizers and step it in on_evaluation_end"
        )
    rate = first_rate(optimizers)
    if rate in (None, learning_rate) or isinstance(optimizers[0], ScheduledOptimizer):
        return None
    reason = f"{type(optimizers[0]).__name__} of configure_optimizers has its own, {rate:g}"
    return f"learning_rate {learning_rate} is not used: {reason}; ScheduledAdam follows it"


def describe_unlearned(module: nn.Module, optimizers: Iterable[Optimizer], others: Iterable[str]) -> str | None:
    """Return a line about the trainable parameters of a module that no optimizer holds; None if there are none.

    Args:
        others: beginnings of the names of parameters that are learned without an optimizer.
    """
    held = {id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
    left = {
        name: parameter.numel()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in held and not name.startswith(tuple(others))
    }
    if not left:
        return None
    names = list(dict.fromkeys(name.rpartition(".")[0] or name for name in left))
    more = "" if len(names) <= 3 else ", …"
    return f"{sum(left.values()):,} parameters are not learned, since no optimizer holds them: {', '.join(names[:3])}{more}"


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
