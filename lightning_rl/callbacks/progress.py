"""Print a summary when a run starts, then a progress bar in environment steps or updates."""

from __future__ import annotations

import html
import math
import textwrap
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.trainer.states import RunningStage
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lightning_rl.callbacks import AlgorithmRun, callbacks_of
from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.data.episodes import WINDOW
from lightning_rl.errors import printable, short_number
from lightning_rl.spaces import describe_space

DIAGNOSTICS = {
    "train/approx_kl": ("KL", 1),
    "train/loss": ("loss", 1),
    "train/critic_loss": ("critic loss", 1),
    "train/entropy": ("entropy", 1),
    "train/entropy_loss": ("entropy", -1),
    "train/explained_variance": ("explained variance", 1),
}
"""Metrics that show whether learning is healthy, with their label and sign in the progress bar, which shows as many as fit."""
SECONDS_BETWEEN_REFRESHES = 0.25
SECONDS_OF_A_LONG_ITERATION = 2.0
"""After this time, an iteration or an evaluation is shown while it lasts."""
SECONDS_BETWEEN_LOOKS = 0.5
"""Between refreshes during a long iteration."""
SECONDS_BETWEEN_LINES = 60.0
"""Between lines of progress in a log file."""
BAR_WIDTH = 12
VALUE_COLUMN = 16
"""Where the values of the summary begin, also in the further lines of a long one."""


def describe_run(trainer: pl.Trainer, algorithm: AlgorithmRun) -> list[str]:
    """Return the lines of the summary of a run that is about to start or resume."""
    name, collector, spaces = type(algorithm).__name__, algorithm.collector, algorithm.spaces
    behaviors = f", behaviors {', '.join(algorithm.run.learners)}" if "" not in algorithm.run.learners else ""
    num_copies = collector.num_envs // spaces.rows
    copies = "" if collector.n_steps == math.inf else f", {num_copies} cop{'ies' if num_copies > 1 else 'y'}"
    groups = f" in {spaces.rows // spaces.group_size} groups" if spaces.groups else ""
    copies += f" of {spaces.rows} agents{groups} that learn" if copies and spaces.rows > 1 else ""
    copies += f" in each of {trainer.world_size} processes" if copies and trainer.world_size > 1 else ""
    parameters = [parameter for parameter in algorithm.parameters() if parameter.requires_grad]
    threads = torch.get_num_threads()
    cpu = f"the CPU, {threads} thread{'s' * (threads > 1)}"
    device = cpu if parameters[0].device.type == "cpu" else str(parameters[0].device)
    ranks = f", {trainer.world_size} processes" if trainer.world_size > 1 else ""
    seed = getattr(trainer, "seed", None)
    at = f", continued at {algorithm.count:,}" if algorithm.count else ""
    return [
        f"{name} on {collector.name}{copies}{behaviors}",
        f"  observations  {describe_space(spaces.observation)}",
        f"  actions       {describe_space(spaces.action)}{', masked' if spaces.masked else ''}",
        f"  learns        {sum(parameter.numel() for parameter in parameters):,} parameters on {device}{ranks}",
        f"  length        {algorithm.length:,} {algorithm.counted}{at}, {'no seed' if seed is None else f'seed {seed}'}",
        f"  evaluation    {describe_evaluation(trainer, algorithm)}",
        *describe_returns(trainer, algorithm),
        f"  folder        {getattr(trainer, 'run_folder', trainer.default_root_dir) or 'none'}",
    ]


def wrap_summary(line: str, width: int) -> str:
    """Break a line of the summary between its words, and continue it below its value."""
    return textwrap.fill(line, width, subsequent_indent=" " * VALUE_COLUMN, break_long_words=False, break_on_hyphens=False)


def describe_returns(trainer: pl.Trainer, algorithm: AlgorithmRun) -> list[str]:
    """Return a line on what the returns of training and of evaluations are, if a run has both."""
    evaluators = callbacks_of(trainer, RolloutEvaluator)
    if not evaluators or evaluators[0].is_off or algorithm.counter == "updates":
        return []
    actions = "the most likely actions" if evaluators[0].deterministic else "sampled actions"
    return [f"  returns       training: the last {WINDOW} episodes, as explored; evaluations: the newest weights, {actions}"]


def describe_evaluation(trainer: pl.Trainer, algorithm: AlgorithmRun) -> str:
    """Describe when a run is evaluated, and with how many episodes."""
    evaluators = callbacks_of(trainer, RolloutEvaluator)
    if not evaluators or evaluators[0].is_off:
        return "none"
    first = evaluators[0]
    collector, updates = algorithm.collector, getattr(algorithm, "updates_per_iteration", math.inf)
    steps = collector.n_steps * collector.num_envs * trainer.world_size  # infinite if unknown
    iteration = updates if algorithm.counter == "updates" else steps  # evaluations happen between iterations
    is_short = first.interval < iteration < math.inf
    when = "after each iteration" if is_short else f"every {first.interval:,} {algorithm.counted}"
    episodes = f"{first.episodes} episode{'s' * (first.episodes > 1)} {when}"
    return (
        f"{episodes}, postponed if evaluations would play over {first.max_share:.0%} of the steps"
        if first.is_bounded(algorithm)
        else episodes
    )


class Output(Console):
    """A console that prints plain text, also in a notebook, and on which a broken pipe ends the program, as it does elsewhere."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False, force_jupyter=False)

    def on_broken_pipe(self) -> None:
        raise


def in_notebook() -> bool:
    """Return whether the program runs in a notebook kernel."""
    return Console().is_jupyter


class EnvStepsProgressBar(ProgressBar):
    """Print a summary of the run, then its progress: environment steps (or updates), episode means, diagnostics, speed and time left.

    A terminal and a notebook show a bar; elsewhere (a log file) a line appears about every minute and at the end. A thread shows how far a
    long iteration or evaluation is, so that steps cost nothing. Results of evaluations are printed when they arrive. If the deterministic
    policy is much worse than the sampled one, a hint is printed once.
    """

    cell_output: Any = None
    """The display of the bar in a notebook."""
    watch: threading.Thread | None = None
    """Shows long iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.bar: Progress | None = None
        self.hinted = False

    @cached_property
    def console(self) -> Console:
        """Return the console on which to print."""
        return Output()

    @property
    def live(self) -> bool:
        """Return whether the output can be updated in place."""
        return self.bar is not None or self.cell_output is not None

    def __getstate__(self) -> dict[str, object]:
        # these have locks: a spawned rank makes its own
        return {name: value for name, value in vars(self).items() if name not in ("console", "cell_output", "watch", "has_ended")}

    def disable(self) -> None:
        self.enabled = False

    def enable(self) -> None:
        self.enabled = True

    @property
    def is_enabled(self) -> bool:
        """Return whether it prints; Lightning checks this when an algorithm prints."""
        return self.enabled

    def print(self, *args: object, **kwargs: Any) -> None:
        if self.enabled:
            self.console.print(*(printable(argument) if isinstance(argument, str) else argument for argument in args), **kwargs)

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        self.started = self.shown_at = self.began_at = time.monotonic()
        self.first, self.updates = pl_module.count, pl_module.updates
        width = self.console.width if self.console.is_terminal or in_notebook() else None  # lines of a log file stay whole
        for line in describe_run(trainer, pl_module):
            self.print(line if width is None else wrap_summary(line, width))
        if not self.enabled:
            return
        self.metrics = describe_metrics(pl_module)
        if in_notebook():  # rich's own bar would need ipywidgets
            from IPython.display import display

            self.cell_output = display({"text/plain": ""}, raw=True, display_id=True)
        elif self.console.is_terminal:
            self.bar = make_bar(self.console)
            self.task = self.bar.add_task("", total=pl_module.length)
            self.bar.start()
        self.has_ended = threading.Event()
        self.watch = threading.Thread(target=self.show_long_iterations, args=(trainer, pl_module), daemon=True)
        self.watch.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, outputs: object, batch: object, batch_idx: int) -> None:
        now, period = time.monotonic(), SECONDS_BETWEEN_REFRESHES if self.live else SECONDS_BETWEEN_LINES
        self.began_at, self.updates = now, pl_module.updates
        if self.enabled and (now - self.shown_at >= period or pl_module.finished):
            self.shown_at, self.metrics = now, describe_metrics(pl_module)
            self.show(pl_module)

    def show_long_iterations(self, trainer: pl.Trainer, algorithm: AlgorithmRun) -> None:
        """Refresh the display while an iteration or an evaluation takes long, until the run ends."""
        stage = trainer.state.stage
        while not self.has_ended.wait(SECONDS_BETWEEN_LOOKS):
            now = time.monotonic()
            if trainer.state.stage != stage:
                stage, self.began_at = trainer.state.stage, now
            if now - self.began_at < SECONDS_OF_A_LONG_ITERATION or not (self.live or now - self.shown_at >= SECONDS_BETWEEN_LINES):
                continue
            if not self.live:
                self.shown_at = now
            try:
                self.show(algorithm, self.describe_activity(trainer, algorithm, now - self.began_at))
            except BrokenPipeError:  # ends the run at its next line
                return

    def describe_activity(self, trainer: pl.Trainer, algorithm: AlgorithmRun, seconds: float) -> list[str]:
        """Return how far the current iteration or evaluation is, in short texts. Reads numbers alone, which the run may be changing."""
        if trainer.state.stage == RunningStage.VALIDATING:
            evaluators = callbacks_of(trainer, RolloutEvaluator)
            played, total = map(sum, zip(*(evaluator.count_episodes(trainer) for evaluator in evaluators), strict=True))
            return [f"evaluation: {played:,} of {total:,} episodes", f"{seconds:.0f} s"]
        updates = algorithm.updates - self.updates
        return [f"iteration: {seconds:.0f} s", *([f"{updates:,} update{'s' * (updates > 1)}"] if updates else [])]

    def show(self, algorithm: AlgorithmRun, activity: Sequence[str] = ()) -> None:
        """Refresh the bar, or print a line; `activity`: what takes long."""
        if self.bar is not None:
            done = min(algorithm.run.count_so_far, algorithm.length)
            text = self.text(algorithm, self.console.width - BAR_WIDTH - 1, activity)
            self.bar.update(self.task, completed=done, description=text, refresh=True)
        elif self.cell_output is not None:
            self.cell_output.update(self.cell(algorithm, activity), raw=True)
        else:
            self.console.print(self.text(algorithm, activity=activity))

    def on_evaluation_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, metrics: dict[str, float]) -> None:
        """Print the result of an evaluation."""
        mean, deviation = metrics["eval/mean_reward"], round(metrics["eval/std_reward"], 12)  # 0 where returns differ by rounding alone
        loss = f", validation loss {metrics['val/loss']:.4g}" if "val/loss" in metrics else ""
        current = metrics.get("eval/mean_reward_lesson")
        where = "" if current is None else f" in the final lesson, {short_number(current)} in the current one"
        success = f", success {metrics['eval/success_rate']:.0%}" if "eval/success_rate" in metrics else ""
        result = f"mean return {short_number(mean)} ± {short_number(deviation)}{success}{where}{loss}"
        self.print(f"evaluation at {pl_module.count:,} {unit(pl_module)}: {result}")
        sampled = pl_module.collector.statistics.metrics().get("rollout/ep_rew_mean")
        without_chance = any(callback.deterministic for callback in callbacks_of(trainer, RolloutEvaluator))
        if sampled is not None and without_chance and not self.hinted and mean < sampled - max(2 * deviation, 0.25 * abs(sampled)):
            self.hinted = True
            way_out = "evaluate the sampled policy with evaluation.deterministic false"
            if hasattr(pl_module, "ent_coef"):
                way_out += ", or lower the entropy bonus, model.ent_coef"
            self.print(f"hint: training episodes, with sampled actions, return {short_number(sampled)}; {way_out}")

    def text(self, algorithm: AlgorithmRun, width: int | None = None, activity: Sequence[str] = ()) -> str:
        """Return the text of `join_progress` for the time since the start."""
        return join_progress(algorithm, self.first, time.monotonic() - self.started, self.metrics, width, activity)

    def cell(self, algorithm: AlgorithmRun, activity: Sequence[str] = ()) -> dict[str, str]:
        """Return the bar of a notebook, in HTML and as text."""
        text, done = self.text(algorithm, activity=activity), min(algorithm.run.count_so_far, algorithm.length)
        bar = f'<progress value="{done}" max="{algorithm.length}" style="width: 12em; vertical-align: middle"></progress>'
        return {"text/html": f"{bar} {html.escape(text)}", "text/plain": text}

    def teardown(self, trainer: pl.Trainer, pl_module: AlgorithmRun, stage: str) -> None:
        if self.watch is not None:
            self.has_ended.set()
            self.watch.join()
            self.watch = None
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_exception(self, trainer: pl.Trainer, pl_module: AlgorithmRun, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


def make_bar(console: Console) -> Progress:
    """Return a display of bars with texts, which is refreshed only on request."""
    bar = BarColumn(bar_width=BAR_WIDTH, complete_style="green", finished_style="green")
    return Progress(bar, TextColumn("{task.description}", style="none", markup=False), console=console, auto_refresh=False)


def describe_progress(algorithm: AlgorithmRun, first: int, seconds: float, width: int | None = None) -> str:
    """Return the progress so far: count and length, episode means, diagnostics, the speed since the start and the time left.

    `first`: the count at the start, `seconds` ago.  `width`: maximum number of characters; what does not fit is left out.
    """
    return join_progress(algorithm, first, seconds, describe_metrics(algorithm), width)


def describe_metrics(algorithm: AlgorithmRun) -> list[str]:
    """Return the mean return ("" without episodes) and other means of an algorithm, and its diagnostics, each as a short text."""
    metrics = algorithm.trainer.callback_metrics
    diagnostics = [f"{word} {short_number(sign * float(metrics[key]))}" for key, (word, sign) in DIAGNOSTICS.items() if key in metrics]
    return [*algorithm.run.in_short().split(" · "), *diagnostics]


def join_progress(
    algorithm: AlgorithmRun, first: int, seconds: float, metrics: Sequence[str], width: int | None = None, activity: Sequence[str] = ()
) -> str:
    """Return the text of `describe_progress` with the texts of `describe_metrics`; `activity`: what takes long now."""
    count, name, (mean, *others) = algorithm.run.count_so_far, unit(algorithm), metrics
    speed = (count - first) / max(seconds, 1e-9)
    time_left = timedelta(seconds=round(max(0, algorithm.length - count) / max(speed, 1e-9)))
    done, rate, left = f"{count:,}/{algorithm.length:,} {name}", f"{speed:,.0f} {name}/s", f"ETA {time_left}"
    chosen: list[str] = []
    for part in (*activity[:1], done, *activity[1:], mean, left, rate, *others):  # the most important first
        if part and (width is None or len(" · ".join([*chosen, part])) <= width):
            chosen.append(part)
    return printable(" · ".join(part for part in (done, *activity, mean, *others, rate, left) if part in chosen))


def unit(algorithm: AlgorithmRun) -> str:
    """Return the unit of the run's count, in one word."""
    return algorithm.counter.removeprefix("env_")
