"""Tables of one or several environments, with intervals for few seeds (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import ModuleType
from typing import Any

import numpy as np

from lightning_rl.errors import SettingError, missing_extra
from lightning_rl.reports.groups import MAX_LISTED_GROUPS, Section
from lightning_rl.reports.runs import AXES

REPS = 2000
"""Number of bootstrap resamples."""
MAX_CELL = 60
"""Number of characters of a setting that are shown in a table."""


def rliable(needed_by: str) -> ModuleType:
    """Return the library; raise `SettingError` if it is not installed, or a dependency is too new for it."""
    try:
        from rliable import library
    except ImportError as error:
        raise missing_extra("rliable", "plots", needed_by) from error
    except Exception as error:  # its dependency arch before version 8 fails to import with pandas 3
        reason = f"{type(error).__name__}: {error}"
        raise SettingError(f'rliable cannot be imported ({reason}); run: pip install "lightning_rl[plots]"') from error
    return library


def iqm(scores: np.ndarray) -> Any:
    """Return the interquartile mean over seeds [R, …]: the mean without the lowest and the highest quarter, rounded down to whole seeds.

    Equals `rliable.metrics.aggregate_iqm` for one environment, for all points of a curve together. With three seeds it is their mean.
    """
    quarter = len(scores) // 4
    return np.sort(scores, axis=0)[quarter : len(scores) - quarter].mean(axis=0)


def iqm_interval(scores: np.ndarray) -> np.ndarray | None:
    """Return the 95 % interval [2, G] of the interquartile mean of curves [R, G], separately for each point; None for one seed."""
    return None if len(scores) == 1 else bootstrap(scores[:, None], lambda drawn: iqm(drawn[:, 0]))


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """Return how likely a run of one group [R, …] ends higher than one of the other [Q, …]: the share of pairs, where ties count half.

    Equals `rliable.metrics.probability_of_improvement` for one environment.
    """
    differences = x.reshape(-1, 1) - y.reshape(1, -1)
    return float(np.mean((differences > 0) + 0.5 * (differences == 0)))


def improvement_interval(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Return the 95 % interval [2, 1] of `probability_of_improvement`; None if a group has one seed."""
    return None if min(len(x), len(y)) == 1 else bootstrap([x[:, None], y[:, None]], probability_of_improvement)


def bootstrap(scores: np.ndarray | list[np.ndarray], estimate: Callable[..., object]) -> np.ndarray:
    """Return rliable's stratified bootstrap interval of an estimate, with the same resamples each time.

    rliable draws from numpy's global generator, whose state is restored.
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
    """A table of text; the first column contains words, the others numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        """Return the table as lines of text."""
        cells = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
        return "\n  ".join([self.title, *lines])

    def tagged(self) -> Iterator[tuple[list[str], str]]:
        """Yield rows with the tag of their cells in HTML, the columns first."""
        yield self.columns, "th"
        yield from ((row, "td") for row in self.rows)


def make_tables(section: Section, threshold: float | None) -> Iterator[Table]:
    """Return all tables of a section."""
    yield from settings_tables(section)
    yield final_table(section)
    if threshold is not None:
        yield threshold_table(section, threshold)
    if len(section.groups) > 1:
        yield improvement_table(section)
    rows = [
        [str(run.folder), group.name, NOTHING if run.seed is None else str(run.seed), whole(run.counts[-1]), number(run.returns[-1])]
        for group in section.groups
        for run in group.runs
    ]
    yield Table("Runs", ["", "group", "seed", AXES[section.counter], "final return"], rows)


def settings_tables(section: Section) -> Iterator[Table]:
    """Return what the numbers of an algorithm's groups stand for; rows are settings or groups, whichever is more."""
    for algorithm in dict.fromkeys(group.algorithm for group in section.groups if group.key):
        groups = [group for group in section.groups if group.algorithm == algorithm]
        names = sorted({name for group in groups for name in group.settings})
        columns = [[name, *cut([group.settings.get(name, NOTHING) for group in groups])] for name in names]
        cells = [["", *(group.name for group in groups)], *columns]
        if len(groups) > len(names):
            cells = [list(row) for row in zip(*cells, strict=True)]
        yield Table(f"Groups of {algorithm}, by the settings in which they differ", cells[0], cells[1:])


def cut(texts: list[str]) -> list[str]:
    """Shorten texts of more than `MAX_CELL` characters to the part where they first differ, unless two that differ would look alike."""
    if max(map(len, texts)) <= MAX_CELL:
        return texts
    first_difference = next((place for place, letters in enumerate(zip(*texts, strict=False)) if len({*letters}) > 1), 0)
    first = max(0, first_difference - MAX_CELL // 3)
    last = first + MAX_CELL - 1
    short = [f"{'…' * (first > 0)}{text[first:last]}{'…' * (len(text) > last)}" if len(text) > MAX_CELL else text for text in texts]
    return short if len({*short}) == len({*texts}) else texts


def final_table(section: Section) -> Table:
    """Return the last returns of each group."""
    columns = ["", "seeds", AXES[section.counter], "IQM", "95 % interval", "lowest – highest", "time"]
    rows = []
    for group in section.groups:
        finals, ends = group.finals(), np.array([run.counts[-1] for run in group.runs])
        row = [group.name, str(len(finals)), span(ends), number(iqm(finals)), between(iqm_interval(finals[:, None]))]
        rows.append([*row, span(finals, number), duration(np.median([run.seconds(run.counts[-1]) for run in group.runs]))])
    return Table(f"Final {TRAINING_RETURN}" if section.training else "Final evaluation, mean return", columns, rows)


def threshold_table(section: Section, threshold: float) -> Table:
    """Return when a return first reached the threshold. A seed that never reached it counts as the slowest."""
    rows = []
    for group in section.groups:
        counts = np.array([run.reaches(threshold) for run in group.runs])
        times = np.array([run.seconds(count) if np.isfinite(count) else count for run, count in zip(group.runs, counts, strict=True)])
        reached = np.isfinite(counts)
        row = [group.name, f"{reached.sum()} of {len(reached)}"]
        rows.append([*row, whole(np.median(counts)), span(counts[reached]), duration(np.median(times)), span(times[reached], duration)])
    columns = ["", "reached by", AXES[section.counter], "fastest – slowest", "time", "fastest – slowest"]
    returns = "mean return of training" if section.training else "mean return"
    return Table(f"Until a {returns} of {threshold:,.10g}, median of the seeds", columns, rows)


def improvement_table(section: Section) -> Table:
    """Return how likely a run of one group ends higher than one of another; of many groups, only the best is compared with the others."""
    pairs, whose, rows = list(combinations(section.groups, 2)), "", []
    if len(section.groups) > MAX_LISTED_GROUPS:
        best = max(section.groups, key=lambda group: iqm(group.finals()))
        pairs, whose = [(best, other) for other in section.groups if other is not best], " of the best group over each of the others"
    for one, other in pairs:
        scores = one.finals(), other.finals()
        interval = between(improvement_interval(*scores), "{:.2f}".format)
        rows.append([f"{one.name} over {other.name}", f"{probability_of_improvement(*scores):.2f}", interval])
    by = "mean return of training" if section.training else "evaluation"
    return Table(f"Probability of improvement{whose}, by the final {by}", ["", "probability", "95 % interval"], rows)


def number(value: float) -> str:
    """Return a return as text, with at least three digits."""
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def whole(value: float) -> str:
    """Return a count as text; a dash if it was not reached."""
    return f"{value:,.0f}" if np.isfinite(value) else NOTHING


def duration(seconds: float) -> str:
    """Return a time as text, in the unit that suits it."""
    if not np.isfinite(seconds):
        return NOTHING
    unit, name = (1, "s") if seconds < 120 else (60, "min") if seconds < 7200 else (3600, "h")
    return f"{seconds / unit:.1f} {name}"


def span(values: np.ndarray, show: Callable[[float], str] = whole) -> str:
    """Return the lowest and the highest value as text, once if both look alike."""
    return " – ".join(dict.fromkeys([show(values.min()), show(values.max())])) if len(values) else NOTHING


def between(interval: np.ndarray | None, show: Callable[[float], str] = number) -> str:
    """Return an interval as text; a dash for None."""
    return NOTHING if interval is None else " – ".join(show(end) for end in interval.ravel())


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The groups that ran in several environments, by their final returns.

    Args:
        environments: M of them.
        scores: `[R, M]` of each group: R seeds of each environment; final returns are scaled so that 0 is the lowest of all compared runs
            in that environment, and 1 the highest.
        notes: about runs that are not included.
    """

    environments: list[str]
    scores: dict[str, np.ndarray]
    notes: Sequence[str] = ()
    thresholds = np.linspace(0, 1, 101)

    def profiles(self) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """Return, for each group, the share of its runs above each threshold, and the 95 % interval of the share."""
        return {
            name: (share_above(scores, self.thresholds), self.interval(scores, lambda drawn: share_above(drawn, self.thresholds)))
            for name, scores in self.scores.items()
        }

    def table(self) -> Table:
        """Return the interquartile mean over all runs of all environments, with its interval, and the mean."""
        rows = []
        for name, scores in self.scores.items():
            mean = between(self.interval(scores, lambda drawn: np.array([iqm(drawn.ravel())])), "{:.3f}".format)
            rows.append([name, f"{len(scores)} × {scores.shape[1]}", f"{iqm(scores.ravel()):.3f}", mean, f"{scores.mean():.3f}"])
        title = f"Final returns over {', '.join(self.environments)}, scaled from 0, the lowest of all runs, to 1, the highest"
        return Table(title, ["", "seeds × environments", "IQM", "95 % interval", "mean"], rows)

    def interval(self, scores: np.ndarray, estimate: object) -> np.ndarray | None:
        """Return the 95 % interval of an estimate, with seeds resampled separately in each environment; None for one seed."""
        return None if len(scores) == 1 else bootstrap(scores, estimate)  # type: ignore[arg-type]


def share_above(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the share of all scores that are greater than each threshold (Agarwal et al. 2021, eq. 2)."""
    return (scores.reshape(-1, 1) > thresholds).mean(0)


def aggregate_sections(sections: Sequence[Section]) -> Aggregate | None:
    """Return the comparison over all environments of the groups that ran in each; None without two environments and two such groups."""
    names = [name for name in dict.fromkeys(g.name for s in sections for g in s.groups) if all(name in each_name(s) for s in sections)]
    if min(len(sections), len(names)) < 2 or len({section.environment for section in sections}) < len(sections):
        return None
    environments = [section.environment for section in sections]
    scaled: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for section in sections:
        finals = {group.name: group.finals() for group in section.groups}
        everything = np.concatenate(list(finals.values()))
        low, high = everything.min(), everything.max()
        for name in names:
            scaled[name].append((finals[name] - low) / (high - low) if high > low else np.ones(len(finals[name])))
    fewest = {name: min(map(len, scores)) for name, scores in scaled.items()}
    notes = [
        f"The table over all environments counts the first {fewest[name]} of {len(runs)} runs of {name} on {environment}: "
        "each environment counts alike."
        for name, scores in scaled.items()
        for environment, runs in zip(environments, scores, strict=True)
        if len(runs) > fewest[name]
    ]
    rectangular = {name: np.stack([runs[: fewest[name]] for runs in scores], axis=1) for name, scores in scaled.items()}
    return Aggregate(environments, rectangular, notes)


def each_name(section: Section) -> list[str]:
    """Return the names of a section's groups."""
    return [group.name for group in section.groups]
