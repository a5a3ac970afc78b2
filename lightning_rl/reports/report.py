"""`lrl.compare`: learning curves and tables of runs, aggregated over seeds, as text and as an HTML page with a picture next to it.

The page has no scripts, and loads nothing from elsewhere.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from lightning_rl.checkpoints.atomic import write_bytes
from lightning_rl.errors import SettingError, check_path, check_range, printable
from lightning_rl.reports.figures import draw_diagnostics, draw_profiles, line_styles, make_figure, new_figure, png
from lightning_rl.reports.groups import Section, make_sections
from lightning_rl.reports.runs import Run, find_runs
from lightning_rl.reports.tables import REPS, Aggregate, Table, aggregate_sections, make_tables, rliable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = f"""Lines are interquartile means (IQM) of the seeds: the mean without the lowest and the highest quarter of them, rounded down to
whole seeds, so that for three seeds it is the mean. Bands and intervals are 95 % intervals of a stratified bootstrap over seeds with
{REPS:,} resamples, separately at each point (Agarwal et al. 2021, rliable). A return is the mean over an evaluation's episodes or, where a
section notes it, over the last 100 episodes of training. If seeds were evaluated at different counts, the last known value of each is used;
a curve begins and ends where all seeds of its group have values. The probability of improvement is how likely a run of the first group ends
higher than one of the second; ties count half. Time is that of training with its evaluations."""
STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
img { max-width: 100% } div { overflow-x: auto } table { border-collapse: collapse; font-size: 14px; margin: 1em 0 }
caption { text-align: left; font-weight: 600; padding-bottom: .3em } th, td { padding: .15em .7em; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0 } tr + tr { border-top: 1px solid #ddd }"""


@dataclass(frozen=True, eq=False)
class Report:
    """The results of runs. A notebook shows the picture and the tables.

    Args:
        sections: one for each environment.
        threshold: a return; tables show when it was reached.
        remarks: about runs that are left out.
        diagnostics: whether a page also shows metrics of training.
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
        """The comparison over several environments, for the groups that ran in all of them."""
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
            yield from (f"{self.aggregate.table().text()}\n", *self.aggregate.notes)
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
        write(Path(file), self)


def compare(*runs: str | Path, threshold: float | None = None, diagnostics: bool = False) -> Report:
    """Compare runs, aggregated over seeds, as `lightning-rl compare` does.

    Args:
        runs: folders of runs, or folders that contain runs.
        threshold: report how long it took to reach this mean return.
        diagnostics: also show metrics of training on a page.

    Returns:
        A report: `report.figure` (matplotlib), `report.tables`, `str(report)`, `report.write("report.html")`.

    Raises:
        SettingError: a folder does not exist or contains no run, a file was not written by a run, or a package of the extra `plots` is
            missing.
    """
    for run in runs:
        if not isinstance(run, str | os.PathLike):
            raise SettingError(f"compare takes folders one by one, compare('runs/a', 'runs/b'), got {run!r}")
        check_path("the folder", run)
    if not runs or any(os.fspath(run) == "" for run in runs):
        raise SettingError("'' is not a folder; name the folder of a run, or a folder of runs such as runs/PPO/CartPole-v1")
    if threshold is not None:
        check_range("threshold", threshold)
    rliable("compare")
    compared, empty = find_runs([Path(run) for run in runs])
    remarks = [f"{folder} is left out: it has no returns yet." for folder in empty]
    return Report(make_sections(compared), threshold, remarks, diagnostics)


def html(report: Report, folder: Path) -> Iterator[str]:
    """Yield the parts of the page: pictures and tables of each environment, then how to read them. Links are relative to `folder`."""
    sections, lines = report.sections, line_styles(report.sections)
    title = escape(f"Runs on {', '.join(dict.fromkeys(section.environment for section in sections))}")
    yield '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">'
    yield f"<title>{title}</title>\n<style>{STYLE}</style>\n<h1>{title}</h1>"
    if report.aggregate is not None:
        yield picture(draw_profiles(report.aggregate, lines), "Performance profiles over all environments")
        yield show_table(report.aggregate.table())
        yield from (f"<p>{escape(note)}</p>" for note in report.aggregate.notes)
    for section in sections:
        name = escape(section.title)
        yield f"<h2>{name}</h2>\n{picture(make_figure([section], lines, report.threshold), f'Learning curves on {name}')}"
        yield from (f"<p>{escape(note)}</p>" for note in section.notes())
        yield from map(show_table, make_tables(section, report.threshold))
        yield "<ul>" + "".join(f"<li>{links_of(run, folder)}</li>" for group in section.groups for run in group.runs) + "</ul>"
        figure = draw_diagnostics(section, lines) if report.diagnostics else None
        if figure is not None:
            yield f"<details><summary>Diagnostics</summary>{picture(figure, f'Diagnostics of runs on {name}')}</details>"
    yield f"<h2>How to read this</h2>\n<p>{escape(ABOUT)}</p>"
    yield from (f"<p>{escape(remark)}</p>" for remark in report.remarks)
    yield "</html>\n"


def picture(figure: Figure, text: str) -> str:
    """Return a figure as a part of the page."""
    return f'<img src="data:image/png;base64,{b64encode(png(figure)).decode()}" alt="{text}">'


def show_table(table: Table) -> str:
    """Return a table of the page."""
    head, *rows = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for row, tag in table.tagged())
    body = "".join(f"<tr>{row}</tr>" for row in (head, *rows))
    return f"<div><table><caption>{escape(table.title)}</caption>{body}</table></div>"


def links_of(run: Run, folder: Path) -> str:
    """Return links to a run's folder and its videos, relative to the page's folder."""
    videos = sorted((run.folder / "videos").glob("*.mp4"))
    places = {str(run.folder): run.folder, **{video.name: video for video in videos}}
    return " ".join(f'<a href="{quote(os.fsencode(os.path.relpath(place, folder)))}">{escape(name)}</a>' for name, place in places.items())


def check_out(file: Path) -> None:
    """Raise `SettingError` if a page cannot be written or its picture cannot be drawn."""
    check_path("--out", file)
    if file.suffix != ".html":
        raise SettingError(f"--out {file}: name a file that ends in .html; a .png is written next to it")
    if not file.parent.is_dir():
        raise SettingError(f"--out {file}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise SettingError(f"--out {file} is a folder; name a file in it")
    new_figure(1, 1, "compare --out")


def write(file: Path, report: Report) -> None:
    """Write the page, and the picture of its curves next to it; raise `SaveError` if that fails."""
    page = "\n".join(html(report, file.parent)).encode(errors="backslashreplace")
    write_bytes(file.with_suffix(".png"), png(make_figure(report.sections, line_styles(report.sections), report.threshold)))
    write_bytes(file, page)
