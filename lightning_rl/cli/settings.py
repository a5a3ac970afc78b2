"""Read settings from the command line and configs, and explain wrong ones in one line."""

from __future__ import annotations

import importlib
import inspect
import re
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pydoc import locate
from textwrap import shorten
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import Logger

import lightning_rl
from lightning_rl.actors.config import ActorsConfig
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.checkpoints import CheckpointConfig
from lightning_rl.callbacks.evaluation import EvaluationConfig
from lightning_rl.config_files import NUMBER_WITH_EXPONENT, as_number, in_one_line, parse, read_config, spell_out
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, closest, closest_of, nearest
from lightning_rl.rewards.settings import SIGNALS
from lightning_rl.startup import find_modules_here
from lightning_rl.training.loading import ALGORITHMS, algorithm_class
from lightning_rl.training.settings import settings_of
from lightning_rl.training.side_learners import CloningConfig
from lightning_rl.training.trainer import Trainer

WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text", "dict": "a mapping", "list": "a list"}
WORDS |= {"Iterable": "a list", "null": "", "NoneType": ""}
FLAGS: dict[str, tuple[Any, type]] = {"callbacks": (pl.callbacks, pl.Callback), "logger": (pl.loggers, Logger)}
"""The Trainer's flags that are objects of Lightning's: where its own classes are, and of what kind they must be."""


def explain(message: str) -> str:
    """One sentence from a message of jsonargparse."""
    keys = re.findall(r'[Kk]ey "([^"]+)"', message)
    nested = re.search(r"NestedArg\(key='([^']+)'", message)
    key = ".".join(dict.fromkeys(part for full in keys for part in full.split(".") if part not in ("init_args", "fit")))
    if nested and not key.endswith(nested[1]):
        key = f"{key}.{nested[1]}"
    problem = re.search(r"(?:Problem with given class_path '(.+)':\s+)(Option .+|the following .+|'.+)", message)
    values = re.findall(r"(?:Got value: |Given value: (?:NestedArg\(key='[^']*', val=)?)(.+?)\)?$", message, re.M)
    value = values[0].strip("'") if values else ""
    if problem:
        missing = re.match("the following arguments are required: (.+)", problem[2])
        if missing:
            return f"{key}.{missing[1]} is missing: {problem[1].rpartition('.')[2]} needs it"
        option = re.match(r"Option '(.+)' is not accepted", problem[2])
        names = settings_of(locate(problem[1])) if option else ()  # type: ignore[arg-type]
        return f"{key}: {problem[1].rpartition('.')[2]}: {problem[2]}{closest(option[1], names) if option else ''}"
    several = re.search(r"Multiple subclasses with name (\S+)\. .+?: (.+)\.$", message, re.M)
    if several:
        return f"{key}: there are several classes {several[1]}; give the full path of one: {several[2].replace(', ', ' or ')}"
    unknown = re.search(r"import path string: (\S+)", message)
    if unknown:
        known = classes_for(key)
        close = closest_of(unknown[1], known)
        meant = f"; did you mean {known[close]}?" if close else ""
        return f"{key}: there is no class {unknown[1]} (one of your own needs its full path, such as my_module.MyClass){meant}"
    absent = re.search(r"class_path '(.+)':\s+(?:module '(.+)' has no attribute|(No module named .+))", message)
    if absent:
        classes = [f"{absent[2]}.{name}" for name in dir(locate(absent[2])) if name[0].isupper()] if absent[2] else []
        return f"{key}: there is no class {absent[1]}{closest(absent[1], classes) or (f': {absent[3]}' if absent[3] else '')}"
    other = re.search(r"Import path does not correspond to a subclass of (\w+)", message)
    if other:
        return f"{key}: {value} is not a {other[1]}"
    expected = re.findall(r"Expected (?:an? )?(.+?)(?:\. Got value|\.?$)", message, re.M)
    choices = [choice for text in expected if "Literal" in text for choice in map(str, literal_eval(text.partition("Literal")[2]))]
    kinds = [f"one of {', '.join(dict.fromkeys(choices))}"] if choices else []
    kinds += [word for text in expected if "Literal" not in text and (word := _word(text))]
    if key and kinds:
        return f"{key} must be {shorten(' or '.join(dict.fromkeys(kinds)), 120, placeholder=' …')}, got {value}{closest(value, choices)}"
    return f"{key}: {' '.join(message.split())}"


def classes_for(key: str) -> dict[str, str]:
    """The classes of Lightning and of this package that a flag takes, by their names, and what to write for them."""
    flag = key.rpartition(".")[2]
    if flag not in FLAGS:
        return {}
    module, base = FLAGS[flag]
    ours = [name for name in lightning_rl.__all__ if isinstance(cls := getattr(lightning_rl, name), type) and issubclass(cls, base)]
    return {**{name: name for name in module.__all__ if name != base.__name__}, **{name: f"lightning_rl.{name}" for name in ours}}


def _word(text: str) -> str:
    """`<class 'int'>` in words."""
    name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).partition(" but ")[0]
    return WORDS.get(name, name)


def explain_flag(message: str, given: Mapping[str, Any]) -> str:
    """What Lightning says of one of the Trainer's flags, with the flag and its value in front."""
    said = shorten(message, 110, placeholder=" …")
    texts = {name: value for name, value in given.items() if isinstance(value, str) and value != "auto"}
    by_value = [name for name, value in texts.items() if repr(value) in message]
    by_value += [name for name, value in texts.items() if re.search(rf"\b{re.escape(value)}\b", message)]
    for name in [*by_value, *given]:
        if name in by_value or re.search(rf"\b{name}\b", message):
            return f"trainer.{name} {given[name]!r}: {said} See lightning-rl fit --help_all"
    return message


TOP_LEVEL = ("seed_everything", "trainer", "model", "evaluation", "checkpoint", "ckpt_path", "weights_only", "init_from", "force")
OPTIONS = (*TOP_LEVEL, "config", "print_config", "plot", "help", "help_all")
PARTS = {"env": EnvConfig, "replay": ReplayConfig, "behavioral_cloning": CloningConfig, "actors": ActorsConfig}
NESTED = {part: [field.name for field in fields(config)] for part, config in PARTS.items()}
"""The names inside an algorithm's settings that are mappings themselves."""
EXPLAINED = {**PARTS, **{f"reward_signals.{name}": signal for name, signal in SIGNALS.items()}}
"""What `--model.<name>.help` is about."""
MEMORY_KIND = "name it first, --model.memory LSTM or GRU, or memory: {class_path: LSTM, init_args: {…}} in a config"
CLASSES = ("logger", "callbacks", "strategy", "plugins", "profiler", "accelerator")
"""The Trainer's flags that may be objects, given by their class."""
MODULE = re.compile(r"([a-zA-Z_]\w*)[.:][a-zA-Z_]")
"""What something in a module is named with: `my_module.MyClass`, `my_module:MyEnv-v0`."""
NAMES_A_CLASS = re.compile(rf"\b(class_path|env|env\.id|env\.wrappers|memory|{'|'.join(CLASSES)})\+?$")
"""The settings whose texts are class paths and environments' ids; others may be files with such names."""


ELSEWHERE = {
    "policy_kwargs": "model.net_arch and model.activation",
    "optimize_memory_usage": "model.replay.optimize_memory_usage",
    "replay_buffer_kwargs": "model.replay",
    "n_envs": "model.env.num_envs",
    "n_timesteps": "model.max_env_steps",
    "total_timesteps": "model.max_env_steps",
    "env_id": "model.env.id",
    "env": "model.env.id",
    "algo": "model",
    "normalize": "model.normalize_obs and model.normalize_reward",
}
"""Settings of Stable-Baselines3 and its zoo that have another name or place."""


def check_keys(config: Mapping[str, Any], where: str) -> None:
    """Raise `SettingError` for a key that does not exist, except below an algorithm that is not known yet."""
    check_names("", config, TOP_LEVEL, where)
    for section, names in sections().items():
        check_names(f"{section}.", mapping(section, config.get(section), where), names, where)
    model = mapping("model", config.get("model"), where)
    check_names("model.", model, ("class_path", "init_args"), where)
    for name, value in mapping("trainer", config.get("trainer"), where).items():
        for part in value if isinstance(value, list) else [value]:
            if name in CLASSES and isinstance(part, Mapping):
                check_names(f"trainer.{name}.", part, ("class_path", "init_args", "dict_kwargs"), where)
    arguments = mapping("model.init_args", model.get("init_args"), where)
    if "env" in arguments and arguments["env"] is None:
        raise SettingError(f"model.env{where} must be an id such as CartPole-v1 or a mapping, got nothing")
    memory = arguments.get("memory")
    if memory is not None and not isinstance(memory, str) and not (isinstance(memory, Mapping) and "class_path" in memory):
        raise SettingError(f"model.memory{where} does not say which: {MEMORY_KIND}")
    if isinstance(memory, Mapping):
        check_names("model.memory.", memory, ("class_path", "init_args"), where)
    for part, names in NESTED.items():
        if part in arguments and arguments[part] is None and part != "behavioral_cloning":
            raise SettingError(f"model.{part}{where} must be a mapping of settings, got nothing")
        check_names(f"model.{part}.", mapping(f"model.{part}", arguments.get(part), where), names, where)


def init_args(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The algorithm's settings in a config."""
    return (config.get("model") or {}).get("init_args") or {}


def check_names(prefix: str, given: Iterable[Any], names: Iterable[str], where: str = "") -> None:
    """Raise `SettingError` for the first key that is not among the names."""
    names = list(names)
    for key in given:
        if key not in names:
            elsewhere = ELSEWHERE.get(str(key))
            way_out = f"; here it is {elsewhere}" if elsewhere else nearest(str(key), names) or "; see lightning-rl fit --help"
            raise SettingError(f"{prefix}{key}{where} is not a setting{way_out}")


def mapping(key: str, value: Any, where: str = "") -> Mapping[str, Any]:
    """A part of a config that must be a mapping; an empty one where it is null."""
    if value is not None and not isinstance(value, Mapping):
        raise SettingError(f"{key}{where} must be a mapping of settings, got {value!r}")
    return value or {}


def sections() -> dict[str, list[str]]:
    """The names below the top-level sections that are not the model."""
    trainer = {**settings_of(pl.Trainer), **settings_of(Trainer)}
    return {
        "trainer": list(trainer),
        "evaluation": [field.name for field in fields(EvaluationConfig)],
        "checkpoint": [field.name for field in fields(CheckpointConfig)],
    }


def model_settings(algorithm: type) -> list[str]:
    """The names of an algorithm's settings."""
    return [name for name in settings_of(algorithm) if name != "spaces"]


def known_algorithm(class_path: Any) -> type:
    """The class of `PPO`, `lightning_rl.PPO` or `my_module.MyAlgorithm`.

    Raises:
        SettingError: there is no such class, or it is not an algorithm.
    """
    if not isinstance(class_path, str):
        raise SettingError(f"model must be the name of an algorithm such as PPO, got {class_path!r}")
    module, _, name = class_path.rpartition(".")
    if not module:
        return algorithm_class(name, Algorithm)
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # the module of a user may raise anything
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise SettingError(f"model {class_path!r}: {reason}; a module lies in the current folder or is installed") from error
    found = getattr(imported, name, None)
    if found is None:
        raise SettingError(f"model {class_path!r}: there is no {name} in {module}{nearest(name, vars(imported))}")
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise SettingError(f"model {class_path!r} is not an algorithm: it must be a subclass of lightning_rl.Algorithm")
    return found


def read_arguments(arguments: list[str]) -> list[str]:
    """Command-line options for jsonargparse: configs read, short forms spelt out, names checked.

    The algorithm is the one that is named last; every setting, wherever it stands, must be one of its own.
    """
    options = [(option, value, config_of(option, value)) for option, value in split_options(arguments)]
    for option, value, config in options:
        given = {option: parse(value, option)} if config is None and NAMES_A_CLASS.search(option) else config
        find_modules_here(named_modules(given))
    for option, value, _ in options:
        if option == "--model.help":
            known_algorithm(value)
            return [f"{option}={value}"]
        if option.startswith("--model.") and option.endswith(".help"):
            name = option.removeprefix("--model.").removesuffix(".help")
            if name in EXPLAINED:
                print(inspect.getdoc(EXPLAINED[name]))
                raise SystemExit(0)
    models = [config["model"] for _, _, config in options if config and config.get("model")]
    algorithms = [(model["class_path"], known_algorithm(model["class_path"])) for model in models if "class_path" in model]
    if not algorithms:
        raise SettingError("model is missing: name a config (--config ppo/cartpole) or an algorithm (--model PPO)")
    class_path, algorithm = algorithms[-1]
    for option, value, _ in options:
        if option.startswith("--model.") and option.endswith(".help"):
            check_option(option.removeprefix("--").removesuffix(".help"), algorithm)
            return [f"--model={class_path}", f"{option}={value}" if value else option]
    for model in models:
        model["class_path"] = class_path
    result, env_id, remembers = [f"--model={class_path}"], None, False
    signals: dict[str, Any] | None = None
    for option, value, config in options:
        if config is not None:
            check_names("model.", init_args(config), model_settings(algorithm), f" in {value}" if option == "--config" else "")
            env_id = init_args(config).get("env", {}).get("id", env_id)
            remembers = init_args(config).get("memory", remembers)
            if "reward_signals" in init_args(config):
                named = mapping("model.reward_signals", init_args(config)["reward_signals"])
                signals = merged(signals or {}, named) if named else {}  # nothing is what there is unless given
            result.append(f"--config={in_one_line(config)}")
        elif option.startswith("--model.reward_signals."):
            check_option(option.removeprefix("--"), algorithm)
            signals = merged(signals or {}, signal_option(option, value))
        else:
            check_option(option.removeprefix("--"), algorithm)
            env_id = value if option == "--model.env.id" else env_id
            if option.startswith("--model.memory.") and not remembers:
                raise SettingError(f"{option} comes before the kind of memory: {MEMORY_KIND}")
            value = str(as_number(value)) if NUMBER_WITH_EXPONENT.fullmatch(value) else value
            part, _, name = option.removeprefix("--model.").partition(".")
            if (value == "null" or value.startswith(("{", "["))) and name in NESTED.get(part, ()):
                whole = {part: {name: parse(value, option)}}  # of an option jsonargparse takes null for the word None
                result.append(f"--config={in_one_line({'model': {'init_args': whole}})}")
            else:
                result.append(f"{option}={value}" if value else option)
    if signals is not None:
        result.append(f"--config={in_one_line({'model': {'init_args': {'reward_signals': signals}}})}")
    if not env_id:
        raise SettingError("model.env.id is missing: name an environment, such as --model.env.id CartPole-v1")
    return result


def signal_option(option: str, value: str) -> dict[str, Any]:
    """The reward signals that an option such as `--model.reward_signals.rnd.strength 0.1` speaks of, as a mapping."""
    name, _, key = option.removeprefix("--model.reward_signals.").partition(".")
    return {name: {key: parse(value, option)} if key else parse(value, option)}


def merged(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Signals' settings with others over them, setting by setting; null stands for the whole signal."""
    both = dict(settings)
    for name, setting in others.items():
        before = both.get(name)
        both[name] = {**before, **setting} if isinstance(before, Mapping) and isinstance(setting, Mapping) else setting
    return both


def config_of(option: str, value: str) -> dict[str, Any] | None:
    """The config that an option stands for: a file, or a part of one such as `--model PPO`, `--model.env CartPole-v1`."""
    if option == "--config":
        config, where = read_config(value), f" in {value}"
    elif (part := option.removeprefix("--model.")) in (*NESTED, "memory", "reward_signals"):
        config, where = spell_out({"model": {"init_args": {part: parse(value, option)}}}), ""
    elif option == "--model.class_path":
        config, where = spell_out({"model": value}), ""
    elif (name := option.removeprefix("--")) in ("model", *sections()):
        config, where = spell_out({name: parse(value, option)}), ""
    else:
        return None
    check_keys(config, where)
    return config


def named_modules(tree: Any, key: str = "") -> Iterator[str]:
    """Find the modules that the class paths and environments' ids of a config name; `key` is where the config stands in another."""
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from named_modules(child, f"{key}.{name}")
    elif isinstance(tree, list):
        for child in tree:
            yield from named_modules(child, key)
    elif isinstance(tree, str) and NAMES_A_CLASS.search(key) and (found := MODULE.match(tree)):
        yield found[1]


def split_options(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Each option with its value."""
    remaining = list(arguments)
    while remaining:
        option, equals, value = remaining.pop(0).partition("=")
        if not option.removeprefix("--") or not option.startswith("--"):
            raise SettingError(f"{option!r} is not an option; options start with -- and a name")
        check_names("--", [option.removeprefix("--").partition(".")[0]], OPTIONS)
        if not equals and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        if option == "--force" and not value:
            value = "true"
        if option == "--plot":
            option, value = "--trainer.plot", value or "true"
        if not value and option != "--print_config" and not option.endswith(".help"):
            raise SettingError(f"{option} needs a value")
        yield option.replace(".init_args.", "."), value


def check_option(name: str, algorithm: type) -> None:
    """Raise `SettingError` for an option below the sections that does not exist."""
    section, key, inner = (*name.split(".", 2), "", "")[:3]
    if section == "model":
        if key.rstrip("+") not in model_settings(algorithm):
            others = [name for name in ALGORITHMS if key in model_settings(algorithm_class(name, Algorithm))]
            if others:
                raise SettingError(f"--model.{key} is not a setting of {algorithm.__name__}, only of {', '.join(others)}")
        check_names("--model.", [key.rstrip("+")], model_settings(algorithm))
        if key in NESTED and inner:
            check_names(f"--model.{key}.", [inner.partition(".")[0].rstrip("+")], NESTED[key])
    elif section in sections():
        check_names(f"--{section}.", [key.rstrip("+")], sections()[section])
