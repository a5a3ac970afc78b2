"""Distributions over finitely many actions: Discrete, MultiDiscrete, MultiBinary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete
from torch import Generator, Tensor
from torch.nn import functional

from lightning_rl.distributions.distribution import Distribution, cast, gumbel, like, masked
from lightning_rl.types import Tree


class Categorical(Distribution):
    """Discrete(n): a softmax over n logits. Actions are counted from 0, whatever the space's `start`."""

    def __init__(self, space: Discrete) -> None:
        super().__init__()
        self.num_inputs, self.num_parts, self.start = int(space.n), 1, int(space.start)
        self.sizes, self.mask_width = [self.num_inputs], self.num_inputs

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return self.draw(masked(x, mask), self.noise(x, generator))

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        """Gumbel noise of the shape of x."""
        return gumbel(x, generator)

    def draw(self, x: Any, noise: Any) -> Any:
        """The action for logits and noise, arrays or tensors alike."""
        return (x + noise).argmax(-1)

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return masked(x, mask).argmax(-1)

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        log_p = masked(x, mask).log_softmax(-1)
        return log_p.gather(-1, action.unsqueeze(-1)), -(log_p.exp() * log_p).sum(-1, keepdim=True)

    def log_probs(self, x: Tensor, mask: Tree = ()) -> Tensor:
        """Of all choices, branch after branch, `[..., sum(sizes)]`."""
        return masked(x, mask).log_softmax(-1)

    def choices(self, action: Tensor) -> Tensor:
        """The choice of each branch, `[..., len(sizes)]`."""
        return action.unsqueeze(-1)

    def features(self, action: Tensor) -> Tensor:
        return functional.one_hot(action, self.num_inputs).float()

    def to_env(self, action: Any) -> Any:
        return action + self.start if self.start else action

    def from_env(self, action: np.ndarray) -> np.ndarray:
        return action.astype(np.int64) - self.start


class EpsilonGreedy(Categorical):
    """Discrete(n) with action values for x: the greatest, or with probability `epsilon` any, all alike. Its mode is the greatest."""

    epsilon = 0.0

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        """Zero, or what drowns all values."""
        explores = torch.rand(x.shape[:-1], generator=generator, device=x.device).unsqueeze(-1) < self.epsilon
        return torch.empty_like(x).uniform_(1e20, 2e20, generator=generator) * explores

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return self.draw(masked(torch.zeros_like(x), mask), gumbel(x, generator))


class MultiCategorical(Distribution):
    """MultiDiscrete(nvec): a softmax over each of the K = len(nvec) branches, D = K."""

    branch: Tensor
    inside: Tensor
    places: Tensor

    def __init__(self, space: MultiDiscrete) -> None:
        super().__init__()
        sizes = torch.as_tensor(space.nvec).flatten()
        self.num_inputs, self.num_parts = int(sizes.sum()), len(sizes)
        self.mask_width = self.num_inputs
        self.shape, self.start, self.dtype = space.shape, space.start, space.dtype
        position = torch.arange(int(sizes.max()))
        inside = position < sizes.unsqueeze(1)
        self.sizes = sizes.tolist()
        first = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])
        self.register_buffer("branch", (first.unsqueeze(1) + position) * inside, persistent=False)
        self.register_buffer("inside", inside, persistent=False)
        self.register_buffer("places", inside.flatten().nonzero().squeeze(-1), persistent=False)

    def _logits(self, x: Tensor, mask: Tree) -> Tensor:
        """`[..., K, max(nvec)]`, the places beyond a branch's size ruled out."""
        return masked(masked(x, mask)[..., self.branch], self.inside)

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        logits = self._logits(x, mask)
        return (logits + gumbel(logits, generator)).argmax(-1)

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return self._logits(x, mask).argmax(-1)

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        log_p = self._logits(x, mask).log_softmax(-1)
        return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    def log_probs(self, x: Tensor, mask: Tree = ()) -> Tensor:
        """Of all choices, branch after branch, `[..., sum(sizes)]`."""
        return self._logits(x, mask).log_softmax(-1).flatten(-2)[..., self.places]

    def choices(self, action: Tensor) -> Tensor:
        """The choice of each branch, `[..., len(sizes)]`."""
        return action

    def features(self, action: Tensor) -> Tensor:
        places = action + self.branch[:, 0]
        return torch.zeros(*action.shape[:-1], self.num_inputs, device=action.device).scatter_(-1, places, 1.0)

    def to_env(self, action: Any) -> Any:
        return cast(action.reshape(-1, *self.shape) + like(action, self.start), self.dtype)

    def from_env(self, action: np.ndarray) -> np.ndarray:
        return (action - self.start).reshape(len(action), -1).astype(np.int64)


class Bernoulli(Distribution):
    """MultiBinary(k): independent bits, each with a logit, D = k."""

    def __init__(self, space: MultiBinary) -> None:
        super().__init__()
        self.shape = space.shape
        self.num_inputs = self.num_parts = math.prod(space.shape)
        self.sizes, self.mask_width = [2] * self.num_inputs, 2 * self.num_inputs

    def _logits(self, x: Tensor, mask: Tree) -> Tensor:
        """`[..., k]`, of a bit with one legal value as far on its side as numbers go."""
        if isinstance(mask, tuple):
            return x
        off, on = mask.unflatten(-1, (-1, 2)).unbind(-1)
        limits = torch.finfo(x.dtype)
        return x.masked_fill(~off, limits.max).masked_fill(~on, limits.min)

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        on = self._logits(x, mask).sigmoid()
        return (torch.rand(x.shape, generator=generator, device=x.device) < on).to(x.dtype)

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return (self._logits(x, mask) > 0).to(x.dtype)

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        x = self._logits(x, mask)
        log_on, log_off = functional.logsigmoid(x), functional.logsigmoid(-x)
        return torch.where(action > 0.5, log_on, log_off), -(x.sigmoid() * log_on + (-x).sigmoid() * log_off)

    def log_probs(self, x: Tensor, mask: Tree = ()) -> Tensor:
        """Of off and on, bit after bit, `[..., sum(sizes)]`."""
        x = self._logits(x, mask)
        return torch.stack([functional.logsigmoid(-x), functional.logsigmoid(x)], -1).flatten(-2)

    def choices(self, action: Tensor) -> Tensor:
        """0 or 1 for each bit, `[..., len(sizes)]`."""
        return action.long()

    def features(self, action: Tensor) -> Tensor:
        return action.float()

    def to_env(self, action: Any) -> Any:
        return cast(action.reshape(-1, *self.shape), np.int8)

    def from_env(self, action: np.ndarray) -> np.ndarray:
        return action.reshape(len(action), -1).astype(np.float32)
