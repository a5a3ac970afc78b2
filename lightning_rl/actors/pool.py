"""A pool of actors as a collector: it collects rollouts of many actors, each with its actor's weights."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch

from lightning_rl.actors.actor import Lessons, from_plain
from lightning_rl.actors.config import ActorsConfig
from lightning_rl.actors.workers import Answer, Workers
from lightning_rl.checkpoints.validation import GENERATOR, Rules
from lightning_rl.data.collector import INTERRUPTED
from lightning_rl.data.episodes import EpisodeStatistics
from lightning_rl.data.rollout import Stepped, add_values, join
from lightning_rl.errors import RunStoppedError
from lightning_rl.nan_policy import Guard
from lightning_rl.networks.acting import ActingContext, ActingNetwork
from lightning_rl.types import Rollout, State, Tree, tree_map, tree_to_torch

COUNTS = ("env_steps", "rows", "version", "dropped")


class ActorPool:
    """Collects batches of rollouts, side by side, from actors that act while a batch is learned from.

    Log-probabilities are those of the policy that acted, values those of the current network.

    Args:
        workers: the actors, see `actor.py`.
        network: the learning network, whose weights are published to the actors.
        config: the number of actors, and how they are synchronized with the learner.
        n_steps, num_envs: T, the steps of each rollout, and the number of environments of each actor.
        context: in which the network acts and judges; see `acting_context`.
    """

    state_rules: ClassVar[Rules] = {"actors?/[]/generator": GENERATOR}
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(
        self,
        workers: Workers,
        network: ActingNetwork,
        config: ActorsConfig,
        n_steps: int,
        num_envs: int,
        context: ActingContext = nullcontext,
    ) -> None:
        self.workers, self.network, self.config, self.n_steps = workers, network, config, n_steps
        self.close = workers.close
        self.num_envs = num_envs * config.batch
        """Number of environments in a batch."""
        self.context = context
        self.guard = Guard()
        self.statistics = EpisodeStatistics(self.num_envs)
        self.env_steps = self.rows = self.version = self.dropped = self.arrived = 0
        self.waiting: deque[Answer] = deque()
        """Rollouts that arrived while another answer was awaited."""
        self.requested = 0
        """Number of requested rollouts that have not arrived yet."""
        self.env_restarts = [0] * config.num_actors
        self.notices: list[str] = []
        self.last_rollout: Tree = ()
        self.recorded: dict[str, float] = {}
        self.lessons: Lessons = {}
        self.interrupted = False
        try:
            self.name, self.can_be_saved = self._call_all("describe")[0]
        except BaseException:
            self.close()
            raise

    def collect(self) -> Rollout:
        """Return the next batch `[T, N, ...]`."""
        began = self._begin()
        answers = self._receive_in_order() if self.config.in_order else self._receive_as_they_come()
        self._record(answers, time.monotonic() - began)
        unroll = join([answer.value.experience for answer in answers])
        ends = unroll.ends
        unroll = tree_to_torch(unroll._replace(ends=()))._replace(ends=ends)  # type: ignore[arg-type]
        self.last_rollout = unroll.rollout()
        with torch.no_grad(), self.context():
            rollout = add_values(unroll, self.network, next(self.network.parameters()).device)
        return rollout._replace(actors=torch.tensor([answer.worker for answer in answers]))

    def transitions(self, random_steps: int = 0) -> Iterator[Stepped]:
        """Yield the steps that one actor made while the last ones were learned from, the first `random_steps` with random actions."""
        began = self._begin()
        if not self.waiting and not self.requested:
            self._request(0, "play", random_steps)
        answer = self._receive()
        self._request(0, "play", random_steps - self.n_steps)
        self._record([answer], time.monotonic() - began)
        self.last_rollout = tree_to_torch(answer.value.rollout)
        yield from answer.value.experience

    @property
    def steps_made(self) -> int:
        """Return the steps of all rollouts that have arrived, as `Collector.steps_made` does."""
        return self.arrived

    def _begin(self) -> float:
        """Begin an iteration by publishing the network's weights; return the time."""
        self.statistics.finished.clear()
        self.version += 1
        self.workers.publish(self.version)
        return time.monotonic()

    def _receive_in_order(self) -> list[Answer]:
        batch, actors = self.config.batch, self.config.num_actors
        for k in range(self.version * batch, (self.version + 1) * batch):  # with fewer rollouts than actors, all take turns
            self._request(k % actors, "act")
        answers = [self._receive(count=False) for _ in range(batch)]
        answers.sort(key=lambda answer: answer.worker)  # stable: answers of one actor stay in order
        for answer in answers:
            self._count(answer)
        return answers

    def _receive_as_they_come(self) -> list[Answer]:
        answers: list[Answer] = []
        if not self.waiting and not self.requested:
            for k in range(self.config.ahead):
                self._request(k % self.config.num_actors, "act")
        max_lag = self.config.max_policy_lag
        while len(answers) < self.config.batch:
            answer = self._receive()
            self._request(answer.worker, "act")
            if max_lag is not None and self.version - answer.version > max_lag:
                self.dropped += 1
            else:
                answers.append(answer)
        return answers

    def _request(self, worker: int, method: str, *arguments: int) -> None:
        self.workers.call(worker, method, self.lessons, *arguments)
        self.requested += 1

    def _receive(self, count: bool = True) -> Answer:
        """Return the next rollout, which may have arrived while another answer was awaited."""
        if self.waiting:
            answer = self.waiting.popleft()
        else:
            self.requested -= 1
            answer = self.workers.receive()
        self.arrived += answer.value.env_steps
        if count:
            self._count(answer)
        return answer

    def _count(self, answer: Answer) -> None:
        """Add a rollout's steps, episodes and notices to those of the run."""
        acted = answer.value
        self.env_steps += acted.env_steps
        for episode in acted.finished:
            self.statistics.add(episode)
        self.notices += acted.notices
        self.env_restarts[answer.worker] = acted.restarts
        if acted.bad is not None:
            self.guard.report(acted.replaced, acted.bad)

    def _call_all(self, method: str, arguments: Callable[[int], tuple[object, ...]] = lambda worker: ()) -> list[Any]:
        """Call a method of each actor; return the results."""
        for worker in range(self.config.num_actors):
            self.workers.call(worker, method, *arguments(worker))
        values: dict[int, Any] = {}
        while len(values) < self.config.num_actors:
            answer = self.workers.receive()
            if answer.method == method:
                values[answer.worker] = answer.value
            else:
                self.requested -= 1
                self.waiting.append(answer)
        return [values[worker] for worker in range(self.config.num_actors)]

    def _record(self, answers: list[Answer], seconds: float) -> None:
        self.rows += self.n_steps * self.num_envs
        lags = [self.version - answer.version for answer in answers]
        self.recorded = {
            "actors/policy_lag_mean": float(np.mean(lags)),
            "actors/policy_lag_max": float(max(lags)),
            "time/rollouts_waiting": float(len(self.waiting) + self.workers.num_ready()),
            "time/waiting_for_actors": seconds,
            "time/rollout": float(np.mean([answer.seconds for answer in answers])),
        }

    def rollout(self) -> Rollout:
        """Return the environments' results of the last batch, on the CPU."""
        return self.last_rollout

    def random_steps(self, count: int, stop: Callable[[], bool] = lambda: False) -> Tree:
        """Return observations of random steps, as `Collector.random_steps` does, shared among the actors."""
        rows, end = [], self.env_steps + count
        while self.env_steps < end:
            if stop():
                raise RunStoppedError
            for row, steps, replaced, bad in self._call_all("random_steps", lambda worker: (self.lessons,)):
                rows.append(row)
                self.env_steps, self.rows = self.env_steps + steps, self.rows + steps
                if bad is not None:
                    self.guard.report(replaced, bad)
        return tree_map(lambda *leaves: torch.from_numpy(np.concatenate(leaves)), *rows)

    def set_lessons(self, lessons: Lessons) -> None:
        self.lessons = {**self.lessons, **lessons}

    def restart_episodes(self) -> None:
        """Abandon the current episodes."""
        self._call_all("restart_episodes")

    def interrupt(self) -> None:
        """Abandon the episodes of all actors after an error, possibly of an actor."""
        self.interrupted = True

    def get_state(self) -> State:
        """Return, between iterations, everything that the next one depends on, including requested rollouts, which are awaited."""
        state: State = {name: getattr(self, name) for name in COUNTS}
        state |= {"statistics": self.statistics.get_state(), "episodes": None}  # the actors have the episodes
        if self.interrupted:
            return {**state, "interrupted": True}
        while self.requested:
            self.requested -= 1
            self.waiting.append(self.workers.receive())
        return state | {"actors": self._call_all("get_state"), "waiting": [tuple(answer) for answer in self.waiting]}

    def set_state(self, state: State) -> str | None:
        """Restore a state before the first iteration. Return None, or the reason why the environments start new episodes instead."""
        for name in COUNTS:
            setattr(self, name, state.get(name, 0))
        self.statistics.set_state(state["statistics"])
        if state.get("interrupted", False):
            return INTERRUPTED
        if (saved := len(state.get("actors", ()))) != self.config.num_actors:
            return f"the checkpoint holds {saved} actors, not {self.config.num_actors}"
        reasons = [reason for reason in self._call_all("set_state", lambda i: (state["actors"][i],)) if reason is not None]
        if not reasons and not self.config.in_order:
            answers = [Answer(*answer) for answer in state["waiting"]]
            self.waiting.extend(answer._replace(value=from_plain(answer.value)) for answer in answers)
        return reasons[0] if reasons else None

    def metrics(self) -> dict[str, float]:
        """Return means over the last 100 episodes, and metrics of the actors."""
        restarts = {
            "env/worker_restarts": sum(self.env_restarts),
            "env/actor_restarts": self.workers.restarts,
            "env/rollouts_dropped": self.dropped,
        }
        counts = {name: float(count) for name, count in restarts.items() if count}
        return {**self.statistics.metrics(), **self.recorded, **counts}

    def take_notices(self) -> list[str]:
        """Return new lines about environments and actors."""
        notices = [*self.notices, *self.workers.notices]
        self.notices.clear()
        self.workers.notices.clear()
        return notices
