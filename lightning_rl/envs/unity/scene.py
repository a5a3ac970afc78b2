"""A scene in one player: the seats of its agents, the messages in which they ask for decisions, and its restarts."""

import atexit
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import torch

from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.lessons import LessonValues, as_parameters, as_sampler
from lightning_rl.envs.unity.channels import make_parameter
from lightning_rl.envs.unity.decoding import BehaviorSpec
from lightning_rl.envs.unity.player import Actions, Player, Turn
from lightning_rl.envs.unity.seats import Seating, Seats, key_of_group
from lightning_rl.envs.unity.settings import UnitySettings, find_executable
from lightning_rl.errors import SettingError, nearest
from lightning_rl.processes.ranks import launched_rank
from lightning_rl.spaces import Spaces
from lightning_rl.types import Tree

MAX_TURNS_ALONE = 10_000
"""Messages in a row in which no learning agent asks; after them an error reports that none ever does."""


class Scene:
    """A scene in a player of its own. Its agents ask for decisions and end, see `seats`.

    Args:
        config: of the environment.
        index: of the player in the run.
    """

    run_folder: ClassVar[Path | None] = None
    """The folder for logs of players in the run of this process, if they have no other."""

    def __init__(self, config: EnvConfig, index: int) -> None:
        self.config, self.index, self.settings = config, index, read_settings(config)
        self.executable = find_executable(config.name)
        self.log = None if self.executable is None else find_log_folder(self.settings.log_folder) / f"Player-{index}.log"
        parameters = as_parameters(config.parameters)
        self.lessons: dict[str, LessonValues] = {name: parameter.only(len(parameter.lessons) - 1) for name, parameter in parameters.items()}
        """The newest lesson of each parameter."""
        self.seats: dict[str, Seats] = {}
        """By behavior and team as Unity names them."""
        self.first: Turn | None = None
        """The first message with agents that ask, before anybody has a seat."""
        self.open()

    @property
    def seed(self) -> int:
        """Return the seed of the player."""
        return (torch.initial_seed() + self.index) % 2**31

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Set parameters of the scene, from its next reads of them on. Raises `SettingError`: it has no such parameter."""
        for name in lessons.keys() - self.lessons.keys():
            raise SettingError(f"{name} is not one of env.parameters{nearest(name, self.lessons)}")
        self.lessons |= lessons
        self.player.outbox += self.make_parameters()

    def make_parameters(self) -> bytes:
        """Return the messages that set the parameters of the scene to their newest lessons."""
        samplers = {name: as_sampler(name, values["values"][-1]) for name, values in self.lessons.items()}
        return b"".join(make_parameter(name, sampler, self.seed + k) for k, (name, sampler) in enumerate(samplers.items()))

    @property
    def played(self) -> dict[str, int]:
        """Return the number of the lesson of each parameter."""
        return {name: values["first"] + len(values["values"]) - 1 for name, values in self.lessons.items()}

    def open(self) -> None:
        """Start the player, and the episodes in it."""
        self.player = Player(self.executable, self.settings, self.index, self.seed, self.make_parameters(), self.log)

    def keep_log(self) -> None:
        """Let the log be in the folder of the run; a player was started before the run had one, so until it is closed a link is there."""
        if self.run_folder is None or self.log is None or self.settings.log_folder is not None or self.log.parent == self.run_folder:
            return
        with suppress(OSError):  # a system without links, for example
            self.run_folder.mkdir(exist_ok=True)
            link = self.run_folder / self.log.name
            link.unlink(missing_ok=True)
            link.symlink_to(self.log)
            self.log = self.player.log = link

    def close(self) -> None:
        """Close the player, and put its log into the place of the link to it."""
        self.player.close()
        if self.log is not None and self.log.is_symlink():
            with suppress(OSError):  # the player has written none, or the folder is gone
                written = self.log.readlink()
                self.log.unlink()
                shutil.move(written, self.log)

    def reset(self) -> None:
        """Abandon all episodes, and start new ones."""
        self.first = None
        self.player.reset()

    def wait(self) -> Turn:
        """Wait for a message in which agents that may learn ask. Return it if nobody has a seat yet."""
        for _ in range(MAX_TURNS_ALONE):
            turn = self.player.finish()
            for name, seats in self.seats.items():
                seats.note_ends(turn.ended[name])
            self._check_behavior(turn)
            asking = [name for name, agents in turn.asking.items() if agents.ids and self.is_learner(name)]
            if asking:
                for name in asking if self.seats else ():
                    if name not in self.seats:
                        late = f"the behavior {name} appeared after the first message"
                        raise SettingError(f"{self.config.name}: {late}; choose those that learn with env.kwargs.behavior")
                for name, seats in self.seats.items():
                    seats.note_requests(turn.asking[name])
                return turn
            self.player.start({})
        raise SettingError(f"{self.config.name}: in {MAX_TURNS_ALONE:,} messages no agent of {self.settings.behavior} asked for a decision")

    def _check_behavior(self, turn: Turn) -> None:
        """Raise `SettingError`: agents ask, and there is no behavior with the name that the settings give."""
        wanted = self.settings.behavior
        if wanted is None or not any(agents.ids for agents in turn.asking.values()):
            return
        known = {known_as(name) for name in self.player.specs}
        if wanted not in known:
            raise SettingError(f"env.kwargs.behavior {wanted}: the scene has {' and '.join(sorted(known))}{nearest(wanted, known)}")

    def wait_for_first(self) -> Turn:
        """Return the first message in which agents ask."""
        self.first = self.first or self.wait()
        return self.first

    def is_learner(self, name: str) -> bool:
        """Return whether agents of a behavior, as Unity names it, learn."""
        return self.settings.behavior in (None, known_as(name))

    def sit(self, seating: Mapping[str, Seating]) -> None:
        """Take the seats of the agents that ask in the first message; `seating`: by behavior and team."""
        turn = self.wait_for_first()
        self.first, self.seats = None, {name: Seats(known_as(name), *given) for name, given in seating.items()}
        for name, agents in turn.asking.items():
            if agents.ids and self.is_learner(name):
                if name not in self.seats:
                    raise SettingError(
                        f"{self.config.name} has agents of {name}, which the model does not know; load it with its own scene"
                    )
                self.seats[name].note_requests(agents)

    def as_actions(self, name: str, actions: Tree) -> Actions:
        """Return the actions `[K, …]` of the agents of a behavior that asked, in the form of its messages."""
        spec = self.player.specs[name]
        if spec.continuous and spec.branches:
            return Actions(actions["continuous"], actions["discrete"])
        return Actions(actions, None) if spec.continuous else Actions(None, actions.reshape(len(actions), -1))


def read_settings(config: EnvConfig) -> UnitySettings:
    """Return the settings of a scene's players."""
    return UnitySettings(**config.kwargs)


def known_as(name: str) -> str:
    """Return the name of a behavior without its team."""
    return name.partition("?")[0]


def seat_name(name: str, seat: int) -> str:
    """Return the name of an agent: `Striker/0/3` is seat 3 of team 0."""
    behavior, _, team = name.partition("?team=")
    return f"{behavior}/{team or 0}/{seat}"


def behavior_of(agent: str) -> str:
    """Return the name of the behavior of an agent with a name of `seat_name`."""
    return agent.rsplit("/", 2)[0]


@cache
def make_log_folder() -> Path:
    """Return the folder of logs that have no other, one for each program."""
    folder = tempfile.mkdtemp(prefix="unity_players_")
    atexit.register(remove_if_empty, folder)
    return Path(folder)


def remove_if_empty(folder: str) -> None:
    """Remove a folder, unless there are logs in it."""
    with suppress(OSError):
        os.rmdir(folder)


def find_log_folder(given: str | None) -> Path:
    """Return the folder of the players' logs, which exists."""
    folder = make_log_folder() if given is None else Path(given).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


KEPT: dict[str, Scene] = {}
"""Scenes that were opened to find their spaces, and wait for their run."""


def open_scene(config: EnvConfig, index: int) -> Scene:
    """Open a scene, or take the one that was opened to find its spaces."""
    return KEPT.pop(key_of(config), None) or Scene(config, index)


def key_of(config: EnvConfig) -> str:
    """Return what must be equal for a kept scene to be the same."""
    return json.dumps([config.name, config.kwargs, config.parameters], sort_keys=True, default=str)


def find_behaviors(config: EnvConfig) -> dict[str, Spaces]:
    """Open the scene in its first player, which then waits for the run, and return the spaces of each behavior that learns.

    Raises `SettingError`: the teams of a behavior have different ones.
    """
    scene = KEPT.get(key_of(config)) or Scene(config, launched_rank() * config.num_envs)
    try:
        turn = scene.wait_for_first()
        teams: dict[str, list[str]] = {}
        for name in sorted(turn.asking):
            if turn.asking[name].ids and scene.is_learner(name):
                teams.setdefault(known_as(name), []).append(name)
        found = {}
        for behavior, names in teams.items():
            specs = {scene.player.specs[name] for name in names}
            if len(specs) > 1:
                raise SettingError(f"the teams of {behavior} have different observations or actions")
            (spec,) = specs
            agents = [seat_name(name, seat) for name in names for seat in range(scene.settings.seats or len(turn.asking[name].ids))]
            found[behavior] = Spaces(observation_space(spec), action_space(spec), bool(spec.branches), tuple(agents))
    except BaseException:
        scene.player.close()
        raise
    KEPT[key_of(config)] = scene
    return found


def find_spaces(config: EnvConfig) -> Spaces:
    """Return the spaces of the only behavior that learns, see `find_behaviors`. Raises `SettingError`: there are several."""
    found = find_behaviors(config)
    if len(found) > 1:
        KEPT.pop(key_of(config)).player.close()
        ways = "choose one with env.kwargs.behavior, or train each with MultiAgent"
        raise SettingError(f"the scene has the behaviors {' and '.join(found)}: {ways}")
    (spaces,) = found.values()
    return spaces


def find_groups(config: EnvConfig, spaces: Spaces) -> Spaces:
    """Return the spaces of agents that learn in groups, those of a scene whose spaces were just found.

    All groups have the size of the largest in the first message, or `seats`. An agent without a group is one by itself. Raises
    `SettingError`: none has a group.
    """
    scene = KEPT[key_of(config)]
    asking = scene.wait_for_first().asking
    names = dict.fromkeys(f"{behavior}?team={team}" for behavior, team, _ in (agent.rsplit("/", 2) for agent in spaces.agents))
    if not any(any(asking[name].groups) for name in names):
        KEPT.pop(key_of(config)).player.close()
        behaviors = " and ".join(dict.fromkeys(map(known_as, names)))
        groups = "so there are no groups to learn"
        raise SettingError(
            f"no agent of {behaviors} is in a SimpleMultiAgentGroup, {groups}; use PPO (trainer_type: ppo in a trainer file)"
        )
    sizes = {name: Counter(key_of_group(*agent) for agent in zip(asking[name].ids, asking[name].groups, strict=True)) for name in names}
    size = scene.settings.seats or max(max(counts.values()) for counts in sizes.values())
    agents = [seat_name(name, seat) for name, counts in sizes.items() for seat in range(size * len(counts))]
    return spaces._replace(agents=tuple(agents), groups=len(agents) // size)


def find_roles(config: EnvConfig, behavior: str | None = None) -> dict[str, list[str]]:
    """Return the observations that are lists of `entities`, and those that describe `goals`, of a scene whose spaces were just found.

    `behavior`: one of those that learn; None: the only one.
    """
    scene = KEPT[key_of(config)]
    spec = next(spec for name, spec in scene.player.specs.items() if scene.is_learner(name) and behavior in (None, known_as(name)))
    names = ["obs"] if len(spec.observations) == 1 else [f"obs_{i}" for i in range(len(spec.observations))]
    named = list(zip(names, spec.observations, strict=True))
    lists = [name for name, observation in named if len(observation.shape) == 2]
    return {"entities": lists, "goals": [name for name, observation in named if observation.is_goal and name not in lists]}


def observation_space(spec: BehaviorSpec) -> gym.Space:
    """Return the space of a behavior's observations: a Box, or several as `obs_0`, `obs_1`, …"""
    boxes: dict[str, gym.Space] = {}
    for i, observation in enumerate(spec.observations):
        low, high = (0, 255) if observation.dtype == np.uint8 else (-np.inf, np.inf)
        boxes[f"obs_{i}"] = gym.spaces.Box(low, high, observation.shape, observation.dtype.type)
    return boxes["obs_0"] if len(boxes) == 1 else gym.spaces.Dict(boxes)


def action_space(spec: BehaviorSpec) -> gym.Space:
    """Return the space of a behavior's actions."""
    continuous = gym.spaces.Box(-1.0, 1.0, (spec.continuous,), np.float32)
    if not spec.branches:
        return continuous
    if spec.continuous:
        return gym.spaces.Dict({"continuous": continuous, "discrete": gym.spaces.MultiDiscrete(list(spec.branches))})
    return gym.spaces.Discrete(spec.branches[0]) if len(spec.branches) == 1 else gym.spaces.MultiDiscrete(list(spec.branches))
