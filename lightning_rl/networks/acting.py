"""Acting: the interface of policy networks, and actors that evaluate them cheaply during rollouts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium.spaces import Space
from torch import Generator, Tensor, nn

from lightning_rl.distributions import Distribution
from lightning_rl.distributions.distribution import masked
from lightning_rl.errors import SettingError
from lightning_rl.networks.changes import GLOBAL_HOOKS, REPLACEABLE, is_replaced
from lightning_rl.networks.encoders import OwnEncoder, TreeEncoder
from lightning_rl.networks.memory import NoMemory, RecurrentMemory
from lightning_rl.networks.normalization import NoNormalizer, ObservationNormalizer, RunningMeanStd
from lightning_rl.spaces import JOINT, OWN, allocate
from lightning_rl.types import Tree, tree_index, tree_leaves, tree_map, tree_stack, tree_to_numpy, tree_to_torch

ActingContext = Callable[[], AbstractContextManager[object]]
MAX_WIDTH = 256
"""Maximum input width of a layer that is evaluated in numpy."""
NUMPY_ACTIVATIONS: dict[type, Callable[[np.ndarray], np.ndarray | None]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0, out=x),
    nn.Identity: lambda x: None,
}
"""Activations that numpy applies in place."""


class ActingPolicy(Protocol):
    """The interface of a network that only plays, for example in evaluations."""

    distribution: Distribution

    def initial_memory(self, num: int) -> Tree: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[Tensor]: ...

    def sample(
        self, obs: Tree, memory: Tree, episode_start: Tensor | None, action_mask: Tree, *, deterministic: bool = ..., generator: Generator
    ) -> tuple[Tree, Tree]: ...


class ActingNetwork(ActingPolicy, Protocol):
    """The interface of a network for collecting experience; see `networks/actor_critic.py`. User code may pass any such module."""

    memory: NoMemory | RecurrentMemory

    def log_prob(self, obs: Tree, action: Tree, memory: Tree, episode_start: Tensor | None, action_mask: Tree) -> Tensor: ...

    def log_prob_and_value(
        self, obs: Tree, action: Tree, memory: Tree, episode_start: Tensor | None, action_mask: Tree
    ) -> tuple[Tensor, Tensor]: ...

    def value(self, obs: Tree, memory: Tree, episode_start: Tensor | None) -> Tensor: ...

    def policy(self, obs: Tree, memory: Tree, episode_start: Tensor | None, generator: Generator | None) -> tuple[Tensor, Tree]: ...


class Perceptron(NamedTuple):
    """The parts of a network of this simple form: encoder → memory → alternating linear layers and activations.

    memories: the policy's memory, and others that only need to be updated.
    """

    encoder: TreeEncoder | OwnEncoder
    memories: Sequence[NoMemory | RecurrentMemory]
    layers: nn.Sequential


class PolicyNetwork(nn.Module):
    """A network with a distribution over actions, conditioned on the output of `policy`."""

    distribution: Distribution
    memory: NoMemory | RecurrentMemory
    """The policy's memory; see `networks/memory.py`."""
    normalizer: ObservationNormalizer | NoNormalizer

    def initial_memory(self, num: int) -> Tree:
        """Return the memory of `num` environments at the start of an episode."""
        return self.memory.initial(num)

    def policy(self, obs: Tree, memory: Tree, episode_start: Tensor | None, generator: Generator | None = None) -> tuple[Tensor, Tree]:
        """Return the distribution's input `[..., num_inputs]` for unnormalized observations, and the new memory."""
        raise NotImplementedError

    def perceptron(self) -> Perceptron | None:
        """Return the layers from normalized observations to the distribution's input; None if the network is not a `Perceptron`."""
        return None

    def check_methods(self) -> None:
        """Raise `SettingError` if a user's own method would count in acting but not in learning, or the other way round.

        Losses read `forward` of a network that has it, and actions come from `policy`, which calls `forward` unless there is a memory.
        """
        if type(self).forward is nn.Module.forward:
            return
        classes = type(self).__mro__
        policy, forward = (-1 if n in vars(self) else [n in vars(cls) for cls in classes].index(True) for n in ("policy", "forward"))
        if policy < forward:
            raise SettingError(f"{classes[0].__name__}.policy is replaced, but losses read forward, which it calls: replace that instead")
        if forward < policy and not isinstance(self.memory, NoMemory):
            raise SettingError(f"{classes[0].__name__}.forward is replaced, but with a memory actions come from policy: replace both")

    if TYPE_CHECKING:  # networks of off-policy algorithms have neither

        def value(self, obs: Tree, memory: Tree = (), episode_start: Tensor | None = None) -> Tensor: ...
        def log_prob(
            self, obs: Tree, action: Tree, memory: Tree = (), episode_start: Tensor | None = None, action_mask: Tree = ()
        ) -> Tensor: ...

    def log_prob_and_value(
        self, obs: Tree, action: Tree, memory: Tree = (), episode_start: Tensor | None = None, action_mask: Tree = ()
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the actions of T steps `[T, N, D]`, and V(s) `[T + 1, N, S]` before each step and after the last."""
        start = None if episode_start is None else episode_start[:-1]
        log_prob = self.log_prob(tree_index(obs, slice(-1)), action, memory, start, action_mask)
        return log_prob, self.value(obs, memory, episode_start)

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
        """Return an action and the new memory, without values or log-probabilities."""
        x, memory = self.policy(obs, memory, episode_start, generator)
        if deterministic:
            return self.distribution.mode(x, action_mask), memory
        return self.distribution.sample(x, action_mask, generator), memory


class VisiblePolicy(nn.Module):
    """A policy for observations `[N, ...]` without the parts that only critics see.

    Args:
        space: the space of the network's observations, including the `hidden` parts.
    """

    def __init__(self, network: PolicyNetwork, space: Space, hidden: Sequence[str]) -> None:
        super().__init__()
        self.network, self.space, self.hidden = network, space, list(hidden)
        self.distribution, self.memory, self.initial_memory = network.distribution, network.memory, network.initial_memory

    def policy(self, obs: Tree, memory: Tree, episode_start: Tensor | None, generator: Generator | None = None) -> tuple[Tensor, Tree]:
        """Return the distribution's input `[N, num_inputs]`, and the new memory."""
        return self.network.policy(self._complete(obs), memory, episode_start, generator)

    def sample(self, obs: Tree, *others: Any, **settings: Any) -> tuple[Tree, Tree]:
        """Return an action and the new memory."""
        return self.network.sample(self._complete(obs), *others, **settings)

    def _complete(self, obs: Tree) -> Tree:
        """Return observations with zeros for the hidden parts."""
        given = {OWN: obs} if self.hidden == [JOINT] else obs
        one = tree_leaves(given)[0]
        empty = tree_to_torch({name: leaf for name, leaf in allocate(self.space).items() if name not in given}, one.device)
        return {**given, **tree_map(lambda leaf: leaf.expand(one.shape[0], *leaf.shape), empty)}


class TorchActor:
    """Acts with any network.

    Args:
        obs: arrays `[T, ...]` of the first iteration; see `begin`.
        generator: random generator for sampling, on the network's device.
        context: in which the network acts; see `acting_context`.
        exploring: a context in which actions are sampled; see `Exploration.step`.
    """

    def __init__(
        self,
        network: ActingNetwork,
        obs: Tree,
        generator: Generator,
        context: ActingContext = nullcontext,
        exploring: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.network, self.generator, self.context, self.exploring = network, generator, context, exploring
        self.begin(obs)

    def begin(self, obs: Tree) -> None:
        """Begin an iteration over arrays `[T, ...]`; row t must be filled before `act(t)`."""
        self.obs = tree_to_torch(obs)
        self.taken: list[Tree] = []

    @torch.no_grad()
    def act(self, t: int, memory: Tree, episode_start: np.ndarray, action_mask: Tree = ()) -> tuple[Tree, Tree]:
        """Return the actions for the environments, from the observations of row t and masks `[N, M]`, and the new memory."""
        device = self.generator.device
        obs = tree_map(lambda leaf: leaf[t].to(device), self.obs)
        start, mask = torch.as_tensor(episode_start, device=device), tree_to_torch(action_mask, device)
        with self.exploring(), self.context():
            action, memory = self.network.sample(obs, tree_to_torch(memory, device), start, mask, generator=self.generator)
        self.taken.append(action)
        return self.network.distribution.to_env(tree_to_numpy(action)), memory

    @torch.no_grad()
    def remember(self, t: int, memory: Tree, episode_start: np.ndarray) -> Tree:
        """Return only the new memory."""
        if isinstance(self.network.memory, NoMemory):
            return memory
        device = self.generator.device
        obs, start = tree_map(lambda leaf: leaf[t].to(device), self.obs), torch.as_tensor(episode_start, device=device)
        with self.context():
            return self.network.policy(obs, tree_to_torch(memory, device), start, self.generator)[1]

    def actions(self) -> Tree:
        """Return all actions as sampled, `[T, N, ...]`."""
        return tree_stack(self.taken)


class NumpyActor:
    """Acts in numpy on the CPU with a perceptron over a vector, with or without memory. Arguments and methods as for `TorchActor`."""

    distribution: Any

    def __init__(self, network: PolicyNetwork, obs: np.ndarray, generator: Generator) -> None:
        self.network, self.generator = network, generator
        self.begin(obs)

    def begin(self, obs: np.ndarray) -> None:
        """Begin an iteration over an array `[T, N, F]`, with views of the current weights; row t must be filled before `act(t)`."""
        perceptron, normalizer = self.network.perceptron(), self.network.normalizer
        assert perceptron is not None
        self.distribution = self.network.distribution
        self.obs = obs
        self.taken: list[np.ndarray] = []
        self.normalize = None if isinstance(normalizer, NoNormalizer) else numpy_normalizer(normalizer)
        self.cells = [memory.numpy_cell() for memory in perceptron.memories if isinstance(memory, RecurrentMemory)]
        modules = [*perceptron.layers, nn.Identity()]
        self.layers = [
            (layer.weight.detach().numpy().T, layer.bias.detach().numpy(), NUMPY_ACTIVATIONS[type(activation)])
            for layer, activation in zip(modules[::2], modules[1::2], strict=False)
        ]
        x = torch.empty(*obs.shape[:2], self.distribution.num_inputs)
        self.noise = self.distribution.noise(x, self.generator).detach().numpy()

    def act(self, t: int, memory: Tree, episode_start: np.ndarray, action_mask: Tree = ()) -> tuple[Tree, Tree]:
        x = self.obs[t] if self.normalize is None else self.normalize(self.obs[t])
        if self.cells:
            memory = self.remember(t, memory, episode_start)
            x = (memory if len(self.cells) == 1 else memory[0])[0]
        for weight, bias, activate in self.layers:
            x = x @ weight
            x += bias
            activate(x)
        x = masked(x, action_mask) if len(action_mask) else x
        action = self.distribution.draw(x, self.noise[t])
        self.taken.append(action)
        return self.distribution.to_env(action), memory

    def remember(self, t: int, memory: Tree, episode_start: np.ndarray) -> Tree:
        if not self.cells:
            return memory
        x = self.obs[t] if self.normalize is None else self.normalize(self.obs[t])
        memory = reset_memory(memory, episode_start)
        states = [memory] if len(self.cells) == 1 else memory
        after = tuple(cell(x, state) for cell, state in zip(self.cells, states, strict=True))
        return after[0] if len(after) == 1 else after

    def actions(self) -> Tensor:
        return torch.from_numpy(np.stack(self.taken))


class RandomActor:
    """Acts at random in `num_envs` environments, uniformly if the space is bounded.

    Another actor may update its memory at the same time, so that it is ready when that actor takes over.
    """

    def __init__(
        self, network: ActingNetwork, num_envs: int, generator: Generator, remembering: TorchActor | NumpyActor | None = None
    ) -> None:
        self.distribution, self.generator = network.distribution, generator
        self.remembering = remembering
        self.x = torch.zeros(num_envs, self.distribution.num_inputs, device=generator.device)
        self.taken: list[Tree] = []

    def act(self, t: int, memory: Tree, episode_start: np.ndarray, action_mask: Tree = ()) -> tuple[Tree, Tree]:
        """Return random actions for the environments with masks `[N, M]`, and the new memory."""
        action = self.distribution.random(self.x, tree_to_torch(action_mask, self.x.device), self.generator)
        self.taken.append(action)
        memory = memory if self.remembering is None else self.remembering.remember(t, memory, episode_start)
        return self.distribution.to_env(tree_to_numpy(action)), memory


StepActor = TorchActor | NumpyActor


def make_actor(network: ActingNetwork, obs: Tree, generator: Generator, context: ActingContext = nullcontext) -> StepActor:
    """Make the fastest actor that a network allows. Arguments as for `TorchActor`."""
    draws = generator.device.type == "cpu" and hasattr(network.distribution, "draw")
    if draws and isinstance(network, PolicyNetwork) and fits_numpy(network, obs):
        return NumpyActor(network, obs, generator)
    return TorchActor(network, obs, generator, context)


METHODS: dict[type, list[tuple[str, object]]] = {}
"""The methods of classes of parts that numpy was found to fit: it does as long as these are the same."""


def packaged_methods(kind: type) -> list[tuple[str, object]]:
    """Return the replaceable methods of a class and note them; None in their place if one was replaced."""
    methods = [(name, getattr(kind, name)) for name in sorted(REPLACEABLE) if hasattr(kind, name)]
    if any(is_replaced(method) for _, method in methods):
        return [(name, None) for name, _ in methods]
    METHODS[kind] = methods
    return methods


def fits_numpy(network: PolicyNetwork, obs: Tree) -> bool:
    """Return whether the numpy actor computes the same for these observations as torch.

    It can for alternating linear layers and activations over a vector, in float32 on a CPU, with inputs of at most `MAX_WIDTH`. All parts
    must be this package's or torch's own, without hooks, and with the methods of their class, which must be those of its package.
    """
    perceptron = network.perceptron()
    if perceptron is None or not perceptron.encoder.is_vector or type(perceptron.layers) is not nn.Sequential:
        return False
    modules = list(perceptron.layers)
    if not modules or not isinstance(obs, np.ndarray) or obs.dtype != np.float32:
        return False
    for layer, activation in zip(modules[::2], [*modules[1::2], None], strict=False):  # loops: this runs in each iteration
        if type(layer) is not nn.Linear or layer.bias is None or layer.in_features > MAX_WIDTH:
            return False
        weight = layer.weight
        if not weight.is_cpu or weight.dtype is not torch.float32 or (activation is not None and type(activation) not in NUMPY_ACTIVATIONS):
            return False
    parts = network, network.distribution, network.normalizer, perceptron.encoder, *perceptron.memories
    for own_part in parts:
        if not type(own_part).__module__.startswith("lightning_rl."):
            return False
    all_parts = *parts, perceptron.layers, *modules
    for part in all_parts:
        attributes = vars(part)
        if attributes.get("_forward_hooks") or attributes.get("_forward_pre_hooks") or not REPLACEABLE.isdisjoint(attributes):
            return False
    for kind in set(map(type, all_parts)):
        for name, method in METHODS.get(kind) or packaged_methods(kind):
            if getattr(kind, name) is not method:
                return False
    return not any(GLOBAL_HOOKS)


def numpy_normalizer(normalizer: ObservationNormalizer | NoNormalizer) -> Callable[[np.ndarray], np.ndarray]:
    """Return a numpy function that normalizes arrays by a normalizer's current statistics."""
    if isinstance(normalizer, NoNormalizer):
        return lambda x: x
    statistics = normalizer.statistics[0]
    assert isinstance(statistics, RunningMeanStd)  # `fits_numpy` checked that observations are one vector
    mean, scale = (moment.numpy() for moment in normalizer.shift_and_scale(statistics))
    return lambda x: np.clip((x - mean) * scale, -normalizer.clip, normalizer.clip)


def reset_memory(memory: Tree, episode_start: np.ndarray) -> Tree:
    """Return a memory of arrays with zeros where an episode starts, even if it contained NaN."""
    return tree_map(lambda leaf: np.where(episode_start[:, None], np.float32(0), leaf), memory)
