"""All parameters of a network as one vector, and optimizers for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from lightning_rl.networks.tape import carry_on, take
from lightning_rl.saving.runs import check_optimizer


class FlatParameters(nn.Parameter):
    """One vector `[P]` that holds all trainable parameters of a module, for its optimizer.

    The module's parameters become views of the vector, so its `state_dict` and its use stay as they were, while an optimizer's step, the
    clipping of the gradient and its mean over ranks are a few operations on one tensor instead of a few for each: for the small networks
    of control tasks the number of calls is what they cost. Make it when the module is on its device.
    """

    parts: tuple[nn.Parameter, ...]
    ids: frozenset[int]
    """Of the parts."""

    def __new__(cls, module: nn.Module) -> FlatParameters:
        parts = [parameter for parameter in module.parameters() if parameter.requires_grad]
        vector = super().__new__(cls, torch.cat([part.detach().flatten() for part in parts]))
        for part, view in zip(parts, vector.detach().split([part.numel() for part in parts]), strict=True):
            part.data = view.view_as(part)
        vector.parts, vector.ids = tuple(parts), frozenset(map(id, parts))
        vector.clear()
        return vector

    def clear(self) -> None:
        """A gradient of zeros, whose views the parts have for theirs."""
        if self.grad is not None and self.parts[0].grad is not None:
            self.grad.zero_()
            return
        self.grad = torch.zeros_like(self)
        for part, view in zip(self.parts, self.grad.split([part.numel() for part in self.parts]), strict=True):
            part.grad = view.view_as(part)

    def differentiate(self, loss: Tensor) -> None:
        """The vector's gradient of a loss, 0 where a part has none; no other parameter gets one."""
        self.clear()
        waiting = take(self.ids)
        leaves = [each.leaf for each in waiting]
        if any(loss is leaf for leaf in leaves):  # a compiled one
            loss.grad = torch.ones_like(loss)
        else:
            # what `loss.backward(inputs=…)` comes to, whose checks would cost a fifth of it
            Variable._execution_engine.run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (*self.parts, *leaves), allow_unreachable=True, accumulate_grad=True
            )
        carry_on(waiting)


class FlatOptimizer(torch.optim.Optimizer):
    """What optimizers of one `FlatParameters` have in common. They call torch's kernels without the bookkeeping that many tensors need.

    They are not given a learning rate: it follows the `learning_rate` of the algorithm.
    """

    @property
    def vector(self) -> FlatParameters:
        """All that it moves."""
        ((vector,),) = (group["params"] for group in self.param_groups)
        return vector

    def begin_step(self, *names: str) -> tuple[dict[str, Any], FlatParameters, Tensor, dict[str, Tensor]]:
        """Settings, the vector and its gradient, and the state with its step counted, made of zeros under these names at first."""
        (group,), vector = self.param_groups, self.vector
        assert vector.grad is not None
        state = self.state[vector]
        if not state:
            state |= {"step": torch.zeros((), device=vector.device), **{name: torch.zeros_like(vector) for name in names}}
        state["step"] += 1
        return group, vector, vector.grad, state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeros, whatever is asked: the gradient stays where the module's parameters have theirs."""
        self.vector.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state; the kernels write wherever its tensors lie.

        Raises:
            SettingError: the state is not one of an optimizer of this vector.
        """
        check_optimizer(state_dict, self)
        super().load_state_dict(state_dict)


class FlatAdam(FlatOptimizer, torch.optim.Adam):
    """Adam (Kingma and Ba 2015) on one `FlatParameters`; its state is that of `torch.optim.Adam(…, fused=True)`."""

    def __init__(self, module: nn.Module, eps: float = 1e-8) -> None:
        super().__init__([FlatParameters(module)], eps=eps, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step from the vector's gradient."""
        group, vector, gradient, state = self.begin_step("exp_avg", "exp_avg_sq")
        torch._fused_adam_(
            [vector],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    step.hooked = True  # type: ignore[attr-defined]  # or torch wraps it in a profiler's record, which costs more than the step


class FlatRMSprop(FlatOptimizer, torch.optim.RMSprop):
    """RMSprop (Tieleman and Hinton 2012) on one `FlatParameters`; its state and its steps are those of `torch.optim.RMSprop`."""

    def __init__(self, module: nn.Module, alpha: float = 0.99, eps: float = 1e-8) -> None:
        super().__init__([FlatParameters(module)], alpha=alpha, eps=eps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """v ← α v + (1 − α) g², θ ← θ − η g / (√v + ε)."""
        group, vector, gradient, state = self.begin_step("square_avg")
        square = state["square_avg"].mul_(group["alpha"]).addcmul_(gradient, gradient, value=1 - group["alpha"])
        vector.addcdiv_(gradient, square.sqrt().add_(group["eps"]), value=-group["lr"])

    step.hooked = True  # type: ignore[attr-defined]  # as above


class FlatSGD(FlatOptimizer, torch.optim.SGD):
    """Gradient descent with momentum μ on one `FlatParameters`: v ← μ v + (1 − μ) g, θ ← θ − η v, with v = 0 at first."""

    def __init__(self, module: nn.Module, momentum: float) -> None:
        weights = FlatParameters(module)
        super().__init__([weights], momentum=momentum, dampening=momentum)
        # or torch begins with the first gradient, 1/(1 − μ) times as long
        self.state[weights]["momentum_buffer"] = torch.zeros_like(weights)
