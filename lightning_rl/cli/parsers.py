"""Command-line parsers and help texts; `tune` takes its own options, followed by those of `fit`.

Does not load torch, Lightning or Optuna, so that help and errors about options appear immediately.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lightning_rl.cli.names import OPTIONS, read_options
from lightning_rl.errors import SettingError, nearest

HELP = """usage: lightning-rl <subcommand> [options]

  fit         train:     lightning-rl fit --config configs/ppo/cartpole.yaml
                         lightning-rl fit --model PPO --model.env.id CartPole-v1
                         lightning-rl fit --config ppo/cartpole --seeds 4                 several seeds side by side
  tune        search:    lightning-rl tune --config ppo/cartpole --trials 20 --jobs 2      for better settings
  evaluate    play:      lightning-rl evaluate --ckpt_path RUN/checkpoints/best.ckpt --episodes 100
  validate    play:      lightning-rl validate --ckpt_path RUN      the episodes of the run's evaluations
  test        play:      lightning-rl test --ckpt_path RUN          100 episodes that no evaluation has seen
  collect     record:    lightning-rl collect --ckpt_path RUN/checkpoints/best.ckpt --dataset cartpole/expert-v0 --episodes 100
  record      watch:     lightning-rl record --ckpt_path RUN/checkpoints/best.ckpt --episodes 3
  compare     plot:      lightning-rl compare runs/PPO/CartPole-v1 runs/A2C/CartPole-v1 --out report.html
  export      convert:   lightning-rl export --ckpt_path RUN/checkpoints/best.ckpt --format onnx
  push        share:     lightning-rl push RUN --repo USER/NAME       then anyone: evaluate --ckpt_path hf://USER/NAME
  import-mlagents        a config from an ML-Agents trainer file:      lightning-rl import-mlagents FILE.yaml --behavior NAME > mine.yaml
  import-zoo             a config from a file of rl-baselines3-zoo:    lightning-rl import-zoo ppo.yml CartPole-v1 > mine.yaml
  list        show the algorithms and the packaged configs
  completion  complete options with Tab:   eval "$(lightning-rl completion bash)"

  <subcommand> --help    its options
  --version              the version
  --import MODULE        import a module first, one that registers environments or defines algorithms (repeatable)
  --debug                show tracebacks and Python warnings
"""

LIST_HELP = """usage: lightning-rl list

Print the algorithms and the packaged configs, each with a line about it.
"""

FIT_HELP = """usage: lightning-rl fit --config FILE [--config FILE ...] [options]
       lightning-rl fit --model ALGORITHM --model.env.id ENVIRONMENT [options]

  -c, --config FILE                    settings in YAML, or a packaged config such as ppo/cartpole; later ones win
  --model ALGORITHM                    see lightning-rl list
  --model.SETTING VALUE                a setting of the algorithm; all of PPO's: lightning-rl fit --model.help PPO
  --model.env.SETTING VALUE            id, num_envs, vectorization, autoreset, kwargs, wrappers, max_episode_steps, frame_stack, atari,
                                       parameters, observe_parameters, step_timeout, max_restarts: --model.env.help
  --model.max_env_steps N              length of the run; of BehavioralCloning --model.max_updates N
  --evaluation.SETTING VALUE           every_n_env_steps, every_n_updates, episodes, seed, num_envs, deterministic, max_episode_steps,
                                       stop_at, patience; no evaluations: --evaluation null
  --checkpoint.SETTING VALUE           every_n_env_steps, every_n_updates, keep, save_replay_buffer, monitor, mode
  --trainer.SETTING VALUE              any flag of Lightning's Trainer: accelerator, devices, strategy, precision, logger, max_time, ...
                                       all of them: lightning-rl fit --help_all
  --seed_everything N                  default: 0
  --seeds N                            train N runs side by side, with seeds from seed_everything on; --seeds [3,7,11]: these seeds
  --jobs N                             with --seeds: how many runs at a time (default: one per processor core)
  --ckpt_path FILE                     resume from a checkpoint or a run's folder; last: from the newest run, in its own folder
  --init_from RUN                      start with the weights of another run: its folder, or a checkpoint
  --trainer.run_name NAME              the run's folder, instead of version_N
  --force                              overwrite the run in the folder run_name
  --plot                               draw curve.png into the run's folder at each evaluation (extra plots)
  --print_config                       print all settings and exit
"""

FORMATS = ("onnx", "torch", "safetensors", "unity")
"""Formats of `export`."""
ZOO_ALGORITHMS = ("ppo", "ppo_lstm", "a2c", "dqn", "qrdqn", "sac", "tqc", "crossq", "td3", "ddpg", "trpo", "ars")
"""Algorithms of `import-zoo`."""
CHECKPOINT_WORDS = ("--checkpoint", "--model", "--model_path", "--run", "--path", "--folder", "--load")
"""Names of `--ckpt_path` in other programs."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `SettingError` instead of printing its usage."""

    def __init__(self, subcommand: str, description: str) -> None:
        self.options: list[argparse.Action] = []
        super().__init__(f"lightning-rl {subcommand}", description=description, allow_abbrev=False)

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        self.options.append(super().add_argument(*names, **settings))
        return self.options[-1]

    def add_checkpoint(self) -> None:
        """Add the option for a checkpoint."""
        where = "a checkpoint, a run's folder (its checkpoints/best.ckpt), zoo:NAME (see list), hf://USER/NAME[@REVISION], or a .zip of "
        where += "Stable-Baselines3"
        self.add_argument("--ckpt_path", required=True, help=where)
        env = "an environment in place of the file's own, or if it names none: an id, or settings of model.env in YAML"
        self.add_argument("--env", help=env)

    def add_episodes(self, number: int, seed: int) -> None:
        """Add the options for the number of episodes and their seeds."""
        self.add_argument("--episodes", type=int, default=number, help=f"number of episodes to play ({number})")
        self.add_argument("--seed", type=int, default=seed, help=f"seed of the first episode; the others count up ({seed})")

    def parse_args(self, arguments: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse all arguments; report a misspelled option before a required one that is missing because of it."""
        options = re.findall(r"--[\w-]+", self.format_help())
        for argument in arguments:
            name = argument.partition("=")[0]
            if name.startswith("--") and name not in (*options, "--"):
                meant = "; did you mean --ckpt_path?" if name in CHECKPOINT_WORDS and "--ckpt_path" in options else nearest(name, options)
                raise SettingError(f"unrecognized arguments: {name}{meant}")
        names = [argument.partition("=")[0] for argument in arguments]
        if "--ckpt_path" in options and "--ckpt_path" not in names and names and not names[0].startswith("-"):
            raise SettingError(f"{arguments[0]!r} is not an option; write --ckpt_path {arguments[0]}")
        return super().parse_args(arguments)

    def error(self, message: str) -> NoReturn:
        """Raise `SettingError`, with the nearest option for an unknown one."""
        other, _, unknown = message.partition("unrecognized arguments: ")
        options = re.findall(r"--[\w-]+", self.format_help())
        raise SettingError(other or message + nearest(unknown.strip().partition(" ")[0], options))


def evaluate_parser() -> Parser:
    parser = Parser("evaluate", "Play episodes with a checkpoint's policy.")
    parser.add_checkpoint()
    parser.add_episodes(100, 20_000)
    parser.add_argument("--num_envs", type=int, default=10, help="number of environments that are stepped together (10)")
    parser.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the most likely one")
    parser.add_argument("--max_episode_steps", type=int, help="maximum length of an episode (the environment's own limit, or 10000)")
    parser.add_argument("--opponent", help="who plays the other seats of a game: random, a run, module.player (random)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def checkpoint_parser(subcommand: str, description: str) -> Parser:
    """Make the parser of a subcommand that plays a fixed number of episodes."""
    parser = Parser(subcommand, description)
    parser.add_checkpoint()
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def collect_parser() -> Parser:
    parser = Parser("collect", "Record a checkpoint's policy as a Minari dataset.")
    parser.add_checkpoint()
    parser.add_argument("--dataset", required=True, help="its name, such as cartpole/expert-v0; it is saved in MINARI_DATASETS_PATH")
    parser.add_episodes(100, 0)
    parser.add_argument("--deterministic", choices=("true", "false"), default="true", help="the most likely action, or a sample (true)")
    parser.add_argument("--replay", action="store_true", help="play nothing: save the steps in the replay buffer of a run's last.ckpt")
    parser.add_argument("--force", action="store_true", help="replace a dataset of this name")
    return parser


def record_parser() -> Parser:
    parser = Parser("record", "Record videos of a checkpoint's policy.")
    parser.add_checkpoint()
    parser.add_episodes(1, 20_000)
    parser.add_argument("--out", type=Path, help="a folder for episode_0.mp4, …, or an .mp4 file for one episode (RUN/videos)")
    parser.add_argument("--max_episode_steps", type=int, help="truncate episodes here (default: an error after 10000 steps)")
    return parser


def export_parser() -> Parser:
    parser = Parser("export", "Export a checkpoint's policy to a file for other programs.")
    parser.add_checkpoint()
    parser.add_argument("--format", help=f"{', '.join(FORMATS)} (from the suffix of --out, or onnx)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the file to write (next to the checkpoint)")
    parser.add_argument("--behavior", help="which policy, if the run has several")
    return parser


def compare_parser() -> Parser:
    parser = Parser("compare", "Compare runs by learning curves and tables, aggregated over seeds.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's folder, or a folder of runs such as runs/PPO/CartPole-v1")
    parser.add_argument("--out", metavar="FILE.html", help="write a page with the curves, and the picture next to it as .png")
    parser.add_argument("--threshold", metavar="R", type=float, help="report how long it took to reach a mean return of R")
    parser.add_argument("--diagnostics", action="store_true", help="with --out: show KL, entropy, losses and others too")
    parser.add_argument("--versus", action="store_true", help="let runs or checkpoints of a game play each other, with sampled moves")
    parser.add_argument("--games", type=int, default=100, help="with --versus: games per pair, half of them in each seat (100)")
    return parser


def push_parser() -> Parser:
    parser = Parser("push", "Share the agent of a run on the hub, with settings, results, a learning curve and a video.")
    parser.add_argument("run", metavar="RUN", help="a run's folder: its checkpoints/best.ckpt; or a checkpoint")
    parser.add_argument("--repo", metavar="USER/NAME", required=True, help="where: a new repository, or one with an agent of this package")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    where = "record an episode (default: if the environment renders, and the extra video is installed)"
    parser.add_argument("--video", action=argparse.BooleanOptionalAction, help=where)
    parser.add_episodes(100, 20_000)
    return parser


def import_mlagents_parser() -> Parser:
    parser = Parser("import-mlagents", "Convert an ML-Agents trainer file to a config, on stdout.")
    parser.add_argument("file", metavar="FILE", help="trainer settings in YAML, with sections for brains or with behaviors")
    parser.add_argument("--behavior", metavar="NAME", help="which behavior, if there are several")
    parser.add_argument("--env", metavar="ID", help="the environment, which such files do not name; or give fit --model.env.id ID")
    return parser


def import_zoo_parser() -> Parser:
    parser = Parser("import-zoo", "Convert settings of rl-baselines3-zoo to a config, on stdout.")
    parser.add_argument("file", metavar="FILE", help="hyperparameters in YAML, named after their algorithm such as ppo.yml")
    parser.add_argument("env", metavar="ENV", help="which environment, such as CartPole-v1")
    parser.add_argument("--algo", help=f"which algorithm, if the file is not named after it: {', '.join(ZOO_ALGORITHMS)}")
    return parser


def completion_parser() -> Parser:
    parser = Parser("completion", 'Complete options in a shell: put eval "$(lightning-rl completion bash)" into its startup file.')
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which shell")
    return parser


PARSERS: dict[str, Callable[[], Parser]] = {
    "evaluate": evaluate_parser,
    "validate": partial(checkpoint_parser, "validate", "Play the episodes of a run's evaluations."),
    "test": partial(checkpoint_parser, "test", "Play 100 episodes that no evaluation of a run has seen."),
    "collect": collect_parser,
    "record": record_parser,
    "compare": compare_parser,
    "export": export_parser,
    "push": push_parser,
    "import-mlagents": import_mlagents_parser,
    "import-zoo": import_zoo_parser,
    "completion": completion_parser,
}
"""Functions that make the argparse parsers of subcommands."""


ENGINES = ("local", "ray")
REFUSED = {
    "seed_everything": "the runs of a trial have the seeds 1 to --seeds, and --seed sets how settings are drawn",
    "ckpt_path": "a study continues by itself when its command is repeated",
    "force": "a study continues when its command is repeated; name another folder, --out",
    "print_config": "print it with fit",
    "help_all": "see lightning-rl fit --help_all",
    "trainer.run_name": "the runs of a study are named after their trials",
    "trainer.default_root_dir": "name the folder of the study, --out",
}
"""Options of `fit` that a study sets itself, and what to do instead."""


OF_STUDIES = ("trials", "seeds", "sampler", "pruner", "startup_trials", "confirm", "confirm_seeds")
"""Options that do not apply to a population, whose settings change while its runs are trained."""


class TuneOptions(NamedTuple):
    """options: the options of `tune`.  fit: the options of `fit`.  arguments: all arguments, as given."""

    options: argparse.Namespace
    fit: list[str]
    arguments: list[str]


def read_tune_options(arguments: list[str]) -> TuneOptions:
    """Read the options of `tune`, and check all names."""
    parser = tune_parser()
    options, others = parser.parse_known_args(arguments)
    check_options(others, [option.dest for option in parser.options])
    check_population(options, {name: parser.get_default(name) for name in OF_STUDIES})
    read_options(others)
    return TuneOptions(options, others, arguments)


def tune_parser() -> Parser:
    """Return the parser of the options that `fit` does not have."""
    parser = Parser("tune", "Search for settings. All options of fit may follow: lightning-rl fit --help.")
    parser.add_argument("--space", metavar="FILE", help="which settings vary, in YAML (the algorithm's packaged space)")
    parser.add_argument("--trials", type=int, default=20, help="how many trials (20)")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time (1)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each trial, with the seeds 1, 2, … (1)")
    parser.add_argument("--sampler", default="tpe", help="tpe or random (tpe)")
    parser.add_argument("--pruner", default="median", help="median, hyperband or none (median)")
    first = "trials before tpe uses earlier results, and complete trials before any is pruned (5)"
    parser.add_argument("--startup_trials", type=int, default=5, help=first)
    parser.add_argument("--confirm", type=int, default=3, help="how many of the best trials are run again at the end; 0: none (3)")
    parser.add_argument("--confirm_seeds", type=int, default=3, help="runs of each of those trials, with new seeds (3)")
    parser.add_argument("--seed", type=int, default=0, help="seed with which settings are drawn (0)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the study and its runs (studies/<algorithm>_<environment>)")
    parser.add_argument("--engine", default="local", help="local: processes on this machine; ray: Ray Tune, on many machines (local)")
    population = "with --engine ray: train N runs together; bad ones continue from good ones with other settings (none)"
    parser.add_argument("--population", type=int, metavar="N", help=population)
    parser.add_argument("--address", help="with --engine ray: address of a running cluster, such as auto (one is started on this machine)")
    return parser


def check_options(others: Iterable[str], names: list[str]) -> None:
    """Raise `SettingError` for an option that neither `tune` nor `fit` has, or that a study sets itself."""
    for option in others:
        name = option.removeprefix("--").partition("=")[0]
        if option.startswith("--") and name:
            if name in REFUSED:
                raise SettingError(f"tune does not take --{name}: {REFUSED[name]}")
            if name.partition(".")[0] not in OPTIONS:
                raise SettingError(f"--{name} is not an option of tune{nearest(name, [*names, *OPTIONS])}")


def check_population(options: argparse.Namespace, defaults: Mapping[str, object]) -> None:
    """Raise `SettingError` for options that cannot be combined with `--population`."""
    if options.population is None:
        return
    if options.engine != "ray":
        raise SettingError("--population is trained by Ray Tune: add --engine ray")
    if options.address is not None and options.jobs != 1:
        raise SettingError("--jobs cannot be combined with --population and --address: the cluster trains a member per core")
    for name, default in defaults.items():
        if getattr(options, name) != default:
            raise SettingError(f"--{name} cannot be combined with --population, whose settings change while its runs are trained")
