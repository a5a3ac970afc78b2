"""Where workers live."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_rl.actors.config import ActorsConfig
from lightning_rl.actors.processes import Processes
from lightning_rl.actors.ray_workers import RayWorkers
from lightning_rl.actors.threads import InThreads
from lightning_rl.actors.workers import Build, InTurn, Workers


def make_workers(build: Build, config: ActorsConfig, network: nn.Module) -> Workers:
    """As many workers as the settings say, where they say."""
    if config.backend == "in_process":
        return InTurn(build, config.num_actors, network)
    if config.backend == "threads":
        return InThreads(build, config.num_actors, network)
    given: dict[str, Any] = {name: getattr(config, name) for name in ("timeout", "max_restarts") if getattr(config, name) is not None}
    if config.backend == "ray":
        return RayWorkers(build, config.num_actors, network, address=config.address, **given)
    return Processes(build, config.num_actors, network, **given)
