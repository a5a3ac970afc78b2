"""One interface for environments of several agents, parallel or turn-based (PettingZoo's two APIs)."""

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pkgutil import iter_modules
from textwrap import shorten
from types import ModuleType
from typing import Protocol, Self, TypeGuard, TypeVar
from zlib import crc32

import gymnasium as gym
import numpy as np

from lightning_rl.envs.agents.vmas import Scenario, find_scenario, is_scenario, is_vmas
from lightning_rl.envs.masks import make_masks
from lightning_rl.envs.sync import Contract, close_env
from lightning_rl.errors import SettingError, closest, missing_extra
from lightning_rl.settings.dotted_paths import check_function, check_module
from lightning_rl.spaces import MASK, Spaces, as_spaces, flat_observation, legal_sample, with_joint
from lightning_rl.types import Info, Options, State, StepByAgent, Tree

OURS = "tic_tac_toe|connect_four|rock_paper_scissors|biased_rock_paper_scissors|kuhn_poker|sacrifice|walkers"
VERSION = re.compile(r"_v\d+$")
PACKAGED = re.compile(rf"(pettingzoo\.(atari|butterfly|classic|sisl)|mpe2)\.\w+_v\d+|vmas\.\w+|lightning_rl\.envs\.games\.({OURS})")
"""Pattern of environments in PettingZoo's packages, scenarios of VMAS, and games of this package."""

FROM_RESET = ("observations", "infos")
FROM_STEP = ("observations", "rewards", "terminations", "truncations", "infos")
"""What the methods of a `ParallelEnv` return, each as a dict by agent."""

EXTRA_PACKAGES = {"pettingzoo": "pettingzoo", "mpe2": "mpe2", "pygame": "pygame-ce"}
"""Modules that the extra `pettingzoo` installs, and their packages."""
T = TypeVar("T")


class AgentsApi(Protocol):
    """What PettingZoo's two APIs have in common, and two methods that we add for exact resume. `state` and `unwrapped` are optional."""

    agents: list[str]

    def observation_space(self, agent: str) -> gym.Space: ...

    def action_space(self, agent: str) -> gym.Space: ...

    def render(self) -> Tree: ...

    def close(self) -> None: ...

    def get_state(self) -> object: ...

    def set_state(self, state: object) -> object: ...


class ParallelApi(AgentsApi, Protocol):
    """PettingZoo's `ParallelEnv`."""

    def reset(self, seed: int | None = None, options: Options = None) -> tuple[dict[str, Tree], dict[str, Info]]: ...

    def step(self, actions: dict[str, Tree]) -> StepByAgent: ...


class TurnApi(AgentsApi, Protocol):
    """PettingZoo's `AECEnv`."""

    agent_selection: str
    rewards: dict[str, float]
    terminations: dict[str, bool]
    truncations: dict[str, bool]
    infos: dict[str, Info]

    def reset(self, seed: int | None = None, options: Options = None) -> None: ...

    def observe(self, agent: str) -> Tree: ...

    def step(self, action: Tree | None) -> None: ...


class AgentsEnv(gym.Env):
    """One environment of several agents, which move simultaneously or in turn, and may leave.

    `step` takes the actions of the agents in `to_move`, by name, and stores the results in the attributes.

    Attributes:
        agents: names of all agents that may ever be present.
        present: agents that are present.  to_move: agents that act in the next step.
        obs, info: the newest observations and infos, by the names of the agents that are to move.
        moved: agents that acted in the last step.  rewards: rewards of the last step, by name, of all agents that were present.
        terminated, truncated: agents that ended in the last step; `last` and `last_info` are their final observations and infos.
    """

    takes_turns = False
    """Whether agents take turns."""
    seen: tuple[str, ...] = ("present", "to_move", "obs", "info")
    """The attributes that the next step depends on."""

    def __init__(self, env: AgentsApi, name: str, index: int = 0) -> None:
        self.env, self.name, self.render_mode = env, name, getattr(env, "render_mode", None)
        self.metadata = getattr(env, "metadata", {})
        self.agents: list[str] = list(getattr(env, "possible_agents", ()))
        self.contract = Contract(gym.Space(), f"environment {index} of {name}")
        with self.contract.naming():
            self.contracts = {
                agent: Contract(env.observation_space(agent), f"agent {agent} of {self.contract.who}") for agent in self.agents
            }
        self.observation_space, self.action_space = gym.Space(), JointActions(self)
        self.present: Sequence[str] = []
        self.to_move: Sequence[str] = []
        self.obs: dict[str, Tree] = {}
        self.info: Mapping[str, Info] = {}
        self.moved: Sequence[str] = []
        self.rewards: dict[str, float] = {}
        self.terminated: set[str] = set()
        self.truncated: set[str] = set()
        self.last: dict[str, Tree] = {}
        self.last_info: dict[str, Info] = {}

    @property
    def core(self) -> object:
        """Return the environment without PettingZoo's wrappers."""
        return getattr(self.env, "unwrapped", self.env)

    def find_spaces(self) -> Spaces:
        """Return the spaces of all agents as those of one behavior, after a reset."""
        spaces = self.spaces_of(self.agents)
        for agent in self.to_move:
            make_masks(spaces, f"agent {agent} of {self.name}").one(*self.look(agent))
        return spaces._replace(agents=tuple(self.agents), one_learns=self.takes_turns)

    def spaces_of(self, agents: Sequence[str], behavior: str = "") -> Spaces:
        """Return the common spaces of agents, after a reset; raise `SettingError` if they differ.

        `behavior`: the behavior of these agents, for messages; empty in a run with one policy.
        """
        with self.contract.naming():
            by_agent = {agent: as_spaces(self.env.observation_space(agent), self.env.action_space(agent)) for agent in agents}
        spaces = by_agent[agents[0]]
        for agent, agent_spaces in by_agent.items():
            if agent_spaces != spaces:
                pair = f"the spaces of {agents[0]} and {agent} differ; one policy needs equal spaces"
                if behavior:
                    raise SettingError(f"{behavior}: {pair}: give {agent} another behavior")
                raise SettingError(f"{self.name}: {pair}; for several policies use MultiAgent")
        return spaces._replace(masked=spaces.masked or any(MASK in self.info.get(agent, {}) for agent in agents))

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        """Begin an episode. Return the observations of the agents that are to move."""
        self.terminated, self.truncated, self.rewards, self.last, self.last_info = set(), set(), {}, {}, {}
        with self.contract.naming():
            for agent in self.agents if seed is not None else ():
                for k, space in enumerate((self.env.observation_space(agent), self.env.action_space(agent))):
                    space.seed(crc32(f"{seed} {agent} {k}".encode()))  # as `seed_spaces` does
            self._reset(seed, options)
        if not self.present:
            raise SettingError(f"{self.contract.who}: no agent is present after a reset")
        self._check(self.obs)
        self._check_infos(self.info)
        return dict(self.obs), {}

    def step(self, actions: Mapping[str, Tree]) -> tuple[Tree, float, bool, bool, Info]:
        """Let all of `to_move` act. Return the next movers' observations, the sum of all rewards, and whether the last agent has left."""
        self.last, self.last_info, self.moved = {}, {}, self.to_move
        before = self.present
        with self.contract.naming():
            self._step(actions)
        for agent in before:
            if agent not in self.present and agent not in self.last:
                raise SettingError(f"{self.contract.who}: agent {agent} left without being terminated or truncated")
        self._check(self.obs)
        self._check(self.last)
        self._check_infos(self.info)
        self._check_infos(self.last_info, over=True)
        for agent, reward in self.rewards.items():
            if agent in self.contracts:
                self.contracts[agent].check_reward(reward)
        return dict(self.obs), float(sum(self.rewards.values())), not self.present, False, {}

    def _check(self, seen: Mapping[str, Tree]) -> None:
        for agent, obs in seen.items():
            if agent in self.contracts:
                self.contracts[agent].check_obs(obs)
            elif self.contracts:
                raise SettingError(f"{self.contract.who}: agent {agent} is present, but is not one of its possible_agents")

    def _check_ends(self, agents: Iterable[str], terminated: Mapping[str, object], truncated: Mapping[str, object]) -> None:
        for agent in agents:
            if agent in self.contracts:
                self.contracts[agent].check_end(terminated[agent], truncated[agent])

    def _check_infos(self, infos: Mapping[str, Info], over: bool = False) -> None:
        for agent, info in infos.items():
            if agent in self.contracts:
                self.contracts[agent].read_info(info, over)

    def _reset(self, seed: int | None, options: Options) -> None:
        raise NotImplementedError

    def _step(self, actions: Mapping[str, Tree]) -> None:
        raise NotImplementedError

    def look(self, agent: str) -> tuple[Tree, Info]:
        """Return the observation and info of an agent that is present."""
        return self.obs[agent], self.info.get(agent, {})

    def with_joint(self, spaces: Spaces, joint: str) -> Spaces:
        """Return spaces whose observations hold an agent's own and the `joint` ones, as in `Spaces`."""
        if not joint:
            return spaces
        return spaces._replace(observation=with_joint(spaces.observation, len(self.look_jointly(joint))), joint=joint)

    def look_jointly(self, joint: str, over: bool = False) -> np.ndarray:
        """Return a vector of the environment's `state`, or of the observations of `all` agents (zeros if absent) and which are present.

        `over`: at the end of an agent's episode, where agents that ended in the same step count as present.
        """
        with self.contract.naming():
            if joint == "state":
                return np.asarray(self._find_state(), dtype=np.float32).ravel()
            last = self.last if over else {}
            present = [agent in last or agent in self.present for agent in self.agents]
            seen = [last[a] if a in last else self.look(a)[0] if a in self.present else None for a in self.agents]
            parts = [self._flatten(agent, obs) for agent, obs in zip(self.agents, seen, strict=True)]
        return np.concatenate([*parts, np.array(present, dtype=np.float32)])

    def _find_state(self) -> object:
        """Return the environment's state; raise `SettingError` if it has none."""
        try:
            if callable(state := getattr(self.env, "state", None)):
                return state()
        except NotImplementedError:  # as in PettingZoo's base classes
            pass
        raise SettingError(f"critic_obs state: {self.name} has no state() that returns an array; write one, or use critic_obs all")

    def _flatten(self, agent: str, obs: Tree | None) -> np.ndarray:
        """Return the observation of an agent as a vector; zeros if it is None."""
        return flat_observation(as_spaces(self.env.observation_space(agent), self.env.action_space(agent)).observation, obs)

    def random_actions(self, seed: int) -> dict[str, Tree]:
        """Draw a legal action for each agent that is to move."""
        return {agent: self._random_action(agent, (seed + k) % 2**31) for k, agent in enumerate(self.to_move)}

    def _random_action(self, agent: str, seed: int) -> Tree:
        space = deepcopy(self.env.action_space(agent))
        space.seed(seed)
        mask = make_masks(self.spaces_of([agent]), f"agent {agent} of {self.name}").one(*self.look(agent))[1]
        return legal_sample(space, mask) if len(mask) else space.sample()

    def get_state(self) -> State:
        """Return the result of the environment's own `get_state`, and what was last read from it; raise if it has no such method."""
        return {"env": self.env.get_state(), "seen": {name: getattr(self, name) for name in self.seen}}

    def set_state(self, state: State) -> None:
        """Restore a state."""
        self.env.set_state(state["env"])
        vars(self).update(state["seen"])

    def render(self) -> Tree:
        return self.env.render()

    def close(self) -> None:
        close_env(self.env)


class JointActions(gym.Space[dict[str, Tree]]):
    """Space of the legal actions of the agents that are to move, by name; for sampling."""

    def __init__(self, env: AgentsEnv) -> None:
        super().__init__()
        self.env = env

    def sample(self, mask: object = None, probability: object = None) -> dict[str, Tree]:
        return self.env.random_actions(int(self.np_random.integers(2**31)))

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)(self.env)


class ParallelAgents(AgentsEnv):
    """An environment in which all present agents move simultaneously: PettingZoo's `ParallelEnv`."""

    env: ParallelApi

    def _reset(self, seed: int | None, options: Options) -> None:
        self.obs, self.info = self._read("reset", self.env.reset(seed=seed, options=options), FROM_RESET)
        self.present = self.to_move = list(self.env.agents)
        self._check_complete("reset", "observation", self.obs, self.present)

    def _step(self, actions: Mapping[str, Tree]) -> None:
        obs, rewards, terminated, truncated, info = self._read("step", self.env.step(dict(actions)), FROM_STEP)
        for what, values in (("observation", obs), ("reward", rewards), ("termination", terminated), ("truncation", truncated)):
            self._check_complete("step", what, values, self.moved)
        self._check_complete("step", "observation", obs, self.env.agents)
        self._check_ends(self.moved, terminated, truncated)
        self.info = info
        self.rewards = {agent: rewards[agent] for agent in self.moved}
        self.terminated = {agent for agent, over in terminated.items() if over}
        self.truncated = {agent for agent, over in truncated.items() if over} - self.terminated
        over = self.terminated | self.truncated
        self.last = {agent: obs[agent] for agent in self.moved if agent in over}
        self.last_info = {agent: info.get(agent, {}) for agent in self.last}
        self.present = self.to_move = [agent for agent in self.env.agents if agent not in over]
        self.obs = {agent: obs[agent] for agent in self.present}

    def _read(self, method: str, result: T, names: Sequence[str]) -> T:
        """Return what a method returned; raise `SettingError` unless it is a tuple of mappings of these names."""
        if not isinstance(result, tuple | list) or len(result) != len(names):
            what = f"{len(result)} values" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
            raise SettingError(f"{self.contract.who}: {method} returned {what}, but must return {len(names)}: {', '.join(names)}")
        for name, values in zip(names, result, strict=True):
            if not isinstance(values, Mapping):
                raise SettingError(f"{self.contract.who}: {method} returned {name} as {type(values).__name__} instead of a dict by agent")
        return result

    def _check_complete(self, method: str, what: str, values: Mapping[str, object], agents: Sequence[str]) -> None:
        """Raise `SettingError` if a method left out an agent."""
        for agent in agents:
            if agent not in values:
                raise SettingError(f"{self.contract.who}: {method} returned no {what} of agent {agent}")


class TurnAgents(AgentsEnv):
    """An environment in which agents take turns: PettingZoo's `AECEnv`. Agents that ended are stepped with None immediately."""

    takes_turns = True
    env: TurnApi

    def _reset(self, seed: int | None, options: Options) -> None:
        self.env.reset(seed=seed, options=options)
        self.present = list(self.env.agents)
        self._look()

    def look(self, agent: str) -> tuple[Tree, Info]:
        if agent in self.obs:
            return super().look(agent)
        with self.contract.naming():
            obs, info = self.env.observe(agent), dict(self.env.infos.get(agent, {}))
        self._check({agent: obs})
        return obs, info

    def _look(self) -> None:
        self.to_move = [self.env.agent_selection] if self.present else []
        self.obs = {agent: self.env.observe(agent) for agent in self.to_move}
        self.info = {agent: self.env.infos.get(agent, {}) for agent in self.to_move}

    def _step(self, actions: Mapping[str, Tree]) -> None:
        env, before = self.env, set(self.present)
        env.step(actions[env.agent_selection])
        self._check_ends(env.agents, env.terminations, env.truncations)
        ended = self._find_ended()
        agents = [agent for agent in env.agents if agent in before or agent not in ended]  # others ended earlier
        self.rewards = {agent: env.rewards.get(agent, 0.0) for agent in agents}  # of this step alone, unlike `last()`
        self.terminated = {agent for agent in agents if env.terminations[agent]}
        self.truncated = {agent for agent in agents if env.truncations[agent]} - self.terminated
        over = [agent for agent in agents if agent in ended]
        self.last = {agent: env.observe(agent) for agent in over}
        self.last_info = {agent: dict(env.infos.get(agent, {})) for agent in over}
        while env.agents and env.agent_selection in self._find_ended():
            env.step(None)
        ended = self._find_ended()
        self.present = [agent for agent in env.agents if agent not in ended]
        self._look()

    def _find_ended(self) -> set[str]:
        """Return the agents that have ended, but that the environment has not removed yet."""
        return {agent for agent in self.env.agents if self.env.terminations[agent] or self.env.truncations[agent]}


def is_packaged(env_id: str) -> bool:
    """Return whether a path names an environment of PettingZoo, VMAS or this package, which a checkpoint may name."""
    return PACKAGED.fullmatch(env_id) is not None


def find_builder(env_id: str | Callable[..., object]) -> Callable[..., object]:
    """Import the builder of the environment at a path: a module's `parallel_env`, or else its `env`; or a function or class.

    A path under `vmas` names a scenario of VMAS, and that of a subclass of its `BaseScenario` a user's own. A class or function that
    Python code passes is its own builder.

    Raises `SettingError`: the path does not exist, or a package is not installed.
    """
    if not isinstance(env_id, str):
        return Scenario(env_id.__name__, env_id) if is_scenario(env_id) else env_id
    if is_vmas(env_id):
        return find_scenario(env_id)
    check_module(f"env.id {env_id!r}", env_id)
    try:
        imported = _import(env_id)
    except ModuleNotFoundError as error:
        raise _missing(env_id, error.name or "") from error
    except Exception as error:  # importing a module may raise anything
        reason = shorten(f"{type(error).__name__}: {error}", 120, placeholder=" …")
        raise SettingError(f"env.id {env_id!r} cannot be imported: {reason}") from error
    if is_scenario(imported):
        return Scenario(env_id, imported)
    path, builder = env_id, imported
    if isinstance(imported, ModuleType):
        name = "parallel_env" if hasattr(imported, "parallel_env") else "env"
        path, builder = f"{env_id}.{name}", getattr(imported, name, None)
    if not callable(builder):
        if versions := _find_versions(env_id):
            raise SettingError(f"env.id {env_id!r}: this version is not installed; name {' or '.join(versions)}")
        raise SettingError(f"env.id {env_id!r} is not an environment: it has neither parallel_env nor env")
    if not isinstance(builder, type) and not is_packaged(env_id):
        check_function("env.id", path, builder, builds_environment=True)
    if isinstance(builder, type) and not {"reset", "step"} <= {*dir(builder)} and not hasattr(builder, "possible_agents"):
        raise _is_no_environment(env_id, builder)
    return builder


def _is_no_environment(name: str, kind: type) -> SettingError:
    return SettingError(f"{name} builds {kind.__name__}, which is neither a gymnasium.Env nor a PettingZoo environment")


def _find_versions(env_id: str) -> list[str]:
    """Return the other versions of an environment `…_v3` in the same package, for which PettingZoo leaves an attribute of another kind."""
    parent, _, name = env_id.rpartition(".")
    stem = VERSION.sub("", name)
    names = [module.name for module in iter_modules(getattr(sys.modules.get(parent), "__path__", ()))]
    return [f"{parent}.{name}" for name in names if VERSION.search(name) and VERSION.sub("", name) == stem]


def _missing(env_id: str, module: str) -> SettingError:
    """Return the error for a missing module: a part of the path, or a package that the environment needs."""
    parent, _, name = module.rpartition(".")
    imported = sys.modules.get(parent)
    package = module if imported else module.partition(".")[0]
    if package in EXTRA_PACKAGES:
        return missing_extra(EXTRA_PACKAGES[package], "pettingzoo", env_id)
    if not f"{env_id}.".startswith(f"{module}."):
        return SettingError(f"{env_id} needs the package {module}, which is not installed")
    if not parent or hasattr(imported, name):
        return SettingError(f"env.id {env_id!r}: there is no module {module!r}")
    classes = [name for name in dir(imported) if isinstance(getattr(imported, name), type)]
    builders = {*dir(imported), *(submodule.name for submodule in iter_modules(getattr(imported, "__path__", ())))}.difference(classes)
    return SettingError(f"env.id {env_id!r}: there is no {name!r} in {parent}{closest(name, builders) or closest(name, classes)}")


def _import(path: str) -> object:
    """Import a module, or an attribute of one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        parent, _, name = path.rpartition(".")
        if error.name != path and not (error.name == parent and "." in parent):
            raise
        module = importlib.import_module(parent)
        if not hasattr(module, name):
            raise
        return getattr(module, name)


def has_agents(env: object) -> TypeGuard[AgentsApi]:
    """Return whether this is an environment of PettingZoo."""
    return hasattr(env, "agent_iter") or (hasattr(env, "observation_space") and callable(env.observation_space))


def agents_of(env: gym.Env) -> AgentsEnv:
    """Return the environment of several agents inside wrappers."""
    assert isinstance(env.unwrapped, AgentsEnv)
    return env.unwrapped


def wrap_agents(env: object, name: str, index: int = 0) -> AgentsEnv:
    """Wrap an environment of PettingZoo in the common interface; `name` and `index` are for messages.

    Raises `SettingError`: it is not a PettingZoo environment, or does not list its possible agents.
    """
    if not has_agents(env) and hasattr(env, "possible_agents"):
        raise SettingError(
            f"{name} builds {type(env).__name__}, whose observation_space is not a method: PettingZoo calls observation_space(agent)"
        )
    if not has_agents(env):
        raise _is_no_environment(name, type(env))
    made = (TurnAgents if hasattr(env, "agent_iter") else ParallelAgents)(env, name, index)
    if not made.agents:
        raise SettingError(f"{name} has no possible_agents: list all agents that may ever be present, as each is a row")
    return made
