"""Where workers live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from torch import nn

from lightning_rl.actors.config import ActorsConfig
from lightning_rl.actors.processes import Processes
from lightning_rl.actors.ray_workers import RayWorkers
from lightning_rl.actors.threads import InThreads
from lightning_rl.actors.workers import Build, InTurn, Workers
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.packages import prepare_package


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
