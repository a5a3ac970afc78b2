"""Step copies of an environment of several agents as the rows of one vector environment."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete

from lightning_rl.envs import Info
from lightning_rl.envs.agents.copies import AgentsEnv
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.envs.masks import make_masks
from lightning_rl.envs.snapshot.state import choose_way, get_state, record, set_state
from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces, allocate, legal_sample
from lightning_rl.types import EnvStep, State, Tree, tree_index, tree_map, tree_stack

SUCCESS = ("is_success", "success")
"""Under which names infos report the success of an episode."""


class Copies:
    """E copies of an environment of A agents, and what each agent sees: row e · A + a is agent a of copy e. The base of both steppers.

    Args:
        make: builds a copy, by its index among those of all ranks.
        num_copies: E.
        spaces: of the agents.
        first: the index of the first copy.
        way: how the state of a copy is saved, see `envs/snapshot/state.py`; None if it cannot be.
        max_episode_steps: truncate episodes here.
        settings: a fingerprint of the settings, which a state must fit.
    """

    restarts, workers = 0, None

    def __init__(
        self,
        make: Callable[[int], AgentsEnv],
        num_copies: int,
        spaces: Spaces,
        first: int = 0,
        way: str | None = None,
        max_episode_steps: int | None = None,
        settings: str = "",
    ) -> None:
        self.envs = [record(make(first + e), way) for e in range(num_copies)]
        self.copies: list[Any] = [env.unwrapped for env in self.envs]
        self.name, self.agents = self.copies[0].name, list(spaces.agents)
        self.way, self.max_episode_steps, self.settings = way, max_episode_steps, settings
        self.num_envs, self.num_rows, self.can_be_saved = num_copies * spaces.rows, num_copies * len(self.agents), way is not None
        self.notices: list[str] = []
        self.all_valid = np.ones(self.num_envs, dtype=bool)
        self.masks = make_masks(spaces, f"row {{}} of {self.name}")
        agents = len(self.agents)
        self.rows = [{agent: e * agents + a for a, agent in enumerate(self.agents)} for e in range(num_copies)]
        """The row of each agent, in each copy."""
        self.obs, self.mask = allocate(spaces.observation, num_copies * agents), spaces.masks(num_copies * agents)
        self.present = np.zeros(num_copies * agents, dtype=bool)
        self.lengths = np.zeros(num_copies, dtype=np.int64)
        """Steps of each copy in its episode."""
        self._forget()

    def _forget(self) -> None:
        """Forget what was told of the last step, in new arrays."""
        num = self.num_envs
        self.reward, self.acted = np.zeros(num), np.zeros(num, dtype=bool)
        self.terminated, self.truncated, self.start = (np.zeros(num, dtype=bool) for _ in range(3))
        self.final: dict[int, tuple[Tree, Tree, Info]] = {}

    def _start(self, e: int, seed: int | None = None) -> None:
        """Begin an episode of one copy."""
        self.envs[e].reset(seed=seed)
        self.lengths[e] = 0
        self.present[list(self.rows[e].values())] = False
        self._look(e)

    def _look(self, e: int) -> list[int]:
        """Take in who is there and what those see who move next. Return the rows of agents that are not there or have just come."""
        copy, outside = self.copies[e], []
        there = set(copy.present)
        for agent, row in self.rows[e].items():
            was, self.present[row] = self.present[row], agent in there
            if agent in copy.obs:
                self._see(row, *self.masks.one(copy.obs[agent], copy.info.get(agent, {}), row))
            elif not self.present[row]:
                self._see(row, None, True)
            if not (was and self.present[row]):
                outside.append(row)
        return outside

    def _see(self, row: int, obs: Tree, mask: Any) -> None:
        """Write an observation, zeros if it is None, and a mask into a row."""
        if isinstance(self.obs, np.ndarray):
            self.obs[row] = 0 if obs is None else obs
        elif obs is None:
            tree_map(lambda rows: rows.__setitem__(row, 0), self.obs)
        else:
            tree_map(lambda rows, leaf: rows.__setitem__(row, leaf), self.obs, obs)
        if len(self.mask):
            self.mask[row] = mask

    def _end(self, row: int, obs: Tree, info: Info, terminated: bool) -> None:
        """Note that the episode of a row has ended."""
        self.terminated[row], self.truncated[row] = terminated, not terminated
        seen, mask = self.masks.one(obs, info, row, over=True)
        self.final[row] = tree_map(np.array, seen), mask, info

    def _newest(self) -> tuple[Tree, Tree]:
        """Return copies of the observations and masks of the rows."""
        return tree_map(np.array, (self.obs, self.mask))

    def _gather(self) -> EnvStep:
        """Return what happened since the last step, and forget it."""
        ended = np.flatnonzero(self.terminated | self.truncated)
        finals = [self.final[int(row)] for row in ended]
        final_obs = tree_stack([obs for obs, _, _ in finals]) if finals else None
        final_mask = np.stack([mask for _, mask, _ in finals]) if finals and len(self.mask) else ()
        valid = self.all_valid if self.acted.all() else self.acted
        info = gather_success({row: told for row, (_, _, told) in self.final.items()}, self.num_envs)
        obs, mask = self._newest()
        step = EnvStep(obs, self.reward, self.terminated, self.truncated, valid, self.start, ended, final_obs, info, mask, final_mask)
        self._forget()
        return step

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        """Start an episode everywhere, with seed, seed + 1, … Return the first observations and their masks."""
        for e in range(len(self.copies)):
            self._start(e, None if seed is None else seed + e)
        self._forget()
        return self._newest()

    def restart_all(self) -> EnvStep:
        """Abandon all episodes and start new ones: a step that is not experience."""
        self.reset()
        self.start[:] = True
        return self._gather()

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Raise `SettingError`: such an environment takes none."""
        raise SettingError(f"{self.name} takes no lessons: env.parameters are for environments of one agent")

    def state_dict(self) -> State:
        """Return all that the next steps depend on, as plain data, between two steps."""
        own = {"mode": type(self).__name__, "num_envs": self.num_envs, "settings": self.settings}
        states = None if self.way is None else [get_state(env, self.way) for env in self.envs]
        return {
            **own,
            "states": states,
            **tree_map(np.array, {name: getattr(self, name) for name in ("obs", "mask", "present", "lengths")}),
        }

    def load_state_dict(self, state: State) -> str | None:
        """Restore a state, before the first reset. Return why that is not possible, in which case reset; else None."""
        if state["states"] is None or self.way is None:
            return f"{self.name} cannot be saved in the middle of one"
        if (state["mode"], state["num_envs"]) != (type(self).__name__, self.num_envs):
            return f"the checkpoint has {state['num_envs']} rows of agents"
        if state["settings"] != self.settings:
            return "its settings changed since it was saved"
        if not all(set_state(env, self.way, each) for env, each in zip(self.envs, state["states"], strict=True)):
            return f"{self.name} did not come back as it was saved"
        tree_map(np.copyto, (self.obs, self.mask), (state["obs"], state["mask"]))
        self.present, self.lengths = state["present"].copy(), state["lengths"].copy()
        return None


class AgentStepper(Copies):
    """Steps environments in which all agents move at once; each agent is a row. Has the methods of `envs.stepping.Stepper`.

    The row of an agent that is not there is no experience: `valid` is False, its observation zeros, its mask all true, and `episode_start`
    True, so that it remembers nothing when it comes. A copy begins its next episode in the step in which its last agent leaves.
    """

    def step(self, action: Tree) -> EnvStep:
        """Step all copies with the actions `[N, ...]` of agents, in their own form; those of who is not there are ignored."""
        for e, (env, copy, rows) in enumerate(zip(self.envs, self.copies, self.rows, strict=True)):
            movers = copy.to_move
            env.step({agent: tree_index(action, rows[agent]) for agent in movers})
            self.lengths[e] += 1
            self.acted[[rows[agent] for agent in movers]] = True
            for agent, reward in copy.rewards.items():
                self.reward[rows[agent]] += reward
            ended = {agent: (copy.last[agent], copy.last_info[agent]) for agent in copy.terminated | copy.truncated}
            if cut := self.lengths[e] == self.max_episode_steps:
                ended |= {agent: (copy.obs[agent], copy.info.get(agent, {})) for agent in copy.present}
            for agent, (obs, info) in ended.items():
                if self.acted[rows[agent]]:  # else it left as it came
                    self._end(rows[agent], obs, info, agent in copy.terminated)
            if cut or not copy.present:
                self._start(e)
            else:
                self._look(e)
        return self._gather()

    def _look(self, e: int) -> list[int]:
        outside = super()._look(e)
        self.start[outside] = True
        return outside


class Opponent(Protocol):
    """Who plays the seats that do not learn."""

    def reset(self, seed: int | None) -> None:
        """Begin anew in all copies."""

    def act(self, obs: Tree, mask: Tree, rows: np.ndarray, start: np.ndarray) -> Tree:
        """Return actions for observations `[K, ...]` and masks `[K, M]` of K rows; `start [K]`: whether it is their first move."""

    def get_state(self) -> State:
        """Return all that the next moves depend on."""

    def set_state(self, state: State) -> None:
        """Restore a state."""


class TurnStepper(Copies):
    """Steps games of turns with one learner in each: a row is a copy. The learner takes the next seat in each episode.

    A step runs from the learner's move to its next one, or to the end of its episode, where the copy begins the next one. What others do in
    between, played by `opponent`, is part of its environment, and the rewards in between are added up: before its first move too.
    """

    opponent: Opponent

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        num = len(self.copies)
        self.seats = np.arange(num) % len(self.agents) - 1
        """Which agent learns, in each copy."""
        self.moved = np.zeros(num * len(self.agents), dtype=bool)
        """Who has moved in the current episode."""
        self.paid = np.zeros(num)
        """What each learner has got since its move."""

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        self.opponent.reset(seed)
        self.paid[:] = 0.0
        super().reset(seed)
        self._play_others()
        self._forget()
        return self._newest()

    def step(self, action: Tree) -> EnvStep:
        """Step all copies with the learners' actions `[N, ...]`, in their own form, and play on until each is to move again."""
        for e, copy in enumerate(self.copies):
            self.acted[e] = True
            self._step(e, copy.to_move[0], tree_index(action, e))
        self._play_others()
        running = ~(self.terminated | self.truncated)
        self.reward[running], self.paid[running] = self.paid[running], 0.0
        return self._gather()

    def _play_others(self) -> None:
        """Let others move until it is the learner's turn in every copy."""
        while waiting := [e for e, copy in enumerate(self.copies) if copy.to_move[0] != self._learner(e)]:
            movers = [self.copies[e].to_move[0] for e in waiting]
            rows = np.array([self.rows[e][agent] for e, agent in zip(waiting, movers, strict=True)])
            obs, mask = tree_index((self.obs, self.mask), rows)
            actions = self.opponent.act(obs, mask, rows, ~self.moved[rows])
            for k, (e, agent) in enumerate(zip(waiting, movers, strict=True)):
                self._step(e, agent, tree_index(actions, k))

    def _learner(self, e: int) -> str:
        return self.agents[self.seats[e]]

    def _step(self, e: int, mover: str, action: Tree) -> None:
        """Let an agent move; the episode of a copy is over when its learner has ended."""
        copy, rows = self.copies[e], self.rows[e]
        self.envs[e].step({mover: action})
        self.lengths[e] += 1
        self.moved[rows[mover]] = True
        learner = self._learner(e)
        self.paid[e] += copy.rewards.get(learner, 0.0)
        ended, cut = learner in copy.terminated | copy.truncated, self.lengths[e] == self.max_episode_steps
        if not (ended or cut or not copy.present):
            self._look(e)
            return
        if self.moved[rows[learner]]:  # else the episode was over before it could act
            obs, info = (copy.last[learner], copy.last_info[learner]) if ended else copy.look(learner)
            self._end(e, obs, info, learner in copy.terminated)
            self.reward[e] = self.paid[e]
        self.paid[e] = 0.0
        self._start(e)

    def _start(self, e: int, seed: int | None = None) -> None:
        self.seats[e] = (self.seats[e] + 1) % len(self.agents)
        self.moved[list(self.rows[e].values())] = False
        self.start[e] = True
        super()._start(e, seed)

    def _newest(self) -> tuple[Tree, Tree]:
        return tree_index((self.obs, self.mask), np.arange(len(self.copies)) * len(self.agents) + self.seats)

    def state_dict(self) -> State:
        own = {"seats": self.seats.copy(), "moved": self.moved.copy(), "paid": self.paid.copy()}
        return {**super().state_dict(), **own, "opponent": self.opponent.get_state()}

    def load_state_dict(self, state: State) -> str | None:
        reason = super().load_state_dict(state)
        if reason is None:
            self.seats, self.moved, self.paid = (state[name].copy() for name in ("seats", "moved", "paid"))
            self.opponent.set_state(state["opponent"])
        return reason


def gather_success(told: Mapping[int, Info], num: int) -> dict[str, Any]:
    """Return what infos of rows report of their success as arrays `[num]`, with gymnasium's mask of who reports it."""
    for name in SUCCESS:
        given = {row: float(info[name]) for row, info in told.items() if name in info}
        if given:
            values, reported = np.zeros(num), np.zeros(num, dtype=bool)
            values[list(given)], reported[list(given)] = list(given.values()), True
            return {name: values, f"_{name}": reported}
    return {}


class RandomPlay(gym.Wrapper):
    """Plays random legal moves: an action is their seed. In this form it can be tried which way of saving a state is exact."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.action_space, self.observation_space = Discrete(2**31 - 1), Discrete(1)

    def step(self, action: Any) -> Any:
        copy: Any = self.env
        return self.env.step({agent: random_action(copy, agent, int(action) + k) for k, agent in enumerate(copy.to_move)})


def random_action(copy: AgentsEnv, agent: str, seed: int) -> Tree:
    """Draw a legal action of an agent who is to move."""
    space = deepcopy(copy.env.action_space(agent))
    space.seed(seed % 2**31)
    obs, info = copy.obs[agent], copy.info.get(agent, {})
    masks = make_masks(copy.spaces_of([agent]), f"agent {agent} of {copy.name}")
    mask = masks.one(obs, info)[1]
    return legal_sample(space, mask) if len(mask) else space.sample()


def choose_way_of_copies(make: Callable[[int], AgentsEnv], key: str | None) -> str | None:
    """Return how the state of a copy can be saved exactly; None if it cannot. It is tried once for each `key`."""
    return choose_way(partial(_make_random_play, make), key)


def _make_random_play(make: Callable[[int], AgentsEnv]) -> gym.Env:
    return RandomPlay(make(0))
