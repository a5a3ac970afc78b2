"""Callbacks of every run, for target networks and the ends of iterations and runs; hooks around gradients."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import TypeVar

import pytorch_lightning as pl
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_rl.callbacks import AlgorithmRun, callbacks_of
from lightning_rl.callbacks.checkpoints import SaveCheckpoints
from lightning_rl.callbacks.curriculum import Curriculum
from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.callbacks.progress import EnvStepsProgressBar
from lightning_rl.callbacks.recording import PlotCurve
from lightning_rl.callbacks.self_play import SelfPlay
from lightning_rl.callbacks.stopping import check_savers, follow_evaluations, forget_reasons
from lightning_rl.errors import SettingError, check_range, is_interrupt
from lightning_rl.networks.changes import changes_of, copy_network, structure_of

Network = TypeVar("Network", bound=nn.Module)
REFUSED_CALLBACKS = {
    "BatchSizeFinder": "batch_size or num_envs",
    "LearningRateFinder": "learning_rate",
    "GradientAccumulationScheduler": "a larger batch_size",
    "BackboneFinetuning": "a configure_optimizers that leaves the backbone out",
    "SpikeDetection": "on_nan",
    "BasePredictionWriter": "the episodes that trainer.predict returns",
}
"""Callbacks of Lightning that cannot work here, and what to use instead."""
LIGHTNING = ("pytorch_lightning.", "lightning.pytorch.")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class TargetNetworkUpdate(pl.Callback):
    """Move each target network towards its online network after every `every_n_updates` updates.

    θ̄ ← τ θ + (1 − τ) θ̄ for the weights; buffers, such as normalization statistics, are copied. Algorithms with target networks add
    this callback automatically, with their `tau` and `target_update_interval`, unless the Trainer already has one.

    Args:
        tau: fraction to move; 1.0 copies the weights (DQN), 0.005 tracks slowly (SAC).
        every_n_updates: updates (joint learning steps) between moves.
    """

    def __init__(self, tau: float = 0.005, every_n_updates: int = 1) -> None:
        check_range("tau", tau, 0, 1, open_low=True)
        check_range("target_update_interval", every_n_updates, 1, whole=True)
        self.tau, self.every_n_updates = tau, every_n_updates

    def setup(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        if not getattr(pl_module, "target_networks", ()):
            raise SettingError(f"TargetNetworkUpdate: {type(pl_module).__name__} has no target networks")
        for networks in pl_module.target_networks:
            match_target(*networks)

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        online, target = (nn.ModuleList(networks) for networks in zip(*pl_module.target_networks, strict=True))
        self.weights = list(target.parameters()), list(online.parameters())
        self.buffers = list(zip(target.buffers(), online.buffers(), strict=True))

    def on_update_end(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Move the target networks if a move is due."""
        if algorithm.updates % self.every_n_updates:
            return
        with torch.no_grad():
            get_ema_multi_avg_fn(1 - self.tau)(*self.weights, None)
            for target, online in self.buffers:
                target.copy_(online)


def make_target(online: Network) -> Network:
    """Return a copy of a network without gradients."""
    return copy_network(online).requires_grad_(False)


def match_target(online: nn.Module, target: nn.Module) -> None:
    """Make a target a copy again of an online network that was given other parts afterwards, such as layers or spectral normalization.

    The target keeps its weights, if these still fit, and hooks of the online network are not copied.
    """
    fits = online.state_dict().keys() == target.state_dict().keys()
    changes = changes_of(structure_of(target), structure_of(online))
    if not fits or not all(place.startswith("hooks of ") for place in changes):
        copied = make_target(online)
        if fits:
            copied.load_state_dict(target.state_dict())
        target.__class__ = copied.__class__
        vars(target).clear()
        vars(target).update(vars(copied))


BEFORE_USERS = (SelfPlay, Curriculum, RolloutEvaluator)
"""Callbacks that act before the user's at the end of an iteration, in this order."""


class EndIteration(pl.Callback):
    """End each iteration, as the first of all callbacks.

    Averaged weights, ratings, lessons and evaluations come next, so that the user's callbacks see a finished iteration. After these,
    `CloseIteration` calls the module's own hook, and checkpoints are saved last, with all that hooks have changed.
    """

    def setup(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        if trainer.precision not in PRECISIONS:
            raise SettingError(f"trainer.precision {trainer.precision}: returns need float32; use one of {', '.join(PRECISIONS)}")
        averages = [callback for callback in callbacks_of(trainer, object) if is_average(callback)]
        first = [self, *averages, *(callback for kind in BEFORE_USERS for callback in callbacks_of(trainer, kind))]
        last = [callback for kind in AFTER_USERS for callback in callbacks_of(trainer, kind)]
        others = [callback for callback in trainer.callbacks if callback not in first + last]  # type: ignore[attr-defined]
        trainer.callbacks = [*first, *others, *last]  # type: ignore[attr-defined]
        check_savers(trainer)
        check_averages(trainer)
        follow_evaluations(trainer, bool(callbacks_of(trainer, RolloutEvaluator)))
        bar = trainer.progress_bar_callback
        self.shows_return = bar is not None and not isinstance(bar, EnvStepsProgressBar)

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        pl_module.run.check_experience()
        forget_reasons(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.completed == 0:  # a hook skips all batches: epochs would repeat forever
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        """Reorder callbacks: averaged weights enter the model after the last save of the learned ones, before the user's callbacks run."""
        averages = [callback for callback in callbacks_of(trainer, object) if is_average(callback)]
        if averages:
            before = [self, *(callback for kind in (*BEFORE_USERS, SaveCheckpoints) for callback in callbacks_of(trainer, kind)), *averages]
            others = [callback for callback in trainer.callbacks if callback not in before]  # type: ignore[attr-defined]
            trainer.callbacks[:] = [*before, *others]  # type: ignore[attr-defined]  # in place: Lightning is iterating over it, at its first

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, outputs: object, batch: object, batch_idx: int) -> None:
        pl_module.run.end_iteration()
        if self.shows_return and (mean := pl_module.collector.statistics.metrics().get("rollout/ep_rew_mean")) is not None:
            pl_module.log("return", mean, prog_bar=True, logger=False)  # type: ignore[attr-defined]


class CloseIteration(pl.Callback):
    """Call the module's own `on_train_batch_end`, write the iteration's row and begin the next iteration, before checkpoints are saved."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, outputs: object, batch: object, batch_idx: int) -> None:
        pl_module.run.call_last_hook(outputs, batch, batch_idx)
        pl_module.run.close_iteration()


AFTER_USERS: tuple[type[pl.Callback], ...] = (CloseIteration, PlotCurve, pl.callbacks.Checkpoint)
"""Callbacks that act after the user's at the end of an iteration, in this order."""


class EndRun(pl.Callback):
    """Close a run, even after an exception, and remember the Trainer's callbacks without those of the model.

    Lightning runs no teardown after an exception, but environments with processes must be closed. It also passes a model's callbacks on to
    the next model of the Trainer. Here they stay only until the next run begins: a checkpoint saved after the run or on an exception
    includes their state.

    Args:
        before: the Trainer's callbacks without those of the model.
    """

    def __init__(self, before: list[pl.Callback]) -> None:
        self.before = self.during = before

    def on_exception(self, trainer: pl.Trainer, pl_module: AlgorithmRun, exception: BaseException) -> None:
        if not is_interrupt(exception):  # a second Ctrl-C ends the run at once
            for saver in callbacks_of(trainer, SaveCheckpoints):
                saver.save_after_error(trainer, pl_module)
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        self.during = list(trainer.callbacks)  # type: ignore[attr-defined]
        pl_module.run.end()


GRADIENT_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
UNUSED_HOOKS = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "training_step_end")
"""Methods of a LightningModule that are not called under manual optimization."""
UNUSED_LOOPS = ("validation_step", "val_dataloader", "test_step", "test_dataloader", "predict_step", "predict_dataloader")
"""Methods of a LightningModule that are not called because evaluations play episodes."""


def gradient_hooks(trainer: pl.Trainer, module: pl.LightningModule) -> Callable[..., object] | None:
    """Return a function that calls a gradient hook by name, in the callbacks and the module that override it; None if none does."""
    overridden: dict[str, list[Callable[..., object]]] = {name: [] for name in GRADIENT_HOOKS}
    for name, methods in overridden.items():
        for callback in callbacks_of(trainer, object):
            if overrides(callback, name):
                methods.append(partial(getattr(callback, name), trainer, module))
        if overrides(module, name):
            methods.append(getattr(module, name))
    if not any(overridden.values()):
        return None
    return lambda name, *arguments: [method(*arguments) for method in overridden[name]]


def overrides(instance: object, name: str) -> bool:
    """Return whether a callback or a module overrides a method of Lightning's."""
    method = getattr(instance, name, None)
    return method is not None and not getattr(method, "__module__", "").startswith(LIGHTNING)


def check_averages(trainer: pl.Trainer) -> None:
    """Raise `SettingError` for weights averaged at the start of epochs in a run of one epoch: they would be the initial weights."""
    for callback in callbacks_of(trainer, object):
        if (trainer.limit_train_batches == 1.0 or trainer.max_epochs == 1) and is_average(callback, ("StochasticWeightAveraging",)):
            way_out = "set trainer.limit_train_batches to the iterations of an epoch, or use EMAWeightAveraging"
            raise SettingError(f"{type(callback).__name__} would restore the initial weights, since a run is one epoch; {way_out}")


def is_average(callback: object, names: Container[str] = ("WeightAveraging", "StochasticWeightAveraging")) -> bool:
    """Return whether a callback puts averaged weights into the model at the end, by its class names in either package of Lightning."""
    return any(kind.__name__ in names for kind in type(callback).__mro__)


def user_callbacks(callbacks: list[pl.Callback]) -> list[pl.Callback]:
    """Return a Trainer's callbacks without those of the previous model. Changes that the user has made since its run are kept.

    Raises:
        SettingError: one of them cannot work with an algorithm.
    """
    for callback in callbacks:
        for kind in type(callback).__mro__:
            if instead := REFUSED_CALLBACKS.get(kind.__name__):
                raise SettingError(f"{kind.__name__}: algorithms make their own batches and gradient steps; use {instead}")
    last = next((callback for callback in callbacks if isinstance(callback, EndRun)), None)
    if last is None:
        return list(callbacks)
    removed = [callback for callback in last.during if callback not in callbacks]
    return [callback for callback in last.before if callback not in removed] + [
        callback for callback in callbacks if callback not in last.during
    ]
