"""A report as a picture and as one HTML page that carries it, without scripts and without anything from elsewhere."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Any

from lightning_rl.checkpoints.atomic import SaveFailed, write_bytes
from lightning_rl.errors import SettingError
from lightning_rl.reports.groups import Group, Section
from lightning_rl.reports.runs import COLORS, label, new_figure, png
from lightning_rl.reports.tables import REPS, TRAINING_RETURN, iqm, iqm_interval, tables

ABOUT = f"""Lines are interquartile means (IQM) of the seeds: the mean without the lowest and the highest quarter of them, rounded down to
whole seeds, so that of three it is the mean. Bands and intervals are 95 % intervals of a stratified bootstrap over seeds with {REPS:,}
resamples, at each point by itself (Agarwal et al. 2021, rliable). A return is the mean over an evaluation's episodes, or, where a section
says so, over the last 100 of training. Where seeds were evaluated at different counts, the last value known of each stands; a curve
begins and ends where all seeds of its group have values. The probability of improvement is how likely a run of the first group ends
higher than one of the second, ties counted half. Time is that of training with its evaluations."""
KEY = "line: interquartile mean of the seeds; band: its 95 % interval"
FEW = 30
"""Points of a curve that are marked; a line through one would not be seen."""
STYLES = ("-", "--", ":", "-.")
STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }
img { max-width: 100% } p { max-width: 45em } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
div { overflow-x: auto } th, td { padding: .25em .75em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal } h3 { font-size: 1em; margin: 2em 0 .5em }"""


def looks(sections: list[Section]) -> dict[str, tuple[str, str]]:
    """A colour and a style of line for each group's name, the same in all sections; styles change when the colours are used up."""
    names = dict.fromkeys(group.name for section in sections for group in section.groups)
    return {name: (COLORS[index % len(COLORS)], STYLES[index // len(COLORS) % len(STYLES)]) for index, name in enumerate(names)}


def draw(sections: list[Section], lines: dict[str, tuple[str, str]], threshold: float | None) -> bytes:
    """Learning curves as a PNG file."""
    return png(picture(sections, lines, threshold))


def picture(sections: list[Section], lines: dict[str, tuple[str, str]], threshold: float | None) -> Any:
    """A figure with a panel for each section, one below the other, its legend under it."""
    names = [{group.name: legend(group) for group in section.groups} for section in sections]
    heights = [4.4 + sum(0.1 + 0.18 * len(name.splitlines()) for name in each.values()) for each in names]
    figure = new_figure(8, sum(heights), "compare --out")
    panels = figure.subfigures(len(sections), squeeze=False, height_ratios=heights)[:, 0]
    for panel, section, each in zip(panels, sections, names, strict=True):
        draw_section(panel.subplots(), section, each, lines, threshold)
    return figure


def legend(group: Group) -> str:
    """What a picture says of a group, in lines that are no wider than it."""
    seeds = group.seeds if len(group.runs) > 1 else f"{group.seeds}, no interval"
    return fill(f"{group.name} ({seeds})" + (f": {group.key}" if group.key else ""), 100, subsequent_indent="    ")


def draw_section(axes: Any, section: Section, names: dict[str, str], lines: dict[str, tuple[str, str]], threshold: float | None) -> None:
    """The curves of one section: a line for each group, and a band for its interval where it has several seeds.

    A threshold that no run reaches is left out: it may be that of another environment, and would press the curves flat.
    """
    for group in section.groups:
        color, style = lines[group.name]
        counts, returns = group.curve()
        if not len(counts):
            continue
        interval = iqm_interval(returns)
        axes.plot(
            counts, iqm(returns), style, marker="o" if len(counts) <= FEW else None, markersize=4, color=color, label=names[group.name]
        )
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
    """The page, in parts. `remarks`: what concerns all of it."""
    title = f"Runs on {', '.join(dict.fromkeys(section.environment for section in sections))}"
    yield f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>'
    yield f'<meta name="viewport" content="width=device-width">\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>'
    yield f"<p>{escape(ABOUT)}</p>"
    yield from (f"<p>{escape(remark)}</p>" for remark in remarks)
    lines = looks(sections)
    for section in sections:
        picture = b64encode(draw([section], lines, threshold)).decode()
        yield f"<h2>{escape(section.title)}</h2>"
        yield f'<img src="data:image/png;base64,{picture}" alt="Learning curves on {escape(section.title)}">'
        yield from (f"<p>{escape(note)}</p>" for note in section.notes())
        yield from (f"<div>\n{table.html()}\n</div>" for table in tables(section, threshold))
    yield "</body>\n</html>\n"


def check_out(file: Path) -> None:
    """Raise `SettingError` where a page cannot be written or its picture not be drawn."""
    if file.suffix != ".html":
        raise SettingError(f"--out {file}: name a file that ends in .html; a .png is written beside it")
    if not file.parent.is_dir():
        raise SettingError(f"--out {file}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise SettingError(f"--out {file} is a folder; name a file in it")
    new_figure(1, 1, "compare --out")


def write(file: Path, sections: list[Section], threshold: float | None, remarks: Iterable[str]) -> None:
    """Write the page, and its picture beside it.

    Raises:
        SettingError: the system does not let us.
    """
    try:
        write_bytes(file.with_suffix(".png"), draw(sections, looks(sections), threshold))
        write_bytes(file, "\n".join(html(sections, threshold, remarks)).encode(errors="backslashreplace"))
    except SaveFailed as error:
        raise SettingError(str(error)) from error
