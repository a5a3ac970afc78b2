"""Settings of actors, and the workers that they select."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from torch import nn

from lightning_rl.actors.actor import BuildActor
from lightning_rl.actors.evaluator import BuildEvaluator
from lightning_rl.actors.processes import ProcessWorkers
from lightning_rl.actors.ray_workers import RayWorkers
from lightning_rl.actors.workers import Build, LocalWorkers, ThreadWorkers, Worker, Workers
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import prepare_package
from lightning_rl.errors import SettingError
from lightning_rl.processes.children import ANSWER_TIMEOUT, LONGEST_WAIT, MAX_RESTARTS
from lightning_rl.settings.fields import Range, read_fields

Backend = Literal["in_process", "threads", "processes", "ray"]


@dataclass(frozen=True)
class ActorsConfig:
    """Number and place of actors; each steps `env.num_envs` environments with its own copy of the policy.

    Args:
        num_actors: number of actors.
        backend: `in_process` (one after the other, with the newest policy), `threads` of this process (for environments that wait for
            something else), `processes` on this machine, or `ray` for many machines.
        rollouts_per_batch: number of rollouts in a batch, of `n_steps` steps each (default: `num_actors`).
        queue_factor: how many batches may wait in addition to the one that is learned from (default: 1). If actors are equally fast,
            rollouts are at most `queue_factor + num_actors / rollouts_per_batch` updates old, rounded up. Larger values keep actors busy.
        max_policy_lag: drop rollouts of policies that are more than this many updates old (default: keep all).
        ordered: actors wait for the newest policy and rollouts arrive in order, so that runs are reproducible. Always true for
            `in_process`.
        timeout: for `processes` and `ray`: restart an actor that does not answer for this many seconds (default: 60); must be more than its
            environments take for a rollout.
        max_restarts: for `processes` and `ray`: how often each actor may be restarted in an hour because it died or froze (default: 10).
        address: address of a Ray cluster such as `auto` or `ray://host:10001` (default: start a local one).
    """

    num_actors: Annotated[int, Range(1)] = 2
    backend: Backend = "processes"
    rollouts_per_batch: Annotated[int, Range(1)] | None = None
    queue_factor: Annotated[float, Range(0)] | None = None
    max_policy_lag: Annotated[int, Range(0)] | None = None
    ordered: bool = False
    timeout: Annotated[float, Range(0, open_low=True)] | None = None
    max_restarts: Annotated[int, Range(0)] | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        read_fields(self, "actors.")
        given = {name for name, value in vars(self).items() if value is not None}
        for name in ("timeout", "max_restarts"):
            if name in given and self.backend not in ("processes", "ray"):
                raise SettingError(f"actors.{name} is for backends processes and ray, not for {self.backend}; remove it")
        for name in ("queue_factor", "max_policy_lag"):
            if name in given and self.in_order:
                raise SettingError(f"actors.{name} has no effect on ordered actors, which always have the newest policy; remove it")
        if "address" in given and self.backend != "ray":
            raise SettingError(f"actors.address is for backend ray, not for {self.backend}; remove it")

    @property
    def in_order(self) -> bool:
        """Return whether rollouts arrive in order, all with the newest policy."""
        return self.ordered or self.backend == "in_process"

    @property
    def batch(self) -> int:
        """Return the number of rollouts in a batch."""
        return self.rollouts_per_batch or self.num_actors

    @property
    def ahead(self) -> int:
        """Return the number of rollouts requested in advance, so that actors are busy while a batch is learned from."""
        return self.num_actors + math.ceil((1.0 if self.queue_factor is None else self.queue_factor) * self.batch)


IN_A_THREAD = ActorsConfig(num_actors=1, backend="threads", queue_factor=0)
"""One actor that collects the next rollout while the last one is learned from."""


@dataclass(frozen=True)
class BuildRegistered:
    """Builds a worker in a process in which its environment may not be registered, as by a script or `--import` here."""

    build: Build
    spec: EnvSpec | None

    def __call__(self, index: int, restarts: int, network: nn.Module) -> Worker:
        if self.spec is not None:
            prepare_package(self.spec.id)  # may also register it there
            gym.registry.setdefault(self.spec.id, self.spec)
        return self.build(index, restarts, network)


def make_workers(build: BuildActor | BuildEvaluator, config: ActorsConfig, network: nn.Module) -> Workers:
    """Start the workers for these settings."""
    if config.backend == "in_process":
        return LocalWorkers(build, config.num_actors, network)
    if config.backend == "threads":
        return ThreadWorkers(build, config.num_actors, network)
    registered = BuildRegistered(build, gym.registry.get(build.env.name) if isinstance(build.env, EnvConfig) else None)
    timeout = ANSWER_TIMEOUT if config.timeout is None else min(config.timeout, LONGEST_WAIT)
    max_restarts = MAX_RESTARTS if config.max_restarts is None else config.max_restarts
    if config.backend == "ray":
        return RayWorkers(registered, config.num_actors, network, timeout, max_restarts, config.address)
    return ProcessWorkers(registered, config.num_actors, network, timeout, max_restarts)
