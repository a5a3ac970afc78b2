"""`lightning_rl.Trainer`: Lightning's Trainer with what a run should have."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.algorithms.loading import check_fits
from lightning_rl.algorithms.settings import plain
from lightning_rl.callbacks.checkpoints import BestModel, SaveCheckpoints
from lightning_rl.callbacks.csv_logger import CSVLogger, read_rows, write_rows
from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.callbacks.progress import EnvStepsProgressBar
from lightning_rl.callbacks.stopping import StopOnEvaluation
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, check_range


@dataclass(frozen=True)
class EvaluationConfig:
    """How to judge the policy during the run.

    Args:
        every_n_env_steps: environment steps between evaluations; 5 % of the run unless given.
        episodes: how many episodes to play.
        seed: of the first episode; the others count up.
        num_envs: how many environments act together.
        deterministic: the policy's most likely action instead of a drawn one.
        max_episode_steps: longest episode; the environment's own limit, or 10,000 where it has none, unless given.
        stop_at: end the run when the mean return reaches this.
        patience: end the run after so many evaluations in a row without improvement.
    """

    every_n_env_steps: int | None = None
    episodes: int = 10
    seed: int = 10_000
    num_envs: int = 10
    deterministic: bool = True
    max_episode_steps: int | None = None
    stop_at: float | None = None
    patience: int | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """What to keep on the way, beside `best.ckpt` and `last.ckpt`.

    Args:
        every_n_env_steps: environment steps between saves of `last.ckpt`; 2 % of the run unless given.
        keep: how many numbered copies to keep, the newest; -1 keeps all.
    """

    every_n_env_steps: int | None = None
    keep: int = 0


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
        evaluation: how to judge the policy; None does not.
        checkpoint: what to keep on the way; None keeps no weights.
        default_root_dir: where runs lie.
        torch_threads: CPU threads for torch; unless given, 1 for small networks (more cost time) and torch's own choice for images.
        max_epochs: runs end at the algorithm's `max_env_steps`; -1 sets no other end.
        log_every_n_steps: iterations between rows of what others log through Lightning; ours follow the algorithm's `log_interval`.
    """

    config: dict[str, Any]
    callbacks: list[pl.Callback]
    fast_dev_run: int | bool

    def __init__(
        self,
        *,
        evaluation: EvaluationConfig | None = EvaluationConfig(),
        checkpoint: CheckpointConfig | None = CheckpointConfig(),
        default_root_dir: str | Path = "runs",
        torch_threads: int | None = None,
        max_epochs: int | None = -1,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[pl.Callback] | pl.Callback | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = False,
        log_every_n_steps: int | None = 1,
        fast_dev_run: int | bool = False,
        **kwargs: Any,
    ) -> None:
        for flag, instead in OURS.items():
            if kwargs.get(flag) not in (None, 1):
                raise SettingError(f"trainer.{flag} {kwargs[flag]!r}: algorithms make their own gradient steps; use {instead}")
        if torch_threads is not None:
            check_range("trainer.torch_threads", torch_threads, 1, whole=True)
        self.torch_threads = torch_threads
        self.config = {"seed_everything": current_seed(), "evaluation": plain(evaluation), "checkpoint": plain(checkpoint)}
        self.default_loggers = logger is None or logger is True
        callbacks = [callbacks] if isinstance(callbacks, pl.Callback) else list(callbacks or [])
        if not any(isinstance(callback, RolloutEvaluator) for callback in callbacks) and evaluation is not None:
            settings = {name: value for name, value in vars(evaluation).items() if name not in ("stop_at", "patience")}
            callbacks.append(RolloutEvaluator(**settings))
        if evaluation is not None and (evaluation.stop_at is not None or evaluation.patience is not None):
            callbacks.append(StopOnEvaluation(evaluation.stop_at, evaluation.patience))
        if enable_checkpointing is not False and checkpoint is not None and not fast_dev_run:
            callbacks += [BestModel(), SaveCheckpoints(checkpoint.every_n_env_steps, checkpoint.keep)]
        elif checkpoint is None:
            enable_checkpointing = False
        if enable_progress_bar is not False and not any(isinstance(c, pl.callbacks.ProgressBar) for c in callbacks):
            callbacks.append(EnvStepsProgressBar())
        super().__init__(
            default_root_dir=default_root_dir,
            max_epochs=max_epochs,
            logger=False if self.default_loggers else logger,
            callbacks=callbacks,
            enable_checkpointing=enable_checkpointing,
            enable_progress_bar=enable_progress_bar,
            enable_model_summary=enable_model_summary,
            log_every_n_steps=log_every_n_steps,
            fast_dev_run=fast_dev_run,
            **kwargs,
        )
        self.run_folder: Path | None = None

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train. `ckpt_path` continues from a checkpoint; `last` from the newest run of this algorithm and environment, in its folder."""
        if isinstance(model, Algorithm):
            folder = self.default_root_dir_path / type(model).__name__ / environment_name(model)
            self.run_folder, ckpt_path = self._choose_run(folder, ckpt_path)
            self._equip(model, ckpt_path)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.torch_threads or (threads if has_convolutions(model) else 1))
        try:
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
        finally:
            torch.set_num_threads(threads)
        if self.run_folder is not None and self.run_folder.is_dir():
            self._say_goodbye()

    @property
    def default_root_dir_path(self) -> Path:
        """Where runs lie."""
        return Path(self.default_root_dir)

    @property
    def log_dir(self) -> str | None:
        """The run's folder."""
        return str(self.run_folder) if self.run_folder is not None else super().log_dir

    def _choose_run(self, folder: Path, ckpt_path: str | Path | None) -> tuple[Path, str | Path | None]:
        """The run's folder and the checkpoint to continue from."""
        runs = sorted(folder.glob("version_*"), key=lambda path: int(path.name.partition("_")[2]))
        if ckpt_path == "last":
            saved = [run for run in runs if (run / "checkpoints" / "last.ckpt").exists()]
            if saved:
                return saved[-1], saved[-1] / "checkpoints" / "last.ckpt"
            self.say(f"no last.ckpt below {folder}: starting afresh")
            ckpt_path = None
        number = int(runs[-1].name.partition("_")[2]) + 1 if runs else 0
        return folder / f"version_{number}", ckpt_path

    def _equip(self, model: Algorithm, ckpt_path: str | Path | None) -> None:
        """Check the checkpoint, and tell loggers and callbacks where the run lies."""
        assert self.run_folder is not None
        env_steps = None if ckpt_path is None else check_fits(model, ckpt_path)
        for callback in self.callbacks:
            if isinstance(callback, BestModel | SaveCheckpoints) and callback.folder is None:
                callback.folder = self.run_folder / "checkpoints"
            if isinstance(callback, RolloutEvaluator) and callback.file is None and not self.fast_dev_run:
                callback.file = self.run_folder / "evaluations.csv"
        if self.fast_dev_run or (not self.default_loggers and not self.loggers):
            return
        self._write_config(model)
        metrics = CSVLogger(self.run_folder)
        board = TensorBoardLogger(self.run_folder, name="", version="") if self.default_loggers else None
        self.loggers = [metrics, *([board] if board else []), *self.loggers]
        if env_steps is not None and self.run_folder in Path(str(ckpt_path)).parents:
            self._cut_back(metrics, env_steps)
        for logger in self.loggers:
            use_env_steps(logger)

    @rank_zero_only
    def _write_config(self, model: Algorithm) -> None:
        assert self.run_folder is not None
        try:
            self.run_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(
                f"trainer.default_root_dir {self.default_root_dir!r}: {error.strerror}; name a folder to write to"
            ) from error
        model_settings = {"class_path": type(model).__name__, "init_args": dict(model.hparams)}
        text = yaml.safe_dump({"model": model_settings, **self.config}, sort_keys=False)
        (self.run_folder / "config.yaml").write_text(text)

    @rank_zero_only
    def _cut_back(self, metrics: CSVLogger, env_steps: int) -> None:
        """Rows written after the checkpoint will be written again."""
        assert self.run_folder is not None
        metrics.cut_back(env_steps)
        evaluations = self.run_folder / "evaluations.csv"
        rows = read_rows(evaluations)
        if rows:
            write_rows(evaluations, list(rows[0]), [row for row in rows if int(row["env_steps"]) <= env_steps])

    @rank_zero_only
    def _say_goodbye(self) -> None:
        best = next((callback for callback in self.callbacks if isinstance(callback, BestModel)), None)
        self.say(f"run: {self.run_folder}")
        if best is not None and best.path.exists():
            self.say(f"evaluate it: lightning-rl evaluate --ckpt_path {best.path} --episodes 100")

    @rank_zero_only
    def say(self, text: str) -> None:
        """One line for the user."""
        bar = next((callback for callback in self.callbacks if isinstance(callback, EnvStepsProgressBar)), None)
        if bar is None:
            print(text, flush=True)
        else:
            bar.print(text)


def environment_name(model: Algorithm) -> str:
    """The environment's id as a folder, without its module; the class of a ready environment."""
    env = model.env
    if isinstance(env, EnvConfig):
        return env.id.rpartition(":")[2]
    spec = getattr(env, "spec", None)
    return spec.id if spec is not None else getattr(env, "__name__", type(env).__name__).strip("<>")


def current_seed() -> int | None:
    """What `seed_everything` was last called with."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return None if seed is None else int(seed)


def has_convolutions(model: Any) -> bool:
    """Whether a network is large enough for several threads."""
    return any(isinstance(module, torch.nn.Conv2d) for module in model.modules())


@rank_zero_only
def use_env_steps(logger: Any) -> None:
    """Weights & Biases draws over `env_steps`, as the others do."""
    if isinstance(logger, WandbLogger):
        importlib.import_module("wandb").setup()  # reads WANDB_SILENT before Lightning's first call warns
        logger.experiment.define_metric("env_steps")
        logger.experiment.define_metric("*", step_metric="env_steps", step_sync=True)
