"""`lrl.compare`: learning curves and tables of runs, seeds taken together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_rl.errors import SettingError, check_range, printable
from lightning_rl.reports.figures import line_styles, make_figure, png
from lightning_rl.reports.groups import Section, make_sections
from lightning_rl.reports.page import Content, check_out, write
from lightning_rl.reports.runs import find_runs
from lightning_rl.reports.tables import Aggregate, Table, aggregate_sections, make_tables, rliable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Report:
    """What runs reached. A notebook shows its picture and tables.

    Args:
        sections: one for each environment.
        threshold: a return, of which tables say when it was reached.
        remarks: about runs that are left out.
        diagnostics: whether a page shows metrics of training too.
    """

    sections: list[Section]
    threshold: float | None = None
    remarks: Sequence[str] = ()
    diagnostics: bool = False

    @cached_property
    def figure(self) -> Figure:
        """The curves, a panel for each environment."""
        return make_figure(self.sections, line_styles(self.sections), self.threshold)

    @cached_property
    def aggregate(self) -> Aggregate | None:
        """The comparison over several environments, of the groups that ran in all of them."""
        return aggregate_sections(self.sections)

    @cached_property
    def tables(self) -> list[Table]:
        """All tables; each has a title, columns and rows of text."""
        over_all = [] if self.aggregate is None else [self.aggregate.table()]
        return [*(table for section in self.sections for table in make_tables(section, self.threshold)), *over_all]

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        for section in self.sections:
            yield from (section.title, *section.notes())
            yield from (f"\n{table.text()}" for table in make_tables(section, self.threshold))
            yield ""
        if self.aggregate is not None:
            yield f"{self.aggregate.table().text()}\n"
        yield from self.remarks

    def __str__(self) -> str:
        return printable("\n".join(self.lines()))

    def _repr_png_(self) -> bytes:
        return png(self.figure)

    def _repr_mimebundle_(self, **_: object) -> dict[str, object]:
        return {"image/png": png(self.figure), "text/plain": str(self)}

    def write(self, file: str | Path) -> None:
        """Write the report as one HTML page, and its picture next to it as .png; raise `SettingError` if that fails."""
        check_out(Path(file))
        write(Path(file), Content(self.sections, self.aggregate, self.threshold, self.remarks, self.diagnostics))


def compare(*runs: str | Path, threshold: float | None = None, diagnostics: bool = False) -> Report:
    """Compare runs, those that differ only in their seed taken together, as `lightning-rl compare` does.

    Args:
        runs: folders of runs, or folders in which there are runs.
        threshold: report how long it took to a mean return of this.
        diagnostics: let a page show metrics of training too.

    Returns:
        A report: `report.figure` (matplotlib), `report.tables`, `str(report)`, `report.write("report.html")`.

    Raises:
        SettingError: a folder that does not exist or holds no run, files that no run wrote, or a package of the extra `plots` is missing.
    """
    if not runs or any(os.fspath(run) == "" for run in runs):
        raise SettingError("'' is no folder; name the folder of a run, or one of runs such as runs/PPO/CartPole-v1")
    if threshold is not None:
        check_range("threshold", threshold)
    rliable("compare")
    found, empty = find_runs([Path(run) for run in runs])
    remarks = [f"{folder} is left out: it has no returns yet." for folder in empty]
    return Report(make_sections(found), threshold, remarks, diagnostics)
