"""`fit --seeds`: train runs that differ only in their seed, each in its own process, with one display for all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import numpy as np

from lightning_rl.callbacks import callbacks_of
from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.callbacks.progress import BAR_WIDTH, SECONDS_BETWEEN_LINES, Output, make_bar
from lightning_rl.callbacks.stopping import StopOnEvaluation, end_program
from lightning_rl.checkpoints.files import find_saved, last_generation
from lightning_rl.cli.fit import CheckingCLI, check, command_line, redirect_notices, say, train
from lightning_rl.cli.names import Option, SeedOptions
from lightning_rl.errors import SettingError, check_seed, printable
from lightning_rl.reports.runs import EVALUATIONS, is_run, read_config, read_run
from lightning_rl.reports.tables import NOTHING, Table, iqm, number, whole
from lightning_rl.settings.names import SECTIONS
from lightning_rl.settings.yaml_files import first_difference
from lightning_rl.training.loading import read_checkpoint, take_weights
from lightning_rl.training.resuming import check_fits
from lightning_rl.training.run_folder import environment_name, is_blank
from lightning_rl.training.run_processes import Message, RunPlan, RunPool
from lightning_rl.training.trainer_flags import check_beginning

LINE_WIDTH = 100
"""Characters of a line about a run's progress if the output is not a terminal."""


@dataclass
class SeedRun:
    """A run of one seed.

    Args:
        state: `waits`, `trains`, or how it ended: `ended`, `failed`, `stopped`, `unsaved`.
        count: environment steps or updates so far.
        text: its progress, or why it failed.
    """

    plan: RunPlan
    state: str = "waits"
    count: int = 0
    text: str = "waits"

    @property
    def seed(self) -> int:
        return self.plan.seed

    @property
    def folder(self) -> Path:
        return self.plan.folder

    def update(self, message: Message) -> None:
        """Update the state from a message of the run."""
        self.count = max(self.count, message.count)
        if message.waits:
            self.state, self.text = "trains", message.text or self.text
        else:
            self.state, self.text = message.kind, f"{message.kind}: {message.text}" if message.text else f"{message.kind} at {self.count:,}"


def fit_seeds(given: SeedOptions, options: list[Option], imports: list[str]) -> int:
    """Train a run for each seed."""
    redirect_notices()
    written = [f"{option.name}={option.value}" if option.value else option.name for option in options]
    base = check(written, imports)
    trainer = base.trainer
    check_settings(base)
    seeds = find_seeds(given.seeds, base.config_dump["seed_everything"])
    display = Display(seeds, base.model.length)
    runs = [SeedRun(plan_run(base, seed, written, imports, display.width)) for seed in seeds]
    for run in runs:
        check_folder(run, base)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has no affinity
    pool = RunPool(train, given.jobs or max(1, cores // (trainer.torch_threads or 1)))
    display.print(
        f"{type(base.model).__name__} on {environment_name(base.model.env)}, {min(pool.jobs, len(runs))} of {len(runs)} seeds at a time"
    )
    display.print(f"  length   {base.model.length:,} {base.model.counted} each")
    display.print(f"  runs     {runs[0].folder.parent}: {', '.join(run.folder.name for run in runs)}")
    display.print(f"  logs     {runs[0].plan.log.parent}")
    train_all(runs, pool, display)
    if pool.received is not None:
        again = [f"--seeds={given.seeds}", *([f"--jobs={given.jobs}"] if given.jobs else [])]
        arguments = [argument for argument in written if not argument.startswith("--force")]
        say(f"stopped by {pool.received.name}; continue: {command_line('fit', [*arguments, *again], imports)}")
        end_program(pool.received)
    print_results(runs)
    return 0


# ---------------------------------------------------------------- before anything runs


def check_settings(base: CheckingCLI) -> None:
    """Raise `SettingError` for settings with which several runs cannot be trained, or would all be the same."""
    trainer = base.trainer
    ckpt_path, init_from = base.ckpt_path, base.config_dump["init_from"]
    check_beginning(ckpt_path, init_from)
    if ckpt_path not in (None, "last"):
        raise SettingError(
            f"--seeds continues each run from its own checkpoint: --ckpt_path last, not {ckpt_path}; or --init_from {ckpt_path}"
        )
    if trainer.world_size > 1:
        raise SettingError(
            "--seeds trains each run in one process: leave out trainer.devices and strategy; --jobs trains several runs at a time"
        )
    if init_from is not None:
        take_weights(base.model, init_from)


def find_seeds(given: int | list[int], first: object) -> list[int]:
    """Return the seeds of the runs; `first` is `seed_everything`."""
    if isinstance(given, list):
        return given
    if isinstance(first, bool) or not isinstance(first, int):
        raise SettingError(f"--seeds {given} counts from seed_everything, which must be a number, got {first!r}")
    check_seed("the last of --seeds", first + given - 1)
    return list(range(first, first + given))


def plan_run(base: CheckingCLI, seed: int, options: list[str], imports: list[str], width: int) -> RunPlan:
    """Plan the run of a seed."""
    trainer = base.trainer
    root = Path(trainer.default_root_dir)
    runs = root / type(base.model).__name__ / environment_name(base.model.env)
    name = f"{trainer.run_name}_seed_{seed}" if trainer.run_name else f"seed_{seed}"
    log = runs / "logs" / f"{name}.txt"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise trainer.cannot_write(error) from error
    config = {name: base.config_dump[name] for name in ("model", "trainer", *SECTIONS)}
    overrides = {"default_root_dir": str(root), "run_name": name, "torch_threads": config["trainer"]["torch_threads"] or 1}
    settings = {**config, "seed_everything": seed, "trainer": {**config["trainer"], **overrides}}
    return RunPlan(tuple(options), root, runs / name, seed, tuple(imports), log, width, settings)


def check_folder(run: SeedRun, base: CheckingCLI) -> None:
    """Note whether the run of a seed has already ended. Raise `SettingError` if its folder has another run, which would be lost."""
    trainer = base.trainer
    folder, continues = run.folder, base.ckpt_path == "last"
    saved, anything = last_generation(folder / "checkpoints"), find_saved(folder / "checkpoints")
    if base.config_dump["force"]:
        return
    if continues and saved is None:
        say(f"no last.ckpt in {folder}: starting a new run")
    if is_blank(folder):
        return
    keeps = saved is not None or anything is None  # with only best.ckpt, a run starts over, which reaches the same weights
    other = None if continues and keeps else first_difference(read_config(folder / "config.yaml"), run.plan.settings or {})
    if saved is None and (other is not None or not trainer.savers):
        what = "that saved nothing" if anything is None else "without last.ckpt"
        raise SettingError(f"there is a run in {folder} {what}: --force starts again and deletes it")
    if other is not None:
        raise SettingError(f"there is a run in {folder} with another {other}: --ckpt_path last continues it, --force deletes it")
    if saved is not None and has_ended(base, saved):
        run.state, run.text = "ended", "ended before"


def has_ended(base: CheckingCLI, saved: Path) -> bool:
    """Return whether a run is complete: it has its full length and its last evaluation, or its evaluations ended it."""
    trainer = base.trainer
    count, states = check_fits(base.model, saved), read_checkpoint(saved)["callbacks"]
    evaluated = [
        states[callback.state_key]["evaluated_at"] for callback in callbacks_of(trainer, RolloutEvaluator) if callback.state_key in states
    ]
    stoppers = [callback for callback in callbacks_of(trainer, StopOnEvaluation) if callback.state_key in states]
    finished = count >= base.model.length and all(at == count for at in evaluated)
    return finished or any(stopper.has_stopped(states[stopper.state_key]) for stopper in stoppers)


# ---------------------------------------------------------------- while they run, and afterwards


def train_all(runs: list[SeedRun], pool: RunPool, display: Display) -> None:
    """Train the runs that have not ended, until a signal comes."""
    waiting = [number for number, run in enumerate(runs) if run.state == "waits"]
    with pool.open(), display.showing(runs):
        while True:
            while waiting and pool.has_room:
                number = waiting.pop(0)
                pool.start(number, runs[number].plan)
                runs[number].state, runs[number].text = "trains", "starts"
                display.show(runs[number])
            if not pool.processes:
                return
            for number, message in pool.receive():
                if message.waits:
                    pool.answer(number)
                runs[number].update(message)
                display.show(runs[number])


class Display:
    """Show a line for each run: in a terminal a progress bar; elsewhere a line when its state changes, and once a minute.

    `length`: of a run.
    """

    def __init__(self, seeds: list[int], length: int) -> None:
        self.console = Output()
        self.bar = make_bar(self.console) if self.console.is_terminal else None
        self.length, self.label = length, max(len(str(seed)) for seed in seeds)
        self.shown: dict[int, tuple[str, float]] = {}
        """The state last printed for each seed, and when."""

    @property
    def width(self) -> int:
        """Return the maximum number of characters of a run's report of its progress."""
        return self.console.width - BAR_WIDTH - len(f" seed {'':{self.label}}  ") if self.bar is not None else LINE_WIDTH

    def print(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(printable(line))

    @contextmanager
    def showing(self, runs: list[SeedRun]) -> Iterator[None]:
        """Keep the lines of runs on the terminal."""
        if self.bar is None:
            yield
            return
        self.tasks = {run.seed: self.bar.add_task("", total=self.length) for run in runs}
        with self.bar:
            for run in runs:
                self.show(run)
            yield

    def show(self, run: SeedRun) -> None:
        """Show the progress of a run."""
        line = printable(f"seed {run.seed:{self.label}}  {run.text}")
        if self.bar is not None:
            done = self.length if run.state == "ended" else min(run.count, self.length)
            self.bar.update(self.tasks[run.seed], completed=done, description=line[: self.console.width - BAR_WIDTH - 1], refresh=True)
            return
        state, at = self.shown.get(run.seed, ("", 0.0))
        now = time.monotonic()
        if run.state != state or now - at >= SECONDS_BETWEEN_LINES:
            self.shown[run.seed] = run.state, now
            self.console.print(line)


def print_results(runs: list[SeedRun]) -> None:
    """Print the best evaluation of each run, and the command that plots them all. Raises `SettingError`: a run failed."""
    evaluations = [find_best(run.folder) for run in runs]
    rows = [
        [str(run.seed), *([NOTHING, NOTHING] if best is None else [number(best[0]), whole(best[1])]), str(run.folder)]
        for run, best in zip(runs, evaluations, strict=True)
    ]
    say(Table("Best evaluations, mean return", ["seed", "return", "at", "folder"], rows).text())
    returns = np.array([best[0] for best in evaluations if best is not None])
    if len(returns) > 1:
        say(f"{len(returns)} seeds: mean {number(returns.mean())} ± {number(round(returns.std(), 12))}, IQM {number(iqm(returns))}")
    folders = [quote(str(run.folder)) for run in runs if is_run(run.folder)]
    if folders:
        say(f"plot them: lightning-rl compare {' '.join(folders)} --out report.html")
    failed = [run for run in runs if run.state != "ended"]
    for run in failed:
        say(f"seed {run.seed} {run.text}; see {run.plan.log}")
    if failed:
        first, others = failed[0], f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise SettingError(f"seed {first.seed}{others} {first.text}; see {first.plan.log}")


def find_best(folder: Path) -> tuple[float, float] | None:
    """Return the highest mean return of a run's evaluations and the last count at which it was reached; None without evaluations."""
    run = read_run(folder) if is_run(folder) else None
    if run is None or run.source != EVALUATIONS or not len(run.returns):
        return None
    best = run.returns.max()
    return float(best), float(run.counts[run.returns == best][-1])
