"""Environments in processes of their own, that outlive the failures of one another.

Observations, rewards and flags lie in shared memory, requests and what else there is to say go through pipes. A worker that dies, freezes
or raises is replaced: the row it was asked for is lost, and a new episode begins there.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import pickle
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from textwrap import shorten
from typing import Any
from weakref import WeakSet

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import (
    CloudpickleWrapper,
    batch_space,
    clear_mpi_env_vars,
    create_shared_memory,
    iterate,
    read_from_shared_memory,
)

from lightning_rl.envs.worker import ERROR, REFUSED, work
from lightning_rl.errors import SettingError
from lightning_rl.spaces import MASK
from lightning_rl.types import tree_index, tree_leaves

STEP_TIMEOUT = 60.0
MAX_RESTARTS = 10
HOUR = 3600.0
BUILD_TIMEOUT = 300.0
"""Seconds for a process to start and to build its environment, with many others at once."""
CLOSE_TIMEOUT = 5.0

_open: WeakSet[WorkerVectorEnv] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Before multiprocessing, which came first, waits for workers that do not hear its SIGTERM."""
    for envs in list(_open):
        envs.close()


class WorkerVectorEnv(VectorEnv):
    """Environments in a process each.

    Args:
        build: makes one environment.
        num_envs: how many.
        autoreset_mode: who resets, and when.
        name: of the environment, for messages.
        step_timeout: seconds after which a worker that does not answer is taken for frozen.
        max_restarts: how often each worker may be replaced in an hour.
        first: the index of the first one, where `build` takes an index.
    """

    def __init__(
        self,
        build: Callable[..., gym.Env],
        num_envs: int,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        name: str = "the environment",
        step_timeout: float | None = None,
        max_restarts: int | None = None,
        first: int | None = None,
    ) -> None:
        self.build, self.num_envs, self.autoreset_mode, self.name = build, num_envs, autoreset_mode, name
        self.step_timeout = STEP_TIMEOUT if step_timeout is None else step_timeout
        self.max_restarts = MAX_RESTARTS if max_restarts is None else max_restarts
        self.first = first
        self.lessons: Mapping[str, dict[str, Any]] = {}
        single = self._builder(0)()  # a mistake shows here, not in a worker
        self.metadata = {**single.metadata, "autoreset_mode": autoreset_mode}
        self.render_mode = single.render_mode
        self.single_observation_space, self.single_action_space = single.observation_space, single.action_space
        single.close()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.context: Any = multiprocessing.get_context()  # gymnasium's default, too
        observations: Any = create_shared_memory(self.single_observation_space, num_envs, self.context)  # type: ignore[arg-type]
        outcome = self.context.RawArray("d", num_envs), self.context.RawArray("b", num_envs), self.context.RawArray("b", num_envs)
        self.shared = observations, outcome
        self.observations = read_from_shared_memory(self.single_observation_space, observations, num_envs)
        self.reward = np.frombuffer(outcome[0], np.float64)
        self.terminated, self.truncated = (np.frombuffer(flags, bool) for flags in outcome[1:])
        self.way: str | None = None
        self.seeds: list[int | None] = [None] * num_envs
        self.restarts = np.zeros(num_envs, np.int64)
        self.notices: list[str] = []
        self.lost = np.zeros(num_envs, bool)
        """Whose last row is no experience: its worker was replaced."""
        self._replaced = np.zeros(num_envs, bool)
        self._first: list[bytes | None] = [None] * num_envs
        """What each worker that was started anew said of its first reset."""
        self._failures: list[deque[float]] = [deque() for _ in range(num_envs)]
        self._owner = os.getpid()
        self._pipes: list[Connection] = [None] * num_envs  # type: ignore[list-item]
        self._polls: list[Callable[[float], Any]] = [None] * num_envs  # type: ignore[list-item]
        self.processes: list[Any] = [None] * num_envs
        _open.add(self)
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `options["reset_mask"]`."""
        options = dict(options) if options is not None else None
        mask = np.ones(self.num_envs, bool) if options is None else options.pop("reset_mask", np.ones(self.num_envs, bool))
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        self.seeds = [old if new is None else new for old, new in zip(self.seeds, seeds, strict=True)]
        replies = self._ask([_request("reset", each, options) if asked else None for each, asked in zip(seeds, mask, strict=True)])
        self._replaced &= ~mask  # a new worker begins with a reset
        return self.observations, self._infos([self._first[i] if mask[i] and each is None else each for i, each in enumerate(replies)])

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all environments. Rows of workers that had to be replaced are `lost`, with the first observation of a new episode."""
        requests: list[bytes | None] = [_request("step", action) for action in iterate(self.action_space, actions)]
        if self._replaced.any():
            requests = [None if replaced else request for request, replaced in zip(requests, self._replaced, strict=True)]
        replies = self._ask(requests)
        self.lost = self._replaced
        if self.lost.any():
            self._replaced = np.zeros(self.num_envs, bool)
            self.reward[self.lost], self.terminated[self.lost], self.truncated[self.lost] = 0.0, False, False
            replies = [self._first[i] if lost else reply for i, (lost, reply) in enumerate(zip(self.lost, replies, strict=True))]
        return self.observations, self.reward.copy(), self.terminated.copy(), self.truncated.copy(), self._infos(replies)

    def call(self, name: str, *args: Any) -> list[Any]:
        """An attribute of each environment, or what a method of it returns."""
        return [None if reply is None else pickle.loads(reply) for reply in self._ask([_request("call", name, args)] * self.num_envs)]

    def set_lessons(self, lessons: Mapping[str, dict[str, Any]]) -> None:
        """As that of `EnvParameters`, for all environments and those that replace them."""
        self.lessons = lessons
        self.call("set_lessons", lessons)

    def record(self, way: str | None) -> bool:
        """Keep what this way to save states needs; whether there is a way. Before the first reset."""
        self.way = way
        self._ask([_request("record", way)] * self.num_envs)
        return way is not None

    def get_states(self) -> dict[str, Any]:
        """The states of all environments, and what replacing a worker depends on."""
        states: list[Any] = [None] * self.num_envs
        while None in states:  # one that fails is asked again when it was replaced
            replies = self._ask([_request("get_state") if state is None else None for state in states])
            states = [pickle.loads(reply) if reply else state for state, reply in zip(states, replies, strict=True)]
        replaced = self._replaced.copy()
        first = tree_index(self.observations, replaced)  # which the next step gives; indexing by an array copies
        masks = [pickle.loads(info).get(MASK) if info and lost else None for info, lost in zip(self._first, replaced, strict=True)]
        counts = {"seeds": list(self.seeds), "restarts": self.restarts.copy()}
        return {"envs": states, "replaced": replaced, "first": first, "first_masks": masks, **counts}

    def set_states(self, states: dict[str, Any]) -> bool:
        """The inverse; whether it worked. If not, the workers are new ones."""
        replies = self._ask([_request("set_state", state) for state in states["envs"]], timeout=BUILD_TIMEOUT)
        if not all(reply and pickle.loads(reply) for reply in replies):
            self._start_all()
            return False
        self._replaced = states["replaced"].copy()
        if self._replaced.any():
            for row, first in zip(tree_leaves(self.observations), tree_leaves(states["first"]), strict=True):
                row[self._replaced] = first
            masks = zip(self._first, states.get("first_masks", [None] * self.num_envs), strict=True)
            self._first = [None if mask is None else pickle.dumps({MASK: mask}) for _, mask in masks]
        self.seeds, self.restarts = list(states["seeds"]), states["restarts"].copy()
        return True

    def close_extras(self, **kwargs: Any) -> None:
        """End all processes, in whatever state they are."""
        _open.discard(self)
        if os.getpid() != self._owner:  # a copy in a worker, which inherits what its parent had in memory
            return
        for i, process in enumerate(self.processes):
            if process is not None:
                self._send(i, _request("close"))
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for process in self.processes:
            if process is not None:
                process.join(max(0.0, deadline - time.monotonic()))
        for i in range(self.num_envs):
            self._end(i)

    def _builder(self, i: int) -> Callable[[], gym.Env]:
        return self.build if self.first is None else partial(self.build, self.first + i)

    def _start_all(self) -> None:
        for i in range(self.num_envs):
            self._end(i)
            self._start(i)
        deadline = time.monotonic() + max(self.step_timeout, BUILD_TIMEOUT)
        for i in range(self.num_envs):
            _, failure = self._receive(i, deadline)
            if failure is not None:
                self._replace(i, failure)
        self._replaced[:] = False

    def _start(self, i: int) -> None:
        ours, theirs = self.context.Pipe()
        arguments = (i, CloudpickleWrapper(self._builder(i)), theirs, ours, *self.shared, self.autoreset_mode.name, self.way)
        process = self.context.Process(target=work, args=arguments, name=f"environment-{i}", daemon=True)
        with clear_mpi_env_vars():
            process.start()
        theirs.close()
        self.processes[i], self._pipes[i], self._polls[i] = process, ours, _poll(ours)

    def _end(self, i: int) -> None:
        """End a worker at once. A frozen one hears nothing but this."""
        process = self.processes[i]
        if process is not None:
            self.processes[i] = None
            self._pipes[i].close()
            process.kill()
            process.join()
            process.close()

    def _ask(self, requests: Sequence[bytes | None], timeout: float | None = None) -> list[bytes | None]:
        """Send requests, and give the answers: None where nothing was asked, or where the worker had to be replaced."""
        for i, request in enumerate(requests):
            if request is not None:
                self._send(i, request)
        deadline = time.monotonic() + (self.step_timeout if timeout is None else timeout)
        replies: list[bytes | None] = [None] * self.num_envs
        failures = {}
        for i, request in enumerate(requests):
            if request is not None:
                replies[i], failure = self._receive(i, deadline)
                if failure is not None:
                    failures[i] = failure
        for i, failure in failures.items():
            self._replace(i, failure)
        return replies

    def _send(self, i: int, request: bytes) -> None:
        with suppress(OSError):  # a worker that is dead is found to be when its answer is awaited
            self._pipes[i].send_bytes(request)

    def _receive(self, i: int, deadline: float) -> tuple[bytes | None, str | None]:
        """The answer of a worker, or why there is none.

        Raises:
            SettingError: its environment cannot be used.
        """
        try:
            if not self._polls[i](max(0.0, deadline - time.monotonic())):
                return None, f"TimeoutError: no answer in {self.step_timeout:g} s"
            reply = self._pipes[i].recv_bytes()
        except (EOFError, OSError):
            self.processes[i].join(1.0)
            return None, f"it died with exit code {self.processes[i].exitcode}"
        if reply.startswith(REFUSED):
            raise SettingError(reply[1:].decode())
        return (None, reply[1:].decode()) if reply.startswith(ERROR) else (reply, None)

    def _replace(self, i: int, failure: str | None) -> None:
        """Start a worker anew, in a new episode.

        Raises:
            SettingError: it was replaced too often.
        """
        while failure is not None:
            self._end(i)
            now, past = time.monotonic(), self._failures[i]
            past.append(now)
            while now - past[0] > HOUR:
                past.popleft()
            if len(past) > self.max_restarts:
                times = f"more than {self.max_restarts} times in an hour"
                raise SettingError(shorten(f"{self.name} failed {times} in worker {i}; last: {failure}", 200, placeholder=" …"))
            self.restarts[i] += 1
            self.notices.append(shorten(f"worker {i} of {self.name} was replaced: {failure}", 200, placeholder=" …"))
            seed = self.seeds[i]
            own_seed = None if seed is None else int(np.random.SeedSequence([seed, int(self.restarts[i])]).generate_state(1)[0])
            self._start(i)
            _, failure = self._receive(i, now + max(self.step_timeout, BUILD_TIMEOUT))
            if failure is None and self.lessons:
                self._send(i, _request("call", "set_lessons", (self.lessons,)))
                _, failure = self._receive(i, time.monotonic() + self.step_timeout)
            if failure is None:
                self._send(i, _request("reset", own_seed, None))
                self._first[i], failure = self._receive(i, time.monotonic() + self.step_timeout)
        self._replaced[i] = True

    def _infos(self, replies: Sequence[bytes | None]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for i, reply in enumerate(replies):
            if reply:
                infos = self._add_info(infos, pickle.loads(reply), i)
        return infos


def _request(command: str, *arguments: Any) -> bytes:
    return pickle.dumps((command, arguments), pickle.HIGHEST_PROTOCOL)


def _poll(pipe: Connection) -> Callable[[float], Any]:
    """Waits for a pipe up to some seconds, by a selector that is made once: `Connection.poll` makes one at each call."""
    if not hasattr(select, "poll"):
        return pipe.poll
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLIN)
    return partial(_wait, poll)


def _wait(poll: Any, seconds: float) -> Any:
    return poll.poll(1000 * seconds)
