"""Self-play of an asymmetric game, in which behaviors take turns learning: one learns, and snapshots play the sides of the others.

Names are those of ML-Agents (Juliani et al. 2018, https://arxiv.org/abs/1809.02627).
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from lightning_rl.checkpoints.validation import COUNT, FLAG, FLAGS, FLOATS, TEXT, Rules, below
from lightning_rl.data.self_play import NEWEST, SelfPlayOpponent
from lightning_rl.envs.agents.stepper import points
from lightning_rl.envs.agents.world import World, find_results
from lightning_rl.nan_policy import finite_rewards
from lightning_rl.processes.ranks import num_ranks
from lightning_rl.types import EnvStep, State, Tree, is_finite, tree_map


class Rival(Protocol):
    """A learner that takes turns learning."""

    @property
    def env_steps(self) -> int: ...
    @property
    def turn_steps(self) -> int: ...
    def begin_turn(self) -> None: ...


class Turns:
    """Determines which behavior learns, and which players play the sides of those that wait for their turn.

    All copies begin new episodes with a turn, so that a behavior's side does not change from a player to the learner within an episode.

    Args:
        world: the world that the behaviors share.
        rivals: the learners that take turns, by name, in order; may be empty.
        collectors: collectors of all behaviors.
    """

    state_rules: ClassVar[Rules] = {
        "learner": TEXT,
        "began_at": COUNT,
        "begins": FLAG,
        "returns/*": FLOATS,
        "start/*": FLAGS,
        **below("opponents/*", SelfPlayOpponent.state_rules),
    }
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(self, world: World, rivals: Mapping[str, Rival], collectors: Mapping[str, Any]) -> None:
        self.world, self.rivals, self.collectors = world, rivals, {name: collectors[name] for name in rivals}
        self.sides = {name: world.sides[name] for name in rivals}
        self.opponents: dict[str, SelfPlayOpponent] = {name: collector.opponent for name, collector in self.collectors.items()}
        self.learner = next(iter(rivals), "")
        self.began_at = rivals[self.learner].env_steps if rivals else 0
        """The learner's environment steps when its turn began, over all ranks."""
        self.begins = False
        """Whether the next turn is decided but its episodes have not begun."""
        self.returns = {name: np.zeros(world.num_copies) for name in rivals}
        """Mean return of each side's agents in the current episode of each copy."""
        self.start = {name: np.ones(side.num, dtype=bool) for name, side in self.sides.items()}
        """Rows that have not moved in their episode."""
        self.steps_played = dict.fromkeys(rivals, 0)
        """Steps of each side since its players were drawn."""
        self.seen: dict[str, Tree] = {}
        """Observations on which the waiting behaviors acted."""

    @property
    def waiting(self) -> list[str]:
        """Return the behaviors that do not learn now."""
        return [name for name in self.opponents if name != self.learner]

    @property
    def next_learner(self) -> str:
        """Return the behavior that learns next."""
        names = list(self.opponents)
        return names[(names.index(self.learner) + 1) % len(names)]

    def end_iteration(self, full: Collection[str]) -> None:
        """Let the next behavior learn if the current one has completed its turn. Its episodes begin with the next step.

        Args:
            full: the behaviors whose iterations have ended.
        """
        if self.learner not in full or not self.rivals:
            return
        learner = self.rivals[self.learner]
        if learner.env_steps - self.began_at >= learner.turn_steps:
            following = self.rivals[self.next_learner]
            self.learner, self.began_at, self.begins = self.next_learner, following.env_steps, True
            following.begin_turn()

    def reset(self) -> None:
        """Seed the opponents with the seeds of the collectors, and begin a turn."""
        for name, opponent in self.opponents.items():
            opponent.reset(self.collectors[name].seed)
        self.begin()

    def begin(self) -> None:
        """Begin a turn, and its episodes in all copies."""
        self.begins = False
        for name, opponent in self.opponents.items():
            opponent.learner = self.learner
            opponent.playing[:] = NEWEST
            self.start[name] = np.ones(self.sides[name].num, dtype=bool)
            self.returns[name][:] = 0.0
        self._draw(self.world.all, self.waiting)

    def _draw(self, copies: np.ndarray, names: Collection[str]) -> None:
        """Draw the players of sides that do not learn in K copies."""
        for name in names:
            self.opponents[name].begin(copies, np.zeros(len(copies), dtype=np.int64))
            self.steps_played[name] = 0

    def act(self) -> dict[str, Tree]:
        """Return the actions `[N, ...]` of the waiting behaviors."""
        actions = {}
        for name in self.waiting:
            self.seen[name], mask = self.sides[name].newest()
            rows = np.arange(self.sides[name].num)
            actions[name] = self.opponents[name].act(self.seen[name], mask, rows, self.start[name])
        return actions

    def watch(self, steps: Mapping[str, EnvStep]) -> None:
        """Process a step of the world: add up returns, and note games that ended."""
        for name in self.waiting:
            step, collector = steps[name], self.collectors[name]
            if is_finite((step.obs, step.reward, () if step.final_obs is None else step.final_obs)):
                collector.guard.bad_steps = 0
            else:
                checked = collector.guard.replace(step, self.seen[name], collector.env_steps, collector.labels)
                tree_map(np.copyto, self.sides[name].obs, checked.obs)
        for name in self.opponents:
            self.start[name] = np.array(steps[name].episode_start)
        if self.world.is_endless and self.opponents:
            self._watch_endless(steps)
            return
        for name in self.opponents:
            self.returns[name] += finite_rewards(steps[name].reward).reshape(self.world.num_copies, -1).mean(1)
        over = np.flatnonzero(self.world.lengths == 0)
        if len(over) and self.opponents:
            for name in self.waiting:
                both = np.stack([self.returns[self.learner][over], self.returns[name][over]], 1)
                self.opponents[name].finish(over, points(both, np.zeros(len(over), dtype=np.int64)))
            for returns in self.returns.values():
                returns[over] = 0.0
            self._draw(over, self.waiting)

    def _watch_endless(self, steps: Mapping[str, EnvStep]) -> None:
        """Note the learner's games that ended, and draw players again that have made `swap_steps` steps."""
        step, spaces = steps[self.learner], self.sides[self.learner].spaces
        groups = -1, spaces.group_size if spaces.groups else 1
        ended = (step.terminated | step.truncated).reshape(groups)
        finished, results = find_results(finite_rewards(step.reward).reshape(groups), ended, step.valid.reshape(groups))
        for name in self.waiting:
            self.opponents[name].finish(finished * self.world.num_copies // len(ended), results)
            self.steps_played[name] += int(steps[name].valid.sum())
            if self.steps_played[name] * num_ranks() >= self.opponents[name].config.draw_steps:
                self._draw(self.world.all, [name])
                self.start[name][:] = True  # the memory of the players that are drawn begins empty

    def get_state(self) -> State:
        """Return everything that the next steps depend on, as plain data."""
        arrays = tree_map(np.array, {"returns": self.returns, "start": self.start})
        opponents = {name: opponent.get_state() for name, opponent in self.opponents.items()}
        return {"learner": self.learner, "began_at": self.began_at, "begins": self.begins, **arrays, "opponents": opponents}

    def set_state(self, state: State, continues: bool) -> None:
        """Restore whose turn it is; if the world `continues` its episodes, also restore their state.

        Raises `ValueError`: the state is of other behaviors.
        """
        if {*state["opponents"]} != {*self.opponents} or state["learner"] not in self.opponents:
            raise ValueError(f"{', '.join(state['opponents']) or 'no behaviors'} took turns")
        self.learner, self.began_at = state["learner"], int(state["began_at"])
        if not continues:
            return
        self.begins = bool(state["begins"])
        tree_map(np.copyto, (self.returns, self.start), (state["returns"], state["start"]))
        for name, opponent in self.opponents.items():
            opponent.learner = self.learner
            opponent.set_state(state["opponents"][name])
