"""Figures of returns: no window, no global state, colours that are told apart with any eyes."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from lightning_rl.errors import missing_extra

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette without its yellow, which is pale on white."""
AXES = {"env_steps": "environment steps", "updates": "updates"}
"""What a run counts, in words."""


def new_figure(width: float, height: float, needed_by: str) -> Any:
    """An empty figure of so many inches.

    Raises:
        SettingError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "plots", needed_by) from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def label(axes: Any, title: str, counter: str, returns: str = "mean return (sum of rewards)", key: str = "") -> None:
    """Names of the axes, thousands set apart, a quiet grid, and the legend in a place of its own below, under the words of a key."""
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
        axes.figure.legend(
            handles, labels, title=key, alignment="left", loc="outside lower left", frameon=False, fontsize=9, title_fontsize=9
        )


def png(figure: Any) -> bytes:
    """The figure as a PNG file. Its texts are names that others chose: a `$` begins no formula."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_text(text.get_text().encode(errors="backslashreplace").decode())  # names of files may hold bytes that are no letters
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
