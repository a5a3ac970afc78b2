"""Callbacks around learning, such as evaluation and checkpoints, and what they need of an algorithm, of its run and of its Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import pytorch_lightning as pl
from torch import nn

from lightning_rl.data.collector import Collector
from lightning_rl.data.episodes import Finished
from lightning_rl.data.rollout import ExperienceDataset
from lightning_rl.envs.agents.stepper import Opponent
from lightning_rl.envs.config import EnvSource
from lightning_rl.envs.lessons import PlainSampler
from lightning_rl.networks.acting import PolicyNetwork
from lightning_rl.spaces import Spaces
from lightning_rl.types import State

Kind = TypeVar("Kind")


class Run(Protocol):
    """The run of an algorithm, or of several that learn together."""

    count_so_far: int
    current_env: EnvSource
    parameter_values: dict[str, PlainSampler]
    saves_run: bool
    began_at: int

    @property
    def learners(self) -> Mapping[str, AlgorithmRun]: ...
    @property
    def algorithms(self) -> Mapping[str, AlgorithmRun]: ...
    def finished_episodes(self) -> dict[str, list[Finished]]: ...
    def in_short(self) -> str: ...
    def validate(self) -> dict[str, float]: ...
    def check_experience(self) -> None: ...
    def end_iteration(self) -> None: ...
    def call_last_hook(self, *arguments: object) -> None: ...
    def close_iteration(self) -> None: ...
    def log_row(self, metrics: dict[str, float]) -> None: ...
    def begin_task(self) -> None: ...
    def interrupt(self, abandons: bool) -> None: ...
    def end(self) -> None: ...


class AlgorithmRun(Protocol):
    """A LightningModule whose batches are iterations: it counts `counter` (`env_steps` or `updates`, in words `counted`) up to `length`."""

    run: Run
    counter: str
    counted: str
    count: int
    length: int
    finished: bool
    updates: int
    max_env_steps: int
    env: EnvSource
    spaces: Spaces
    network: PolicyNetwork
    target_networks: Sequence[tuple[nn.Module, nn.Module]]
    dataset: ExperienceDataset
    collector: Collector
    trainer: pl.Trainer

    @property
    def has_trainer(self) -> bool: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def say(self, text: str) -> None: ...
    def make_opponent(self, name: str, num_rows: int) -> Opponent: ...
    def state_dict(self) -> State: ...


def callbacks_of(trainer: pl.Trainer, kind: type[Kind]) -> list[Kind]:
    """Return the callbacks of a Trainer that are instances of a class; those of the package `lightning` are not `pl.Callback`s."""
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]
