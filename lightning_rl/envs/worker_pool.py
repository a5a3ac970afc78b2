"""Environments in worker processes. A failing worker does not affect the others.

Observations, rewards and flags are in shared memory; requests and all other replies go through pipes. A worker that dies, freezes or raises
is replaced: its current row is lost, and a new episode begins there.
"""

import multiprocessing
import os
import pickle
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import DefaultContext
from multiprocessing.process import BaseProcess

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import CloudpickleWrapper, batch_space, create_shared_memory, iterate, read_from_shared_memory

from lightning_rl.envs.lessons import LessonValues
from lightning_rl.envs.sync import close_env, merge_info
from lightning_rl.envs.worker import FAILED, UNUSABLE, to_bytes, work
from lightning_rl.errors import SettingError
from lightning_rl.processes.children import (
    ANSWER_TIMEOUT,
    LONGEST_WAIT,
    MAX_RESTARTS,
    START_TIMEOUT,
    Child,
    FailureLimit,
    close_at_exit,
    close_children,
)
from lightning_rl.spaces import MASK
from lightning_rl.types import Info, Options, State, Tree, tree_index, tree_leaves


class WorkerFailedError(Exception):
    """A worker died, froze or raised; the message is one line."""


class WorkerProcess(Child):
    """The parent's handle of a worker; `arguments` are the remaining ones of `work`, without the pipe."""

    def __init__(self, context: DefaultContext, index: int, build: Callable[[], gym.Env], *arguments: object) -> None:
        super().__init__(context, work, (index, CloudpickleWrapper(build), *arguments), f"environment-{index}", daemon=True)
        self.wait = make_wait(self.pipe)

    def send(self, request: bytes) -> None:
        """Send a request. A dead worker is noticed when its reply is read."""
        with suppress(OSError):
            self.pipe.send_bytes(request)

    def receive(self, timeout: float, deadline: float | None = None) -> bytes:
        """Read a reply, until the deadline (default: `timeout` seconds from now); raise `WorkerFailedError` if the worker has failed."""
        try:
            if not self.wait(timeout if deadline is None else max(0.0, deadline - time.monotonic())):
                raise WorkerFailedError(f"TimeoutError: no answer in {timeout:g} s")
            reply = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise WorkerFailedError(self.exit_reason()) from None
        if reply.startswith(UNUSABLE):
            raise SettingError(reply[1:].decode())
        if reply.startswith(FAILED):
            raise WorkerFailedError(reply[1:].decode())
        return reply


class WorkerVectorEnv(VectorEnv):
    """Vector environment with a worker process for each environment.

    Args:
        build: builds one environment.
        autoreset_mode: who resets an environment, and when.
        step_timeout: seconds after which a worker that does not answer is replaced.
        max_restarts: maximum number of replacements of each worker per hour.
        first: the index of the first environment, if `build` takes an index.
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
        self.build, self.num_envs, self.autoreset_mode, self.name, self.first = build, num_envs, autoreset_mode, name, first
        self.step_timeout = ANSWER_TIMEOUT if step_timeout is None else min(step_timeout, LONGEST_WAIT)
        self.build_timeout = max(self.step_timeout, START_TIMEOUT)
        self.failures = FailureLimit(f"worker {{}} of {name}", num_envs, MAX_RESTARTS if max_restarts is None else max_restarts)
        self.lessons: Mapping[str, LessonValues] = {}
        single = self._builder(0)()  # errors of the builder are raised here, not in a worker
        self.metadata = {**single.metadata, "autoreset_mode": autoreset_mode}
        self.render_mode = single.render_mode
        self.single_observation_space, self.single_action_space = single.observation_space, single.action_space
        self.takes_lessons = single.has_wrapper_attr("set_lessons")
        close_env(single)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.context = multiprocessing.get_context()  # gymnasium's default, too
        shared_obs = create_shared_memory(self.single_observation_space, num_envs, self.context)  # type: ignore[arg-type]
        outcome = self.context.RawArray("d", num_envs), self.context.RawArray("b", num_envs), self.context.RawArray("b", num_envs)
        self.shared = shared_obs, outcome
        self.observations: Tree = read_from_shared_memory(self.single_observation_space, shared_obs, num_envs)
        self.reward = np.frombuffer(outcome[0], np.float64)
        self.terminated, self.truncated = (np.frombuffer(flags, bool) for flags in outcome[1:])
        self.way: str | None = None
        self.seeds: list[int | None] = [None] * num_envs
        self.restarts = np.zeros(num_envs, np.int64)
        self.notices: list[str] = []
        self.lost = np.zeros(num_envs, bool)
        """Environments whose last row is not experience because their worker was replaced."""
        self._replaced = np.zeros(num_envs, bool)
        self._first: list[bytes | None] = [None] * num_envs
        """The info of each replaced worker's first reset."""
        self._owner = os.getpid()
        self._workers: dict[int, WorkerProcess] = {}
        close_at_exit(self)
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[BaseProcess]:
        return [self._workers[i].process for i in sorted(self._workers)]

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: Options = None) -> tuple[Tree, Info]:
        """Reset all environments, or those of `options["reset_mask"]`."""
        options = dict(options) if options is not None else None
        mask = np.ones(self.num_envs, bool) if options is None else options.pop("reset_mask", np.ones(self.num_envs, bool))
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        self.seeds = [old if new is None else new for old, new in zip(self.seeds, seeds, strict=True)]
        replies = self._ask([_request("reset", own_seed, options) if asked else None for own_seed, asked in zip(seeds, mask, strict=True)])
        self._replaced &= ~mask  # a new worker begins with a reset
        return self.observations, self._infos([self._first[i] if mask[i] and reply is None else reply for i, reply in enumerate(replies)])

    def step(self, actions: Tree) -> tuple[Tree, np.ndarray, np.ndarray, np.ndarray, Info]:
        """Step all environments. Rows of replaced workers are `lost`, and have the first observation of a new episode."""
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

    def call(self, name: str, *args: object) -> list[object]:
        """Return an attribute of each environment, or the results of a method."""
        return [None if reply is None else pickle.loads(reply) for reply in self._ask([_request("call", name, args)] * self.num_envs)]

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Set the lessons of `EnvParameters` in all environments and in those that will replace them.

        Raises `AttributeError`: they have no parameters. A worker would treat this as its own failure, so it is checked here.
        """
        if not self.takes_lessons:
            raise AttributeError("set_lessons")
        self.lessons = {**self.lessons, **lessons}
        self.call("set_lessons", lessons)

    def record(self, way: str | None) -> bool:
        """Record what this way of saving needs, starting with the first reset; return whether there is such a way."""
        self.way = way
        self._ask([_request("record", way)] * self.num_envs)
        return way is not None

    def get_states(self) -> State:
        """Return the states of all environments, and what replacing a worker depends on."""
        states: list[State | None] = [None] * self.num_envs
        while None in states:  # a worker that fails is replaced and asked again
            replies = self._ask([_request("get_state") if state is None else None for state in states])
            states = [pickle.loads(reply) if reply else state for state, reply in zip(states, replies, strict=True)]
        replaced = self._replaced.copy()
        first = tree_index(self.observations, replaced)  # the observations of the next step; indexing by an array copies
        masks = [pickle.loads(info).get(MASK) if info and lost else None for info, lost in zip(self._first, replaced, strict=True)]
        counts = {"seeds": list(self.seeds), "restarts": self.restarts.copy()}
        return {"envs": states, "replaced": replaced, "first": first, "first_masks": masks, **counts}

    def set_states(self, states: State) -> bool:
        """Restore the states of `get_states`; return whether that succeeded. If not, all workers are replaced."""
        replies = self._ask([_request("set_state", state) for state in states["envs"]], START_TIMEOUT)
        if not all(reply and pickle.loads(reply) for reply in replies):
            self._start_all()
            return False
        self._replaced = states["replaced"].copy()
        if self._replaced.any():
            for row, first in zip(tree_leaves(self.observations), tree_leaves(states["first"]), strict=True):
                row[self._replaced] = first
            masks = states.get("first_masks", [None] * self.num_envs)
            self._first = [None if mask is None else to_bytes({MASK: mask}) for mask in masks]
        self.seeds, self.restarts = list(states["seeds"]), states["restarts"].copy()
        return True

    def close_extras(self, **kwargs: object) -> None:
        """End all worker processes, whatever their state."""
        if os.getpid() == self._owner:  # and not a copy in a forked process
            close_children(self._workers.values(), ("close", ()))
            self._workers.clear()

    def _builder(self, i: int) -> Callable[[], gym.Env]:
        return self.build if self.first is None else partial(self.build, self.first + i)

    def _start(self, i: int) -> WorkerProcess:
        """Start a worker; it sends an empty reply when its environment is built."""
        self._end(i)
        mode = self.autoreset_mode.name
        self._workers[i] = worker = WorkerProcess(self.context, i, self._builder(i), *self.shared, mode, self.way)
        return worker

    def _end(self, i: int) -> None:
        if i in self._workers:
            self._workers.pop(i).kill()

    def _start_all(self) -> None:
        for i in range(self.num_envs):
            self._start(i)
        self._receive(range(self.num_envs), self.build_timeout)
        self._replaced[:] = False

    def _ask(self, requests: Sequence[bytes | None], timeout: float | None = None) -> list[bytes | None]:
        """Send requests and return the replies: None for workers that were not asked or were replaced."""
        asked = {i: request for i, request in enumerate(requests) if request is not None}
        for i, request in asked.items():
            self._workers[i].send(request)
        return self._receive(asked, self.step_timeout if timeout is None else timeout)

    def _receive(self, asked: Iterable[int], timeout: float) -> list[bytes | None]:
        deadline = time.monotonic() + timeout
        replies: list[bytes | None] = [None] * self.num_envs
        failures = {}
        for i in asked:
            try:
                replies[i] = self._workers[i].receive(timeout, deadline)
            except WorkerFailedError as error:
                failures[i] = str(error)
        for i, failure in failures.items():
            self._replace(i, failure)
        return replies

    def _replace(self, i: int, failure: str | None) -> None:
        """Replace a worker by a new one, which starts a new episode; raise `SettingError` after too many replacements."""
        while failure is not None:
            self._end(i)
            self.notices.append(self.failures.add(i, failure))
            self.restarts[i] += 1
            try:
                self._begin_episode(self._start(i), i)
                failure = None
            except WorkerFailedError as error:
                failure = str(error)
        self._replaced[i] = True

    def _begin_episode(self, worker: WorkerProcess, i: int) -> None:
        worker.receive(self.build_timeout)
        if self.lessons:
            worker.send(_request("call", "set_lessons", (self.lessons,)))
            worker.receive(self.step_timeout)
        seed = self.seeds[i]
        new_seed = None if seed is None else int(np.random.SeedSequence([seed, int(self.restarts[i])]).generate_state(1)[0])
        worker.send(_request("reset", new_seed, None))
        self._first[i] = worker.receive(self.step_timeout)

    def _infos(self, replies: Sequence[bytes | None]) -> Info:
        infos: Info = {}
        for i, reply in enumerate(replies):
            if reply:
                infos = merge_info(self, infos, pickle.loads(reply), i)
        return infos


def _request(command: str, *arguments: object) -> bytes:
    return to_bytes((command, arguments))


def make_wait(pipe: Connection) -> Callable[[float], object]:
    """Make a function that waits for a pipe; `Connection.poll` would make a new selector at each call, which is slow."""
    if not hasattr(select, "poll"):
        return pipe.poll
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLIN)
    return lambda seconds: poll.poll(1000 * seconds)
