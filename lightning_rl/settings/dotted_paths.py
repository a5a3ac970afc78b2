"""Decide what settings may import and call by its dotted path.

Settings may come from other people. Whoever needs a class checks its kind before calling it. What a function returns is known only after
the call, so the place of its definition decides: see `check_function`.
"""

import importlib
import logging
import os
import re
import sys
from collections.abc import Iterable
from functools import cache, partial
from importlib.metadata import packages_distributions, requires
from inspect import unwrap
from multiprocessing import parent_process

from lightning_rl.errors import SettingError, is_own_file, place_in_code
from lightning_rl.processes.startup import find_modules_here

IMPORTED = "LIGHTNING_RL_IMPORTED"
"""Environment variable with the modules that `--import` named; worker processes inherit it."""
ENVIRONMENTS = ("gymnasium", "pettingzoo", "lightning_rl")
"""Packages of environments; a package that requires one of them is one too."""
BUILDERS = ("env", "parallel_env", "raw_env")
"""Names of the functions that build an environment in a module of PettingZoo, and in packages that follow it."""


def path_of(named: object) -> str | None:
    """Return the import path of a class or function; None if it has none, such as a lambda or a class that is defined in a function."""
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", "")
    return f"{module}.{name}" if named is not None and getattr(sys.modules.get(str(module)), name, None) is named else None


def import_modules(names: Iterable[str]) -> None:
    """Import the modules that `--import` names."""
    for module in names:
        try:
            find_modules_here([module])
            importlib.import_module(module)
        except Exception as error:  # a user's module may raise anything
            missing = "; a module must be installed or in the current folder" if isinstance(error, ImportError) else ""
            raise SettingError(f"--import {module}: {type(error).__name__}: {error}{place_in_code(error)}{missing}") from error
        os.environ[IMPORTED] = ",".join({*_imported(), module})


def check_module(setting: str, module: str) -> None:
    """Raise `SettingError` if a module is one of Python's standard library, which has nothing that a setting can use."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise SettingError(f"{setting}: {module} is a module of Python's standard library, which has nothing for it")


def check_function(setting: str, path: str, function: object, *, builds_environment: bool = False) -> None:
    """Raise `SettingError` for a function that must not be called because a setting names it.

    Permitted are functions of modules that `--import` names, and of the user's own files, for which one line says what is called. With
    `builds_environment` also this package's environments, and functions with PettingZoo's names (`BUILDERS`) of packages that require
    gymnasium or PettingZoo.
    """
    inner = unwrap(function.func if isinstance(function, partial) else function)  # type: ignore[arg-type]
    module, _, name = path.rpartition(".")
    home = str(getattr(inner, "__module__", None) or type(inner).__module__)
    for given in (module, home):
        check_module(f"{setting} {path}", given)
    is_builder = builds_environment and (name in BUILDERS or home.startswith("lightning_rl.envs."))
    if not all(_is_imported(name) or _is_own(name) or (is_builder and _has_environments(name)) for name in (module, home)):
        raise SettingError(
            f"{setting} {path} is not called: it is a function of {home}, not of your own file"
            f"{' nor PettingZoo’s env or parallel_env' if builds_environment else ''}; if you trust it, --import {home}"
        )
    if _is_own(home) and not _is_imported(module):
        _announce(f"{setting} calls the function {path} ({sys.modules[home].__file__})")


def _imported() -> list[str]:
    return [name for name in os.environ.get(IMPORTED, "").split(",") if name]


def _is_imported(module: str) -> bool:
    """Return whether `--import` named a module, or a package that contains it."""
    return any(f"{module}.".startswith(f"{imported}.") for imported in _imported())


def _is_own(module: str) -> bool:
    """Return whether a module is the user's own file: the program, or a file outside of installed packages."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and is_own_file(file))


@cache
def _has_environments(module: str) -> bool:
    """Return whether a module belongs to a package that requires gymnasium or PettingZoo, or is one of them."""
    package = module.partition(".")[0]
    needed = [need for name in packages_distributions().get(package, ()) for need in requires(name) or () if "extra ==" not in need]
    return package in ENVIRONMENTS or any(re.split(r"[^\w.-]", need)[0].lower() in ENVIRONMENTS for need in needed)


@cache
def _announce(line: str) -> None:
    """Print a line once, on rank 0 and not in workers."""
    if parent_process() is None and os.environ.get("LOCAL_RANK", "0") == "0":
        logging.getLogger("pytorch_lightning.utilities.rank_zero").info(line)  # without Lightning, which is not loaded yet
