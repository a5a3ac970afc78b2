"""Settings of actors, and the workers that they choose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from torch import nn

from lightning_rl.actors.processes import Processes
from lightning_rl.actors.ray_workers import RayWorkers
from lightning_rl.actors.workers import Build, InThreads, InTurn, Workers
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import prepare_package
from lightning_rl.errors import SettingError, check_choice, check_flag, check_range

BACKENDS = ("in_process", "threads", "processes", "ray")


@dataclass(frozen=True)
class ActorsConfig:
    """How many actors there are and where; each steps `env.num_envs` environments with a policy of its own.

    Args:
        num_actors: how many, 2 unless given.
        backend: `in_process` (in turn, with the newest policy), `threads` of this process (for environments that wait for something else),
            `processes` on this machine, which it is unless given, or `ray` for many machines.
        rollouts_per_batch: of `n_steps` steps each; as many as actors unless given.
        queue_factor: how many batches may wait beside the one that is learned from, 1 unless given. Rollouts are at most
            `queue_factor + num_actors / rollouts_per_batch` updates old, rounded up, where actors are alike; more keeps them busy.
        max_policy_lag: rollouts of policies older than so many updates are dropped; none unless given.
        ordered: actors wait for the newest policy and rollouts come in their order, so that runs are reproducible. In one process always.
        timeout: of `processes` and `ray`: seconds after which an actor that does not answer is started anew; 60 unless given, and more than
            its environments take for a rollout.
        max_restarts: of these: how often each actor may be started anew in an hour, as it died or froze; 10 unless given.
        address: of a Ray cluster such as `auto` or `ray://host:10001`; a local one is started unless given.
    """

    num_actors: int = 2
    backend: Literal["in_process", "threads", "processes", "ray"] = "processes"
    rollouts_per_batch: int | None = None
    queue_factor: float | None = None
    max_policy_lag: int | None = None
    ordered: bool = False
    timeout: float | None = None
    max_restarts: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        check_range("actors.num_actors", self.num_actors, 1, whole=True)
        check_choice("actors.backend", self.backend, BACKENDS)
        check_flag("actors.ordered", self.ordered)
        for name, low in {"rollouts_per_batch": 1, "max_policy_lag": 0, "max_restarts": 0}.items():
            if getattr(self, name) is not None:
                check_range(f"actors.{name}", getattr(self, name), low, whole=True)
        if self.queue_factor is not None:
            check_range("actors.queue_factor", self.queue_factor, 0)
        if self.timeout is not None:
            check_range("actors.timeout", self.timeout, 0, open_low=True)
        for name in ("timeout", "max_restarts"):
            if getattr(self, name) is not None and self.backend not in ("processes", "ray"):
                raise SettingError(f"actors.{name} is of backends processes and ray, and this one is {self.backend}; leave it out")
        for name in ("queue_factor", "max_policy_lag"):
            if getattr(self, name) is not None and self.in_order:
                raise SettingError(f"actors.{name}: actors in their order always have the newest policy; leave it out")
        if self.address is not None and self.backend != "ray":
            raise SettingError(f"actors.address is of backend ray, and this one is {self.backend}; leave it out")

    @property
    def in_order(self) -> bool:
        """Whether actors act in turn, with the newest policy."""
        return self.ordered or self.backend == "in_process"

    @property
    def batch(self) -> int:
        """Rollouts of a batch."""
        return self.rollouts_per_batch or self.num_actors

    @property
    def ahead(self) -> int:
        """Rollouts that are asked for at once, so that actors have something to do while others are learned from."""
        return self.num_actors + math.ceil((1.0 if self.queue_factor is None else self.queue_factor) * self.batch)


IN_A_THREAD = ActorsConfig(num_actors=1, backend="threads", queue_factor=0)
"""One actor that makes the next rollout while the last one is learned from."""


@dataclass(frozen=True)
class WithRegistration:
    """Makes a worker where its environment may not be registered: a script or `--import` did that here."""

    build: Any
    spec: EnvSpec | None

    def __call__(self, index: int, restarts: int, network: nn.Module) -> Any:
        if self.spec is not None:
            prepare_package(self.spec.id)  # which may register it there, too
            gym.registry.setdefault(self.spec.id, self.spec)
        return self.build(index, restarts, network)


def make_workers(build: Build, config: ActorsConfig, network: nn.Module) -> Workers:
    """As many workers as the settings say, where they say."""
    if config.backend == "in_process":
        return InTurn(build, config.num_actors, network)
    if config.backend == "threads":
        return InThreads(build, config.num_actors, network)
    env = build.env  # type: ignore[attr-defined]
    build = WithRegistration(build, gym.registry.get(env.id) if isinstance(env, EnvConfig) else None)
    given: dict[str, Any] = {name: getattr(config, name) for name in ("timeout", "max_restarts") if getattr(config, name) is not None}
    if config.backend == "ray":
        return RayWorkers(build, config.num_actors, network, address=config.address, **given)
    return Processes(build, config.num_actors, network, **given)
