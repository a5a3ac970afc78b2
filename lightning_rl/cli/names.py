"""Options of `fit`, and the names of settings.

Names are read from source files, so that a misspelt one is told before torch is imported, which takes seconds.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lightning_rl import ALGORITHMS, MODELS
from lightning_rl.config_files import Plain, as_mapping, parse, read_config, spell_out
from lightning_rl.errors import SettingError, nearest

SECTIONS = {
    "evaluation": "lightning_rl.callbacks.evaluation.EvaluationConfig",
    "checkpoint": "lightning_rl.callbacks.checkpoints.CheckpointConfig",
}
"""Arguments of our Trainer with a section at the top of a config, and their classes."""
TRAINERS = ("pytorch_lightning.trainer.trainer.Trainer", "lightning_rl.training.trainer.Trainer")
PARTS = {
    "env": "lightning_rl.envs.config.EnvConfig",
    "replay": "lightning_rl.data.replay.storage.ReplayConfig",
    "behavioral_cloning": "lightning_rl.training.side_learners.CloningConfig",
    "actors": "lightning_rl.actors.config.ActorsConfig",
}
"""An algorithm's settings that are mappings themselves, and their classes."""
TOP_LEVEL = ("seed_everything", "trainer", "model", *SECTIONS, "ckpt_path", "weights_only", "init_from", "force")
OPTIONS = (*TOP_LEVEL, "config", "print_config", "plot", "help", "help_all")
CLASSES = ("callbacks", "logger", "strategy", "plugins", "profiler", "accelerator")
"""Trainer flags that may be objects, given by their class."""
WHICH_MEMORY = "name it first, --model.memory LSTM or GRU, or memory: {class_path: LSTM, init_args: {…}} in a config"
MOVED = {
    "policy_kwargs": "model.net_arch and model.activation",
    "optimize_memory_usage": "model.replay.optimize_memory_usage",
    "replay_buffer_kwargs": "model.replay",
    "n_envs": "model.env.num_envs",
    "n_timesteps": "model.max_env_steps",
    "total_timesteps": "model.max_env_steps",
    "env_id": "model.env.id",
    "env": "model.env.id",
    "lr": "model.learning_rate",
    "optimizer": "configure_optimizers of a subclass, see docs/your_own.md",
    "lr_scheduler": "a schedule as model.learning_rate, or configure_optimizers of a subclass",
    "data": "nothing: algorithms make their own experience",
    "algo": "model",
    "normalize": "model.normalize_obs and model.normalize_reward",
}
"""Settings of Stable-Baselines3 and its zoo that have another name or place here."""


class Option(NamedTuple):
    """An option of the command line.  config: the part of a config that it stands for, if it is one."""

    name: str
    value: str
    config: Plain | None


def read_options(arguments: list[str]) -> list[Option]:
    """Read the options of `fit`, and the configs among them, and check all names but those of a user's own algorithm."""
    options = [Option(name, value, config_of(name, value)) for name, value in split_options(arguments)]
    named = [model["class_path"] for model in models_in(options) if "class_path" in model]
    model = str(named[-1]).removeprefix("lightning_rl.") if named else ""
    if model in MODELS and not any(option.name == "--model.help" for option in options):
        check_settings(options, model, settings_of_model(model))
    return options


def models_in(options: Iterable[Option]) -> list[Plain]:
    """Return the sections `model` of all configs."""
    return [option.config["model"] for option in options if option.config and option.config.get("model")]


def split_options(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value."""
    remaining = list(arguments)
    while remaining:
        option, equals, value = remaining.pop(0).partition("=")
        option = "--config" if option == "-c" else option
        if not option.removeprefix("--") or not option.startswith("--"):
            raise SettingError(f"{option!r} is not an option; options start with -- and a name")
        check_names("--", [option.removeprefix("--").partition(".")[0]], OPTIONS)
        if not equals and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        if option in ("--force", "--plot"):
            option, value = "--force" if option == "--force" else "--trainer.plot", value or "true"
        if not value and option not in ("--print_config", "--help_all") and not option.endswith(".help"):
            raise SettingError(f"{option} needs a value")
        yield option.replace(".init_args.", "."), "null" if value == "None" else value  # as sweeps write it


def config_of(option: str, value: str) -> Plain | None:
    """Return the config that an option stands for: a file, or a part of one such as `--model PPO`, `--model.env CartPole-v1`."""
    name, part, where = option.removeprefix("--"), option.removeprefix("--model."), ""
    if option == "--config":
        config, where = read_config(value), f" in {value}"
    elif part in (*PARTS, "memory", "reward_signals"):
        config = spell_out({"model": {"init_args": {part: parse(value, option)}}})
    elif option == "--model.class_path":
        config = spell_out({"model": value})
    elif name in ("model", "trainer", *SECTIONS):
        config = spell_out({name: parse(value, option)})
    else:
        return None
    check_keys(config, where)
    return config


# ---------------------------------------------------------------- names in source files


def settings_of_model(name: str) -> list[str]:
    """Return the settings of an algorithm of this package."""
    return [each for each in read_names(f"{MODELS[name]}.{name}") if each != "spaces"]


@cache
def settings_of_section(section: str) -> list[str]:
    """Return the settings in a section of a config, or in a part of an algorithm's."""
    if section == "trainer":
        return [name for trainer in TRAINERS for name in read_names(trainer)]
    return read_names({**SECTIONS, **PARTS}[section])


def read_names(path: str) -> list[str]:
    """Read the settings of a class: the fields of a dataclass and of its bases, or the parameters of `__init__`."""
    return [name for name, is_setting in read_fields(path).items() if is_setting]


@cache
def read_fields(path: str) -> dict[str, bool]:
    """Read the fields of a class, and whether each is a setting: one with `init=False` hides that of a base."""
    module, _, name = path.rpartition(".")
    tree = read_source(module)
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    if not any("dataclass" in ast.unparse(each) for each in found.decorator_list):
        init = next((node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
        return {} if init is None else {each.arg: True for each in (*init.args.args[1:], *init.args.kwonlyargs)}
    home = {each.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names}
    home |= {node.name: module for node in tree.body if isinstance(node, ast.ClassDef)}
    bases = [base.id for base in found.bases if isinstance(base, ast.Name) and str(home.get(base.id)).startswith("lightning_rl.")]
    fields: dict[str, bool] = {}
    for base in reversed(bases):
        fields |= read_fields(f"{home[base]}.{base}")
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation):
            fields[node.target.id] = node.value is None or "init=False" not in ast.unparse(node.value)
    return fields


@cache
def read_source(module: str) -> ast.Module:
    """Read a module's source without importing it, or the packages around it."""
    package, *rest = module.split(".")
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return ast.parse(Path(spec.origin).parent.joinpath(*rest).with_suffix(".py").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- checks


def check_settings(options: Iterable[Option], algorithm: str, names: list[str]) -> None:
    """Raise `SettingError` for a setting that an algorithm does not have, given as an option or in a config."""
    for option in options:
        if option.config is not None:
            settings = (option.config.get("model") or {}).get("init_args") or {}
            check_names("model.", settings, names, f" in {option.value}" if option.name == "--config" else "")
        else:
            check_option(option.name.removesuffix(".help"), algorithm, names)


def check_option(option: str, algorithm: str, names: list[str]) -> None:
    """Raise `SettingError` for an option of a section that does not exist; `names` are the settings of the algorithm."""
    section, key, inner = (*option.removeprefix("--").replace("+", "").split(".", 2), "", "")[:3]
    if section == "model" and key:
        if key not in names:
            others = [name for name in ALGORITHMS if key in settings_of_model(name)]
            if others:
                raise SettingError(f"--model.{key} is not a setting of {algorithm}, only of {', '.join(others)}")
        check_names("--model.", [key], names)
        if key in PARTS and inner:
            check_names(f"--model.{key}.", [inner.partition(".")[0]], settings_of_section(key))
    elif section in ("trainer", *SECTIONS):
        check_names(f"--{section}.", [key], settings_of_section(section))


def check_keys(config: Plain, where: str) -> None:
    """Raise `SettingError` for a key that does not exist, except settings of an algorithm, which is not known yet."""
    check_names("", config, TOP_LEVEL, where)
    for section in ("trainer", *SECTIONS):
        check_names(f"{section}.", as_mapping(section, config.get(section), where), settings_of_section(section), where)
    for name in CLASSES:
        value = (config.get("trainer") or {}).get(name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                check_names(f"trainer.{name}.", part, ("class_path", "init_args", "dict_kwargs"), where)
    model = as_mapping("model", config.get("model"), where)
    check_names("model.", model, ("class_path", "init_args"), where)
    settings = as_mapping("model.init_args", model.get("init_args"), where)
    if "env" in settings and settings["env"] is None:
        raise SettingError(f"model.env{where} must be an id such as CartPole-v1 or a mapping, got nothing")
    memory = settings.get("memory")
    if isinstance(memory, Mapping) and "class_path" in memory:
        check_names("model.memory.", memory, ("class_path", "init_args"), where)
    elif memory is not None and not isinstance(memory, str):
        raise SettingError(f"model.memory{where} does not name its kind: {WHICH_MEMORY}")
    for part in PARTS:
        if part in settings and settings[part] is None and part != "behavioral_cloning":
            raise SettingError(f"model.{part}{where} must be a mapping of settings, got nothing")
        check_names(f"model.{part}.", as_mapping(f"model.{part}", settings.get(part), where), settings_of_section(part), where)


def check_names(prefix: str, given: Iterable[object], names: Iterable[str], where: str = "") -> None:
    """Raise `SettingError` for the first key that is not among the names."""
    names = list(names)
    for key in given:
        if key not in names:
            moved = MOVED.get(str(key))
            way_out = f"; here it is {moved}" if moved else nearest(str(key), names) or "; see lightning-rl fit --help"
            raise SettingError(f"{prefix}{key}{where} is not a setting{way_out}")
