"""Running algorithms in tests: tiny ones, with a plain Trainer that adds nothing."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import Logger
from torch import Tensor

from lightning_rl import (
    A2C,
    AWAC,
    CQL,
    DQN,
    IMPALA,
    IQL,
    POCA,
    PPO,
    PQN,
    SAC,
    TD3,
    TD3BC,
    TRPO,
    BehavioralCloning,
    DAgger,
    EvolutionStrategies,
)
from lightning_rl.algorithms.algorithm import Algorithm
from tests.experts import at_random

ON_POLICY = [PPO, A2C, IMPALA]
OFF_POLICY = [SAC, DQN, TD3]
OFFLINE = [IQL, AWAC, TD3BC, CQL]
ALL = ON_POLICY + OFF_POLICY
"""What steps environments to learn."""
TWINS = (A2C, TD3)
"""Algorithms that differ from PPO and SAC in how they learn; what surrounds it, from collecting to saving, is the same code."""
REPLAY = {"buffer_size": 200, "batch_size": 8, "learning_starts": 16, "train_freq": 4, "steps_per_iteration": 16}
TINY: dict[type[Algorithm], dict[str, Any]] = {
    PPO: {"n_steps": 8, "batch_size": 8, "n_epochs": 2},
    A2C: {"n_steps": 8},
    IMPALA: {"n_steps": 8},
    PQN: {"n_steps": 8, "batch_size": 8, "n_epochs": 2},
    TRPO: {"n_steps": 8, "batch_size": 8, "n_critic_updates": 2},
    POCA: {"n_steps": 8, "batch_size": 4, "n_epochs": 2},
    SAC: REPLAY,
    DQN: REPLAY | {"learning_rate": 1e-3, "target_update_interval": 4},
    TD3: REPLAY,
    **dict.fromkeys(OFFLINE, REPLAY | {"updates_per_iteration": 16}),
    DAgger: REPLAY,
    BehavioralCloning: {"updates_per_iteration": 16, "batch_size": 8},
    EvolutionStrategies: {"episodes_per_generation": 4, "shaping": "raw", "sigma": 0.5, "learning_rate": 1e-3},
}
"""Two environments of eight steps: 16 environment steps an iteration, in two minibatches for PPO; four updates for those that replay, from
the second iteration on. An iteration of cloning, and of what learns offline, has 16 updates, one of evolution strategies
4 episodes of 4 steps."""
UPDATES = {PPO: 6 * 4, A2C: 6, IMPALA: 6, SAC: 5 * 4, DQN: 5 * 4, TD3: 5 * 4, EvolutionStrategies: 6}
"""Of a tiny run."""


def twins_slow(algorithms: list[Any]) -> list[Any]:
    """The algorithms of a test of what is not their own: twins are slow."""
    return [pytest.param(each, marks=pytest.mark.slow) if each in TWINS else each for each in algorithms]


def tiny(algorithm: type[Algorithm], env_id: str | None = None, **settings: Any) -> Any:
    """The same small model each time: 6 iterations of 16 environment steps (updates from random demonstrations) unless told otherwise."""
    home = "tests.environments:ScriptedBox-v0" if issubclass(algorithm, TD3 | CQL) else "tests.environments:Scripted-v0"
    four_steps = {"kwargs": {"period": 4}} if algorithm is EvolutionStrategies and env_id is None else {}
    if issubclass(algorithm, POCA) and (env_id is None or ":" in env_id):
        env_id, settings = "tests.agents.Crew", settings | {"env": in_crew(env_id or home, settings.get("env", {}))}
    env = {"id": env_id or home, "num_envs": 2} | four_steps | settings.pop("env", {})
    torch.manual_seed(settings.pop("seed", 0))
    own = next(TINY[cls] for cls in algorithm.__mro__ if cls in TINY)
    if algorithm.counter == "updates" and "dataset" not in settings:
        settings["dataset"] = at_random(env["id"], repr(env.get("kwargs", {})))
    length = "max_env_steps" if settings.get("online") else f"max_{algorithm.counter}"
    return algorithm(env, **({"net_arch": [8], length: 96} | own | settings))


def in_crew(env_id: str, env: dict[str, Any]) -> dict[str, Any]:
    """The settings of an environment of one agent, as those of one crew of two such."""
    return {"num_envs": 1} | env | {"kwargs": {"env_id": env_id, **env.get("kwargs", {})}}


def fit(model: Algorithm, ckpt_path: Any = None, **arguments: Any) -> pl.Trainer:
    """Train, and return the trainer."""
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(**(plain | {"accelerator": "cpu", "log_every_n_steps": 1, "max_epochs": -1} | arguments))
    trainer.fit(model, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer


def weights(model: Algorithm) -> Tensor:
    """All parameters of the network, one after the other."""
    return torch.nn.utils.parameters_to_vector(model.network.parameters()).detach().clone()


class Rows(Logger):
    """Keeps what is logged: `(step, metrics)` rows."""

    name = version = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass
