"""Read settings from the command line and configs, and explain wrong ones in one line."""

import importlib
import inspect
import re
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pydoc import locate
from textwrap import shorten

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import Logger

import lightning_rl
from lightning_rl import ALGORITHMS
from lightning_rl.actors.config import ActorsConfig
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.algorithms.multi_agent import MultiAgent
from lightning_rl.callbacks.checkpoints import CheckpointConfig
from lightning_rl.callbacks.evaluation import EvaluationConfig
from lightning_rl.config_files import NUMBER_WITH_EXPONENT, Plain, as_mapping, as_number, in_one_line, parse, read_config, spell_out
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, closest, closest_of, nearest
from lightning_rl.rewards.settings import SIGNALS
from lightning_rl.startup import find_modules_here
from lightning_rl.training.loading import algorithm_class
from lightning_rl.training.settings import convert_integers, settings_of
from lightning_rl.training.side_learners import CloningConfig
from lightning_rl.training.trainer import Trainer

SECTIONS: dict[str, type] = {"evaluation": EvaluationConfig, "checkpoint": CheckpointConfig}
"""Arguments of our Trainer with a section at the top of a config."""
TOP_LEVEL = ("seed_everything", "trainer", "model", *SECTIONS, "ckpt_path", "weights_only", "init_from", "force")
OPTIONS = (*TOP_LEVEL, "config", "print_config", "plot", "help", "help_all")
PARTS = {"env": EnvConfig, "replay": ReplayConfig, "behavioral_cloning": CloningConfig, "actors": ActorsConfig}
"""An algorithm's settings that are mappings themselves."""
NESTED = {part: [field.name for field in fields(config)] for part, config in PARTS.items()}
EXPLAINED = {**PARTS, **{f"reward_signals.{name}": signal for name, signal in SIGNALS.items()}}
"""What `--model.<name>.help` explains."""
WHICH_MEMORY = "name it first, --model.memory LSTM or GRU, or memory: {class_path: LSTM, init_args: {…}} in a config"
FLAGS: dict[str, tuple[object, type]] = {"callbacks": (pl.callbacks, pl.Callback), "logger": (pl.loggers, Logger)}
"""Trainer flags that are objects: the module of Lightning's own classes, and their base class."""
CLASSES = (*FLAGS, "strategy", "plugins", "profiler", "accelerator")
"""Trainer flags that may be objects, given by their class."""
MODULE = re.compile(r"([a-zA-Z_]\w*)[.:][a-zA-Z_]")
"""How a class or environment of a module is named: `my_module.MyClass`, `my_module:MyEnv-v0`."""
WHOLE_NUMBER = re.compile(r"\d+\.0*")
"""As sweeps write integers."""
NAMES_A_CLASS = re.compile(rf"\b(class_path|env|env\.id|env\.wrappers|memory|{'|'.join(CLASSES)})\+?$")
"""Settings whose texts are class paths and environment ids; in others, such texts may be files."""
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


def read_arguments(arguments: list[str]) -> list[str]:
    """Turn command-line options into those of jsonargparse: configs read, short forms spelled out, names checked.

    The algorithm is the one that is named last; every setting of the model must be one of its settings.
    """
    options = [(option, value, config_of(option, value)) for option, value in split_options(arguments)]
    for option, value, config in options:
        named = {option: parse(value, option)} if config is None and NAMES_A_CLASS.search(option) else config
        find_modules_here(modules_in(named))
    for option, value, _ in options:
        if option == "--model.help":
            find_algorithm(value)
            return [f"{option}={value}"]
        name = option.removeprefix("--model.").removesuffix(".help")
        if option == f"--model.{name}.help" and name in EXPLAINED:
            print(inspect.getdoc(EXPLAINED[name]))
            raise SystemExit(0)
    models = [config["model"] for _, _, config in options if config and config.get("model")]
    algorithms = [(model["class_path"], find_algorithm(model["class_path"])) for model in models if "class_path" in model]
    if not algorithms:
        raise SettingError("model is missing: name a config (--config ppo/cartpole) or an algorithm (--model PPO)")
    class_path, algorithm = algorithms[-1]
    for option, value, _ in options:
        if option.startswith("--model.") and option.endswith(".help"):
            check_option(option.removesuffix(".help"), algorithm)
            return [f"--model={class_path}", f"{option}={value}" if value else option]
    for model in models:
        model["class_path"] = class_path
    return [f"--model={class_path}", *to_jsonargparse(options, algorithm)]


def to_jsonargparse(options: list[tuple[str, str, Plain | None]], algorithm: type) -> Iterator[str]:
    """Check options and configs against the settings of an algorithm, and yield the arguments of jsonargparse."""
    env_id, has_memory, signals, parameters = None, False, None, settings_of(algorithm)
    for option, value, config in options:
        if config is not None:
            settings = (config.get("model") or {}).get("init_args") or {}
            check_names("model.", settings, model_settings(algorithm), f" in {value}" if option == "--config" else "")
            settings.update(convert_integers(parameters, settings))
            env_id = settings.get("env", {}).get("id", env_id)
            has_memory = settings.get("memory", has_memory)
            if "reward_signals" in settings:
                named = as_mapping("model.reward_signals", settings["reward_signals"])
                signals = merge_signals(signals or {}, named) if named else {}  # null leaves the defaults alone
            yield f"--config={in_one_line(config)}"
            continue
        check_option(option, algorithm)
        if option.startswith("--model.reward_signals."):
            name, _, key = option.removeprefix("--model.reward_signals.").partition(".")
            signal = parse(value, option)
            signals = merge_signals(signals or {}, {name: {key: signal} if key else signal})
            continue
        env_id = value if option == "--model.env.id" else env_id
        if option.startswith("--model.memory.") and not has_memory:
            raise SettingError(f"{option} comes before the kind of memory: {WHICH_MEMORY}")
        value = str(as_number(value)) if NUMBER_WITH_EXPONENT.fullmatch(value) else value
        part, _, name = option.removeprefix("--model.").partition(".")
        if WHOLE_NUMBER.fullmatch(value) and part in parameters:
            value = str(convert_integers(parameters, {part: float(value)})[part])
        if (value == "null" or value.startswith(("{", "["))) and name in NESTED.get(part, ()):
            whole = {part: {name: parse(value, option)}}  # as an option, jsonargparse takes null for the word None
            yield f"--config={in_one_line({'model': {'init_args': whole}})}"
        else:
            yield f"{option}={value}" if value else option
    if signals is not None:
        yield f"--config={in_one_line({'model': {'init_args': {'reward_signals': signals}}})}"
    if not env_id:
        raise SettingError("model.env.id is missing: name an environment, such as --model.env.id CartPole-v1")


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
        if not value and option != "--print_config" and not option.endswith(".help"):
            raise SettingError(f"{option} needs a value")
        yield option.replace(".init_args.", "."), "null" if value == "None" else value  # as sweeps write it


def config_of(option: str, value: str) -> Plain | None:
    """Return the config that an option stands for: a file, or a part of one such as `--model PPO`, `--model.env CartPole-v1`."""
    name, part, where = option.removeprefix("--"), option.removeprefix("--model."), ""
    if option == "--config":
        config, where = read_config(value), f" in {value}"
    elif part in (*NESTED, "memory", "reward_signals"):
        config = spell_out({"model": {"init_args": {part: parse(value, option)}}})
    elif option == "--model.class_path":
        config = spell_out({"model": value})
    elif name in ("model", *section_settings()):
        config = spell_out({name: parse(value, option)})
    else:
        return None
    check_keys(config, where)
    return config


def modules_in(tree: object, key: str = "") -> Iterator[str]:
    """Find the modules in class paths and environment ids of a config; `key` is the place of a part in another."""
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from modules_in(child, f"{key}.{name}")
    elif isinstance(tree, list):
        for child in tree:
            yield from modules_in(child, key)
    elif isinstance(tree, str) and NAMES_A_CLASS.search(key) and (found := MODULE.match(tree)):
        yield found[1]


def merge_signals(settings: Mapping[str, object], others: Mapping[str, object]) -> dict[str, object]:
    """Lay reward signals over others, setting by setting; null replaces the whole signal."""
    merged = dict(settings)
    for name, setting in others.items():
        before = merged.get(name)
        merged[name] = {**before, **setting} if isinstance(before, Mapping) and isinstance(setting, Mapping) else setting
    return merged


def find_algorithm(class_path: object) -> type:
    """Find the class of `PPO`, `lightning_rl.PPO` or `my_module.MyAlgorithm`.

    Raises `SettingError`: there is no such class, or it is not an algorithm.
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
        raise SettingError(f"model {class_path!r}: {reason}; a module must be installed or in the current folder") from error
    found = getattr(imported, name, None)
    if found is None:
        raise SettingError(f"model {class_path!r}: there is no {name} in {module}{nearest(name, vars(imported))}")
    if not (isinstance(found, type) and issubclass(found, Algorithm | MultiAgent)):
        raise SettingError(f"model {class_path!r} is not an algorithm: it must be a subclass of lightning_rl.Algorithm")
    return found


def model_settings(algorithm: type) -> list[str]:
    return [name for name in settings_of(algorithm) if name != "spaces"]


@cache
def section_settings() -> dict[str, list[str]]:
    """Return the names of the settings in each section but the model."""
    own = {section: [field.name for field in fields(config)] for section, config in SECTIONS.items()}
    return {"trainer": [*settings_of(pl.Trainer), *settings_of(Trainer)], **own}


def check_keys(config: Plain, where: str) -> None:
    """Raise `SettingError` for a key that does not exist, except settings of an algorithm, which is not known yet."""
    check_names("", config, TOP_LEVEL, where)
    for section, names in section_settings().items():
        check_names(f"{section}.", as_mapping(section, config.get(section), where), names, where)
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
    for part, names in NESTED.items():
        if part in settings and settings[part] is None and part != "behavioral_cloning":
            raise SettingError(f"model.{part}{where} must be a mapping of settings, got nothing")
        check_names(f"model.{part}.", as_mapping(f"model.{part}", settings.get(part), where), names, where)


def check_option(option: str, algorithm: type) -> None:
    """Raise `SettingError` for an option of a section that does not exist."""
    section, key, inner = (*option.removeprefix("--").replace("+", "").split(".", 2), "", "")[:3]
    if section == "model":
        if key not in model_settings(algorithm):
            others = [name for name in ALGORITHMS if key in model_settings(algorithm_class(name, Algorithm))]
            if others:
                raise SettingError(f"--model.{key} is not a setting of {algorithm.__name__}, only of {', '.join(others)}")
        check_names("--model.", [key], model_settings(algorithm))
        if key in NESTED and inner:
            check_names(f"--model.{key}.", [inner.partition(".")[0]], NESTED[key])
    elif section in section_settings():
        check_names(f"--{section}.", [key], section_settings()[section])


def check_names(prefix: str, given: Iterable[object], names: Iterable[str], where: str = "") -> None:
    """Raise `SettingError` for the first key that is not among the names."""
    names = list(names)
    for key in given:
        if key not in names:
            moved = MOVED.get(str(key))
            way_out = f"; here it is {moved}" if moved else nearest(str(key), names) or "; see lightning-rl fit --help"
            raise SettingError(f"{prefix}{key}{where} is not a setting{way_out}")


WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text", "dict": "a mapping", "list": "a list"}
WORDS |= {"Iterable": "a list", "null": "", "NoneType": ""}


def explain(message: str) -> str:
    """Summarize a message of jsonargparse in one sentence. Its words are those of the version in constraints.txt, see `test_cli_errors`."""
    parts = [part for names in re.findall(r"""[Kk]ey "([^"]+)"|NestedArg\(key='([^']+)'""", message) for part in "".join(names).split(".")]
    key = ".".join(dict.fromkeys(part for part in parts if part not in ("init_args", "fit")))
    value = re.search(r"(?:Got value: |Given value: (?:NestedArg\(key='[^']*', val=)?)(.+?)\)?$", message, re.M)
    got = value[1].strip("'") if value else ""
    if found := re.search(r"class_path '(.+)':\s+the following arguments are required: (.+)", message):
        return f"{key}.{found[2]} is missing: {found[1].rpartition('.')[2]} needs it"
    if found := re.search(r"class_path '(.+)':\s+(Option '(.+)' is not accepted|'.+')", message):
        names = settings_of(locate(found[1])) if found[3] else ()  # type: ignore[arg-type]
        return f"{key}: {found[1].rpartition('.')[2]}: {found[2]}{closest(found[3] or '', names)}"
    if found := re.search(r"class_path '(.+)':\s+(?:module '(.+)' has no attribute|(No module named .+))", message):
        classes = [f"{found[2]}.{name}" for name in dir(locate(found[2])) if name[0].isupper()] if found[2] else []
        return f"{key}: there is no class {found[1]}{closest(found[1], classes) or (f': {found[3]}' if found[3] else '')}"
    if found := re.search(r"Multiple subclasses with name (\S+)\. .+?: (.+)\.$", message, re.M):
        return f"{key}: there are several classes {found[1]}; give the full path of one: {found[2].replace(', ', ' or ')}"
    if found := re.search(r"import path string: (\S+)", message):
        known = classes_for(key)
        close = closest_of(found[1], known)
        meant = f"; did you mean {known[close]}?" if close else ""
        return f"{key}: there is no class {found[1]} (one of your own needs its full path, such as my_module.MyClass){meant}"
    if found := re.search(r"does not correspond to a subclass of (\w+)", message):
        return f"{key}: {got} is not a {found[1]}"
    expected = re.findall(r"Expected (?:an? )?(.+?)(?:\. Got value|\.?$)", message, re.M)
    choices = [str(choice) for text in expected if "Literal" in text for choice in literal_eval(text.partition("Literal")[2])]
    classes = [re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).partition(" but ")[0] for text in expected if "Literal" not in text]
    kinds = [f"one of {', '.join(dict.fromkeys(choices))}"] * bool(choices) + [WORDS.get(name, name) for name in classes]
    kinds = [kind for kind in dict.fromkeys(kinds) if kind]
    if key and kinds:
        return f"{key} must be {shorten(' or '.join(kinds), 120, placeholder=' …')}, got {got}{closest(got, choices)}"
    return f"{key}: {' '.join(message.split())}"


def classes_for(key: str) -> dict[str, str]:
    """Return the classes of Lightning and of this package that a flag takes, by their names, and what to write for them."""
    flag = key.rpartition(".")[2]
    if flag not in FLAGS:
        return {}
    module, base = FLAGS[flag]
    ours = [name for name in lightning_rl.__all__ if isinstance(cls := getattr(lightning_rl, name), type) and issubclass(cls, base)]
    theirs = [name for name in getattr(module, "__all__", ()) if name != base.__name__]
    return {**{name: name for name in theirs}, **{name: f"lightning_rl.{name}" for name in ours}}


def explain_flag(message: str, flags: Mapping[str, object]) -> str:
    """Prefix Lightning's error about a Trainer flag with the flag and its value."""
    text = shorten(message, 110, placeholder=" …")
    values = {name: value for name, value in flags.items() if isinstance(value, str) and value != "auto"}
    by_value = [name for name, value in values.items() if repr(value) in message]
    by_value += [name for name, value in values.items() if re.search(rf"\b{re.escape(value)}\b", message)]
    for name in [*by_value, *flags]:
        if name in by_value or re.search(rf"\b{name}\b", message):
            return f"trainer.{name} {flags[name]!r}: {text} See lightning-rl fit --help_all"
    return message
