"""Steppers of environments of several agents for a collector.

With `RowStepper` all agents learn, with `SeatStepper` one agent or one team of each copy, also in scenes of Unity (`TeamStepper`).
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lightning_rl.envs.agents.world import Moves, World, find_results
from lightning_rl.errors import SettingError
from lightning_rl.nan_policy import finite_rewards
from lightning_rl.processes.ranks import num_ranks
from lightning_rl.types import EnvStep, State, Tree, is_finite, tree_map

MAX_MOVES = 10_000
"""Maximum number of moves of others in a row; after them an error reports that it is never the learner's turn."""
SIDE = "all"
"""The name of the only side."""
NOBODY = np.zeros(0, dtype=np.int64)


class WorldStepper:
    """Base of the steppers of a world with one side, which has all agents. Has the methods of `Stepper`.

    Args:
        world: the world.
        num_envs: number of rows.
    """

    workers = None

    def __init__(self, world: World, num_envs: int) -> None:
        self.world, self.side, self.num_envs = world, world.sides[SIDE], num_envs
        self.name, self.can_be_saved, self.close, self.set_lessons = world.name, world.can_be_saved, world.close, world.set_lessons
        self.notices, self.stats = world.notices, world.stats
        self.labels: list[str] = []
        """Names of the rows in messages, if they are the same agents in all episodes."""

    @property
    def restarts(self) -> int:
        """Return how many times a copy was restarted because it failed."""
        return self.world.restarts

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        """Start an episode in every copy. Return the first observations of the rows, and their masks."""
        raise NotImplementedError

    def step(self, action: Tree) -> EnvStep:
        """Step all copies with the actions `[N, ...]` of the rows, in their own format; actions of absent agents are ignored."""
        raise NotImplementedError

    def restart_all(self) -> EnvStep:
        """Abandon all episodes and start new ones; return a step that is not experience."""
        raise NotImplementedError

    def state_dict(self) -> State:
        """Return everything that the next steps depend on, as plain data; only between two steps."""
        return self.world.get_state()

    def load_state_dict(self, state: State) -> str | None:
        """Restore a state before the first reset. Return None, or the reason why that is impossible; then reset instead."""
        return self.world.set_state(state)


class RowStepper(WorldStepper):
    """Steps environments in which all agents move simultaneously and learn; each agent is a row."""

    def __init__(self, world: World) -> None:
        super().__init__(world, world.sides[SIDE].num)
        self.labels = self.side.labels

    @property
    def present(self) -> np.ndarray:
        """Return the rows whose agents are present."""
        return self.side.present

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        self.world.reset(seed)
        return self.side.newest()

    def step(self, action: Tree) -> EnvStep:
        self.world.step_all({SIDE: action})
        return self.side.pop_step()

    def restart_all(self) -> EnvStep:
        self.world.reset()
        return self.side.restart()


class Opponent(Protocol):
    """Plays the seats that do not learn. In endless worlds it begins in the middle of episodes, too."""

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


class SeatStepper(WorldStepper):
    """Steps games in which one seat of each copy learns: one agent, or a team of S agents; row copy * S + member is one of them.

    The next seat learns in the next episode. A step runs from the learners' move to their next one, or to the end of their episode, where
    the copy begins the next one: with the last learner, even if others could play on. `opponent` acts for all other agents: before the
    learners, after them, or at the same time. Their moves are part of the learners' environment. Rewards between a learner's moves are
    added up, including those before its first move.

    Args:
        world: a world with one side, which has all agents.
        seats: the indices of the agents of each seat, `[seats, S]`.
    """

    opponent: Opponent

    def __init__(self, world: World, seats: np.ndarray) -> None:
        self.members, self.size, copies = seats, seats.shape[1], world.num_copies
        super().__init__(world, copies * self.size)
        self.num_seats = self.side.num
        self.seats = world.all % len(seats)
        """The learning seat of each copy."""
        self.returns = np.zeros((copies, len(self.side.agents)))
        """Return of each agent in the current episode so far."""
        self.learners = self._find_learners()
        """The side's rows of the learning agents, `[E * S]`."""

    @property
    def present(self) -> np.ndarray:
        """Return which of the learning agents are present."""
        return self.side.present[self.learners]

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        self._restart(seed)
        self.side.forget()
        return self.side.newest(self.learners)

    def restart_all(self) -> EnvStep:
        self.seats[:] = (self.seats + 1) % len(self.members)
        self.learners = self._find_learners()
        self._restart(None)
        return self.side.restart(self.learners)

    def _restart(self, seed: int | None) -> None:
        """Start an episode in every copy, and play on until the learners are to move."""
        self.opponent.reset(seed)
        self.returns[:] = 0.0
        self.world.reset(seed)
        self.opponent.begin(self.world.all.copy(), self.seats.copy())
        self._play_others()

    def step(self, action: Tree) -> EnvStep:
        """Step all copies with the learners' actions `[N, ...]`, in their own format, and play on until learners of each are to move."""
        learners = self.learners
        self._move(self.world.all, learners, action)
        self._play_others()
        return self.side.pop_step(learners, self.learners)

    def _play_others(self) -> None:
        """Let others move until learners are to move in every copy. Raises `SettingError`: they never are."""
        for _ in range(MAX_MOVES):
            waiting = self._find_waiting()
            if not len(waiting):
                return
            self._move(waiting)
        e = int(waiting[0])
        (mover, *_), (learner, *_) = np.flatnonzero(self.side.to_move[self.side.rows[e]]), self.members[self.seats[e]]
        raise SettingError(
            f"environment {e} of {self.name}: others made {MAX_MOVES:,} moves and agent {self.side.agents[learner]} none, "
            f"and {self.side.agents[mover]} moves next; does step pass the turn on?"
        )

    def _find_waiting(self) -> np.ndarray:
        """Return the copies in which no learner is to move."""
        to_move = self.side.to_move[self.learners]
        return np.flatnonzero(~(to_move if self.size == 1 else to_move.reshape(-1, self.size).any(1)))

    def _move(self, copies: np.ndarray, learners: np.ndarray = NOBODY, action: Tree = ()) -> None:
        """Step K copies, in which the opponent moves all that are to move except `learners`; with learners, K is E."""
        world, side = self.world, self.side
        rows = side.rows[copies]
        is_to_move = side.to_move[rows]
        if len(learners):
            is_to_move.ravel()[learners] = False
        others = rows[is_to_move]
        played = self.opponent.act(*side.newest(others), others, ~side.moved[others]) if len(others) else ()
        parts = [(rows, chosen) for rows, chosen in ((learners, action), (others, played)) if len(chosen)]
        moves, over = world.step(copies, {SIDE: spread(parts, side.num)})
        self._finish(copies, moves[SIDE], over)
        world.look(copies)

    def _finish(self, copies: np.ndarray, made: Moves, over: np.ndarray) -> None:
        """Note what a step of K copies did, and begin the next episodes of those that are over, `[K]`, or whose learners all ended."""
        self.returns[copies] += made.reward if is_finite(made.reward) else finite_rewards(made.reward)
        if not self.world.ends_together:
            seat = np.arange(len(copies))[:, None], self.members[self.seats[copies]]
            over = over | (made.ended[seat].any(1) & ~made.present[seat].any(1))
        if over.any():
            self._begin_next(copies[over])

    def _begin_next(self, over: np.ndarray) -> None:
        """Begin the next episodes of K copies, with the learners in the next seat."""
        returns = self.returns[over]
        self.opponent.finish(over, points(returns if self.size == 1 else returns[:, self.members].mean(2), self.seats[over]))
        self.seats[over] = (self.seats[over] + 1) % len(self.members)
        self.learners = self._find_learners()
        self.returns[over] = 0.0
        self.world.start(over)
        self.opponent.begin(over, self.seats[over])

    def _find_learners(self) -> np.ndarray:
        """Return the side's rows of the learning agents, `[E * S]`."""
        return (self.side.rows[:, :1] + self.members[self.seats]).ravel()

    def state_dict(self) -> State:
        arrays = {name: array.copy() for name, array in self._arrays().items()}
        return {**self.world.get_state(), **arrays, "opponent": self.opponent.get_state()}

    def load_state_dict(self, state: State) -> str | None:
        if reason := self.world.set_state(state):
            return reason
        try:
            self._set_arrays(self._from_older(state))
        except (KeyError, IndexError, TypeError, ValueError):
            return f"{self.name} could not be restored exactly"
        self.opponent.set_state(state["opponent"])
        return None

    def _arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that the next steps depend on besides the world's state, by name."""
        return {"seats": self.seats, "returns": self.returns, "moved": self.side.moved, "unpaid": self.side.unpaid}

    def _set_arrays(self, state: State) -> None:
        """Restore arrays. Raises `KeyError`, `TypeError` or `ValueError`: they do not fit, or it is not the learners' turn."""
        arrays = self._arrays()
        for name, array in arrays.items():
            values = np.asarray(state[name])
            if values.shape != array.shape or values.dtype != array.dtype:
                raise ValueError(f"{name} has shape {values.shape} of {values.dtype}, not {array.shape} of {array.dtype}")
            if name == "seats" and not np.isin(values, range(len(self.members))).all():
                raise ValueError(f"seats are 0 to {len(self.members) - 1}")
        for name, array in arrays.items():
            array[:] = state[name]
        self.learners = self._find_learners()
        if len(self._find_waiting()):
            raise ValueError("between two steps learners are to move")

    def _from_older(self, state: State) -> State:
        """Return a state in today's form: older ones add up the rewards of one learner of each copy, and of teams none."""
        if "unpaid" in state:
            return state
        unpaid = np.zeros(self.side.num)
        if "begins" in state:
            return {**state, "moved": ~np.asarray(state["begins"]), "unpaid": unpaid}
        unpaid.reshape(self.returns.shape)[self.world.all, state["seats"]] = state["paid"]
        return {**state, "returns": state.get("returns", self.returns), "moved": np.asarray(state["moved"]).ravel(), "unpaid": unpaid}


class TeamStepper(SeatStepper):
    """Steps endless worlds, such as scenes of Unity, in which one team of each copy learns, and the opponent acts for the others.

    A scene does not say who plays against whom, and its games begin and end by themselves. So the opponent is drawn again after
    `swap_steps`, in the middle of episodes, and after `team_change` the next team learns, from new episodes on, as in ML-Agents (Juliani et
    al. 2018, https://arxiv.org/abs/1809.02627). The result of a game is the sign of the learners' last reward.

    Args:
        world: a world that is endless.
        teams: the indices of the agents of each team, `[teams, S]`.
    """

    swap_steps: float = math.inf
    team_change: float = math.inf
    """Steps of the opponent's agents until it is drawn again, and of learners until another team learns, over all ranks."""

    def __init__(self, world: World, teams: np.ndarray) -> None:
        super().__init__(world, teams)
        self.group_size = self.side.spaces.group_size if self.side.spaces.groups else 1
        self.steps_played = self.steps_learned = 0
        """Steps of the opponent's agents since it was drawn, and of learners since their team began to learn."""

    def step(self, action: Tree) -> EnvStep:
        learners = self.learners
        self._move(self.world.all, learners, action)
        self._play_others()
        if self.steps_learned * num_ranks() >= self.team_change:
            self._change_team()
        elif self.steps_played * num_ranks() >= self.swap_steps:
            self.steps_played = 0
            self.side.moved[np.setdiff1d(self.side.rows, self.learners)] = False  # the memory of the players that are drawn begins empty
            self.opponent.begin(self.world.all, self.seats)
        return self.side.pop_step(learners, self.learners)

    def _restart(self, seed: int | None) -> None:
        self.steps_played = self.steps_learned = 0
        super()._restart(seed)

    def _move(self, copies: np.ndarray, learners: np.ndarray = NOBODY, action: Tree = ()) -> None:
        moving = int(self.side.to_move[self.side.rows[copies]].sum())
        learning = int(self.side.to_move[learners].sum())
        self.steps_learned += learning
        self.steps_played += moving - learning
        super()._move(copies, learners, action)

    def _finish(self, copies: np.ndarray, made: Moves, over: np.ndarray) -> None:
        """Note the games that ended."""
        seat, groups = (np.arange(len(copies))[:, None], self.members[self.seats[copies]]), (-1, self.group_size)
        was_present = self.side.present[self.side.rows[copies][seat]]
        reward = finite_rewards(made.reward[seat])
        finished, results = find_results(reward.reshape(groups), made.ended[seat].reshape(groups), was_present.reshape(groups))
        self.opponent.finish(copies[finished * self.group_size // self.size], results)

    def _change_team(self) -> None:
        """Truncate the episodes of learners, and begin new ones in which the next team learns."""
        side, rows = self.side, self.learners[self.side.present[self.learners] & self.side.moved[self.learners]]
        rows = rows[~side.ended[rows]]
        if len(rows):
            side.end(rows, np.zeros(len(rows), dtype=bool), *self.world.observe_last(SIDE, rows))
        self.steps_played = self.steps_learned = 0
        self.seats[:] = (self.seats + 1) % len(self.members)
        self.learners = self._find_learners()
        self.world.start(self.world.all)
        self.world.look(self.world.all)
        self.opponent.begin(self.world.all, self.seats)
        self._play_others()


def spread(parts: Sequence[tuple[np.ndarray, Tree]], num: int) -> Tree:
    """Return values `[num, ...]` that hold those of each part at its rows, and zeros elsewhere."""

    def join(*leaves: np.ndarray) -> np.ndarray:
        whole = np.zeros((num, *leaves[0].shape[1:]), leaves[0].dtype)
        for (rows, _), leaf in zip(parts, leaves, strict=True):
            whole[rows] = leaf
        return whole

    return tree_map(join, *(values for _, values in parts)) if parts else ()


def points(returns: np.ndarray, seats: np.ndarray) -> np.ndarray:
    """Return the points of the learners in K games, `[K]`: the mean over the other players of 1 for a lower return, ½ for an equal one.

    So equally good players have ½ on average, whatever their number.  returns: returns of all players, or teams, `[K, A]`.  seats: `[K]`.
    """
    learner_returns = returns[np.arange(len(seats)), seats]
    return 0.5 + 0.5 * np.sign(learner_returns[:, None] - returns).sum(1) / max(1, returns.shape[1] - 1)
