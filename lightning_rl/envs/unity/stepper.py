"""Self-play in scenes of Unity, whose agents begin their next episodes by themselves."""

import numpy as np

from lightning_rl.distributed import num_ranks
from lightning_rl.envs.agents.stepper import NOBODY, SeatStepper
from lightning_rl.envs.agents.world import Moves, find_results
from lightning_rl.envs.unity.world import UnityWorld
from lightning_rl.nan_policy import finite_rewards
from lightning_rl.types import EnvStep, Tree


class TeamStepper(SeatStepper):
    """Steps scenes in which one team of each player learns, and the opponent acts for the other teams.

    Unity does not say who plays against whom, and each game of a scene ends by itself. So the opponent is drawn anew for a player at some
    tick, and another team learns from the beginning of all episodes on, as in ML-Agents (Juliani et al. 2018,
    https://arxiv.org/abs/1809.02627). The result of a game is the sign of the learners' last reward.

    Args:
        world: the players.
        teams: the indices of the agents of each team, `[teams, S]`.
    """

    swap_steps, team_change = 1, 1
    """Steps of the opponent's agents until it is drawn anew, and of learners until another team learns, over all ranks."""

    def __init__(self, world: UnityWorld, teams: np.ndarray) -> None:
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
            self.opponent.begin(self.world.all, self.seats)
        return self.side.pop_step(learners, self.learners)

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
        side.end(rows, np.zeros(len(rows), dtype=bool), *side.newest(rows), {})
        self.steps_played = self.steps_learned = 0
        self.seats[:] = (self.seats + 1) % len(self.members)
        self.learners = self._find_learners()
        self.world.start(self.world.all)
        self.world.look(self.world.all)
        self.opponent.begin(self.world.all, self.seats)
        self._play_others()
