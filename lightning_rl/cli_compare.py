"""The subcommand `compare`."""

from __future__ import annotations

from pathlib import Path

from lightning_rl.cli import Parser
from lightning_rl.errors import SettingError, check_range, printable
from lightning_rl.reports.groups import compared
from lightning_rl.reports.page import check_out, write
from lightning_rl.reports.runs import find_runs
from lightning_rl.reports.statistics import rliable
from lightning_rl.reports.tables import tables


def compare(arguments: list[str], imports: list[str]) -> int:
    """Print what runs came to, by algorithm, environment and settings; write a page with their learning curves."""
    parser = Parser("lightning-rl compare", description="Learning curves and tables of runs, seeds taken together.", allow_abbrev=False)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=folder_of_runs, help="a run's folder, or one of runs such as runs/PPO/CartPole-v1"
    )
    parser.add_argument("--out", metavar="FILE.html", type=page, help="write a page with the curves, and the picture beside it as .png")
    parser.add_argument("--threshold", metavar="R", type=float, help="say what it took to a mean return of R")
    options = parser.parse_args(arguments)
    if options.threshold is not None:
        check_range("--threshold", options.threshold)
    rliable("compare")
    if options.out is not None:
        check_out(options.out)
    runs, empty = find_runs(options.runs)
    sections = compared(runs)
    remarks = [f"{folder} is left out: it has no returns yet." for folder in empty]
    if options.out is not None:
        write(options.out, sections, options.threshold, remarks)
    for section in sections:
        print(*map(printable, (section.title, *section.notes())), sep="\n")
        for table in tables(section, options.threshold):
            print(printable(f"\n{table.text()}"))
        print()
    print(*map(printable, remarks), sep="\n", end="\n" if remarks else "")
    if options.out is not None:
        print(printable(f"report: {options.out}, picture: {options.out.with_suffix('.png')}"))
    return 0


def folder_of_runs(text: str) -> Path:
    """What was named as one; not the current folder where nothing was."""
    if not text:
        raise SettingError("'' is no folder; name the folder of a run, or one of runs such as runs/PPO/CartPole-v1")
    return Path(text)


def page(text: str) -> Path:
    """What was named as a file to write."""
    if not text:
        raise SettingError("--out '' is no file; name one that ends in .html")
    return Path(text)


SUBCOMMANDS = {"compare": compare}
