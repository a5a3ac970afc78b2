"""What the benchmarks' reports have in common: the machine in the head, Markdown tables, and files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from install import HERE, LIBRARIES, python_of

RESULTS = HERE / "results"
PACKAGES = ("torch", "pytorch-lightning", "gymnasium", "numpy", "envpool", "mujoco", "ale-py", "vmas")
LIST_PACKAGES = "import importlib.metadata as m; print('\\n'.join(f'{d.name}=={d.version}' for d in m.distributions()))"


def machine(threads: int) -> list[str]:
    """Lines that say where something was measured, and with what."""
    here = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)) is not None)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = f"{os.cpu_count()} cores, {memory:.0f} GiB; {threads} thread{'s' * (threads > 1)} each"
    return [f"{processor()}, {cores}.", f"Python {platform.python_version()}, {here}."]


def processor() -> str:
    """Its name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def packages_of(peer: str) -> dict[str, str]:
    """All packages of a library's environment, name → version."""
    result = subprocess.run([python_of(peer), "-c", LIST_PACKAGES], capture_output=True, text=True, check=True)
    pairs = (line.split("==") for line in sorted(result.stdout.split()))
    return {name.lower().replace("_", "-"): found for name, found in pairs}


def libraries(peers: Sequence[str]) -> str:
    """A line with the version of each peer that is a library."""
    shown = [f"{LIBRARIES[peer]} {packages_of(peer)[LIBRARIES[peer]]}" for peer in peers if peer in LIBRARIES]
    return f"Peers: {', '.join(shown)}." if shown else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def put_between(page: Path, begin: str, end: str, text: str) -> None:
    """Write a text between two marks of a page, in the place of what was there. Ends the program if the page has no such marks."""
    before, first, rest = page.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise SystemExit(f"error: {page.name} has no {begin} … {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def write(name: str, text: str, figures: Mapping[str, Any], folder: Path) -> None:
    """Print a report, and keep it as NAME.md with its figures in NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text + "\n")
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(text, flush=True)
