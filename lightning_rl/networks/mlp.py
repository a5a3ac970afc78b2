"""Multi-layer perceptrons, their layers and initialization, and layers whose weights are generated from a goal."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from lightning_rl.errors import SettingError, check_choice, check_range

NetArch = list[int] | dict[str, list[int]]
"""The setting `net_arch`: widths of hidden layers, or those of each part, such as `{pi: [64], vf: [256]}`."""
Widths = Sequence[int] | Mapping[str, Sequence[int]]
"""What networks take as `net_arch`."""
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
}


def orthogonal(layer: nn.Linear, gain: float = math.sqrt(2)) -> nn.Linear:
    """Initialize a layer with orthogonal weights of a given gain and zero bias (Engstrom et al. 2020 measure its effect)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def split_widths(net_arch: Widths, critic: str) -> tuple[Sequence[int], Sequence[int]]:
    """Return the widths of the policy and of the critic, which has the name `critic` in a mapping; a list is for both.

    Raises `SettingError`: it is neither, or a mapping has other keys.
    """
    if isinstance(net_arch, list | tuple):
        return net_arch, net_arch
    if not isinstance(net_arch, Mapping) or net_arch.keys() != {"pi", critic}:
        raise SettingError(f"net_arch must be a list of widths, or {{pi: [64, 64], {critic}: [64, 64]}}; got {net_arch}")
    return net_arch["pi"], net_arch[critic]


def orthogonal_linear(num_inputs: int, num_outputs: int) -> nn.Module:
    return orthogonal(nn.Linear(num_inputs, num_outputs))


def mlp(
    num_inputs: int, widths: Sequence[int], activation: str = "tanh", layer: Callable[[int, int], nn.Module] = orthogonal_linear
) -> nn.Sequential:
    """Build layers of the given widths, each followed by the activation. Raises `SettingError`: the widths or activation are invalid."""
    check_choice("activation", activation, ACTIVATIONS)
    if not isinstance(widths, list | tuple):
        raise SettingError(f"net_arch must be a list of widths such as [64, 64], got {widths!r}")
    layers: list[nn.Module] = []
    for width in widths:
        check_range("net_arch", width, 1, whole=True)
        layers += [layer(num_inputs, width), ACTIVATIONS[activation]()]
        num_inputs = width
    return nn.Sequential(*layers)


class EnsembleLinear(nn.Module):
    """E linear layers in one product: `[E, B, in]`, or shared `[B, in]`, to `[E, B, out]`. Each is initialized like `nn.Linear`."""

    def __init__(self, ensemble: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(num_inputs)
        self.weight = nn.Parameter(torch.empty(ensemble, num_inputs, num_outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(ensemble, 1, num_outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x.expand(len(self.weight), *x.shape[-2:]), self.weight)


class NoisyLinear(nn.Module):
    """A linear layer with learned weight noise in training mode (Fortunato et al. 2018, eqs. 8-11, factorized Gaussian noise).

    w = μ + σ ⊙ f(ε_out) f(ε_in)ᵀ,  f(x) = sign(x) √|x|.  `resample` samples ε; in evaluation mode w = μ.
    """

    noise_in: Tensor
    noise_out: Tensor

    def __init__(self, num_inputs: int, num_outputs: int, sigma: float = 0.5) -> None:
        super().__init__()
        bound = 1 / math.sqrt(num_inputs)
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((num_outputs, num_inputs), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((num_outputs,), sigma * bound))
        self.register_buffer("noise_in", torch.zeros(num_inputs))
        self.register_buffer("noise_out", torch.zeros(num_outputs))

    def resample(self, generator: Generator | None = None) -> None:
        """Sample new noise."""
        for noise in (self.noise_in, self.noise_out):
            noise.normal_(generator=generator)
            noise.copy_(noise.sign() * noise.abs().sqrt())

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return functional.linear(x, self.weight, self.bias)
        # (μ + σ ⊙ out inᵀ) x = μ x + out ⊙ σ (in ⊙ x)
        noise = functional.linear(x * self.noise_in, self.weight_sigma) + self.bias_sigma
        return functional.linear(x, self.weight, self.bias) + noise * self.noise_out


def goal_mlp(
    num_inputs: int,
    widths: Sequence[int],
    activation: str = "tanh",
    layer: Callable[[int, int], nn.Module] = orthogonal_linear,
    goal: slice = slice(0),
) -> nn.Sequential:
    """Build an `mlp` whose last layer gets its weights from the slice `goal` of the input; a plain one if the slice is empty.

    Raises `SettingError`: there is a goal but no hidden layer, or as in `mlp`.
    """
    layers = mlp(num_inputs, widths, activation, layer)
    num_goals = len(range(num_inputs)[goal])
    if not num_goals:
        return layers
    if not widths:
        raise SettingError("net_arch is empty, but goals need a hidden layer whose weights they generate; use net_arch [64]")
    layers[-2] = HyperLinear(layers[-2], num_goals, *(num_inputs, *widths)[-2:])  # type: ignore[arg-type]
    return GoalLayers(*layers, goal=goal)


class HyperLinear(nn.Module):
    """A linear layer with different weights for each row: `[..., in]` and goals `[..., num_goals]` to `[..., out]`.

    y = x W(g) + b,  W = reshape(L(norm(silu(L(silu(L(g))))))), whose last layer is initialized as U(±√(1 / (out · in))), without noise. It
    has out² · in weights, and intermediate results `[..., in, out]`.

    Args:
        plain: the layer to replace, whose bias is kept; each member of an ensemble gets its own generator.
        num_goals: features of the goal.
        num_inputs, num_outputs: in and out.
    """

    def __init__(self, plain: nn.Linear | NoisyLinear | EnsembleLinear, num_goals: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        linear: Callable[[int, int], nn.Linear | EnsembleLinear] = nn.Linear
        if isinstance(plain, EnsembleLinear):
            linear = partial(EnsembleLinear, len(plain.weight))
        last = linear(num_outputs, num_inputs * num_outputs)
        bound = 1 / math.sqrt(num_outputs * num_inputs)
        nn.init.uniform_(last.weight, -bound, bound)
        nn.init.zeros_(last.bias)
        norm = nn.LayerNorm(num_outputs, elementwise_affine=False)
        self.generator = nn.Sequential(*mlp(num_goals, [num_outputs, num_outputs], "silu", linear), norm, last)
        self.bias, self.sizes = plain.bias, (num_inputs, num_outputs)

    def forward(self, x: Tensor, goal: Tensor) -> Tensor:
        weight = self.generator(goal).unflatten(-1, self.sizes)
        return (x.unsqueeze(-2) @ weight).squeeze(-2) + self.bias


class GoalLayers(nn.Sequential):
    """Layers in which each `HyperLinear` also gets the slice `goal` of the input."""

    def __init__(self, *layers: nn.Module, goal: slice = slice(0)) -> None:
        super().__init__(*layers)
        self.goal = goal

    def forward(self, x: Tensor) -> Tensor:
        goal = x[..., self.goal]
        for layer in self:
            x = layer(x, goal) if isinstance(layer, HyperLinear) else layer(x)
        return x
