"""What each flag, callback, logger, strategy, precision and plugin of Lightning does here: the rows that `test_lightning_table.py` tries.

    python -m tests.lightning_table

writes them into docs/lightning.md.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning import callbacks as cb
from pytorch_lightning import loggers, plugins, profilers

from lightning_rl import CheckpointConfig, EvaluationConfig
from lightning_rl.training.trainer_flags import REFUSED_FLAGS

PAGE = Path(__file__).parent.parent / "docs" / "lightning.md"
BEGIN, END = "<!-- made by python -m tests.lightning_table -->", "<!-- end -->"
SAME, LEARNS = "the same weights as without it", "all iterations"


@dataclass(frozen=True)
class Row:
    """One way to use a thing of Lightning.

    Args:
        kind: flag, callback, logger, strategy, precision, plugin or profiler.
        name: Lightning's.
        shown: how it is written, for the page.
        flags: makes the Trainer's arguments, from a folder.
        outcome: `SAME`, `LEARNS` (the run has its length; weights may differ), the number of iterations after which the run ends, or what
            the one line says that refuses it.
        note: for the page.
        algorithms: with which it is tried; PPO, and SAC for what touches learning.
    """

    kind: str
    name: str
    shown: str
    flags: Callable[[Path], dict[str, Any]]
    outcome: str | int
    note: str = ""
    algorithms: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether one line refuses it."""
        return isinstance(self.outcome, str) and self.outcome not in (SAME, LEARNS)

    @property
    def text(self) -> str:
        """The page's line."""
        what = "refused" if self.refused else "works"
        return f"| `{self.shown}` | {what}{': ' * bool(self.note)}{self.note} |"


def flag(name: str, *values: object, outcome: str | int = SAME, note: str = "") -> Iterable[Row]:
    """Make a row for each value of a flag."""
    for value in values:
        yield Row("flag", name, f"{name}={value!r}", lambda folder, value=value: {name: value}, outcome, note)


def refused_flag(name: str, value: object) -> Row:
    """Make the row of a flag that the Trainer refuses."""
    _, reason, instead = REFUSED_FLAGS[name]
    return Row(
        "flag", name, f"{name}={value!r}", lambda folder: {name: value}, f"trainer.{name} .*; use {instead}", f"{reason}; use {instead}"
    )


def callback(make: Callable[[], pl.Callback], shown: str, outcome: str | int = SAME, note: str = "", **flags: Any) -> Row:
    """Make the row of a callback."""
    name = shown.partition("(")[0]
    return Row("callback", name, shown, lambda folder: {"callbacks": [make()], **flags}, outcome, note)


def logger(name: str, make: Callable[[Path], Any], note: str = "", outcome: str = SAME) -> Row:
    """Make the row of a logger."""
    return Row("logger", name, name, lambda folder: {"logger": make(folder)}, outcome, note)


class Writer(cb.BasePredictionWriter):
    """A callback that would write predictions."""

    def write_on_batch_end(self, *_: Any) -> None:
        """Write nothing."""


EVALUATED: dict[str, Any] = {"evaluation": EvaluationConfig(every_n_env_steps=32, episodes=1, num_envs=1)}
SAVING: dict[str, Any] = {"checkpoint": CheckpointConfig()}
OF_EPOCHS = "evaluations are validations"

FLAGS = [
    *flag("accelerator", "cpu", "auto"),
    *flag("accelerator", "gpu", outcome="CUDA|gpu", note="by Lightning, on a machine without one; else it works"),
    *flag("accelerator", "tpu", "quantum", outcome="xla|quantum", note="by Lightning"),
    *flag("devices", 1, "auto", note="1 is the default, on a machine with several GPUs too; under torchrun its number"),
    *flag("devices", 0, outcome="accelerator|devices", note="by Lightning"),
    *flag("num_nodes", 1, note="with more, as Lightning does: it waits for them"),
    *flag("fast_dev_run", True, 2, outcome=LEARNS, note="one iteration, or two, and each loss runs in them; no files"),
    *flag("max_epochs", -1, 1, note="a run is one epoch, or more with `limit_train_batches`"),
    *flag("max_epochs", 3, outcome="a run is one epoch", note="a run is one epoch; use model.max_env_steps or limit_train_batches"),
    *flag("max_steps", 3, outcome=3, note="iterations"),
    *flag("min_steps", 5, note="iterations; not more than the run has"),
    *flag("min_steps", 100, outcome="raise max_env_steps", note="more iterations than the run has"),
    *flag("min_epochs", 1),
    *flag("min_epochs", 7, outcome="raise max_env_steps", note="more iterations than the run has"),
    *flag("max_time", {"minutes": 10}, datetime.timedelta(minutes=10), "00:00:10:00"),
    *flag("limit_train_batches", 1.0, 100),
    *flag("limit_train_batches", 0.5, note="an epoch is half the run, and there are two"),
    *(
        row
        for name in ("max_steps", "max_epochs", "limit_train_batches")
        for row in flag(name, 0, outcome=0, note="nothing is trained, and a line says so")
    ),
    Row(
        "flag",
        "limit_train_batches",
        "limit_train_batches=2, max_epochs=2",
        lambda _: {"limit_train_batches": 2, "max_epochs": 2},
        4,
        "iterations",
    ),
    *flag("reload_dataloaders_every_n_epochs", 1, note="the run goes on with the data it has"),
    *flag("limit_val_batches", 0, note="no evaluations"),
    *flag("limit_val_batches", 1.0),
    *(
        refused_flag(name, value)
        for name, value in [
            ("limit_val_batches", 7),
            ("limit_test_batches", 0.5),
            ("limit_predict_batches", 3),
            ("overfit_batches", 2),
            ("val_check_interval", 0.25),
            ("check_val_every_n_epoch", 2),
            ("num_sanity_val_steps", 2),
            ("gradient_clip_val", 0.5),
            ("gradient_clip_algorithm", "norm"),
            ("accumulate_grad_batches", 4),
        ]
    ),
    *flag("log_every_n_steps", 1, 50, note="for what others log; rows of the run come every `log_interval`"),
    *flag("enable_checkpointing", True, False),
    *flag("enable_progress_bar", True, False),
    *flag("enable_model_summary", True, False),
    *flag("deterministic", True, "warn"),
    *flag("benchmark", True, False),
    *flag("inference_mode", True, False, note="False is the default: tensors that modules keep in evaluations can be learned from"),
    *flag("use_distributed_sampler", True, False, note="experience has no sampler"),
    *flag("sync_batchnorm", True, False, note="between GPUs; on CPUs torch refuses it for a network with BatchNorm"),
    *flag("detect_anomaly", True, False),
    *flag("enable_autolog_hparams", True, False),
    *flag("barebones", True, note="no evaluations, checkpoints, rows or bar"),
    Row("flag", "default_root_dir", "default_root_dir=folder", lambda folder: {"default_root_dir": folder / "mine"}, SAME),
    *flag("model_registry", "mine", note="loggers receive each best and last checkpoint"),
    *flag("callbacks", None, []),
    *flag("plugins", None, []),
    *flag("profiler", None),
    *flag("logger", None, True, False, []),
    *flag("strategy", "auto"),
    *flag("precision", None),
]

PRECISIONS = [
    *(Row("precision", name, name, lambda _, name=name: {"precision": name}, SAME) for name in ("32-true", "32")),
    *(Row("precision", name, name, lambda _, name=name: {"precision": name}, LEARNS) for name in ("bf16-mixed", "16-mixed")),
    *(
        Row("precision", name, name, lambda _, name=name: {"precision": name}, "returns need float32", "returns need float32")
        for name in ("bf16-true", "16-true", "64-true")
    ),
    *(
        Row(
            "precision",
            name,
            name,
            lambda _, name=name: {"precision": name},
            "transformer|Transformer",
            "by Lightning, without its package",
        )
        for name in ("transformer-engine", "transformer-engine-float16")
    ),
]

CALLBACKS = [
    callback(
        lambda: cb.EarlyStopping("eval/mean_reward", mode="max", patience=99),
        "EarlyStopping('eval/mean_reward')",
        SAME,
        OF_EPOCHS,
        **EVALUATED,
    ),
    callback(
        lambda: cb.EarlyStopping("train/loss"),
        "EarlyStopping('train/loss')",
        "would never stop the run",
        "a run is one epoch; monitor evaluations",
        **EVALUATED,
    ),
    callback(
        lambda: cb.ModelCheckpoint(monitor="eval/mean_reward", mode="max"),
        "ModelCheckpoint(monitor='eval/mean_reward')",
        SAME,
        OF_EPOCHS,
        **EVALUATED,
        **SAVING,
    ),
    callback(
        lambda: cb.ModelCheckpoint(monitor="train/loss"),
        "ModelCheckpoint(monitor='train/loss')",
        "would be checked only at the end",
        "a run is one epoch; add every_n_train_steps",
        **SAVING,
    ),
    callback(lambda: cb.ModelCheckpoint(every_n_train_steps=2), "ModelCheckpoint(every_n_train_steps=2)", SAME, "iterations", **SAVING),
    Row(
        "callback",
        "OnExceptionCheckpoint",
        "OnExceptionCheckpoint(folder)",
        lambda folder: {"callbacks": [cb.OnExceptionCheckpoint(folder)], **SAVING},
        SAME,
    ),
    callback(cb.DeviceStatsMonitor, "DeviceStatsMonitor()", SAME, logger=True),
    callback(cb.LearningRateMonitor, "LearningRateMonitor()", SAME, logger=True),
    callback(lambda: cb.ThroughputMonitor(lambda batch: 1), "ThroughputMonitor(batch_size_fn)", SAME),
    callback(lambda: cb.Timer("00:00:10:00"), "Timer('00:00:10:00')", SAME),
    callback(cb.ModelSummary, "ModelSummary()", SAME),
    callback(cb.RichModelSummary, "RichModelSummary()", SAME),
    callback(cb.RichProgressBar, "RichProgressBar()", SAME, "with the return", enable_progress_bar=True),
    callback(cb.TQDMProgressBar, "TQDMProgressBar()", SAME, "with the return", enable_progress_bar=True),
    callback(lambda: cb.LambdaCallback(on_train_start=lambda *_: None), "LambdaCallback(on_train_start=…)", SAME),
    callback(cb.EMAWeightAveraging, "EMAWeightAveraging()", LEARNS, "the averaged weights are evaluated and saved", **EVALUATED),
    callback(
        lambda: cb.WeightAveraging(avg_fn=lambda old, new, num: (old + new) / 2),
        "WeightAveraging(avg_fn=…)",
        LEARNS,
        "as EMAWeightAveraging",
        **EVALUATED,
    ),
    Row(
        "callback",
        "StochasticWeightAveraging",
        "StochasticWeightAveraging(1e-3, 1)",
        lambda _: {"callbacks": [cb.StochasticWeightAveraging(1e-3, 1)], "max_epochs": 2, "limit_train_batches": 3},
        LEARNS,
        "with one optimizer, in runs of several epochs (`limit_train_batches`); the model has it after `fit`, `last.ckpt` does not",
        ("PPO",),
    ),
    callback(
        lambda: cb.StochasticWeightAveraging(1e-3, 1),
        "StochasticWeightAveraging(1e-3, 1) in a run of one epoch",
        "would restore the initial weights",
        "it would restore the initial weights",
    ),
    callback(lambda: cb.ModelPruning("l1_unstructured", amount=0.1), "ModelPruning('l1_unstructured')", LEARNS),
    callback(
        lambda: cb.GradientAccumulationScheduler({0: 2}),
        "GradientAccumulationScheduler({0: 2})",
        "use a larger batch_size",
        "use a larger batch_size",
    ),
    callback(cb.BatchSizeFinder, "BatchSizeFinder()", "use batch_size or num_envs", "use batch_size or num_envs"),
    callback(cb.LearningRateFinder, "LearningRateFinder()", "use learning_rate", "use learning_rate"),
    callback(cb.SpikeDetection, "SpikeDetection()", "use on_nan", "use on_nan"),
    callback(
        Writer, "BasePredictionWriter()", "use the episodes that trainer.predict returns", "use the episodes that `trainer.predict` returns"
    ),
    callback(
        cb.BackboneFinetuning,
        "BackboneFinetuning()",
        "use a configure_optimizers",
        "use a `configure_optimizers` that leaves the backbone out",
    ),
]

LOGGERS = [
    logger("CSVLogger", lambda folder: loggers.CSVLogger(folder)),
    logger("TensorBoardLogger", lambda folder: loggers.TensorBoardLogger(folder)),
    logger("WandbLogger", lambda folder: loggers.WandbLogger(save_dir=folder, mode="offline"), "offline too"),
    *(
        Row(
            "logger",
            name,
            name,
            lambda folder, name=name: {"logger": getattr(loggers, name)()},
            package,
            "by Lightning, without its package",
        )
        for name, package in (("MLFlowLogger", "mlflow"), ("CometLogger", "comet"), ("LitLogger", "litlogger"))
    ),
]

STRATEGIES = [
    *(Row("strategy", name, name, lambda _, name=name: {"strategy": name}, SAME) for name in ("single_device", "ddp")),
    *(
        Row(
            "strategy",
            name,
            name,
            lambda _, name=name: {"strategy": name},
            SAME,
            "tried on one process, and on two in `tests/processes/test_ranks.py`",
        )
        for name in ("ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")
    ),
    *(
        Row("strategy", name, name, lambda _, name=name: {"strategy": name, "accelerator": "auto"}, words, "by Lightning")
        for name, words in (("fsdp", "FSDP|GPU"), ("deepspeed", "deepspeed|DeepSpeed"), ("xla", "XLA|TPU|xla"), ("dp", "dp"))
    ),
]

PLUGINS = [
    Row("plugin", "TorchCheckpointIO", "TorchCheckpointIO()", lambda _: {"plugins": [plugins.TorchCheckpointIO()]}, SAME),
    Row("plugin", "AsyncCheckpointIO", "AsyncCheckpointIO()", lambda _: {"plugins": [plugins.AsyncCheckpointIO()]}, SAME),
    Row(
        "plugin",
        "MixedPrecision",
        "MixedPrecision('bf16-mixed', 'cpu')",
        lambda _: {"plugins": [plugins.MixedPrecision("bf16-mixed", "cpu")]},
        LEARNS,
    ),
    Row(
        "plugin",
        "DoublePrecision",
        "DoublePrecision()",
        lambda _: {"plugins": [plugins.DoublePrecision()]},
        "returns need float32",
        "returns need float32",
    ),
    Row(
        "plugin",
        "HalfPrecision",
        "HalfPrecision('bf16-true')",
        lambda _: {"plugins": [plugins.HalfPrecision("bf16-true")]},
        "returns need float32",
        "returns need float32",
    ),
]

PROFILERS = [
    *(Row("profiler", name, name, lambda _, name=name: {"profiler": name}, SAME) for name in ("simple", "advanced")),
    Row("profiler", "PassThroughProfiler", "PassThroughProfiler()", lambda _: {"profiler": profilers.PassThroughProfiler()}, SAME),
    Row("profiler", "pytorch", "pytorch", lambda folder: {"profiler": profilers.PyTorchProfiler(folder)}, SAME),
]

TABLES = {
    "Flags": FLAGS,
    "Precisions": PRECISIONS,
    "Callbacks": CALLBACKS,
    "Loggers": LOGGERS,
    "Strategies": STRATEGIES,
    "Plugins": PLUGINS,
    "Profilers": PROFILERS,
}
ROWS = [row for rows in TABLES.values() for row in rows]


def page() -> str:
    """Write the tables as Markdown."""
    tables = []
    for title, rows in TABLES.items():
        tables.append("\n".join([f"### {title}", "", "| | |", "| --- | --- |", *(row.text for row in rows)]))
    return "\n\n".join([BEGIN, *tables, END])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(before + page() + after, encoding="utf-8")
