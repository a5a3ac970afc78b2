"""Copies of an environment with PettingZoo's API, stepped one after another."""

from collections.abc import Callable, Mapping

import gymnasium as gym
import numpy as np

from lightning_rl.envs.agents.copies import AgentsEnv, agents_of
from lightning_rl.envs.agents.world import Moves, Side, World
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.envs.masks import make_masks
from lightning_rl.envs.parameters import EnvParameters
from lightning_rl.envs.snapshot.state import get_state, layers, record, set_states
from lightning_rl.envs.sync import close_env
from lightning_rl.errors import SettingError
from lightning_rl.spaces import JOINT, OWN, Spaces
from lightning_rl.types import Info, State, Tree, tree_index, tree_map, tree_stack


class SerialWorld(World):
    """E copies of an environment with PettingZoo's API.

    Args:
        make: builds a copy from its index among those of all ranks.
        num_copies: E.
        sides: the spaces of each side, with the names of its agents.
        first: the index of the first copy.
        way: how the state of a copy is saved, see `envs/snapshot/state.py`; None if it cannot be saved.
        max_episode_steps, settings: as of `World`.
    """

    def __init__(
        self,
        make: Callable[[int], gym.Env],
        num_copies: int,
        sides: Mapping[str, Spaces],
        first: int = 0,
        way: str | None = None,
        max_episode_steps: int | None = None,
        settings: str = "",
    ) -> None:
        self.envs, self.way = [record(make(first + e), way) for e in range(num_copies)], way
        self.copies: list[AgentsEnv] = [agents_of(env) for env in self.envs]
        self.parameters = [next((layer for layer in layers(env) if isinstance(layer, EnvParameters)), None) for env in self.envs]
        """The wrapper that draws the parameters of each copy, or None."""
        super().__init__(self.copies[0].name, num_copies, sides, max_episode_steps, settings, way is not None)
        self.masks = {name: make_masks(spaces, "{}") for name, spaces in sides.items()}
        self.places = {agent: (name, a) for name, side in self.sides.items() for a, agent in enumerate(side.agents)}
        """The side of each agent, and its index there."""

    def _start(self, copies: np.ndarray, seed: int | None) -> None:
        """Start episodes, with the seeds seed, seed + 1, …"""
        for e in copies:
            self.envs[e].reset(seed=None if seed is None else seed + int(e))
        for side in self.sides.values():
            side.present[side.rows[copies]] = False

    def _step(self, copies: np.ndarray, actions: Mapping[str, Tree]) -> tuple[dict[str, Moves], np.ndarray]:
        moves = {
            name: Moves(*(np.zeros((len(copies), len(side.agents)), kind) for kind in (float, bool, bool, bool)))
            for name, side in self.sides.items()
        }
        for k, e in enumerate(copies):
            copy, chosen = self.copies[e], {}
            for agent in copy.to_move:
                name, a = self.places[agent]
                chosen[agent] = tree_index(actions[name], self.sides[name].rows[e, a])
            self.envs[e].step(chosen)
            for agent, (name, a) in self.places.items():
                made = moves[name]
                made.reward[k, a], made.present[k, a] = copy.rewards.get(agent, 0.0), agent in copy.present
                made.ended[k, a], made.terminated[k, a] = agent in copy.last, agent in copy.terminated
        return moves, np.array([not self.copies[e].present for e in copies])

    def look(self, copies: np.ndarray) -> None:
        for name, side in self.sides.items():
            for e in copies:
                self._look(name, side, e)

    def _look(self, name: str, side: Side, e: int) -> None:
        """Read what a side's agents observe in a copy."""
        copy = self.copies[e]
        joint = copy.look_jointly(side.spaces.joint) if side.spaces.joint else ()
        for agent, row in zip(side.agents, side.rows[e].tolist(), strict=True):
            was_present, is_present = side.present[row], agent in copy.present
            side.present[row], side.to_move[row] = is_present, agent in copy.to_move
            side.start[row] |= not (was_present and is_present)
            if agent in copy.obs:
                write(side, row, *self._read(name, row, *copy.look(agent), joint))
            elif not is_present:
                write(side, row, None, True)

    def _read(self, name: str, row: int, obs: Tree, info: Info, joint: Tree, over: bool = False) -> tuple[Tree, Tree]:
        """Return the observation and mask of a row. `over`: at the end of its episode, where a mask may be missing."""
        side = self.sides[name]
        obs, mask = self.masks[name].one(obs, info, side.labels[row], over)
        return ({OWN: obs, JOINT: joint} if side.spaces.joint else obs), mask

    def observe_last(self, name: str, rows: np.ndarray) -> tuple[Tree, Tree, Mapping[int, Info]]:
        side, found, infos = self.sides[name], [], {}
        for row in rows.tolist():
            e, a = divmod(row, len(side.agents))
            copy, agent, parameters = self.copies[e], side.agents[a], self.parameters[e]
            obs, info = (copy.last[agent], copy.last_info[agent]) if agent in copy.last else copy.look(agent)
            joint = copy.look_jointly(side.spaces.joint, over=True) if side.spaces.joint else ()
            found.append(self._read(name, row, obs, info, joint, over=True))
            infos[row] = info if parameters is None else parameters.extend_info(info)
        obs, masks = zip(*found, strict=True)
        return tree_stack(obs), np.stack(masks) if len(side.mask) else (), infos

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        for parameters in self.parameters:
            if parameters is None:
                raise SettingError(f"{self.name} takes no lessons; build it from settings with env.parameters")
            parameters.set_lessons(lessons)

    def close(self) -> None:
        for env in self.envs:
            close_env(env)

    def _are_alike(self, state: State) -> bool:
        return isinstance(state.get("states", ()), list | type(None)) and list(state.get("sides", ())) == list(self.sides)

    def _get_copies(self) -> State:
        return {"states": [get_state(env, self.way) for env in self.envs] if self.can_be_saved and self.way is not None else None}

    def _set_copies(self, state: State) -> bool:
        if not set_states(self.envs, [self.way] * self.num_copies, state["states"]):
            return False
        for e, copy in enumerate(self.copies):
            for agent, (name, a) in self.places.items():
                self.sides[name].to_move[self.sides[name].rows[e, a]] = agent in copy.to_move
        return True


def write(side: Side, row: int, obs: Tree, mask: Tree) -> None:
    """Write an observation, zeros if it is None, and a mask into a row."""
    if isinstance(side.obs, np.ndarray):
        side.obs[row] = 0 if obs is None else obs
    elif obs is None:
        tree_map(lambda rows: rows.__setitem__(row, 0), side.obs)
    else:
        tree_map(lambda rows, leaf: rows.__setitem__(row, leaf), side.obs, obs)
    if len(side.mask):
        side.mask[row] = mask
