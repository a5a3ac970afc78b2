"""Collect from scenes of Unity in turns: while one player is served, the others simulate."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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

    bad_steps = 0
    """The player's number of bad steps in a row; the guard is that of all players."""

    def begin_step(self) -> None:
        """Act, and send the actions."""
        self.guard.bad_steps = self.bad_steps
        self.action = self.act()
        self.bad_steps = self.guard.bad_steps
        if not self._restarts:
            self.world.begin_step({SIDE: self.action})

    def finish_step(self) -> None:
        """Wait for the results, and store them."""
        step = self.stepper.restart_all() if self._restarts else self.stepper.step(self.action)
        self.guard.bad_steps = self.bad_steps
        self.store(step)
        self.bad_steps = self.guard.bad_steps

    @property
    def world(self) -> UnityWorld:
        """Return the player's world."""
        return self.stepper.world  # type: ignore[union-attr, return-value]


class InterleavedCollector:
    """Collects rollouts of several players, each with a collector of its own, side by side.

    In its turn a player answers and gets its next actions, which it simulates while the others have theirs. With one collector for all,
    each step would wait for the slowest player. The order of turns is fixed, so draws do not depend on which player is fast.

    Args:
        parts: the collectors, in the order of their rows.
    """

    def __init__(self, parts: Sequence[PlayerCollector]) -> None:
        self.parts, first = parts, parts[0]
        self.name, self.n_steps, self.can_be_saved = first.name, first.n_steps, first.can_be_saved
        self.num_envs = sum(part.num_envs for part in parts)
        """Number of rows of all players."""
        self.statistics = EpisodeStatistics(self.num_envs)
        self.env_steps = 0
        self.rows_before = 0
        """Number of rows before the run was continued."""
        self.interrupted = False
        self.last_rollout: Any = ()
        end = 0
        for part in parts:
            begin, end = end, end + part.num_envs
            part.world.report_to(first.world)
            part.statistics = self.statistics.of_rows(slice(begin, end))

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
    def rows(self) -> int:
        """Return the number of stepped rows, experience or not."""
        return self.rows_before + sum(part.rows for part in self.parts)

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
        self.statistics.finished.clear()
        for part in self.parts:
            part.t = 0
            part.begin_step()
        for t in range(1, self.n_steps + 1):
            for part in self.parts:
                part.finish_step()
                if t < self.n_steps:
                    part.begin_step()
        self.env_steps = self.steps_made
        return join([part.pack() for part in self.parts])

    def rollout(self) -> Rollout:
        """Return the environments' results of the last iteration; the fields that a network adds are empty."""
        return self.last_rollout

    def random_steps(self, count: int, stop: Callable[[], bool] = lambda: False) -> Tree:
        """Return observations of random steps, as `Collector.random_steps` does, shared among the players."""
        share = -(-count // len(self.parts))
        try:
            with ThreadPoolExecutor(len(self.parts)) as threads:  # which wait for their players at the same time
                seen = list(threads.map(lambda part: part.random_steps(share, stop), self.parts))
        finally:
            self.env_steps = self.steps_made
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
        """Abandon the current episodes after an error; the steps of the unfinished iteration count."""
        self.interrupted, self.env_steps = True, self.steps_made
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
        of_scenes = [notice for part in self.parts for notice in part.stepper.notices]
        of_the_policy = dict.fromkeys(notice for part in self.parts for notice in part.notices)  # all players have the same
        for part in self.parts:
            part.take_notices()
        return [*of_scenes, *of_the_policy]

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
        self.env_steps, self.rows_before = state["env_steps"], state["rows"] - sum(part.rows for part in self.parts)
        self.statistics.set_state(state["statistics"])
        self.statistics.forget()
        if state.get("interrupted", False):
            return INTERRUPTED
        return f"{self.name} cannot be saved in the middle of an episode" if self.rows else None
