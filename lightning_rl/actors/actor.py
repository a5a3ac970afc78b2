"""One actor: environments, and a policy that steps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_rl.data.collector import Collector, Stepped
from lightning_rl.data.episode_statistics import Finished
from lightning_rl.data.unroll import Ends, Unroll
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_vector_env
from lightning_rl.envs.stepping import EnvStep, make_stepper
from lightning_rl.guards import Guard
from lightning_rl.spaces import Spaces
from lightning_rl.types import Rollout, tree_index, tree_map, tree_to_numpy


class Acted(NamedTuple):
    """What an actor made in one go, as arrays.

    unroll: with log-probabilities.  env_steps: how many of its rows are experience.  finished: the episodes that ended.
    notices: what there is to tell of the environments, a line each.  restarts: how often one was started anew in all.
    """

    unroll: Unroll
    env_steps: int
    finished: list[Finished]
    notices: list[str]
    restarts: int


class Played(NamedTuple):
    """What an actor made in one go for a replay buffer, as arrays: steps one by one, and all of them as a rollout. The rest as `Acted`."""

    steps: list[Stepped]
    rollout: Rollout
    env_steps: int
    finished: list[Finished]
    notices: list[str]
    restarts: int


class Actor:
    """A collector that is asked from elsewhere."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector

    @torch.no_grad()
    def act(self) -> Acted:
        """Step `n_steps` times. The arrays belong to who asked."""
        collector, before = self.collector, self.collector.env_steps
        unroll = collector.unroll()
        start, memory = unroll.episode_start[:-1], tree_index(unroll.memory, 0)
        log_prob = collector.network.log_prob(tree_index(unroll.obs, slice(-1)), unroll.action, memory, start, unroll.action_mask)
        arrays = tree_map(np.array, unroll._replace(log_prob=log_prob, ends=()))  # type: ignore[arg-type]
        acted = Acted(arrays._replace(ends=unroll.ends), collector.env_steps - before, list(collector.statistics.finished), [], 0)
        return acted._replace(notices=collector.take_notices(), restarts=collector.stepper.restarts)

    def play(self, random_steps: int) -> Played:
        """Step `n_steps` times, the first of them at random. The arrays belong to who asked."""
        collector, before = self.collector, self.collector.env_steps
        steps = []
        for stepped in collector.transitions(random_steps):
            step = stepped.step._replace(info={}, final_obs=stepped.step.final_obs if len(stepped.step.ended) else ())
            steps.append(tree_map(np.array, stepped._replace(step=step)))
        rollout = tree_map(np.array, collector.rollout())
        finished, restarts = list(collector.statistics.finished), collector.stepper.restarts
        return Played(steps, rollout, collector.env_steps - before, finished, collector.take_notices(), restarts)

    def describe(self) -> tuple[str, bool]:
        """The environment's name, and whether it can be saved in the middle of an episode."""
        return self.collector.name, self.collector.can_be_saved

    def random_steps(self, count: int) -> tuple[Any, int]:
        """As that of the collector: observations, and how many steps were made."""
        before = self.collector.env_steps
        return tree_to_numpy(self.collector.random_steps(count)), self.collector.env_steps - before

    def set_lessons(self, lessons: Mapping[str, dict[str, Any]]) -> None:
        """As that of the collector."""
        self.collector.set_lessons(lessons)

    def begin_anew(self) -> None:
        """As that of the collector."""
        self.collector.begin_anew()

    def get_state(self) -> dict[str, Any]:
        """As that of the collector."""
        return self.collector.get_state()

    def set_state(self, state: dict[str, Any]) -> str | None:
        """As that of the collector."""
        return self.collector.set_state(state)

    def close(self) -> None:
        """As that of the collector."""
        self.collector.close()


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
        config = self.env if isinstance(self.env, EnvConfig) else None
        num_envs = 8 if config is None else config.num_envs
        stepper = make_stepper(make_vector_env(self.env, first=self.first + index * num_envs), config, self.spaces.masked)
        seed = int(np.random.SeedSequence([self.seed, index, restarts]).generate_state(1)[0]) // 2
        collector = Collector(stepper, self.spaces, network, self.n_steps, seed, next_obs=self.next_obs)  # type: ignore[arg-type]
        collector.guard = Guard(self.on_nan)
        return Actor(collector)


def from_plain(acted: Any) -> Acted | Played:
    """One that was saved, as plain tuples."""
    if len(acted) == len(Played._fields):
        steps, rollout, env_steps, finished, notices, restarts = acted
        whole_steps = [Stepped(*each)._replace(step=EnvStep(*each[2])) for each in steps]
        return Played(whole_steps, Rollout(*rollout), env_steps, [Finished(*episode) for episode in finished], notices, restarts)
    unroll, env_steps, finished, notices, restarts = acted
    whole = Unroll(*unroll)
    return Acted(whole._replace(ends=Ends(*whole.ends)), env_steps, [Finished(*episode) for episode in finished], notices, restarts)
