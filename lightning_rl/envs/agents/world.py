"""Environments of several agents as rows of arrays: E copies, whose agents may move in turn, leave and come.

`World` is the base of its kinds: copies of PettingZoo stepped one after another (`serial.py`), scenarios of VMAS (`vmas.py`), and games of
this package (`games/game.py`). Steppers play worlds for collectors (`stepper.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from lightning_rl.checkpoints.validation import ANYTHING, FLAGS, INTEGERS, LIST, POSITIVE, TEXT, Rules
from lightning_rl.envs import LESSONS, PARAMETERS, SUCCESS
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.types import EnvStep, Info, State, Tree, tree_index, tree_map

EVERY = slice(None)


class Moves(NamedTuple):
    """What a step of K copies did for the A agents of a side, `[K, A]` each.

    reward: its reward.  ended: whether its episode ended, and `terminated`: not by truncation.  present: whether it is present afterwards.
    """

    reward: np.ndarray
    ended: np.ndarray
    terminated: np.ndarray
    present: np.ndarray


class Side:
    """The A agents of one behavior, in all copies: row e · A + a is agent a of copy e.

    The row of an absent agent is not experience: `valid` is False, its observation zeros, its mask all true, and `episode_start` True, so
    that its memory is empty when it enters. Rewards add up from an agent's move to its next one, or to the end of its episode.

    Attributes:
        obs, mask: the newest of each row.
        present, to_move: whether its agent is present, and whether it acts in the next step of its copy.
        moved: whether it has moved since it came.
    """

    def __init__(self, env_name: str, name: str, spaces: Spaces, num_copies: int, first: int = 0) -> None:
        self.name, self.spaces, self.agents = f"{env_name} {name}".rstrip(), spaces, list(spaces.agents)
        self.num = num = num_copies * len(self.agents)
        self.rows = np.arange(num).reshape(num_copies, -1)
        """The rows of the agents of each copy, `[E, A]`."""
        self.labels = [f"agent {agent} of environment {first + e} of {env_name}" for e in range(num_copies) for agent in self.agents]
        """Name of each row in messages; `first` is the number of the first copy."""
        self.obs, self.mask = allocate(spaces.observation, num), spaces.masks(num)
        self.last_obs, self.last_mask = allocate(spaces.observation, num), spaces.masks(num)
        """Final observations and masks of the rows whose episodes ended."""
        self.present, self.to_move, self.moved = (np.zeros(num, dtype=bool) for _ in range(3))
        self.unpaid = np.zeros(num)
        """Reward of each row since its last move, or since the beginning of its episode."""
        self.forget()

    def forget(self) -> None:
        """Clear the results, with new arrays, before the next step."""
        self.reward, self.valid = np.zeros(self.num), self.to_move.copy()
        self.ended, self.terminated, self.start = (np.zeros(self.num, dtype=bool) for _ in range(3))
        self.last_info: dict[int, Info] = {}

    def begin(self, copies: np.ndarray) -> None:
        """Note that episodes begin in K copies."""
        rows = self.rows[copies]
        self.moved[rows], self.unpaid[rows] = False, 0.0
        self.start[rows] = True

    def note(self, copies: np.ndarray, moves: Moves, cut: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Note a step of K copies; those that are `cut`, `[K]`, end for all agents, and none if it is None.

        Return the rows whose episodes ended, except those that never moved, and which of them terminated. Of several episodes between two
        results the first counts: in later ones the row is an opponent's.
        """
        rows = self.rows[copies]
        self.moved[rows] = moved = self.moved[rows] | self.to_move[rows]
        self.unpaid[rows] += moves.reward
        ended = moved & ~self.ended[rows] & (moves.ended if cut is None else moves.ended | (cut[:, None] & moves.present))
        return rows[ended], moves.terminated[ended]

    def end(self, rows: np.ndarray, terminated: np.ndarray, obs: Tree, mask: Tree, infos: Mapping[int, Info]) -> None:
        """Note that the episodes of K rows ended, with their final observations, masks and infos; `infos`: by row."""
        self.reward[rows], self.unpaid[rows] = self.unpaid[rows], 0.0
        self.ended[rows], self.terminated[rows] = True, terminated
        tree_map(lambda kept, last: kept.__setitem__(rows, last), self.last_obs, obs)
        if len(mask):
            self.last_mask[rows] = mask
        self.last_info.update(infos)

    def newest(self, rows: np.ndarray | slice = EVERY) -> tuple[Tree, Tree]:
        """Return copies of the newest observations and masks of some rows, by default of all."""
        if isinstance(rows, slice):
            return tree_map(np.array, self.obs), np.array(self.mask) if len(self.mask) else ()
        return take(self.obs, self.mask, rows)

    def pop_step(self, rows: np.ndarray | slice = EVERY, following: np.ndarray | slice = EVERY) -> EnvStep:
        """Return the results of some rows since the last call, and clear them.

        following: the rows that take their places; their observations are the newest.
        """
        running = ~(self.ended | self.start)  # in a new episode, what is paid before the first move belongs to the next step
        self.reward[running], self.unpaid[running] = self.unpaid[running], 0.0
        over, terminated = self.ended[rows], self.terminated[rows]
        ended = np.flatnonzero(over)
        final_obs, final_mask, info = None, (), {}
        if len(ended):
            last = ended if isinstance(rows, slice) else rows[ended]
            final_obs, final_mask = take(self.last_obs, self.last_mask, last)
            if self.last_info:
                infos = {k: self.last_info[row] for k, row in zip(ended.tolist(), last.tolist(), strict=True)}
                info = gather_success(infos, len(over)) | gather_parameters(infos, len(over))
        obs, mask = self.newest(following)
        flags = terminated, over & ~terminated, self.valid[rows], self.start[following]
        step = EnvStep(obs, self.reward[rows], *flags, ended, final_obs, info, mask, final_mask)
        self.forget()
        return step

    def restart(self, rows: np.ndarray | slice = EVERY) -> EnvStep:
        """Return the start of episodes of some rows, by default of all, as a step that is not experience."""
        self.forget()
        self.start[:], self.valid[:] = True, False
        return self.pop_step(rows, rows)

    def get_state(self) -> State:
        """Return the newest observation and mask of each row, and which agents are present."""
        return tree_map(np.array, {"obs": self.obs, "mask": self.mask, "present": self.present})

    def set_state(self, state: State) -> None:
        """Restore what `get_state` returned."""
        tree_map(np.copyto, (self.obs, self.mask, self.present), (state["obs"], state["mask"], state["present"]))


def take(obs: Tree, mask: Tree, rows: np.ndarray) -> tuple[Tree, Tree]:
    """Return the observations and masks of some rows; indexing by an array copies."""
    return tree_index(obs, rows), mask[rows] if len(mask) else ()


def find_results(reward: np.ndarray, ended: np.ndarray, was_present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which groups of an endless world finished a game, and its results: 1 won, ½ drawn, 0 lost, by the sign of the last reward.

    A group finishes with its last member.  reward, ended, was_present: of the G groups' members in a step, `[G, A]`.
    """
    finished = np.flatnonzero(ended.any(1) & (ended | ~was_present).all(1))
    return finished, 0.5 + 0.5 * np.sign((reward * ended)[finished].sum(1))


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
    parameters: dict[str, dict[str, np.ndarray]] = {}
    for key, kind in ((PARAMETERS, np.float64), (LESSONS, np.int64)):
        for row, info in infos.items():
            for name, value in info.get(key, {}).items():
                parameters.setdefault(key, {}).setdefault(name, np.zeros(num, kind))[row] = value
    return parameters


@dataclass(eq=False)
class SharedEnv:
    """The `env` of an algorithm whose behavior shares a world with others. During a run, `side` is its side of the world.

    name: of the world.  is_unity: whether it is a scene of Unity.
    """

    num_envs: int
    name: str = "the environment"
    is_unity: bool = False
    side: Side | None = field(default=None, repr=False)


class World:
    """E copies of an environment, and the sides of their agents. Base class: a kind of world defines `_start`, `_step`, `look` and
    `observe_last`, and how its state is saved.

    Args:
        name: name in messages.
        num_copies: E.
        sides: the spaces of each side, with the names of its agents.
        max_episode_steps: number of steps after which episodes are truncated.
        settings: a fingerprint of the settings, which must equal that of a restored state.
        can_be_saved: whether it can be saved in the middle of an episode.
        first: number of the first copy in messages.
    """

    state_rules: ClassVar[Rules] = {
        "num_copies": POSITIVE,
        "settings": TEXT,
        "lengths": INTEGERS,
        "states": LIST.or_null(),
        "sides/*/obs|mask": ANYTHING,
        "sides/*/present": FLAGS,
    }
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    ends_together = False
    """Whether all agents of a copy end in the same step."""
    is_endless = False
    """Whether agents begin their next episodes by themselves, so that copies are never over; the results of games are `find_results`."""

    def __init__(
        self,
        name: str,
        num_copies: int,
        sides: Mapping[str, Spaces],
        max_episode_steps: int | None = None,
        settings: str = "",
        can_be_saved: bool = True,
        first: int = 0,
    ) -> None:
        self.name, self.num_copies, self.max_episode_steps = name, num_copies, max_episode_steps
        self.settings, self.can_be_saved = settings, can_be_saved
        self.restarts, self.notices = 0, list[str]()
        """Number of restarts of copies that failed, and a line for the user about each."""
        self.stats: dict[str, float] = {}
        """Metrics that the environments report themselves."""
        self.sides = {side: Side(name, side, spaces, num_copies, first) for side, spaces in sides.items()}
        self.all = np.arange(num_copies)
        self.lengths = np.zeros(num_copies, dtype=np.int64)
        """Steps of each copy in its episode."""
        self.cuts_all = False
        """Whether the next step truncates all episodes."""

    def reset(self, seed: int | None = None) -> None:
        """Start an episode in every copy; without a seed, continue the current random streams."""
        self.start(self.all, seed)
        self.look(self.all)
        for side in self.sides.values():
            side.forget()

    def start(self, copies: np.ndarray, seed: int | None = None) -> None:
        """Start episodes in K copies, at which the caller then looks."""
        self.lengths[copies] = 0
        for side in self.sides.values():
            side.begin(copies)
        self._start(copies, seed)

    def step(self, copies: np.ndarray, actions: Mapping[str, Tree]) -> tuple[dict[str, Moves], np.ndarray]:
        """Step K copies with the actions `[N, ...]` of each side's rows, in its own format; only those of agents to move are used.

        Return what each side's agents did, and whether the episodes of the copies are over, `[K]`: no agent is present, or they are
        truncated. The caller then starts the next ones, and looks at the K copies.
        """
        moves, over = self._step(copies, actions)
        self.lengths[copies] += 1
        cut = None
        if self.cuts_all or self.max_episode_steps is not None:
            cut = self.cuts_all | (self.lengths[copies] == self.max_episode_steps)
            over = over | cut
        for name, side in self.sides.items():
            rows, terminated = side.note(copies, moves[name], cut)
            if len(rows):
                side.end(rows, terminated, *self.observe_last(name, rows))
        return moves, over

    def step_all(self, actions: Mapping[str, Tree]) -> None:
        """Step all copies, and start the next episodes of those that are over; the results are in the sides."""
        _, over = self.step(self.all, actions)
        self.cuts_all = False
        if over.any():
            self.start(self.all[over])
        self.look(self.all)

    def _start(self, copies: np.ndarray, seed: int | None) -> None:
        """Start episodes in K copies."""
        raise NotImplementedError

    def _step(self, copies: np.ndarray, actions: Mapping[str, Tree]) -> tuple[dict[str, Moves], np.ndarray]:
        """Step K copies. Return what the agents of each side did, and in which copies no agent is present, `[K]`."""
        raise NotImplementedError

    def look(self, copies: np.ndarray) -> None:
        """Read, for the sides' rows of K copies, who is present, who is to move, and what those who move next observe."""
        raise NotImplementedError

    def observe_last(self, name: str, rows: np.ndarray) -> tuple[Tree, Tree, Mapping[int, Info]]:
        """Return the final observations and masks `[K, ...]` of a side's rows, whose episodes the last step ended, and infos by row."""
        raise NotImplementedError

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Set what copies draw their parameters from, starting with their next episodes. Raises `SettingError`: they have none."""
        raise SettingError(f"{self.name} takes no lessons: it has no parameters")

    def close(self) -> None:
        """Close all copies."""

    def get_state(self) -> State:
        """Return everything that the next steps depend on, as plain data; only between two steps."""
        fixed = {"num_copies": self.num_copies, "settings": self.settings, "lengths": self.lengths.copy()}
        return {**fixed, "sides": {name: side.get_state() for name, side in self.sides.items()}, **self._get_copies()}

    def set_state(self, state: State) -> str | None:
        """Restore a state before the first reset. Return None, or the reason why that is impossible; then reset instead."""
        if "num_copies" not in state or not self._are_alike(state):
            return "the checkpoint has environments of another kind"
        if not self.can_be_saved or state.get("states", ()) is None:
            return f"{self.name} cannot be saved in the middle of an episode"
        if state["num_copies"] != self.num_copies:
            return f"the checkpoint has {state['num_copies']} copies of the environment, not {self.num_copies}"
        if state["settings"] != self.settings:
            return "their settings changed since they were saved"
        try:
            fits = self._set_copies(state)
            np.copyto(self.lengths, state.get("lengths", 0), casting="safe")
            for name, side in self.sides.items():
                if "sides" in state:  # older states of some kinds have none
                    side.set_state(state["sides"][name])
                side.forget()
        except (KeyError, IndexError, TypeError, ValueError):
            fits = False
        return None if fits else f"{self.name} could not be restored exactly"

    def _are_alike(self, state: State) -> bool:
        """Return whether a state is of this kind of world, with the same sides."""
        raise NotImplementedError

    def _get_copies(self) -> State:
        """Return the state of the copies."""
        raise NotImplementedError

    def _set_copies(self, state: State) -> bool:
        """Restore the result of `_get_copies`, and look at all copies. Return whether it was exact; errors mean that it was not."""
        raise NotImplementedError
