"""Read settings from the command line and configs, and explain wrong ones in one line."""

import importlib
import inspect
import re
from ast import literal_eval
from collections.abc import Iterator, Mapping
from pydoc import locate
from textwrap import shorten

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import Logger

import lightning_rl
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.algorithms.multi_agent import MultiAgent
from lightning_rl.cli.names import CLASSES, WHICH_MEMORY, Option, check_settings, models_in
from lightning_rl.errors import SettingError, closest, closest_of, nearest, place_in_code
from lightning_rl.processes.startup import find_modules_here
from lightning_rl.rewards import SIGNALS
from lightning_rl.settings.dotted_paths import check_module
from lightning_rl.settings.fields import Kind, convert_integers, kinds_of, settings_of
from lightning_rl.settings.names import PARTS, SECTIONS, settings_of_section
from lightning_rl.settings.yaml_files import NUMBER_WITH_EXPONENT, Plain, as_mapping, as_number, in_one_line, parse
from lightning_rl.training.arguments import check_decorated
from lightning_rl.training.loading import algorithm_class

EXPLAINED = {
    **{f"--model.{part}.help": locate(path) for part, path in PARTS.items()},
    **{f"--model.reward_signals.{name}.help": signal for name, signal in SIGNALS.items()},
    **{f"--{section}.help": locate(path) for section, path in SECTIONS.items()},
}
"""Classes whose docstrings are printed by options for help."""
FLAGS: dict[str, tuple[object, type]] = {"callbacks": (pl.callbacks, pl.Callback), "logger": (pl.loggers, Logger)}
"""Trainer flags that are objects: the module of Lightning's own classes, and their base class."""
MODULE = re.compile(r"([a-zA-Z_]\w*)[.:][a-zA-Z_]")
"""Names of a class or an environment in a module: `my_module.MyClass`, `my_module:MyEnv-v0`."""
TEXTS = ("--trainer.run_name", "--trainer.default_root_dir", "--init_from", "--ckpt_path", "--model.env.id")
"""Options whose values are names and paths, even if they look like numbers: 12e3."""
WHOLE_NUMBER = re.compile(r"\d+\.0*")
"""An integer as sweeps write it, such as 3.0."""
NAMES_A_CLASS = re.compile(rf"\b(class_path|env|env\.id|env\.wrappers|encoder|memory|{'|'.join(CLASSES)})\+?$")
"""Settings whose values are class paths and environment ids; in other settings, such values may be file names."""


def read_arguments(options: list[Option]) -> list[str]:
    """Convert options to those of jsonargparse: spell out short forms and check names.

    The algorithm that is named last counts; every setting of the model must be one of its settings.
    """
    for option, value, config in options:
        named = {option: parse(value, option)} if config is None and NAMES_A_CLASS.search(option) else config
        find_modules_here(modules := [*modules_in(named)])
        for module in modules:
            check_module(option.removeprefix("--"), module)
    for option, value, _ in options:
        if option == "--model.help":
            find_algorithm(value)
            return [f"{option}={value}"]
        if option in EXPLAINED:
            print(inspect.getdoc(EXPLAINED[option]))
            raise SystemExit(0)
    models = models_in(options)
    algorithms = [(model["class_path"], find_algorithm(model["class_path"])) for model in models if "class_path" in model]
    if not algorithms:
        raise SettingError("model is missing: name a config (--config ppo/cartpole) or an algorithm (--model PPO)")
    class_path, algorithm = algorithms[-1]
    check_settings(options, algorithm.__name__, [name for name in settings_of(algorithm) if name != "spaces"])
    for option, value, _ in options:
        if option.startswith("--model.") and option.endswith(".help"):
            return [f"--model={class_path}", f"{option}={value}" if value else option]
    for model in models:
        model["class_path"] = class_path
    return [f"--model={class_path}", *to_jsonargparse(options, algorithm)]


def to_jsonargparse(options: list[Option], algorithm: type) -> Iterator[str]:
    """Yield the arguments of jsonargparse for options whose names were checked."""
    env_id, has_memory, signals, kinds = None, False, None, kinds_of(algorithm)
    behaviors: Plain = {}
    for option, value, config in options:
        if config is not None:
            settings = (config.get("model") or {}).get("init_args") or {}
            settings.update(convert_integers(kinds, settings))
            for name, section in [*((part, settings.get(part)) for part in PARTS), *((part, config.get(part)) for part in SECTIONS)]:
                if isinstance(section, dict):
                    section.update(convert_integers(kinds_of_section(name), section))
            env_id = settings.get("env", {}).get("id", env_id)
            has_memory = settings.get("memory", has_memory)
            behaviors = as_mapping("model.behaviors", settings["behaviors"]) if "behaviors" in settings else behaviors
            if "reward_signals" in settings:
                named = as_mapping("model.reward_signals", settings["reward_signals"])
                signals = merge_signals(signals or {}, named) if named else {}  # null: only the defaults
            yield f"--config={in_one_line(config)}"
            continue
        if option.startswith("--model.reward_signals."):
            name, _, key = option.removeprefix("--model.reward_signals.").partition(".")
            signal = parse(value, option)
            signals = merge_signals(signals or {}, {name: {key: signal} if key else signal})
            continue
        if option.split(".")[:2] == ["--model", "behaviors"]:
            behaviors = change_behaviors(behaviors, option, value)
            yield f"--config={in_one_line({'model': {'init_args': {'behaviors': behaviors}}})}"
            continue
        env_id = value if option == "--model.env.id" else env_id
        if option.startswith("--model.memory.") and not has_memory:
            raise SettingError(f"{option} comes before the kind of memory: {WHICH_MEMORY}")
        value = str(as_number(value)) if NUMBER_WITH_EXPONENT.fullmatch(value) and option not in TEXTS else value
        part, _, name = option.removeprefix("--model.").partition(".")
        if WHOLE_NUMBER.fullmatch(value):
            *_, section, last = ["model", *option.removeprefix("--model.").removeprefix("--").split(".")]
            section_kinds = kinds if section == "model" else kinds_of_section(section) if section in {*PARTS, *SECTIONS} else {}
            value = str(convert_integers(section_kinds, {last: float(value)})[last]) if last in section_kinds else value
        if (value == "null" or value.startswith(("{", "["))) and part in PARTS and name in settings_of_section(part):
            whole = {part: {name: parse(value, option)}}  # in an option, jsonargparse would read null as the string None
            yield f"--config={in_one_line({'model': {'init_args': whole}})}"
        else:
            yield f"{option}={value}" if value else option
    if signals is not None:
        yield f"--config={in_one_line({'model': {'init_args': {'reward_signals': signals}}})}"
    if not env_id:
        raise SettingError("model.env.id is missing: name an environment, such as --model.env.id CartPole-v1")


def kinds_of_section(section: str) -> Mapping[str, list[Kind]]:
    """Return the allowed types of the settings in a section of a config, or in a part of an algorithm's settings."""
    return kinds_of(locate({**SECTIONS, **PARTS}[section]))


def change_behaviors(behaviors: Plain, option: str, value: str) -> Plain:
    """Set the value of an option such as `--model.behaviors.good.learner.learning_rate`; `--model.behaviors` replaces all of them."""
    _, *path = option.removeprefix("--model.").split(".")
    if path and path[0] not in as_mapping("model.behaviors", behaviors):
        raise SettingError(f"{option}: there is no behavior {path[0]}{nearest(path[0], behaviors)}")
    return as_mapping("model.behaviors", with_value(behaviors, path, parse(value, option)))


def with_value(tree: object, path: list[str], value: object) -> object:
    """Return a tree of settings with a value at a path; below a class, which may be only its name, the path leads into its `init_args`."""
    if not path:
        return value
    key, *rest = path
    tree = {"class_path": tree} if isinstance(tree, str) else dict(tree) if isinstance(tree, Mapping) else {}
    if "class_path" in tree and key not in ("class_path", "init_args"):
        key, rest = "init_args", path
    return {**tree, key: with_value(tree.get(key), rest, value)}


def modules_in(tree: object, key: str = "") -> Iterator[str]:
    """Find the modules in class paths and environment ids of a config; `key` is the place of `tree` in it."""
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from modules_in(child, f"{key}.{name}")
    elif isinstance(tree, list):
        for child in tree:
            yield from modules_in(child, key)
    elif isinstance(tree, str) and NAMES_A_CLASS.search(key) and (match := MODULE.match(tree)):
        yield match[1]


def merge_signals(settings: Mapping[str, object], others: Mapping[str, object]) -> dict[str, object]:
    """Merge `others` into reward signals, setting by setting; null replaces the whole signal."""
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
    check_module(f"model {class_path!r}", module)
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        reason = f"{error if isinstance(error, ImportError) else f'{type(error).__name__}: {error}'}{place_in_code(error)}"
        raise SettingError(f"model {class_path!r}: {reason}; a module must be installed or in the current folder") from error
    algorithm = getattr(imported, name, None)  # this package imports its algorithms lazily
    if algorithm is None:
        algorithms = {name for name, value in vars(imported).items() if is_algorithm(value)}
        raise SettingError(f"model {class_path!r}: there is no {name} in {module}{nearest(name, algorithms)}")
    if not is_algorithm(algorithm):
        raise SettingError(f"model {class_path!r} is not an algorithm: it must be a subclass of lightning_rl.Algorithm")
    check_decorated(algorithm)
    return algorithm


def is_algorithm(value: object) -> bool:
    """Return whether an object is the class of an algorithm, or of several (`MultiAgent`)."""
    return isinstance(value, type) and issubclass(value, Algorithm | MultiAgent)


WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string", "dict": "a mapping", "list": "a list"}
WORDS |= {"Iterable": "a list", "null": "", "NoneType": ""}
OF_NO_CLASS = r"class_path 'pytorch_lightning\.Callback':\s+Option '.+' is not accepted"
"""The error of jsonargparse for a callback's setting when it tries `Callback` itself, in addition to a class named before."""


def explain(message: str) -> str:
    """Summarize an error message of jsonargparse in one sentence; it matches the version in constraints.txt, see `test_cli_errors`."""
    parts = [part for names in re.findall(r"""[Kk]ey "([^"]+)"|NestedArg\(key='([^']+)'""", message) for part in "".join(names).split(".")]
    key = ".".join(dict.fromkeys(part for part in parts if part not in ("init_args", "fit")))
    value = re.search(r"(?:Got value: |Given value: (?:NestedArg\(key='[^']*', val=)?)(.+?)\)?$", message, re.M)
    got = value[1].strip("'") if value else ""
    if re.search(OF_NO_CLASS, message):
        message = re.sub(OF_NO_CLASS, "", message)
        if "class_path" not in message:
            return f"{key} belongs to no class; name it before, such as --trainer.callbacks+=EarlyStopping"
    if match := re.search(r"class_path '(.+)':\s+the following arguments are required: (.+)", message):
        return f"{key}.{match[2]} is missing: {match[1].rpartition('.')[2]} needs it"
    if match := re.search(r"class_path '(.+)':\s+(Option '(.+)' is not accepted|'.+')", message):
        name = match[1].rpartition(".")[2]
        if match[3] is None:
            return f"{key}: {name}: {match[2]}"
        key = f"{key.removesuffix(f'.{match[3]}')}.{match[3]}"
        of = "" if name.endswith("Config") else f" of {name}"  # a group of settings, which nobody names by its class
        return f"{key} is not a setting{of}{closest(match[3], settings_of(locate(match[1])))}"
    if match := re.search(r"class_path '(.+)':\s+(?:module '(.+)' has no attribute|(No module named .+))", message):
        classes = [f"{match[2]}.{name}" for name in dir(locate(match[2])) if name[0].isupper()] if match[2] else []
        return f"{key}: there is no class {match[1]}{closest(match[1], classes) or (f': {match[3]}' if match[3] else '')}"
    if match := re.search(r"Multiple subclasses with name (\S+)\. .+?: (.+)\.$", message, re.M):
        return f"{key}: there are several classes {match[1]}; give the full path of one: {match[2].replace(', ', ' or ')}"
    if match := re.search(r"import path string: (\S+)", message):
        known = classes_for(key)
        close = closest_of(match[1], known)
        meant = f"; did you mean {known[close]}?" if close else ""
        return f"{key}: there is no class {match[1]} (one of your own needs its full path, such as my_module.MyClass){meant}"
    if match := re.search(r"does not correspond to a subclass of (\w+)", message):
        return f"{key}: {got} is not a {match[1]}"
    expected = re.findall(r"Expected (?:an? )?(.+?)(?:\. Got value|\.?$)", message, re.M)
    choices = [str(choice) for text in expected if "Literal" in text for choice in literal_eval(text.partition("Literal")[2])]
    classes = [re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).partition(" but ")[0] for text in expected if "Literal" not in text]
    kinds = [f"one of {', '.join(dict.fromkeys(choices))}"] * bool(choices) + [WORDS.get(name, name) for name in classes]
    kinds = [kind for kind in dict.fromkeys(kinds) if kind]
    if key and kinds:
        return f"{key} must be {shorten(' or '.join(kinds), 120, placeholder=' …')}, got {got}{closest(got, choices)}"
    return f"{key}: {' '.join(message.split())}"


def classes_for(key: str) -> dict[str, str]:
    """Return the classes of Lightning and of this package that a flag takes: what to write for each, by its name."""
    flag = key.rpartition(".")[2]
    if flag not in FLAGS:
        return {}
    module, base = FLAGS[flag]
    packaged = [name for name in lightning_rl.__all__ if isinstance(cls := getattr(lightning_rl, name), type) and issubclass(cls, base)]
    lightning_names = [name for name in getattr(module, "__all__", ()) if name != base.__name__]
    return {**{name: name for name in lightning_names}, **{name: f"lightning_rl.{name}" for name in packaged}}


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
