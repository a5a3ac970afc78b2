"""A run's own learning curve, drawn while it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.checkpoints.atomic import write_bytes
from lightning_rl.errors import SettingError
from lightning_rl.loggers import going_on, read_rows
from lightning_rl.reports.runs import COLORS, TRAINING, label, new_figure, png, series


class PlotCurve(pl.Callback):
    """Draws `curve.png` into the run's folder at each evaluation: mean returns of evaluations and of training over what the run counts.

    It shows what `evaluations.csv` and `metrics.csv` hold, so that the curve of a run that continues begins where the run did. Learning is
    the same with and without it. Needs the extra `plots`.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not any(isinstance(callback, RolloutEvaluator) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise SettingError("trainer.plot draws at evaluations, and this run has none: leave evaluation as it is")
        new_figure(1, 1, "trainer.plot")  # now, not after the first rollouts

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Draw, with this evaluation."""
        if trainer.is_global_zero:
            folder = Path(str(trainer.log_dir))
            with going_on(pl_module, "curve.png"):
                write_bytes(folder / "curve.png", draw(folder, pl_module.counter))


def draw(folder: Path, counter: str) -> bytes:
    """The curve of the run in a folder as a PNG file."""
    figure = new_figure(8, 4.8, "trainer.plot")
    axes = figure.subplots()
    for name, file, column, style in (("training", "metrics.csv", TRAINING, "-"), ("evaluations", "evaluations.csv", "return", "o-")):
        found = series(folder / file, read_rows(folder / file), counter, column)
        if len(found):
            axes.plot(*found.T, style, color=COLORS[name == "evaluations"], markersize=4, label=name)
    label(axes, "/".join(folder.parts[-3:]), counter)
    return png(figure)
