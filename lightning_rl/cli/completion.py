"""Shell completion with shtab: `lightning-rl completion bash`."""

import argparse
from collections.abc import Iterable

import shtab

from lightning_rl.cli.names import OPTIONS
from lightning_rl.cli.parsers import PARSERS, tune_parser
from lightning_rl.processes.startup import config_folder
from lightning_rl.settings.names import ALGORITHMS, MODELS, PARTS, SECTIONS, settings_of_model, settings_of_section

FILES = {"config", "ckpt_path", "init_from", "run", "runs", "file", "space", "out"}
"""Options whose values are files or folders."""


def print_completion(options: argparse.Namespace) -> int:
    """Print the script with which a shell completes our subcommands, options and settings."""
    program = argparse.ArgumentParser("lightning-rl", add_help=False)
    subcommands = program.add_subparsers(dest="subcommand")
    for name, make in {**PARSERS, "tune": tune_parser}.items():
        parser = make()
        complete_files(parser.options)
        subparser = subcommands.add_parser(name, help=parser.description, parents=[parser], add_help=False, conflict_handler="resolve")
        if name == "tune":
            add_settings(subparser)
    add_settings(subcommands.add_parser("fit", help="Train.", add_help=False, conflict_handler="resolve"))
    subcommands.add_parser("list", help="Print the algorithms and the packaged configs.")
    print(shtab.complete(program, options.shell))
    return 0


def complete_files(options: Iterable[argparse.Action]) -> None:
    """Complete file names where an option's values are files."""
    for option in options:
        if option.dest in FILES:
            option.complete = shtab.FILE  # type: ignore[attr-defined]  # read by shtab


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fit`: sections, flags of the Trainer, and settings of all algorithms."""
    configs = [path.relative_to(config_folder()).with_suffix("").as_posix() for path in sorted(config_folder().rglob("*.yaml"))]
    parser.add_argument("--config", "-c", choices=configs)
    parser.add_argument("--model", choices=list(MODELS))
    names = dict.fromkeys(name for model in ALGORITHMS for name in settings_of_model(model))
    settings = [*(f"model.{name}" for name in names), *(f"model.{part}.{name}" for part in PARTS for name in settings_of_section(part))]
    settings += [f"{section}.{name}" for section in ("trainer", *SECTIONS) for name in settings_of_section(section)]
    options = [*settings, *sorted(set(OPTIONS) - {"config", "model", "help"})]
    complete_files([parser.add_argument(f"--{name}", help=argparse.SUPPRESS if name in SECTIONS else None) for name in options])
