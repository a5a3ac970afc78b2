"""The subcommands `fit`, `evaluate` and `collect`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import set_parsing_settings
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_rl import policy
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.checkpoints import CheckpointConfig
from lightning_rl.callbacks.curriculum import make_curriculum
from lightning_rl.callbacks.evaluation import EvaluationConfig, make_player
from lightning_rl.checkpoints.atomic import SaveFailed
from lightning_rl.cli.settings import explain, explain_flag, read_arguments
from lightning_rl.demonstrations.dataset import summarize as summarize_demonstrations
from lightning_rl.demonstrations.files import dataset_id, new_folder
from lightning_rl.demonstrations.recorder import RecordEpisodes, save_demonstrations
from lightning_rl.errors import SettingError, check_range, nearest, printable
from lightning_rl.policy import load_with_env
from lightning_rl.threads import torch_threads
from lightning_rl.training.trainer import Trainer

FIT_HELP = """usage: lightning-rl fit --config FILE [--config FILE ...] [options]
       lightning-rl fit --model ALGORITHM --model.env.id ENVIRONMENT [options]

  --config FILE                        settings in YAML, or a packaged config such as ppo/cartpole; later ones win
  --model ALGORITHM                    see lightning-rl list
  --model.SETTING VALUE                a setting of the algorithm; all of PPO's: lightning-rl fit --model.help PPO
  --model.env.SETTING VALUE            id, num_envs, vectorization, autoreset, kwargs, wrappers, max_episode_steps, frame_stack, atari,
                                       parameters, observe_parameters, step_timeout, max_restarts: --model.env.help
  --model.max_env_steps N              length of the run; of BehavioralCloning --model.max_updates N
  --evaluation.SETTING VALUE           every_n_env_steps, every_n_updates, episodes, seed, num_envs, deterministic, max_episode_steps,
                                       stop_at, patience; none at all: --evaluation null
  --checkpoint.SETTING VALUE           every_n_env_steps, every_n_updates, keep, save_replay_buffer, monitor, mode
  --trainer.SETTING VALUE              any flag of Lightning's Trainer: accelerator, devices, strategy, precision, logger, max_time, ...
                                       all of them: lightning-rl fit --help_all
  --seed_everything N                  0 unless given
  --ckpt_path FILE                     continue from a checkpoint; last: from the newest run of this algorithm and environment
  --init_from RUN                      begin with the weights of another run: its folder, or a checkpoint
  --trainer.run_name NAME              the run's folder, instead of version_N
  --force                              begin anew in the folder run_name though there is a run in it, which is lost
  --plot                               draw curve.png into the run's folder at each evaluation (extra plots)
  --print_config                       print all settings and exit
"""


SECTIONS: dict[str, Any] = {"evaluation": EvaluationConfig, "checkpoint": CheckpointConfig}
"""Arguments of our Trainer that have a place of their own at the top."""

ADVERTISEMENTS = ("💡", "GPU available", "TPU available", "HPU available", "`Trainer.fit` stopped")


class CLI(LightningCLI):
    """Lightning's command line with an `Algorithm` as model and our Trainer."""

    def __init__(self, arguments: list[str], imports: list[str]) -> None:
        self.imports = imports
        set_parsing_settings(docstring_parse_attribute_docstrings=True)  # the text below a setting is its help
        super().__init__(
            Algorithm,
            trainer_class=Trainer,
            subclass_mode_model=True,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_kwargs={"allow_abbrev": False, "exit_on_error": False},
            args=arguments,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True, skip=set(SECTIONS))
        parser.add_subclass_arguments(Algorithm, "model", skip={"spaces"}, fail_untyped=False, required=True)
        for name, kind in SECTIONS.items():
            parser.add_argument(f"--{name}", type=kind | None, default=kind())

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        seed = self.config["fit"]["seed_everything"]
        if seed is not None and not isinstance(seed, bool):
            check_range("seed_everything", seed, 0, 2**32 - 1, whole=True)

    def _parse_ckpt_path(self) -> None:
        """A checkpoint brings weights and counters; settings are those that the user gives."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        sections = {name: self._get(self.config_init, name) for name in SECTIONS}
        try:
            return super().instantiate_trainer(**sections, **kwargs)  # type: ignore[return-value]
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise SettingError(explain_flag(str(error), vars(self.config["fit"]["trainer"]))) from error

    def instantiate_classes(self) -> None:
        with one_line_errors(Exception):  # whatever refuses its settings here
            super().instantiate_classes()

    def before_fit(self) -> None:
        config = self.config_dump  # what Lightning's own command line made of it
        trainer: Any = self.trainer
        trainer.imports = self.imports
        trainer.config = {name: config[name] for name in ("seed_everything", "model", "trainer", *SECTIONS)}


def fit(arguments: list[str], imports: list[str]) -> int:
    """Train. `imports`: the modules that were imported for it."""
    if "--help" in arguments or "-h" in arguments:
        print(FIT_HELP)
        return 0
    quieten()
    options = ["--help"] if "--help_all" in arguments else read_arguments(arguments)
    with one_line_errors(ArgumentError, MisconfigurationException):
        CLI(["fit", *options], imports)
    return 0


def quieten() -> None:
    """Notices of Lightning belong on stdout, without its advertisements; those of Weights & Biases nowhere: stderr carries only errors."""
    os.environ.setdefault("WANDB_SILENT", "true")
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric"):
        handler = Notices(sys.stdout)
        handler.addFilter(lambda record: not record.getMessage().startswith(ADVERTISEMENTS))
        logging.getLogger(name).handlers = [handler]
        logging.getLogger(name).propagate = False


class Notices(logging.StreamHandler):
    """Raises what the system says of an output that is closed or full, instead of printing it with a traceback and going on."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), OSError):
            raise
        super().handleError(record)


@contextmanager
def one_line_errors(*kinds: type[Exception]) -> Iterator[None]:
    """What the parser and others say of wrong input, as a `SettingError`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (SettingError, *kinds)):
            raise
        raise SettingError(reason(error)) from error


def reason(error: BaseException) -> str:
    """What went wrong: our own words where they stand in the chain of causes, else the library's in one sentence."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SettingError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return explain(str(error)) if isinstance(error, ArgumentError) else str(error) or type(error).__name__


class Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        names = [option for action in self._actions for option in action.option_strings if option.startswith("--") and option != "--help"]
        other, _, unknown = message.partition("unrecognized arguments: ")
        raise SettingError(other or message + nearest(unknown.split()[0], names))


def evaluate(arguments: list[str], imports: list[str]) -> int:
    """Play episodes with a checkpoint's policy and print their statistics."""
    parser = Parser("lightning-rl evaluate", description="Play episodes with a checkpoint's policy.", allow_abbrev=False)
    parser.add_argument("--ckpt_path", required=True, type=Path, help="a checkpoint, or a run's folder: its checkpoints/best.ckpt")
    parser.add_argument("--episodes", type=int, default=100, help="how many to play (100)")
    parser.add_argument("--seed", type=int, default=20_000, help="of the first episode, the others count up (20000)")
    parser.add_argument("--num_envs", type=int, default=10, help="how many environments act together (10)")
    parser.add_argument("--stochastic", action="store_true", help="draw actions instead of taking the most likely one")
    parser.add_argument("--max_episode_steps", type=int, help="longest episode (the environment's own limit, or 10000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    algorithm = load_with_env(options.ckpt_path)
    named = {name: getattr(options, name) for name in ("episodes", "seed", "num_envs", "max_episode_steps")}
    result = policy.evaluate(algorithm, deterministic=not options.stochastic, **named)
    if options.json:
        print(json.dumps(result))
    else:
        tell(algorithm, result)
    return 0


def tell(algorithm: Algorithm, result: dict[str, Any]) -> None:
    """Print statistics of episodes for a reader."""
    trained = f"{result['updates']:,} updates" if "updates" in result else f"{result['env_steps']:,} environment steps"
    if result["episodes"] == 1:
        print(f"return {result['return_mean']:.2f} in 1 episode, length {result['length_mean']:.0f}, trained for {trained}")
    else:
        print(
            f"return {result['return_mean']:.2f} ± {result['return_std']:.2f} over {result['episodes']} episodes "
            f"(min {result['return_min']:.2f}, median {result['return_median']:.2f}, max {result['return_max']:.2f}; "
            f"IQM {result['iqm']:.2f}, 95 % interval of the mean {result['ci_low']:.2f} to {result['ci_high']:.2f}), "
            f"mean length {result['length_mean']:.1f}, trained for {trained}"
        )
    for curriculum in make_curriculum(algorithm.env):
        print(printable(f"played in the final lessons: {curriculum.finals()}"))


def collect(arguments: list[str], imports: list[str]) -> int:
    """Play episodes with a checkpoint's policy and save them as a Minari dataset."""
    parser = Parser("lightning-rl collect", description="Record a checkpoint's policy as a Minari dataset.", allow_abbrev=False)
    parser.add_argument("--ckpt_path", required=True, type=Path, help="a checkpoint, or a run's folder: its checkpoints/best.ckpt")
    parser.add_argument("--dataset", required=True, help="its name, such as cartpole/expert-v0; it is saved in MINARI_DATASETS_PATH")
    parser.add_argument("--episodes", type=int, default=100, help="how many to play (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode, the others count up (0)")
    parser.add_argument("--deterministic", choices=("true", "false"), default="true", help="the most likely action, or a draw (true)")
    parser.add_argument("--force", action="store_true", help="replace a dataset of this name")
    options = parser.parse_args(arguments)
    check_range("--episodes", options.episodes, 1, whole=True)
    check_range("--seed", options.seed, 0, whole=True)
    new_folder(dataset_id(options.dataset), options.force)
    algorithm = load_with_env(options.ckpt_path)
    player = make_player(
        algorithm.env, 1, None, algorithm.spaces.masked, [RecordEpisodes]
    )  # one alone: what is played is, bit for bit, what load_policy does
    recorder: Any = player.envs[0]
    with closing(player), torch_threads(1):
        player.play(algorithm.network, options.episodes, options.seed, options.deterministic == "true")
        recorder.cut()
        name = type(algorithm).__name__
        try:
            folder = save_demonstrations(options.dataset, recorder.demonstrations, recorder.env, algorithm=name, force=options.force)
        except SaveFailed as error:
            raise SettingError(str(error)) from error
    print(printable(f"dataset {dataset_id(options.dataset)}: {folder}"))
    print(printable(summarize_demonstrations(recorder.demonstrations)))
    return 0
