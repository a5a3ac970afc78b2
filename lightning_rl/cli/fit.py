"""The subcommand `fit`, and runs of it that other subcommands plan."""

import logging
import os
import re
import sys
from argparse import SUPPRESS, ArgumentError
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pydoc import locate
from shlex import join
from typing import Any

import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning_utilities.core.enums import StrEnum
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_rl.callbacks import callbacks_of
from lightning_rl.callbacks.checkpoints import BestModel, CheckpointConfig
from lightning_rl.checkpoints.files import last_generation
from lightning_rl.cli.names import Option, read_options
from lightning_rl.cli.settings import explain, explain_flag, read_arguments
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, causes_of, check_seed, place_in_code, printable
from lightning_rl.loggers import is_wanted
from lightning_rl.settings.dotted_paths import check_function, import_modules
from lightning_rl.settings.fields import settings_of
from lightning_rl.settings.names import SECTIONS
from lightning_rl.settings.yaml_files import first_difference
from lightning_rl.training.hooks import RunModule
from lightning_rl.training.run_processes import Ask, ReportRun, RunPlan
from lightning_rl.training.trainer import Trainer


def fit(options: list[Option], imports: list[str]) -> int:
    """Train. `imports`: the modules that were imported with `--import`."""
    redirect_notices()
    arguments = ["--help"] if any(option.name == "--help_all" for option in options) else read_arguments(options)
    with one_line_errors(ArgumentError, MisconfigurationException):
        CLI(["fit", *arguments], imports)
    return 0


class HelpParser(LightningArgumentParser):
    """A parser whose help is only the list of options: a usage line of sixty options would add nothing."""

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        super().__init__(*arguments, usage=SUPPRESS, **kwargs)


class CLI(LightningCLI):
    """Lightning's command line with an `Algorithm` as model and our Trainer."""

    trainer: Trainer

    def __init__(self, arguments: list[str], imports: list[str]) -> None:
        self.imports = imports
        shows_help = any("help" in argument or "print_config" in argument for argument in arguments)
        set_parsing_settings(docstring_parse_attribute_docstrings=shows_help)  # the text below a setting is its help, and slow to parse
        yaml.SafeDumper.add_multi_representer(StrEnum, represent_word)  # the default of Lightning's Timer is one
        super().__init__(
            RunModule,
            trainer_class=Trainer,
            subclass_mode_model=True,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_class=HelpParser,
            parser_kwargs={"allow_abbrev": False, "exit_on_error": False},
            args=arguments,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the methods of the Trainer to run, and their arguments that are not options."""
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the Trainer, the algorithm and our sections."""
        parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True, skip=set(SECTIONS))
        parser.add_subclass_arguments(RunModule, "model", skip={"spaces"}, fail_untyped=False, required=True)
        for name, path in SECTIONS.items():
            kind: Any = locate(path)
            parser.add_argument(f"--{name}", type=kind | None, default=settings_of(Trainer)[name].default)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the options. Hide `ckpt_path` until objects are built: Lightning would take settings from the file."""
        super().parse_arguments(parser, args)
        self.ckpt_path = self.config["fit"].pop("ckpt_path")
        seed = self.config["fit"]["seed_everything"]
        if seed is not None and not isinstance(seed, bool):
            check_seed("seed_everything", seed)

    def before_instantiate_classes(self) -> None:
        """Restore `ckpt_path`, which `Trainer.fit` takes. Dump the settings here: Lightning would validate them a second time."""
        self.config["fit"]["ckpt_path"] = self.ckpt_path
        env = self.config["fit"]["model"]["init_args"].get("env")
        if env is not None and env["num_envs"] is None:  # a config holds all numbers
            env["num_envs"] = EnvConfig(env["id"]).num_envs
        dumped = self.parser.dump(self.config, skip_validation=True, skip_none=False, skip_link_targets=False)
        self.config_dump = yaml.safe_load(dumped)["fit"]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build our Trainer with its sections."""
        sections = {name: self.config_init["fit"][name] for name in SECTIONS}
        try:
            return super().instantiate_trainer(**sections, **kwargs)  # type: ignore[return-value]
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise SettingError(explain_flag(str(error), vars(self.config["fit"]["trainer"]))) from error

    def instantiate_classes(self) -> None:
        """Build the algorithm and the Trainer, which may reject their settings with any error."""
        for key, value in self.config["fit"]["trainer"].items():
            check_functions(f"trainer.{key}", value)
        with prefix_model_settings(locate(self.config["fit"]["model"]["class_path"])), one_line_errors(Exception):
            super().instantiate_classes()

    def before_fit(self) -> None:
        """Give the Trainer the config that it writes into the run's folder."""
        trainer = self.trainer
        trainer.imports = self.imports
        trainer.config = {name: self.config_dump[name] for name in ("seed_everything", "model", "trainer", *SECTIONS)}


class CheckingCLI(CLI):
    """Build the algorithm and the Trainer without training."""

    def fit(self, **arguments: object) -> None:
        """Do nothing."""


def check(options: list[str], imports: list[str]) -> CheckingCLI:
    """Check the settings of a run by building its algorithm and Trainer."""
    logging.disable(logging.WARNING)  # notices about a run that is not started
    try:
        with redirect_stdout(StringIO()), one_line_errors(ArgumentError, MisconfigurationException):
            return CheckingCLI(["fit", *read_arguments(read_options(options))], imports)
    finally:
        logging.disable(logging.NOTSET)


class PlannedCLI(CLI):
    """Train a planned run, from its last checkpoint if there is one."""

    def __init__(self, plan: RunPlan, ask: Ask) -> None:
        self.plan, self.ask = plan, ask
        super().__init__(["fit", *read_arguments(read_options(plan.fit_options))], list(plan.imports))

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the options. The default is one thread: runs are compared with each other, and the others need the other cores."""
        super().parse_arguments(parser, args)
        flags = self.config["fit"]["trainer"]
        flags["torch_threads"] = flags["torch_threads"] or 1

    def fit(self, model: RunModule, init_from: str | None = None, force: bool = False, **arguments: object) -> None:
        """Train, and report; `force` starts over even if there is a checkpoint.

        Raises `SettingError`: the settings are no longer those with which the runs began.
        """
        trainer = self.trainer
        if self.plan.settings is not None and (other := first_difference(self.plan.settings, trainer.config)) is not None:
            raise SettingError(f"{other} has changed in a config file since these runs began; change it back, or start new runs")
        monitor = next((callback.monitor for callback in callbacks_of(trainer, BestModel)), CheckpointConfig.monitor)
        trainer.callbacks.append(ReportRun(self.ask, monitor, self.plan.width))
        if force or last_generation(self.plan.folder / "checkpoints") is None:  # new, or killed before it saved anything
            trainer.fit(model, init_from=init_from, force=True)
        else:
            trainer.fit(model, ckpt_path="last")


def train(plan: RunPlan, ask: Ask) -> None:
    """Train a planned run, in its own process."""
    import_modules(plan.imports)
    redirect_notices()
    with one_line_errors(ArgumentError, MisconfigurationException):
        PlannedCLI(plan, ask)


def command_line(subcommand: str, arguments: Iterable[str], imports: Iterable[str]) -> str:
    """Return the command line of a subcommand of this program."""
    return join(["lightning-rl", subcommand, *(part for module in imports for part in ("--import", module)), *arguments])


def check_functions(setting: str, value: object) -> None:
    """Raise `SettingError` for a function in a setting, such as one that a callback calls, that must not be called."""
    if isinstance(value, Namespace | Mapping):
        value = [child for _, child in value.items()]
    if isinstance(value, list | tuple):
        for child in value:
            check_functions(setting, child)
    elif callable(value) and not isinstance(value, type):
        check_function(setting, f"{value.__module__}.{getattr(value, '__name__', type(value).__name__)}", value)


def say(line: str) -> None:
    """Print a line and flush it."""
    print(printable(line), flush=True)


def represent_word(dumper: yaml.SafeDumper, word: StrEnum) -> yaml.Node:
    """Represent a member of a string enum in YAML."""
    return dumper.represent_str(word.value)


def redirect_notices() -> None:
    """Print notices of Lightning on stdout, without its advertisements, and silence Weights & Biases: stderr is only for errors."""
    os.environ.setdefault("WANDB_SILENT", "true")
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric"):
        handler = Notices(sys.stdout)
        handler.addFilter(is_wanted)
        logging.getLogger(name).handlers = [handler]
        logging.getLogger(name).propagate = False


class Notices(logging.StreamHandler):
    """A handler that raises when the output is closed or full, instead of printing a traceback and continuing."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (of logging)
        """Raise an `OSError`; print other errors."""
        if isinstance(sys.exception(), OSError):
            raise
        super().handleError(record)


@contextmanager
def prefix_model_settings(algorithm: Any) -> Iterator[None]:
    """Add the prefix `model.` to an error that begins with a setting of the algorithm, as in messages about types: `model.gamma`."""
    try:
        yield
    except SettingError as error:
        setting = re.match(r"\w*", str(error))
        if setting and setting[0] in settings_of(algorithm):
            raise SettingError(f"model.{error}") from error
        raise


@contextmanager
def one_line_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into a `SettingError`: the one that caused the error, else one with the library's message in a sentence.

    An error in the user's code is raised unchanged, unless it is a `ValueError` or an error of the parser or Lightning about settings.
    """
    try:
        yield
    except SettingError:
        raise
    except kinds as error:
        causes = list(causes_of(error))
        if refusal := next((cause for cause in causes if isinstance(cause, SettingError)), None):
            raise type(refusal)(refusal) from error
        of_user = next(filter(place_in_code, causes), None)
        if of_user is not None and not isinstance(of_user, ValueError | ArgumentError | MisconfigurationException):
            raise of_user from of_user.__cause__
        place = "" if of_user is None else place_in_code(of_user)
        text = explain(str(error)) if isinstance(error, ArgumentError) else str(error) or type(error).__name__
        if match := re.search(
            r"Union subtypes.*?Errors:\s+- (?:Problem with given class_path '\S+':\s+)?(.+?)(?:\s+- (?:Expected|Not a valid)|$)", text, re.S
        ):
            text = match[1]
        raise SettingError(f"{text}{place}") from error
