"""Stepper of games between teams for a collector: in each copy all agents of one team learn."""

from collections.abc import Mapping

import numpy as np

from lightning_rl.envs.agents.stepper import SIDE, OpponentStepper
from lightning_rl.envs.agents.world import World
from lightning_rl.nan_policy import finite_rewards
from lightning_rl.types import EnvStep, Tree, tree_index


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
