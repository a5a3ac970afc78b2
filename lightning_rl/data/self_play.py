"""Play against past selves: snapshots of the policy that learns, and who of them plays in which copy of a game.

Bansal et al. 2018, *Emergent complexity via multi-agent competition* (https://arxiv.org/abs/1710.03748). Names are those of ML-Agents.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn

from lightning_rl.data.opponents import draw_actions
from lightning_rl.distributions.distribution import EpsilonGreedy
from lightning_rl.envs.agents.stepper import Opponent
from lightning_rl.errors import SettingError, check_range
from lightning_rl.spaces import JOINT, OWN
from lightning_rl.types import State, Tree, tree_index, tree_map, tree_to_numpy

NEWEST = -1
"""The player number of the policy that learns; snapshots count from 0, fixed players down from -2."""


EPSILON = "epsilon"
"""With what probability a snapshot explores, beside its weights."""


@dataclass(frozen=True)
class SelfPlayConfig:
    """Let past selves play the seats that do not learn.

    Args:
        window: how many snapshots to play against, the newest ones.
        save_steps: environment steps between snapshots, all ranks together.
        play_against_latest_model_ratio: share of episodes against the newest weights; in the others a snapshot or fixed player is drawn.
        initial_elo: rating of the first policy, and of fixed players.
        opponents: fixed players beside snapshots: `random`, the path of a scripted player, or a run's folder.
        teams: of one behavior, patterns of the agents of each team, such as `[red_*, blue_*]`: a team learns in each copy, with all of its
            agents; null: one agent.
        team_change: of several behaviors, environment steps of this one after which the next one learns; null: 5 · save_steps.
    """

    window: int = 10
    save_steps: int = 20_000
    play_against_latest_model_ratio: float = 0.5
    initial_elo: float = 1200.0
    opponents: list[str] = field(default_factory=list)
    teams: list[str | list[str]] | None = None
    team_change: int | None = None

    def __post_init__(self) -> None:
        check_range("self_play.initial_elo", self.initial_elo, -1e5, 1e5)
        check_range("self_play.window", self.window, 1, whole=True)
        check_range("self_play.save_steps", self.save_steps, 1, whole=True)
        check_range("self_play.play_against_latest_model_ratio", self.play_against_latest_model_ratio, 0, 1)
        if not isinstance(self.opponents, list | tuple) or not all(isinstance(each, str) for each in self.opponents):
            raise SettingError(f"self_play.opponents must be a list of names, got {self.opponents!r}")
        if self.teams is not None:
            check_teams(self.teams)
        if self.team_change is not None:
            check_range("self_play.team_change", self.team_change, 1, whole=True)

    @property
    def turn_steps(self) -> int:
        """Return the environment steps of a behavior's turn."""
        return 5 * self.save_steps if self.team_change is None else self.team_change


def check_teams(teams: Any) -> None:
    """Raise `SettingError` unless these are two or more patterns of agents, or lists of such."""
    listed = [[team] if isinstance(team, str) else team for team in teams] if isinstance(teams, list | tuple) else []
    if len(listed) < 2 or not all(isinstance(team, list | tuple) and all(isinstance(each, str) for each in team) for team in listed):
        raise SettingError(f"self_play.teams must be a list of patterns of agents, one or more for each team, got {teams!r}")


class Game(NamedTuple):
    """A game that ended: against which player, and its result: 1 won, ½ drawn, 0 lost; of several others the mean of each.

    behavior: whose player it was, and learner: which behavior learned, where several take turns; else both are empty.
    """

    player: int
    result: float
    behavior: str = ""
    learner: str = ""


def as_game(stored: Any) -> Game:
    """Return a game from a checkpoint. Raises `ValueError` or `TypeError`: it is none."""
    player, result, *names = stored
    if not 0.0 <= result <= 1.0 or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{stored} is no game")
    return Game(int(player), float(result), *names)


class Snapshots:
    """Past selves of a policy, by their number: the last `window`, and older ones that still play.

    Args:
        network: the policy that learns.
        window: how many to keep.
    """

    def __init__(self, network: nn.Module, window: int) -> None:
        self.network, self.window, self.taken, self.first = network, window, 0, 0
        self.networks: dict[int, Any] = {}

    @property
    def numbers(self) -> range:
        """Return the numbers of the last `window` snapshots; fewer where a checkpoint of a smaller window is continued."""
        return range(max(self.first, self.taken - self.window), self.taken)

    def take(self) -> None:
        """Keep a copy of the policy as it is now, with its normalizer's statistics."""
        self.networks[self.taken] = self._copy()
        self.taken += 1

    def _copy(self) -> nn.Module:
        return deepcopy(self.network).requires_grad_(False).eval()

    def drop(self, playing: Iterable[int]) -> None:
        """Forget those that left the window, but for those that are `playing`."""
        kept = {*self.numbers, *playing}
        self.networks = {number: network for number, network in self.networks.items() if number in kept}

    def get_weights(self, numbers: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """Return the weights of some snapshots, by their number; not copies, as snapshots do not change."""
        weights = {number: {name: each.cpu() for name, each in self.networks[number].state_dict().items()} for number in numbers}
        for number, each in weights.items():
            if isinstance(distribution := getattr(self.networks[number], "distribution", None), EpsilonGreedy):
                each[EPSILON] = torch.tensor(distribution.epsilon, dtype=torch.float64)
        return weights

    def set_weights(self, weights: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore snapshots that `get_weights` returned. Raises `SettingError`: they are not of such a network."""
        for number, values in weights.items():
            network: Any = self._copy()
            try:
                number = int(number)
                tensors = {name: torch.as_tensor(value) for name, value in values.items()}
                if isinstance(distribution := getattr(network, "distribution", None), EpsilonGreedy) and EPSILON in tensors:
                    distribution.epsilon = float(tensors.pop(EPSILON))  # which older checkpoints do not hold
                network.load_state_dict(tensors)
                if not all(bool(torch.isfinite(each).all()) for each in tensors.values()):
                    raise ValueError("NaN or infinite weights")
            except (RuntimeError, TypeError, AttributeError, ValueError, OverflowError) as error:
                raise SettingError(f"snapshot {number} of self_play is not of this network") from error
            self.networks[number] = network


class SelfPlayOpponent:
    """The newest policy, its past selves and fixed players in the other seats; who plays is drawn for each copy and episode.

    A drawn player plays all other seats of its copy until the episode ends; different ones play at the same time. Has the methods of
    `envs.agents.stepper.Opponent`.

    Args:
        snapshots: of the policy that learns.
        config: how players are drawn.
        fixed: the players that `config.opponents` names.
        num_rows: agents of all copies, each with a memory of its own.
        num_agents: of a copy, and of this behavior if there are several.
        behavior: its name.
    """

    def __init__(
        self, snapshots: Snapshots, config: SelfPlayConfig, fixed: list[Opponent], num_rows: int, num_agents: int, behavior: str = ""
    ) -> None:
        self.snapshots, self.config, self.num_agents = snapshots, config, num_agents
        self.behavior, self.learner = behavior, ""
        """Whose players these are, and the behavior that learns from games against them, where several take turns."""
        self.fixed = {NEWEST - 1 - k: player for k, player in enumerate(fixed)}
        network: Any = snapshots.network
        self.is_joint = getattr(network, "critic_obs", None) == [JOINT]
        self.generator = Generator(next(network.parameters()).device)
        self.random = np.random.default_rng(0)
        self.memory = tree_to_numpy(network.initial_memory(num_rows))
        self.playing = np.full(num_rows // num_agents, NEWEST)
        """Who plays in each copy."""
        self.finished: list[Game] = []

    def reset(self, seed: int | None) -> None:
        if seed is not None:
            # the learner's draws come from the seed itself
            weights, draws = np.random.SeedSequence([seed, 1]).generate_state(2)
            self.generator.manual_seed(int(weights))
            self.random = np.random.default_rng(int(draws))
            for k, player in enumerate(self.fixed.values()):
                player.reset(int(draws) + k)

    def begin(self, copies: np.ndarray, seats: np.ndarray) -> None:
        """Draw who plays in copies `[K]` whose episodes begin."""
        newest = self.random.random(len(copies)) < self.config.play_against_latest_model_ratio
        others = np.array([*self.snapshots.numbers, *self.fixed, *([] if self.snapshots.numbers or self.fixed else [NEWEST])])
        self.playing[copies] = np.where(newest, NEWEST, others[self.random.integers(len(others), size=len(copies))])

    def finish(self, copies: np.ndarray, results: np.ndarray) -> None:
        """Note how episodes of copies `[K]` ended."""
        self.finished += [
            Game(int(self.playing[e]), float(result), self.behavior, self.learner) for e, result in zip(copies, results, strict=True)
        ]

    @torch.no_grad()
    def act(self, obs: Tree, mask: Tree, rows: np.ndarray, start: np.ndarray) -> Tree:
        """Return actions for observations `[K, ...]`: each player's for its rows, drawn together where they are of one network."""
        playing, actions = self.playing[rows // self.num_agents], None
        for player in np.unique(playing).tolist():
            own = np.flatnonzero(playing == player)
            own_obs, own_mask = tree_index((obs, mask), own) if len(own) < len(rows) else (obs, mask)
            if player in self.fixed:
                seen = own_obs[OWN] if self.is_joint else own_obs
                chosen = self.fixed[player].act(seen, own_mask, rows[own], start[own])
            else:
                network = self.snapshots.network if player == NEWEST else self.snapshots.networks[player]
                memory = tree_index(self.memory, rows[own])
                chosen, memory = draw_actions(network, own_obs, own_mask, memory, start[own], self.generator)
                tree_map(lambda kept, new, at=rows[own]: kept.__setitem__(at, new), self.memory, memory)
            if len(own) == len(rows):
                return chosen
            if actions is None:
                actions = tree_map(lambda leaf: np.zeros((len(rows), *leaf.shape[1:]), leaf.dtype), chosen)
            tree_map(lambda every, new, at=own: every.__setitem__(at, new), actions, chosen)
        return actions

    def take_finished(self, learner: str = "") -> list[Game]:
        """Return the games of a learner that ended since the last call."""
        finished = [game for game in self.finished if game.learner == learner]
        self.finished = [game for game in self.finished if game.learner != learner]
        return finished

    def get_state(self) -> State:
        retired = {*self.playing.tolist()} - {*self.snapshots.numbers, *self.fixed, NEWEST}
        return {
            "playing": self.playing.copy(),
            "memory": tree_map(np.array, self.memory),
            "generator": self.generator.get_state(),
            "draws": self.random.bit_generator.state,
            "fixed": [player.get_state() for player in self.fixed.values()],
            "finished": [tuple(game) for game in self.finished],
            "retired": self.snapshots.get_weights(sorted(retired)),
        }

    def set_state(self, state: State) -> None:
        playing = np.asarray(state["playing"])
        if playing.shape != self.playing.shape or playing.dtype != self.playing.dtype:
            raise ValueError(f"who plays has shape {playing.shape} and type {playing.dtype}")
        self.playing = playing.copy()
        tree_map(np.copyto, self.memory, state["memory"])
        self.generator.set_state(torch.as_tensor(state["generator"]))
        self.random.bit_generator.state = state["draws"]
        self.finished = [as_game(game) for game in state["finished"]]
        if any(game.behavior != self.behavior for game in self.finished):
            raise ValueError("games against players of another behavior")
        for player, own in zip(self.fixed.values(), state["fixed"], strict=True):
            player.set_state(own)
        self.snapshots.set_weights(state["retired"])
        met = {game.player for game in self.finished} - {*range(self.snapshots.taken)}  # some have left the window
        unknown = ({*self.playing.tolist()} - {*self.snapshots.networks} | met) - {NEWEST, *self.fixed}
        if unknown:
            raise ValueError(f"players {sorted(unknown)} are in no checkpoint")
