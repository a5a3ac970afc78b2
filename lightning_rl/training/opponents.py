"""Find opponents by their names: `random`, a run, or the path of a scripted player."""

import importlib
import sys
from collections.abc import Sequence
from functools import cache
from inspect import isfunction
from pathlib import Path
from typing import Any

from lightning_rl.data.opponents import PolicyOpponent, RandomMoves, ScriptedOpponent
from lightning_rl.data.self_play import SelfPlayConfig
from lightning_rl.envs.agents.stepper import Opponent
from lightning_rl.errors import SettingError, as_settings, closest
from lightning_rl.networks.acting import VisiblePolicy
from lightning_rl.sharing.hub import is_address
from lightning_rl.spaces import JOINT, Spaces, without_hidden
from lightning_rl.training.behaviors import choose_agents, choose_behavior
from lightning_rl.training.run import Run

OURS = "lightning_rl.envs.games."
"""Where the package's own scripted players are."""


def make_opponent(name: str, spaces: Spaces, num_rows: int) -> Opponent:
    """Return the opponent of a name, for `num_rows` rows of an environment with these spaces. It sees what agents see, not what is `joint`.

    Args:
        name: `random` (legal moves, all equally likely), a checkpoint, a run's folder, `hf://USER/NAME`, or the path of a function, see
            `data.opponents.Script`, in a module that the program or `--import` has imported.
        spaces: of an agent.
        num_rows: agents of all copies.

    Raises:
        SettingError: there is no such opponent, or it was trained with other spaces.
    """
    if name == "random":
        return ScriptedOpponent(RandomMoves(spaces), name, spaces.action)
    if is_address(name) or Path(name).exists():
        stored = choose_behavior(Run.load_from_checkpoint(name), None)
        theirs, ours = (without_hidden(each, []) for each in (stored.spaces, spaces))
        if (theirs.observation, theirs.action) != (ours.observation, ours.action):
            raise SettingError(f"opponent {name} was trained with other observations or actions than this game has")
        network: Any = stored.network.eval().requires_grad_(False)
        if stored.spaces.joint:
            network = VisiblePolicy(network, stored.spaces.observation, [JOINT])
        return PolicyOpponent(network, num_rows)
    return ScriptedOpponent(find_script(name), name, spaces.action)


def prepare_self_play(setting: Any, spaces: Spaces, several: bool) -> tuple[SelfPlayConfig, Spaces]:
    """Return the setting `self_play`, and the spaces of a game of which one agent learns, in changing seats, or one team.

    `several`: it is one of several behaviors, which take turns learning; all its agents learn then.

    Raises:
        SettingError: an unusable setting, or an environment of one agent.
    """
    config = as_settings("self_play", SelfPlayConfig, setting)
    if several and config.teams is not None:
        raise SettingError("self_play.teams is for one policy alone; of several behaviors each is a team, leave it out")
    if several:
        return config, spaces
    if config.team_change is not None:
        raise SettingError("self_play.team_change is for several behaviors of MultiAgent, which take turns learning; leave it out")
    if len(spaces.agents) < 2:
        raise SettingError("self_play needs a game of several agents, such as pettingzoo.classic.connect_four_v3; leave it out")
    if config.teams is None:
        return config, spaces._replace(one_learns=True, teams=())
    if spaces.one_learns:
        raise SettingError("self_play.teams is for agents that move at the same time, and those of this game move in turn; leave it out")
    return config, spaces._replace(teams=find_teams(config.teams, spaces.agents))


def find_teams(patterns: Sequence[str | Sequence[str]], agents: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the agents of each team. Raises `SettingError`: teams of different sizes, or an agent of none or of two."""
    teams = tuple(tuple(choose_agents([team] if isinstance(team, str) else team, agents)) for team in patterns)
    if sorted(agent for team in teams for agent in team) != sorted(agents) or len({len(team) for team in teams}) > 1:
        found = " and ".join(f"[{', '.join(team)}]" for team in teams)
        raise SettingError(
            f"self_play.teams are {found}: they must be equally large, and each of the agents {', '.join(agents)} must be in one"
        )
    return teams


@cache
def find_script(path: str) -> Any:
    """Return the function of a path such as `my_module.my_player`. Raises `SettingError`: there is none."""
    module, _, name = path.rpartition(".")
    if not module:
        raise SettingError(f"opponent {path!r} is none: use random, a run's folder, or the path of a function such as my_module.my_player")
    if module not in sys.modules and not path.startswith(OURS):
        raise SettingError(f"opponent {path!r}: there is no such folder, and the module {module} is not imported; use --import {module}")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise SettingError(f"opponent {path!r}: there is no module {module}") from error
    if not hasattr(found, name):
        raise SettingError(f"opponent {path!r}: {module} has no function {name}{closest(name, dir(found))}")
    if module.partition(".")[0] in sys.stdlib_module_names or not isfunction(getattr(found, name)):
        raise SettingError(f"opponent {path!r} is no player: it must be a function of your own")
    return getattr(found, name)
