"""The subcommands that import settings: a config on stdout."""

from __future__ import annotations

from collections.abc import Callable

from lightning_rl.cli import Parser
from lightning_rl.importing.mlagents import import_mlagents


def mlagents(arguments: list[str], imports: list[str]) -> int:
    """Print a behavior of an ML-Agents trainer file as a config."""
    parser = Parser("lightning-rl import-mlagents", description="An ML-Agents trainer file as a config, on stdout.", allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="trainer settings in YAML, with sections for brains or with behaviors")
    parser.add_argument("--behavior", metavar="NAME", help="which behavior, where there are several")
    parser.add_argument("--env", metavar="ID", help="the environment, which such files do not name; or give fit --model.env.id ID")
    options = parser.parse_args(arguments)
    print(import_mlagents(options.file, options.behavior, options.env), end="")
    return 0


SUBCOMMANDS: dict[str, Callable[[list[str], list[str]], int]] = {"import-mlagents": mlagents}
