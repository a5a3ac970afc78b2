"""Distributions over actions: the interface, and distributions over finitely many actions (Discrete, MultiDiscrete, MultiBinary)."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete
from numpy.typing import DTypeLike
from torch import Generator, Tensor, nn
from torch.nn import functional

from lightning_rl.types import Tree

Array = TypeVar("Array", np.ndarray, Tensor)


def masked(logits: Array, mask: Tree) -> Array:
    """Mask out the logits (an array or tensor) where the mask is False; an empty mask `()` allows all."""
    if isinstance(mask, tuple):
        return logits
    if isinstance(logits, np.ndarray):
        return np.where(mask, logits, np.finfo(logits.dtype).min)
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min)


def like(values: Array, constant: np.ndarray) -> Array:
    """Return a constant as an array or a tensor, like the values."""
    if isinstance(values, np.ndarray):
        return constant
    if values.device.type == "cpu" or torch.compiler.is_compiling():
        return torch.as_tensor(constant, device=values.device)
    return _on_device(values.device, constant.tobytes(), constant.dtype.str).view(constant.shape)


@lru_cache(1024)
def _on_device(device: torch.device, data: bytes, dtype: str) -> Tensor:
    """Return a constant that is cached on a device, so that no copy has to be waited for."""
    return torch.as_tensor(np.frombuffer(data, dtype).copy(), device=device)


def cast(values: Array, dtype: DTypeLike) -> Array:
    """Convert an array or tensor to a numpy dtype."""
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False)
    return values.to(getattr(torch, np.dtype(dtype).name))


def split_mask(mask: Tree, widths: list[int]) -> Sequence[Tree]:
    """Split a mask into parts of these widths."""
    return [()] * len(widths) if isinstance(mask, tuple) else mask.split(widths, -1)


class Distribution(nn.Module):
    """The interface of distributions.  `num_inputs`: width of x; `num_parts`: D; `mask_width`: M, the width of masks, 0 without choices."""

    num_inputs: int
    num_parts: int
    num_features: int
    """The width of `features`."""
    mask_width = 0
    sizes: Sequence[int] = ()
    """Number of choices of each branch of an elementary distribution; empty if actions are continuous."""
    names: Sequence[str] = ()
    """Paths of the leaves of a Dict or Tuple in the action space: keys and indices joined by dots."""

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tree:
        """Sample an action for each row."""
        raise NotImplementedError

    def mode(self, x: Tensor, mask: Tree = ()) -> Tree:
        """Return the most likely action of each row."""
        raise NotImplementedError

    def evaluate(self, x: Tensor, action: Tree, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        """Return the log-probability of an action and the entropy, each `[..., D]`."""
        raise NotImplementedError

    def densities(self, x: Tensor, mask: Tree = ()) -> list[torch.distributions.Distribution]:
        """Return a torch distribution for each leaf, with `[..., D]` independent parts before squashing, for KL divergences."""
        raise NotImplementedError

    def to_env(self, action: Tree) -> Tree:
        """Convert sampled actions to the environment's form and dtype; arrays stay arrays, tensors stay tensors."""
        raise NotImplementedError

    def from_env(self, action: Tree) -> Tree:
        """Invert `to_env`, for demonstrations, as arrays."""
        raise NotImplementedError

    def features(self, action: Tree) -> Tensor:
        """Return sampled actions as vectors `[..., num_features]` for other networks.

        Choices are one-hot, bits unchanged, and numbers as the environment gets them, scaled to [-1, 1] if they have bounds.
        """
        raise NotImplementedError

    def prediction_loss(self, x: Tensor, action: Tree) -> Tensor:
        """Return the loss `[...]` of predicted actions `x [..., num_features]`: cross-entropy of choices and bits, else squared error."""
        raise NotImplementedError

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tree:
        """Draw an action for each row whatever x is: uniform in all dimensions with bounds."""
        raise NotImplementedError

    def flat(self, tree: Tree) -> list[Tree]:
        """Return the actions of the elementary distributions, in the order of `leaves`."""
        return [tree]

    def leaves(self) -> list[Any]:
        """Return the elementary distributions."""
        return [self]

    def leaf_sums(self, x: Tensor) -> Tensor:
        """Sum `x [..., D]` over the dimensions or branches of each leaf, to `[..., leaves]`."""
        return torch.stack([part.sum(-1) for part in x.split([leaf.num_parts for leaf in self.leaves()], -1)], -1)

    def means_of_parts(self, weight: Tensor, **values: Tensor) -> dict[str, Tensor]:
        """Return the mean of values `[B, D]`, such as entropies, for each part of a Dict or Tuple action, as `train/<name>/<part>`."""
        means = {name: (weight.unsqueeze(-1) * self.leaf_sums(value.detach())).sum(0) for name, value in values.items() if self.names}
        return {f"train/{name}/{part}": mean[k] for name, mean in means.items() for k, part in enumerate(self.names)}


class DiscreteDistribution(Distribution):
    """A distribution over finitely many actions, `sizes` choices in each part."""

    def __init__(self, sizes: list[int], num_inputs: int) -> None:
        super().__init__()
        self.sizes, self.mask_width, self.num_parts = sizes, sum(sizes), len(sizes)
        self.num_inputs = self.num_features = num_inputs

    def log_probs(self, x: Tensor, mask: Tree = ()) -> Tensor:
        """Return the log-probabilities of all choices (for a bit: off and on), branch by branch, `[..., sum(sizes)]`."""
        raise NotImplementedError

    def choices(self, action: Tensor) -> Tensor:
        """Return the choice of each branch, `[..., len(sizes)]`."""
        raise NotImplementedError

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        """Sample Gumbel noise of the shape of x, −log of exponential noise: the argmax of logits + noise is a sample from their softmax."""
        return torch.empty_like(x).exponential_(generator=generator).log_().neg_()

    def prediction_loss(self, x: Tensor, action: Tree) -> Tensor:
        return -self.evaluate(x, action)[0].sum(-1)


class Categorical(DiscreteDistribution):
    """Discrete(n): a softmax over n logits. Actions are counted from 0, whatever the space's `start`."""

    def __init__(self, space: Discrete) -> None:
        super().__init__([int(space.n)], int(space.n))
        self.start, self.dtype = int(space.start), space.dtype

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return self.draw(masked(x, mask), self.noise(x, generator))

    def draw(self, x: Array, noise: Array) -> Array:
        """Return the action for logits and noise, arrays or tensors."""
        return (x + noise).argmax(-1)

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return self.draw(masked(torch.zeros_like(x), mask), DiscreteDistribution.noise(self, x, generator))

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return masked(x, mask).argmax(-1)

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        log_p = masked(x, mask).log_softmax(-1)
        return log_p.gather(-1, action.unsqueeze(-1)), -(log_p.exp() * log_p).sum(-1, keepdim=True)

    def densities(self, x: Tensor, mask: Tree = ()) -> list[torch.distributions.Distribution]:
        return [torch.distributions.Categorical(logits=masked(x, mask).unsqueeze(-2), validate_args=False)]

    def log_probs(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return masked(x, mask).log_softmax(-1)

    def choices(self, action: Tensor) -> Tensor:
        return action.unsqueeze(-1)

    def features(self, action: Tensor) -> Tensor:
        return functional.one_hot(action, self.num_inputs).float()

    def to_env(self, action: Array) -> Array:
        action = action + self.start  # never the array that is kept: an environment may write into its actions
        return action if self.dtype == np.int64 else cast(action, self.dtype)

    def from_env(self, action: np.ndarray) -> np.ndarray:
        return action.astype(np.int64) - self.start


class EpsilonGreedy(Categorical):
    """Discrete(n) with action values as x: the best action, or with probability `epsilon` a uniformly random one. The mode is the best."""

    epsilon = 0.0

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        """Sample zeros, or for exploring rows values larger than all action values."""
        explores = torch.rand(x.shape[:-1], generator=generator, device=x.device).unsqueeze(-1) < self.epsilon
        return torch.empty_like(x).uniform_(1e20, 2e20, generator=generator) * explores

    def log_probs(self, x: Tensor, mask: Tree = ()) -> Tensor:
        greedy = functional.one_hot(self.mode(x, mask), self.num_inputs)
        return ((1 - self.epsilon) * greedy + self.epsilon * masked(torch.zeros_like(x), mask).softmax(-1)).log()


class MultiCategorical(DiscreteDistribution):
    """MultiDiscrete(nvec): a softmax over each of the K = len(nvec) branches, D = K."""

    branch: Tensor
    inside: Tensor
    places: Tensor

    def __init__(self, space: MultiDiscrete) -> None:
        sizes = torch.as_tensor(space.nvec).flatten()
        super().__init__(sizes.tolist(), int(sizes.sum()))
        self.shape, self.start, self.dtype = space.shape, space.start, space.dtype
        position = torch.arange(int(sizes.max()))
        inside = position < sizes.unsqueeze(1)
        first = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])
        self.register_buffer("branch", (first.unsqueeze(1) + position) * inside, persistent=False)
        self.register_buffer("inside", inside, persistent=False)
        self.register_buffer("places", inside.flatten().nonzero().squeeze(-1), persistent=False)

    def _logits(self, x: Tensor, mask: Tree) -> Tensor:
        """Return `[..., K, max(nvec)]`, with the entries beyond a branch's size masked out."""
        return masked(masked(x, mask)[..., self.branch], self.inside)

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        logits = self._logits(x, mask)
        return (logits + self.noise(logits, generator)).argmax(-1)

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return self.sample(torch.zeros_like(x), mask, generator)

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return self._logits(x, mask).argmax(-1)

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        log_p = self._logits(x, mask).log_softmax(-1)
        return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    def densities(self, x: Tensor, mask: Tree = ()) -> list[torch.distributions.Distribution]:
        return [torch.distributions.Categorical(logits=self._logits(x, mask), validate_args=False)]

    def log_probs(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return self._logits(x, mask).log_softmax(-1).flatten(-2)[..., self.places]

    def choices(self, action: Tensor) -> Tensor:
        return action

    def features(self, action: Tensor) -> Tensor:
        places = action + self.branch[:, 0]
        return torch.zeros(*action.shape[:-1], self.num_inputs, device=action.device).scatter_(-1, places, 1.0)

    def to_env(self, action: Array) -> Array:
        return cast(action.reshape(-1, *self.shape) + like(action, self.start), self.dtype)

    def from_env(self, action: np.ndarray) -> np.ndarray:
        return (action - self.start).reshape(len(action), -1).astype(np.int64)


class Bernoulli(DiscreteDistribution):
    """MultiBinary(k): independent bits, each with a logit, D = k."""

    def __init__(self, space: MultiBinary) -> None:
        bits = math.prod(space.shape)
        super().__init__([2] * bits, bits)
        self.shape = space.shape

    def _logits(self, x: Tensor, mask: Tree) -> Tensor:
        """Return `[..., k]`; a bit with only one legal value gets the largest or smallest finite logit."""
        if isinstance(mask, tuple):
            return x
        off, on = mask.unflatten(-1, (-1, 2)).unbind(-1)
        limits = torch.finfo(x.dtype)
        return x.masked_fill(~off, limits.max).masked_fill(~on, limits.min)

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        on = self._logits(x, mask).sigmoid()
        return (torch.rand(x.shape, generator=generator, device=x.device) < on).to(x.dtype)

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return self.sample(torch.zeros_like(x), mask, generator)

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return (self._logits(x, mask) > 0).to(x.dtype)

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        x = self._logits(x, mask)
        log_on, log_off = functional.logsigmoid(x), functional.logsigmoid(-x)
        return torch.where(action > 0.5, log_on, log_off), -(x.sigmoid() * log_on + (-x).sigmoid() * log_off)

    def densities(self, x: Tensor, mask: Tree = ()) -> list[torch.distributions.Distribution]:
        return [torch.distributions.Bernoulli(logits=self._logits(x, mask), validate_args=False)]

    def log_probs(self, x: Tensor, mask: Tree = ()) -> Tensor:
        x = self._logits(x, mask)
        return torch.stack([functional.logsigmoid(-x), functional.logsigmoid(x)], -1).flatten(-2)

    def choices(self, action: Tensor) -> Tensor:
        return action.long()

    def features(self, action: Tensor) -> Tensor:
        return action.float()

    def to_env(self, action: Array) -> Array:
        return cast(action.reshape(-1, *self.shape), np.int8)

    def from_env(self, action: np.ndarray) -> np.ndarray:
        return action.reshape(len(action), -1).astype(np.float32)
