"""Draw learning curves, performance profiles and diagnostics."""

from __future__ import annotations

from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING

from lightning_rl.errors import missing_extra
from lightning_rl.loggers import read_rows
from lightning_rl.reports.groups import Group, Section
from lightning_rl.reports.runs import AXES, series
from lightning_rl.reports.tables import TRAINING_RETURN, Aggregate, iqm, iqm_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette without its yellow, which is pale on white."""
STYLES = ("-", "--", ":", "-.")
MAX_MARKED_POINTS = 30
"""Curves of at most this many points get markers: a line through one point would not be visible."""
KEY = "line: interquartile mean of the seeds; band: its 95 % interval"
DIAGNOSTICS = (
    "train/approx_kl",
    "train/clip_fraction",
    "train/entropy_loss",
    "train/entropy",
    "train/ent_coef",
    "train/value_loss",
    "train/policy_gradient_loss",
    "train/policy_loss",
    "train/loss",
    "train/critic_loss",
    "train/actor_loss",
    "train/q_value",
    "train/explained_variance",
    "train/grad_norm",
    "train/learning_rate",
    "rollout/ep_rew_mean",
    "rollout/ep_len_mean",
    "time/fps",
)
"""Columns of `metrics.csv` that show how learning went, if a run has them."""


def new_figure(width: float, height: float, needed_by: str) -> Figure:
    """Return an empty figure of a size in inches; raise `SettingError` if matplotlib is not installed."""
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
    """Return the figure as a PNG file. Its texts are names that users chose, so a `$` does not begin a formula."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_text(text.get_text().encode(errors="backslashreplace").decode())  # file names may hold undecodable bytes
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def line_styles(sections: list[Section]) -> dict[str, tuple[str, str]]:
    """Return a color and a line style for each group's name, the same in all sections."""
    names = dict.fromkeys(group.name for section in sections for group in section.groups)
    return {name: (COLORS[index % len(COLORS)], STYLES[index // len(COLORS) % len(STYLES)]) for index, name in enumerate(names)}


def make_figure(sections: list[Section], lines: dict[str, tuple[str, str]], threshold: float | None) -> Figure:
    """Return a figure with a panel for each section, one below the other, each with its legend below it."""
    names = [{group.name: legend(group) for group in section.groups} for section in sections]
    heights = [4.4 + sum(0.1 + 0.18 * len(name.splitlines()) for name in section_names.values()) for section_names in names]
    figure = new_figure(8, sum(heights), "compare --out")
    panels = figure.subfigures(len(sections), squeeze=False, height_ratios=heights)[:, 0]
    for panel, section, section_names in zip(panels, sections, names, strict=True):
        draw_section(panel.subplots(), section, section_names, lines, threshold)
    return figure


def legend(group: Group) -> str:
    """Return the legend of a group, in lines that fit the picture."""
    seeds = group.seeds if len(group.runs) > 1 else f"{group.seeds}, no interval"
    return fill(f"{group.name} ({seeds})" + (f": {group.key}" if group.key else ""), 100, subsequent_indent="    ")


def draw_section(axes: Axes, section: Section, names: dict[str, str], lines: dict[str, tuple[str, str]], threshold: float | None) -> None:
    """Draw the curves of one section: a line for each group, and a band for its interval if it has several seeds.

    A threshold that no run reaches is left out: it may belong to another environment, and would flatten the curves.
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
            axes.fill_between(counts, *interval, color=color, alpha=max(0.04, 0.2 - 0.03 * len(section.groups)), linewidth=0)
            for edge in interval if len(section.groups) > 1 else ():  # overlapping areas look alike, their edges do not
                axes.plot(counts, edge, style, color=color, linewidth=0.5, alpha=0.6)
            if len(counts) == 1:  # a single point has no band
                axes.vlines(counts, *interval, color=color, alpha=0.3, linewidth=6)
    if threshold is not None and any(run.returns.max() >= threshold for group in section.groups for run in group.runs):
        axes.axhline(threshold, color="#777777", linewidth=1, linestyle=(0, (4, 3)), label=f"threshold {threshold:,.10g}")
    several = any(len(group.runs) > 1 for group in section.groups)
    meaning = TRAINING_RETURN if section.training else "mean return (sum of rewards)"
    label(axes, section.title, section.counter, meaning, KEY if several else "")


def draw_diagnostics(section: Section, lines: dict[str, tuple[str, str]]) -> Figure | None:
    """Return a figure with a panel for each metric of training and a thin line for each run; None if no run wrote any."""
    tables = {run.folder: read_rows(run.folder / "metrics.csv") for group in section.groups for run in group.runs}
    written = {name for rows in tables.values() for row in rows for name in DIAGNOSTICS if row.get(name)}
    if not written:
        return None
    names = [name for name in DIAGNOSTICS if name in written]
    figure = new_figure(10, 2.2 * -(-len(names) // 3), "compare --diagnostics")
    panels = figure.subplots(-(-len(names) // 3), 3, squeeze=False).ravel()
    for axes, name in zip(panels, names, strict=False):
        for group in section.groups:
            color, style = lines[group.name]
            for run in group.runs:
                curve = series(run.folder / "metrics.csv", tables[run.folder], section.counter, name, gaps=True)
                axes.plot(curve[:, 0], curve[:, 1], style, color=color, linewidth=0.8)
        axes.set_title(name, loc="left", fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    return figure


def draw_profiles(aggregate: Aggregate, lines: dict[str, tuple[str, str]]) -> Figure:
    """Return a figure of performance profiles: the share of runs, over all environments, that ended above each score."""
    figure = new_figure(8, 4.2, "compare --out")
    axes = figure.subplots()
    for name, (shares, interval) in aggregate.profiles().items():
        color, style = lines[name]
        axes.plot(aggregate.thresholds, shares, style, color=color, label=name)
        if interval is not None:
            axes.fill_between(aggregate.thresholds, *interval, color=color, alpha=0.12, linewidth=0)
    axes.set_title(f"Performance profiles over {len(aggregate.environments)} environments", loc="left")
    axes.set_xlabel("score: 0 is the lowest final return of all runs in an environment, 1 the highest")
    axes.set_ylabel("share of runs that end above it")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure
