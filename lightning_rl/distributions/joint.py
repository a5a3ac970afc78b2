"""The distribution of an action space, whatever its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from torch import Generator, Tensor, nn

from lightning_rl.distributions.distribution import Bernoulli, Categorical, Distribution, EpsilonGreedy, MultiCategorical, split_mask
from lightning_rl.distributions.gaussian import DiagonalGaussian, NoisyAction, SquashedGaussian, TanhGaussian
from lightning_rl.errors import SettingError, check_choice
from lightning_rl.spaces import short
from lightning_rl.types import Tree


class Joint(Distribution):
    """Dict or Tuple: independent parts; actions are trees of the space's shape, D and M are the sums of theirs."""

    def __init__(self, space: Dict | Tuple, parts: Any) -> None:
        super().__init__()
        keys = list(space) if isinstance(space, Dict) else None
        self.parts: Any = nn.ModuleList(parts)
        self.num_inputs = sum(part.num_inputs for part in parts)
        self.num_parts = sum(part.num_parts for part in parts)
        self.mask_width = sum(part.mask_width for part in parts)
        self.keys = keys
        self.names = [
            f"{key}.{name}" if name else str(key)
            for key, part in zip(keys or range(len(parts)), parts, strict=True)
            for name in part.names or [""]
        ]

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split([part.num_inputs for part in self.parts], -1)

    def _masks(self, mask: Tree) -> Sequence[Tree]:
        return split_mask(mask, [part.mask_width for part in self.parts])

    def _children(self, tree: Tree) -> list[Tree]:
        return list(tree) if self.keys is None else [tree[key] for key in self.keys]

    def _join(self, children: list[Tree]) -> Tree:
        return tuple(children) if self.keys is None else dict(zip(self.keys, children, strict=True))

    def sample(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tree:
        masks = self._masks(mask)
        return self._join([p.sample(i, m, generator) for p, i, m in zip(self.parts, self._split(x), masks, strict=True)])

    def mode(self, x: Tensor, mask: Tree = ()) -> Tree:
        return self._join([p.mode(i, m) for p, i, m in zip(self.parts, self._split(x), self._masks(mask), strict=True)])

    def evaluate(self, x: Tensor, action: Tree, mask: Tree = ()) -> tuple[Tensor, Tensor]:
        rows = zip(self.parts, self._split(x), self._children(action), self._masks(mask), strict=True)
        log_prob, entropy = zip(*(part.evaluate(i, a, m) for part, i, a, m in rows), strict=True)
        return torch.cat(log_prob, -1), torch.cat(entropy, -1)

    def to_env(self, action: Tree) -> Tree:
        return self._join([part.to_env(child) for part, child in zip(self.parts, self._children(action), strict=True)])

    def from_env(self, action: Tree) -> Tree:
        return self._join([part.from_env(child) for part, child in zip(self.parts, self._children(action), strict=True)])

    @property
    def num_features(self) -> int:
        return sum(part.num_features for part in self.parts)

    def features(self, action: Tree) -> Tensor:
        return torch.cat([part.features(child) for part, child in zip(self.parts, self._children(action), strict=True)], -1)

    def prediction_loss(self, x: Tensor, action: Tree) -> Tensor:
        parts = x.split([part.num_features for part in self.parts], -1)
        rows = zip(self.parts, parts, self._children(action), strict=True)
        return torch.stack([part.prediction_loss(each, child) for part, each, child in rows]).sum(0)

    def random(self, x: Tensor, mask: Tree = (), generator: Generator | None = None) -> Tree:
        masks = self._masks(mask)
        return self._join([p.random(i, m, generator) for p, i, m in zip(self.parts, self._split(x), masks, strict=True)])

    def flat(self, tree: Tree) -> list[Tree]:
        return [leaf for part, child in zip(self.parts, self._children(tree), strict=True) for leaf in part.flat(child)]

    def leaves(self) -> list[Any]:
        return [leaf for part in self.parts for leaf in part.leaves()]


def make_distribution(space: Space, action_dist: str = "clipped_normal", log_std_init: float = 0.0) -> Distribution:
    """The distribution of an action space.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, Box, or a nested Dict or Tuple of these.
        action_dist: for Box, `clipped_normal` or `tanh_normal` (on-policy), `squashed_normal` (SAC) or `noisy` (TD3).
        log_std_init: first value of log σ where it does not depend on the observation.

    Raises:
        SettingError: a space without a distribution.
    """
    boxes: dict[str, Callable[[Box], Distribution]] = {
        "clipped_normal": lambda box: DiagonalGaussian(box, log_std_init),
        "tanh_normal": lambda box: TanhGaussian(box, log_std_init),
        "squashed_normal": SquashedGaussian,
        "noisy": NoisyAction,
    }
    check_choice("action_dist", action_dist, boxes)
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
        return boxes[action_dist](space)
    raise SettingError(
        f"the action space {short(space)} is not supported; use Discrete, MultiDiscrete, MultiBinary, a Box of floats, Dict or Tuple"
    )


def make_epsilon_greedy(space: Space) -> EpsilonGreedy:
    """The ε-greedy choice of DQN.

    Raises:
        SettingError: a space that is not Discrete.
    """
    if not isinstance(space, Discrete):
        instead = "SAC, TD3 or PPO" if isinstance(space, Box) else "SAC or PPO"
        raise SettingError(f"DQN needs a Discrete action space, got {short(space)}; use {instead}")
    return EpsilonGreedy(space)


def check_box_actions(algorithm: str, space: Space) -> None:
    """Raise `SettingError` unless all actions are continuous."""
    if not isinstance(space, Box):
        raise SettingError(f"{algorithm} needs a Box action space, got {short(space)}; use SAC or PPO")
