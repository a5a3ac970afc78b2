"""One actor: environments, and a policy that steps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_rl.data.collector import Collector, Ends, Stepped, Unroll
from lightning_rl.data.episodes import Finished
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.stepping import make_fitting_stepper
from lightning_rl.nan_policy import Guard
from lightning_rl.spaces import Spaces
from lightning_rl.types import EnvStep, Rollout, Tree, tree_index, tree_map, tree_to_numpy

Lessons = Mapping[str, dict[str, Any]]
"""What environments draw their parameters from at their next resets, see `envs/parameters.py`."""


class Acted(NamedTuple):
    """What an actor made in one go, as arrays.

    unroll: with log-probabilities.  env_steps: how many of its rows are experience.  finished: the episodes that ended.
    notices: what there is to tell of the environments, a line each.  restarts: how often one was started anew in all.
    replaced: how many of its steps had bad numbers.
    """

    unroll: Unroll
    env_steps: int
    finished: list[Finished]
    notices: list[str]
    restarts: int
    replaced: int


class Played(NamedTuple):
    """What an actor made in one go for a replay buffer, as arrays: steps one by one, and all of them as a rollout. The rest as `Acted`."""

    steps: list[Stepped]
    rollout: Rollout
    env_steps: int
    finished: list[Finished]
    notices: list[str]
    restarts: int
    replaced: int


class Actor:
    """A collector that is asked from elsewhere. Lessons come with every call, as one that was started anew knows of none."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.lessons: Lessons = {}
        self.looking: Iterator[Tree] | None = None
        """Random steps under way."""

    @torch.no_grad()
    def act(self, lessons: Lessons) -> Acted:
        """Step `n_steps` times. The arrays belong to who asked."""
        collector, before = self.collector, self._begin(lessons)
        unroll = collector.unroll()
        device = collector.generator.device
        seen: Unroll = tree_map(lambda leaf: leaf.to(device), unroll._replace(ends=()))  # type: ignore[arg-type]
        start, memory = seen.episode_start[:-1], tree_index(seen.memory, 0)
        log_prob = collector.network.log_prob(tree_index(seen.obs, slice(-1)), seen.action, memory, start, seen.action_mask)
        arrays = tree_map(np.array, tree_to_numpy(seen._replace(log_prob=log_prob)))
        return Acted(arrays._replace(ends=unroll.ends), *self._told(before))

    def play(self, lessons: Lessons, random_steps: int) -> Played:
        """Step `n_steps` times, the first of them at random. The arrays belong to who asked."""
        collector, before, steps = self.collector, self._begin(lessons), []
        for stepped in collector.transitions(random_steps):
            step = stepped.step._replace(info={}, final_obs=stepped.step.final_obs if len(stepped.step.ended) else ())
            steps.append(tree_map(np.array, stepped._replace(step=step)))
        return Played(steps, tree_map(np.array, collector.rollout()), *self._told(before))

    def describe(self) -> tuple[str, bool]:
        """The environment's name, and whether it can be saved in the middle of an episode."""
        return self.collector.name, self.collector.can_be_saved

    def random_steps(self, lessons: Lessons) -> tuple[Any, int]:
        """`n_steps` of those of the collector, that go on with the next call: observations, and how many steps were made."""
        before, _ = self._begin(lessons)
        self.looking = self.looking or self.collector.random_rows()
        rows = [tree_to_numpy(row) for row in islice(self.looking, self.collector.n_steps)]
        return tree_map(lambda *leaves: np.concatenate(leaves), *rows), self.collector.env_steps - before

    def begin_anew(self) -> None:
        """As that of the collector."""
        self.collector.begin_anew()

    def get_state(self) -> dict[str, Any]:
        """As that of the collector."""
        return self.collector.get_state()

    def set_state(self, state: dict[str, Any]) -> str | None:
        """As that of the collector."""
        self.lessons = {}
        return self.collector.set_state(state)

    def close(self) -> None:
        """As that of the collector."""
        self.collector.close()

    def _begin(self, lessons: Lessons) -> tuple[int, int]:
        """Environment steps and bad ones, before others."""
        if lessons != self.lessons:
            self.collector.set_lessons(lessons)
            self.lessons = lessons
        return self.collector.env_steps, self.collector.guard.replaced

    def _told(self, before: tuple[int, int]) -> tuple[int, list[Finished], list[str], int, int]:
        """All but the experience itself."""
        collector, guard = self.collector, self.collector.guard
        notices = [*collector.take_notices(), *guard.notices]
        guard.notices.clear()
        finished, restarts = list(collector.statistics.finished), collector.stepper.restarts
        return collector.env_steps - before[0], finished, notices, restarts, guard.replaced - before[1]


@dataclass(frozen=True)
class BuildActor:
    """Makes an actor, wherever it is called.

    Args:
        env: settings, or what builds one environment.
        spaces: of the algorithm.
        n_steps: of a rollout.
        seed: of all actors of this rank; each draws from a stream of its own, and from another one when it is started anew.
        first: the index of the first environment of this rank.
        on_nan: what to do about bad numbers.
        next_obs: whether rollouts hold what was seen next.
    """

    env: Any
    spaces: Spaces
    n_steps: int
    seed: int
    first: int
    on_nan: str
    next_obs: bool

    def __call__(self, index: int, restarts: int, network: nn.Module) -> Actor:
        num_envs = self.env.num_envs if isinstance(self.env, EnvConfig) else 8
        stepper = make_fitting_stepper(self.env, self.spaces, first=self.first + index * num_envs)
        seed = int(np.random.SeedSequence([self.seed, index, restarts]).generate_state(1)[0]) // 2
        collector = Collector(stepper, self.spaces, network, self.n_steps, seed, next_obs=self.next_obs)  # type: ignore[arg-type]
        collector.guard = Guard(self.on_nan)
        return Actor(collector)


def from_plain(acted: Any) -> Acted | Played:
    """One that was saved, as plain tuples."""
    if len(acted) == len(Played._fields):
        played = Played(*acted)
        steps = [Stepped(*each)._replace(step=EnvStep(*each[2])) for each in played.steps]
        whole: Acted | Played = played._replace(steps=steps, rollout=Rollout(*played.rollout))
    else:
        unroll = Unroll(*acted[0])
        whole = Acted(unroll._replace(ends=Ends(*unroll.ends)), *acted[1:])
    return whole._replace(finished=[Finished(*episode) for episode in whole.finished])
