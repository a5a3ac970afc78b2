"""Actors in the place of a collector: rollouts of many, each with the weights that it had."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from lightning_rl.actors.actor import Lessons, from_plain
from lightning_rl.actors.config import ActorsConfig
from lightning_rl.actors.workers import Answer, Workers
from lightning_rl.data.collector import Stepped, add_values, join
from lightning_rl.data.episodes import EpisodeStatistics
from lightning_rl.errors import Interrupted
from lightning_rl.nan_policy import Guard
from lightning_rl.networks.acting import ActingNetwork, Precision
from lightning_rl.types import Rollout, Tree, tree_map, tree_to_torch

COUNTS = ("env_steps", "rows", "version", "dropped")


class ActorPool:
    """Collects batches of rollouts, side by side, from actors that go on acting while one is learned from.

    Log-probabilities are those of the policy that acted, values those of the network as it is.

    Args:
        workers: the actors, see `actor.py`.
        network: what learns, whose weights they get.
        config: how many, and how they keep step with the learner.
        n_steps: T, of each rollout.
        num_envs: environments of each actor.
        precision: a context in which the network computes, the same as in its losses.
    """

    def __init__(
        self,
        workers: Workers,
        network: ActingNetwork,
        config: ActorsConfig,
        n_steps: int,
        num_envs: int,
        precision: Precision = nullcontext,
    ) -> None:
        self.workers, self.network, self.config, self.n_steps = workers, network, config, n_steps
        self.num_envs = num_envs * config.batch
        """Of a batch."""
        self.precision = precision
        self.guard = Guard()
        self.statistics = EpisodeStatistics(self.num_envs)
        self.env_steps = self.rows = self.version = self.dropped = 0
        self.waiting: deque[Answer] = deque()
        """Rollouts that came while something else was awaited."""
        self.under_way = 0
        """Rollouts that were asked for and did not come yet."""
        self.env_restarts = [0] * config.num_actors
        self.notices: list[str] = []
        self.seen: Any = ()
        self.recorded: dict[str, float] = {}
        self.lessons: Lessons = {}
        try:
            self.name, self.can_be_saved = self._ask_all("describe")[0]
        except BaseException:
            self.close()
            raise

    def collect(self) -> Rollout:
        """The next batch `[T, N, ...]`."""
        began = self._begin()
        answers = self._in_order() if self.config.in_order else self._as_they_come()
        self._record(answers, time.monotonic() - began)
        unroll = join([answer.value.unroll for answer in answers])
        self.rows += self.n_steps * self.num_envs
        ends = unroll.ends
        unroll = tree_to_torch(unroll._replace(ends=()))._replace(ends=ends)  # type: ignore[arg-type]
        self.seen = unroll.rollout()
        with torch.no_grad(), self.precision():
            return add_values(unroll, self.network, next(self.network.parameters()).device)

    def transitions(self, random_steps: int = 0) -> Iterator[Stepped]:
        """For a replay buffer: the steps that one actor made while the last ones were learned from, the first `random_steps` at random."""
        began = self._begin()
        if not self.waiting and not self.under_way:
            self._ask(0, "play", random_steps)
        answer = self._take()
        self._count(answer)
        self._ask(0, "play", random_steps - self.n_steps)
        self._record([answer], time.monotonic() - began)
        self.rows += self.n_steps * self.num_envs
        self.seen = tree_to_torch(answer.value.rollout)
        yield from answer.value.steps

    def _begin(self) -> float:
        """An iteration, with the weights that the network has now. Returns when."""
        self.statistics.finished.clear()
        self.version += 1
        self.workers.publish(self.version)
        return time.monotonic()

    def _in_order(self) -> list[Answer]:
        first = self.version * self.config.batch  # where a batch has not one of each, all get their turn
        for k in range(first, first + self.config.batch):
            self._ask(k % self.config.num_actors, "act")
        came = [self._take() for _ in range(self.config.batch)]
        answers = sorted(came, key=lambda answer: answer.worker)  # those of one actor stay in their order
        for answer in answers:
            self._count(answer)
        return answers

    def _as_they_come(self) -> list[Answer]:
        answers: list[Answer] = []
        if not self.waiting and not self.under_way:
            for k in range(self.config.ahead):
                self._ask(k % self.config.num_actors, "act")
        oldest = self.config.max_policy_lag
        while len(answers) < self.config.batch:
            answer = self._take()
            self._count(answer)
            self._ask(answer.worker, "act")
            if oldest is not None and self.version - answer.version > oldest:
                self.dropped += 1
            else:
                answers.append(answer)
        return answers

    def _ask(self, worker: int, method: str, *arguments: Any) -> None:
        self.workers.call(worker, method, self.lessons, *arguments)
        self.under_way += 1

    def _await(self) -> Answer:
        """The next rollout that comes."""
        self.under_way -= 1
        return self.workers.receive()

    def _take(self) -> Answer:
        """The next rollout, which may have come while something else was awaited."""
        return self.waiting.popleft() if self.waiting else self._await()

    def _count(self, answer: Answer) -> None:
        """Add a rollout's steps, episodes and notices to those of the run."""
        acted = answer.value
        self.env_steps += acted.env_steps
        for episode in acted.finished:
            self.statistics.add(episode)
        self.notices += acted.notices
        self.guard.replaced += acted.replaced
        self.env_restarts[answer.worker] = acted.restarts

    def _ask_all(self, method: str, arguments: Callable[[int], tuple[Any, ...]] = lambda worker: ()) -> list[Any]:
        """What a method of each actor returns."""
        for worker in range(self.config.num_actors):
            self.workers.call(worker, method, *arguments(worker))
        values: dict[int, Any] = {}
        while len(values) < self.config.num_actors:
            answer = self.workers.receive()
            if answer.method == method:
                values[answer.worker] = answer.value
            else:
                self.under_way -= 1
                self.waiting.append(answer)
        return [values[worker] for worker in range(self.config.num_actors)]

    def _record(self, answers: list[Answer], seconds: float) -> None:
        lags = [self.version - answer.version for answer in answers]
        self.recorded = {
            "actors/policy_lag_mean": float(np.mean(lags)),
            "actors/policy_lag_max": float(max(lags)),
            "time/rollouts_waiting": float(len(self.waiting) + self.workers.num_ready()),
            "time/waiting_for_actors": seconds,
            "time/rollout": float(np.mean([answer.seconds for answer in answers])),
        }

    def rollout(self) -> Rollout:
        """What the environments said in the last batch, on the CPU."""
        return self.seen

    def random_steps(self, count: int, stop: Callable[[], bool] = lambda: False) -> Tree:
        """As that of a collector, shared among the actors."""
        rows, end = [], self.env_steps + count
        while self.env_steps < end:
            if stop():
                raise Interrupted
            for row, steps in self._ask_all("random_steps", lambda worker: (self.lessons,)):
                rows.append(row)
                self.env_steps, self.rows = self.env_steps + steps, self.rows + steps
        return tree_map(lambda *leaves: torch.from_numpy(np.concatenate(leaves)), *rows)

    def set_lessons(self, lessons: Lessons) -> None:
        """For rollouts that are asked for from now on."""
        self.lessons = lessons

    def begin_anew(self) -> None:
        """The episodes under way are given up."""
        self._ask_all("begin_anew")

    def get_state(self) -> dict[str, Any]:
        """Between iterations: all that the next one depends on. Rollouts under way are awaited, and saved too."""
        while self.under_way:
            self.waiting.append(self._await())
        state: dict[str, Any] = {name: getattr(self, name) for name in COUNTS}
        state |= {"statistics": self.statistics.get_state(), "episodes": None}  # which the actors have
        return state | {"actors": self._ask_all("get_state"), "waiting": [tuple(answer) for answer in self.waiting]}

    def set_state(self, state: dict[str, Any]) -> str | None:
        """The inverse, before the first iteration; one line if the environments start new episodes instead."""
        for name in COUNTS:
            setattr(self, name, state.get(name, 0))
        self.statistics.set_state(state["statistics"])
        if (saved := len(state.get("actors", ()))) != self.config.num_actors:
            return f"the checkpoint holds {saved} actors, not {self.config.num_actors}"
        said = self._ask_all("set_state", lambda i: (state["actors"][i],))
        if not any(said) and not self.config.in_order:
            answers = [Answer(*answer) for answer in state["waiting"]]
            self.waiting.extend(answer._replace(value=from_plain(answer.value)) for answer in answers)
        return next((line for line in said if line is not None), None)

    def metrics(self) -> dict[str, float]:
        """Of the last 100 episodes, and of the actors."""
        restarts = {
            "env/worker_restarts": sum(self.env_restarts),
            "env/actor_restarts": self.workers.restarts,
            "env/rollouts_dropped": self.dropped,
        }
        counts = {name: float(count) for name, count in restarts.items() if count}
        return {**self.statistics.metrics(), **self.recorded, **counts}

    def take_notices(self) -> list[str]:
        """What befell environments and actors since the last time."""
        notices = [*self.notices, *self.workers.notices]
        self.notices.clear()
        self.workers.notices.clear()
        return notices

    def close(self) -> None:
        """End all actors."""
        self.workers.close()
