"""Steppers of environments of several agents for a collector.

With `AgentStepper` all agents learn, with `SeatStepper` one agent of each copy, with `TeamStepper` one team of each copy.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import numpy as np

from lightning_rl.envs.agents.world import Outcome, World
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.errors import SettingError
from lightning_rl.nan_policy import finite_rewards
from lightning_rl.types import EnvStep, State, Tree, tree_index

MAX_MOVES = 10_000
"""Maximum number of moves of others in a row; after them an error reports that it is never the learner's turn."""
SIDE = "all"
"""The name of the only side."""


class WorldStepper:
    """Base of the steppers of an environment of several agents. Has the methods of `Stepper`.

    Args:
        world: a world with one side, which has all agents.
        outcome: the results of the rows.
    """

    restarts, workers = 0, None

    def __init__(self, world: World, outcome: Outcome) -> None:
        self.world, self.side, self.outcome = world, world.sides[SIDE], outcome
        self.name, self.can_be_saved, self.close = world.name, world.way is not None, world.close
        self.notices: list[str] = []
        self.num_envs, self.all_valid = outcome.num, outcome.all_valid
        self.labels: list[str] = []
        """Names of the rows in messages, if all agents are rows."""

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        """Start an episode in every copy, with seed, seed + 1, … Return the first observations and their masks."""
        raise NotImplementedError

    def step(self, action: Tree) -> EnvStep:
        """Step all copies with the actions `[N, ...]` of the rows, in their own format; actions of absent agents are ignored."""
        raise NotImplementedError

    def restart_all(self) -> EnvStep:
        """Abandon all episodes and start new ones; return a step that is not experience."""
        self.change_seats()
        obs, mask = self.reset()
        self.outcome.start[:] = True
        return self.outcome.pop_step(obs, mask)

    def change_seats(self) -> None:
        """Let others learn in the next episodes, unless all do."""

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Set what copies draw their parameters from, starting with their next episodes. Raises `SettingError`: they have none."""
        self.world.set_lessons(lessons)

    def state_dict(self) -> State:
        """Return everything that the next steps depend on, as plain data; only between two steps."""
        return {**self.world.get_state(), **self.own_state()}

    def own_state(self) -> State:
        """Return the state in addition to that of the world."""
        return {}

    def load_state_dict(self, state: State) -> str | None:
        """Restore a state before the first reset. Return None, or the reason why that is impossible; then reset instead."""
        return self.world.set_state(state) or self.set_own_state(state)

    def set_own_state(self, state: State) -> str | None:
        """Restore the result of `own_state`. Return None, or the reason why that is impossible."""
        return None


class AgentStepper(WorldStepper):
    """Steps environments in which all agents move simultaneously and learn; each agent is a row."""

    def __init__(self, world: World) -> None:
        super().__init__(world, world.sides[SIDE].outcome)
        self.labels = self.side.labels

    @property
    def present(self) -> np.ndarray:
        """Return the rows whose agents are present."""
        return self.side.present

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        self.world.reset(seed)
        return self.side.newest()

    def step(self, action: Tree) -> EnvStep:
        return self.world.step({SIDE: action})[SIDE]


class Opponent(Protocol):
    """Plays the seats that do not learn."""

    def reset(self, seed: int | None) -> None:
        """Start new episodes in all copies; `seed`: for its random draws, None: continue with the last one."""

    def begin(self, copies: np.ndarray, seats: np.ndarray) -> None:
        """Note that episodes begin in K copies, before any move; `seats`: the learners' seats, or the numbers of the learning teams.

        An unfinished episode of these copies was abandoned.
        """

    def finish(self, copies: np.ndarray, results: np.ndarray) -> None:
        """Note that the episodes of K copies ended, with these `points` of the learner or of its team."""

    def act(self, obs: Tree, mask: Tree, rows: np.ndarray, start: np.ndarray) -> Tree:
        """Return actions for observations `[K, ...]` and masks `[K, M]` of K rows; `start [K]`: whether it is their first move.

        Row copy * A + agent belongs to one of the A agents of a copy.
        """

    def get_state(self) -> State:
        """Return everything that the next moves depend on."""

    def set_state(self, state: State) -> None:
        """Restore a state."""


class OpponentStepper(WorldStepper):
    """Base of the steppers of games in which one seat, or one team, of each copy learns; the next one learns in the next episode.

    `opponent` acts for all other agents, as part of the learners' environment.

    Args:
        world: a world with one side, which has all agents.
        rows_per_copy: number of learners in a copy.
        seats_per_copy: number of seats or teams.
    """

    opponent: Opponent
    arrays: ClassVar[tuple[str, ...]]
    """Names of the arrays that the next steps depend on."""

    def __init__(self, world: World, rows_per_copy: int, seats_per_copy: int) -> None:
        num = len(world.copies)
        super().__init__(world, Outcome(num * rows_per_copy))
        self.agents, self.num_seats, self.seats_per_copy = self.side.agents, self.side.num, seats_per_copy
        self.seats = np.arange(num) % seats_per_copy
        """Index of the learning agent or team of each copy."""
        self.returns = np.zeros((num, len(self.agents)))
        """Return of each agent in the current episode so far."""

    def change_seats(self) -> None:
        self.seats = (self.seats + 1) % self.seats_per_copy

    def start_all(self, seed: int | None) -> None:
        """Start an episode in every copy."""
        self.opponent.reset(seed)
        self.returns[:] = 0.0
        self.world.reset(seed)
        self.opponent.begin(np.arange(len(self.seats)), self.seats.copy())

    def start_next(self, over: np.ndarray, returns: np.ndarray) -> None:
        """Start the next episodes of K copies, with the next learners; `returns [K, seats]` are those of the last."""
        self.opponent.finish(over, points(returns, self.seats[over]))
        self.seats[over] = (self.seats[over] + 1) % self.seats_per_copy
        self.returns[over] = 0.0
        for e in over:
            self.world.start(int(e))
        self.opponent.begin(over, self.seats[over])

    def own_state(self) -> State:
        return {name: getattr(self, name).copy() for name in self.arrays} | {"opponent": self.opponent.get_state()}

    def set_own_state(self, state: State) -> str | None:
        try:
            set_arrays(self, {"returns": self.returns, **state}, self.arrays, self.seats_per_copy)
        except (KeyError, TypeError, ValueError):
            return f"{self.name} could not be restored exactly"
        self.opponent.set_state(state["opponent"])
        return None


class SeatStepper(OpponentStepper):
    """Steps games with one learner in each copy: a row is a copy. The learner takes the next seat in each episode.

    A step runs from the learner's move to its next one, or to the end of its episode, where the copy begins the next one. `opponent` acts
    for the others: before the learner, after it, or at the same time. Their moves are part of the learner's environment. Rewards between
    the learner's moves are added up, including those before its first move.
    """

    arrays = ("seats", "moved", "paid", "returns")

    def __init__(self, world: World) -> None:
        super().__init__(world, 1, len(world.sides[SIDE].agents))
        self.moved = np.zeros(self.side.num, dtype=bool)
        """Agents that have moved in the current episode."""
        self.paid = np.zeros(len(world.copies))
        """Reward of each learner since its last move."""

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        self.moved[:], self.paid[:] = False, 0.0
        self.start_all(seed)
        self._play_others()
        self.outcome.forget()
        return self._newest()

    def step(self, action: Tree) -> EnvStep:
        """Step all copies with the learners' actions `[N, ...]`, in their own format, and play on until each is to move again."""
        self.outcome.acted[:] = True
        everywhere = range(len(self.seats))
        self._move({e: {self._learner(e): tree_index(action, e)} for e in everywhere})
        self._play_others()
        outcome = self.outcome
        running = ~(outcome.terminated | outcome.truncated)
        outcome.reward[running], self.paid[running] = self.paid[running], 0.0
        return outcome.pop_step(*self._newest())

    def _learner(self, e: int) -> str:
        return self.agents[self.seats[e]]

    def _play_others(self) -> None:
        """Let others move until it is the learner's turn in every copy. Raises `SettingError`: it never is."""
        for _ in range(MAX_MOVES):
            waiting = [e for e, copy in enumerate(self.world.copies) if self._learner(e) not in copy.to_move]
            if not waiting:
                return
            self._move({e: {} for e in waiting})
        mover, learner = next(iter(self.world.copies[waiting[0]].to_move)), self._learner(waiting[0])
        raise SettingError(
            f"{self.world.copies[waiting[0]].contract.who}: others made {MAX_MOVES:,} moves and agent {learner} none, "
            f"and {mover} moves next; does step pass the turn on?"
        )

    def _move(self, actions: dict[int, dict[str, Tree]]) -> None:
        """Step copies with the actions of their learners, if any, and the opponent's for all others that are to move."""
        side, copies = self.side, self.world.copies
        others = [(e, agent) for e, own in actions.items() for agent in copies[e].to_move if agent not in own]
        if others:
            rows = np.array([side.rows[e][agent] for e, agent in others])
            obs, mask = tree_index((side.obs, side.mask), rows)
            chosen = self.opponent.act(obs, mask, rows, ~self.moved[rows])
            for k, (e, agent) in enumerate(others):
                actions[e][agent] = tree_index(chosen, k)
        over = [e for e, each in actions.items() if self._step_copy(e, each)]
        if over:
            self._finish(np.array(over))

    def _step_copy(self, e: int, actions: dict[str, Tree]) -> bool:
        """Step one copy. Return whether its episode is over: its learner has ended, or no agent is present."""
        copy, rows, learner = self.world.copies[e], self.side.rows[e], self._learner(e)
        cut = self.world.move(e, actions)
        self.moved[[rows[agent] for agent in actions]] = True
        self.returns[e] += finite_rewards([copy.rewards.get(agent, 0.0) for agent in self.agents])
        self.paid[e] += copy.rewards.get(learner, 0.0)
        ended = learner in copy.last
        if not (ended or cut or not copy.present):
            self.side.look(e, copy)
            return False
        if self.moved[rows[learner]]:  # else the episode was over before it could act
            obs, info = (copy.last[learner], copy.last_info[learner]) if ended else copy.look(learner)
            seen = self.side.read(rows[learner], obs, info, self.side.see_jointly(copy, over=True), over=True)
            self.outcome.end(e, seen, self.world.tell(e, info), learner in copy.terminated)
            self.outcome.reward[e] = self.paid[e]
        return True

    def _finish(self, over: np.ndarray) -> None:
        """Begin the next episodes of copies, with the learner in the next seat."""
        self.paid[over], self.outcome.start[over] = 0.0, True
        for e in over:
            self.moved[list(self.side.rows[e].values())] = False
        self.start_next(over, self.returns[over])

    def _newest(self) -> tuple[Tree, Tree]:
        """Return the learners' observations and masks."""
        side = self.side
        return tree_index((side.obs, side.mask), np.arange(len(self.seats)) * len(self.agents) + self.seats)


def set_arrays(stepper: object, state: State, names: Sequence[str], num_seats: int) -> None:
    """Restore arrays of a stepper; all `seats` must be below `num_seats`.

    Raises `KeyError`, `TypeError` or `ValueError`, and restores nothing: an array is missing, or has another shape, type or range.
    """
    arrays = {name: np.array(state[name]) for name in names}
    for name, values in arrays.items():
        own = getattr(stepper, name)
        if values.shape != own.shape or values.dtype != own.dtype:
            raise ValueError(f"{name} has shape {values.shape} of {values.dtype}, not {own.shape} of {own.dtype}")
    if np.any((arrays["seats"] < 0) | (arrays["seats"] >= num_seats)):
        raise ValueError(f"seats are 0 to {num_seats - 1}")
    for name, values in arrays.items():
        setattr(stepper, name, values)


def points(returns: np.ndarray, seats: np.ndarray) -> np.ndarray:
    """Return the points of the learners in K games, `[K]`: the mean over the other players of 1 for a lower return, ½ for an equal one.

    So equally good players have ½ on average, whatever their number.  returns: returns of all players, or teams, `[K, A]`.  seats: `[K]`.
    """
    own = returns[np.arange(len(seats)), seats]
    return 0.5 + 0.5 * np.sign(own[:, None] - returns).sum(1) / max(1, returns.shape[1] - 1)


class TeamStepper(OpponentStepper):
    """Steps games in which all agents move simultaneously and one team of each copy learns: row copy * S + member is one of its S agents.

    The next team learns in the next episode. `opponent` acts for all other agents, as part of the learners' environment. An episode also
    ends when the last agent of the learning team ends, even if others could play on.

    Args:
        world: a world with one side, which has all agents and their teams.
    """

    arrays = ("seats", "begins", "returns")

    def __init__(self, world: World) -> None:
        agents, teams = world.sides[SIDE].agents, world.sides[SIDE].spaces.teams
        self.members = np.array([[agents.index(agent) for agent in team] for team in teams])
        """Indices of the agents of each team, `[teams, S]`."""
        super().__init__(world, self.members.shape[1], len(teams))
        self.begins = np.ones(self.num_seats, dtype=bool)
        """Agents whose next move is their first in the episode."""

    @property
    def learners(self) -> np.ndarray:
        """Return the side's rows of the learning agents, `[E * S]`."""
        return (np.arange(len(self.seats))[:, None] * len(self.agents) + self.members[self.seats]).ravel()

    @property
    def present(self) -> np.ndarray:
        """Return which of the learning agents are present."""
        return self.side.present[self.learners]

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        self.begins[:] = True
        self.start_all(seed)
        self.outcome.forget()
        return self._newest()

    def step(self, action: Tree) -> EnvStep:
        """Step all copies with the learners' actions `[N, ...]`, in their own format; actions of absent agents are ignored."""
        learners, happened = self.learners, self.side.outcome
        moves = self._choose(learners, action)
        over = [e for e in range(len(self.seats)) if self._step_copy(e, moves)]
        if over:
            ended = np.array(over)
            self.start_next(ended, self.returns[ended][:, self.members].mean(2))
        self.begins = happened.start
        self.outcome.take(happened, learners, self.learners)
        happened.forget()
        return self.outcome.pop_step(*self._newest())

    def _choose(self, learners: np.ndarray, action: Tree) -> dict[int, Tree]:
        """Return the action of each row of the side: the learners' own, and the opponent's for the other agents that are present."""
        side, others = self.side, self.side.present.copy()
        others[learners] = False
        moves = {row: tree_index(action, k) for k, row in enumerate(learners.tolist())}
        if others.any():
            rows = np.flatnonzero(others)
            obs, mask = tree_index((side.obs, side.mask), rows)
            played = self.opponent.act(obs, mask, rows, self.begins[rows])
            moves |= {row: tree_index(played, k) for k, row in enumerate(rows.tolist())}
        return moves

    def _step_copy(self, e: int, moves: Mapping[int, Tree]) -> bool:
        """Step one copy. Return whether its episode is over: its last learner has ended, or no agent is present."""
        copy, rows = self.world.copies[e], self.side.rows[e]
        cut = self.world.move(e, {agent: moves[rows[agent]] for agent in copy.to_move})
        self.world.note(e, self.side, rows, cut)
        self.returns[e] += finite_rewards([copy.rewards.get(agent, 0.0) for agent in self.agents])
        team = {self.agents[member] for member in self.members[self.seats[e]]}
        if cut or not copy.present or (not team.isdisjoint(copy.last) and team.isdisjoint(copy.present)):
            return True
        self.side.look(e, copy)
        return False

    def _newest(self) -> tuple[Tree, Tree]:
        """Return the learners' observations and masks."""
        return tree_index((self.side.obs, self.side.mask), self.learners)
