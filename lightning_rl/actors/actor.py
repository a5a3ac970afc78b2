"""One actor: environments, and a policy that steps them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_rl.data.collector import Collector
from lightning_rl.data.episodes import Finished
from lightning_rl.data.opponents import seat_opponents
from lightning_rl.data.rollout import Ends, Stepped, Unroll
from lightning_rl.envs.config import EnvSource, count_envs
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.envs.stepping import make_fitting_stepper
from lightning_rl.nan_policy import ActorGuard, BadStep
from lightning_rl.spaces import Spaces
from lightning_rl.types import EnvStep, Rollout, State, Tree, tree_index, tree_map, tree_to_numpy

Lessons = Mapping[str, LessonValues]
"""What environments draw their parameters from, starting with the next resets; see `envs/parameters.py`."""


class ActorResult(NamedTuple):
    """Result of one call of an actor, as arrays.

    experience: an unroll with log-probabilities; for a replay buffer single steps, and a `rollout` of all of them.
    env_steps: number of rows that are experience.  finished: the episodes that ended.
    notices: lines about the environments.  restarts: total number of restarts of environments.
    replaced: number of steps with replaced NaN or infinite values.  bad: the first of them, or one that is too many.
    """

    experience: Unroll | list[Stepped]
    rollout: Rollout | None
    env_steps: int
    finished: list[Finished]
    notices: list[str]
    restarts: int
    replaced: int
    bad: BadStep | None = None


class Actor:
    """A collector that is called remotely. Each call includes the lessons, since a restarted actor does not know them."""

    def __init__(self, collector: Collector) -> None:
        self.collector, self.guard = collector, ActorGuard()
        collector.guard = self.guard
        self.close, self.restart_episodes, self.get_state = collector.close, collector.restart_episodes, collector.get_state
        self.lessons: Lessons = {}
        self.random_rows: Iterator[Tree] | None = None

    @torch.no_grad()
    def act(self, lessons: Lessons) -> ActorResult:
        """Step `n_steps` times. The arrays belong to the caller."""
        collector, before = self.collector, self._begin(lessons)
        unroll = collector.unroll()
        device = collector.generator.device
        seen: Unroll = tree_map(lambda leaf: leaf.to(device), unroll._replace(ends=()))  # type: ignore[arg-type]
        start, memory = seen.episode_start[:-1], tree_index(seen.memory, 0)
        log_prob = collector.network.log_prob(tree_index(seen.obs, slice(-1)), seen.action, memory, start, seen.action_mask)
        arrays = tree_map(np.array, tree_to_numpy(seen._replace(log_prob=log_prob)))
        return ActorResult(arrays._replace(ends=unroll.ends), None, *self._end(before))

    def play(self, lessons: Lessons, random_steps: int) -> ActorResult:
        """Step `n_steps` times, the first `random_steps` with random actions. The arrays belong to the caller."""
        collector, before, steps = self.collector, self._begin(lessons), []
        for stepped in collector.transitions(random_steps):
            step = stepped.step._replace(info={}, final_obs=stepped.step.final_obs if len(stepped.step.ended) else ())
            steps.append(tree_map(np.array, stepped._replace(step=step)))
        return ActorResult(steps, tree_map(np.array, collector.rollout()), *self._end(before))

    def random_steps(self, lessons: Lessons) -> tuple[Tree, int, int, BadStep | None]:
        """Step `n_steps` times with random actions, continuing the last call.

        Return observations, the number of environment steps, and `replaced` and `bad` as in `ActorResult`.
        """
        before = self._begin(lessons)
        self.random_rows = self.random_rows or self.collector.random_rows()
        rows = [tree_to_numpy(row) for row in islice(self.random_rows, self.collector.n_steps)]
        return tree_map(lambda *leaves: np.concatenate(leaves), *rows), self.collector.env_steps - before, *self.guard.take()

    def describe(self) -> tuple[str, bool]:
        """Return the environment's name, and whether it can be saved in the middle of an episode."""
        return self.collector.name, self.collector.can_be_saved

    def set_state(self, state: State) -> str | None:
        self.lessons = {}
        return self.collector.set_state(state)

    def _begin(self, lessons: Lessons) -> int:
        """Set the lessons; return the number of environment steps so far."""
        if lessons != self.lessons:
            self.collector.set_lessons(lessons)
            self.lessons = lessons
        return self.collector.env_steps

    def _end(self, before: int) -> tuple[int, list[Finished], list[str], int, int, BadStep | None]:
        """Return the fields of `ActorResult` after `rollout`."""
        collector = self.collector
        finished, restarts = list(collector.statistics.finished), collector.stepper.restarts
        return collector.env_steps - before, finished, collector.take_notices(), restarts, *self.guard.take()


@dataclass(frozen=True)
class BuildActor:
    """Builds an actor in the process in which it is called.

    Args:
        seed: seed of all actors of this rank, from which each derives its own, and a new one after each restart.
        first: the index of the first environment of this rank.
        next_obs: whether rollouts hold next observations.
    """

    env: EnvSource
    spaces: Spaces
    n_steps: int
    seed: int
    first: int
    next_obs: bool

    def __call__(self, index: int, restarts: int, network: nn.Module) -> Actor:
        stepper = make_fitting_stepper(self.env, self.spaces, first=self.first + index * count_envs(self.env))
        seat_opponents(stepper, network)  # type: ignore[arg-type]
        seed = int(np.random.SeedSequence([self.seed, index, restarts]).generate_state(1)[0]) // 2
        return Actor(Collector(stepper, self.spaces, network, self.n_steps, seed, next_obs=self.next_obs))


def from_plain(saved: tuple[Any, ...]) -> ActorResult:
    """Restore an actor's result from the plain tuples of a checkpoint."""
    if len(saved) < len(ActorResult._fields) - 1:  # 0.1.0 stored no rollout next to the unroll
        saved = (saved[0], None, *saved[1:])
    whole = ActorResult(*saved)
    bad = whole.bad and BadStep(*whole.bad)
    whole = whole._replace(finished=[Finished(*episode) for episode in whole.finished], bad=bad)
    if whole.rollout is None:
        unroll = Unroll(*saved[0])
        return whole._replace(experience=unroll._replace(ends=Ends(*unroll.ends)))
    steps = [Stepped(*row)._replace(step=EnvStep(*row[2])) for row in saved[0]]
    return whole._replace(experience=steps, rollout=Rollout(*whole.rollout))
