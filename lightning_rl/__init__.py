"""Reinforcement-learning algorithms as PyTorch Lightning modules."""

from __future__ import annotations

from lightning_rl.processes import startup

if startup.is_program():  # before the slow imports
    startup.leave_when_interrupted()

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_rl import envs as envs  # registers our environments
from lightning_rl.settings.names import ALGORITHMS as ALGORITHMS
from lightning_rl.settings.names import MODELS as MODELS

if TYPE_CHECKING:  # what `__getattr__` imports, for type checkers and editors
    from lightning_rl.actors.config import ActorsConfig as ActorsConfig
    from lightning_rl.algorithms.a2c import A2C as A2C
    from lightning_rl.algorithms.algorithm import Algorithm as Algorithm
    from lightning_rl.algorithms.ars import ARS as ARS
    from lightning_rl.algorithms.awac import AWAC as AWAC
    from lightning_rl.algorithms.bc import BehavioralCloning as BehavioralCloning
    from lightning_rl.algorithms.cql import CQL as CQL
    from lightning_rl.algorithms.crossq import CrossQ as CrossQ
    from lightning_rl.algorithms.dagger import DAgger as DAgger
    from lightning_rl.algorithms.dqn import DQN as DQN
    from lightning_rl.algorithms.evolution import EvolutionStrategies as EvolutionStrategies
    from lightning_rl.algorithms.impala import IMPALA as IMPALA
    from lightning_rl.algorithms.iql import IQL as IQL
    from lightning_rl.algorithms.multi_agent import MultiAgent as MultiAgent
    from lightning_rl.algorithms.poca import POCA as POCA
    from lightning_rl.algorithms.ppo import PPO as PPO
    from lightning_rl.algorithms.pqn import PQN as PQN
    from lightning_rl.algorithms.sac import SAC as SAC
    from lightning_rl.algorithms.td3 import TD3 as TD3
    from lightning_rl.algorithms.td3_bc import TD3BC as TD3BC
    from lightning_rl.algorithms.tqc import TQC as TQC
    from lightning_rl.algorithms.trpo import TRPO as TRPO
    from lightning_rl.callbacks.checkpoints import (
        BestModel as BestModel,
    )
    from lightning_rl.callbacks.checkpoints import (
        CheckpointConfig as CheckpointConfig,
    )
    from lightning_rl.callbacks.checkpoints import (
        SaveCheckpoints as SaveCheckpoints,
    )
    from lightning_rl.callbacks.curriculum import Curriculum as Curriculum
    from lightning_rl.callbacks.evaluation import (
        EvaluationConfig as EvaluationConfig,
    )
    from lightning_rl.callbacks.evaluation import (
        MultiEvaluator as MultiEvaluator,
    )
    from lightning_rl.callbacks.evaluation import (
        RolloutEvaluator as RolloutEvaluator,
    )
    from lightning_rl.callbacks.iteration import TargetNetworkUpdate as TargetNetworkUpdate
    from lightning_rl.callbacks.recording import PlotCurve as PlotCurve
    from lightning_rl.callbacks.recording import RecordDemonstrations as RecordDemonstrations
    from lightning_rl.callbacks.recording import Video as Video
    from lightning_rl.callbacks.stopping import StopOnEvaluation as StopOnEvaluation
    from lightning_rl.data.replay.hindsight import RelabelConfig as RelabelConfig
    from lightning_rl.data.replay.storage import ReplayConfig as ReplayConfig
    from lightning_rl.data.self_play import SelfPlayConfig as SelfPlayConfig
    from lightning_rl.demonstrations.dataset import Demonstration as Demonstration
    from lightning_rl.demonstrations.dataset import load_demonstrations as load_demonstrations
    from lightning_rl.demonstrations.recorder import RecordEpisodes as RecordEpisodes
    from lightning_rl.envs.config import EnvConfig as EnvConfig
    from lightning_rl.errors import SettingError as SettingError
    from lightning_rl.exporting.export import export_policy as export_policy
    from lightning_rl.exporting.push import push as push
    from lightning_rl.networks.memory import GRU as GRU
    from lightning_rl.networks.memory import LSTM as LSTM
    from lightning_rl.policy import Policy as Policy
    from lightning_rl.policy import evaluate as evaluate
    from lightning_rl.policy import load_policy as load_policy
    from lightning_rl.policy import make_env as make_env
    from lightning_rl.reports.report import compare as compare
    from lightning_rl.settings.fields import Range as Range
    from lightning_rl.training.behaviors import Behavior as Behavior
    from lightning_rl.training.behaviors import FrozenPolicy as FrozenPolicy
    from lightning_rl.training.side_learners import CloningConfig as CloningConfig
    from lightning_rl.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

EXPORTS = {
    **MODELS,
    "Algorithm": "lightning_rl.algorithms.algorithm",
    "Behavior": "lightning_rl.training.behaviors",
    "FrozenPolicy": "lightning_rl.training.behaviors",
    "Range": "lightning_rl.settings.fields",
    "EnvConfig": "lightning_rl.envs.config",
    "ActorsConfig": "lightning_rl.actors.config",
    "Trainer": "lightning_rl.training.trainer",
    "EvaluationConfig": "lightning_rl.callbacks.evaluation",
    "CheckpointConfig": "lightning_rl.callbacks.checkpoints",
    "LSTM": "lightning_rl.networks.memory",
    "GRU": "lightning_rl.networks.memory",
    "ReplayConfig": "lightning_rl.data.replay.storage",
    "RelabelConfig": "lightning_rl.data.replay.hindsight",
    "SelfPlayConfig": "lightning_rl.data.self_play",
    "CloningConfig": "lightning_rl.training.side_learners",
    "Demonstration": "lightning_rl.demonstrations.dataset",
    "TargetNetworkUpdate": "lightning_rl.callbacks.iteration",
    "Curriculum": "lightning_rl.callbacks.curriculum",
    "RolloutEvaluator": "lightning_rl.callbacks.evaluation",
    "MultiEvaluator": "lightning_rl.callbacks.evaluation",
    "PlotCurve": "lightning_rl.callbacks.recording",
    "RecordDemonstrations": "lightning_rl.callbacks.recording",
    "Video": "lightning_rl.callbacks.recording",
    "RecordEpisodes": "lightning_rl.demonstrations.recorder",
    "load_demonstrations": "lightning_rl.demonstrations.dataset",
    "StopOnEvaluation": "lightning_rl.callbacks.stopping",
    "BestModel": "lightning_rl.callbacks.checkpoints",
    "SaveCheckpoints": "lightning_rl.callbacks.checkpoints",
    "Policy": "lightning_rl.policy",
    "load_policy": "lightning_rl.policy",
    "make_env": "lightning_rl.policy",
    "evaluate": "lightning_rl.policy",
    "compare": "lightning_rl.reports.report",
    "export_policy": "lightning_rl.exporting.export",
    "push": "lightning_rl.exporting.push",
    "SettingError": "lightning_rl.errors",
}

__all__ = [*EXPORTS, "__version__"]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # else any misspelled name would have a type

    def __getattr__(name: str) -> object:
        # imported on first use: `lightning-rl --version` needs no torch
        if name not in EXPORTS:
            raise AttributeError(f"module 'lightning_rl' has no attribute {name!r}")
        with startup.importing():
            globals()[name] = getattr(import_module(EXPORTS[name]), name)
        return globals()[name]
