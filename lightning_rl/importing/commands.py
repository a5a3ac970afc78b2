"""The subcommands that import settings: a config on stdout."""

from __future__ import annotations

from collections.abc import Callable

from lightning_rl.cli import Parser
from lightning_rl.errors import printable
from lightning_rl.importing.mlagents import import_mlagents
from lightning_rl.importing.zoo import import_zoo
from lightning_rl.importing.zoo_tables import ALGORITHMS


def mlagents(arguments: list[str], imports: list[str]) -> int:
    """Print a behavior of an ML-Agents trainer file as a config."""
    parser = Parser("lightning-rl import-mlagents", description="An ML-Agents trainer file as a config, on stdout.", allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="trainer settings in YAML, with sections for brains or with behaviors")
    parser.add_argument("--behavior", metavar="NAME", help="which behavior, where there are several")
    parser.add_argument("--env", metavar="ID", help="the environment, which such files do not name; or give fit --model.env.id ID")
    options = parser.parse_args(arguments)
    print(printable(import_mlagents(options.file, options.behavior, options.env)), end="")
    return 0


def zoo(arguments: list[str], imports: list[str]) -> int:
    """Print a section of a file of rl-baselines3-zoo as a config."""
    parser = Parser("lightning-rl import-zoo", description="Settings of rl-baselines3-zoo as a config, on stdout.", allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="hyper-parameters in YAML, named for their algorithm such as ppo.yml")
    parser.add_argument("env", metavar="ENV", help="which environment, such as CartPole-v1")
    parser.add_argument("--algo", help=f"which algorithm, if the file's name does not tell: {', '.join(ALGORITHMS)}")
    options = parser.parse_args(arguments)
    print(printable(import_zoo(options.file, options.env, options.algo)), end="")
    return 0


SUBCOMMANDS: dict[str, Callable[[list[str], list[str]], int]] = {"import-mlagents": mlagents, "import-zoo": zoo}
