"""Several parameter sets of one network, asked in one batch, each for an observation of its own.

Member k has row k of a matrix `[K, P]` for its parameters; all else of the network, such as its normalizer, they share. What a member says
does not depend on the others. A small perceptron is evaluated in numpy, as in `acting.py`; other networks by `torch.func.vmap`, or member
after member where they remember, as vmap knows no recurrent cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lightning_rl.networks.acting import NUMPY_ACTIVATIONS, is_plain_perceptron, numpy_normalizer
from lightning_rl.types import Tree, tree_index, tree_leaves, tree_map, tree_stack, tree_to_numpy, tree_to_torch


def flat_parameters(network: nn.Module, names: Sequence[str]) -> Tensor:
    """The named parameters of a network as one vector `[P]`."""
    return torch.cat([network.get_parameter(name).detach().flatten() for name in names])


class NumpyPopulation:
    """Members of a network that is a perceptron over a vector and remembers nothing, on the CPU.

    Args:
        network: whose weights and statistics count as they are now.
        names: of the parameters that members have of their own.
        num: K.

    Attributes: size, P; device, where its members are.
    """

    device = torch.device("cpu")

    def __init__(self, network: Any, names: Sequence[str], num: int) -> None:
        self.centre = flat_parameters(network, names).numpy()
        self.size, self.rows = len(self.centre), np.tile(self.centre, (num, 1))
        own, at = {}, 0
        for parameter in map(network.get_parameter, names):
            own[parameter] = self.rows[:, at : at + parameter.numel()].reshape(num, *parameter.shape)
            at += parameter.numel()
        self.normalize: Any = numpy_normalizer(network.normalizer)
        modules: list[Any] = [*network.perceptron().layers, nn.Identity()]
        self.layers = [
            (own[layer.weight].swapaxes(1, 2), own[layer.bias], NUMPY_ACTIVATIONS[type(after)])
            for layer, after in zip(modules[::2], modules[1::2], strict=False)
        ]

    def set(self, k: int, noise: np.ndarray) -> None:
        """Give member k the network's parameters and some noise `[P]`."""
        np.add(self.centre, noise, out=self.rows[k])

    def act(self, obs: Tree, memory: Tree, episode_start: np.ndarray) -> tuple[Tensor, Tree]:
        """The inputs `[K, num_inputs]` of the distribution at observations `[K, ...]`, arrays, and the new memory."""
        x = self.normalize(obs)[:, None]
        for weight, bias, activate in self.layers:
            x = x @ weight + bias[:, None]
            activate(x)
        return torch.from_numpy(x[:, 0]), memory


class TorchPopulation:
    """Members of any network, on its device. Arguments and methods as those of `NumpyPopulation`."""

    def __init__(self, network: Any, names: Sequence[str], num: int) -> None:
        self.network = PolicyOf(network)
        self.centre = flat_parameters(network, names)
        self.size, self.device, self.rows = len(self.centre), self.centre.device, self.centre.repeat(num, 1)
        shapes = [network.get_parameter(name).shape for name in names]
        parts = self.rows.split([shape.numel() for shape in shapes], 1)
        self.own = {f"network.{name}": part.view(num, *shape) for name, shape, part in zip(names, shapes, parts, strict=True)}

    def set(self, k: int, noise: np.ndarray) -> None:
        self.rows[k] = self.centre + torch.from_numpy(noise).to(self.centre)

    def act(self, obs: Tree, memory: Tree, episode_start: np.ndarray) -> tuple[Tensor, Tree]:
        seen, start = tree_to_torch(obs, self.device), torch.as_tensor(episode_start, device=self.device)
        x, memory = self.ask(tree_map(lambda leaf: leaf.unsqueeze(1), (seen, memory, start)))
        return x.squeeze(1), tree_map(lambda leaf: leaf.squeeze(1), memory)

    def ask(self, rows: Tree) -> tuple[Tensor, Tree]:
        """What each member says of its row, all `[K, 1, ...]`."""
        return vmap(self._ask_one)(self.own, rows)

    def _ask_one(self, own: dict[str, Tensor], row: Tree) -> tuple[Tensor, Tree]:
        return functional_call(self.network, own, row, tie_weights=False)  # or what networks share stays exchanged


class SequentialPopulation(TorchPopulation):
    """Members that are asked one after the other."""

    def ask(self, rows: Tree) -> tuple[Tensor, Tree]:
        return tree_stack([self._ask_one(tree_index(self.own, k), tree_index(rows, k)) for k in range(len(self.rows))])


class PolicyOf(nn.Module):
    """A network whose call is its `policy`."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, obs: Tree, memory: Tree, episode_start: Tensor) -> tuple[Tensor, Tree]:
        return self.network.policy(obs, memory, episode_start)


Population = NumpyPopulation | TorchPopulation


def make_population(network: Any, names: Sequence[str], num: int, obs: Tree) -> Population:
    """The cheapest one that a network allows for observations like these."""
    if tree_leaves(network.initial_memory(1)):
        return SequentialPopulation(network, names, num)
    plain = next(network.parameters()).device.type == "cpu" and is_plain_perceptron(network, obs)
    return (NumpyPopulation if plain else TorchPopulation)(network, names, num)


def draw_actions(network: Any, x: Tensor, mask: Tree, generators: Sequence[torch.Generator]) -> Tree:
    """The environments' actions for inputs `[K, num_inputs]` and masks `[K, M]`: the middle of each distribution, or a draw by a
    generator of each member's own."""
    distribution = network.distribution
    mask = tree_to_torch(mask, x.device)
    if not generators:
        return distribution.to_env(tree_to_numpy(distribution.mode(x, mask)))
    rows = [distribution.sample(x[k : k + 1], mask[k : k + 1], generator) for k, generator in enumerate(generators)]
    return distribution.to_env(tree_to_numpy(tree_map(lambda *leaves: torch.cat(leaves), rows[0], *rows[1:])))
