"""A policy as one function of tensors, which exporters can trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lightning_rl.distributions.distribution import cast
from lightning_rl.spaces import MASK, Spaces, allocate, observation_leaves, samples
from lightning_rl.types import Tree, tree_leaves, tree_map, tree_to_numpy, tree_to_torch


class Port(NamedTuple):
    """An input or output `[N, *shape]`.  role: observation, action_mask, memory or action.  dtype: numpy's name of it."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str


class PolicyGraph(nn.Module):
    """`Policy.act`, deterministic, from tensors `[N, ...]` to tensors `[N, ...]`.

    Inputs are the leaves of a raw observation in the environment's own dtypes, a mask `[N, M]` where the environment rules out actions, and
    the leaves of the memory, zeros in a row that begins an episode. Outputs are the leaves of the environment's action, and those of the
    memory for the next step.

    Args:
        network: of an algorithm, with its normalizer inside.
        spaces: of the environment it was trained on.

    Attributes: inputs and outputs, the ports in order.
    """

    def __init__(self, network: Any, spaces: Spaces) -> None:
        super().__init__()
        self.network, self.masked = network.eval(), spaces.masked
        self.stored, self.memory = allocate(spaces.observation, 1), tree_to_numpy(network.initial_memory(1))
        leaves = [leaf.name for leaf in observation_leaves(spaces.observation)]
        states = [f"memory.{i}" for i in range(len(tree_leaves(self.memory)))]
        actions = [f"action.{name}" for name in network.distribution.names] or ["action"]
        roles = ["observation"] * len(leaves) + [MASK] * spaces.masked + ["memory"] * len(states)
        names = unique([*leaves, *[MASK] * spaces.masked, *states, *actions, *(f"next_{state}" for state in states)])
        given = self.example(spaces, 1)
        taken = tree_to_numpy(self(*tree_to_torch(given)))
        self.inputs = _ports(names, roles, given)
        self.outputs = _ports(names[len(given) :], ["action"] * len(actions) + ["memory"] * len(states), taken)

    def example(self, spaces: Spaces, num: int) -> tuple[np.ndarray, ...]:
        """Inputs at `num` random observations which begin episodes, all actions legal."""
        mask, memory = spaces.masks(num), self.network.initial_memory(num)
        return tuple(tree_leaves((samples(spaces.observation, num), mask, tree_to_numpy(memory))))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        rest = iter(inputs)
        obs = tree_map(lambda leaf: cast(next(rest), leaf.dtype), self.stored)
        mask: Tree = next(rest) if self.masked else ()
        memory = tree_map(lambda _: next(rest), self.memory)
        action, memory = self.network.sample(obs, memory, None, mask, deterministic=True)
        distribution = self.network.distribution
        return tuple(leaf.detach() for leaf in (*distribution.flat(distribution.to_env(action)), *tree_leaves(memory)))


def unique(names: Iterable[str]) -> list[str]:
    """Names of which none comes twice: a later one gets a number."""
    taken: list[str] = []
    for name in names:
        found = name
        number = 2
        while found in taken:
            found, number = f"{name}_{number}", number + 1
        taken.append(found)
    return taken


def _ports(names: list[str], roles: list[str], arrays: Iterable[np.ndarray]) -> list[Port]:
    leaves: Iterator[Any] = zip(names, roles, arrays, strict=False)
    return [Port(name, role, array.shape[1:], array.dtype.name) for name, role, array in leaves]
