"""Draw learning curves, and write a report as a picture and as one HTML page without scripts or links."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from html import escape
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from lightning_rl.checkpoints.atomic import SaveError, write_bytes
from lightning_rl.errors import SettingError, missing_extra
from lightning_rl.reports.groups import Group, Section
from lightning_rl.reports.runs import AXES
from lightning_rl.reports.tables import REPS, TRAINING_RETURN, iqm, iqm_interval, make_tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette without its yellow, which is pale on white."""
STYLES = ("-", "--", ":", "-.")
MAX_MARKED_POINTS = 30
"""Curves of so few points get markers: a line through one would not be visible."""
ABOUT = f"""Lines are interquartile means (IQM) of the seeds: the mean without the lowest and the highest quarter of them, rounded down to
whole seeds, so that of three it is the mean. Bands and intervals are 95 % intervals of a stratified bootstrap over seeds with {REPS:,}
resamples, at each point by itself (Agarwal et al. 2021, rliable). A return is the mean over an evaluation's episodes, or, where a section
says so, over the last 100 of training. Where seeds were evaluated at different counts, the last known value of each is used; a curve
begins and ends where all seeds of its group have values. The probability of improvement is how likely a run of the first group ends
higher than one of the second, ties counted half. Time is that of training with its evaluations."""
KEY = "line: interquartile mean of the seeds; band: its 95 % interval"
STYLE = "body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto } img { max-width: 100% } pre { overflow-x: auto }"


def new_figure(width: float, height: float, needed_by: str) -> Figure:
    """Return an empty figure of so many inches; raise `SettingError` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "plots", needed_by) from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def label(axes: Axes, title: str, counter: str, returns: str = "mean return (sum of rewards)", key: str = "") -> None:
    """Name the axes, separate thousands, draw a light grid, and put the legend below the axes, under a title `key`."""
    axes.set_title(title, loc="left")
    axes.set_xlabel(AXES[counter])
    axes.set_ylabel(returns)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.10g}")
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        place = axes.figure.legend(handles, labels, title=key, loc="outside lower left", frameon=False, fontsize=9, title_fontsize=9)
        place.set_alignment("left")


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG file. Its texts are names that users chose: a `$` begins no formula."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_text(text.get_text().encode(errors="backslashreplace").decode())  # file names may hold bytes that are no letters
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def line_styles(sections: list[Section]) -> dict[str, tuple[str, str]]:
    """Return a colour and a line style for each group's name, the same in all sections."""
    names = dict.fromkeys(group.name for section in sections for group in section.groups)
    return {name: (COLORS[index % len(COLORS)], STYLES[index // len(COLORS) % len(STYLES)]) for index, name in enumerate(names)}


def make_figure(sections: list[Section], lines: dict[str, tuple[str, str]], threshold: float | None) -> Figure:
    """Return a figure with a panel for each section, one below the other, its legend under it."""
    names = [{group.name: legend(group) for group in section.groups} for section in sections]
    heights = [4.4 + sum(0.1 + 0.18 * len(name.splitlines()) for name in each.values()) for each in names]
    figure = new_figure(8, sum(heights), "compare --out")
    panels = figure.subfigures(len(sections), squeeze=False, height_ratios=heights)[:, 0]
    for panel, section, each in zip(panels, sections, names, strict=True):
        draw_section(panel.subplots(), section, each, lines, threshold)
    return figure


def legend(group: Group) -> str:
    """Return the legend of a group, in lines that fit the picture."""
    seeds = group.seeds if len(group.runs) > 1 else f"{group.seeds}, no interval"
    return fill(f"{group.name} ({seeds})" + (f": {group.key}" if group.key else ""), 100, subsequent_indent="    ")


def draw_section(axes: Axes, section: Section, names: dict[str, str], lines: dict[str, tuple[str, str]], threshold: float | None) -> None:
    """Draw the curves of one section: a line for each group, and a band for its interval where it has several seeds.

    A threshold that no run reaches is left out: it may be that of another environment, and would press the curves flat.
    """
    for group in section.groups:
        color, style = lines[group.name]
        counts, returns = group.curve()
        if not len(counts):
            continue
        marker = "o" if len(counts) <= MAX_MARKED_POINTS else None
        axes.plot(counts, iqm(returns), style, marker=marker, markersize=4, color=color, label=names[group.name])
        interval = iqm_interval(returns)
        if interval is not None:
            axes.fill_between(counts, *interval, color=color, alpha=0.16, linewidth=0)
            if len(counts) == 1:  # which has no band
                axes.vlines(counts, *interval, color=color, alpha=0.3, linewidth=6)
    if threshold is not None and any(run.returns.max() >= threshold for group in section.groups for run in group.runs):
        axes.axhline(threshold, color="#777777", linewidth=1, linestyle=(0, (4, 3)), label=f"threshold {threshold:,.10g}")
    several = any(len(group.runs) > 1 for group in section.groups)
    meaning = TRAINING_RETURN if section.training else "mean return (sum of rewards)"
    label(axes, section.title, section.counter, meaning, KEY if several else "")


def html(sections: list[Section], threshold: float | None, remarks: Iterable[str]) -> Iterator[str]:
    """Return the page, in parts; `remarks` concern all of it."""
    title = escape(f"Runs on {', '.join(dict.fromkeys(section.environment for section in sections))}")
    yield '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">'
    yield f"<title>{title}</title>\n<style>{STYLE}</style>\n<h1>{title}</h1>"
    yield from (f"<p>{escape(text)}</p>" for text in (ABOUT, *remarks))
    lines = line_styles(sections)
    for section in sections:
        picture = b64encode(png(make_figure([section], lines, threshold))).decode()
        name = escape(section.title)
        yield f'<h2>{name}</h2>\n<img src="data:image/png;base64,{picture}" alt="Learning curves on {name}">'
        yield from (f"<p>{escape(note)}</p>" for note in section.notes())
        yield from (f"<pre>{escape(table.text())}</pre>" for table in make_tables(section, threshold))
    yield "</html>\n"


def check_out(file: Path) -> None:
    """Raise `SettingError` where a page cannot be written or its picture not be drawn."""
    if file.suffix != ".html":
        raise SettingError(f"--out {file}: name a file that ends in .html; a .png is written next to it")
    if not file.parent.is_dir():
        raise SettingError(f"--out {file}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise SettingError(f"--out {file} is a folder; name a file in it")
    new_figure(1, 1, "compare --out")


def write(file: Path, sections: list[Section], threshold: float | None, remarks: Iterable[str]) -> None:
    """Write the page, and its picture next to it; raise `SettingError` if that fails."""
    try:
        write_bytes(file.with_suffix(".png"), png(make_figure(sections, line_styles(sections), threshold)))
        write_bytes(file, "\n".join(html(sections, threshold, remarks)).encode(errors="backslashreplace"))
    except SaveError as error:
        raise SettingError(str(error)) from error
