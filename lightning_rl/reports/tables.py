"""Tables of a report, with intervals over few seeds (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import combinations
from typing import Any

import numpy as np

from lightning_rl.errors import SettingError, missing_extra
from lightning_rl.reports.groups import Section
from lightning_rl.reports.runs import AXES

REPS = 2000
"""Resamples of a bootstrap."""


def rliable(needed_by: str) -> Any:
    """The library.

    Raises:
        SettingError: it is not installed, or what it stands on is too new for it.
    """
    try:
        from rliable import library
    except ImportError as error:
        raise missing_extra("rliable", "plots", needed_by) from error
    except Exception as error:  # its bootstraps, arch before version 8, fail in the middle of an import with pandas 3
        reason = f"{type(error).__name__}: {error}"
        raise SettingError(f'rliable cannot be imported ({reason}); run: pip install "lightning_rl[plots]"') from error
    return library


def iqm(scores: np.ndarray) -> Any:
    """The interquartile mean over seeds [R, …]: the mean without the lowest and the highest quarter, each rounded down to whole seeds.

    What `rliable.metrics.aggregate_iqm` says of one environment, of all points of a curve at once. With three seeds it is their mean.
    """
    quarter = len(scores) // 4
    return np.sort(scores, axis=0)[quarter : len(scores) - quarter].mean(axis=0)


def iqm_interval(scores: np.ndarray) -> np.ndarray | None:
    """The 95 % interval [2, G] of the interquartile mean of curves [R, G]: seeds are drawn again, at each point by itself.

    None where it would say nothing: there is one seed.
    """
    return None if len(scores) == 1 else interval(scores[:, None], lambda drawn: iqm(drawn[:, 0]))


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """How likely a run of one group [R, …] ends higher than one of the other [Q, …]: the share of pairs, ties counted half.

    What `rliable.metrics.probability_of_improvement` says of one environment.
    """
    differences = x.reshape(-1, 1) - y.reshape(1, -1)
    return float(np.mean((differences > 0) + 0.5 * (differences == 0)))


def improvement_interval(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Its 95 % interval [2, 1]; None where a group has one seed."""
    return None if min(len(x), len(y)) == 1 else interval([x[:, None], y[:, None]], probability_of_improvement)


def interval(scores: Any, estimate: Callable[..., Any]) -> np.ndarray:
    """rliable's stratified bootstrap of an estimate, with the same numbers each time.

    It draws from numpy's global generator, which goes on afterwards as if nothing had been drawn.
    """
    library, state = rliable("compare"), np.random.get_state()
    np.random.seed(0)
    try:
        return library.get_interval_estimates({"": scores}, estimate, reps=REPS)[1][""]
    finally:
        np.random.set_state(state)


NOTHING = "–"
TRAINING_RETURN = "mean return of training, last 100 episodes"


@dataclass(frozen=True)
class Table:
    """Cells under their columns; the first column is of words, the others of numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        """For a terminal."""
        cells = [self.columns, *self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.columns))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
        return "\n".join([self.title, *(f"  {line}" for line in lines)])

    def html(self) -> str:
        """For a page."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.columns)
        body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        return f"<h3>{escape(self.title)}</h3>\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def tables(section: Section, threshold: float | None) -> Iterator[Table]:
    """All of a section."""
    yield from keys(section)
    yield final(section)
    if threshold is not None:
        yield until(section, threshold)
    if len(section.groups) > 1:
        yield improvement(section)
    yield folders(section)


def keys(section: Section) -> Iterator[Table]:
    """What the numbers of an algorithm's groups stand for. There are as many rows as there are more of, settings or groups."""
    for algorithm in dict.fromkeys(group.algorithm for group in section.groups if group.key):
        groups = [group for group in section.groups if group.algorithm == algorithm]
        names = sorted({name for group in groups for name in group.settings})
        cells = [["", *names], *([group.name, *(group.settings.get(name, NOTHING) for name in names)] for group in groups)]
        if len(groups) <= len(names):
            cells = [list(column) for column in zip(*cells, strict=True)]
        yield Table(f"Groups of {algorithm}, by the settings in which they differ", cells[0], cells[1:])


def final(section: Section) -> Table:
    """The last return of each seed."""
    columns = ["", "seeds", AXES[section.counter], "IQM", "95 % interval", "lowest – highest", "time"]
    rows = []
    for group in section.groups:
        finals, ends = group.finals(), np.array([run.counts[-1] for run in group.runs])
        row = [group.name, str(len(finals)), span(ends), number(iqm(finals)), between(iqm_interval(finals[:, None]))]
        rows.append([*row, span(finals, number), duration(np.median([run.seconds(run.counts[-1]) for run in group.runs]))])
    return Table(f"Final {TRAINING_RETURN}" if section.training else "Final evaluation, mean return", columns, rows)


def until(section: Section, threshold: float) -> Table:
    """What it took until a return was first so high. A seed that never got there counts as the slowest."""
    rows = []
    for group in section.groups:
        counts = np.array([run.reaches(threshold) for run in group.runs])
        times = np.array([run.seconds(count) if np.isfinite(count) else count for run, count in zip(group.runs, counts, strict=True)])
        there = np.isfinite(counts)
        row = [group.name, f"{there.sum()} of {len(there)}"]
        rows.append([*row, whole(np.median(counts)), span(counts[there]), duration(np.median(times)), span(times[there], duration)])
    columns = ["", "reached by", AXES[section.counter], "fastest – slowest", "time", "fastest – slowest"]
    returns = "mean return of training" if section.training else "mean return"
    return Table(f"Until a {returns} of {threshold:,.10g}, median of the seeds", columns, rows)


def improvement(section: Section) -> Table:
    """How likely a run of one group ends higher than one of another."""
    rows = []
    for one, other in combinations(section.groups, 2):
        scores = one.finals(), other.finals()
        interval = between(improvement_interval(*scores), "{:.2f}".format)
        rows.append([f"{one.name} over {other.name}", f"{probability_of_improvement(*scores):.2f}", interval])
    by = "mean return of training" if section.training else "evaluation"
    return Table(f"Probability of improvement, by the final {by}", ["", "probability", "95 % interval"], rows)


def folders(section: Section) -> Table:
    """Which runs these are."""
    rows = [
        [str(run.folder), group.name, NOTHING if run.seed is None else str(run.seed), whole(run.counts[-1]), number(run.returns[-1])]
        for group in section.groups
        for run in group.runs
    ]
    return Table("Runs", ["", "group", "seed", AXES[section.counter], "final return"], rows)


def number(value: float) -> str:
    """A return, with three figures or more."""
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def whole(value: float) -> str:
    """A count; nothing for one that was not reached."""
    return f"{value:,.0f}" if np.isfinite(value) else NOTHING


def duration(seconds: float) -> str:
    """A time, in the unit that suits it."""
    if not np.isfinite(seconds):
        return NOTHING
    unit, name = (1, "s") if seconds < 120 else (60, "min") if seconds < 7200 else (3600, "h")
    return f"{seconds / unit:.1f} {name}"


def span(values: np.ndarray, show: Callable[[float], str] = whole) -> str:
    """From the lowest to the highest, one number where they are shown alike."""
    return " – ".join(dict.fromkeys([show(values.min()), show(values.max())])) if len(values) else NOTHING


def between(interval: np.ndarray | None, show: Callable[[float], str] = number) -> str:
    """An interval, nothing where there is none."""
    return NOTHING if interval is None else " – ".join(show(end) for end in interval.ravel())
