"""Opponents in the seats of a game that do not learn: the policy itself, random legal moves, or a scripted player.

Also the exploitability of a policy in small games.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from os import PathLike
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Generator, Tensor, nn
from torch.nn import functional

from lightning_rl.envs.agents.stepper import Opponent, SeatStepper
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.games import GAMES
from lightning_rl.envs.games.judges import JUDGED, exploitability
from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import ActingNetwork, ActingPolicy, PolicyNetwork
from lightning_rl.networks.normalization import eval_mode
from lightning_rl.spaces import OWN, Spaces, allocate, is_legal, legal_sample
from lightning_rl.types import State, Tree, tree_index, tree_leaves, tree_map, tree_stack, tree_to_numpy, tree_to_torch

Script = Callable[[Tree, Tree, np.random.Generator], Tree]
"""A scripted player: returns actions for observations `[K, ...]` and masks `[K, M]`, or () without masks, with a generator."""
SCRIPTS: dict[str, Script] = {}
"""Functions that this program has passed as opponents, by name."""


def name_opponent(setting: str, opponent: object) -> str:
    """Return the name of an opponent; a function is remembered by its path. Raises `SettingError`: it is neither a name nor a function."""
    if isinstance(opponent, str | PathLike):
        return str(opponent)
    if not callable(opponent) or isinstance(opponent, type):
        raise SettingError(f"{setting} must be random, a run's folder, or a function or its path, got {opponent!r}")
    name = f"{opponent.__module__}.{getattr(opponent, '__qualname__', type(opponent).__qualname__)}"
    SCRIPTS[name] = opponent
    return name


def explain_unsaved(name: str) -> str | None:
    """Return a line if another program could not find this opponent by the name that a checkpoint stores; None if it could."""
    module, _, function = name.rpartition(".")
    if name not in SCRIPTS or (module != "__main__" and getattr(sys.modules.get(module), function, None) is SCRIPTS[name]):
        return None
    return f"opponent {name} is a function that only this program knows: a program that loads a checkpoint must pass it again"


class AlwaysPlays:
    """Base class of opponents that play in all copies, and ignore where episodes begin and end."""

    def begin(self, copies: np.ndarray, seats: np.ndarray) -> None:
        """Do nothing."""

    def finish(self, copies: np.ndarray, results: np.ndarray) -> None:
        """Do nothing."""


class PolicyOpponent(AlwaysPlays):
    """Plays the other seats with a policy, with its newest weights if it is the one that learns.

    Args:
        network: the policy.
        num_rows: number of agents of all copies, each with its own memory.
    """

    def __init__(self, network: ActingNetwork, num_rows: int) -> None:
        self.network = network
        self.generator = Generator(next(network.parameters()).device)
        self.memory = tree_to_numpy(network.initial_memory(num_rows))

    def reset(self, seed: int | None) -> None:
        """Seed the draws, differently from the learner's, which use the seed itself."""
        if seed is not None:
            self.generator.manual_seed(int(np.random.SeedSequence([seed, 1]).generate_state(1)[0]))

    @torch.no_grad()
    def act(self, obs: Tree, mask: Tree, rows: np.ndarray, start: np.ndarray) -> Tree:
        """Return actions drawn from the policy."""
        actions, memory = draw_actions(self.network, obs, mask, tree_index(self.memory, rows), start, self.generator)
        tree_map(lambda kept, new: kept.__setitem__(rows, new), self.memory, memory)
        return actions

    def get_state(self) -> State:
        """Return the generator's state and the memory."""
        return {"generator": self.generator.get_state(), "memory": tree_map(np.array, self.memory)}

    def set_state(self, state: State) -> None:
        """Restore what `get_state` returned."""
        self.generator.set_state(torch.as_tensor(state["generator"]))
        tree_map(np.copyto, self.memory, state["memory"])


def draw_actions(
    network: ActingPolicy, obs: Tree, mask: Tree, memory: Tree, start: np.ndarray, generator: Generator, deterministic: bool = False
) -> tuple[Tree, Tree]:
    """Draw a policy's actions for K rows, or take the most likely ones. Return them in the environment's format, and its new memory."""
    seen = tree_to_torch((obs, memory, start, mask), generator.device)
    action, memory = network.sample(*seen, deterministic=deterministic, generator=generator)
    return network.distribution.to_env(tree_to_numpy(action)), tree_to_numpy(memory)


class ScriptedOpponent(AlwaysPlays):
    """Plays the other seats with a function that has its own random generator.

    Args:
        script: see `Script`.
        name: name in messages.
        space: action space of an agent.
    """

    def __init__(self, script: Script, name: str, space: Space) -> None:
        self.script, self.name, self.space, self.random = script, name, space, np.random.default_rng(0)

    def reset(self, seed: int | None) -> None:
        """Seed the draws."""
        if seed is not None:
            self.random = np.random.default_rng([seed, 2])

    def act(self, obs: Tree, mask: Tree, rows: np.ndarray, start: np.ndarray) -> Tree:
        """Return the script's actions. Raises `SettingError`: the script fails, or its actions do not fit the game or are illegal."""
        actions = allocate(self.space, len(rows))
        try:
            chosen = self.script(obs, mask, self.random)
        except Exception as error:
            raise SettingError(f"opponent {self.name} raised {type(error).__name__}: {error}") from error
        try:
            tree_map(copy_rows, actions, chosen)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:  # RuntimeError: a tensor that requires grad
            raise SettingError(f"opponent {self.name} returned no actions of {self.space} for {len(rows)} observations: {error}") from error
        for k in range(len(rows)):
            action = tree_index(actions, k)
            if not is_legal(self.space, action, tree_index(mask, k)):
                raise SettingError(f"opponent {self.name} returned the illegal action {action}")
        return actions

    def get_state(self) -> State:
        """Return the state of the random generator."""
        return {"draws": self.random.bit_generator.state}

    def set_state(self, state: State) -> None:
        """Restore what `get_state` returned."""
        self.random.bit_generator.state = state["draws"]


def copy_rows(actions: np.ndarray, chosen: object) -> None:
    """Copy the actions of a script. Raises `ValueError` or `TypeError`: they have another shape or dtype."""
    values = np.asarray(chosen)
    if values.shape != actions.shape:
        raise ValueError(f"shape {values.shape}, not {actions.shape}")
    np.copyto(actions, values)


class ScriptedPolicy(nn.Module):
    """A scripted player in the place of a policy. Has the methods of `ActingPolicy`.

    Args:
        player: the scripted player, seeded.
        hides: whether it sees only the agents' own part of observations.
    """

    def __init__(self, player: Opponent, hides: bool) -> None:
        super().__init__()
        self.player, self.hides = player, hides
        self.distribution = self
        self.place = nn.Parameter(torch.empty(0))
        """Shows the device, as the parameters of a policy do."""

    def initial_memory(self, num: int) -> Tree:
        """Return no memory."""
        return ()

    def sample(self, obs: Tree, memory: Tree, episode_start: Tensor, action_mask: Tree, **settings: object) -> tuple[Tree, Tree]:
        """Return the script's actions, and no memory."""
        seen, mask, start = tree_to_numpy((obs[OWN] if self.hides else obs, action_mask, episode_start))
        return tree_to_torch(self.player.act(seen, mask, np.arange(len(start)), start)), ()

    def to_env(self, actions: Tree) -> Tree:
        """Return the actions, which have the environment's format."""
        return actions


class RandomMoves:
    """A script that draws uniformly from the legal actions.

    Args:
        spaces: spaces of an agent.
    """

    def __init__(self, spaces: Spaces) -> None:
        self.space = deepcopy(spaces.action)

    def __call__(self, obs: Tree, mask: Tree, random: np.random.Generator) -> Tree:
        num = len(tree_leaves(obs)[0])
        self.space.seed(int(random.integers(2**31)))
        return tree_stack([legal_sample(self.space, mask[k]) if len(mask) else self.space.sample() for k in range(num)])


def seat_opponents(stepper: object, network: ActingNetwork) -> None:
    """Let the policy play the other seats, if there are any."""
    if isinstance(stepper, SeatStepper):
        stepper.opponent = PolicyOpponent(network, stepper.num_seats)


def find_exploitability(env: object, spaces: Spaces, network: object, deterministic: bool) -> dict[str, float]:
    """Return the policy's `exploitability`: the mean reward of its best opponent over the seats; 0 in an equilibrium.

    {} if the environment is not a game that can be evaluated exactly, or if the policy has other observations or a memory.

    Args:
        env: settings of the environment.
        spaces: spaces on which the policy was trained.
        network: the policy.
        deterministic: whether the policy plays its most likely moves.
    """
    if not isinstance(env, EnvConfig) or env.name not in JUDGED or GAMES[env.name].observation != spaces.observation:
        return {}
    if not isinstance(network, PolicyNetwork) or tree_leaves(network.initial_memory(1)):
        return {}
    with eval_mode(network.modules()):
        return {"exploitability": exploitability(env.name, Probabilities(network, deterministic))}


class Probabilities:
    """A policy's action probabilities `[K, M]` at observations `[K, ...]` with masks `[K, M]`, or () without masks.

    Args:
        network, deterministic: as in `find_exploitability`.
    """

    def __init__(self, network: PolicyNetwork, deterministic: bool) -> None:
        self.network, self.deterministic = network, deterministic

    @torch.no_grad()
    def __call__(self, obs: np.ndarray, mask: Tree) -> np.ndarray:
        distribution: Any = self.network.distribution
        obs, mask = tree_to_torch((obs, mask), next(self.network.parameters()).device)
        x, _ = self.network.policy(obs, (), None)
        if self.deterministic:
            probs = functional.one_hot(distribution.mode(x, mask), distribution.num_inputs)
        else:
            probs = distribution.log_probs(x, mask).exp()
        return probs.cpu().double().numpy()
