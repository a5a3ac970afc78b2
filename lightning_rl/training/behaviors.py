"""Behaviors of multi-agent runs: their agents, and the algorithm that trains each or a frozen policy.

Also opponents of the agents that learn (`random`, a run, or the path of a scripted player), and the settings of self-play.
"""

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from glob import escape
from inspect import isfunction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_rl.callbacks.iteration import LIGHTNING
from lightning_rl.data.opponents import SCRIPTS, PolicyOpponent, RandomMoves, Script, ScriptedOpponent
from lightning_rl.data.self_play import SelfPlayConfig
from lightning_rl.envs.agents.copies import AgentsEnv
from lightning_rl.envs.agents.stepper import Opponent
from lightning_rl.envs.agents.world import SharedEnv
from lightning_rl.envs.config import EnvConfig, EnvSource
from lightning_rl.envs.make import make_env
from lightning_rl.envs.sync import closing_env
from lightning_rl.envs.unity.scene import behavior_of, find_behaviors, find_groups, find_roles
from lightning_rl.errors import SettingError, check_names, closest, nearest
from lightning_rl.networks.acting import VisiblePolicy
from lightning_rl.settings.dotted_paths import check_function, check_module
from lightning_rl.settings.fields import as_settings, settings_of
from lightning_rl.settings.yaml_files import Plain
from lightning_rl.sharing.hub import is_address
from lightning_rl.spaces import JOINT, Spaces, without_hidden
from lightning_rl.training.hooks import RunModule
from lightning_rl.training.learning import LearningModule, choose_behavior
from lightning_rl.training.loading import algorithm_class, stored_name

BEHAVIOR_KEYS = ("agents", "learner")
"""The settings of a behavior, all required."""
OF_THE_RUN = ("env", "max_env_steps", "log_interval", "spaces")
"""Settings of the run, which single behaviors do not have."""


@dataclass(frozen=True)
class Behavior:
    """Agents that share one policy, and the algorithm that trains it.

    Args:
        agents: their names, or patterns of names such as `adversary_*`.
        learner: an algorithm with its settings: a class such as `SAC`, `partial(SAC, buffer_size=50_000)`, or a `FrozenPolicy`.
        frozen: the behavior acts but does not learn.
        origin: the source of a frozen behavior, as stored in a checkpoint.
    """

    agents: str | list[str]
    learner: Callable[..., Any]
    frozen: bool = False
    origin: Mapping[str, str | None] = field(default_factory=dict, repr=False)

    @property
    def joint(self) -> str:
        """Return what its critics see jointly; see `Spaces`."""
        cls = getattr(self.learner, "func", self.learner)
        critic_obs = getattr(self.learner, "keywords", {}).get("critic_obs", getattr(cls, "critic_obs", None))
        return critic_obs if isinstance(critic_obs, str) else ""

    @property
    def learns_in_groups(self) -> bool:
        """Return whether its agents learn in the groups that they have in a scene of Unity."""
        return bool(getattr(getattr(self.learner, "func", self.learner), "learns_in_groups", False))

    def choose(self, agents: Sequence[str]) -> list[str]:
        """Return the agents of an environment that have this behavior."""
        return choose_agents(self.patterns, agents)

    @property
    def patterns(self) -> list[str]:
        """Return the patterns of agents' names, also a single one, as a list."""
        return [self.agents] if isinstance(self.agents, str) else self.agents


def choose_agents(patterns: Sequence[str], agents: Sequence[str]) -> list[str]:
    """Return the agents whose names match one of the patterns, such as `adversary_*`."""
    return [agent for agent in agents if any(fnmatchcase(agent, pattern) for pattern in patterns)]


class FrozenPolicy:
    """The policy of another run, which acts but does not learn, in place of a learner.

    Args:
        checkpoint: a checkpoint of that run, or its folder.
        behavior: which of its policies, if it has several.
    """

    def __init__(self, checkpoint: str | Path, behavior: str | None = None) -> None:
        self.checkpoint, self.behavior = str(checkpoint), behavior
        self.algorithm = choose_behavior(RunModule.load_from_checkpoint(checkpoint), behavior)
        self.keywords = {"critic_obs": getattr(self.algorithm, "critic_obs", None)}
        self.learns_in_groups = self.algorithm.learns_in_groups

    def __call__(self, env: SharedEnv | None, *, spaces: Spaces, max_env_steps: int) -> LearningModule:
        stored = self.algorithm
        if (stored.spaces.observation, stored.spaces.action) != (spaces.observation, spaces.action):
            raise SettingError(f"{self.checkpoint} was trained with other observations or actions than these agents have")
        settings = {name: value for name, value in stored.hparams.items() if name not in (*OF_THE_RUN, "self_play")}
        cls: Any = type(stored)
        algorithm: LearningModule = cls(env, spaces=spaces, max_env_steps=max_env_steps, **settings)
        algorithm.configure_model()
        algorithm.load_state_dict(stored.state_dict())
        return algorithm


def as_behavior(name: str, given: Behavior | Plain, stored: bool = False) -> Behavior:
    """Build a behavior from settings: `agents`, and a `learner` with `class_path` and `init_args`, or with a `checkpoint`.

    `stored`: the settings are from a checkpoint that is being loaded, which also contains the weights of frozen behaviors.

    Raises `SettingError`: the settings are invalid, or the algorithm does not exist.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise SettingError(f"behaviors: the name {name!r} must consist of letters, digits, _ and -")
    if hasattr(nn.ModuleDict(), name):
        raise SettingError(f"behaviors: the name {name!r} already belongs to a part of torch's modules; choose another")
    if isinstance(given, Behavior):
        if not isinstance(given.agents, str | list | tuple) or not all(isinstance(agent, str) for agent in given.agents):
            raise SettingError(f"behavior {name}: agents must be names, or patterns such as adversary_*, got {given.agents!r}")
        if isinstance(given.learner, LearningModule) or not callable(given.learner):
            what = f"got {type(given.learner).__name__}; give a class such as PPO, or partial(PPO, n_steps=64)"
            raise SettingError(f"behavior {name}: learner must make an algorithm for its agents, {what}")
        cls = getattr(given.learner, "func", given.learner)
        if isinstance(cls, type) and not (issubclass(cls, LearningModule) and "max_env_steps" in settings_of(cls)):  # type: ignore[arg-type]
            raise SettingError(f"behavior {name}: {cls.__name__} does not learn from the steps of agents; choose another algorithm")
        for setting in OF_THE_RUN:
            if setting in getattr(given.learner, "keywords", {}):
                raise SettingError(f"behavior {name}: {setting} belongs to the run, not to one behavior")
        return replace(given, frozen=given.frozen or isinstance(given.learner, FrozenPolicy))
    if not isinstance(given, Mapping):
        raise SettingError(f"behaviors.{name} must be a mapping of agents and learner, got {given!r}")
    check_names(f"behaviors.{name}.", given, BEHAVIOR_KEYS)
    if missing := [key for key in BEHAVIOR_KEYS if key not in given]:
        raise SettingError(f"behaviors.{name}.{missing[0]} is missing: a behavior is a mapping of agents and learner")
    learner = given["learner"]
    if isinstance(learner, str):
        learner = {"class_path": learner}
    frozen = isinstance(learner, Mapping) and "checkpoint" in learner
    origin = {name: learner.get(name) for name in ("checkpoint", "behavior")} if frozen else {}
    if frozen and not stored and not {*learner} - {"checkpoint", "behavior", "class_path", "init_args"}:
        try:
            learner = FrozenPolicy(learner["checkpoint"], learner.get("behavior"))
        except SettingError as error:
            raise SettingError(f"behavior {name}: {error}") from error
    if isinstance(learner, Mapping):
        if not {"class_path"} <= learner.keys() <= {"class_path", "init_args", *(("checkpoint", "behavior") if frozen else ())}:
            raise SettingError(f"behaviors.{name}.learner must be {{class_path, init_args}} or {{checkpoint, behavior}}, got {learner!r}")
        settings = dict(learner.get("init_args") or {})
        for setting in OF_THE_RUN:
            if setting in settings:
                raise SettingError(f"behaviors.{name}.learner: {setting} belongs to the run, not to one behavior")
        if isinstance(settings.get("memory"), str):
            settings["memory"] = {"class_path": settings["memory"]}  # like the command line for one policy
        make: Callable[..., LearningModule] = algorithm_class(learner["class_path"], LearningModule)
        learner = partial(make, **settings)
    return as_behavior(name, Behavior(given["agents"], learner, frozen, origin))


def find_sides(env: EnvSource, behaviors: Mapping[str, Behavior]) -> dict[str, Spaces]:
    """Return the spaces of each behavior, with the names of its agents, by building one environment.

    Raises `SettingError`: an agent has no behavior or two, agents of one behavior have different spaces, a pattern matches no agent, or
    agents take turns.
    """
    if isinstance(env, EnvConfig) and env.is_unity:
        return find_unity_sides(env, behaviors)
    with closing_env(make_env(env)) as built:
        one = built.unwrapped
        if not isinstance(one, AgentsEnv):
            raise SettingError("MultiAgent needs a multi-agent environment, such as mpe2.simple_spread_v3")
        if one.takes_turns:
            raise SettingError(
                f"MultiAgent: the agents of {one.name} take turns and cannot all learn at the same time; use one algorithm for them"
            )
        built.reset(seed=0)
        chosen = match_agents(behaviors, one.agents)
        sides = {name: one.spaces_of(agents, f"behavior {name}")._replace(agents=tuple(agents)) for name, agents in chosen.items()}
        return {name: one.with_joint(spaces, behaviors[name].joint) for name, spaces in sides.items()}


def find_unity_sides(env: EnvConfig, behaviors: Mapping[str, Behavior]) -> dict[str, Spaces]:
    """Return what `find_sides` does, for a scene of Unity."""
    found = [(agent, spaces._replace(agents=())) for spaces in find_behaviors(env).values() for agent in spaces.agents]
    sides = {}
    for name, agents in match_agents(behaviors, [agent for agent, _ in found]).items():
        if behaviors[name].joint:
            raise SettingError(f"behavior {name}: agents of {env.name} come and go by themselves, so critic_obs cannot see them jointly")
        spaces, *others = (spaces for agent, spaces in found if agent in agents)
        if any(other != spaces for other in others):
            raise SettingError(f"behavior {name}: its agents have different observations or actions")
        teams = {agent.rpartition("/")[0] for agent in agents}
        for agent, _ in found:
            if agent.rpartition("/")[0] in teams and agent not in agents:
                raise SettingError(f"behavior {name}: {agent} is missing; the agents of a team share their policy in a scene of Unity")
        sides[name] = spaces._replace(agents=tuple(agents))
        if behaviors[name].learns_in_groups:
            sides[name] = find_groups(env, sides[name])
    return sides


def match_agents(behaviors: Mapping[str, Behavior], agents: Sequence[str]) -> dict[str, list[str]]:
    """Return the agents of each behavior. Raises `SettingError` as `find_sides` does."""
    for name, pattern in ((name, pattern) for name, behavior in behaviors.items() for pattern in behavior.patterns):
        if not any(fnmatchcase(agent, pattern) for agent in agents):
            none = f"behavior {name}: agents {pattern!r} matches none of the environment's agents"
            raise SettingError(none + nearest(pattern, agents))
    chosen = {name: behavior.choose(agents) for name, behavior in behaviors.items()}
    for agent in agents:
        owners = [name for name, own in chosen.items() if agent in own]
        if len(owners) != 1:
            whose = f"has {len(owners)} behaviors, {' and '.join(owners)}" if owners else "has no behavior"
            raise SettingError(f"agent {agent} {whose}: `agents` of the behaviors must name each agent once")
    for name, own in chosen.items():
        if not own:
            raise SettingError(f"behavior {name} has no agents; those of the environment are {', '.join(agents)}")
    return chosen


def with_roles(behavior: Behavior, env: EnvSource, spaces: Spaces) -> Behavior:
    """Return a behavior whose learner knows which observations of a scene of Unity are entities and goals, unless it was told."""
    if behavior.frozen or not (isinstance(env, EnvConfig) and env.is_unity):
        return behavior
    given = getattr(behavior.learner, "keywords", {})
    roles = find_roles(env, behavior_of(spaces.agents[0])).items()
    return replace(behavior, learner=partial(behavior.learner, **{role: names for role, names in roles if names and role not in given}))


BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "train_dataloader", "prepare_data")
UNCALLED = (
    *("configure_callbacks", "configure_sharded_model", "learning_callbacks", "on_save_checkpoint", "on_load_checkpoint"),
    *("lr_scheduler_step", *BATCH_HOOKS),
)
"""Methods of a learner that are not called if several behaviors learn."""


def check_learner(name: str, learner: LearningModule) -> None:
    """Raise `SettingError` for features of an algorithm that cannot be used in a shared environment."""
    if not isinstance(learner, LearningModule):
        raise SettingError(f"behavior {name}: learner must make an algorithm, got a {type(learner).__name__}")
    if getattr(learner, "actors", None) is not None or getattr(learner, "threaded", False):
        raise SettingError(f"behavior {name}: actors and threaded are for runs of one behavior; leave them out")
    if learner.normalize_obs == "frozen":
        raise SettingError(f"behavior {name}: normalize_obs frozen needs its own random steps; use running")
    for hook in UNCALLED:
        if not getattr(type(learner), hook).__module__.startswith((*LIGHTNING, "lightning_rl.")):
            line = f"behavior {name}: {type(learner).__name__}.{hook} is not called if several behaviors learn"
            raise SettingError(f"{line}; override it in a subclass of MultiAgent")


def build_algorithm(name: str, behavior: Behavior, spaces: Spaces, env: SharedEnv | None, max_env_steps: int) -> Any:
    """Build the algorithm of a behavior. Raises `SettingError`: it cannot be one of several.

    Args:
        spaces: those of its agents.
        env: the shared environment; None: it is loaded only to act.
        max_env_steps: steps of the shared environment.
    """
    with torch.random.fork_rng(devices=[]):  # behaviors do not affect each other's random numbers
        torch.manual_seed(seed_of(name))
        try:
            algorithm = behavior.learner(env, spaces=spaces, max_env_steps=max_env_steps * spaces.rows)
        except SettingError as error:
            raise type(error)(f"behavior {name}: {error}") from error
    check_learner(name, algorithm)
    return algorithm


def seed_of(name: str) -> int:
    """Return the seed of a behavior, which depends on its name and not on the other behaviors."""
    return int(np.random.SeedSequence([torch.initial_seed(), *name.encode()]).generate_state(1)[0])


def describe_learner(behavior: Behavior, learner: LearningModule) -> Plain:
    """Return the class and settings of an algorithm as plain data, and the source of a frozen one."""
    source, origin = behavior.learner, dict(behavior.origin)
    if isinstance(source, FrozenPolicy):
        origin = {"checkpoint": source.checkpoint, "behavior": source.behavior}
    elif behavior.frozen and not origin:
        origin = {"checkpoint": None, "behavior": None}
    settings = {name: value for name, value in learner.hparams.items() if name not in OF_THE_RUN}
    return {**origin, "class_path": stored_name(type(learner)), "init_args": settings}


OURS = "lightning_rl.envs.games."
"""Location of the package's own scripted players."""


def make_opponent(name: str, spaces: Spaces, num_rows: int) -> Opponent:
    """Return an opponent by name, for `num_rows` rows of an environment. It sees agents' own observations, not `joint` ones.

    Args:
        name: `random` (legal moves, all equally likely), a checkpoint, a run's folder, `hf://USER/NAME`, or the path of a function (see
            `data.opponents.Script`) that the program has passed, or in a module that it or `--import` has imported.
        spaces: spaces of an agent.
        num_rows: number of agents in all copies.

    Raises:
        SettingError: the opponent does not exist, or was trained with other spaces.
    """
    if name == "random":
        return ScriptedOpponent(RandomMoves(spaces), name, spaces.action)
    if is_address(name) or Path(name).exists():
        stored = choose_behavior(RunModule.load_from_checkpoint(name), None)
        player, game = (without_hidden(given, []) for given in (stored.spaces, spaces))
        if (player.observation, player.action) != (game.observation, game.action):
            raise SettingError(f"opponent {name} was trained with other observations or actions than this game has")
        network: Any = stored.network.eval().requires_grad_(False)
        if stored.spaces.joint:
            network = VisiblePolicy(network, stored.spaces.observation, [JOINT])
        return PolicyOpponent(network, num_rows)
    return ScriptedOpponent(SCRIPTS[name] if name in SCRIPTS else find_script(name), name, spaces.action)


def prepare_self_play(setting: object, spaces: Spaces, env: object) -> tuple[SelfPlayConfig, Spaces]:
    """Return the setting `self_play`, and the spaces of a game in which one agent (in changing seats) or one team learns.

    `env`: that of the algorithm: None if it is loaded only to act; a `SharedEnv` if it is one of several behaviors, which take turns
    learning, each with all its agents.

    Raises:
        SettingError: the setting is invalid, or the environment has a single agent.
    """
    config, is_unity = as_settings("self_play", SelfPlayConfig, setting), getattr(env, "is_unity", False)
    if not is_unity and env is not None and config.swap_steps is not None:
        raise SettingError("self_play.swap_steps is for scenes of Unity; elsewhere an opponent plays whole episodes: leave it out")
    if isinstance(env, SharedEnv):
        if config.teams is not None:
            raise SettingError("self_play.teams is for a single policy; with several behaviors, each one is a team: leave it out")
    elif is_unity and config.teams is None:
        teams: list[str | list[str]] = [f"{escape(team)}/*" for team in dict.fromkeys(agent.rpartition("/")[0] for agent in spaces.agents)]
        if len(teams) == 1:
            raise SettingError(f"self_play needs agents of two teams, but those of the scene are all in one, {teams[0]}; leave it out")
        config = replace(config, teams=teams)
    elif env is not None and not is_unity:
        if config.team_change is not None:
            raise SettingError("self_play.team_change is for several behaviors of MultiAgent, which take turns learning; leave it out")
        if len(spaces.agents) < 2:
            raise SettingError("self_play needs a multi-agent game, such as pettingzoo.classic.connect_four_v3; leave it out")
        if config.teams is None:
            return config, spaces._replace(one_learns=True, teams=())
        if spaces.one_learns:
            raise SettingError("self_play.teams is for agents that move at the same time, but those of this game take turns; leave it out")
    if config.teams is None:
        return config, spaces
    return config, spaces._replace(teams=find_teams(config.teams, spaces.agents, spaces.group_size if spaces.groups else 1))


def find_teams(patterns: Sequence[str | Sequence[str]], agents: Sequence[str], group_size: int = 1) -> tuple[tuple[str, ...], ...]:
    """Return the agents of each team. `group_size`: of groups that stand next to one another and are in one team each.

    Raises `SettingError`: teams have different sizes, or an agent is in no team or in two, or a group in two.
    """
    teams = tuple(tuple(choose_agents([team] if isinstance(team, str) else team, agents)) for team in patterns)
    if sorted(agent for team in teams for agent in team) != sorted(agents) or len({len(team) for team in teams}) > 1:
        listed = " and ".join(f"[{', '.join(team)}]" for team in teams)
        raise SettingError(
            f"self_play.teams are {listed}: they must be equally large, and each of the agents {', '.join(agents)} must be in one"
        )
    for team in teams:
        groups = [list(agents).index(agent) // group_size for agent in team]
        if sorted(groups[::group_size] * group_size) != groups:
            raise SettingError(f"self_play.teams: the members of a group are in one team, and not all in [{', '.join(team)}]")
    return teams


@cache
def find_script(path: str) -> Script:
    """Return a scripted player by its path, such as `my_module.my_player`. Raises `SettingError`: there is no such function."""
    module, _, name = path.rpartition(".")
    if not module:
        raise SettingError(f"opponent {path!r} is unknown: use random, a run's folder, or the path of a function, my_module.my_player")
    check_module(f"opponent {path!r}", module)
    if module not in sys.modules and not path.startswith(OURS):
        raise SettingError(f"opponent {path!r}: there is no such folder, and the module {module} is not imported; use --import {module}")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise SettingError(f"opponent {path!r}: there is no module {module}") from error
    if not hasattr(imported, name):
        raise SettingError(f"opponent {path!r}: {module} has no function {name}{closest(name, dir(imported))}")
    player = getattr(imported, name)
    if not isfunction(player):
        raise SettingError(f"opponent {path!r} is not a player: it must be your own function")
    if not path.startswith(OURS):
        check_function("opponent", path, player)
    return player
