"""Gaussians over Box actions, clipped or squashed to the bounds."""

import math
from typing import TypeVar

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Generator, Tensor, nn
from torch.nn import functional

from lightning_rl.distributions.distribution import Distribution, cast, like
from lightning_rl.errors import SettingError
from lightning_rl.spaces import short
from lightning_rl.types import Tree

Array = TypeVar("Array", np.ndarray, Tensor)
LOG_STD_RANGE = (-20.0, 2.0)
MAX_TANH = 1 - 1e-6
"""Actions are clipped to this absolute value before atanh."""
LOGISTIC_STDS = (0.51071435, 0.75944180, 1.12372807, 1.65104166)
LOGISTIC_WEIGHTS = (0.14929469, 0.50147057, 0.31281141, 0.03642332)
"""Gaussians whose mixture v is nearly logistic with scale 1/2, so that log cosh u + log 2 = E|u + v| up to 4e-6 for all u.

It is exact for the logistic distribution, whose density is half the second derivative of log cosh.
"""
LOG_PROB_CONSTANT = 0.5 * math.log(2 * math.pi) + 2 * math.log(2)


class Continuous(Distribution):
    """A distribution over a Box."""

    def __init__(self, space: Box) -> None:
        super().__init__()
        self.num_inputs = self.num_parts = self.num_features = math.prod(space.shape)

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        """Sample the noise `[..., D]` of an action."""
        raise NotImplementedError

    def draw(self, x: Array, noise: Array) -> Array:
        """Return the action for x and noise, arrays or tensors."""
        raise NotImplementedError

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return self.draw(x, self.noise(x, generator))

    def unit(self, action: Tensor) -> Tensor:
        """Scale sampled actions so that the environment's bounds are -1 and 1."""
        raise NotImplementedError

    def drawn_error(self, x: Tensor, action: Tensor, generator: Generator | None = None) -> Tensor:
        """Return (ã − a)² `[..., D]` of a sampled action ã, both scaled by `unit`. Without squashing, its mean is (μ − a)² + σ²."""
        return (self.unit(self.sample(x, (), generator)) - self.unit(action)).square()

    def prediction_loss(self, x: Tensor, action: Tensor) -> Tensor:
        return (x - self.features(action)).square().sum(-1)


class Gaussian(Continuous):
    """One Gaussian per dimension, with mean x and a learned log σ that does not depend on x."""

    def __init__(self, space: Box, log_std_init: float = 0.0) -> None:
        super().__init__(space)
        self.log_std = nn.Parameter(torch.full((self.num_inputs,), float(log_std_init)))

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        return self.log_std.exp() * torch.empty_like(x).normal_(generator=generator)

    def draw(self, x: Array, noise: Array) -> Array:
        return x + noise

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and log σ."""
        return x, self.log_std.to(x.dtype)

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return self.moments(x)[0]

    def evaluate_gaussian(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of a sample and the entropy, each `[..., D]`."""
        mean, log_std = self.moments(x)
        z = (action - mean) * (-log_std).exp()
        log_prob = -0.5 * z.square() - (log_std + 0.5 * math.log(2 * math.pi))
        return log_prob, (log_std + 0.5 * math.log(2 * math.pi * math.e)).expand_as(mean)

    def densities(self, x: Tensor, mask: Tree = ()) -> list[torch.distributions.Distribution]:
        mean, log_std = self.moments(x)
        return [torch.distributions.Normal(mean, log_std.exp().expand_as(mean), validate_args=False)]


class DiagonalGaussian(Gaussian):
    """A Gaussian whose samples are clipped to the bounds for the environment."""

    def __init__(self, space: Box, log_std_init: float = 0.0) -> None:
        super().__init__(space, log_std_init)
        self.shape, self.low_bound, self.high_bound = space.shape, space.low, space.high
        with np.errstate(over="ignore"):
            self.bounded = bool(np.isfinite(space.high.astype(np.float32) - space.low.astype(np.float32)).all())

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        return self.evaluate_gaussian(x, action)

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        low, high = self._bounds(x)
        normal = low if self.bounded else self.noise(x, generator)
        uniform = low + (high - low) * torch.empty_like(x).uniform_(generator=generator)
        return torch.where((high - low).isfinite(), uniform, normal)

    def _bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low, high = (like(x, bound).to(x.dtype).flatten() for bound in (self.low_bound, self.high_bound))
        return low, high

    def unit(self, action: Tensor) -> Tensor:
        low, high = self._bounds(action)
        width = high - low
        return torch.where(width.isfinite(), 2 * (action - low) / width.clamp(min=1e-12) - 1, action)

    def features(self, action: Tensor) -> Tensor:
        low, high = self._bounds(action)
        return torch.where((high - low).isfinite(), self.unit(action).clamp(-1, 1), action.clamp(low, high))

    def to_env(self, action: Array) -> Array:
        action = cast(action.reshape(-1, *self.shape), self.low_bound.dtype)
        return action.clip(like(action, self.low_bound), like(action, self.high_bound))

    def from_env(self, action: np.ndarray) -> np.ndarray:
        return action.reshape(len(action), -1)


class TanhGaussian(Gaussian):
    """A Gaussian u squashed to tanh u in [-1, 1] and scaled to the bounds. The stored action is u; its density is that of tanh u.

    log π(a) = log N(u) − 2 (log 2 − u − softplus(−2u)) per dimension (Haarnoja et al. 2018, app. C). This is the density in [-1, 1],
    whatever the bounds of the Box, so that scaling an environment's actions does not change the entropy.
    """

    noise_scales: Tensor
    noise_weights: Tensor

    def __init__(self, space: Box, log_std_init: float = 0.0) -> None:
        super().__init__(space, log_std_init)
        self.bounds = Bounds(space, "action_dist tanh_normal", "clipped_normal")
        self.register_buffer("noise_scales", math.sqrt(2) * torch.tensor(LOGISTIC_STDS), persistent=False)
        self.register_buffer("noise_weights", 2 / math.sqrt(math.pi) * torch.tensor(LOGISTIC_WEIGHTS), persistent=False)

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        log_prob, entropy = self.evaluate_gaussian(x, action)
        # H(a) = H(u) + E[log (1 − tanh² u)] = H(u) + 2 log 2 − 2 E|u + v|
        # for a Gaussian with mean μ and scale s = √2 σ: √π E|w| = s (exp(−z²) + √π z erf z), z = μ / s
        mean, log_std = self.moments(x)
        scale = torch.hypot((log_std + 0.5 * math.log(2)).exp().unsqueeze(-1), self.noise_scales)  # of u + v
        z = mean.unsqueeze(-1) / scale
        distance = torch.addcmul((-z.square()).exp(), z, z.erf(), value=math.sqrt(math.pi)) * (scale * self.noise_weights)
        return log_prob - _log_tanh_derivative(action), entropy + 2 * math.log(2) - distance.sum(-1)

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return torch.empty_like(x).uniform_(-MAX_TANH, MAX_TANH, generator=generator).atanh()

    def unit(self, action: Tensor) -> Tensor:
        return action.tanh()

    features = unit

    def to_env(self, action: Array) -> Array:
        return self.bounds.scale(_tanh(action))

    def from_env(self, action: np.ndarray) -> np.ndarray:
        return np.arctanh(np.clip(self.bounds.unscale(action), -MAX_TANH, MAX_TANH))


class UnitActions(Continuous):
    """A distribution whose actions are stored in [-1, 1], as critics see them, and scaled to the bounds for the environment."""

    def __init__(self, space: Box, needed_by: str) -> None:
        super().__init__(space)
        self.bounds = Bounds(space, needed_by)

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.num_parts).uniform_(-1, 1, generator=generator)

    def unit(self, action: Tensor) -> Tensor:
        return action

    features = unit

    def to_env(self, action: Array) -> Array:
        return self.bounds.scale(action)

    def from_env(self, action: np.ndarray) -> np.ndarray:
        return self.bounds.unscale(action)


class SquashedGaussian(UnitActions):
    """A squashed Gaussian like `TanhGaussian`, with mean and log σ both from x; log σ is clipped to [-20, 2]."""

    def __init__(self, space: Box) -> None:
        super().__init__(space, "a policy of SAC, TQC, CrossQ or CQL")
        self.num_inputs = 2 * self.num_parts

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.num_parts).normal_(generator=generator)

    def draw(self, x: Array, noise: Array) -> Array:
        mean, log_std = x[..., : self.num_parts], x[..., self.num_parts :].clip(*LOG_STD_RANGE)
        return _tanh(mean + (np.exp(log_std) if isinstance(log_std, np.ndarray) else log_std.exp()) * noise)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and log σ before tanh."""
        mean, log_std = x.chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD_RANGE)

    def rsample(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return a reparameterized action in [-1, 1] from standard normal noise, and its log-probability, each `[..., D]`."""
        mean, log_std = self.moments(x)
        u = mean + log_std.exp() * noise
        # log N(u) − log (1 − tanh² u), with all constants combined
        return u.tanh(), 2 * (u + functional.softplus(-2 * u)) - 0.5 * noise.square() - log_std - LOG_PROB_CONSTANT

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return self.moments(x)[0].tanh()

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        """Return the log-probability of an action, clipped to ±(1 − 1e-6), and minus that of a new sample as an estimate of the entropy."""
        mean, log_std = self.moments(x)
        u = action.float().clamp(-MAX_TANH, MAX_TANH).atanh()  # bfloat16 would round to 1
        log_prob, new = (self.rsample(x, noise)[1] for noise in ((u - mean) * (-log_std).exp(), self.noise(x, None)))
        return log_prob, -new


class UnitGaussian(UnitActions, Gaussian):
    """A Gaussian with mean tanh x and a learned log σ, clipped to [-20, 2]; samples are clipped to [-1, 1].

    The density is that of the Gaussian without bounds, which offline methods fit to actions that were recorded at a bound.
    """

    def __init__(self, space: Box, log_std_init: float = 0.0) -> None:
        super().__init__(space, "a policy of IQL or AWAC")
        nn.init.constant_(self.log_std, log_std_init)

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        return torch.empty_like(x).normal_(generator=generator)

    def draw(self, x: Array, noise: Array) -> Array:
        std = self.log_std.clamp(*LOG_STD_RANGE).exp()
        return (_tanh(x) + (std.detach().numpy() if isinstance(noise, np.ndarray) else std) * noise).clip(-1, 1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), self.log_std.clamp(*LOG_STD_RANGE).to(x.dtype)

    def evaluate(self, x: Tensor, action: Tensor, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        return self.evaluate_gaussian(x, action)


class NoisyAction(UnitActions):
    """The action x in [-1, 1], with Gaussian exploration noise of standard deviation `sigma`."""

    sigma = 0.0

    def __init__(self, space: Box) -> None:
        super().__init__(space, "TD3")

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        return torch.empty_like(x).normal_(generator=generator) * self.sigma

    def draw(self, x: Array, noise: Array) -> Array:
        return (x + noise).clip(-1, 1)

    def mode(self, x: Tensor, mask: Tree = ()) -> Tensor:
        return x


class Bounds:
    """Scales actions between [-1, 1] and the bounds of a Box.

    Raises `SettingError`: the Box has no bounds, or low is not below high in a dimension; the message names what needs the bounds
    (`needed_by`) and an alternative (`instead`).
    """

    def __init__(self, space: Box, needed_by: str, instead: str = "PPO") -> None:
        if not space.is_bounded():
            raise SettingError(f"{needed_by} needs a bounded Box, got {short(space)}; use {instead}")
        for place in np.argwhere(space.low >= space.high).tolist():
            raise SettingError(f"{needed_by} needs a Box with low < high, got {space.low[*place]:g} for both at {place}")
        self.shape, self.low, self.high = space.shape, space.low, space.high
        with np.errstate(over="ignore"):
            for place in np.argwhere(np.isinf(space.high - space.low)).tolist():
                wide = f"{space.low[*place]:g} to {space.high[*place]:g} at {place}"
                raise SettingError(f"{needed_by} needs a Box whose bounds have a difference, got {wide}; narrow them, or use {instead}")

    def scale(self, unit: Array) -> Array:
        """Scale actions `[N, D]` in [-1, 1] to the environment's `[N, *shape]`."""
        share = (unit.reshape(-1, *self.shape) + 1) / 2
        if isinstance(share, np.ndarray):
            scaled: np.ndarray = (self.low + share * (self.high - self.low)).clip(self.low, self.high)  # rounding may exceed the bounds
            return scaled.astype(self.low.dtype, copy=False)
        low, high = like(share, self.low), like(share, self.high)
        return (low + share * (high - low)).clip(low, high).to(low.dtype)

    def unscale(self, action: np.ndarray) -> np.ndarray:
        """Invert `scale`."""
        unit = 2 * (action - self.low) / (self.high - self.low) - 1
        return unit.reshape(len(action), -1).astype(np.float32)


def _tanh(x: Array) -> Array:
    return np.tanh(x) if isinstance(x, np.ndarray) else x.tanh()


def _log_tanh_derivative(u: Tensor) -> Tensor:
    """Return log (1 − tanh² u), stable for all u."""
    return 2 * (math.log(2) - u - functional.softplus(-2 * u))
