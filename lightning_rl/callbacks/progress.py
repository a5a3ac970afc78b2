"""A progress bar in what a run counts, environment steps or updates."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lightning_rl.callbacks.protocols import AlgorithmRun
from lightning_rl.errors import printable

SECONDS_BETWEEN_REFRESHES = 0.25
SECONDS_BETWEEN_LINES = 60.0
"""In a log file."""


class Output(Console):
    """The console; a reader that is gone ends the program, as it does elsewhere."""

    def on_broken_pipe(self) -> None:
        raise


class EnvStepsProgressBar(ProgressBar):
    """Environment steps (or updates) done of those planned, their number per second, mean return, and time left.

    A terminal shows a bar, a notebook a line that is kept up to date; elsewhere (a log file) a line appears about every minute and at the
    end. Evaluations are printed as they come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.bar: Progress | None = None
        self.cell_output: Any = None
        """A notebook's display of the line."""

    @cached_property
    def console(self) -> Console:
        """Return where to print."""
        return Output(highlight=False, soft_wrap=True, markup=False, emoji=False)

    @property
    def live(self) -> bool:
        """Return whether what is shown can be kept up to date."""
        return self.console.is_terminal or self.console.is_jupyter

    def __getstate__(self) -> dict[str, Any]:
        # they have locks: a spawned rank makes its own
        return {name: value for name, value in vars(self).items() if name not in ("console", "cell_output")} | {"cell_output": None}

    def disable(self) -> None:
        self.enabled = False

    def enable(self) -> None:
        self.enabled = True

    def print(self, *args: object, **kwargs: Any) -> None:
        if self.enabled:
            self.console.print(*(printable(each) if isinstance(each, str) else each for each in args), **kwargs)

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        self.started = self.shown_at = time.monotonic()
        self.first = pl_module.count
        if self.enabled and self.console.is_jupyter:  # rich's own bar would need ipywidgets
            from IPython.display import display

            self.cell_output = display({"text/plain": ""}, raw=True, display_id=True)
        elif self.enabled and self.live:
            bar = BarColumn(bar_width=12, complete_style="green", finished_style="green")
            text = TextColumn("{task.description}", style="none", markup=False)
            self.bar = Progress(bar, text, console=self.console, auto_refresh=False, transient=False)
            self.task = self.bar.add_task("", total=pl_module.length)
            self.bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, outputs: object, batch: object, batch_idx: int) -> None:
        now, period = time.monotonic(), SECONDS_BETWEEN_REFRESHES if self.live else SECONDS_BETWEEN_LINES
        if not self.enabled or (now - self.shown_at < period and not pl_module.finished):
            return
        self.shown_at = now
        if self.bar is not None:
            done = min(pl_module.count, pl_module.length)
            self.bar.update(self.task, completed=done, description=self.text(pl_module), refresh=True)
        elif self.cell_output is not None:
            self.cell_output.update({"text/plain": self.text(pl_module)}, raw=True)
        else:
            self.console.print(self.text(pl_module))

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, metrics: dict[str, float]) -> None:
        """Print the result of an evaluation."""
        mean, deviation = metrics["eval/mean_reward"], metrics["eval/std_reward"]
        loss = f", validation loss {metrics['val/loss']:.4g}" if "val/loss" in metrics else ""
        current = metrics.get("eval/mean_reward_lesson")
        where = "" if current is None else f" in the final lesson, {current:.1f} in the current one"
        self.print(f"evaluation at {pl_module.count:,} {unit(pl_module)}: mean return {mean:.1f} ± {deviation:.1f}{where}{loss}")

    def text(self, algorithm: AlgorithmRun) -> str:
        """Return what is done of what is planned, the speed since the start, the mean return and the time left."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        speed = (algorithm.count - self.first) / seconds
        left = timedelta(seconds=round(max(0, algorithm.length - algorithm.count) / max(speed, 1e-9)))
        done, name = f"{algorithm.count:,}/{algorithm.length:,}", unit(algorithm)
        return printable(f"{done} {name} · {speed:,.0f} {name}/s · {algorithm.in_short()} · ETA {left}")

    def teardown(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_exception(self, trainer: pl.Trainer, pl_module: AlgorithmRun, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


def unit(algorithm: AlgorithmRun) -> str:
    """Return what is counted, in one word."""
    return algorithm.counter.removeprefix("env_")
