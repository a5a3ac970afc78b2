"""Reinforcement-learning algorithms as PyTorch Lightning modules."""

from __future__ import annotations

from lightning_rl import startup

if startup.is_program():  # before the slow imports
    startup.leave_when_interrupted()

from importlib import import_module
from typing import Any

from lightning_rl import envs as envs  # registers our environments

__version__ = "0.1.0"

ALGORITHMS = {
    "PPO": "lightning_rl.algorithms.ppo",
    "A2C": "lightning_rl.algorithms.a2c",
    "TRPO": "lightning_rl.algorithms.trpo",
    "IMPALA": "lightning_rl.algorithms.impala",
    "POCA": "lightning_rl.algorithms.poca",
    "SAC": "lightning_rl.algorithms.sac",
    "TQC": "lightning_rl.algorithms.tqc",
    "CrossQ": "lightning_rl.algorithms.crossq",
    "DQN": "lightning_rl.algorithms.dqn",
    "PQN": "lightning_rl.algorithms.pqn",
    "TD3": "lightning_rl.algorithms.td3",
    "IQL": "lightning_rl.algorithms.iql",
    "CQL": "lightning_rl.algorithms.cql",
    "TD3BC": "lightning_rl.algorithms.td3_bc",
    "AWAC": "lightning_rl.algorithms.awac",
    "EvolutionStrategies": "lightning_rl.algorithms.evolution",
    "ARS": "lightning_rl.algorithms.ars",
    "BehavioralCloning": "lightning_rl.algorithms.bc",
    "DAgger": "lightning_rl.algorithms.dagger",
}

MODELS = {**ALGORITHMS, "MultiAgent": "lightning_rl.algorithms.multi_agent"}
"""What can be trained: an algorithm, or several algorithms in one environment."""
EXPORTS = {
    **MODELS,
    "Algorithm": "lightning_rl.algorithms.algorithm",
    "Behavior": "lightning_rl.training.behaviors",
    "FrozenPolicy": "lightning_rl.training.behaviors",
    "Range": "lightning_rl.training.arguments",
    "EnvConfig": "lightning_rl.envs.config",
    "ActorsConfig": "lightning_rl.actors.config",
    "Trainer": "lightning_rl.training.trainer",
    "EvaluationConfig": "lightning_rl.callbacks.evaluation",
    "CheckpointConfig": "lightning_rl.callbacks.checkpoints",
    "LSTM": "lightning_rl.networks.memory",
    "GRU": "lightning_rl.networks.memory",
    "ReplayConfig": "lightning_rl.data.replay.storage",
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


def __getattr__(name: str) -> Any:
    # imported on first use: `lightning-rl --version` needs no torch
    if name in EXPORTS:
        with startup.importing():
            return getattr(import_module(EXPORTS[name]), name)
    raise AttributeError(f"module 'lightning_rl' has no attribute {name!r}")
