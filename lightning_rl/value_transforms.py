"""Transforms that let a network learn small and large returns, and scalars as histograms."""

from types import ModuleType
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_rl.errors import SettingError, check_choice

Numbers = TypeVar("Numbers", float, np.ndarray, Tensor)


class ValueTransform(Protocol):
    """A callable transform h(x) and its inverse; results have the type and precision of x."""

    def __call__(self, x: Numbers) -> Numbers: ...

    def inverse(self, x: Numbers) -> Numbers: ...


class Identity:
    """h(x) = x."""

    def __call__(self, x: Numbers) -> Numbers:
        return x

    inverse = __call__


class Linear:
    """h(x) = scale · x + offset."""

    def __init__(self, scale: float = 1.0, offset: float = 0.0) -> None:
        if scale == 0:
            raise SettingError("a linear value transform with scale 0 has no inverse")
        self.scale, self.offset = scale, offset

    def __call__(self, x: Numbers) -> Numbers:
        return x * self.scale + self.offset

    def inverse(self, x: Numbers) -> Numbers:
        return (x - self.offset) / self.scale


class SymLog:
    """h(x) = sign(x) log(|x| + 1) (Hafner et al. 2023, eq. 9)."""

    def __call__(self, x: Numbers) -> Numbers:
        xp = _library(x)
        return xp.sign(x) * xp.log1p(abs(x))

    def inverse(self, x: Numbers) -> Numbers:
        """Return sign(x) (exp |x| − 1)."""
        xp = _library(x)
        return xp.sign(x) * xp.expm1(abs(x))


class SignedHyperbolic:
    """h(x) = sign(x) (√(|x| + 1) − 1) + ε x (Pohlen et al. 2018, prop. A.2), accurate for the smallest numbers too."""

    def __init__(self, eps: float = 1e-2) -> None:
        if eps < 0:
            raise SettingError(f"the ε of a signed hyperbolic transform must be at least 0, got {eps}")
        self.eps = eps

    def __call__(self, x: Numbers) -> Numbers:
        return x / (_library(x).sqrt(abs(x) + 1) + 1) + self.eps * x  # √(1 + y) − 1 = y / (√(1 + y) + 1)

    def inverse(self, x: Numbers) -> Numbers:
        """Return sign(x) (u² − 1) with u = (√(1 + 4ε(|x| + 1 + ε)) − 1) / 2ε, computed without cancellation, for ε = 0 too."""
        one = 1 + 2 * self.eps
        beyond_1 = 2 * x / (_library(x).sqrt(one * one + 4 * self.eps * abs(x)) + one)  # sign(x) (u − 1)
        return beyond_1 * (abs(beyond_1) + 2)


TRANSFORMS: dict[str, type[ValueTransform]] = {"identity": Identity, "symlog": SymLog, "signed_hyperbolic": SignedHyperbolic}


def make_value_transform(name: str) -> ValueTransform:
    """Return a transform by name. Raises `SettingError`: the name is unknown."""
    check_choice("value_transform", name, TRANSFORMS)
    return TRANSFORMS[name]()


def scalar_to_support(x: Tensor, low: int, high: int) -> Tensor:
    """Return probabilities over the integers low … high with mean x, nonzero only at the two neighbors of x.  `[...]` to `[..., Z]`.

    Values outside the range are clipped to it.
    """
    x = (x if x.is_floating_point() else x.float()).clamp(low, high)
    lower = x.floor().clamp(max=high - 1)
    upper_share = (x - lower).unsqueeze(-1)
    index = (lower - low).nan_to_num().long().unsqueeze(-1)  # NaN stays in the probabilities, and is detected in the loss
    probs = torch.zeros(*x.shape, high - low + 1, dtype=x.dtype, device=x.device)
    return probs.scatter_(-1, index, 1 - upper_share).scatter_(-1, index + 1, upper_share)


def support_to_scalar(logits: Tensor, low: int, high: int) -> Tensor:
    """Return the mean of softmax(logits) over the integers low … high, `[..., Z]` to `[...]`; invert a transform after the mean."""
    return (logits.softmax(-1) * torch.arange(low, high + 1, dtype=logits.dtype, device=logits.device)).sum(-1)


def _library(x: object) -> ModuleType:
    return torch if isinstance(x, Tensor) else np
