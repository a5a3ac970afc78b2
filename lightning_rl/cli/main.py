"""`lightning-rl` and `python -m lightning_rl`: run a subcommand, and turn wrong input into one line and exit status 2."""

import argparse
import ast
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_rl import __version__
from lightning_rl.cli.names import read_options, take_seeds
from lightning_rl.cli.parsers import FIT_HELP, HELP, LIST_HELP, PARSERS, read_tune_options
from lightning_rl.errors import LostRankError, SettingError, missing_extra, nearest, printable
from lightning_rl.processes.startup import (
    INTERRUPTED,
    ROOT,
    config_folder,
    importing,
    leave_when_interrupted,
    packaged_agents,
    raise_when_interrupted,
    start_fork_server,
)
from lightning_rl.settings.dotted_paths import import_modules
from lightning_rl.settings.names import MODELS

READERS: dict[str, Callable[[list[str]], Any]] = {"fit": read_options, "tune": read_tune_options}
"""Functions that turn the arguments of a subcommand into options without loading torch; the others use parsers of argparse."""
SUBCOMMANDS = (*READERS, *PARSERS, "list")

SYNONYMS = {"train": "fit", "learn": "fit", "play": "evaluate", "enjoy": "evaluate", "optimize": "tune", "hpo": "tune", "plot": "compare"}
"""Other words for subcommands."""


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status.

    0: success. 1: an error in the user's code or in ours, or the loss of another process of the run. 2: wrong input, or output that cannot
    be written. 3: an environment tried to end the program. 4: the newest weights could not be saved. 130: Ctrl-C. 141: a closed pipe.
    143: another signal.
    """
    raise_when_interrupted()
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    try:
        try:
            return run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # not at the exit of Python, which would print an error
    except (SettingError, LostRankError) as error:
        if debug:
            raise
        if not getattr(error, "is_told", False):
            print(one_line(str(error)), file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and output_is_lost():
            if isinstance(error, BrokenPipeError):  # … | head
                return 141
            print(one_line(f"the output could not be written: {error.strerror}"), file=sys.stderr)
            return 2
        if debug:
            raise
        print_error(error)
        return 1


def print_error(error: Exception) -> None:
    """Print an unexpected error without the library calls between the program and the code that failed, often the user's."""
    shown = traceback.TracebackException.from_exception(error)
    libraries = (f"{os.sep}pytorch_lightning{os.sep}", f"{os.sep}jsonargparse{os.sep}", f"{os.sep}contextlib.py")
    between = (str(Path(__file__).parent), *libraries)
    if frames := [frame for frame in shown.stack if not any(path in frame.filename for path in between)]:
        shown.stack = traceback.StackSummary.from_list(frames)
    print("".join(shown.format()).rstrip(), file=sys.stderr)
    print("(--debug shows all calls)", file=sys.stderr)


def output_is_lost() -> bool:
    """Return whether stdout can no longer be written to; if so, discard further output."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def run(argv: list[str]) -> int:
    """Dispatch to the subcommand, which may come before or after options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--import", action="append", default=[], dest="modules")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--version", action="store_true")
    try:
        common, arguments = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise SettingError(str(error)) from error
    if common.version:
        print(f"lightning_rl {__version__}")
        return 0
    subcommand = take_subcommand(arguments)
    if subcommand is None:
        print(HELP)
        return 0
    if subcommand == "list":
        if arguments and arguments[0] not in ("-h", "--help"):
            raise SettingError(f"list takes no options, got {arguments[0]!r}")
        print(LIST_HELP, end="") if arguments else list_all()
        return 0
    if subcommand == "fit" and ("--help" in arguments or "-h" in arguments):
        print(FIT_HELP)
        return 0
    if subcommand == "tune" and find_spec("optuna") is None:
        raise missing_extra("optuna", "tune", "lightning-rl tune")
    options: Any = READERS[subcommand](arguments) if subcommand in READERS else PARSERS[subcommand]().parse_args(arguments)
    several = take_seeds(options) if subcommand == "fit" else None
    if subcommand == "completion":
        from lightning_rl.cli.completion import print_completion

        return print_completion(options)
    if not common.debug:
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # in worker processes too
    import_modules(common.modules)
    if several is not None:
        start_fork_server("lightning_rl.cli.fit")  # while this process imports it too
    leave_when_interrupted()
    is_first = "torch" not in sys.modules
    with importing():
        from lightning_rl.cli import commands, fit  # torch and Lightning are loaded only now

    if is_first:
        gc.freeze()  # imports live until this process ends: keep them out of garbage collections
    raise_when_interrupted()
    if several is not None:
        from lightning_rl.cli import seeds

        return seeds.fit_seeds(several, options, common.modules)
    if subcommand == "fit":
        return fit.fit(options, common.modules)
    if subcommand == "tune":
        from lightning_rl.cli import tune  # and Optuna

        return tune.tune(options, common.modules)
    return commands.COMMANDS[subcommand](options)


def take_subcommand(arguments: list[str]) -> str | None:
    """Remove the subcommand from the arguments and return it; None if only help is requested."""
    for position, argument in enumerate(arguments):
        if argument in SUBCOMMANDS and (position == 0 or not is_value(arguments, position)):
            return arguments.pop(position)
    if not arguments or arguments[0] in ("-h", "--help"):
        return None
    if not arguments[0].startswith("-"):
        meant = f"; did you mean {SYNONYMS[arguments[0]]}?" if arguments[0] in SYNONYMS else nearest(arguments[0], SUBCOMMANDS)
        raise SettingError(f"there is no subcommand {arguments[0]!r}{meant}")
    raise SettingError(f"a subcommand is missing: one of {', '.join(SUBCOMMANDS)}")


def is_value(arguments: list[str], position: int) -> bool:
    """Return whether an argument is the value of the option before it: `--config fit` as opposed to `--config a.yaml fit`."""
    before = arguments[position - 1]
    return before.startswith("--") and "=" not in before


def one_line(text: str) -> str:
    """Write an error on one line of at most 200 characters, without control characters."""
    line = printable("error: " + " ".join(text.split()))
    return line if len(line) <= 200 else line[:197] + "..."


def list_all() -> None:
    """Print the algorithms and the packaged configs, each with the first line of its file, and the packaged agents. Imports no torch."""
    print("algorithms (lightning-rl fit --model NAME --model.env.id ENVIRONMENT):")
    for name, module in MODELS.items():
        file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        summary = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0]
        print(f"  {name:20} {summary}")
    print("\nconfigs (lightning-rl fit --config NAME):")
    folder = config_folder()
    for path in sorted(folder.rglob("*.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        print(f"  {path.relative_to(folder).with_suffix('').as_posix():20} {first.lstrip('# ')}")
    print("\ntrained agents (lightning-rl evaluate --ckpt_path zoo:NAME, record --ckpt_path zoo:NAME --out FILE.mp4):")
    print("\n".join(f"  {name}" for name in packaged_agents()))
