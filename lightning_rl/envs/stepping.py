"""Step a vector environment the same way in all three autoreset modes of gymnasium.

| mode | at the end of an episode `step` returns | the row after |
|---|---|---|
| SAME_STEP | the first observation of the next episode; the final one is in `info["final_obs"]` | an ordinary row |
| NEXT_STEP | the final observation | the reset: reward 0, the action ignored; not experience, `valid` is False |
| DISABLED | the final observation, and we reset | an ordinary row |
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor

from lightning_rl.envs.agents.copies import AgentsEnv
from lightning_rl.envs.agents.serial import SerialWorld
from lightning_rl.envs.agents.stepper import SIDE, RowStepper, SeatStepper, TeamStepper
from lightning_rl.envs.agents.vmas import VmasWorld
from lightning_rl.envs.agents.world import World
from lightning_rl.envs.classic_control import ClassicControlEnvs
from lightning_rl.envs.config import EnvConfig, EnvSource, count_envs
from lightning_rl.envs.games import GAMES
from lightning_rl.envs.games.game import GameWorld
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.envs.make import make_env, make_vector_env, make_vmas
from lightning_rl.envs.masks import NoMasks, make_masks
from lightning_rl.envs.snapshot.state import choose_way, seed_spaces
from lightning_rl.envs.snapshot.vector import Keeper, fingerprint, make_keeper
from lightning_rl.envs.sync import close_env, closing_env
from lightning_rl.envs.unity.world import UnityWorld
from lightning_rl.envs.worker_pool import WorkerVectorEnv
from lightning_rl.errors import SettingError, keep_running
from lightning_rl.spaces import MASK, Spaces, single_spaces
from lightning_rl.types import EnvStep, Info, State, Tree, first_step, tree_index, tree_leaves, tree_map, tree_stack

Observed = tuple[Tree, Tree]
"""Observations and their masks."""
NAMES_IN_0_1_0 = {"Stepper": "SAME_STEP", "NextStepStepper": "NEXT_STEP", "DisabledStepper": "DISABLED"}
"""Names of modes in checkpoints of version 0.1.0."""


class Stepper:
    """Steps a vector environment in its autoreset mode.

    Its environments mask actions if `masked` is true or their spaces contain masks.
    """

    stats: ClassVar[Mapping[str, float]] = {}
    """Metrics that environments report themselves: none."""

    def __init__(
        self,
        envs: VectorEnv,
        mode: AutoresetMode,
        keeper: Keeper | None = None,
        name: str = "the environment",
        settings: str = "",
        masked: bool = False,
    ) -> None:
        self.envs, self.mode, self.keeper, self.name, self.settings = envs, mode, keeper, name, settings
        self.num_envs = envs.num_envs
        self.close = envs.close if isinstance(envs, SyncVectorEnv | WorkerVectorEnv) else partial(close_env, envs)
        self.can_be_saved = keeper is not None
        """Whether the environments can be saved in the middle of an episode."""
        self.all_valid = np.ones(envs.num_envs, dtype=bool)
        self.resetting = np.zeros(envs.num_envs, dtype=bool)
        """Environments whose next row is a reset (NEXT_STEP only)."""
        self.workers = envs if isinstance(envs, WorkerVectorEnv) else None
        spaces = single_spaces(envs)
        self.masks = make_masks(spaces._replace(masked=spaces.masked or masked), f"environment {{}} of {name}", envs.num_envs)
        self.masked = not isinstance(self.masks, NoMasks)

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        """Start an episode in every environment, with seed, seed + 1, … Return the first observations and their masks.

        Raises `SettingError`: observations are tensors.
        """
        self.resetting = np.zeros(self.num_envs, dtype=bool)
        seed_spaces(self.envs, seed)
        for i, env in enumerate(self.envs.unwrapped.envs if isinstance(self.envs.unwrapped, SyncVectorEnv) else ()):
            seed_spaces(env, None if seed is None else seed + i)
        try:
            obs, info = self.envs.reset(seed=seed)
        except BaseException as error:  # of a vector environment that does not name the copy
            keep_running(error, self.name)
            raise
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(obs)):
            raise SettingError(f"observations of {self.name} are tensors: set its attribute `device` to their device")
        return self.masks.split(obs, info)

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Set what `EnvParameters` draw from, starting with the next resets. Raises `SettingError`: the environments have no parameters."""
        try:
            if self.workers is None:
                self.envs.call("set_lessons", lessons)  # type: ignore[attr-defined]
            else:
                self.workers.set_lessons(lessons)
        except AttributeError:
            raise SettingError(f"{self.name} takes no lessons; build it from settings with env.parameters, or in EnvParameters") from None

    def restart_all(self) -> EnvStep:
        """Abandon all episodes and start new ones; return a step that is not experience."""
        return first_step(*self.reset(), self.num_envs)

    def step(self, action: Tree) -> EnvStep:
        """Step all environments with actions in their own format."""
        try:
            obs, reward, *flags, info = self.envs.step(action)
        except BaseException as error:  # of a vector environment that does not name the copy
            keep_running(error, self.name)
            raise
        terminated, truncated = (np.asarray(flag, dtype=bool) for flag in flags)  # for other dtypes, `~` is another operation
        if self.mode is AutoresetMode.NEXT_STEP:
            start = self.resetting if self.workers is None else self.resetting | self.workers.lost
            valid = ~start
            terminated, truncated = terminated & valid, truncated & ~terminated & valid
            self.resetting = terminated | truncated
            ended = self.resetting.nonzero()[0]
            obs, mask = self.masks.split(obs, info, over=terminated)
            final_obs, final_mask = tree_index((obs, mask), ended) if len(ended) else (None, ())
            return EnvStep(obs, reward, terminated, truncated, valid, start, ended, final_obs, info, mask, final_mask)
        truncated = truncated & ~terminated
        start, final_obs, mask, final_mask, valid = terminated | truncated, None, (), (), self.all_valid
        ended = start.nonzero()[0]  # np.flatnonzero takes six times as long
        if len(ended):
            restart = self._reset_ended if self.mode is AutoresetMode.DISABLED else self._split_ended
            (obs, mask), (final_obs, final_mask), info = restart(obs, info, terminated, ended)
        elif self.masked or MASK in info:
            obs, mask = self.masks.split(obs, info)
        if self.workers is not None and self.workers.lost.any():
            start, valid = start | self.workers.lost, ~self.workers.lost
        return EnvStep(obs, reward, terminated, truncated, valid, start, ended, final_obs, info, mask, final_mask)

    def _split_ended(self, obs: Tree, info: Info, terminated: np.ndarray, ended: np.ndarray) -> tuple[Observed, Observed, Info]:
        """Return the first observations of the next episodes, the final ones `[K, ...]` of those that ended, and the final info."""
        final, final_info = info["final_obs"], info.get("final_info", {})
        are_objects = isinstance(final, np.ndarray) and final.dtype == object
        final_obs = tree_stack([final[i] for i in ended]) if are_objects else tree_index(final, ended)
        if not self.masked and MASK not in info and MASK not in final_info:
            return (obs, ()), (final_obs, ()), final_info or info
        last = self.masks.split(final_obs, final_info, ended, terminated[ended])
        return self.masks.split(obs, info), last, final_info or info

    def _reset_ended(self, obs: Tree, info: Info, terminated: np.ndarray, ended: np.ndarray) -> tuple[Observed, Observed, Info]:
        """Reset the environments whose episode ended. Return the same as `_split_ended`."""
        obs, mask = self.masks.split(obs, info, over=terminated)
        last = tree_index((obs, mask), ended)  # indexing by an array copies
        start = np.zeros(self.num_envs, dtype=bool)
        start[ended] = True
        obs, first_info = self.envs.reset(options={"reset_mask": start})
        first = self.masks.split(tree_index(obs, ended), first_info, ended)[1]
        tree_map(lambda all_masks, masks: all_masks.__setitem__(ended, masks), mask, first)
        return (self.masks.strip(obs), mask), last, info

    @property
    def restarts(self) -> int:
        """Return how many times an environment was restarted because its process died, froze or raised."""
        return 0 if self.workers is None else int(self.workers.restarts.sum())

    @property
    def notices(self) -> list[str]:
        """Return a line for each failure of an environment's process, or loss of speed. The caller that prints them clears the list."""
        return self.envs.notices if isinstance(self.envs, WorkerVectorEnv | ClassicControlEnvs) else []

    def state_dict(self) -> State:
        """Return everything that the next steps depend on, as plain data; only between two steps."""
        states = None if self.keeper is None else self.keeper.get_states()
        state = {"mode": self.mode.name, "num_envs": self.num_envs, "settings": self.settings, "resetting": self.resetting.copy()}
        return {**state, "states": states}

    def load_state_dict(self, state: State) -> str | None:
        """Restore a state before the first reset. Return None, or the reason why that is impossible; then reset instead."""
        if state["states"] is None or self.keeper is None:
            return f"{self.name} cannot be saved in the middle of an episode"
        if "mode" not in state:
            return "the checkpoint has environments of several agents"
        if (NAMES_IN_0_1_0.get(state["mode"], state["mode"]), state["num_envs"]) != (self.mode.name, self.num_envs):
            return f"the checkpoint has {state['num_envs']} environments, in another number or autoreset mode"
        if state.get("settings") != self.settings:
            return "their settings changed since they were saved"
        if not self.keeper.set_states(state["states"]):
            return f"{self.name} could not be restored exactly"
        self.resetting = state.get("resetting", self.resetting).copy()  # 0.1.0 stored it in NEXT_STEP alone
        return None


AnyStepper = Stepper | RowStepper | SeatStepper


def make_fitting_stepper(env: EnvSource, spaces: Spaces, first: int, seats: bool | None = None) -> AnyStepper:
    """Make the stepper of environments for a network with known spaces; `env` and `first` as in `make_vector_env`.

    `seats`: of several agents, as in `make_agent_stepper`. Raises `SettingError`: the environments have other spaces.
    """
    if spaces.agents:
        return make_agent_stepper(env, spaces, first, seats)
    stepper = make_stepper(make_vector_env(env, first=first), env if isinstance(env, EnvConfig) else None, spaces.masked)
    env_spaces = single_spaces(stepper.envs)
    if env_spaces._replace(masked=env_spaces.masked or spaces.masked) != spaces:
        stepper.close()
        raise SettingError(f"the environment's spaces differ from those of the model, {spaces}; load it with its own environment")
    return stepper


def make_agent_stepper(env: EnvSource, spaces: Spaces, first: int, seats: bool | None = None) -> RowStepper | SeatStepper:
    """Make the stepper of an environment of several agents with one policy; arguments as in `make_fitting_stepper`."""
    if spaces.teams:
        teams = np.array([[*map(spaces.agents.index, team)] for team in spaces.teams])
        if isinstance(env, EnvConfig) and env.is_unity:
            return TeamStepper(UnityWorld(env, {SIDE: spaces}, first), teams)
        return SeatStepper(make_serial_world(env, {SIDE: spaces}, first), teams)
    if not (spaces.one_learns if seats is None else seats):
        return RowStepper(make_world(env, {SIDE: spaces}, first))
    if isinstance(env, EnvConfig) and env.name in GAMES and not spaces.joint:
        settings = find_way_to_save(env, {SIDE: spaces})[1]
        world: World = GameWorld(GAMES[env.name](env.num_envs), SIDE, spaces, env.name, env.max_episode_steps, settings)
    else:
        world = make_serial_world(env, {SIDE: spaces}, first)
    return SeatStepper(world, np.arange(len(spaces.agents))[:, None])


def make_world(env: EnvSource, sides: Mapping[str, Spaces], first: int) -> World:
    """Build the copies of an environment of several agents that all learn, and the sides of their agents.

    Args:
        env: settings, or a function that builds one.
        sides: the spaces of each side, with the names of its agents.
        first: the index of the first copy among those of all ranks.

    Raises:
        SettingError: the environment has other agents or spaces.
    """
    if isinstance(env, EnvConfig) and env.is_unity:
        return UnityWorld(env, sides, first)
    if (copies := make_vmas(env, count_envs(env))) is None:
        return make_serial_world(env, sides, first)
    way, settings = find_way_to_save(env, sides)
    return VmasWorld(copies, sides, way == "own", settings)  # it saves them by their own state alone


def make_serial_world(env: EnvSource, sides: Mapping[str, Spaces], first: int) -> SerialWorld:
    """Build a world as `make_world` does, whose copies step one after another."""
    way, settings = find_way_to_save(env, sides)
    limit = env.max_episode_steps if isinstance(env, EnvConfig) else None
    teams = "".join(f" teams {spaces.teams}" for spaces in sides.values() if spaces.teams)
    return SerialWorld(partial(make_env, env), count_envs(env), sides, first, way, limit, settings + teams)


def find_way_to_save(env: EnvSource, sides: Mapping[str, Spaces]) -> tuple[str | None, str]:
    """Build a copy to find how its state is saved, if it can be, and the fingerprint of its settings.

    Raises `SettingError`: the environment has other agents or spaces than `sides`.
    """
    config = env if isinstance(env, EnvConfig) else None
    with closing_env(make_env(env)) as built:
        one, settings = built.unwrapped, fingerprint(built, config)
        agents = sorted(agent for spaces in sides.values() for agent in spaces.agents)
        if not isinstance(one, AgentsEnv) or sorted(one.agents) != agents:
            raise SettingError(
                f"the environment's agents differ from those of the model, {', '.join(agents)}; load it with its own environment"
            )
        built.reset(seed=0)
        for spaces in sides.values():
            one_learns = one.takes_turns or spaces.one_learns
            env_spaces = one.spaces_of(spaces.agents)._replace(agents=spaces.agents, one_learns=one_learns, teams=spaces.teams)
            if one.with_joint(env_spaces, spaces.joint) != spaces:
                raise SettingError(f"the environment's spaces differ from those of the model, {spaces}; load it with its own environment")
    return choose_way(partial(make_env, env, 0), repr(config) if config is not None and isinstance(config.id, str) else None), settings


def make_stepper(envs: VectorEnv, config: EnvConfig | None = None, masked: bool = False) -> Stepper:
    """Make the stepper for the autoreset mode in a vector environment's metadata, or else in its settings; `masked` as in `Spaces`.

    Raises `SettingError`: neither has an autoreset mode.
    """
    mode = (envs.metadata or {}).get("autoreset_mode")
    if mode is None and config is not None and config.autoreset is not None:
        mode = config.autoreset
    if isinstance(mode, str):
        mode = next((known for known in AutoresetMode if mode.upper() in (known.name, known.value.upper())), mode)
    if not isinstance(mode, AutoresetMode):
        reason = f"its metadata has {'no autoreset_mode' if mode is None else f'autoreset_mode {mode!r}'}"
        fix = "give it one of gymnasium.vector.AutoresetMode, or set env.autoreset"
        raise SettingError(f"{type(envs.unwrapped).__name__} has no known autoreset mode: {reason}; {fix}")
    one = envs.envs[0] if isinstance(envs, SyncVectorEnv) else envs
    name, settings = type(one.unwrapped).__name__ if config is None else config.name, fingerprint(envs, config)
    return Stepper(envs, mode, make_keeper(envs, config), name, settings, masked)
