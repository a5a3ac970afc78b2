"""`lightning_rl.Trainer`: Lightning's Trainer with what a run should have."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.plugins.io import CheckpointIO
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from lightning_rl.actors.processes import leave_the_program
from lightning_rl.callbacks.checkpoints import BestModel, CheckpointConfig, SaveCheckpoints
from lightning_rl.callbacks.curve import PlotCurve
from lightning_rl.callbacks.evaluation import EvaluationConfig, RolloutEvaluator
from lightning_rl.callbacks.progress import EnvStepsProgressBar
from lightning_rl.callbacks.stopping import StopOnEvaluation, StopOnSignal
from lightning_rl.checkpoints.files import AtomicCheckpointIO, differences, last_generation
from lightning_rl.checkpoints.manifest import threads_of
from lightning_rl.distributed import forward_signal, report_lost_ranks, take_counts
from lightning_rl.envs.make import own_module
from lightning_rl.errors import Interrupted, LostRankError, SettingError, check_flag, check_path, check_range, printable
from lightning_rl.loggers import MetricsLogger, going_on, quiet_tensorboard
from lightning_rl.threads import choose_threads, one_thread, torch_threads
from lightning_rl.training.loading import check_fits, foreign_modules, take_weights
from lightning_rl.training.run import Run
from lightning_rl.training.run_folder import (
    REPLACED,
    choose_run,
    cut_back_evaluations,
    environment_name,
    is_blank,
    replacing,
    take_run,
    write_config,
)
from lightning_rl.training.settings import plain

OURS = {
    "gradient_clip_val": "model.max_grad_norm",
    "gradient_clip_algorithm": "model.max_grad_norm",
    "accumulate_grad_batches": "a larger model.batch_size",
}
"""Flags of Lightning's Trainer that are the algorithm's business here."""


class Trainer(pl.Trainer):
    """Lightning's Trainer, bringing a run folder, loggers, evaluation, best and last checkpoints, a progress bar and stopping.

    A run lies in `<default_root_dir>/<algorithm>/<environment>/version_<n>/`: `config.yaml`, `metrics.csv`, `evaluations.csv`, TensorBoard
    events, `checkpoints/best.ckpt` and `checkpoints/last.ckpt`. Every other argument is Lightning's; `logger=False`,
    `enable_checkpointing=False` and `enable_progress_bar=False` switch parts off, loggers given replace TensorBoard, and an evaluator
    among `callbacks` replaces ours.

    Args:
        evaluation: how to judge the policy; None does not, nor does Lightning's `limit_val_batches=0`.
        checkpoint: what to keep on the way; None keeps no weights.
        default_root_dir: where runs lie.
        torch_threads: CPU threads for torch; unless given, 1, or torch's own choice where a short measurement with a network of images or
            wide layers finds it clearly faster. A run that continues keeps what it had.
        run_name: the folder of the run, instead of `version_<n>`.
        plot: draw `curve.png` into the run's folder at each evaluation; needs the extra `plots`.
        max_epochs: runs end at the algorithm's `max_env_steps` or `max_updates`; -1 sets no other end.
        log_every_n_steps: iterations between rows of what others log through Lightning; ours follow the algorithm's `log_interval`.
    """

    config: dict[str, Any]
    imports: list[str]
    """Modules that the command line imported, and that `evaluate` will need too."""
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
        plugins: Any = None,
        **kwargs: Any,
    ) -> None:
        evaluation = EvaluationConfig(**evaluation) if isinstance(evaluation, Mapping) else evaluation
        evaluation = None if kwargs.get("limit_val_batches") == 0 else evaluation
        checkpoint = CheckpointConfig(**checkpoint) if isinstance(checkpoint, Mapping) else checkpoint
        for flag, instead in OURS.items():
            if kwargs.get(flag) not in (None, 1):
                raise SettingError(f"trainer.{flag} {kwargs[flag]!r}: algorithms make their own gradient steps; use {instead}")
        if torch_threads is not None:
            check_range("trainer.torch_threads", torch_threads, 1, whole=True)
        check_flag("trainer.plot", plot)
        if run_name is not None and (Path(run_name).name != run_name or run_name in ("", "..")):
            raise SettingError(f"trainer.run_name must be the name of a folder, got {run_name!r}")
        for name, path in {"default_root_dir": default_root_dir, "run_name": run_name or ""}.items():
            check_path(f"trainer.{name}", path)
        if run_name is not None and run_name.endswith(REPLACED):
            raise SettingError(f"trainer.run_name {run_name!r}: {REPLACED} ends the name of a run that --force replaces; choose another")
        self.torch_threads, self.run_name = torch_threads, run_name
        self.config = {"seed_everything": current_seed(), "evaluation": plain(evaluation), "checkpoint": plain(checkpoint)}
        self.imports = []
        self.default_loggers = logger is None or logger is True
        given = [callbacks] if isinstance(callbacks, pl.Callback) else list(callbacks or [])
        ours: list[pl.Callback] = []
        if evaluation is not None and not any(isinstance(callback, RolloutEvaluator) for callback in given):
            settings = {name: value for name, value in vars(evaluation).items() if name not in ("stop_at", "patience")}
            ours.append(RolloutEvaluator(**settings))
        if evaluation is not None and (evaluation.stop_at is not None or evaluation.patience is not None):
            ours.append(StopOnEvaluation(evaluation.stop_at, evaluation.patience))
        if enable_checkpointing is not False and checkpoint is not None and not fast_dev_run:
            saving = {name: value for name, value in vars(checkpoint).items() if name not in ("monitor", "mode")}
            ours += [BestModel(monitor=checkpoint.monitor, mode=checkpoint.mode), SaveCheckpoints(**saving)]
            if evaluation is None and checkpoint.monitor != CheckpointConfig.monitor and not given:
                raise SettingError(f"checkpoint.monitor {checkpoint.monitor!r} is found by evaluations, and evaluation is null")
        elif checkpoint is None:
            enable_checkpointing = False
        if enable_progress_bar is not False and not any(isinstance(callback, pl.callbacks.ProgressBar) for callback in given):
            ours.append(EnvStepsProgressBar())
        if plot and not fast_dev_run:
            ours.append(PlotCurve())
        self.stop = StopOnSignal()
        ours.append(self.stop)
        plugins = [plugins] if plugins is not None and not isinstance(plugins, list) else list(plugins or [])
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpointIO())
        super().__init__(
            plugins=plugins,
            default_root_dir=default_root_dir,
            max_epochs=max_epochs,
            logger=False if self.default_loggers else logger,
            callbacks=given + ours,
            enable_checkpointing=enable_checkpointing,
            enable_progress_bar=enable_progress_bar,
            enable_model_summary=enable_model_summary,
            log_every_n_steps=log_every_n_steps,
            fast_dev_run=fast_dev_run,
            **kwargs,
        )
        self.given_loggers = self.loggers
        self.savers = [each for each in given + ours if isinstance(each, BestModel | SaveCheckpoints) and each.folder is None]
        self.evaluators = [each for each in given + ours if isinstance(each, RolloutEvaluator) and each.file is None]
        self.run_folder = Path(self.default_root_dir)
        self.settings: dict[str, Any] | None = None
        """What stands in the `config.yaml` of the run."""

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        init_from: str | Path | None = None,
        force: bool = False,
    ) -> None:
        """Train.

        Args:
            model: the algorithm.
            train_dataloaders: Lightning's; algorithms bring their own.
            val_dataloaders: Lightning's; algorithms are judged by `evaluation`.
            datamodule: Lightning's.
            ckpt_path: continue from a checkpoint; `last` from the newest run of this algorithm and environment, in its folder.
            weights_only: Lightning's; our checkpoints hold plain data only, whatever it says.
            init_from: begin a new run with the weights of another: its folder, or a checkpoint.
            force: begin anew in the folder `run_name` though there is a run in it, which is lost.
        """
        leave_the_program()
        with ExitStack() as place:
            if isinstance(model, Run):
                if ckpt_path is not None and init_from is not None:
                    raise SettingError("ckpt_path continues a run and init_from begins one: give one of them")
                for name, path in {"ckpt_path": ckpt_path or "", "init_from": init_from or ""}.items():
                    check_path(name, path)
                run_folder, found = self._choose_place(model, ckpt_path, force, place)
                if ckpt_path == "last" and found is None:
                    self.say(f"no last.ckpt below {run_folder.parent / (self.run_name or '')}: starting afresh")
                ckpt_path = found
                count = model.count if ckpt_path is None else check_fits(model, ckpt_path)
                self._tell_differences(ckpt_path)
                if count >= model.length:
                    self.say(f"already at {count:,} of {model.length:,} {model.counted}; raise max_{model.counter} to go on")
                    if ckpt_path is None:
                        return
                self.run_folder = run_folder
                for line in [] if init_from is None else take_weights(model, init_from):
                    self.say(line)
                if force and ckpt_path is None:
                    place.enter_context(replacing(run_folder))
            for each in (one_thread(), quiet_tensorboard(), torch_threads(self._threads(model, ckpt_path))):
                place.enter_context(each)
            place.enter_context(self.stop.listening(partial(forward_signal, self)))
            try:
                if isinstance(model, Run):
                    self._equip(model, ckpt_path, count)
                with report_lost_ranks(model) if isinstance(model, Run) else nullcontext():
                    super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
                if isinstance(model, Run):
                    take_counts(self, model, model.COUNTS)
            except Interrupted:
                pass
            except LostRankError:
                if self.stop.received is None:  # else a process that was told to stop had not begun
                    raise
            finally:
                if isinstance(model, Run) and not is_blank(self.run_folder):
                    self._say_goodbye(model)
        if self.stop.received is not None:
            self._leave(model)

    def _choose_place(self, model: Run, ckpt_path: str | Path | None, force: bool, place: ExitStack) -> tuple[Path, str | Path | None]:
        """The run's folder, taken where something will be written, and the checkpoint that the run continues."""
        folder = Path(self.default_root_dir) / type(model).__name__ / environment_name(model.env)
        if not self._writes:
            return choose_run(folder, ckpt_path, self.run_name)
        try:
            return place.enter_context(take_run(folder, ckpt_path, self.run_name, force, bool(self.savers), self.say))
        except OSError as error:
            raise self._cannot_write(error) from error

    @property
    def _writes(self) -> bool:
        """Whether the run leaves files."""
        return not self.fast_dev_run and bool(self.default_loggers or self.given_loggers or self.savers or self.evaluators)

    def _cannot_write(self, error: OSError) -> SettingError:
        return SettingError(f"trainer.default_root_dir {self.default_root_dir!r}: {error.strerror}; name a folder to write to")

    def _threads(self, model: Any, ckpt_path: str | Path | None) -> int:
        """What was asked for, else what the run had that is continued, else what pays; one beside an accelerator."""
        known = self.torch_threads or (None if ckpt_path is None else threads_of(ckpt_path))
        if known is not None:
            return known
        if self.strategy.root_device.type != "cpu":
            return 1
        number, line = choose_threads(model)
        if line is not None:
            self.say(line)
        return number

    def _tell_differences(self, ckpt_path: str | Path | None) -> None:
        """Another machine or other versions do not continue bit for bit."""
        line = None if ckpt_path is None else differences(ckpt_path)
        if line is not None:
            self.say(line)

    @rank_zero_only
    def _keep_settings(self) -> None:
        """Write `config.yaml` again where the run's folder was deleted during the run: what is saved next can then be continued."""
        if self.settings is not None and not (self.run_folder / "config.yaml").is_file():
            self.say(f"{self.run_folder / 'config.yaml'} was deleted during the run and is written again; what went with it is lost")
            with going_on(self, "config.yaml"):
                write_config(self.run_folder, self.settings)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's, in a folder that is one of a run."""
        self._keep_settings()
        super().save_checkpoint(*args, **kwargs)

    @property
    def log_dir(self) -> str | None:
        """The run's folder."""
        return str(self.run_folder)

    def _equip(self, model: Run, ckpt_path: str | Path | None, count: int) -> None:
        """Tell loggers and callbacks where the run lies."""
        self.settings = None
        run = self.run_folder
        for saver in self.savers:
            saver.folder = run / "checkpoints"
        for evaluator in self.evaluators if not self.fast_dev_run else []:
            evaluator.file = run / "evaluations.csv"
        if not self._writes:
            return
        settings = {"class_path": type(model).__name__, "init_args": dict(model.hparams)}
        self.settings = {"model": settings, **self.config}
        try:
            write_config(run, self.settings)
        except OSError as error:
            raise self._cannot_write(error) from error
        kept = count if run in Path(str(ckpt_path)).parents else -1  # and nothing of a run that saved nothing
        cut_back_evaluations(run, model.counter, kept, self.say)
        if not (self.default_loggers or self.given_loggers):
            return
        metrics = MetricsLogger(run, partial(getattr, model, "count"), model.counter, self.say)
        board = [TensorBoardLogger(run, name="", version="")] if self.default_loggers else []
        self.loggers = [metrics, *board, *self.given_loggers]
        metrics.cut_back(kept)
        for logger in self.loggers:
            introduce(logger, self.config, model.counter)

    def _program(self, subcommand: str, model: Run) -> str | None:
        """The command line that begins like this for this run's algorithm and environment; None if no file can name them."""
        if model.hparams["env"] is None:
            return None
        registered = own_module(model.hparams["env"]["id"])
        found = [type(model).__module__, registered, *foreign_modules(model.hparams, self.run_folder)]
        known = {"lightning_rl", *(module.partition(".")[0] for module in self.imports)}
        modules = [*self.imports, *(module for module in found if module and module.partition(".")[0] not in known)]
        if "__main__" in modules:  # which no other program can import
            return None
        return f"lightning-rl {subcommand}" + "".join(f" --import {module}" for module in dict.fromkeys(modules))

    def _continuing(self, model: Run) -> str | None:
        """The command that continues this run; None where nothing is saved, or no file can name its environment or algorithm."""
        program = self._program("fit", model)
        if program is None or last_generation(self.run_folder / "checkpoints") is None:
            return None
        name = "" if self.run_name is not None else f" --trainer.run_name {self.run_folder.name}"  # `last` alone is the newest run's
        return f"{program} --config {self.run_folder / 'config.yaml'} --ckpt_path last{name}"

    @rank_zero_only
    def _say_goodbye(self, model: Run) -> None:
        best = next((callback for callback in self.callbacks if isinstance(callback, BestModel)), None)
        self.say(f"run: {self.run_folder}")
        command, program = self._continuing(model), self._program("evaluate", model)
        if command is not None and not model.finished and self.stop.received is None:
            self.say(f"continue it: {command}")
        if best is not None and best.path.exists() and model.hparams["env"] is not None:
            here = f'lightning_rl.evaluate("{best.path}") in this program, which defines it'
            self.say(f"evaluate it: {here if program is None else f'{program} --ckpt_path {best.path} --episodes 100'}")

    def _leave(self, model: Run) -> NoReturn:
        """After a signal: how to go on, and its exit status. That of a process which rank 0 started would make it kill the others."""
        assert self.stop.received is not None
        at = f"stopped by {self.stop.received.name} at {model.count:,} {model.counted}"
        command = self._continuing(model)
        self.say(at if command is None else f"{at}; continue: {command}")
        if self.local_rank:
            raise SystemExit(0)
        if self.stop.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(143)

    @rank_zero_only
    def say(self, text: str) -> None:
        """One line for the user."""
        bar = next((callback for callback in self.callbacks if isinstance(callback, EnvStepsProgressBar)), None)
        if bar is None:
            print(printable(text), flush=True)
        else:
            bar.print(text)


def current_seed() -> int | None:
    """What `seed_everything` was last called with."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return None if seed is None else int(seed)


@rank_zero_only
def introduce(logger: Any, config: dict[str, Any], counter: str) -> None:
    """Weights & Biases draws over what the run counts, as the others do, and knows all settings of the run."""
    if isinstance(logger, WandbLogger):
        init = logger._wandb_init
        if logger._offline:
            init["mode"] = "offline"  # WANDB_MODE, which Lightning sets, is only read once per process
        if init["anonymous"] is None:
            del init["anonymous"]  # wandb warns about it whatever its value
        init["dir"] = init["dir"] and os.path.abspath(init["dir"])  # its service resolves a relative one where it was started
        logger.experiment.define_metric(counter)
        logger.experiment.define_metric("*", step_metric=counter, step_sync=True)
        logger.log_hyperparams({name: value for name, value in config.items() if name != "model"})
