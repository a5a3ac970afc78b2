"""`lightning_rl.Trainer`: Lightning's Trainer with a run folder, evaluation, checkpoints and stopping."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.plugins.io import CheckpointIO
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from pytorch_lightning.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS

from lightning_rl.callbacks import callbacks_of
from lightning_rl.callbacks.checkpoints import BestModel, CheckpointConfig, SaveCheckpoints
from lightning_rl.callbacks.evaluation import EvaluationConfig, RolloutEvaluator
from lightning_rl.callbacks.progress import EnvStepsProgressBar, in_notebook
from lightning_rl.callbacks.stopping import StopOnSignal, end_program, raising_interrupts, why_stopped
from lightning_rl.checkpoints.files import AtomicCheckpointIO, differences, last_generation
from lightning_rl.checkpoints.manifest import threads_of
from lightning_rl.envs.make import find_user_module
from lightning_rl.envs.unity.scene import Scene
from lightning_rl.errors import LostRankError, RunStoppedError, SettingError, check_flag, check_path, check_range, printable
from lightning_rl.loggers import MetricsLogger, going_on, hidden_notices, how_to_upload, quiet_tensorboard, set_up_wandb
from lightning_rl.processes.children import one_thread
from lightning_rl.processes.ranks import forward_signal, report_lost_ranks, take_results
from lightning_rl.processes.startup import leave_the_program
from lightning_rl.settings.fields import as_settings, settings_of
from lightning_rl.settings.yaml_files import Plain
from lightning_rl.training.arguments import describe_unnamed, plain
from lightning_rl.training.evaluating import EvaluatingTrainer
from lightning_rl.training.hooks import RunModule
from lightning_rl.training.loading import checkpoint_of, describe_changes, find_program, foreign_modules, take_weights
from lightning_rl.training.resuming import check_fits
from lightning_rl.training.run import describe_refused_data
from lightning_rl.training.run_folder import (
    UNITY,
    choose_run,
    cut_back_evaluations,
    environment_name,
    export_for_unity,
    is_blank,
    keeping_config,
    read_seed,
    replacing,
    take_run,
    write_config,
)
from lightning_rl.training.state import draw_seed
from lightning_rl.training.threads import choose_threads, keep_freed_memory, suits_cpu, torch_threads
from lightning_rl.training.trainer_flags import (
    check_barebones,
    check_beginning,
    check_callbacks,
    check_epochs,
    check_flags,
    check_loggers,
    check_run_name,
    describe_zero_limits,
    own_callbacks,
)


class Trainer(EvaluatingTrainer):
    """Lightning's Trainer with a run folder, loggers, evaluation, best and last checkpoints, a progress bar and stopping.

    A run is stored in `<default_root_dir>/<algorithm>/<environment>/version_<n>/`: `config.yaml`, `metrics.csv`, `evaluations.csv`,
    TensorBoard events, `checkpoints/best.ckpt` and `checkpoints/last.ckpt`. All other arguments are Lightning's. `logger=False`,
    `enable_checkpointing=False` and `enable_progress_bar=False` turn parts off; given loggers replace TensorBoard, and an evaluator in
    `callbacks` replaces ours.

    Args:
        evaluation: how to evaluate the policy; None, or Lightning's `limit_val_batches=0`: no evaluations.
        checkpoint: what to save during the run; None: no weights.
        default_root_dir: the folder of all runs.
        torch_threads: CPU threads for torch; default: 1, or torch's default if the network has images or wide layers and a short
            measurement finds it clearly faster. A resumed run keeps its number.
        run_name: the folder of the run, instead of `version_<n>`.
        plot: draw `curve.png` in the run's folder at each evaluation; needs the extra `plots`.
        max_epochs: runs end at the algorithm's `max_env_steps` or `max_updates`; -1: no other limit.
        devices: number of devices that train together; -1 or `auto`: all. With torchrun, its own number is used.
        barebones: train without evaluations, checkpoints, loggers and progress bar.
        inference_mode: evaluate under `torch.inference_mode`, not `torch.no_grad`: tensors that a module keeps cannot be learned from then.
        log_every_n_steps: iterations between rows that other code logs through Lightning; ours follow the algorithm's `log_interval`.
    """

    config: Plain
    imports: list[str]
    """Modules that the command line imported, which `evaluate` needs too."""
    callbacks: list[pl.Callback]
    fast_dev_run: int | bool

    def __init__(
        self,
        *,
        evaluation: EvaluationConfig | None = EvaluationConfig(),
        checkpoint: CheckpointConfig | None = CheckpointConfig(),
        default_root_dir: str | Path = "runs",
        torch_threads: int | None = None,
        run_name: str | None = None,
        plot: bool = False,
        max_epochs: int | None = -1,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[pl.Callback] | pl.Callback | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = False,
        log_every_n_steps: int | None = 1,
        fast_dev_run: int | bool = False,
        devices: list[int] | str | int = 1,
        barebones: bool = False,
        inference_mode: bool = False,
        plugins: Any = None,
        **kwargs: Any,
    ) -> None:
        check_flags(kwargs, settings_of(Trainer))
        check_epochs(max_epochs, kwargs.get("limit_train_batches"))
        if barebones:
            check_barebones(evaluation=evaluation, checkpoint=checkpoint)
            evaluation = checkpoint = log_every_n_steps = None
            logger, enable_progress_bar = logger or False, enable_progress_bar or False
        evaluation = None if evaluation is None else as_settings("evaluation", EvaluationConfig, evaluation)
        evaluation = None if kwargs.get("limit_val_batches") == 0 else evaluation
        checkpoint = None if checkpoint is None else as_settings("checkpoint", CheckpointConfig, checkpoint)
        if torch_threads is not None:
            check_range("trainer.torch_threads", torch_threads, 1, 10_000, whole=True)
        check_flag("trainer.plot", plot)
        check_path("trainer.default_root_dir", default_root_dir)
        check_run_name(run_name)
        self.torch_threads, self.run_name = torch_threads, run_name
        self.may_choose = kwargs.get("accelerator", "auto") == "auto"
        self.config = {"evaluation": plain(evaluation), "checkpoint": plain(checkpoint)}
        self.imports = []
        check_loggers(logger)
        self.default_loggers = logger is None or logger is True
        given = list(callbacks) if isinstance(callbacks, Iterable) else [] if callbacks is None else [callbacks]
        check_callbacks(given)
        if checkpoint is None and not any(isinstance(callback, pl.callbacks.Checkpoint) for callback in given):
            enable_checkpointing = False
        saves, shows = enable_checkpointing is not False and not fast_dev_run, enable_progress_bar is not False
        built = own_callbacks(given, evaluation, checkpoint if saves else None, shows, plot and not fast_dev_run)
        self.stop = StopOnSignal()
        built.append(self.stop)
        plugins = [plugins] if plugins is not None and not isinstance(plugins, list) else list(plugins or [])
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpointIO())
        arguments = dict(
            plugins=plugins,
            default_root_dir=default_root_dir,
            max_epochs=max_epochs,
            logger=False if self.default_loggers else logger,
            callbacks=[*given, ShareFolder(), *built],
            enable_checkpointing=enable_checkpointing,
            enable_progress_bar=enable_progress_bar,
            enable_model_summary=enable_model_summary,
            log_every_n_steps=log_every_n_steps,
            fast_dev_run=fast_dev_run,
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if devices == 1 else devices,  # torchrun sets LOCAL_WORLD_SIZE
            barebones=barebones,
            inference_mode=inference_mode,
        )
        if kwargs.get("min_steps") is not None and kwargs.get("min_epochs") is None:
            kwargs["min_epochs"] = 0  # Lightning's default would be one epoch, which is the whole run
        with hidden_notices():
            super().__init__(**arguments, **kwargs)
        self.given_loggers = self.loggers
        self.savers = [
            callback for callback in given + built if isinstance(callback, BestModel | SaveCheckpoints) and callback.folder is None
        ]
        self.model_checkpoints = [
            callback for callback in given if isinstance(callback, pl.callbacks.ModelCheckpoint) and callback.dirpath is None
        ]
        self.evaluators = [callback for callback in given + built if isinstance(callback, RolloutEvaluator) and callback.file is None]
        self.run_folder: Path | None = None
        """Folder of the last run; None before the first run, and for a run without files."""
        self.settings: Plain | None = None
        """Contents of the run's `config.yaml`."""
        self.seed: int | None = None
        """Seed of the run."""

    def fit(
        self,
        model: pl.LightningModule,
        train_dataloaders: TRAIN_DATALOADERS | None = None,
        val_dataloaders: EVAL_DATALOADERS | None = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        init_from: str | Path | None = None,
        force: bool = False,
    ) -> None:
        """Train.

        Args:
            model: the algorithm.
            train_dataloaders: Lightning's, for other modules; algorithms build their own.
            val_dataloaders: Lightning's, for other modules; algorithms are evaluated by `evaluation`.
            datamodule: Lightning's, for other modules.
            ckpt_path: resume from a checkpoint, or from the `last.ckpt` of a run's folder, in a new folder; `last`: resume the newest run
                of this algorithm and environment, in its own folder.
            weights_only: Lightning's; it has no effect, as our checkpoints contain only plain data.
            init_from: start a new run with the weights of another: its folder, or a checkpoint.
            force: start again in the folder `run_name` even if it contains a run, which is deleted.
        """
        leave_the_program()
        if type(model).__module__.startswith("torch.") and any(isinstance(child, RunModule) for child in model.children()):
            raise SettingError("torch.compile(algorithm) would compile the whole run; set compile to true instead")
        if not isinstance(model, RunModule):
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
            return
        if any(loader is not None for loader in (train_dataloaders, val_dataloaders, datamodule)):
            raise SettingError(describe_refused_data(model))
        check_beginning(ckpt_path, init_from)
        ckpt_path = self.saved("best") if ckpt_path == "best" else ckpt_path
        for name, path in {"ckpt_path": ckpt_path or "", "init_from": init_from or ""}.items():
            check_path(name, path)
        if ckpt_path not in (None, "last") and Path(ckpt_path).is_dir():
            ckpt_path = checkpoint_of(ckpt_path, "ckpt_path", "last.ckpt")
        with ExitStack() as stack:
            run_folder, checkpoint = self._choose_folder(model, ckpt_path, force, stack)
            if ckpt_path == "last" and checkpoint is None:
                self.say(f"no last.ckpt below {run_folder.parent / (self.run_name or '')}: starting a new run")
            count = model.count if checkpoint is None else check_fits(model, checkpoint)
            unnamed = describe_unnamed(model) if self.checkpoint_callbacks else None
            for line in (
                *describe_zero_limits(self),
                unnamed,
                *(() if checkpoint is None else (differences(checkpoint), describe_changes(model, checkpoint))),
            ):
                if line is not None:
                    self.say(line)
            if count >= model.length:
                self.say(f"already at {count:,} of {model.length:,} {model.counted}; raise max_{model.counter} to continue")
                if checkpoint is None:
                    self.run_folder = folder_of(model)
                    return
            self.run_folder = None if self.fast_dev_run or self.barebones else run_folder
            seed = self.config.get("seed_everything", seed_of_program())
            self.seed = seed if checkpoint is None else read_seed(checkpoint, seed)
            if checkpoint is None:
                draw_seed()
            for line in [] if init_from is None else take_weights(model, init_from):
                self.say(line)
            continues_here = checkpoint is not None and Path(checkpoint).resolve().is_relative_to(run_folder.resolve())
            if force and not continues_here:
                stack.enter_context(replacing(run_folder, bool(self.savers)))
            if self.may_choose and self.strategy.root_device.type == "cuda" and suits_cpu(model):
                self.say("a network this small probably learns faster on a CPU: trainer.accelerator cpu (auto chose the GPU)")
            keep_freed_memory()
            for context in (one_thread(), quiet_tensorboard(), torch_threads(self._choose_threads(model, checkpoint))):
                stack.enter_context(context)
            stack.enter_context(self.stop.listening(partial(forward_signal, self)))
            if continues_here and self._writes:
                stack.enter_context(keeping_config(run_folder, lambda: model.count > count, count >= model.length))
            try:
                self._prepare_folder(run_folder, model, count if continues_here else -1)
                with (
                    report_lost_ranks(lambda: f"{model.count:,} {model.counted}" if model.count else ""),
                    hidden_notices(),
                    raising_interrupts(),
                ):
                    super().fit(model, ckpt_path=checkpoint, weights_only=weights_only)
                if (results := take_results(self)) is not None:
                    model.run.set_results(results)
            except RunStoppedError:
                pass
            except LostRankError:
                if self.stop.received is None:  # else a process was stopped before it started
                    raise
            finally:
                Scene.run_folder = None
                if self.run_folder is not None and is_blank(self.run_folder):  # it is removed
                    self.run_folder = None
                if self.run_folder is not None:
                    self._print_summary(model, self.run_folder)
                    is_over = not isinstance(sys.exception(), KeyboardInterrupt)  # else a second Ctrl-C wants to leave at once
                    if is_over and model.count > count and self.is_global_zero and getattr(model.env, "is_unity", False):
                        export_for_unity(self.run_folder, model, self.say)
        if self.stop.received is not None:
            self._end_program(model)
        self._check_saved(model)

    def _check_saved(self, model: RunModule) -> None:
        """Raise `UnsavedError`, on the first rank, if the newest weights are not on the disk."""
        for saver in callbacks_of(self, SaveCheckpoints) if self.is_global_zero else ():
            saver.check_saved(model)  # type: ignore[arg-type]

    def _choose_folder(
        self, model: RunModule, ckpt_path: str | Path | None, force: bool, stack: ExitStack
    ) -> tuple[Path, str | Path | None]:
        """Return the run's folder, locked until the stack closes if the run writes files, and the checkpoint to resume from."""
        folder = Path(self.default_root_dir) / type(model).__name__ / environment_name(model.env)
        if not self._writes:
            return choose_run(folder, ckpt_path, self.run_name)
        try:
            return stack.enter_context(take_run(folder, ckpt_path, self.run_name, force, bool(self.savers), self.say))
        except OSError as error:
            raise self.cannot_write(error) from error

    @property
    def _writes(self) -> bool:
        """Return whether the run writes files."""
        return not self.fast_dev_run and bool(self.default_loggers or self.given_loggers or self.savers or self.evaluators)

    def cannot_write(self, error: OSError) -> SettingError:
        """Return the error for a folder that cannot be written to."""
        return SettingError(f"trainer.default_root_dir {self.default_root_dir!r}: {error.strerror}; name a folder to write to")

    def _choose_threads(self, model: RunModule, ckpt_path: str | Path | None) -> int:
        """Return the number that was set, else that of the run to resume, else 1 with an accelerator, else the faster one."""
        known = self.torch_threads or (None if ckpt_path is None else threads_of(ckpt_path))
        forks = getattr(self.strategy.launcher, "is_interactive_compatible", False)  # a forked process would wait for torch's threads
        if known is not None or forks or self.strategy.root_device.type != "cpu":
            return known or 1
        number, line = choose_threads(model)
        if line is not None:
            self.say(line)
        return number

    @rank_zero_only
    def _restore_config(self) -> None:
        """Write `config.yaml` again if the run's folder was deleted during the run, so that the next save can be resumed."""
        if self.settings is not None and self.run_folder is not None and not (config := self.run_folder / "config.yaml").is_file():
            with going_on(self.say, "config.yaml"):
                write_config(self.run_folder, self.settings)
                self.say(f"{config} was deleted during the run and is written again; the other deleted files are lost")

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint in a folder from which the run can be resumed."""
        self._restore_config()
        super().save_checkpoint(*args, **kwargs)

    @property
    def log_dir(self) -> str | None:
        """Return the run's folder, or the folder of all runs if it has none."""
        return str(self.run_folder or self.default_root_dir)

    def share_folder(self, model: RunModule) -> None:
        """Use the first rank's run folder: a rank that started later, when that folder existed, has chosen the next one."""
        folder = self.strategy.broadcast(self.run_folder)
        if folder is not None and folder != self.run_folder:
            self.run_folder = folder
            self._prepare_folder(folder, model, -1)  # only the first rank writes

    def _prepare_folder(self, run: Path, model: RunModule, kept: int) -> None:
        """Write `config.yaml`, cut the tables back to the count `kept`, and set the files of callbacks and loggers."""
        self.settings = None
        for saver in self.savers:
            saver.folder = run / "checkpoints"
        for model_checkpoint in self.model_checkpoints:
            model_checkpoint.dirpath = str(run / "checkpoints")
        for evaluator in self.evaluators if not self.fast_dev_run else []:
            evaluator.file = run / "evaluations.csv"
        if not self._writes:
            return
        Scene.run_folder = (run / UNITY).absolute()
        self.settings = {
            "model": {"class_path": type(model).__name__, "init_args": dict(model.hparams)},
            **self.config,
            "seed_everything": self.seed,
        }
        try:
            write_config(run, self.settings)
        except OSError as error:
            raise self.cannot_write(error) from error
        for callback in callbacks_of(self, object):
            if (
                getattr(callback, "config_filename", "") == "config.yaml"
            ):  # LightningCLI writes the config of its own program, which ours cannot read
                vars(callback).update(config_filename="lightning_cli.yaml", overwrite=True)
        cut_back_evaluations(run, model.counter, kept, self.say)
        if self.default_loggers or self.given_loggers:
            metrics = MetricsLogger(run, partial(getattr, model, "count"), model.counter, self.say)
            board = [TensorBoardLogger(run, name="", version="")] if self.default_loggers else []
            self.loggers = [*board, *self.given_loggers, metrics]  # `self.logger` is the first: one with an `experiment`
            metrics.cut_back(kept)
            for logger in self.loggers:
                if isinstance(logger, WandbLogger):
                    set_up_wandb(logger, self.settings, model.counter)

    def _command(self, subcommand: str, model: RunModule, run: Path) -> str | None:
        """Return the start of a command line for this run; None if a file cannot name its algorithm and environment."""
        if model.hparams["env"] is None:
            return None
        registered = find_user_module(model.hparams["env"]["id"])
        needed = [type(model).__module__, registered, *foreign_modules(model.hparams, run)]
        known = {"lightning_rl", *(module.partition(".")[0] for module in self.imports)}
        modules = [*self.imports, *(module for module in needed if module and module.partition(".")[0] not in known)]
        if "__main__" in modules:  # other programs cannot import it
            return None
        return f"lightning-rl {subcommand}" + "".join(f" --import {module}" for module in dict.fromkeys(modules))

    def _how_to_continue(self, model: RunModule, run: Path) -> str | None:
        """Return the command that resumes this run, or the Python call for notebooks and unnamed environments; None if nothing is saved."""
        if last_generation(run / "checkpoints") is None:
            return None
        command, ended = self._command("fit", model, run), why_stopped(self)
        configured = self.config["evaluation"] or {}
        if any(configured.get(name) is None for name in ended):  # a callback would end it again
            return None
        if command is None or in_notebook():
            return None if ended else f'trainer.fit(model, ckpt_path="{run}")'
        names = {"trainer.run_name": run.name}  # `last` without it is the newest run
        if "trainer" not in self.config and str(self.default_root_dir) != "runs":  # the config of a Python program has no trainer section
            names["trainer.default_root_dir"] = str(self.default_root_dir)
        if 0 <= self.max_steps <= self.global_step:  # otherwise it would end immediately
            names["trainer.max_steps"] = "-1"
        if self.max_epochs is not None and 0 < self.max_epochs <= self.current_epoch:
            names["trainer.max_epochs"] = "-1"
        remaining = [callback.time_remaining() for callback in callbacks_of(self, Timer)]
        if any(seconds is not None and seconds <= 0 for seconds in remaining):
            names["trainer.max_time"] = "null"
        names |= {f"evaluation.{name}": "null" for name in ended}
        options = "".join(f" --{name} {quote(value)}" for name, value in names.items())
        return f"{command} --config {quote(str(run / 'config.yaml'))} --ckpt_path last{options}"

    @rank_zero_only
    def _print_summary(self, model: RunModule, run: Path) -> None:
        for reason in () if model.finished else why_stopped(self).values():
            self.say(reason)
        self.say(f"run: {run}")
        resume, evaluate = self._how_to_continue(model, run), self._command("evaluate", model, run)
        if resume is not None and not model.finished and self.stop.received is None:
            self.say(f"continue it: {resume}")
        for command in filter(None, map(how_to_upload, self.loggers)):
            self.say(f"upload it: {command}")
        best = next((callback.path for callback in callbacks_of(self, BestModel)), None)
        if best is not None and best.exists() and model.hparams["env"] is not None:
            here = f'lightning_rl.evaluate("{best}")' + ("" if in_notebook() else " in this program, which defines it")
            program = find_program(model.hparams)  # which a checkpoint alone must not start
            command = f"{evaluate} --ckpt_path {quote(str(best))} --episodes 100" + ("" if program is None else f" --env {quote(program)}")
            self.say(f"evaluate it: {here if evaluate is None or in_notebook() else command}")

    def _end_program(self, model: RunModule) -> NoReturn:
        """Exit the program after a signal, with the command to resume and the signal's exit status."""
        assert self.stop.received is not None
        at = f"stopped by {self.stop.received.name} at {model.count:,} {model.counted}"
        resume = None if self.run_folder is None else self._how_to_continue(model, self.run_folder)
        self.say(at if resume is None else f"{at}; continue: {resume}")
        self._check_saved(model)
        if self.local_rank:  # Lightning kills the other ranks if one that it started ends with another status
            raise SystemExit(0)
        end_program(self.stop.received)

    @rank_zero_only
    def say(self, text: str) -> None:
        """Print a line for the user."""
        if bars := callbacks_of(self, EnvStepsProgressBar):
            bars[0].print(text)
        else:
            print(printable(text), flush=True)


class ShareFolder(pl.Callback):
    """Make all ranks use the same run folder after they connect, before the Trainer's own callbacks use it."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(trainer, Trainer) and isinstance(pl_module, RunModule):
            trainer.share_folder(pl_module)


def folder_of(model: RunModule) -> Path | None:
    """Return the folder of the run in which a model was trained; None if unknown."""
    trainer = model.trainer if model.has_trainer else None
    return trainer.run_folder if isinstance(trainer, Trainer) and trainer.lightning_module is model else None


def seed_of_program() -> int | None:
    """Return the last seed that the program set with `seed_everything`; None if it set none."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return None if seed is None else int(seed)
