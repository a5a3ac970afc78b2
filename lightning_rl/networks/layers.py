"""Hidden layers with layer normalization, dropout, batch renormalization or residual blocks, for one network or an ensemble."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_rl.errors import SettingError
from lightning_rl.networks.mlp import EnsembleLinear, goal_mlp, mlp
from lightning_rl.processes.ranks import num_ranks, sum_with_gradient

Layers = Literal["plain", "layer_norm", "simba"]
"""Kinds of hidden layers; those with batch renormalization need the joint forward pass of `CrossQ`."""


def hidden_layers(
    kind: str,
    num_inputs: int,
    widths: Sequence[int],
    activation: str,
    *,
    ensemble: int | None = None,
    dropout: float = 0.0,
    goal: slice = slice(0),
) -> nn.Sequential:
    """Build the hidden layers before a final linear layer, `[..., in]` to `[..., widths[-1]]`.

    * `plain`: linear → dropout → activation.
    * `layer_norm`: linear → dropout → layer normalization → activation (Hiraoka et al. 2022, DroQ).
    * `simba`: linear → for each width a block x + dropout(linear(activation(linear(norm(x))))), four times as wide inside → norm (Lee et
      al. 2025, SimBa).
    * `batch_renorm`: for each width renormalization → linear → dropout → activation; then renormalization (Bhatt et al. 2024, CrossQ).

    Args:
        ensemble: E members in one product, `[B, in]` to `[E, B, out]`; None: one network.
        dropout: fraction of outputs that are set to 0 in training mode.
        goal: the part of the input that generates the weights of the last hidden layer; see `goal_mlp`.

    Raises:
        SettingError: goals are combined with other layers than plain ones without dropout, blocks have different widths, or as in `mlp`.
    """
    linear: Callable[[int, int], nn.Module] = nn.Linear if ensemble is None else partial(EnsembleLinear, ensemble)
    if kind == "plain" and not dropout:
        return goal_mlp(num_inputs, widths, activation, linear, goal)
    if kind == "simba" and not widths:
        raise SettingError("net_arch is empty, but simba layers need a width for each block, such as [256, 256]")
    if len(range(num_inputs)[goal]):
        raise SettingError(f"goals generate the weights of plain layers without dropout, got {kind} layers and dropout {dropout:g}")
    norm: Callable[[int], nn.Module] = nn.LayerNorm if ensemble is None else partial(EnsembleLayerNorm, ensemble)
    drop = [nn.Dropout(dropout)] if dropout else []

    def layer(inputs: int, outputs: int) -> nn.Module:
        before = [BatchRenorm(inputs, ensemble)] if kind == "batch_renorm" else []
        return nn.Sequential(*before, linear(inputs, outputs), *drop, *([norm(outputs)] if kind == "layer_norm" else []))

    if kind != "simba":
        layers = mlp(num_inputs, widths, activation, layer)
        return layers.append(BatchRenorm(widths[-1] if widths else num_inputs, ensemble)) if kind == "batch_renorm" else layers
    first, act = mlp(num_inputs, widths[:1], activation, linear)
    width = widths[0]
    if {*widths} != {width}:
        raise SettingError(f"simba layers need one width for all blocks, such as [256, 256], got {[*widths]}")
    blocks = [Residual(norm(width), linear(width, 4 * width), act, linear(4 * width, width), *drop) for _ in widths]
    return nn.Sequential(first, *blocks, norm(width))


class EnsembleLayerNorm(nn.LayerNorm):
    """Layer normalization (Ba et al. 2016) with a scale and a shift for each of E members, `[E, B, F]` to `[E, B, F]`."""

    def __init__(self, ensemble: int, num_features: int) -> None:
        super().__init__(num_features, elementwise_affine=False)
        self.scale = nn.Parameter(torch.ones(ensemble, 1, num_features))
        self.shift = nn.Parameter(torch.zeros(ensemble, 1, num_features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, super().forward(x), self.scale)


class Residual(nn.Sequential):
    """x + layers(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class BatchRenorm(nn.Module):
    """Batch renormalization (Ioffe 2017): by the batch of all ranks inside `batch_statistics`, elsewhere by the running mean and variance.

    The first `warmup` batches use plain batch normalization. Later batches are corrected towards the running statistics:
    x̂ = (x − μ_B) / σ_B · r + d,  r = clip(σ_B / σ, 1/3, 3),  d = clip((μ_B − μ) / σ, −5, 5). Constants as in CrossQ's code.

    Args:
        num_features: F, of `[B, F]`, or of `[E, B, F]` with an ensemble.
        ensemble: E; None for a single network.
    """

    mean: Tensor
    var: Tensor
    batches: Tensor
    momentum, eps, warmup, max_scale, max_shift = 0.01, 1e-3, 100_000, 3.0, 5.0

    def __init__(self, num_features: int, ensemble: int | None = None) -> None:
        super().__init__()
        shape = (1, num_features) if ensemble is None else (ensemble, 1, num_features)
        self.scale, self.shift = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("batches", torch.tensor(0))
        self.by_batch = False

    def forward(self, x: Tensor) -> Tensor:
        if self.by_batch:
            return torch.addcmul(self.shift, self.learn(x), self.scale)
        return torch.addcmul(self.shift, (x - self.mean) * (self.var + self.eps).rsqrt(), self.scale)

    def learn(self, x: Tensor) -> Tensor:
        """Return x̂, and update the running statistics."""
        rows = x.shape[-2] * num_ranks()
        mean = sum_with_gradient(x.sum(-2, keepdim=True)) / rows
        var = sum_with_gradient((x - mean).square().sum(-2, keepdim=True)) / (rows - 1)
        deviation = (var + self.eps).sqrt()
        with torch.no_grad():
            running, late = (self.var + self.eps).sqrt(), self.batches > self.warmup
            r = (deviation / running).clamp(1 / self.max_scale, self.max_scale).where(late, 1.0)
            d = ((mean - self.mean) / running).clamp(-self.max_shift, self.max_shift).where(late, 0.0)
            self.mean.lerp_(mean.float().expand_as(self.mean), self.momentum)
            self.var.lerp_(var.float().expand_as(self.var), self.momentum)
            self.batches.add_(1)
        return (x - mean) / deviation * r + d


@contextmanager
def batch_statistics(network: nn.Module) -> Iterator[None]:
    """Make a network normalize by batch statistics, and update its running statistics, inside the context."""
    layers = [module for module in network.modules() if isinstance(module, BatchRenorm)]
    for layer in layers:
        layer.by_batch = True
    try:
        yield
    finally:
        for layer in layers:
            layer.by_batch = False
