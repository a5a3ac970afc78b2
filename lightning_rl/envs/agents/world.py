"""Copies of an environment of several agents, stepped together. The agents of each side are rows of a vector environment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np

from lightning_rl.envs import LESSONS, PARAMETERS, SUCCESS
from lightning_rl.envs.agents.copies import AgentsEnv, agents_of
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.envs.masks import make_masks
from lightning_rl.envs.parameters import EnvParameters
from lightning_rl.envs.snapshot.state import get_state, layers, record, set_states
from lightning_rl.envs.sync import close_env
from lightning_rl.errors import SettingError
from lightning_rl.spaces import JOINT, OWN, Spaces, allocate
from lightning_rl.types import EnvStep, Info, State, Tree, tree_index, tree_map, tree_stack


class Outcome:
    """Results of N rows since the last `pop_step`: summed rewards, and the ends of episodes."""

    def __init__(self, num: int) -> None:
        self.num, self.all_valid = num, np.ones(num, dtype=bool)
        self.forget()

    def forget(self) -> None:
        """Clear all results, with new arrays."""
        self.reward, self.acted = np.zeros(self.num), np.zeros(self.num, dtype=bool)
        self.terminated, self.truncated, self.start = (np.zeros(self.num, dtype=bool) for _ in range(3))
        self.final: dict[int, tuple[Tree, Tree, Info]] = {}

    def end(self, row: int, seen: tuple[Tree, Tree], info: Info, terminated: bool) -> None:
        """Note that the episode of a row ended, with its final observation and mask."""
        self.terminated[row], self.truncated[row], self.start[row] = terminated, not terminated, True
        self.final[row] = (*tree_map(np.array, seen), info)

    def take(self, other: "Outcome", rows: np.ndarray, following: np.ndarray) -> None:
        """Take over the results of `rows` of another; the rows `following` in their places determine whether an episode begins."""
        for name in ("reward", "acted", "terminated", "truncated"):
            setattr(self, name, getattr(other, name)[rows])
        self.start = other.start[following]
        self.final = {k: other.final[row] for k, row in enumerate(rows.tolist()) if row in other.final}

    def pop_step(self, obs: Tree, mask: Tree) -> EnvStep:
        """Return the results, with the newest observations and masks of all rows, and clear them."""
        ended = np.flatnonzero(self.terminated | self.truncated)
        finals = [self.final[int(row)] for row in ended]
        final_obs = tree_stack([obs for obs, _, _ in finals]) if finals else None
        final_mask = np.stack([mask for _, mask, _ in finals]) if finals and len(mask) else ()
        infos = {int(row): info for row, (_, _, info) in zip(ended, finals, strict=True)}
        info = gather_success(infos, self.num) | gather_parameters(infos, self.num)
        valid = self.all_valid if self.acted.all() else self.acted
        step = EnvStep(obs, self.reward, self.terminated, self.truncated, valid, self.start, ended, final_obs, info, mask, final_mask)
        self.forget()
        return step


def gather_success(infos: Mapping[int, Info], num: int) -> Info:
    """Return the success reported in the infos of rows as arrays `[num]`, with gymnasium's mask of the rows that report it."""
    for name in SUCCESS:
        given = {row: float(np.asarray(info[name]).item()) for row, info in infos.items() if info.get(name) is not None}
        if given:
            values, reported = np.zeros(num), np.zeros(num, dtype=bool)
            values[list(given)], reported[list(given)] = list(given.values()), True
            return {name: values, f"_{name}": reported}
    return {}


def gather_parameters(infos: Mapping[int, Info], num: int) -> Info:
    """Return the parameters and lessons of rows whose episodes ended, by name as arrays `[num]`; an empty dict if there are none."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, kind in ((PARAMETERS, np.float64), (LESSONS, np.int64)):
        for row, info in infos.items():
            for name, value in info.get(key, {}).items():
                found.setdefault(key, {}).setdefault(name, np.zeros(num, kind))[row] = value
    return found


class Side:
    """The A agents of one behavior, in all copies: row e · A + a is agent a of copy e.

    The row of an absent agent is not experience: `valid` is False, its observation zeros, its mask all true, and `episode_start` True, so
    that its memory is empty when it enters.

    Attributes:
        rows: the row of each agent, for each copy.
        obs, mask: the newest of each row.  present: whether its agent is present.
        outcome: the results of the rows.
    """

    def __init__(self, env_name: str, name: str, spaces: Spaces, num_copies: int) -> None:
        self.name, self.spaces, self.agents = f"{env_name} {name}".rstrip(), spaces, list(spaces.agents)
        agents, self.num = len(self.agents), num_copies * len(self.agents)
        self.rows = [{agent: e * agents + a for a, agent in enumerate(self.agents)} for e in range(num_copies)]
        self.labels = [f"agent {agent} of environment {e} of {env_name}" for e in range(num_copies) for agent in self.agents]
        """Name of each row in messages."""
        self.masks = make_masks(spaces, "{}")
        self.obs, self.mask = allocate(spaces.observation, self.num), spaces.masks(self.num)
        self.present = np.zeros(self.num, dtype=bool)
        self.outcome = Outcome(self.num)

    def read(self, row: int, obs: Tree, info: Info, joint: Tree = (), over: bool = False) -> tuple[Tree, Tree]:
        """Return the observation and mask of a row.

        `joint`: the result of `see_jointly`. `over`: at the end of its episode, where a mask may be missing.
        """
        obs, mask = self.masks.one(obs, info, self.labels[row], over)
        return ({OWN: obs, JOINT: joint} if self.spaces.joint else obs), mask

    def see_jointly(self, copy: AgentsEnv, over: bool = False) -> Tree:
        """Return what the agents' critics observe in a copy beyond the agents' observations; () if nothing. `over`: see `look_jointly`."""
        return copy.look_jointly(self.spaces.joint, over) if self.spaces.joint else ()

    def look(self, e: int, copy: AgentsEnv) -> None:
        """Read which agents of a copy are present, and the observations of those that move next."""
        there, joint = set(copy.present), self.see_jointly(copy)
        for agent, row in self.rows[e].items():
            was, self.present[row] = self.present[row], agent in there
            if agent in copy.obs:
                self._write(row, *self.read(row, *copy.look(agent), joint))
            elif not self.present[row]:
                self._write(row, None, True)
            self.outcome.start[row] |= not (was and self.present[row])

    def _write(self, row: int, obs: Tree, mask: Tree) -> None:
        """Write an observation, zeros if it is None, and a mask into a row."""
        if isinstance(self.obs, np.ndarray):
            self.obs[row] = 0 if obs is None else obs
        elif obs is None:
            tree_map(lambda rows: rows.__setitem__(row, 0), self.obs)
        else:
            tree_map(lambda rows, leaf: rows.__setitem__(row, leaf), self.obs, obs)
        if len(self.mask):
            self.mask[row] = mask

    def newest(self) -> tuple[Tree, Tree]:
        """Return copies of the observations and masks of all rows."""
        return tree_map(np.array, (self.obs, self.mask))

    def pop_step(self) -> EnvStep:
        """Return the results of the rows since the last call."""
        return self.outcome.pop_step(*self.newest())

    def restart(self) -> EnvStep:
        """Return the start of episodes as a step that is not experience."""
        self.outcome.start[:] = True
        return self.pop_step()

    def get_state(self) -> State:
        """Return the newest observation and mask of each row, and which agents are present."""
        return tree_map(np.array, {"obs": self.obs, "mask": self.mask, "present": self.present})

    def set_state(self, state: State) -> None:
        """Restore what `get_state` returned."""
        tree_map(np.copyto, (self.obs, self.mask, self.present), (state["obs"], state["mask"], state["present"]))


@dataclass(eq=False)
class SharedEnv:
    """The `env` of an algorithm whose behavior shares a world with others. During a run, `side` is its side of the world."""

    num_envs: int
    side: Side | None = field(default=None, repr=False)


class World:
    """E copies of an environment, and the sides of their agents. If all agents move simultaneously, `step` steps all copies.

    The step in which the last agent of a copy leaves starts its next episode.

    Args:
        make: builds a copy from its index among those of all ranks.
        num_copies: E.
        sides: the spaces of each side, with the names of its agents.
        first: the index of the first copy.
        way: how the state of a copy is saved, see `envs/snapshot/state.py`; None if it cannot be saved.
        max_episode_steps: number of steps after which episodes are truncated.
        settings: a fingerprint of the settings, which must equal that of a restored state.
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
        self.envs = [record(make(first + e), way) for e in range(num_copies)]
        self.copies = [agents_of(env) for env in self.envs]
        self.parameters = [next((layer for layer in layers(env) if isinstance(layer, EnvParameters)), None) for env in self.envs]
        """The wrapper that draws the parameters of each copy, or None."""
        self.name = self.copies[0].name
        self.way, self.max_episode_steps, self.settings = way, max_episode_steps, settings
        self.sides = {name: Side(self.name, name, spaces, num_copies) for name, spaces in sides.items()}
        self.lengths = np.zeros(num_copies, dtype=np.int64)
        """Steps of each copy in its episode."""
        self.cuts_all = False
        """Whether the next step truncates all episodes."""

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Set what copies draw their parameters from, starting with their next episodes. Raises `SettingError`: they have none."""
        for parameters in self.parameters:
            if parameters is None:
                raise SettingError(f"{self.name} takes no lessons; build it from settings with env.parameters")
            parameters.set_lessons(lessons)

    def tell(self, e: int, info: Info) -> Info:
        """Return the last info of an agent's episode, with the parameters of its copy."""
        parameters = self.parameters[e]
        return info if parameters is None else parameters.extend_info(info)

    def reset(self, seed: int | None = None) -> None:
        """Start an episode in every copy, with seed, seed + 1, …"""
        for e in range(len(self.copies)):
            self.start(e, None if seed is None else seed + e)
        for side in self.sides.values():
            side.outcome.forget()

    def start(self, e: int, seed: int | None = None) -> None:
        """Start an episode of one copy."""
        self.envs[e].reset(seed=seed)
        self.lengths[e] = 0
        for side in self.sides.values():
            side.present[list(side.rows[e].values())] = False
            side.look(e, self.copies[e])

    def move(self, e: int, actions: Mapping[str, Tree]) -> bool:
        """Step one copy with the actions of the agents that move. Return whether its episode is to be truncated."""
        self.envs[e].step(actions)
        self.lengths[e] += 1
        return self.cuts_all or bool(self.lengths[e] == self.max_episode_steps)

    def step(self, actions: Mapping[str, Tree]) -> dict[str, EnvStep]:
        """Step all copies with the actions `[N, ...]` of each side, in its own format; actions of absent agents are ignored.

        Return the results of the rows of each side.
        """
        for e, copy in enumerate(self.copies):
            sides = [(side, side.rows[e], actions[name]) for name, side in self.sides.items()]
            cut = self.move(
                e, {agent: tree_index(action, rows[agent]) for _, rows, action in sides for agent in copy.to_move if agent in rows}
            )
            for side, rows, _ in sides:
                self.note(e, side, rows, cut)
            if cut or not copy.present:
                self.start(e)
            else:
                for side, _, _ in sides:
                    side.look(e, copy)
        self.cuts_all = False
        return {name: side.pop_step() for name, side in self.sides.items()}

    def note(self, e: int, side: Side, rows: Mapping[str, int], cut: bool) -> None:
        """Note the rewards of a copy's step, and the agents whose episode ended in it: all, if it was `cut`."""
        outcome, copy = side.outcome, self.copies[e]
        for agent in copy.moved:
            if agent in rows:
                outcome.acted[rows[agent]] = True
        for agent, reward in copy.rewards.items():
            if agent in rows:
                outcome.reward[rows[agent]] += reward
        ended = {agent: (copy.last[agent], copy.last_info[agent]) for agent in copy.last}
        if cut:
            ended |= {agent: copy.look(agent) for agent in copy.present}
        for agent, (obs, info) in ended.items():
            row = rows.get(agent)
            if row is not None and outcome.acted[row]:  # else it left without a move
                seen = side.read(row, obs, info, side.see_jointly(copy, over=True), over=True)
                outcome.end(row, seen, self.tell(e, info), agent in copy.terminated)

    def close(self) -> None:
        """Close all copies."""
        for env in self.envs:
            close_env(env)

    def get_state(self) -> State:
        """Return everything that the next steps depend on, as plain data; only between two steps."""
        fixed = {"num_copies": len(self.copies), "settings": self.settings, "lengths": self.lengths.copy()}
        states = None if self.way is None else [get_state(env, self.way) for env in self.envs]
        return {**fixed, "states": states, "sides": {name: side.get_state() for name, side in self.sides.items()}}

    def set_state(self, state: State) -> str | None:
        """Restore a state before the first reset. Return None, or the reason why that is impossible; then reset instead."""
        if state["states"] is None or self.way is None:
            return f"{self.name} cannot be saved in the middle of an episode"
        if "num_copies" not in state or list(state["sides"]) != list(self.sides):
            return "the checkpoint has environments of another kind"
        if state["num_copies"] != len(self.copies):
            return f"the checkpoint has {state['num_copies']} copies of the environment, not {len(self.copies)}"
        if state["settings"] != self.settings:
            return "their settings changed since they were saved"
        if not set_states(self.envs, [self.way] * len(self.envs), state["states"]):
            return f"{self.name} could not be restored exactly"
        self.lengths = state["lengths"].copy()
        for name, side in self.sides.items():
            side.set_state(state["sides"][name])
        return None
