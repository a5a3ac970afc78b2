"""Write a report as one HTML page without scripts or anything from elsewhere, and its picture beside it."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from lightning_rl.checkpoints.atomic import SaveError, write_bytes
from lightning_rl.errors import SettingError
from lightning_rl.reports.figures import draw_diagnostics, draw_profiles, line_styles, make_figure, new_figure, png
from lightning_rl.reports.groups import Section
from lightning_rl.reports.runs import Run
from lightning_rl.reports.tables import REPS, Aggregate, Table, make_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Content(NamedTuple):
    """What a page shows, as in `Report`."""

    sections: list[Section]
    aggregate: Aggregate | None
    threshold: float | None
    remarks: Sequence[str]
    diagnostics: bool


ABOUT = f"""Lines are interquartile means (IQM) of the seeds: the mean without the lowest and the highest quarter of them, rounded down to
whole seeds, so that of three it is the mean. Bands and intervals are 95 % intervals of a stratified bootstrap over seeds with {REPS:,}
resamples, at each point by itself (Agarwal et al. 2021, rliable). A return is the mean over an evaluation's episodes, or, where a section
says so, over the last 100 of training. Where seeds were evaluated at different counts, the last known value of each is used; a curve
begins and ends where all seeds of its group have values. The probability of improvement is how likely a run of the first group ends
higher than one of the second, ties counted half. Time is that of training with its evaluations."""
STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
img { max-width: 100% } div { overflow-x: auto } table { border-collapse: collapse; font-size: 14px; margin: 1em 0 }
caption { text-align: left; font-weight: 600; padding-bottom: .3em } th, td { padding: .15em .7em; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0 } tr + tr { border-top: 1px solid #ddd }"""


def html(content: Content, folder: Path) -> Iterator[str]:
    """Return the page, in parts: pictures and tables of each environment, then how to read them. Links begin in its folder."""
    sections, lines = content.sections, line_styles(content.sections)
    title = escape(f"Runs on {', '.join(dict.fromkeys(section.environment for section in sections))}")
    yield '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">'
    yield f"<title>{title}</title>\n<style>{STYLE}</style>\n<h1>{title}</h1>"
    if content.aggregate is not None:
        yield picture(draw_profiles(content.aggregate, lines), "Performance profiles over all environments")
        yield show_table(content.aggregate.table())
    for section in sections:
        name = escape(section.title)
        yield f"<h2>{name}</h2>\n{picture(make_figure([section], lines, content.threshold), f'Learning curves on {name}')}"
        yield from (f"<p>{escape(note)}</p>" for note in section.notes())
        yield from map(show_table, make_tables(section, content.threshold))
        yield "<ul>" + "".join(f"<li>{links_of(run, folder)}</li>" for group in section.groups for run in group.runs) + "</ul>"
        figure = draw_diagnostics(section, lines) if content.diagnostics else None
        if figure is not None:
            yield f"<details><summary>Diagnostics</summary>{picture(figure, f'Diagnostics of runs on {name}')}</details>"
    yield f"<h2>How to read this</h2>\n<p>{escape(ABOUT)}</p>"
    yield from (f"<p>{escape(remark)}</p>" for remark in content.remarks)
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
    """Return links to a run's folder and its videos, as they lie from the page's folder."""
    videos = sorted((run.folder / "videos").glob("*.mp4"))
    places = {str(run.folder): run.folder, **{video.name: video for video in videos}}
    return " ".join(f'<a href="{quote(os.fsencode(os.path.relpath(place, folder)))}">{escape(name)}</a>' for name, place in places.items())


def check_out(file: Path) -> None:
    """Raise `SettingError` where a page cannot be written or its picture not be drawn."""
    if file.suffix != ".html":
        raise SettingError(f"--out {file}: name a file that ends in .html; a .png is written next to it")
    if not file.parent.is_dir():
        raise SettingError(f"--out {file}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise SettingError(f"--out {file} is a folder; name a file in it")
    new_figure(1, 1, "compare --out")


def write(file: Path, content: Content) -> None:
    """Write the page, and the picture of its curves next to it; raise `SettingError` if that fails."""
    try:
        figure = make_figure(content.sections, line_styles(content.sections), content.threshold)
        write_bytes(file.with_suffix(".png"), png(figure))
        write_bytes(file, "\n".join(html(content, file.parent)).encode(errors="backslashreplace"))
    except SaveError as error:
        raise SettingError(str(error)) from error
