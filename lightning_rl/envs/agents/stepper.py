"""Environments of several agents as the environments of a collector: `AgentStepper` where all move at once, `TurnStepper` in turn."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from lightning_rl.envs.agents.world import Outcome, World
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.errors import SettingError
from lightning_rl.types import EnvStep, State, Tree, tree_index

SIDE = "all"
"""The name of the only side."""


class AgentStepper:
    """Steps environments in which all agents move at once; each agent is a row. Has the methods of `envs.stepping.Stepper`.

    Args:
        world: with one side, which has all agents.
    """

    restarts, workers = 0, None

    def __init__(self, world: World) -> None:
        self.world, self.side = world, world.sides[SIDE]
        self.name, self.can_be_saved, self.close = world.name, world.way is not None, world.close
        self.notices: list[str] = []
        self.outcome = self._make_outcome()
        self.num_envs, self.all_valid = self.outcome.num, self.outcome.all_valid

    def _make_outcome(self) -> Outcome:
        return self.side.outcome

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        """Start an episode everywhere, with seed, seed + 1, … Return the first observations and their masks."""
        self.world.reset(seed)
        return self.side.newest()

    def restart_all(self) -> EnvStep:
        """Abandon all episodes and start new ones: a step that is not experience."""
        obs, mask = self.reset()
        self.outcome.start[:] = True
        return self.outcome.tell(obs, mask)

    def step(self, action: Tree) -> EnvStep:
        """Step all copies with the actions `[N, ...]` of agents, in their own form; those of who is not there are ignored."""
        return self.world.step({SIDE: action})[SIDE]

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Raise `SettingError`: such an environment takes none."""
        raise SettingError(f"{self.name} takes no lessons: env.parameters are for environments of one agent")

    def state_dict(self) -> State:
        """Return all that the next steps depend on, as plain data, between two steps."""
        return self.world.get_state()

    def load_state_dict(self, state: State) -> str | None:
        """Restore a state, before the first reset. Return why that is not possible, in which case reset; else None."""
        return self.world.set_state(state)


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


class TurnStepper(AgentStepper):
    """Steps games of turns with one learner in each: a row is a copy. The learner takes the next seat in each episode.

    A step runs from the learner's move to its next one, or to the end of its episode, where the copy begins the next one. What others do in
    between, played by `opponent`, is part of its environment, and the rewards in between are added up: those before its first move too.
    """

    opponent: Opponent

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.agents, num = self.side.agents, len(world.copies)
        self.seats = np.arange(num) % len(self.agents)
        """Which agent learns, in each copy."""
        self.moved = np.zeros(self.side.num, dtype=bool)
        """Who has moved in the current episode."""
        self.paid = np.zeros(num)
        """What each learner has got since its move."""

    def _make_outcome(self) -> Outcome:
        return Outcome(len(self.world.copies))

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        self.opponent.reset(seed)
        self.moved[:], self.paid[:] = False, 0.0
        self.world.reset(seed)
        self._play_others()
        self.outcome.forget()
        return self._newest()

    def step(self, action: Tree) -> EnvStep:
        """Step all copies with the learners' actions `[N, ...]`, in their own form, and play on until each is to move again."""
        self.outcome.acted[:] = True
        for e, copy in enumerate(self.world.copies):
            self._move(e, copy.to_move[0], tree_index(action, e))
        self._play_others()
        outcome = self.outcome
        running = ~(outcome.terminated | outcome.truncated)
        outcome.reward[running], self.paid[running] = self.paid[running], 0.0
        return outcome.tell(*self._newest())

    def _play_others(self) -> None:
        """Let others move until it is the learner's turn in every copy."""
        copies, side = self.world.copies, self.side
        while waiting := [e for e, copy in enumerate(copies) if copy.to_move[0] != self.agents[self.seats[e]]]:
            movers = [copies[e].to_move[0] for e in waiting]
            rows = np.array([side.rows[e][agent] for e, agent in zip(waiting, movers, strict=True)])
            obs, mask = tree_index((side.obs, side.mask), rows)
            actions = self.opponent.act(obs, mask, rows, ~self.moved[rows])
            for k, (e, agent) in enumerate(zip(waiting, movers, strict=True)):
                self._move(e, agent, tree_index(actions, k))

    def _move(self, e: int, mover: str, action: Tree) -> None:
        """Let an agent move. The episode of a copy is over when its learner has ended; then the next one begins in another seat."""
        copy, rows, learner = self.world.copies[e], self.side.rows[e], self.agents[self.seats[e]]
        cut = self.world.move(e, {mover: action})
        self.moved[rows[mover]] = True
        self.paid[e] += copy.rewards.get(learner, 0.0)
        ended = learner in copy.last
        if not (ended or cut or not copy.present):
            self.side.look(e, copy)
            return
        if self.moved[rows[learner]]:  # else the episode was over before it could act
            obs, info = (copy.last[learner], copy.last_info[learner]) if ended else copy.look(learner)
            seen = self.side.read(rows[learner], obs, info, self.side.see_jointly(copy, over=True), over=True)
            self.outcome.end(e, seen, info, learner in copy.terminated)
            self.outcome.reward[e] = self.paid[e]
        self.paid[e], self.moved[list(rows.values())] = 0.0, False
        self.seats[e] = (self.seats[e] + 1) % len(self.agents)
        self.outcome.start[e] = True
        self.world.start(e)

    def _newest(self) -> tuple[Tree, Tree]:
        """Return what the learners see."""
        side = self.side
        return tree_index((side.obs, side.mask), np.arange(len(self.seats)) * len(self.agents) + self.seats)

    def restart_all(self) -> EnvStep:
        self.seats = (self.seats + 1) % len(self.agents)
        return super().restart_all()

    def state_dict(self) -> State:
        own = {"seats": self.seats.copy(), "moved": self.moved.copy(), "paid": self.paid.copy()}
        return {**super().state_dict(), **own, "opponent": self.opponent.get_state()}

    def load_state_dict(self, state: State) -> str | None:
        reason = super().load_state_dict(state)
        if reason is None:
            self.seats, self.moved, self.paid = (state[name].copy() for name in ("seats", "moved", "paid"))
            self.opponent.set_state(state["opponent"])
        return reason
