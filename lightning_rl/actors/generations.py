"""A pool of evaluators as a collector: it collects generations of episodes, whose jobs any evaluator can do."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from lightning_rl.actors.actor import Lessons
from lightning_rl.actors.config import ActorsConfig
from lightning_rl.actors.evaluator import Generation, JobEpisode
from lightning_rl.actors.workers import LocalWorkers, ThreadWorkers, Workers
from lightning_rl.data.collector import Collector
from lightning_rl.data.episodes import EpisodeStatistics
from lightning_rl.data.rollout import RolloutDataset
from lightning_rl.errors import SettingError
from lightning_rl.nan_policy import MAX_IN_A_ROW, Guard
from lightning_rl.processes.ranks import sum_over_ranks
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.types import Rollout, State, Tree, tree_leaves, tree_map, tree_to_torch

STATE = ("env_steps", "rows", "seed", "number", "mean_length")

CALLS_PER_EVALUATOR = 2
"""One call in progress, and one queued."""


class Results(NamedTuple):
    """Results of the n jobs of a generation, the same on all ranks: returns, sums of the signs of rewards, and lengths, `[n, 2]` each."""

    generation: Generation
    returns: Tensor
    signs: Tensor
    lengths: Tensor


class GenerationDataset(RolloutDataset):
    """Endless generations, each a batch; see `EvaluatorPool`."""

    restart_notice = "new noise is drawn"


@dataclass(frozen=True)
class GenerationSettings:
    """The size of generations; see `EvolutionStrategies`, which has these settings.

    rank, ranks: each rank does its share of the jobs.  device: where ranks exchange results.
    """

    pairs: int
    min_steps: int
    max_length_ratio: float | None
    watched_share: float
    num_envs: int
    rank: int = 0
    ranks: int = 1
    device: torch.device | str = "cpu"


class EvaluatorPool:
    """Collects generations from parallel evaluators; their results do not depend on the number of evaluators.

    Args:
        workers: the evaluators, see `evaluator.py`.
        actors: the number of evaluators, and where they are.
        settings, spaces: the size of generations, and the spaces of the algorithm.
        seed: seed of all jobs, the same on all ranks.
        sigma: returns σ of the next generation.
        random_collector: builds a collector for random steps.
    """

    num_envs, n_steps, can_be_saved = 1, math.inf, True

    def __init__(
        self,
        workers: Workers,
        actors: ActorsConfig,
        settings: GenerationSettings,
        spaces: Spaces,
        seed: int,
        sigma: Callable[[], float],
        random_collector: Callable[[], Collector],
    ) -> None:
        self.workers, self.actors, self.settings, self.space, self.sigma = workers, actors, settings, spaces.observation, sigma
        self.random_collector, self.close = random_collector, workers.close
        self.seed, self.number = seed, 0
        self.env_steps = self.rows = self.arrived = 0
        self.mean_length = 0.0
        """Mean length of the last generation's episodes."""
        self.lessons: Lessons = {}
        self.copied = {name for name, _ in workers.network.named_parameters()}
        """The parameters of the network that evaluators got."""
        self.guard, self.generator, self.statistics = Guard(), Generator().manual_seed(0), EpisodeStatistics(1)
        self.watched_obs: list[Tree] = []
        self.seconds = 0.0
        try:
            self.workers.call(0, "describe")
            self.name = self.workers.receive().value
        except BaseException:
            self.close()
            raise

    @property
    def steps_made(self) -> int:
        """Return the steps of evaluators in this process, or of episodes that others have sent, as `Collector.steps_made` does."""
        if isinstance(self.workers, LocalWorkers | ThreadWorkers):
            evaluators: Any = self.workers.workers
            return sum(evaluator.steps_played for evaluator in evaluators)
        return self.arrived

    def collect(self) -> Results:
        """Return the next generation, with the newest weights: rounds of equal size until there are enough steps."""
        began, ratio = time.monotonic(), self.settings.max_length_ratio
        self.statistics.finished.clear()
        longest = max(1, round(ratio * self.mean_length)) if ratio is not None and self.mean_length else None
        generation = Generation(self.seed, self.number, self.sigma(), longest, self.lessons, self._perturbed())
        self.number += 1
        self.workers.publish(self.number)
        self.watched_obs, rounds = [], list[Tensor]()
        while not rounds or sum(float(table[..., 2].sum()) for table in rounds) < self.settings.min_steps:
            rounds.append(self._round(generation, len(rounds) * self.settings.pairs))
        returns, signs, lengths = torch.cat(rounds).unbind(-1)
        self.rows += int(lengths.sum())
        self.mean_length = float(lengths.mean())
        self.seconds = time.monotonic() - began
        return Results(generation, returns, signs, lengths)

    def _perturbed(self) -> tuple[str, ...]:
        """Return the names of the parameters that are learned now. Raises `SettingError`: evaluators elsewhere lack one."""
        names = tuple(name for name, parameter in self.workers.network.named_parameters() if parameter.requires_grad)
        if not isinstance(self.workers, LocalWorkers) and (new := [name for name in names if name not in self.copied]):
            raise SettingError(f"evaluators have no {', '.join(new)}: what is new in the network after they started; change it before fit")
        return names

    def _round(self, generation: Generation, first: int) -> Tensor:
        """Return the return, the sum of signs and the length of each episode, `[n, 2, 3]`, in the order of the jobs, + before −."""
        pairs, settings = self.settings.pairs, self.settings
        table, episodes, failed = torch.zeros(pairs, 2, 3, dtype=torch.float64), list[JobEpisode](), None
        try:
            episodes = self._evaluate(generation, range(first + settings.rank, first + pairs, settings.ranks))
        except SettingError as error:  # reported to the other ranks by NaN, so that all stop
            failed = error
            table.fill_(math.nan)
        for episode in episodes:
            finished = episode.finished
            numbers = torch.tensor([finished.return_, episode.signs, finished.length], dtype=torch.float64)
            table[episode.job - first, (1 - episode.sign) // 2] = numbers
            self.env_steps += finished.length
            self.statistics.add(finished)
            self.guard.bad_steps = self.guard.bad_steps + episode.replaced if episode.replaced >= finished.length else 0
            if episode.bad is not None:
                self.guard.report(episode.replaced, episode.bad._replace(too_many=self.guard.bad_steps >= MAX_IN_A_ROW))
            if len(episode.obs):
                self.watched_obs.append(episode.obs)
        table = sum_over_ranks(table.to(settings.device)).cpu()  # rows of other ranks are zeros
        if table.isnan().any():
            raise failed or SettingError("an evaluator of another rank stopped")
        return table

    def _evaluate(self, generation: Generation, jobs: Sequence[int]) -> list[JobEpisode]:
        """Distribute jobs to the evaluators; return all episodes in the order of the jobs."""
        share = self.settings.watched_share
        watched = {job for job in jobs if math.ceil((job + 1) * share) > math.ceil(job * share)}  # always includes the first job
        waiting, requested, episodes = deque(self._portions(jobs)), 0, list[JobEpisode]()
        idle = deque([*range(self.actors.num_actors)] * CALLS_PER_EVALUATOR)
        while waiting or requested:
            while waiting and idle:
                portion = waiting.popleft()
                self.workers.call(idle.popleft(), "evaluate", generation, portion, sorted(watched & set(portion)))
                requested += 1
            answer = self.workers.receive()
            episodes += answer.value
            self.arrived += sum(evaluated.finished.length for evaluated in answer.value)
            idle.append(answer.worker)
            requested -= 1
        return sorted(episodes, key=lambda episode: (episode.job, -episode.sign))

    def _portions(self, jobs: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the jobs of each call: all for a single local worker, else decreasing numbers, so that all workers finish together.

        Remote calls are short, because a worker that takes too long counts as frozen.
        """
        workers, limit = self.actors.num_actors, len(jobs) if self.actors.backend == "in_process" else self.settings.num_envs
        while jobs:
            size = limit if workers == 1 else min(limit, -(-len(jobs) // (2 * workers)))
            yield jobs[:size]
            jobs = jobs[size:]

    def rollout(self) -> Rollout:
        """Return the concatenated observations of the watched episodes of the last generation."""
        watched = self.watched_obs or [allocate(self.space, 0)]
        obs = tree_to_torch(tree_map(lambda *leaves: np.concatenate(leaves)[:, None], *watched))
        rows = len(tree_leaves(obs)[0])
        none, flag = torch.zeros(1, rows, 1), torch.zeros(rows, 1, dtype=torch.bool)
        return Rollout(obs, (), (), none, none, none, flag, flag, ~flag, flag)

    def random_steps(self, count: int, stop: Callable[[], bool] = lambda: False) -> Tree:
        """Return observations of random steps, as `Collector.random_steps` does."""
        with closing(self.random_collector()) as collector:
            if self.lessons:
                collector.set_lessons(self.lessons)
            collector.guard = self.guard
            obs = collector.random_steps(count, stop)
            self.env_steps, self.rows = self.env_steps + collector.env_steps, self.rows + collector.rows
        return obs

    def set_lessons(self, lessons: Lessons) -> None:
        self.lessons = {**self.lessons, **lessons}

    def restart_episodes(self) -> None:
        """Do nothing: between generations there are no current episodes."""

    def interrupt(self) -> None:
        """Do nothing: the next generation replaces an unfinished one."""

    def get_state(self) -> State:
        state: State = {name: getattr(self, name) for name in STATE}
        return {**state, "statistics": self.statistics.get_state(), "generator": self.generator.get_state(), "episodes": None}

    def set_state(self, state: State) -> None:
        for name in STATE:
            setattr(self, name, state[name])
        self.statistics.set_state(state["statistics"])

    def metrics(self) -> dict[str, float]:
        """Return means over the last 100 episodes (with perturbed weights), and metrics of the evaluators."""
        restarts = {"env/actor_restarts": float(self.workers.restarts)} if self.workers.restarts else {}
        return {**self.statistics.metrics(), **restarts, "time/generation": self.seconds}

    def take_notices(self) -> list[str]:
        """Return new lines about evaluators."""
        notices = self.workers.notices[:]
        self.workers.notices.clear()
        return notices
