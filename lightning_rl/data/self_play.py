"""Self-play: snapshots of the learning policy, and which of them plays in each copy of a game.

Bansal et al. 2018, *Emergent complexity via multi-agent competition* (https://arxiv.org/abs/1710.03748). Names are those of ML-Agents.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from lightning_rl.checkpoints.archive import read_archive
from lightning_rl.checkpoints.manifest import File, FileStore
from lightning_rl.checkpoints.validation import GAMES, GENERATOR, INTEGERS, LIST, MAPPING, SNAPSHOTS, Rules, are_snapshots
from lightning_rl.data.opponents import Script, draw_actions, name_opponent
from lightning_rl.distributions.distribution import EpsilonGreedy
from lightning_rl.envs.agents.stepper import Opponent
from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import PolicyNetwork
from lightning_rl.networks.changes import changes_of, copy_network, structure_of
from lightning_rl.settings.fields import Range, read_fields
from lightning_rl.spaces import JOINT, OWN
from lightning_rl.types import State, Tree, tree_index, tree_map, tree_to_numpy

NEWEST = -1
"""Player number of the learning policy; snapshots are numbered from 0, fixed players from -2 downwards."""


EPSILON = "epsilon"
"""Key of a snapshot's exploration probability, which is stored with its weights."""
MAX_DRAWN = 10
"""Snapshots that play at the same time: each acts by itself, so more of them would take longer."""
MAX_FILE_BYTES = 64 << 20
"""Approximate bytes of a file of snapshots."""


@dataclass(frozen=True)
class SelfPlayConfig:
    """Let past versions of the policy play the seats that do not learn.

    Args:
        window: number of newest snapshots to play against.
        save_steps: environment steps between snapshots, over all ranks.
        play_against_latest_model_ratio: share of episodes against the newest weights; in the others a snapshot or fixed player is drawn.
        initial_elo: rating of the first policy and of fixed players.
        opponents: fixed players in addition to snapshots: `random`, a run's folder, or the path of a scripted player (in Python also the
            function).
        teams: for one behavior, patterns of the agents of each team, such as `[red_*, blue_*]`: in each copy all agents of one team learn;
            null: one agent learns.
        team_change: for several behaviors, and for the teams of a scene of Unity, environment steps of the one that learns after which the
            next one does; null: 5 · save_steps.
        swap_steps: for scenes of Unity, whose episodes do not begin together, environment steps of the others after which they are drawn
            again; null: 2,000. Elsewhere they are drawn for each episode.
    """

    window: Annotated[int, Range(1)] = 10
    save_steps: Annotated[int, Range(1)] = 20_000
    play_against_latest_model_ratio: Annotated[float, Range(0, 1)] = 0.5
    initial_elo: Annotated[float, Range(-1e5, 1e5)] = 1200.0
    opponents: list[str | Script] = field(default_factory=list)
    teams: list[str | list[str]] | None = None
    team_change: Annotated[int, Range(1)] | None = None
    swap_steps: Annotated[int, Range(1)] | None = None

    def __post_init__(self) -> None:
        read_fields(self, "self_play.")
        if not isinstance(self.opponents, list | tuple):
            raise SettingError(f"self_play.opponents must be a list of opponents, got {self.opponents!r}")
        if len({*self.names}) < len(self.opponents):
            raise SettingError(f"self_play.opponents name a player twice: {self.names}; list each once, and give functions different names")
        object.__setattr__(self, "opponents", self.names)
        if self.teams is not None:
            check_teams(self.teams)

    @property
    def names(self) -> list[str]:
        """Return the names of the opponents, which checkpoints store."""
        return [name_opponent("each of self_play.opponents", opponent) for opponent in self.opponents]

    @property
    def draw_steps(self) -> int:
        """Return how many steps the players of a scene of Unity make until they are drawn again."""
        return 2_000 if self.swap_steps is None else self.swap_steps

    @property
    def turn_steps(self) -> int:
        """Return the length of a behavior's turn in environment steps."""
        return 5 * self.save_steps if self.team_change is None else self.team_change


def check_teams(teams: object) -> None:
    """Raise `SettingError` unless these are two or more patterns of agents, or lists of patterns."""
    listed = [[team] if isinstance(team, str) else team for team in teams] if isinstance(teams, list | tuple) else []
    if len(listed) < 2 or not all(isinstance(team, list | tuple) and all(isinstance(name, str) for name in team) for team in listed):
        raise SettingError(f"self_play.teams must be a list of patterns of agents, one or more for each team, got {teams!r}")


class Game(NamedTuple):
    """A finished game: the number of the opposing player, and the result: 1 won, ½ drawn, 0 lost; the mean over several others.

    behavior, learner: the behaviors of the player and of the learner, if several take turns; else empty.
    """

    player: int
    result: float
    behavior: str = ""
    learner: str = ""


def as_game(stored: Any) -> Game:
    """Convert stored data of a checkpoint to a game. Raises `ValueError` or `TypeError`: it is not a game."""
    player, result, *names = stored
    if not 0.0 <= result <= 1.0 or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{stored} is not a game")
    return Game(int(player), float(result), *names)


class Snapshots:
    """Snapshots of a policy by number: the weights of the last `window`, and of older ones that still play.

    Args:
        network: the learning policy.
        window: number of snapshots to keep.
    """

    def __init__(self, network: PolicyNetwork, window: int) -> None:
        self.network, self.window, self.taken, self.first = network, window, 0, 0
        self.weights: dict[int, dict[str, Tensor]] = {}
        """Weights on the CPU, with the statistics of the normalizer. Snapshots do not change."""
        self.networks: dict[int, PolicyNetwork] = {}
        """Networks of the snapshots that play."""
        self.unused: list[PolicyNetwork] = []

    @property
    def numbers(self) -> range:
        """Return the numbers of the last `window` snapshots; fewer after resuming from a smaller window."""
        return range(max(self.first, self.taken - self.window), self.taken)

    @property
    def drawn(self) -> range:
        """Return the snapshots that are drawn until the next one is taken: all of a small window, `MAX_DRAWN` of a larger one.

        They are evenly spaced and counted from the newest, so with time each snapshot plays equally often.
        """
        distance = max(1, -(-len(self.numbers) // MAX_DRAWN))
        return self.numbers[(len(self.numbers) - 1) % distance :: distance]

    def take(self) -> None:
        """Store the weights of the current policy, with its normalizer's statistics."""
        self.weights[self.taken] = {name: tensor.to("cpu", copy=True) for name, tensor in self.network.state_dict().items()}
        if isinstance(distribution := getattr(self.network, "distribution", None), EpsilonGreedy):
            self.weights[self.taken][EPSILON] = torch.tensor(distribution.epsilon, dtype=torch.float64)
        self.taken += 1

    def get_network(self, number: int) -> PolicyNetwork:
        """Return the network of a snapshot."""
        if number not in self.networks:
            if self.unused and changes_of(structure_of(self.unused[0]), structure_of(self.network)):
                self.unused.clear()  # a user has changed the network since it was copied
            network = self.unused.pop() if self.unused else self._copy()
            load_weights(network, self.weights[number])
            self.networks[number] = network
        return self.networks[number]

    def _copy(self) -> PolicyNetwork:
        return copy_network(self.network).requires_grad_(False).eval()

    def drop(self, playing: Iterable[int]) -> None:
        """Drop snapshots that left the window, except those that are `playing`, and reuse the networks of those that play no more."""
        kept, active = {*self.numbers, *playing}, {*self.drawn, *playing}
        self.weights = {number: weights for number, weights in self.weights.items() if number in kept}
        self.unused += [network for number, network in self.networks.items() if number not in active]
        self.networks = {number: network for number, network in self.networks.items() if number in active}

    def get_weights(self, numbers: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """Return the weights of some snapshots by number. They are not copied."""
        return {number: self.weights[number] for number in numbers}

    def set_weights(self, weights: Mapping[int, Mapping[str, object]]) -> None:
        """Restore snapshots of `get_weights`. Raises `SettingError`: they do not fit the network."""
        network = self._copy()
        for number, values in weights.items():
            try:
                number = int(number)
                tensors = {name: torch.as_tensor(value) for name, value in values.items()}
                load_weights(network, tensors)
                if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
                    raise ValueError("NaN or infinite weights")
            except (RuntimeError, TypeError, AttributeError, ValueError, OverflowError) as error:
                raise SettingError(f"snapshot {number} of self_play does not fit this network") from error
            self.weights[number] = tensors


class SnapshotFile(NamedTuple):
    """A file, and the numbers of the snapshots in it that can still be drawn."""

    file: File
    numbers: list[int]


class SnapshotStore(FileStore):
    """Snapshots of a policy in files, each with those taken between two saves."""

    what, kinds = "self_play's snapshots", ("snapshots",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files: list[SnapshotFile] = []

    def save(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Write the snapshots that are in no file yet, and set the manifest. Raises `SaveError`."""
        with self.saving():
            names = self.names()
            files = [SnapshotFile(file, [k for k in numbers if k in weights]) for file, numbers in self.files if file.name in names]
            files = [file for file in files if file.numbers]
            new = sorted(weights.keys() - {number for file in files for number in file.numbers})
            at_once = max(1, MAX_FILE_BYTES // sum(weight.nbytes for weight in weights[new[0]].values())) if new else 1
            for k in range(0, len(new), at_once):
                numbers = new[k : k + at_once]
                content = {number: dict(weights[number]) for number in numbers}
                files.append(SnapshotFile(self.write("snapshots", partial(torch.save, content)), numbers))
        self.files = files
        self.manifest = {"files": [{**file._asdict(), "numbers": numbers} for file, numbers in files]}

    def load(self, entries: list[State]) -> dict[int, dict[str, Tensor]]:
        """Return the snapshots in the files of a manifest. Raises `SettingError`: one is missing or damaged."""
        weights: dict[int, dict[str, Tensor]] = {}
        with self.loading():
            files = [SnapshotFile(self.file_of(entry), entry["numbers"]) for entry in entries]
            for file, numbers in files:
                data = self.read(file)
                try:
                    content: Any = read_archive(data, "cpu")
                    is_good = are_snapshots(content)
                except Exception as error:  # torch raises whatever its unpickler meets
                    raise ValueError(f"{file.name} is not an archive of snapshots") from error
                if not is_good:
                    raise ValueError(f"{file.name} holds no snapshots")
                weights |= {number: content[number] for number in numbers}
        self.files, self.manifests = files, [{"files": entries}]
        return weights


def load_weights(network: PolicyNetwork, weights: Mapping[str, Tensor]) -> None:
    """Load the weights of a snapshot. Raises `RuntimeError` or `ValueError`: they do not fit."""
    weights = dict(weights)
    if isinstance(distribution := getattr(network, "distribution", None), EpsilonGreedy) and EPSILON in weights:
        distribution.epsilon = float(weights.pop(EPSILON))  # missing in older checkpoints
    network.load_state_dict(weights)


class SelfPlayOpponent:
    """Plays the other seats with the newest policy, its snapshots or fixed players, drawn for each copy and episode.

    A drawn player plays all other seats of its copy until the episode ends; different copies may have different players. Has the methods of
    `envs.agents.stepper.Opponent`.

    Args:
        snapshots: snapshots of the learning policy.
        config: how players are drawn.
        fixed: the players named in `config.opponents`.
        num_rows: number of agents of all copies, each with its own memory.
        num_agents: number of agents of a copy (of this behavior, if there are several).
        behavior: name of the behavior.
    """

    state_rules: ClassVar[Rules] = {
        "generator": GENERATOR,
        "playing?": INTEGERS,
        "draws?": MAPPING,
        "fixed?": LIST,
        "finished?": GAMES,
        "retired?": SNAPSHOTS,
    }
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(
        self, snapshots: Snapshots, config: SelfPlayConfig, fixed: list[Opponent], num_rows: int, num_agents: int, behavior: str = ""
    ) -> None:
        self.snapshots, self.config, self.num_agents = snapshots, config, num_agents
        self.behavior, self.learner = behavior, ""
        """The behavior of these players, and the behavior that learns from games against them, if several take turns."""
        self.fixed = {NEWEST - 1 - k: player for k, player in enumerate(fixed)}
        network = snapshots.network
        self.is_joint = getattr(network, "critic_obs", None) == [JOINT]
        self.generator = Generator(next(network.parameters()).device)
        self.random = np.random.default_rng(0)
        self.memory = tree_to_numpy(network.initial_memory(num_rows))
        self.playing = np.full(num_rows // num_agents, NEWEST)
        """The player in each copy."""
        self.finished: list[Game] = []

    def reset(self, seed: int | None) -> None:
        if seed is not None:
            # the learner's draws use the seed itself
            weights, draws = np.random.SeedSequence([seed, 1]).generate_state(2)
            self.generator.manual_seed(int(weights))
            self.random = np.random.default_rng(int(draws))
            for k, player in enumerate(self.fixed.values()):
                player.reset(int(draws) + k)

    def begin(self, copies: np.ndarray, seats: np.ndarray) -> None:
        """Draw the players in copies `[K]` whose episodes begin."""
        newest = self.random.random(len(copies)) < self.config.play_against_latest_model_ratio
        others = np.array([*self.snapshots.drawn, *self.fixed] or [NEWEST])
        self.playing[copies] = np.where(newest, NEWEST, others[self.random.integers(len(others), size=len(copies))])

    def finish(self, copies: np.ndarray, results: np.ndarray) -> None:
        """Note the results of episodes of copies `[K]`."""
        self.finished += [
            Game(int(self.playing[e]), float(result), self.behavior, self.learner) for e, result in zip(copies, results, strict=True)
        ]

    @torch.no_grad()
    def act(self, obs: Tree, mask: Tree, rows: np.ndarray, start: np.ndarray) -> Tree:
        """Return actions for observations `[K, ...]`: each player acts for its rows; players with the same network act as one batch."""
        playing, actions = self.playing[rows // self.num_agents], None
        for player in np.unique(playing).tolist():
            places = np.flatnonzero(playing == player)
            player_obs, player_mask = tree_index((obs, mask), places) if len(places) < len(rows) else (obs, mask)
            if player in self.fixed:
                seen = player_obs[OWN] if self.is_joint else player_obs
                chosen = self.fixed[player].act(seen, player_mask, rows[places], start[places])
            else:
                network = self.snapshots.network if player == NEWEST else self.snapshots.get_network(player)
                memory = tree_index(self.memory, rows[places])
                chosen, memory = draw_actions(network, player_obs, player_mask, memory, start[places], self.generator)
                tree_map(lambda kept, new, at=rows[places]: kept.__setitem__(at, new), self.memory, memory)
            if len(places) == len(rows):
                return chosen
            if actions is None:
                actions = tree_map(lambda leaf: np.zeros((len(rows), *leaf.shape[1:]), leaf.dtype), chosen)
            tree_map(lambda every, new, at=places: every.__setitem__(at, new), actions, chosen)
        return actions

    def take_finished(self, learner: str = "") -> list[Game]:
        """Return the games of a learner that finished since the last call."""
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
            raise ValueError(f"playing has shape {playing.shape} and dtype {playing.dtype}")
        self.playing = playing.copy()
        tree_map(np.copyto, self.memory, state["memory"])
        self.generator.set_state(torch.as_tensor(state["generator"]))
        self.random.bit_generator.state = state["draws"]
        self.finished = [as_game(game) for game in state["finished"]]
        if any(game.behavior != self.behavior for game in self.finished):
            raise ValueError("games against players of another behavior")
        for player, player_state in zip(self.fixed.values(), state["fixed"], strict=True):
            player.set_state(player_state)
        self.snapshots.set_weights(state["retired"])
        met = {game.player for game in self.finished} - {*range(self.snapshots.taken)}  # some have left the window
        unknown = ({*self.playing.tolist()} - {*self.snapshots.weights} | met) - {NEWEST, *self.fixed}
        if unknown:
            raise ValueError(f"players {sorted(unknown)} are in no checkpoint")
