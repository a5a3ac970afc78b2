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
        for k, e in enumerate(copies):
            self.envs[e].reset(seed=None if seed is None else seed + k)

    def _step(self, copies: np.ndarray, actions: Mapping[str, Tree]) -> tuple[dict[str, Moves], np.ndarray]:
        stepped = [self.copies[e] for e in copies]
        for e, copy in zip(copies, stepped, strict=True):
            places = {agent: self.places[agent] for agent in copy.to_move}
            self.envs[e].step({agent: tree_index(actions[name], self.sides[name].rows[e, a]) for agent, (name, a) in places.items()})
        moves = {}
        for name, side in self.sides.items():
            reward = np.array([[copy.rewards.get(agent, 0.0) for agent in side.agents] for copy in stepped], dtype=np.float64)
            ended, terminated, present = (
                np.array([[agent in some for agent in side.agents] for some in groups])
                for groups in zip(*((copy.last, copy.terminated, copy.present) for copy in stepped), strict=True)
            )
            moves[name] = Moves(reward, ended, terminated, present)
        return moves, np.array([not copy.present for copy in stepped])

    def look(self, copies: np.ndarray) -> None:
        seen = [self.copies[e] for e in copies]
        for name, side in self.sides.items():
            rows = side.rows[copies]
            present = np.array([[agent in copy.present for agent in side.agents] for copy in seen])
            was_present, side.present[rows] = side.present[rows], present
            side.to_move[rows] = np.array([[agent in copy.to_move for agent in side.agents] for copy in seen])
            side.start[rows] |= ~(was_present & present)
            for row in rows[was_present & ~present].tolist():
                write(side, row, None, True)
            for copy, copy_rows in zip(seen, rows.tolist(), strict=True):
                joint = copy.look_jointly(side.spaces.joint) if side.spaces.joint else ()
                for agent, row in zip(side.agents, copy_rows, strict=True):
                    if agent in copy.last:  # if it is present, it has come back in the same step
                        side.moved[row], side.start[row] = False, True
                    if agent in copy.obs:
                        obs, info = copy.look(agent)
                        write(side, row, *self._read(name, row, obs, info, joint))

    def _read(self, name: str, row: int, obs: Tree, info: Info, joint: Tree, over: bool = False) -> tuple[Tree, Tree]:
        """Return the observation and mask of a row. `over`: at the end of its episode, where a mask may be missing."""
        side = self.sides[name]
        obs, mask = self.masks[name].one(obs, info, side.labels[row], over)
        return ({OWN: obs, JOINT: joint} if side.spaces.joint else obs), mask

    def observe_last(self, name: str, rows: np.ndarray) -> tuple[Tree, Tree, Mapping[int, Info]]:
        side, observed, infos = self.sides[name], [], {}
        for row in rows.tolist():
            e, a = divmod(row, len(side.agents))
            copy, agent, parameters = self.copies[e], side.agents[a], self.parameters[e]
            obs, info = (copy.last[agent], copy.last_info[agent]) if agent in copy.last else copy.look(agent)
            joint = copy.look_jointly(side.spaces.joint, over=True) if side.spaces.joint else ()
            observed.append(self._read(name, row, obs, info, joint, over=True))
            infos[row] = info if parameters is None else parameters.extend_info(info)
        obs, masks = zip(*observed, strict=True)
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
