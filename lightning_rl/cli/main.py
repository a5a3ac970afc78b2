"""`lightning-rl` and `python -m lightning_rl`: run a subcommand, and turn wrong input into one line and exit status 2."""

import argparse
import ast
import importlib
import os
import sys
import warnings
from collections.abc import Callable

from lightning_rl import MODELS, __version__
from lightning_rl.errors import LostRankError, SettingError, nearest, printable
from lightning_rl.startup import INTERRUPTED, ROOT, config_folder, find_modules_here, leave_when_interrupted, raise_when_interrupted

HELP = """usage: lightning-rl <subcommand> [options]

  fit         train:     lightning-rl fit --config configs/ppo/cartpole.yaml
                         lightning-rl fit --model PPO --model.env.id CartPole-v1
  evaluate    play:      lightning-rl evaluate --ckpt_path RUN/checkpoints/best.ckpt --episodes 100
  validate    play:      lightning-rl validate --ckpt_path RUN      the episodes of the run's evaluations
  test        play:      lightning-rl test --ckpt_path RUN          100 episodes that no evaluation has seen
  collect     record:    lightning-rl collect --ckpt_path RUN/checkpoints/best.ckpt --dataset cartpole/expert-v0 --episodes 100
  record      watch:     lightning-rl record --ckpt_path RUN/checkpoints/best.ckpt --episodes 3
  compare     plot:      lightning-rl compare runs/PPO/CartPole-v1 runs/A2C/CartPole-v1 --out report.html
  export      convert:   lightning-rl export --ckpt_path RUN/checkpoints/best.ckpt --format onnx
  push        share:     lightning-rl push RUN --repo USER/NAME       then anybody: evaluate --ckpt_path hf://USER/NAME
  import-mlagents        a config from an ML-Agents trainer file:      lightning-rl import-mlagents FILE.yaml --behavior NAME > mine.yaml
  import-zoo             a config from a file of rl-baselines3-zoo:    lightning-rl import-zoo ppo.yml CartPole-v1 > mine.yaml
  list        show the algorithms and the packaged configs

  <subcommand> --help    its options
  --version              the version
  --import MODULE        import a module first, one that registers environments or defines algorithms (repeatable)
  --debug                show tracebacks and Python warnings
"""

LIST_HELP = """usage: lightning-rl list

Print the algorithms and the packaged configs, each with a line about it.
"""

Subcommand = Callable[[list[str], list[str]], int]
"""Takes the arguments behind its name and the modules to import; returns the exit status."""

SUBCOMMANDS = (
    "fit",
    "evaluate",
    "validate",
    "test",
    "collect",
    "record",
    "compare",
    "export",
    "push",
    "import-mlagents",
    "import-zoo",
    "list",
)


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns its exit status: 0, 2 for wrong input, 1 if another process of the run is gone, 141 if its reader is."""
    raise_when_interrupted()
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    try:
        try:
            return run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # not when Python ends, which would print what fails
    except (SettingError, LostRankError) as error:
        if debug:
            raise
        print(one_line(str(error)), file=sys.stderr)
        return 2 if isinstance(error, SettingError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if not output_is_lost():
            raise
        if isinstance(error, BrokenPipeError):  # … | head
            return 141
        print(one_line(f"the output could not be written: {error.strerror}"), file=sys.stderr)
        return 2


def output_is_lost() -> bool:
    """Return whether nothing can be printed any more; if so, discard what is still to be printed."""
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
    if not common.debug:
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # in worker processes too
    for module in common.modules:
        try:
            find_modules_here([module])
            importlib.import_module(module)
        except Exception as error:  # the module of a user may raise anything
            reason = f"{type(error).__name__}: {error}; a module must be installed or in the current folder"
            raise SettingError(f"--import {module}: {reason}") from error
    leave_when_interrupted()
    from lightning_rl.cli import commands, fit  # torch and Lightning are loaded only now

    raise_when_interrupted()
    subcommands: dict[str, Subcommand] = {
        "fit": fit.fit,
        "evaluate": commands.evaluate,
        "validate": commands.validate,
        "test": commands.test,
        "collect": commands.collect,
        "record": commands.record,
        "compare": commands.compare,
        "export": commands.export,
        "push": commands.push,
        "import-mlagents": commands.print_mlagents_config,
        "import-zoo": commands.print_zoo_config,
    }
    return subcommands[subcommand](arguments, common.modules)


def take_subcommand(arguments: list[str]) -> str | None:
    """Remove the subcommand from the arguments; None if only help is asked for."""
    for position, argument in enumerate(arguments):
        if argument in SUBCOMMANDS and (position == 0 or not is_value(arguments, position)):
            return arguments.pop(position)
    if not arguments or arguments[0] in ("-h", "--help"):
        return None
    if not arguments[0].startswith("-"):
        raise SettingError(f"there is no subcommand {arguments[0]!r}{nearest(arguments[0], SUBCOMMANDS)}")
    raise SettingError(f"a subcommand is missing: one of {', '.join(SUBCOMMANDS)}")


def is_value(arguments: list[str], position: int) -> bool:
    """Return whether an argument is the value of the option before it: `--config fit` against `--config a.yaml fit`."""
    before = arguments[position - 1]
    return before.startswith("--") and "=" not in before


def one_line(text: str) -> str:
    """Write an error on one line of at most 200 characters, without control characters."""
    line = printable("error: " + " ".join(text.split()))
    return line if len(line) <= 200 else line[:197] + "..."


def list_all() -> None:
    """Print the algorithms and the packaged configs, each with the first line of its file. Imports no torch."""
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
