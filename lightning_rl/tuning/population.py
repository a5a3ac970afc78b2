"""Population-based training (Jaderberg et al. 2017, https://arxiv.org/abs/1711.09846): the record of a population, and its results."""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.distributions import CategoricalDistribution

from lightning_rl.checkpoints.atomic import write_bytes, write_text
from lightning_rl.checkpoints.manifest import manifest_path
from lightning_rl.errors import SettingError, check_range, missing_extra
from lightning_rl.settings.yaml_files import dump
from lightning_rl.training.run_processes import Message
from lightning_rl.tuning.comparison import Objective
from lightning_rl.tuning.search_space import Dimension, SearchSpace, Value, as_text, shorten_path
from lightning_rl.tuning.study import StudySettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MUTABLE = (
    *("learning_rate", "gamma", "max_grad_norm", "ent_coef", "vf_coef", "clip_range", "clip_range_vf", "target_kl", "n_epochs"),
    *("gae_lambda", "q_lambda", "lambda_", "clip_rho", "clip_c", "clip_pg_rho", "tau", "gradient_steps", "policy_delay", "action_noise"),
    *("target_policy_noise", "target_noise_clip", "exploration_final_eps", "label_smoothing", "baseline_coef", "sigma", "momentum"),
    *("expectile", "beta", "max_weight", "alpha", "cql_alpha"),
)
"""Settings that may change when a run continues from a checkpoint."""
COPIED = ("config.yaml", "evaluations.csv", "metrics.csv", "checkpoints")
"""Parts of a run's folder that another member takes over."""


@dataclass(frozen=True)
class Period:
    """The settings of a member from a count on.

    Args:
        start: the count, in environment steps or updates.
        values: values of the settings that vary, by path.
        source: the member whose run was continued with them; None: the member's own run.
    """

    start: int
    values: Mapping[str, Value]
    source: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a member, and its settings so far."""

    member: int
    count: int
    value: float
    periods: tuple[Period, ...]


class Population:
    """Members whose runs are trained together; members with bad evaluations continue from checkpoints of members with good ones.

    Args:
        folder: folder of the population.
        runs: folder of the members' runs.
        space: the settings that vary.
        size: number of members.
        seed: seed with which settings are drawn.
        objective: how members are compared, after each evaluation.
        say: prints a line.
    """

    def __init__(
        self, folder: Path, runs: Path, space: SearchSpace, size: int, seed: int, objective: Objective, say: Callable[[str], None]
    ) -> None:
        check_range("--population", size, 2, whole=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder, self.runs, self.space, self.size, self.seed = folder, runs, space, size, seed
        self.objective, self.say = objective, say
        self.on_best: Callable[[Evaluation], None] = lambda best: None
        """Called with each evaluation that is the best so far."""
        self.periods: list[tuple[Period, ...]] = [(Period(0, self.draw(member)),) for member in range(size)]
        self.evaluations: list[Evaluation] = []
        self.best: Evaluation | None = None
        self.errors: list[str] = []
        self.ended = 0

    def draw(self, member: int) -> dict[str, Value]:
        """Draw the first settings of a member: those of the trial with its number in a study with random trials."""
        sampler = StudySettings(sampler="random", seed=self.seed).make_sampler(member)
        return optuna.create_study(sampler=sampler).ask(self.space.distributions).params

    def record(self, member: int, message: Message) -> None:
        """Record an evaluation of a member."""
        evaluation = Evaluation(member, message.count, message.value, self.periods[member])
        self.evaluations.append(evaluation)
        write_text(self.folder / "population.csv", self._table())
        if math.isfinite(message.value) and (self.best is None or self.objective.best([message.value, self.best.value]) == message.value):
            self.best = evaluation
            self._keep_best()
            self.on_best(evaluation)

    def end(self, member: int, error: str = "") -> None:
        """Record that the run of a member has ended, or has failed."""
        self.ended += 1
        evaluations = [evaluation for evaluation in self.evaluations if evaluation.member == member]
        result = f"{as_text(evaluations[-1].value)} at {evaluations[-1].count:,}" if evaluations else "no evaluation"
        if error:
            self.errors.append(error)
            result = f"failed ({error})"
        best = "" if self.best is None else f"; best so far {as_text(self.best.value)}, member {self.best.member} at {self.best.count:,}"
        self.say(f"member {member}: {result}; {self.space.describe(self.periods[member][-1].values)}{best}")

    def replace(self, member: int, source: int, values: Mapping[str, Value]) -> dict[str, Value]:
        """Let a member continue from another member's run, with settings clipped to the ranges of the space; return the settings."""
        values = {dimension.path: dimension.clip(values[dimension.path]) for dimension in self.space.dimensions}
        last, replaced = ([evaluation for evaluation in self.evaluations if evaluation.member == one][-1] for one in (source, member))
        before = last.periods[-1].values
        self.periods[member] = (*last.periods, Period(last.count, values, source))
        changed = [
            f"{shorten_path(path)} {as_text(before[path])} -> {as_text(values[path])}" for path in values if values[path] != before[path]
        ]
        line = f"at {last.count:,}: member {member} ({as_text(replaced.value)}) continues from member {source} ({as_text(last.value)})"
        self.say(f"{line}: {', '.join(changed) or 'the same settings'}")
        return values

    def run_folder(self, member: int) -> Path:
        """Return the folder of a member's run."""
        return self.runs / member_name(member)

    def _table(self) -> str:
        """Return a CSV row for each evaluation, with the settings that led to it; the first row of a period names its source."""
        paths = [dimension.path for dimension in self.space.dimensions]
        rows: list[list[object]] = [["count", "member", "value", "continued_from", *map(shorten_path, paths)]]
        seen: set[int] = set()
        for evaluation in self.evaluations:
            period = evaluation.periods[-1]
            source = "" if period.source is None or id(period) in seen else period.source
            seen.add(id(period))
            rows.append([evaluation.count, evaluation.member, repr(evaluation.value), source, *(period.values[path] for path in paths)])
        return as_csv(rows)

    def _keep_best(self) -> None:
        """Write `best.ckpt`, and the settings that led to it to `schedule.csv`: later its member may continue from another one."""
        assert self.best is not None
        checkpoint = self.run_folder(self.best.member) / "checkpoints" / "best.ckpt"
        for file, name in ((checkpoint, "best.ckpt"), (manifest_path(checkpoint), "best.ckpt.json")):
            write_bytes(self.folder / name, file.read_bytes())
        paths = [dimension.path for dimension in self.space.dimensions]
        rows = [[period.start, *(period.values[path] for path in paths)] for period in self.best.periods]
        write_text(self.folder / "schedule.csv", as_csv([["from", *map(shorten_path, paths)], *rows]))

    def replay(self, scheduled: Collection[str]) -> dict[str, Value]:
        """Return the settings that repeat the schedule of the best member; the last value where that is not a schedule of numbers."""
        assert self.best is not None
        periods, settings = self.best.periods, dict(self.best.periods[-1].values)
        times = [period.start / self.objective.length for period in periods]
        for path in settings:
            values = [period.values[path] for period in periods]
            if shorten_path(path) in scheduled and len(periods) > 1 and all(isinstance(value, int | float) for value in values):
                points = [[at, value] for at, *both in zip(times[1:], values, values[1:], strict=False) for value in both]
                settings[path] = {"schedule": "piecewise", "points": [[0.0, values[0]], *points]}
        return settings

    def write_best(self, config: Mapping[str, object]) -> None:
        """Write `best.yaml`, the config of a run that repeats the schedule of the best member."""
        assert self.best is not None
        first = f"# member {self.best.member} of {self.size}: {self.objective.monitor} {as_text(self.best.value)} at {self.best.count:,}"
        write_text(self.folder / "best.yaml", f"{first}; see schedule.csv\n{dump(dict(config))}")

    def draw_picture(self) -> Path:
        """Draw `population.png`: the evaluations and each setting of the members. Raises `SettingError`: matplotlib is not installed."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise missing_extra("matplotlib", "plots", "the picture of a population") from error
        panels: list[tuple[str, Callable[[Evaluation], float]]] = [(self.objective.monitor, lambda evaluation: evaluation.value)]
        for dimension in self.space.dimensions:
            panels.append((shorten_path(dimension.path), partial(setting_of, dimension)))
        columns = min(3, len(panels))
        rows = math.ceil(len(panels) / columns)
        figure = Figure(figsize=(4 * columns, 2.8 * rows), dpi=100, layout="constrained")
        for number, (name, value) in enumerate(panels):
            self._draw(figure.add_subplot(rows, columns, number + 1), name, value)
        picture = BytesIO()
        figure.savefig(picture, format="png")
        write_bytes(self.folder / "population.png", picture.getvalue())
        return self.folder / "population.png"

    def _draw(self, axes: Axes, name: str, value: Callable[[Evaluation], float]) -> None:
        """Draw a line for each member, broken where it continues from another one."""
        for member in range(self.size):
            evaluations = [evaluation for evaluation in self.evaluations if evaluation.member == member]
            for period in dict.fromkeys(id(evaluation.periods[-1]) for evaluation in evaluations):
                part = [evaluation for evaluation in evaluations if id(evaluation.periods[-1]) == period]
                counts, values = [evaluation.count for evaluation in part], [value(evaluation) for evaluation in part]
                label = f"member {member}" if part[0] is evaluations[0] else None
                axes.plot(counts, values, marker="o", markersize=3, linewidth=1, color=f"C{member % 10}", label=label)
        axes.set_title(name, loc="left")
        axes.grid(color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("steps of the run")
        dimension = next((dimension for dimension in self.space.dimensions if shorten_path(dimension.path) == name), None)
        distribution = None if dimension is None else dimension.distribution
        if dimension is None:
            axes.legend(frameon=False, fontsize="small")
        if isinstance(distribution, CategoricalDistribution):
            axes.set_yticks(range(len(distribution.choices)), [as_text(choice) for choice in distribution.choices])
        elif distribution is not None and distribution.log:
            axes.set_yscale("log")


def member_name(member: int) -> str:
    """Return the name of a member's folder."""
    return f"member_{member}"


def setting_of(dimension: Dimension, evaluation: Evaluation) -> float:
    """Return a setting of a member as a number that a picture can show."""
    return dimension.place_of(evaluation.periods[-1].values[dimension.path])


def as_csv(rows: list[list[object]]) -> str:
    """Return rows as the text of a CSV file."""
    text = StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def save_run(run: Path, folder: Path) -> None:
    """Copy what a stopped run needs to continue elsewhere, without previous generations of its checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source, target = run / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.previous.ckpt*"))
        elif source.is_file():
            shutil.copyfile(source, target)


def restore_run(folder: Path, run: Path) -> None:
    """Replace the files of a run by those that `save_run` copied, from which it continues."""
    for name in COPIED:
        if (run / name).is_dir():
            shutil.rmtree(run / name)
        (run / name).unlink(missing_ok=True)
    save_run(folder, run)


def mutable_space(space: SearchSpace, is_packaged: bool) -> SearchSpace:
    """Return the space of a population: a packaged space loses settings that cannot change, a user's raises `SettingError` for them."""
    fixed = [dimension.path for dimension in space.dimensions if shorten_path(dimension.path) not in MUTABLE]
    if fixed and not is_packaged:
        known = ", ".join(sorted(MUTABLE))
        raise SettingError(f"{space.source}: {fixed[0]} cannot change while a run is trained; --population varies {known}")
    kept = tuple(dimension for dimension in space.dimensions if dimension.path not in fixed)
    if not kept:
        raise SettingError(f"{space.source} has no setting that can change while a run is trained: name another space, --space")
    return SearchSpace(space.source, kept)
