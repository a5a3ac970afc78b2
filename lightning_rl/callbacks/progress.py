"""A progress bar in what a run counts, environment steps or updates."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from lightning_rl.errors import printable

REFRESH = 0.25
"""Seconds between two states of a bar."""
LINE = 60.0
"""Seconds between two lines of a log file."""


class Output(Console):
    """Where to write; a reader that is gone ends the program as it does elsewhere."""

    def on_broken_pipe(self) -> None:
        raise


class EnvStepsProgressBar(ProgressBar):
    """Environment steps (or updates) done of those planned, their number per second, mean return, and time left.

    A terminal or notebook shows a bar; elsewhere (a log file) a line appears about every minute and at
    the end. Evaluations are told as they come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.bar: Progress | None = None

    @cached_property
    def console(self) -> Console:
        """Where to write."""
        return Output(highlight=False, soft_wrap=True, markup=False, emoji=False)

    @property
    def live(self) -> bool:
        """Whether a bar can move there."""
        return self.console.is_terminal or self.console.is_jupyter

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "console"}  # it has locks: a spawned rank makes its own

    def disable(self) -> None:
        self.enabled = False

    def enable(self) -> None:
        self.enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.enabled:
            self.console.print(*(printable(each) if isinstance(each, str) else each for each in args), **kwargs)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.started = self.shown_at = time.monotonic()
        self.first, self.period = pl_module.count, REFRESH if self.live else LINE
        if self.enabled and self.live:
            columns = (BarColumn(bar_width=12, complete_style="green", finished_style="green"), StepsColumn())
            self.bar = Progress(*columns, console=self.console, auto_refresh=False, transient=False)
            self.task = self.bar.add_task("", total=pl_module.length, text="")
            self.bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        if not self.enabled or (now - self.shown_at < self.period and not pl_module.finished):
            return
        self.shown_at = now
        if self.bar is not None:
            done = min(pl_module.count, pl_module.length)
            self.bar.update(self.task, completed=done, text=self.text(pl_module), refresh=True)
        elif not self.live:
            self.console.print(self.text(pl_module))

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Say what an evaluation found."""
        mean, deviation = metrics["eval/mean_reward"], metrics["eval/std_reward"]
        loss = f", validation loss {metrics['val/loss']:.4g}" if "val/loss" in metrics else ""
        current = metrics.get("eval/mean_reward_lesson")
        where = "" if current is None else f" in the final lesson, {current:.1f} in the current one"
        self.print(f"evaluation at {pl_module.count:,} {unit(pl_module)}: mean return {mean:.1f} ± {deviation:.1f}{where}{loss}")

    def text(self, algorithm: Any) -> str:
        """What is done of what is planned, speed since the start, how it goes, time left."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        speed = (algorithm.count - self.first) / seconds
        left = timedelta(seconds=round(max(0, algorithm.length - algorithm.count) / max(speed, 1e-9)))
        done, name = f"{algorithm.count:,}/{algorithm.length:,}", unit(algorithm)
        return printable(f"{done} {name} · {speed:,.0f} {name}/s · {algorithm.in_short()} · ETA {left}")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


def unit(algorithm: Any) -> str:
    """What is counted, in one word."""
    return str(algorithm.counter).removeprefix("env_")


class StepsColumn(ProgressColumn):
    """The text behind the bar."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields["text"]))
