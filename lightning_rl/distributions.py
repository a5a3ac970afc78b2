"""One distribution per action space.

A distribution is a module conditioned on `x [..., num_inputs]`, the output of the policy's last layer. It owns what does not depend on
the observation (a Gaussian's standard deviation). Log-probabilities and entropies come `[..., D]`, a part for each action dimension or
branch; the joint ones are their sums. Actions are kept as sampled; `to_env` turns them into what the environment expects.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from torch import Generator, Tensor, nn
from torch.nn import functional

from lightning_rl.errors import SettingError, check_choice
from lightning_rl.spaces import short
from lightning_rl.types import Tree


class Distribution(nn.Module):
    """The common shape.  `num_inputs`: width of x; `num_parts`: D."""

    num_inputs: int
    num_parts: int

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
        """The environment's form of sampled actions; numpy in, numpy out."""
        raise NotImplementedError


class Categorical(Distribution):
    """Discrete(n): a softmax over n logits. Actions are counted from 0, whatever the space's `start`."""

    def __init__(self, space: Discrete) -> None:
        super().__init__()
        self.num_inputs, self.num_parts, self.start = int(space.n), 1, int(space.start)

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return self.draw(_masked(x, mask), self.noise(x, generator))

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        """Gumbel noise of the shape of x."""
        return _gumbel(x, generator)

    def draw(self, x: Any, noise: Any) -> Any:
        """The action for logits and noise, arrays or tensors alike."""
        return (x + noise).argmax(-1)

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return _masked(x, mask).argmax(-1)

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        log_p = _masked(x, mask).log_softmax(-1)
        return log_p.gather(-1, action.unsqueeze(-1)), -(log_p.exp() * log_p).sum(-1, keepdim=True)

    def to_env(self, action: np.ndarray) -> np.ndarray:
        return action + self.start if self.start else action


class MultiCategorical(Distribution):
    """MultiDiscrete(nvec): a softmax over each of the K = len(nvec) branches, D = K."""

    branch: Tensor
    inside: Tensor

    def __init__(self, space: MultiDiscrete) -> None:
        super().__init__()
        sizes = torch.as_tensor(space.nvec).flatten()
        self.num_inputs, self.num_parts = int(sizes.sum()), len(sizes)
        self.shape, self.start, self.dtype = space.shape, space.start, space.dtype
        position = torch.arange(int(sizes.max()))
        inside = position < sizes.unsqueeze(1)
        first = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])
        self.register_buffer("branch", (first.unsqueeze(1) + position) * inside, persistent=False)
        self.register_buffer("inside", inside, persistent=False)

    def _logits(self, x: Tensor, mask: Tree) -> Tensor:
        """`[..., K, max(nvec)]`, the places beyond a branch's size ruled out."""
        return _masked(_masked(x, mask)[..., self.branch], self.inside)

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        logits = self._logits(x, mask)
        return (logits + _gumbel(logits, generator)).argmax(-1)

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return self._logits(x, mask).argmax(-1)

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        log_p = self._logits(x, mask).log_softmax(-1)
        return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    def to_env(self, action: np.ndarray) -> np.ndarray:
        return (action.reshape(-1, *self.shape) + self.start).astype(self.dtype, copy=False)


class Bernoulli(Distribution):
    """MultiBinary(k): independent bits, each with a logit, D = k."""

    def __init__(self, space: MultiBinary) -> None:
        super().__init__()
        self.shape = space.shape
        self.num_inputs = self.num_parts = math.prod(space.shape)

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return (torch.rand(x.shape, generator=generator, device=x.device) < x.sigmoid()).to(x.dtype)

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return (x > 0).to(x.dtype)

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        log_on, log_off = functional.logsigmoid(x), functional.logsigmoid(-x)
        return torch.where(action > 0.5, log_on, log_off), -(x.sigmoid() * log_on + (-x).sigmoid() * log_off)

    def to_env(self, action: np.ndarray) -> np.ndarray:
        return action.reshape(-1, *self.shape).astype(np.int8)


class DiagonalGaussian(Distribution):
    """Box, one Gaussian per dimension with a free log σ; the environment gets the sample clipped to the bounds, D = dimensions."""

    def __init__(self, space: Box, log_std_init: float = 0.0) -> None:
        super().__init__()
        self.shape, self.low_bound, self.high_bound = space.shape, space.low, space.high
        self.num_inputs = self.num_parts = math.prod(space.shape)
        self.log_std = nn.Parameter(torch.full((self.num_inputs,), float(log_std_init)))

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return self.draw(x, self.noise(x, generator))

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        """Noise of the shape of x with the policy's σ."""
        return self.log_std.exp() * torch.empty_like(x).normal_(generator=generator)

    def draw(self, x: Any, noise: Any) -> Any:
        """The action for means and noise, arrays or tensors alike."""
        return x + noise

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return x

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        log_std = self.log_std.to(x.dtype)
        z = (action - x) * (-log_std).exp()
        log_prob = -0.5 * z.square() - (log_std + 0.5 * math.log(2 * math.pi))
        return log_prob, (log_std + 0.5 * math.log(2 * math.pi * math.e)).expand_as(x)

    def to_env(self, action: np.ndarray) -> np.ndarray:
        return np.clip(action.reshape(-1, *self.shape), self.low_bound, self.high_bound)


class TanhGaussian(DiagonalGaussian):
    """Box, squashed: a = low + (tanh u + 1) / 2 · (high − low) with u Gaussian. The action kept is u, its density is that of a.

    log π(a) = log N(u) − log (high − low) / 2 − 2 (log 2 − u − softplus(−2u)) per dimension (Haarnoja et al. 2018, app. C).
    """

    nodes: Tensor
    node_weights: Tensor
    log_half_range: Tensor

    def __init__(self, space: Box, log_std_init: float = 0.0) -> None:
        super().__init__(space, log_std_init)
        if not space.is_bounded():
            raise SettingError(f"action_dist tanh_normal needs a bounded Box, got {short(space)}; use clipped_normal")
        nodes, weights = np.polynomial.hermite_e.hermegauss(16)
        self.register_buffer("nodes", torch.as_tensor(nodes, dtype=torch.float32), persistent=False)
        self.register_buffer("node_weights", torch.as_tensor(weights / weights.sum(), dtype=torch.float32), persistent=False)
        half_range = torch.as_tensor((space.high - space.low) / 2, dtype=torch.float32).flatten()
        self.register_buffer("log_half_range", half_range.log(), persistent=False)

    def _log_derivative(self, u: Tensor) -> Tensor:
        return 2 * (math.log(2) - u - functional.softplus(-2 * u))

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        log_prob, entropy = super().evaluate(x, action)
        # H(a) = H(u) + E[log |da/du|]; the expectation by Gauss-Hermite quadrature
        u = x.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * self.nodes
        stretch = self._log_derivative(u) @ self.node_weights.to(x.dtype)
        return log_prob - self._log_derivative(action) - self.log_half_range, entropy + stretch + self.log_half_range

    def to_env(self, action: np.ndarray) -> np.ndarray:
        unit = (np.tanh(action.reshape(-1, *self.shape)) + 1) / 2
        return np.clip(self.low_bound + unit * (self.high_bound - self.low_bound), self.low_bound, self.high_bound)  # bounds round


class Joint(Distribution):
    """Dict or Tuple: independent parts; actions and masks are trees of the space's shape, D is the sum of theirs."""

    def __init__(self, space: Dict | Tuple, parts: Any) -> None:
        super().__init__()
        keys = list(space) if isinstance(space, Dict) else None
        self.parts: Any = nn.ModuleList(parts)
        self.num_inputs = sum(part.num_inputs for part in parts)
        self.num_parts = sum(part.num_parts for part in parts)
        self.keys = keys

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split([part.num_inputs for part in self.parts], -1)

    def _children(self, tree: Tree) -> list[Tree]:
        if isinstance(tree, tuple) and not tree:
            return [()] * len(self.parts)
        return list(tree) if self.keys is None else [tree[key] for key in self.keys]

    def _join(self, children: list[Tree]) -> Tree:
        return tuple(children) if self.keys is None else dict(zip(self.keys, children, strict=True))

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tree:
        masks = self._children(mask)
        return self._join([p.sample(i, m, generator) for p, i, m in zip(self.parts, self._split(x), masks, strict=True)])

    def mode(self, x: Tensor, mask: Tree = ()) -> Tree:
        return self._join([p.mode(i, m) for p, i, m in zip(self.parts, self._split(x), self._children(mask), strict=True)])

    def evaluate(self, x: Tensor, action: Tree, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        rows = zip(self.parts, self._split(x), self._children(action), self._children(mask), strict=True)
        log_prob, entropy = zip(*(part.evaluate(i, a, m) for part, i, a, m in rows), strict=True)
        return torch.cat(log_prob, -1), torch.cat(entropy, -1)

    def to_env(self, action: Tree) -> Tree:
        return self._join([part.to_env(child) for part, child in zip(self.parts, self._children(action), strict=True)])


def make_distribution(space: Space, action_dist: str = "clipped_normal", log_std_init: float = 0.0) -> Distribution:
    """The distribution of an action space.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, Box, or a nested Dict or Tuple of these.
        action_dist: for Box, `clipped_normal` or `tanh_normal`.
        log_std_init: first value of a Gaussian's log σ.

    Raises:
        SettingError: a space without a distribution.
    """
    check_choice("action_dist", action_dist, ("clipped_normal", "tanh_normal"))
    if isinstance(space, Dict | Tuple) and len(space):
        children = space.values() if isinstance(space, Dict) else space
        return Joint(space, [make_distribution(child, action_dist, log_std_init) for child in children])
    if isinstance(space, Discrete):
        return Categorical(space)
    if isinstance(space, MultiDiscrete):
        return MultiCategorical(space)
    if isinstance(space, MultiBinary):
        return Bernoulli(space)
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        return (DiagonalGaussian if action_dist == "clipped_normal" else TanhGaussian)(space, log_std_init)
    raise SettingError(
        f"the action space {short(space)} is not supported; use Discrete, MultiDiscrete, MultiBinary, a Box of floats, Dict or Tuple"
    )


def _masked(logits: Tensor, mask: Tree) -> Tensor:
    """Rule out the places where the mask is False; an empty mask `()` allows all."""
    return logits if isinstance(mask, tuple) else logits.masked_fill(~mask, torch.finfo(logits.dtype).min)


def _gumbel(logits: Tensor, generator: Generator | None) -> Tensor:
    """Gumbel noise, −log of exponential noise: the argmax of logits + noise is a sample of their softmax."""
    return torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
