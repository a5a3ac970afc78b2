"""Collect from scenes of Unity in turns: while one player is served, the others simulate."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lightning_rl.data.collector import INTERRUPTED, Collector
from lightning_rl.data.episodes import EpisodeStatistics
from lightning_rl.data.rollout import Unroll, add_values, join
from lightning_rl.envs.agents.stepper import SIDE
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.envs.unity.world import UnityWorld
from lightning_rl.nan_policy import Guard
from lightning_rl.types import Rollout, State, Tree, tree_map


class PlayerCollector(Collector):
    """Steps the agents of one player in two halves, between which the player simulates."""

    def begin_step(self) -> None:
        """Act, and send the actions."""
        self.action = self.act()
        if not self._restarts:
            self.world.begin_step({SIDE: self.action})

    def finish_step(self) -> None:
        """Wait for the results, and store them."""
        self.store(self.stepper.restart_all() if self._restarts else self.stepper.step(self.action))

    @property
    def world(self) -> UnityWorld:
        """Return the player's world."""
        return self.stepper.world  # type: ignore[union-attr, return-value]


class InterleavedCollector:
    """Collects rollouts of several players, each with a collector of its own, side by side.

    A player gets its next actions as soon as its turn comes after its answer, and simulates while the others are served; with one collector
    each step would wait for the slowest player, and all players for the actions. The order of turns is fixed, so it changes no draws.

    Args:
        parts: the collectors, in the order of their rows.
    """

    def __init__(self, parts: Sequence[PlayerCollector]) -> None:
        self.parts, first = parts, parts[0]
        self.name, self.n_steps, self.can_be_saved = first.name, first.n_steps, first.can_be_saved
        self.num_envs = sum(part.num_envs for part in parts)
        """Number of rows of all players."""
        self.statistics = EpisodeStatistics(self.num_envs)
        self.env_steps = self.rows = 0
        self.interrupted = False
        self.last_rollout: Any = ()
        for part in parts[1:]:
            part.world.report_to(first.world)

    @property
    def guard(self) -> Guard:
        """Return what replaces NaN and infinite values."""
        return self.parts[0].guard

    @guard.setter
    def guard(self, guard: Guard) -> None:
        for part in self.parts:
            part.guard = guard

    @property
    def env_steps(self) -> int:
        """Return the number of environment steps up to the last iteration."""
        return self._env_steps

    @env_steps.setter
    def env_steps(self, count: int) -> None:
        self._env_steps = count
        for part in self.parts:
            part.env_steps = count  # a player's own steps are added within an iteration

    @property
    def steps_made(self) -> int:
        """Return a number that grows with each environment step, as `Collector.steps_made` does."""
        return self.env_steps + sum(part.env_steps - self.env_steps for part in self.parts)

    def collect(self) -> Rollout:
        """Step `n_steps` times, continuing from the last rollout, and add values and log-probabilities."""
        first, unroll = self.parts[0], self._unroll()
        self.last_rollout = unroll.rollout()
        with torch.no_grad(), first.context():
            return add_values(unroll, first.network, first.generator.device, first.log_probs)

    def _unroll(self) -> Unroll:
        """Return the experience of the next `n_steps` steps."""
        for part in self.parts:
            part.t = 0
            part.begin_step()
        for t in range(1, self.n_steps + 1):
            for part in self.parts:
                part.finish_step()
                if t < self.n_steps:
                    part.begin_step()
        self.env_steps = self.steps_made
        self.rows += self.n_steps * self.num_envs
        self._note_episodes()
        return join([part.pack() for part in self.parts])

    def _note_episodes(self) -> None:
        """Note the episodes that ended in this iteration, and how far the others are."""
        statistics, of_parts = self.statistics, [part.statistics for part in self.parts]
        statistics.finished.clear()
        for episode in (episode for part in of_parts for episode in part.finished):
            statistics.add(episode)
        statistics.running_return = np.concatenate([part.running_return for part in of_parts])
        statistics.running_length = np.concatenate([part.running_length for part in of_parts])

    def rollout(self) -> Rollout:
        """Return the environments' results of the last iteration; the fields that a network adds are empty."""
        return self.last_rollout

    def random_steps(self, count: int, stop: Callable[[], bool] = lambda: False) -> Tree:
        """Return observations of random steps, as `Collector.random_steps` does, shared among the players."""
        share, before = -(-count // len(self.parts)), sum(part.rows for part in self.parts)
        seen = [part.random_steps(share, stop) for part in self.parts]
        self.env_steps = self.steps_made
        self.rows += sum(part.rows for part in self.parts) - before
        return tree_map(lambda *leaves: torch.cat(leaves), *seen)

    def reset(self) -> None:
        """Start an episode in all players, continuing their random streams."""
        for part in self.parts:
            part.reset()
            part.statistics.forget()

    def restart_episodes(self) -> None:
        """Abandon the current episodes, between iterations: the next step starts new ones instead of acting."""
        for part in self.parts:
            part.restart_episodes()

    def interrupt(self) -> None:
        """Abandon the current episodes after an error."""
        self.interrupted = True
        for part in self.parts:
            part.interrupt()

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Set what the scenes draw their parameters from."""
        for part in self.parts:
            part.set_lessons(lessons)

    def metrics(self) -> dict[str, float]:
        """Return means over the last 100 episodes, what the scenes report, and `env/worker_restarts` if players were started again."""
        restarts = sum(part.stepper.restarts for part in self.parts)
        counted = {"env/worker_restarts": float(restarts)} if restarts else {}
        return {**self.statistics.metrics(), **self.parts[0].stepper.stats, **counted}

    def take_notices(self) -> list[str]:
        """Return the lines for the user since the last call."""
        return [notice for part in self.parts for notice in part.take_notices()]

    def close(self) -> None:
        """Close all players; each gets time to quit while the others do."""
        for part in self.parts:
            part.world.ask_to_quit()
        for part in self.parts:
            part.close()

    def get_state(self) -> State:
        """Return the counts and statistics: scenes of Unity cannot be saved in the middle of an episode."""
        state: State = {"env_steps": self.env_steps, "rows": self.rows, "statistics": self.statistics.get_state(), "episodes": None}
        return state | ({"interrupted": True} if self.interrupted else {})

    def set_state(self, state: State) -> str | None:
        """Restore a state before the first iteration. Return None, or the reason why the players start new episodes."""
        self.env_steps, self.rows = state["env_steps"], state["rows"]
        self.statistics.set_state(state["statistics"])
        self.statistics.forget()
        if state.get("interrupted", False):
            return INTERRUPTED
        return f"{self.name} cannot be saved in the middle of an episode" if self.rows else None
