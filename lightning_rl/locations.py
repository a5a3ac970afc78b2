"""Where things lie that a user names: packaged configs, and modules in the current folder. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
"""Where this package lies: a checkout, or where packages are installed."""


def config_folder() -> Path:
    """Find the packaged configs: next to the package in a checkout, inside it when installed."""
    return ROOT / "configs" if (ROOT / "configs").is_dir() else Path(__file__).parent / "configs"


def search_here_last() -> None:
    """Take the current folder from the front of `sys.path`, where `python -m` puts it.

    It goes to the end where this package lies in it: in a checkout that is not installed, workers would not find the package otherwise.
    """
    here = os.getcwd()
    if sys.path[0] in ("", here):
        del sys.path[0]
        if ROOT.samefile(here):
            sys.path.append(here)


def find_modules_here(names: Iterable[str]) -> None:
    """Let Python find modules in the current folder, behind all others, if one of the names is of a module that is found nowhere else.

    Only then: the folder may hold anything, and a file in it must not be imported because a package has the same name.
    """
    packages = {name.partition(".")[0] for name in names}
    if any(package not in sys.modules and find_spec(package) is None for package in packages):
        sys.path.append(os.getcwd())
