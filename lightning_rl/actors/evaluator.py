"""Evaluators of evolution strategies: whole episodes with perturbed weights, many at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, vmap

from lightning_rl.data.episodes import Finished, Seat, info_arrays, longest_episode
from lightning_rl.envs.config import EnvConfig, single_env_config
from lightning_rl.envs.make import make_env
from lightning_rl.envs.parameters import LESSONS, PARAMETERS
from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import NUMPY_ACTIVATIONS, fits_numpy, numpy_normalizer
from lightning_rl.spaces import Spaces, allocate, as_spaces
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
    plain = next(network.parameters()).device.type == "cpu" and fits_numpy(network, obs)
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


NOISE, CHANCE = 0, 1
"""Streams of a job."""


class Generation(NamedTuple):
    """Of what jobs are: the seed of the run, the number of the generation, σ, the longest episode (None leaves it to the environment),
    and the lessons that environments play."""

    seed: int
    number: int
    sigma: float
    longest: int | None = None
    lessons: Mapping[str, dict[str, Any]] = {}

    def noise(self, job: int, size: int) -> np.ndarray:
        """ε of a job, `[size]`."""
        return np.random.default_rng(self._stream(job, NOISE)).standard_normal(size, np.float32)

    def chance(self, job: int) -> int:
        """The seed of a job's episodes."""
        return int(self._stream(job, CHANCE).generate_state(1)[0]) // 2

    def _stream(self, job: int, which: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(self.number, job, which))


class Played(NamedTuple):
    """An episode: of which job, with + or −; what is to be told of it; the sum of its rewards' signs; what was seen, `[R, ...]` or ()."""

    job: int
    sign: int
    finished: Finished
    signs: float
    seen: Tree


class Evaluator:
    """Plays up to K episodes at once, each with weights of its own, in one batch.

    Args:
        envs: K of them.
        network: whose weights are moved, those that have these names.
        names: of parameters.
        spaces: of the algorithm.
        stochastic: whether actions are drawn.
        on_nan: what to do about numbers that are none.
    """

    def __init__(self, envs: list[Any], network: Any, names: Sequence[str], spaces: Spaces, stochastic: bool, on_nan: str) -> None:
        self.network, self.names, self.spaces, self.stochastic = network, names, spaces, stochastic
        self.seats = [Seat(k, env, spaces.masked, on_nan, "in a generation") for k, env in enumerate(envs)]
        self.longest = longest_episode(envs[0])

    def describe(self) -> str:
        """The environment's name."""
        return self.seats[0].name

    @torch.no_grad()
    def evaluate(self, generation: Generation, jobs: Sequence[int], watched: Sequence[int] = ()) -> list[Played]:
        """Do some jobs with the network's weights as they are; of those that are `watched`, tell what was seen."""
        self._set_lessons(generation.lessons)
        longest, num = min(self.longest, generation.longest or self.longest), len(self.seats)
        obs, mask, start = allocate(self.spaces.observation, num), self.spaces.masks(num), np.ones(num, dtype=bool)
        population, memory = make_population(self.network, self.names, num, obs), self.network.initial_memory(num)
        waiting, played = deque((job, sign) for job in jobs for sign in (1, -1)), list[Played]()
        turns = [_Turn(seat, generation, watched, population) for seat in self.seats]
        busy = [turn for turn in turns if turn.begin(waiting)]
        while busy:
            for turn in busy:
                turn.look(obs, mask, start)
            x, memory = population.act(obs, memory, start)
            actions = draw_actions(self.network, x, mask, [turn.generator for turn in turns] if self.stochastic else [])
            for turn in busy:
                if turn.step(tree_index(actions, turn.seat.index), longest):
                    played.append(turn.played())
                    turn.begin(waiting)
            busy = [turn for turn in busy if turn.job is not None]
        return played

    def _set_lessons(self, lessons: Mapping[str, dict[str, Any]]) -> None:
        for env in (seat.env for seat in self.seats if lessons):
            if not env.has_wrapper_attr("set_lessons"):
                raise SettingError(f"{self.describe()} takes no lessons; build it from settings with env.parameters, or in EnvParameters")
            env.get_wrapper_attr("set_lessons")(lessons)

    def close(self) -> None:
        """Close the environments."""
        for seat in self.seats:
            seat.env.close()


class _Turn:
    """A seat, and the half of a job that is done in it."""

    def __init__(self, seat: Seat, generation: Generation, watched: Sequence[int], population: Population) -> None:
        self.seat, self.generation, self.watched, self.population = seat, generation, watched, population
        self.generator = Generator(population.device)
        self.job: int | None = None

    def begin(self, waiting: deque[tuple[int, int]]) -> bool:
        """Take the next half. Whether there is one."""
        self.job, self.sign = waiting.popleft() if waiting else (None, 0)
        if self.job is None:
            return False
        k, generation = self.seat.index, self.generation
        noise, chance = generation.noise(self.job, self.population.size), generation.chance(self.job)
        self.population.set(k, self.sign * generation.sigma * noise)
        self.generator.manual_seed(chance)
        self.seat.start(chance)
        self.signs, self.seen = 0.0, list[Tree]()
        return True

    def look(self, obs: Tree, mask: Tree, start: np.ndarray) -> None:
        """Fill the seat's row of observations `[K, ...]`, masks `[K, M]` and beginnings `[K]`."""
        k = self.seat.index
        tree_map(partial(_fill, k), obs, self.seat.obs)
        tree_map(partial(_fill, k), mask, self.seat.mask)
        start[k] = self.seat.length == 0
        if self.job in self.watched:
            self.seen.append(tree_map(lambda leaf: leaf[k].copy(), obs))

    def step(self, action: Tree, longest: int) -> bool:
        """Step once. Whether this ended the episode."""
        over = self.seat.step(action, longest)
        self.signs += (self.seat.reward > 0) - (self.seat.reward < 0)
        return over

    def played(self) -> Played:
        """The episode that ended."""
        assert self.job is not None
        lessons, drawn = (info_arrays(self.seat.info, key) if key in self.seat.info else {} for key in (LESSONS, PARAMETERS))
        finished = Finished(self.seat.return_, self.seat.success, lessons, self.seat.length, drawn)
        return Played(self.job, self.sign, finished, self.signs, tree_stack(self.seen) if self.seen else ())


def _fill(k: int, rows: np.ndarray, value: Any) -> None:
    rows[k] = value


@dataclass(frozen=True)
class BuildEvaluator:
    """Makes an evaluator, wherever it is called.

    Args:
        env: settings, or what builds one environment.
        num_envs: K, how many episodes it plays at once.
        spaces: of the algorithm.
        names, stochastic, on_nan: see `Evaluator`.
    """

    env: Any
    num_envs: int
    spaces: Spaces
    names: tuple[str, ...]
    stochastic: bool
    on_nan: str

    def __call__(self, index: int, restarts: int, network: nn.Module) -> Evaluator:
        config = single_env_config(self.env) if isinstance(self.env, EnvConfig) else self.env
        envs = [make_env(config, index * self.num_envs + k) for k in range(self.num_envs)]
        found = as_spaces(envs[0].observation_space, envs[0].action_space)
        if (found.observation, found.action) != (self.spaces.observation, self.spaces.action):
            raise SettingError(f"the environment's spaces are not those of the model, {self.spaces}; load it with its own environment")
        return Evaluator(envs, network, self.names, self.spaces, self.stochastic, self.on_nan)
