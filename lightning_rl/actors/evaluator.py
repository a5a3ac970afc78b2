"""Evaluators of evolution strategies: play batches of whole episodes with perturbed weights."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, vmap

from lightning_rl.actors.actor import Lessons
from lightning_rl.data.episodes import Finished, Seat, info_arrays, longest_episode
from lightning_rl.envs import KEPT, LESSONS, PARAMETERS
from lightning_rl.envs.config import EnvConfig, single_env_config
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.envs.make import make_env
from lightning_rl.envs.parameters import draw_by_episode
from lightning_rl.envs.sync import close_env
from lightning_rl.errors import SettingError
from lightning_rl.nan_policy import BadStep
from lightning_rl.networks.acting import NUMPY_ACTIVATIONS, PolicyNetwork, fits_numpy, numpy_normalizer
from lightning_rl.spaces import Spaces, allocate, as_spaces
from lightning_rl.types import Tree, tree_index, tree_leaves, tree_map, tree_stack, tree_to_numpy, tree_to_torch


def flat_parameters(network: nn.Module, names: Sequence[str]) -> Tensor:
    """Return the named parameters of a network as one vector `[P]`."""
    return torch.cat([network.get_parameter(name).detach().flatten() for name in names])


class NumpyPopulation:
    """K = `num` members of a population, for a memoryless perceptron over vectors on the CPU.

    The members perturb the network's parameters `names`, P = `size` numbers.
    """

    device = torch.device("cpu")

    def __init__(self, network: PolicyNetwork, names: Sequence[str], num: int) -> None:
        self.centre = flat_parameters(network, names).numpy()
        self.size, self.rows = len(self.centre), np.tile(self.centre, (num, 1))
        weights = {parameter: parameter.detach().numpy()[None] for parameter in network.parameters()}  # frozen ones stay the same for all
        at = 0
        for parameter in map(network.get_parameter, names):
            weights[parameter] = self.rows[:, at : at + parameter.numel()].reshape(num, *parameter.shape)
            at += parameter.numel()
        self.normalize: Callable[[np.ndarray], np.ndarray] = numpy_normalizer(network.normalizer)
        perceptron = network.perceptron()
        assert perceptron is not None
        modules = [*perceptron.layers, nn.Identity()]
        self.layers = [
            (weights[layer.weight].swapaxes(1, 2), weights[layer.bias], NUMPY_ACTIVATIONS[type(after)])
            for layer, after in zip(modules[::2], modules[1::2], strict=False)
        ]

    def set(self, k: int, noise: np.ndarray) -> None:
        """Set member k to the network's parameters plus noise `[P]`."""
        np.add(self.centre, noise, out=self.rows[k])

    def act(self, obs: Tree, memory: Tree, episode_start: np.ndarray) -> tuple[Tensor, Tree]:
        """Return the inputs `[K, num_inputs]` of the distribution at observations `[K, ...]`, arrays, and the new memory."""
        x = self.normalize(obs)[:, None]
        for weight, bias, activate in self.layers:
            x = x @ weight + bias[:, None]
            activate(x)
        return torch.from_numpy(x[:, 0]), memory


class TorchPopulation(nn.Module):
    """A population for any network, on its device. Arguments and methods as in `NumpyPopulation`; with a memory, nothing is batched."""

    def __init__(self, network: PolicyNetwork, names: Sequence[str], num: int) -> None:
        super().__init__()
        self.network, self.in_turn = network, bool(tree_leaves(network.initial_memory(1)))
        self.centre = flat_parameters(network, names)
        self.size, self.device, self.rows = len(self.centre), self.centre.device, self.centre.repeat(num, 1)
        shapes = [network.get_parameter(name).shape for name in names]
        parts = self.rows.split([shape.numel() for shape in shapes], 1)
        self.weights = {f"network.{name}": part.view(num, *shape) for name, shape, part in zip(names, shapes, parts, strict=True)}

    def set(self, k: int, noise: np.ndarray) -> None:
        self.rows[k] = self.centre + torch.from_numpy(noise).to(self.centre)

    def act(self, obs: Tree, memory: Tree, episode_start: np.ndarray) -> tuple[Tensor, Tree]:
        rows = (tree_to_torch(obs, self.device), memory, torch.as_tensor(episode_start, device=self.device))
        x, memory = self.evaluate(tree_map(lambda leaf: leaf.unsqueeze(1), rows))
        return x.squeeze(1), tree_map(lambda leaf: leaf.squeeze(1), memory)

    def evaluate(self, rows: Tree) -> tuple[Tensor, Tree]:
        """Return the outputs of each member for its row, all `[K, 1, ...]`."""
        if self.in_turn:
            return tree_stack([self.evaluate_one(tree_index(self.weights, k), tree_index(rows, k)) for k in range(len(self.rows))])
        return vmap(self.evaluate_one)(self.weights, rows)

    def evaluate_one(self, weights: dict[str, Tensor], row: Tree) -> tuple[Tensor, Tree]:
        return functional_call(self, weights, row, tie_weights=False)  # tying would leave shared parameters replaced

    def forward(self, obs: Tree, memory: Tree, episode_start: Tensor) -> tuple[Tensor, Tree]:
        return self.network.policy(obs, memory, episode_start)


def make_population(network: PolicyNetwork, names: Sequence[str], num: int, obs: Tree) -> NumpyPopulation | TorchPopulation:
    """Make the cheapest population that supports a network with these observations."""
    plain = not tree_leaves(network.initial_memory(1)) and next(network.parameters()).device.type == "cpu" and fits_numpy(network, obs)
    return (NumpyPopulation if plain else TorchPopulation)(network, names, num)


def draw_actions(network: PolicyNetwork, x: Tensor, mask: Tree, generators: Sequence[torch.Generator]) -> Tree:
    """Return the environments' actions for inputs `[K, num_inputs]` and masks `[K, M]`: draws with each member's generator, or without
    generators the modes of the distributions."""
    distribution = network.distribution
    mask = tree_to_torch(mask, x.device)
    if not generators:
        return distribution.to_env(tree_to_numpy(distribution.mode(x, mask)))
    rows = [distribution.sample(x[k : k + 1], mask[k : k + 1], generator) for k, generator in enumerate(generators)]
    return distribution.to_env(tree_to_numpy(tree_map(lambda *leaves: torch.cat(leaves), rows[0], *rows[1:])))


class Generation(NamedTuple):
    """What determines the jobs of a generation: the seed of the run, the number of the generation, σ, the maximum length of episodes
    (None: the environment's own limit), the lessons of the environments, and the names of the parameters to perturb."""

    seed: int
    number: int
    sigma: float
    longest: int | None = None
    lessons: Mapping[str, LessonValues] = {}
    names: tuple[str, ...] = ()

    def noise(self, job: int, size: int) -> np.ndarray:
        """Return ε of a job, `[size]`."""
        return np.random.default_rng(self._stream(job, 0)).standard_normal(size, np.float32)

    def episode_seed(self, job: int) -> int:
        """Return the seed of both episodes of a job."""
        return int(self._stream(job, 1).generate_state(1)[0]) // 2

    def _stream(self, job: int, which: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(self.number, job, which))


class JobEpisode(NamedTuple):
    """An episode: its job, and the sign of the perturbation; its statistics; the sum of the signs of its rewards; its observations
    `[R, ...]`, or () if its job is not watched; the number of steps with replaced NaN or infinite values, and the first of them."""

    job: int
    sign: int
    finished: Finished
    signs: float
    obs: Tree
    replaced: int
    bad: BadStep | None


class Evaluator:
    """Plays up to K episodes in parallel in K environments, each with its own weights, in one batch.

    `stochastic`: whether actions are drawn instead of the mode.
    """

    def __init__(self, envs: list[gym.Env], network: PolicyNetwork, spaces: Spaces, stochastic: bool, on_nan: str) -> None:
        self.network, self.spaces, self.stochastic = network, spaces, stochastic
        on_nan = "report" if on_nan == "raise" else on_nan  # the run's guard stops it
        self.seats = [_JobSeat(k, env, spaces.masked, on_nan, "in a generation") for k, env in enumerate(envs)]
        self.longest = longest_episode(envs[0])
        self.steps_played = 0
        """Environment steps of all calls so far."""

    def describe(self) -> str:
        return self.seats[0].name

    @torch.no_grad()
    def evaluate(self, generation: Generation, jobs: Sequence[int], watched: Sequence[int] = ()) -> list[JobEpisode]:
        """Play both episodes of each job with the network's current weights, and record the observations of `watched` jobs."""
        self._set_lessons(generation.lessons)
        longest, num = min(self.longest, generation.longest or self.longest), len(self.seats)
        obs, mask, start = allocate(self.spaces.observation, num), self.spaces.masks(num), np.ones(num, dtype=bool)
        population, memory = make_population(self.network, generation.names, num, obs), self.network.initial_memory(num)
        generators = [Generator(population.device) for _ in self.seats]
        waiting, episodes = deque((job, sign) for job in jobs for sign in (1, -1)), list[JobEpisode]()
        busy = self.seats[: len(waiting)]

        def begin(seat: _JobSeat) -> None:
            seat.job, seat.sign = waiting.popleft()
            population.set(seat.index, seat.sign * generation.sigma * generation.noise(seat.job, population.size))
            seed = generation.episode_seed(seat.job)
            generators[seat.index].manual_seed(seed)
            seat.begin(seed, seat.job in watched)

        for seat in busy:
            begin(seat)
        while busy:
            for seat in busy:
                seat.write(obs, mask, start)
            x, memory = population.act(obs, memory, start)
            actions = draw_actions(self.network, x, mask, generators if self.stochastic else [])
            self.steps_played += len(busy)
            ended = [seat for seat in busy if seat.play(tree_index(actions, seat.index), longest)]
            for seat in ended:
                episodes.append(seat.episode())
                if waiting:
                    begin(seat)
                else:
                    busy = [other for other in busy if other is not seat]
        return episodes

    def _set_lessons(self, lessons: Lessons) -> None:
        for env in (seat.env for seat in self.seats if lessons):
            if not env.has_wrapper_attr("set_lessons"):
                raise SettingError(f"{self.describe()} takes no lessons; build it from settings with env.parameters, or in EnvParameters")
            env.get_wrapper_attr("set_lessons")(lessons)

    def close(self) -> None:
        for seat in self.seats:
            close_env(seat.env)


class _JobSeat(Seat):
    """One environment and its running episode of a job."""

    job = sign = 0

    def begin(self, seed: int, is_watched: bool) -> None:
        """Start an episode of the current job."""
        self.is_watched, self.signs, self.watched_obs = is_watched, 0.0, list[Tree]()
        self.start(seed)

    def write(self, obs: Tree, mask: Tree, start: np.ndarray) -> None:
        """Fill the environment's row of observations `[K, ...]`, masks `[K, M]` and episode starts `[K]`."""
        for rows, value in ((obs, self.obs), (mask, self.mask)):
            tree_map(lambda row, leaf: row.__setitem__(self.index, leaf), rows, value)
        start[self.index] = self.length == 0
        if self.is_watched:
            self.watched_obs.append(tree_map(lambda leaf: leaf[self.index].copy(), obs))

    def play(self, action: Tree, max_episode_steps: int) -> bool:
        """Step once; return whether this ended the episode."""
        over = self.step(action, max_episode_steps)
        self.signs += (self.reward > 0) - (self.reward < 0)
        return over

    def episode(self) -> JobEpisode:
        lessons, drawn = (info_arrays(self.info, key) if key in self.info else {} for key in (LESSONS, PARAMETERS))
        finished = Finished(self.return_, self.success, lessons, self.length, drawn, self.info.get(KEPT, {}))
        obs = tree_stack(self.watched_obs) if self.watched_obs else ()
        return JobEpisode(self.job, self.sign, finished, self.signs, obs, self.replaced, self.bad)


@dataclass(frozen=True)
class BuildEvaluator:
    """Builds an evaluator of K = `num_envs` environments in the process in which it is called; other fields as in `Evaluator`."""

    env: EnvConfig | Callable[[], gym.Env]
    num_envs: int
    spaces: Spaces
    stochastic: bool
    on_nan: str

    def __call__(self, index: int, restarts: int, network: nn.Module) -> Evaluator:
        config = single_env_config(self.env)
        envs = [draw_by_episode(make_env(config, index * self.num_envs + k)) for k in range(self.num_envs)]
        spaces = as_spaces(envs[0].observation_space, envs[0].action_space)
        if (spaces.observation, spaces.action) != (self.spaces.observation, self.spaces.action):
            raise SettingError(f"the environment's spaces differ from those of the model, {self.spaces}; load it with its own environment")
        return Evaluator(envs, network, self.spaces, self.stochastic, self.on_nan)  # type: ignore[arg-type]
