"""Check the arguments of the Trainer before Lightning sees them, and build its own callbacks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytorch_lightning as pl

from lightning_rl.callbacks.checkpoints import BestModel, CheckpointConfig, SaveCheckpoints
from lightning_rl.callbacks.evaluation import EvaluationConfig, RolloutEvaluator
from lightning_rl.callbacks.progress import EnvStepsProgressBar
from lightning_rl.callbacks.recording import PlotCurve
from lightning_rl.callbacks.stopping import StopOnEvaluation
from lightning_rl.errors import SettingError, check_path
from lightning_rl.settings.fields import settings_of
from lightning_rl.settings.names import owners_of, way_out
from lightning_rl.training.run_folder import REPLACED

OWN_STEPS, PLAYS_EPISODES = "algorithms make their own gradient steps", "an evaluation plays episodes"
REFUSED_FLAGS = {
    "gradient_clip_val": ((), OWN_STEPS, "model.max_grad_norm"),
    "gradient_clip_algorithm": ((), OWN_STEPS, "model.max_grad_norm"),
    "accumulate_grad_batches": ((1,), OWN_STEPS, "a larger model.batch_size"),
    "val_check_interval": ((1.0,), PLAYS_EPISODES, "evaluation.every_n_env_steps"),
    "check_val_every_n_epoch": ((1,), PLAYS_EPISODES, "evaluation.every_n_env_steps"),
    "num_sanity_val_steps": ((0,), PLAYS_EPISODES, "evaluation.every_n_env_steps"),
    "limit_val_batches": ((1.0, 0, 0.0), PLAYS_EPISODES, "evaluation.episodes"),
    "limit_test_batches": ((1.0,), PLAYS_EPISODES, "evaluation.episodes"),
    "limit_predict_batches": ((1.0,), PLAYS_EPISODES, "evaluation.episodes"),
    "overfit_batches": ((0, 0.0), "experience is made by the policy", "limit_train_batches"),
}
"""Flags of Lightning's Trainer that have no effect here: their neutral values, the reason, and the setting to use instead."""


def check_flags(flags: Mapping[str, object], names: Iterable[str]) -> None:
    """Raise `SettingError` for flags that are unknown, have no effect here, or are set by environment variables.

    Args:
        flags: the flags that our Trainer passes to Lightning's.
        own: names of our Trainer's settings, for suggestions.
    """
    for name in flags.keys() - settings_of(pl.Trainer).keys():
        hint = way_out(name, [*settings_of(pl.Trainer), *names], in_python=True)
        if owners_of(name):
            hint = f"; it is a setting of the algorithm, such as lrl.{owners_of(name)[0]}(env, {name}=…)"
        raise SettingError(f"trainer.{name} is not a flag{hint}")
    for name in os.environ:
        if name.startswith("PL_TRAINER_"):
            raise SettingError(f"{name} is not read: give the Trainer {name.removeprefix('PL_TRAINER_').lower()}")
    for flag, (neutral, reason, instead) in REFUSED_FLAGS.items():
        value = flags.get(flag)
        same = any(value == default and type(value) is type(default) for default in neutral)  # 1 means one batch, 1.0 all batches
        if value is not None and not same:
            raise SettingError(f"trainer.{flag} {value!r}: {reason}; use {instead}")


def check_epochs(max_epochs: int | None, limit_train_batches: float | None) -> None:
    """Raise `SettingError` for several epochs in a run of one: only `limit_train_batches` makes epochs shorter."""
    if (
        max_epochs is not None
        and max_epochs > 1
        and (limit_train_batches is None or (limit_train_batches == 1.0 and isinstance(limit_train_batches, float)))
    ):
        instead = "use model.max_env_steps, or set trainer.limit_train_batches to the iterations of an epoch"
        raise SettingError(f"trainer.max_epochs {max_epochs}: a run is one epoch; {instead}")


def describe_zero_limits(trainer: pl.Trainer) -> list[str]:
    """Return a line for each limit of 0, with which a run has no iteration."""
    limits = ("max_steps", "max_epochs", "limit_train_batches")
    return [f"trainer.{name} 0: nothing is trained" for name in limits if getattr(trainer, name) == 0]


def check_barebones(evaluation: EvaluationConfig | None, checkpoint: CheckpointConfig | None) -> None:
    """Raise `SettingError` if a setting that barebones turns off is set."""
    for name, section, default in (("evaluation", evaluation, EvaluationConfig()), ("checkpoint", checkpoint, CheckpointConfig())):
        if section not in (None, default):
            raise SettingError(f"trainer.barebones leaves out {name}: do not set it")


def check_run_name(name: str | None) -> None:
    """Raise `SettingError` unless the name is None, or a folder name without the suffix of replaced runs."""
    if name is None:
        return
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
        raise SettingError(f"trainer.run_name must be the name of a folder, got {name!r}")
    check_path("trainer.run_name", name)
    if name.endswith(REPLACED):
        raise SettingError(f"trainer.run_name {name!r}: the suffix {REPLACED} is for runs that --force replaces; choose another name")


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Raise `SettingError` for a function or a class among callbacks. Callbacks of the package `lightning` are not `pl.Callback` either."""
    for callback in callbacks:
        if isinstance(callback, type) or not hasattr(callback, "on_train_start"):
            name = getattr(callback, "__name__", repr(callback))
            instead = f"write {name}(…)" if isinstance(callback, type) else "it must be a pytorch_lightning.Callback, see docs/your_own.md"
            raise SettingError(f"trainer.callbacks: {name} is not a callback; {instead}")


def check_loggers(loggers: object) -> None:
    """Raise `SettingError` unless this is true, false, a logger, or a list of loggers."""
    for logger in loggers if isinstance(loggers, list | tuple) else [loggers]:
        if logger is not None and not isinstance(logger, bool) and not hasattr(logger, "log_metrics"):
            raise SettingError(f"trainer.logger: {logger!r} is not a logger; give one such as WandbLogger(), or a list of them")


def check_beginning(ckpt_path: object, init_from: object) -> None:
    """Raise `SettingError` if both `ckpt_path` and `init_from` are given."""
    if ckpt_path is not None and init_from is not None:
        raise SettingError("ckpt_path continues a run and init_from begins one: give one of them")


def own_callbacks(
    given: list[pl.Callback], evaluation: EvaluationConfig | None, checkpoint: CheckpointConfig | None, shows_progress: bool, plots: bool
) -> list[pl.Callback]:
    """Build the Trainer's own callbacks: evaluation and stopping by it, checkpoints, progress bar and curve.

    Raises `SettingError`: checkpoints monitor a metric of evaluations, but evaluations are off.
    """
    callbacks: list[pl.Callback] = []
    if evaluation is not None:
        settings = dict(vars(evaluation))
        ends = {name: settings.pop(name) for name in ("stop_at", "patience")}
        if not any(isinstance(callback, RolloutEvaluator) for callback in given):
            callbacks.append(RolloutEvaluator(**settings))
        if any(end is not None for end in ends.values()):
            callbacks.append(StopOnEvaluation(**ends))
    if checkpoint is not None:
        if evaluation is None and checkpoint.monitor != CheckpointConfig.monitor and not given:
            raise SettingError(f"checkpoint.monitor {checkpoint.monitor!r} needs evaluations, but evaluation is null")
        saving = dict(vars(checkpoint))
        callbacks += [BestModel(monitor=saving.pop("monitor"), mode=saving.pop("mode")), SaveCheckpoints(**saving)]
    if shows_progress and not any(isinstance(callback, pl.callbacks.ProgressBar) for callback in given):
        callbacks.append(EnvStepsProgressBar())
    if plots:
        callbacks.append(PlotCurve())
    return callbacks
