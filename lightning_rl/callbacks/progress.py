"""A progress bar in environment steps."""

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

REFRESH = 0.25
"""Seconds between two looks at the clock of a terminal."""


class EnvStepsProgressBar(ProgressBar):
    """Environment steps done of those planned, steps per second, mean return, and time left.

    A terminal or notebook shows a bar; elsewhere (a log file) a line appears every tenth of the run. Evaluations are told as they come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.bar: Progress | None = None

    @cached_property
    def console(self) -> Console:
        """Where to write."""
        return Console(highlight=False, soft_wrap=True)

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
            self.console.print(*args, **kwargs)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.started, self.first = time.monotonic(), pl_module.env_steps
        self.shown_at, self.shown_tenth = 0.0, 0
        if self.enabled and self.live:
            columns = (BarColumn(bar_width=12, complete_style="green", finished_style="green"), StepsColumn())
            self.bar = Progress(*columns, console=self.console, auto_refresh=False, transient=False)
            self.task = self.bar.add_task("", total=pl_module.max_env_steps, text="")
            self.bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        if self.bar is not None and (now - self.shown_at >= REFRESH or pl_module.finished):
            self.shown_at = now
            done = min(pl_module.env_steps, pl_module.max_env_steps)
            self.bar.update(self.task, completed=done, text=self.text(pl_module), refresh=True)
        elif self.enabled and not self.live and 10 * pl_module.env_steps // pl_module.max_env_steps > self.shown_tenth:
            self.shown_tenth = 10 * pl_module.env_steps // pl_module.max_env_steps
            self.console.print(self.text(pl_module))

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Say what an evaluation found."""
        mean, deviation = metrics["eval/mean_reward"], metrics["eval/std_reward"]
        self.print(f"evaluation at {pl_module.env_steps:,} steps: mean return {mean:.1f} ± {deviation:.1f}")

    def text(self, algorithm: Any) -> str:
        """Steps done of planned, speed since the start, mean return, time left."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        speed = (algorithm.env_steps - self.first) / seconds
        left = timedelta(seconds=round(max(0, algorithm.max_env_steps - algorithm.env_steps) / max(speed, 1e-9)))
        returns = algorithm.collector.statistics.metrics().get("rollout/ep_rew_mean")
        shown = "–" if returns is None else f"{returns:.1f}"
        return f"{algorithm.env_steps:,}/{algorithm.max_env_steps:,} steps · {speed:,.0f} steps/s · return {shown} · ETA {left}"

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


class StepsColumn(ProgressColumn):
    """The text behind the bar."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields["text"]))
