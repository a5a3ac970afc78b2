"""What every distribution offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from lightning_rl.types import Tree


class Distribution(nn.Module):
    """The common shape.  `num_inputs`: width of x; `num_parts`: D; `mask_width`: M, the width of masks `[..., M]`, 0 without choices."""

    num_inputs: int
    num_parts: int
    mask_width = 0
    sizes: Sequence[int] = ()
    """Of the branches of an elementary distribution, how many choices each has; none where actions are continuous."""
    names: Sequence[str] = ()
    """Of the leaves of a Dict or Tuple: their paths in the action space, keys and places joined by dots."""

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tree:
        """Draw an action for each row."""
        raise NotImplementedError

    def mode(self, x: Tensor, mask: Tree = ()) -> Tree:
        """The most likely action of each row."""
        raise NotImplementedError

    def evaluate(self, x: Tensor, action: Tree, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        """Log-probability of an action and entropy, `[..., D]` each."""
        raise NotImplementedError

    def to_env(self, action: Tree) -> Tree:
        """The environment's form of sampled actions, of its dtype; numpy in, numpy out, and tensors in, tensors out."""
        raise NotImplementedError

    def from_env(self, action: Tree) -> Tree:
        """The inverse of `to_env`, for demonstrations; numpy in, numpy out."""
        raise NotImplementedError

    @property
    def num_features(self) -> int:
        """Width of `features`."""
        return self.num_inputs

    def features(self, action: Tree) -> Tensor:
        """Sampled actions as vectors `[..., num_features]` for other networks.

        Choices one-hot, bits, and numbers as the environment gets them, those with bounds scaled to [-1, 1].
        """
        raise NotImplementedError

    def prediction_loss(self, x: Tensor, action: Tree) -> Tensor:
        """How far `x [..., num_features]` is from actions, `[...]`: cross-entropy of choices and bits, squared error of numbers."""
        return -self.evaluate(x, action)[0].sum(-1)

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tree:
        """An action for each row of x that knows nothing of x: uniform where the space has bounds."""
        return self.sample(torch.zeros_like(x), mask, generator)

    def flat(self, tree: Tree) -> list[Tree]:
        """The actions of the elementary distributions in here, in the order of `leaves`."""
        return [tree]

    def leaves(self) -> list[Any]:
        """The elementary distributions in here."""
        return [self]

    def leaf_sums(self, x: Tensor) -> Tensor:
        """`x [..., D]` summed over the dimensions or branches of each leaf, `[..., leaves]`."""
        return torch.stack([part.sum(-1) for part in x.split([leaf.num_parts for leaf in self.leaves()], -1)], -1)


def masked(logits: Any, mask: Tree) -> Any:
    """Rule out the places where the mask is False, arrays or tensors alike; an empty mask `()` allows all."""
    if isinstance(mask, tuple):
        return logits
    if isinstance(logits, np.ndarray):
        return np.where(mask, logits, np.finfo(logits.dtype).min)
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min)


def like(values: Any, constant: np.ndarray) -> Any:
    """A constant as an array or a tensor, whichever the values are."""
    return constant if isinstance(values, np.ndarray) else torch.as_tensor(constant, device=values.device)


def cast(values: Any, dtype: Any) -> Any:
    """Arrays or tensors alike in a dtype of numpy."""
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False)
    return values.to(getattr(torch, np.dtype(dtype).name))


def split_mask(mask: Tree, widths: list[int]) -> Sequence[Tree]:
    """The parts of a mask, of these widths."""
    return [()] * len(widths) if isinstance(mask, tuple) else mask.split(widths, -1)


def gumbel(logits: Tensor, generator: Generator | None) -> Tensor:
    """Gumbel noise, −log of exponential noise: the argmax of logits + noise is a sample of their softmax."""
    return torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
