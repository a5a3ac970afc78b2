"""Policies that act: what their networks share, and the actors that step them cheaply during a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Generator, Tensor, nn

from lightning_rl.distributions import Distribution
from lightning_rl.distributions.distribution import masked
from lightning_rl.networks.encoders import VectorEncoder
from lightning_rl.networks.memory import NoMemory, RecurrentMemory
from lightning_rl.networks.normalization import NoNormalizer, ObservationNormalizer
from lightning_rl.types import Tree, tree_index, tree_map, tree_stack, tree_to_numpy, tree_to_torch


class Perceptron(NamedTuple):
    """The parts of a network that is as plain as this: encoder → memory → linear layers and activations in turn.

    memories: that of the policy, and any that only have to be kept up to date.
    """

    encoder: Any
    memories: list[Any]
    layers: nn.Sequential


class PolicyNetwork(nn.Module):
    """A network with a distribution of actions, conditioned on what `policy` makes of observations."""

    distribution: Distribution
    memory: Any
    """What the policy remembers with, see `networks/memory.py`."""

    def initial_memory(self, num: int) -> Tree:
        """The memory of `num` environments at the start of an episode."""
        return self.memory.initial(num)

    def policy(self, obs: Tree, memory: Tree, episode_start: Tensor | None, generator: Generator | None = None) -> tuple[Tensor, Tree]:
        """The distribution's input `[..., num_inputs]` at observations as they are, and the new memory."""
        raise NotImplementedError

    def judge(
        self, obs: Tree, action: Tree, memory: Tree = (), episode_start: Tensor | None = None, action_mask: Tree = ()
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of T steps' actions `[T, N, D]`, and V(s) `[T + 1, N, S]` of what was seen before, between and after them."""
        network: Any = self
        start = None if episode_start is None else episode_start[:-1]
        log_prob = network.log_prob(tree_index(obs, slice(-1)), action, memory, start, action_mask)
        return log_prob, network.value(obs, memory, episode_start)

    def sample(
        self,
        obs: Tree,
        memory: Tree = (),
        episode_start: Tensor | None = None,
        action_mask: Tree = (),
        *,
        deterministic: bool = False,
        generator: Generator | None = None,
    ) -> tuple[Tree, Tree]:
        """Only what stepping an environment needs: the action and the new memory."""
        x, memory = self.policy(obs, memory, episode_start, generator)
        if deterministic:
            return self.distribution.mode(x, action_mask), memory
        return self.distribution.sample(x, action_mask, generator), memory


Precision = Callable[[], AbstractContextManager[Any]]
MAX_WIDTH = 256
"""Widest input of a layer that acts in numpy."""
NUMPY_ACTIVATIONS: dict[type, Callable[[np.ndarray], Any]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0, out=x),
    nn.Identity: lambda x: None,
}
"""Activations that numpy applies in place."""


class TorchActor:
    """Asks any network.

    Args:
        network: the policy.
        obs: `[T, ...]` arrays; row t is filled before `act(t)`.
        generator: of the draws, on the network's device.
        precision: a context in which the network computes.
    """

    def __init__(self, network: Any, obs: Tree, generator: Generator, precision: Precision = nullcontext) -> None:
        self.network, self.generator, self.precision = network, generator, precision
        self.obs = tree_to_torch(obs)
        self.taken: list[Tree] = []

    @torch.no_grad()
    def act(self, t: int, memory: Tree, episode_start: np.ndarray, action_mask: Tree = ()) -> tuple[Tree, Tree]:
        """The environments' actions for the observations of row t and masks `[N, M]`, and the new memory."""
        device = self.generator.device
        obs = tree_map(lambda leaf: leaf[t].to(device), self.obs)
        start, mask = torch.as_tensor(episode_start, device=device), tree_to_torch(action_mask, device)
        with self.precision():
            action, memory = self.network.sample(obs, tree_to_torch(memory, device), start, mask, generator=self.generator)
        self.taken.append(action)
        return self.network.distribution.to_env(tree_to_numpy(action)), memory

    @torch.no_grad()
    def remember(self, t: int, memory: Tree, episode_start: np.ndarray) -> Tree:
        """The new memory alone."""
        if isinstance(self.network.memory, NoMemory):
            return memory
        device = self.generator.device
        obs, start = tree_map(lambda leaf: leaf[t].to(device), self.obs), torch.as_tensor(episode_start, device=device)
        with self.precision():
            return self.network.policy(obs, tree_to_torch(memory, device), start, self.generator)[1]

    def actions(self) -> Tree:
        """All actions as sampled, `[T, N, ...]`."""
        return tree_stack(self.taken)


class RandomActor:
    """Knows nothing: uniform actions where the space has bounds, for `num_envs` environments at once.

    Another actor may remember meanwhile, so that its memory is there when it acts.
    """

    def __init__(self, network: Any, num_envs: int, generator: Generator, remembering: StepActor | None = None) -> None:
        self.distribution, self.generator = network.distribution, generator
        self.remembering = remembering
        self.x = torch.zeros(num_envs, self.distribution.num_inputs, device=generator.device)
        self.taken: list[Tree] = []

    def act(self, t: int, memory: Tree, episode_start: np.ndarray, action_mask: Tree = ()) -> tuple[Tree, Tree]:
        """The environments' actions for masks `[N, M]`, and the new memory."""
        action = self.distribution.random(self.x, tree_to_torch(action_mask, self.x.device), self.generator)
        self.taken.append(action)
        return self.distribution.to_env(tree_to_numpy(action)), self.remember(t, memory, episode_start)

    def remember(self, t: int, memory: Tree, episode_start: np.ndarray) -> Tree:
        """The new memory alone."""
        return memory if self.remembering is None else self.remembering.remember(t, memory, episode_start)

    def actions(self) -> Tree:
        """All actions as sampled, `[T, N, ...]`."""
        return tree_stack(self.taken)


class NumpyActor:
    """Asks a network whose policy is a perceptron over a vector, with or without memory, on the CPU. Arguments as `TorchActor`."""

    def __init__(self, network: Any, obs: np.ndarray, generator: Generator) -> None:
        self.obs = obs
        self.taken: list[np.ndarray] = []
        self.normalize: Any = numpy_normalizer(network.normalizer)
        self.distribution = network.distribution
        perceptron = network.perceptron()
        self.cells = [memory.numpy_cell() for memory in perceptron.memories if isinstance(memory, RecurrentMemory)]
        self.layers = as_numpy(perceptron.layers)
        self.noise = self.distribution.noise(torch.empty(*obs.shape[:2], self.distribution.num_inputs), generator).detach().numpy()

    def act(self, t: int, memory: Tree, episode_start: np.ndarray, action_mask: Tree = ()) -> tuple[Tree, Tree]:
        """The environments' actions for the observations of row t and masks `[N, M]`, and the new memory."""
        x = self.normalize(self.obs[t])
        if self.cells:
            memory = self._remember(x, memory, episode_start)
            x = (memory if len(self.cells) == 1 else memory[0])[0]
        action = self.distribution.draw(masked(self.layers(x), action_mask), self.noise[t])
        self.taken.append(action)
        return self.distribution.to_env(action), memory

    def remember(self, t: int, memory: Tree, episode_start: np.ndarray) -> Tree:
        """The new memory alone."""
        return self._remember(self.normalize(self.obs[t]), memory, episode_start) if self.cells else memory

    def _remember(self, x: np.ndarray, memory: Tree, episode_start: np.ndarray) -> Tree:
        memory = forgotten(memory, episode_start)
        states = [memory] if len(self.cells) == 1 else memory
        after = tuple(cell(x, state) for cell, state in zip(self.cells, states, strict=True))
        return after[0] if len(after) == 1 else after

    def actions(self) -> torch.Tensor:
        """All actions as sampled, `[T, N, ...]`."""
        return torch.from_numpy(np.stack(self.taken))


def forgotten(memory: Tree, episode_start: np.ndarray) -> Tree:
    """A memory as arrays, zeros where an episode begins, whatever it had become."""
    return tree_map(lambda leaf: np.where(episode_start[:, None], np.float32(0), leaf), memory)


StepActor = TorchActor | NumpyActor | RandomActor


def make_actor(network: Any, obs: Tree, generator: Generator, precision: Precision = nullcontext) -> TorchActor | NumpyActor:
    """The cheapest actor that a network allows. Arguments as `TorchActor`."""
    if _fits_numpy(network, obs, generator):
        return NumpyActor(network, obs, generator)
    return TorchActor(network, obs, generator, precision)


def _fits_numpy(network: Any, obs: Tree, generator: Generator) -> bool:
    return generator.device.type == "cpu" and hasattr(network.distribution, "draw") and is_plain_perceptron(network, obs)


def is_plain_perceptron(network: Any, obs: Tree) -> bool:
    """Whether numpy can evaluate a network at such observations: narrow linear layers over a vector, in float32."""
    perceptron = getattr(network, "perceptron", lambda: None)()  # networks of users need not have one
    if perceptron is None or not isinstance(obs, np.ndarray) or obs.dtype != np.float32:
        return False
    leaves = list(perceptron.encoder.leaves)
    return len(leaves) == 1 and isinstance(leaves[0], VectorEncoder) and leaves[0].dims == 1 and is_plain(perceptron.layers)


def numpy_normalizer(normalizer: ObservationNormalizer | NoNormalizer) -> Callable[[np.ndarray], np.ndarray]:
    """What a normalizer does, on arrays, with its statistics as they are now."""
    if isinstance(normalizer, NoNormalizer):
        return lambda x: x
    statistics: Any = normalizer.statistics[0]
    mean, scale = (moment.numpy() for moment in normalizer.shift_and_scale(statistics))
    return lambda x: np.clip((x - mean) * scale, -normalizer.clip, normalizer.clip)


class NumpyMLP:
    """Linear layers and activations in turn, `[B, in]` to `[B, out]`, with the weights as they are at each call.

    Args:
        modules: layers for which `is_plain` holds.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        layers: list[Any] = [*modules, nn.Identity()]
        linear = layers[: len(layers) // 2 * 2 : 2]
        self.weights = [(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in linear]
        self.activations = [NUMPY_ACTIVATIONS[type(layer)] for layer in layers[1::2]]
        self.made_of = signature(modules)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        for (weight, bias), activate in zip(self.weights, self.activations, strict=True):
            x = x @ weight.T
            x += bias
            activate(x)
        return x


MADE: WeakKeyDictionary[nn.Module, NumpyMLP] = WeakKeyDictionary()


def as_numpy(layers: nn.Sequential) -> NumpyMLP:
    """Return the numpy perceptron of layers for which `is_plain` holds; it is built once."""
    made, modules = MADE.get(layers), list(layers)
    if made is None or made.made_of != signature(modules):
        made = MADE[layers] = NumpyMLP(modules)
    return made


def signature(modules: Sequence[nn.Module]) -> list[Any]:
    """Return what changes when layers or parameters are replaced or moved, and not when their values change."""
    return [(type(module), *((id(each), each.data_ptr()) for each in module.parameters())) for module in modules]


def is_plain(layers: Iterable[nn.Module]) -> bool:
    """Whether these are linear layers and activations in turn, in float32 on a CPU, with inputs of at most `MAX_WIDTH`."""
    modules = list(layers)
    linear = modules[::2]
    return (
        bool(linear)
        and all(type(after) in NUMPY_ACTIVATIONS for after in modules[1::2])
        and all(type(layer) is nn.Linear and layer.bias is not None and _is_small(layer.weight) for layer in linear)
    )


def _is_small(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.shape[1] <= MAX_WIDTH
