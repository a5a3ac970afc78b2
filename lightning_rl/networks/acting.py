"""Acting: the interface of policy networks, and actors that evaluate them cheaply during rollouts."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import cloudpickle
import numpy as np
import torch
from gymnasium.spaces import Space
from torch import Generator, Tensor, nn

from lightning_rl.distributions import Distribution
from lightning_rl.distributions.distribution import masked
from lightning_rl.errors import SettingError
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
REPLACEABLE = {"forward", "policy", "sample", "mode", "noise", "draw", "to_env", "shift_and_scale", "initial"}
"""Methods of a policy's parts that a user may replace in an instance or a class; the numpy actor then leaves it to torch."""
PACKAGES = ("torch", "lightning_rl")
"""Packages whose methods the numpy actor knows."""


class ActingPolicy(Protocol):
    """The interface of a network that only plays, for example in evaluations."""

    distribution: Distribution

    def initial_memory(self, num: int) -> Tree: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[Tensor]: ...

    def sample(
        self, obs: Tree, memory: Tree, episode_start: Tensor | None, action_mask: Tree, *, deterministic: bool = ..., generator: Generator
    ) -> tuple[Tree, Tree]: ...


def check_float32(*networks: nn.Module | ActingPolicy) -> None:
    """Raise `SettingError` unless all parameters of networks are float32, as observations and returns are."""
    for network in networks:
        for parameter in network.parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                problem = f"{type(network).__name__} has parameters of {parameter.dtype}"
                raise SettingError(f"{problem}: networks act and learn in torch.float32; leave out .double() or .half(), or call .float()")


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


def is_replaced(method: object) -> bool:
    """Return whether a method of a class of `PACKAGES` is a function from elsewhere."""
    return isinstance(method, FunctionType) and method.__module__.partition(".")[0] not in PACKAGES


def fits_numpy(network: PolicyNetwork, obs: Tree) -> bool:
    """Return whether the numpy actor computes the same for these observations as torch.

    It can for alternating linear layers and activations over a vector, in float32 on a CPU, with inputs of at most `MAX_WIDTH`. All parts
    must be this package's or torch's own, without hooks, and with the methods of their class, which must be those of its package.
    """
    perceptron = network.perceptron()
    if perceptron is None or not perceptron.encoder.is_vector or type(perceptron.layers) is not nn.Sequential:
        return False
    modules, everywhere = list(perceptron.layers), torch.nn.modules.module
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
    return not (everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


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


# ---------------------------------------------------------------- what a user changes in a network

Structure = Mapping[str, object]
Module = TypeVar("Module", bound=nn.Module)
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_TORCH = {*vars(nn.Module()), "_compiled_call_impl"}
"""Attributes of every module."""
OF_RUNS = {"by_batch", "epsilon", "exploration", "hooks", "shown"}
"""Attributes that runs change themselves."""


ABSENT = object()
"""Stands for what a structure lacks."""


def structure_of(root: nn.Module, with_attributes: Callable[[type], bool] = lambda cls: True) -> Structure:
    """Return what weights and buffers leave out of a module, by name: classes, hooks, functions and plain attributes of its parts.

    Of the root itself, which may be a run, only hooks and replaced methods are read. A part that is used twice is its first name.
    `with_attributes`: the classes of parts whose plain attributes are read.
    """
    structure: dict[str, object] = {}
    names: dict[int, str] = {}
    for name, part in root.named_modules(remove_duplicate=False):
        if (first := names.setdefault(id(part), name)) != name:
            structure[name] = f"the same as {first}"
            continue
        attributes, dot = vars(part), "." if name else ""
        if name:
            structure[name] = type(part)
            structure |= {f"{name}.{key}": "parameter" for key, _ in part.named_parameters(recurse=False)}
        for key in attributes.keys() - OF_TORCH - OF_RUNS:
            value = attributes[key]
            is_replaced = isinstance(value, FUNCTIONS) and getattr(value, "__func__", value) is not getattr(type(part), key, None)
            if is_replaced or (name and with_attributes(type(part)) and is_plain(value)):  # Lightning puts its methods back as attributes
                structure[f"{name}{dot}{key}"] = value
        if hooks := tuple(hooks_of([part])):
            structure[f"hooks of {name or 'the algorithm'}"] = hooks
    return structure


def describe_uncalled(module: nn.Module) -> str | None:
    """Return a line about hooks and `forward` of parts that are not called as modules, as PPO's network is not; None if there are none."""
    names = [
        name
        for name, part in module.named_modules()
        if name and type(part).forward is nn.Module.forward and (hooks_of([part]) or "forward" in vars(part))
    ]
    if not names:
        return None
    return f"hooks and forward of {', '.join(names)} are not called, since losses call other methods of it: change a layer in it instead"


def hooks_of(parts: Iterable[nn.Module]) -> list[object]:
    """Return the hooks of modules that change what they compute."""
    return [hook for part in parts for kind in HOOKS for hook in vars(part)[kind].values()]


def has_global_hooks() -> bool:
    """Return whether there are hooks of all modules of the process."""
    module = torch.nn.modules.module
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def changes_everywhere(parts: Iterable[nn.Module]) -> dict[str, str]:
    """Return a text for each change that acts in all of this process: hooks of all modules, and methods replaced in classes of parts."""
    changes = {"hooks of all modules": "hooks of all modules"} if has_global_hooks() else {}
    for cls in {cls for kind in set(map(type, parts)) for cls in kind.__mro__}:
        for name in REPLACEABLE & vars(cls).keys() if cls.__module__.partition(".")[0] in PACKAGES else ():
            if is_replaced(vars(cls)[name]):
                changes[f"{cls.__name__}.{name}"] = f"{cls.__name__}.{name} (replaced)"
    return changes


def is_plain(value: object) -> bool:
    """Return whether a value is a number, a text or None, or a sequence of such."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def changes_of(before: Structure, now: Structure) -> dict[str, str]:
    """Return a text for each difference of two structures by its place; a part of another class stands for all that is in it."""
    changes: dict[str, str] = {}
    for place in [*now, *(place for place in before if place not in now)]:
        old, new = before.get(place, ABSENT), now.get(place, ABSENT)
        part = place.removeprefix("hooks of ")
        if new is old or new == old or any(f"{part}.".startswith(f"{other}.") for other in changes):
            continue
        ways = {"replaced": isinstance(new, FUNCTIONS), "added": old is ABSENT, "removed": new is ABSENT}
        way = next((way for way, holds in ways.items() if holds), f"{show(new)} for {show(old)}")
        changes[place] = place if place.startswith("hooks of ") else f"{place} ({way})"
    return changes


def show(value: object) -> str:
    """Return the name of a class, or the text of another value."""
    return value.__name__ if isinstance(value, type) else str(value)


def list_changes(changes: Sequence[str]) -> str:
    """Return changes as words of a sentence, the first three of many."""
    more = len(changes) - 3
    return ", ".join([*changes[:3], *([f"{more} more"] if more > 0 else [])])


def copy_network(network: Module) -> Module:
    """Return a copy of a network that shares nothing with it.

    A function of a user's own may refer to the network that it was written for, which is then copied with it.
    """
    values = structure_of(network).values()
    functions = [
        getattr(function, "__func__", function) for value in values for function in (value if isinstance(value, tuple) else (value,))
    ]
    refers = any(getattr(function, "__closure__", None) for function in functions)
    attributes = [value for part in network.modules() for value in vars(part).values()]
    computed = {id(value): value.detach().clone() for value in attributes if isinstance(value, Tensor) and not value.is_leaf}
    try:  # tensors that old weight normalization and pruning compute are not parameters, and cannot be copied with their graph
        return pickle.loads(cloudpickle.dumps(network)) if refers else deepcopy(network, computed)
    except Exception as error:  # of a user's function
        raise SettingError(f"the policy cannot be copied: {type(error).__name__}: {str(error).splitlines()[0]}") from error
