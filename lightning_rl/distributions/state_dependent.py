"""Generalized state-dependent exploration, gSDE (Raffin et al. 2021, https://arxiv.org/abs/2005.05719).

The noise of an action is a function of the state that stays the same for several steps, so that robots move smoothly and explore far:

    a = μ(s) + θᵀ z(s),   θ ~ N(0, σ²) for n steps                (eqs. 8 and 9)

z `[L]` are the features before the policy's last layer, and σ `[L, A]` is learned. For a single step, this is a Gaussian with standard
deviation σ̂(s) = √(z² σ²), which losses use (eq. 10).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Generator, Tensor, nn

from lightning_rl.distributions.distribution import Distribution
from lightning_rl.distributions.gaussian import Continuous, DiagonalGaussian, SquashedGaussian, TanhGaussian
from lightning_rl.errors import SettingError
from lightning_rl.types import State, Tree

MIN_VARIANCE = 1e-6
"""Added to the variance, which is 0 if all features are 0."""
MAX_MEAN = 2.0
"""Maximum absolute mean before tanh; noise would hardly change an action beyond it."""


@dataclass(frozen=True)
class SDE:
    """Settings of gSDE.

    Args:
        sample_freq: n, the number of steps until θ is sampled again.
        use_expln: above 1, σ grows as 1 + log(1 + log σ) instead of exponentially.
        full_std: σ `[L, A]`; otherwise `[L, 1]`, the same for all actions.
        learn_features: propagate gradients of σ̂ to the features z.
    """

    sample_freq: int = 1
    use_expln: bool = False
    full_std: bool = True
    learn_features: bool = False


class StateDependent(Continuous):
    """A mixin that gives the Gaussian after it in the base classes a state-dependent σ̂(s); x `[..., A + L]` is the mean and the features.

    Without `Exploration`, the noise of each row comes from its own θ.
    """

    exploration: Tensor | None = None
    """θ / σ of each row `[N, L, A]`, while an actor samples for environments."""

    def __init__(self, space: Box, log_std_init: float, num_features: int, sde: SDE) -> None:
        super().__init__(space)
        self.num_inputs, self.sde = self.num_parts + num_features, sde
        shape = (num_features, self.num_parts if sde.full_std else 1)
        self.log_std = nn.Parameter(torch.full(shape, float(log_std_init)))

    def std(self) -> Tensor:
        """Return σ `[L, A]`, or `[L, 1]`."""
        return expln(self.log_std) if self.sde.use_expln else self.log_std.exp()

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ(s) and log σ̂(s), `[..., A]` each."""
        mean, z = x[..., : self.num_parts], x[..., self.num_parts :]
        z = z if self.sde.learn_features else z.detach()
        with torch.autocast(x.device.type, enabled=False):  # which would round the sum over features
            variance = z.square() @ self.std().square()
        return mean, 0.5 * (variance + MIN_VARIANCE).log().expand_as(mean)

    def noise(self, x: Tensor, generator: Generator | None) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.num_parts).normal_(generator=generator)

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        mean, log_std = self.moments(x)
        if self.exploration is None:
            return self.draw(mean, log_std.exp() * torch.empty_like(mean).normal_(generator=generator))
        with torch.autocast(x.device.type, enabled=False):
            noise = x[..., None, self.num_parts :] @ (self.std() * self.exploration)
        return self.draw(mean, noise.squeeze(-2))

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tensor:
        return super().random(x[..., : self.num_parts], mask, generator)


class StateDependentGaussian(StateDependent, DiagonalGaussian):
    """State-dependent exploration, clipped to the bounds for the environment."""


class StateDependentTanhGaussian(StateDependent, TanhGaussian):
    """State-dependent exploration before tanh; actions are stored before tanh."""


class StateDependentSquashed(StateDependent, SquashedGaussian):
    """State-dependent exploration of soft actor-critic, squashed to [-1, 1], with means clipped before tanh."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = super().moments(x)
        return mean.clamp(-MAX_MEAN, MAX_MEAN), log_std

    def draw(self, x: Tensor, noise: Tensor) -> Tensor:  # type: ignore[override]
        return (x + noise).tanh()


def expln(x: Tensor) -> Tensor:
    """Return eˣ up to x = 0 and 1 + log(1 + x) above: positive and slowly growing."""
    return torch.where(x > 0, x.clamp(min=0).log1p() + 1, x.clamp(max=0).exp())


def state_dependent(distribution: Distribution) -> list[StateDependent]:
    """Return the parts of a distribution that explore by gSDE."""
    return [leaf for leaf in distribution.leaves() if isinstance(leaf, StateDependent)]


class FeatureHead(nn.Linear):
    """A policy's last layer for gSDE: the outputs of a linear layer, and for each Box the layer's input z after the means.

    Raises `SettingError`: no action is continuous.
    """

    def __init__(self, distribution: Distribution, num_features: int) -> None:
        leaves = distribution.leaves()
        explores = [isinstance(leaf, StateDependent) for leaf in leaves]
        if not any(explores):
            raise SettingError("use_sde adds noise to Box actions, and here all actions are choices; leave it out")
        widths = [leaf.num_parts if is_exploring else leaf.num_inputs for leaf, is_exploring in zip(leaves, explores, strict=True)]
        super().__init__(num_features, sum(widths))
        self.explores, self.widths = explores, widths

    def forward(self, z: Tensor) -> Tensor:
        parts = zip(super().forward(z).split(self.widths, -1), self.explores, strict=True)
        return torch.cat([features for part, explores in parts for features in ((part, z) if explores else (part,))], -1)


class Exploration:
    """The noise of N environments, each with its own θ for `sample_freq` steps.

    It stores θ / σ, which is standard normal, so that θ follows changes of the learned σ.

    Args:
        leaves: the distributions that explore.
        num_envs: N.
        generator: random generator of θ.
    """

    def __init__(self, leaves: Sequence[StateDependent], num_envs: int, generator: Generator) -> None:
        self.leaves, self.num_envs, self.generator = leaves, num_envs, generator
        self.steps = 0
        self.draws: list[Tensor] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Let the distributions sample one action for each environment inside the context, with a new θ if it is due."""
        if self.steps % self.leaves[0].sde.sample_freq == 0:
            self.draws = [self._normal(shape) for shape in self._shapes()]
        self.steps += 1
        for leaf, draw in zip(self.leaves, self.draws, strict=True):
            leaf.exploration = draw
        try:
            yield
        finally:
            for leaf in self.leaves:
                leaf.exploration = None

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device=self.generator.device).normal_(generator=self.generator)

    def _shapes(self) -> list[tuple[int, ...]]:
        return [(self.num_envs, leaf.num_inputs - leaf.num_parts, leaf.num_parts) for leaf in self.leaves]

    def get_state(self) -> State:
        """Return the state that the next step depends on, without the generator."""
        return {"steps": self.steps, "draws": [draw.cpu().numpy() for draw in self.draws]}

    def set_state(self, state: State | None) -> bool:
        """Restore a state, and return whether it fits."""
        if state is None or [np.shape(draw) for draw in state["draws"]] != (self._shapes() if state["steps"] else []):
            return False
        self.steps, self.draws = state["steps"], [torch.as_tensor(draw, device=self.generator.device) for draw in state["draws"]]
        return True
