"""Shell completion with shtab: `lightning-rl completion bash`."""

import argparse

import shtab

from lightning_rl import ALGORITHMS, MODELS
from lightning_rl.cli.names import OPTIONS
from lightning_rl.cli.parsers import PARSERS, tune_parser
from lightning_rl.setting_names import PARTS, SECTIONS, settings_of_model, settings_of_section
from lightning_rl.startup import config_folder

FILES = {"config", "ckpt_path", "init_from", "run", "runs", "file", "space", "out"}
"""Options whose values are files or folders."""


def print_completion(options: argparse.Namespace) -> int:
    """Print the script with which a shell completes our subcommands, options and settings."""
    program = argparse.ArgumentParser("lightning-rl", add_help=False)
    subcommands = program.add_subparsers(dest="subcommand")
    for name, make in PARSERS.items():
        adopt(subcommands, name, make())
    tune = tune_parser()
    for parser in (adopt(subcommands, "fit", argparse.ArgumentParser(add_help=False)), adopt(subcommands, "tune", tune)):
        add_settings(parser)
    subcommands.add_parser("list")
    print(shtab.complete(program, options.shell))
    return 0


def adopt(subcommands: argparse._SubParsersAction, name: str, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add a subcommand with the options of a parser, and complete file names where values are files. Return the subcommand's parser."""
    own = subcommands.add_parser(name, help=parser.description, parents=[parser], add_help=False, conflict_handler="resolve")
    for action in own._actions:
        if action.dest in FILES:
            action.complete = shtab.FILE
    return own


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fit`: sections, flags of the Trainer, and settings of all algorithms."""
    configs = [path.relative_to(config_folder()).with_suffix("").as_posix() for path in sorted(config_folder().rglob("*.yaml"))]
    parser.add_argument("--config", "-c", choices=configs)
    parser.add_argument("--model", choices=list(MODELS))
    names = dict.fromkeys(name for model in ALGORITHMS for name in settings_of_model(model))
    settings = [*(f"model.{name}" for name in names), *(f"model.{part}.{name}" for part in PARTS for name in settings_of_section(part))]
    settings += [f"{section}.{name}" for section in ("trainer", *SECTIONS) for name in settings_of_section(section)]
    for name in [*settings, *(set(OPTIONS) - {"config", "model", "help"})]:
        action = parser.add_argument(f"--{name}", help=argparse.SUPPRESS if name in SECTIONS else None)
        if name in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
