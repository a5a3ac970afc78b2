"""The distribution of any action space, and the joint distribution of Dict and Tuple spaces."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from torch import Generator, Tensor, nn

from lightning_rl.distributions.distribution import Bernoulli, Categorical, Distribution, EpsilonGreedy, MultiCategorical, split_mask
from lightning_rl.distributions.gaussian import DiagonalGaussian, NoisyAction, SquashedGaussian, TanhGaussian, UnitGaussian
from lightning_rl.distributions.state_dependent import (
    SDE,
    StateDependent,
    StateDependentGaussian,
    StateDependentSquashed,
    StateDependentTanhGaussian,
)
from lightning_rl.errors import SettingError, check_choice
from lightning_rl.spaces import short
from lightning_rl.types import Tree

EXPLORING: dict[str, type[StateDependent]] = {
    "clipped_normal": StateDependentGaussian,
    "tanh_normal": StateDependentTanhGaussian,
    "squashed_normal": StateDependentSquashed,
}
"""State-dependent variants of the Gaussians."""


class Joint(Distribution):
    """Dict or Tuple: independent parts. Actions are trees like the space; D and M are the sums over the parts."""

    parts: Sequence[Distribution]

    def __init__(self, space: Dict | Tuple, parts: Sequence[Distribution]) -> None:
        super().__init__()
        self.keys = list(space) if isinstance(space, Dict) else None
        self.parts = nn.ModuleList(parts)  # type: ignore[assignment]
        self.num_inputs = sum(part.num_inputs for part in parts)
        self.num_parts = sum(part.num_parts for part in parts)
        self.num_features = sum(part.num_features for part in parts)
        self.mask_width = sum(part.mask_width for part in parts)
        self.names = [
            f"{key}.{name}" if name else str(key)
            for key, part in zip(self.keys or range(len(parts)), parts, strict=True)
            for name in part.names or [""]
        ]

    def _inputs(self, x: Tensor, mask: Tree) -> Iterable[tuple[Distribution, Tensor, Tree]]:
        """Return each part with its slice of x and of the mask."""
        masks = split_mask(mask, [part.mask_width for part in self.parts])
        return zip(self.parts, x.split([part.num_inputs for part in self.parts], -1), masks, strict=True)

    def _children(self, tree: Tree) -> Iterable[tuple[Distribution, Tree]]:
        """Return each part with its child of a tree."""
        return zip(self.parts, tree if self.keys is None else [tree[key] for key in self.keys], strict=True)

    def _join(self, children: Iterable[Tree]) -> Tree:
        return tuple(children) if self.keys is None else dict(zip(self.keys, children, strict=True))

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tree:
        return self._join(part.sample(own_x, legal, generator) for part, own_x, legal in self._inputs(x, mask))

    def mode(self, x: Tensor, mask: Tree = ()) -> Tree:
        return self._join(part.mode(own_x, legal) for part, own_x, legal in self._inputs(x, mask))

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tree:
        return self._join(part.random(own_x, legal, generator) for part, own_x, legal in self._inputs(x, mask))

    def evaluate(self, x: Tensor, action: Tree, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        rows = zip(self._inputs(x, mask), self._children(action), strict=True)
        log_prob, entropy = zip(*(part.evaluate(row, child, legal) for (part, row, legal), (_, child) in rows), strict=True)
        return torch.cat(log_prob, -1), torch.cat(entropy, -1)

    def densities(self, x: Tensor, mask: Tree = ()) -> list[torch.distributions.Distribution]:
        return [density for part, own_x, legal in self._inputs(x, mask) for density in part.densities(own_x, legal)]

    def to_env(self, action: Tree) -> Tree:
        return self._join(part.to_env(child) for part, child in self._children(action))

    def from_env(self, action: Tree) -> Tree:
        return self._join(part.from_env(child) for part, child in self._children(action))

    def features(self, action: Tree) -> Tensor:
        return torch.cat([part.features(child) for part, child in self._children(action)], -1)

    def prediction_loss(self, x: Tensor, action: Tree) -> Tensor:
        rows = zip(self._children(action), x.split([part.num_features for part in self.parts], -1), strict=True)
        return torch.stack([part.prediction_loss(row, child) for (part, child), row in rows]).sum(0)

    def flat(self, tree: Tree) -> list[Tree]:
        return [leaf for part, child in self._children(tree) for leaf in part.flat(child)]

    def leaves(self) -> list[Distribution]:
        return [leaf for part in self.parts for leaf in part.leaves()]


def make_distribution(
    space: Space, action_dist: str = "clipped_normal", log_std_init: float = 0.0, sde: SDE | None = None, num_features: int = 0
) -> Distribution:
    """Return the distribution of an action space.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, Box, or a nested Dict or Tuple of these.
        action_dist: distribution of Box, `clipped_normal` or `tanh_normal` (on-policy), `squashed_normal` (SAC), `noisy` (TD3) or
            `unit_normal` (IQL, AWAC).
        log_std_init: initial log σ, if σ does not depend on the observation.
        sde: state-dependent exploration of Box actions.
        num_features: L, the policy's features for `sde`: x of a Box is `[..., A + L]`, see `FeatureHead`.

    Raises:
        SettingError: there is no distribution for the space.
    """
    boxes: dict[str, Callable[[Box], Distribution]] = {
        "clipped_normal": lambda box: DiagonalGaussian(box, log_std_init),
        "tanh_normal": lambda box: TanhGaussian(box, log_std_init),
        "squashed_normal": SquashedGaussian,
        "noisy": NoisyAction,
        "unit_normal": lambda box: UnitGaussian(box, log_std_init),
    }
    if sde is not None:
        boxes = {name: partial(cls, log_std_init=log_std_init, num_features=num_features, sde=sde) for name, cls in EXPLORING.items()}
    check_choice("action_dist", action_dist, boxes)
    if isinstance(space, Box | MultiDiscrete | MultiBinary) and 0 in space.shape:
        raise SettingError(f"the action space {short(space)} is empty; an algorithm needs something to do")
    if isinstance(space, Dict | Tuple) and len(space):
        children: Iterable[Space] = space.values() if isinstance(space, Dict) else space
        return Joint(space, [make_distribution(child, action_dist, log_std_init, sde, num_features) for child in children])
    if isinstance(space, Discrete):
        return Categorical(space)
    if isinstance(space, MultiDiscrete):
        return MultiCategorical(space)
    if isinstance(space, MultiBinary):
        return Bernoulli(space)
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        return boxes[action_dist](space)
    raise SettingError(
        f"the action space {short(space)} is not supported; use Discrete, MultiDiscrete, MultiBinary, a Box of floats, Dict or Tuple"
    )


def make_epsilon_greedy(space: Space) -> EpsilonGreedy:
    """Return the ε-greedy distribution of DQN and PQN. Raises `SettingError`: the space is not Discrete."""
    if not isinstance(space, Discrete):
        instead = "SAC, TD3 or PPO" if isinstance(space, Box) else "SAC or PPO"
        raise SettingError(f"DQN and PQN need a Discrete action space, got {short(space)}; use {instead}")
    return EpsilonGreedy(space)


def check_box_actions(algorithm: str, space: Space) -> None:
    """Raise `SettingError` unless all actions are continuous."""
    if not isinstance(space, Box):
        raise SettingError(f"{algorithm} needs a Box action space, got {short(space)}; use SAC or PPO (offline: IQL or AWAC)")
