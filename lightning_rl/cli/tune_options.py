"""Options of `tune`: its own, and those of `fit` behind them, without loading torch or Optuna."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from lightning_rl.cli.names import OPTIONS, read_options
from lightning_rl.cli.parsers import Parser
from lightning_rl.errors import SettingError, nearest

ENGINES = ("local", "ray")
REFUSED = {
    "seed_everything": "the runs of a trial have the seeds 1 to --seeds, and --seed is that of the draws",
    "ckpt_path": "a study continues by itself when its command is repeated",
    "force": "a study continues when its command is repeated; name another folder, --out",
    "print_config": "print it with fit",
    "help_all": "see lightning-rl fit --help_all",
    "trainer.run_name": "the runs of a study are named after their trials",
    "trainer.default_root_dir": "name the folder of the study, --out",
}
"""Options of `fit` that a study sets itself, and what to do instead."""


OF_STUDIES = ("trials", "seeds", "sampler", "pruner", "startup_trials", "confirm", "confirm_seeds")
"""Options that a population does not have: its settings change while its runs are trained."""


class TuneOptions(NamedTuple):
    """own: the options of `tune`.  fit: those of `fit`.  arguments: all, as they were given."""

    own: Namespace
    fit: list[str]
    arguments: list[str]


def read_tune_options(arguments: list[str]) -> TuneOptions:
    """Read the options of `tune`, and check the names of all."""
    parser = tune_parser()
    own, others = parser.parse_known_args(arguments)
    check_options(others, [action.dest for action in parser._actions])
    check_population(own, {name: parser.get_default(name) for name in OF_STUDIES})
    read_options(others)
    return TuneOptions(own, others, arguments)


def tune_parser() -> Parser:
    """Return the parser of the options that `fit` does not have."""
    parser = Parser("tune", "Search for settings. All options of fit may follow: lightning-rl fit --help.")
    parser.add_argument("--space", metavar="FILE", help="which settings vary, in YAML (the algorithm's packaged space)")
    parser.add_argument("--trials", type=int, default=20, help="how many trials (20)")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time (1)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each trial, with the seeds 1, 2, … (1)")
    parser.add_argument("--sampler", default="tpe", help="tpe or random (tpe)")
    parser.add_argument("--pruner", default="median", help="median, hyperband or none (median)")
    first = "trials before tpe uses earlier results, and to complete before any is pruned (5)"
    parser.add_argument("--startup_trials", type=int, default=5, help=first)
    parser.add_argument("--confirm", type=int, default=3, help="how many of the best trials are run again in the end; 0: none (3)")
    parser.add_argument("--confirm_seeds", type=int, default=3, help="runs of each of those, with seeds that it has not had (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the study and its runs (studies/<algorithm>_<environment>)")
    parser.add_argument("--engine", default="local", help="local: processes of this machine; ray: Ray Tune, on many machines (local)")
    population = "with --engine ray: train so many runs together; bad ones continue from good ones with other settings (none)"
    parser.add_argument("--population", type=int, metavar="N", help=population)
    parser.add_argument("--address", help="with --engine ray: of a cluster that runs, such as auto (one is started on this machine)")
    return parser


def check_options(others: Iterable[str], own: list[str]) -> None:
    """Raise `SettingError` for an option that neither `tune` nor `fit` has, and for one that a study sets itself."""
    for option in others:
        name = option.removeprefix("--").partition("=")[0]
        if option.startswith("--") and name:
            if name in REFUSED:
                raise SettingError(f"tune does not take --{name}: {REFUSED[name]}")
            if name.partition(".")[0] not in OPTIONS:
                raise SettingError(f"--{name} is not an option of tune{nearest(name, [*own, *OPTIONS])}")


def check_population(own: Namespace, defaults: Mapping[str, object]) -> None:
    """Raise `SettingError` for options that do not go with `--population`."""
    if own.population is None:
        return
    if own.engine != "ray":
        raise SettingError("--population is trained by Ray Tune: add --engine ray")
    if own.address is not None and own.jobs != 1:
        raise SettingError("--jobs does not go with --population and --address: the cluster trains as many members as it has cores for")
    for name, default in defaults.items():
        if getattr(own, name) != default:
            raise SettingError(f"--{name} does not go with --population, whose settings change while its runs are trained")
