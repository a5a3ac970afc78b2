"""Reading what a user wrote: configs and command-line options, checked against the names that exist.

jsonargparse checks types and builds objects; before it sees anything, this file turns `env: CartPole-v1` into a mapping, reads `1e6` as
an integer, finds packaged configs, and names a misspelt key with its nearest valid name and its file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml

from lightning_rl.__main__ import config_folder
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.algorithms.loading import algorithm_class
from lightning_rl.algorithms.settings import settings_of
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, nearest
from lightning_rl.trainer import CheckpointConfig, EvaluationConfig, Trainer

WHOLE_FLOAT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+")
TOP_LEVEL = ("seed_everything", "trainer", "model", "evaluation", "checkpoint", "ckpt_path", "weights_only")


class Loader(yaml.SafeLoader):
    """YAML 1.1 without its surprise that `1e6` is a string: here it is 1000000, and `3e-4` a float. Refuses a key given twice."""


def _number(loader: Loader, node: yaml.ScalarNode) -> int | float:
    return number(str(node.value))


def _mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
    return dict(loader.construct_pairs(node, deep=True))


Loader.add_constructor("!number", _number)
Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
Loader.add_implicit_resolver("!number", re.compile(rf"^{WHOLE_FLOAT.pattern}$"), list("-+0123456789"))
Loader.yaml_implicit_resolvers = {  # exponents are ours before they are YAML's
    first: sorted(resolvers, key=lambda pair: pair[0] != "!number") for first, resolvers in Loader.yaml_implicit_resolvers.items()
}


def number(text: str) -> int | float:
    """A number with an exponent: an integer where it is whole."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def read_config(name: str) -> dict[str, Any]:
    """A config file, or a packaged one by its name such as `ppo/cartpole`, with its keys checked.

    Raises:
        SettingError: no such file, not UTF-8, not YAML, not a mapping, or a key that does not exist.
    """
    path = find_config(name)
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except UnicodeDecodeError as error:
        raise SettingError(f"{name} is not a text file in UTF-8") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "somewhere"
        raise SettingError(f"{name} is not valid YAML, {line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise SettingError(f"{name} is not valid YAML: {error}") from error
    if not isinstance(config, dict):
        raise SettingError(f"{name} must be a mapping of settings such as `model: {{class_path: PPO}}`, got {type(config).__name__}")
    model = config.get("model")
    if isinstance(model, str):
        config["model"] = model = {"class_path": model}
    if isinstance(model, dict) and isinstance(model.get("init_args"), dict):
        env = model["init_args"].get("env")
        if isinstance(env, str):
            model["init_args"]["env"] = {"id": env}
    check_keys(config, name)
    return config


def find_config(name: str) -> Path:
    """The file of that name, or the packaged config."""
    packaged = config_folder() / Path(name.removeprefix("configs/")).with_suffix(".yaml")
    for path in (Path(name), packaged):
        if path.is_file():
            return path
    folder = config_folder()
    known = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    raise SettingError(f"--config {name}: there is no such file or packaged config{nearest(name, known)}")


def check_keys(config: Mapping[str, Any], file: str) -> None:
    """Raise `SettingError` for a key that does not exist, at any depth that is ours."""
    where = f" in {file}"
    check_names("", config, TOP_LEVEL, where)
    for section, names in sections().items():
        if isinstance(config.get(section), Mapping):
            check_names(f"{section}.", config[section], names, where)
        elif config.get(section) is not None and section in ("trainer", "checkpoint"):
            raise SettingError(f"{section}{where} must be a mapping, got {config[section]!r}")
    model = config.get("model")
    if model is None:
        return
    if not isinstance(model, Mapping):
        raise SettingError(f"model{where} must be a mapping with class_path and init_args, got {model!r}")
    check_names("model.", model, ("class_path", "init_args"), where)
    algorithm = known_algorithm(model["class_path"]) if "class_path" in model else Algorithm
    arguments = model.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        raise SettingError(f"model.init_args{where} must be a mapping, got {arguments!r}")
    check_names("model.", arguments, model_settings(algorithm), where)
    env = arguments.get("env")
    if isinstance(env, Mapping):
        check_names("model.env.", env, [field.name for field in fields(EnvConfig)], where)
    elif "env" in arguments:
        raise SettingError(f"model.env{where} must be an id such as CartPole-v1 or a mapping, got {env!r}")


def check_names(prefix: str, given: Iterable[Any], names: Iterable[str], where: str = "") -> None:
    """Raise `SettingError` for the first key that is not among the names."""
    names = list(names)
    for key in given:
        if key not in names:
            raise SettingError(f"{prefix}{key}{where} is not a setting{nearest(str(key), names)}")


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
    """The class of `PPO`, `lightning_rl.PPO` or `my_module.MyAlgorithm`."""
    if not isinstance(class_path, str):
        raise SettingError(f"model.class_path must be the name of an algorithm, got {class_path!r}")
    module, _, name = class_path.rpartition(".")
    if module and module.partition(".")[0] != "lightning_rl":
        return Algorithm  # jsonargparse imports it
    return algorithm_class(name, Algorithm)


def read_arguments(arguments: list[str]) -> list[str]:
    """Command-line options for jsonargparse: configs read and checked, short forms spelt out, names checked."""
    result: list[str] = []
    algorithm: type = Algorithm
    env_id = False
    remaining = list(arguments)
    while remaining:
        option, equals, value = remaining.pop(0).partition("=")
        if not option.startswith("--"):
            raise SettingError(f"{option!r} is not an option; options start with --")
        if not equals and remaining and not remaining[0].startswith("--"):
            equals, value = "=", remaining.pop(0)
        if option == "--config":
            if not value:
                raise SettingError("--config needs a file")
            config = read_config(value)
            algorithm = known_algorithm((config.get("model") or {}).get("class_path", "Algorithm")) if config.get("model") else algorithm
            env_id |= bool(((config.get("model") or {}).get("init_args") or {}).get("env", {}).get("id"))
            result.append(f"--config={json.dumps(config)}")
            continue
        if option in ("--model", "--model.help"):
            algorithm = known_algorithm(value)
        option = {"--model.env": "--model.env.id"}.get(option, option).replace(".init_args.", ".")
        check_option(option.removeprefix("--"), algorithm)
        if equals and value == "":
            raise SettingError(f"{option} needs a value")
        value = str(number(value)) if WHOLE_FLOAT.fullmatch(value) else value
        env_id |= option == "--model.env.id"
        result.append(f"{option}={value}" if equals else option)
    if not any(option.startswith("--model.help") for option in result):
        if algorithm is Algorithm and not any(option.startswith("--model") for option in result):
            raise SettingError("model is missing: name a config (--config ppo/cartpole) or an algorithm (--model PPO)")
        if not env_id:
            raise SettingError("model.env.id is missing: name an environment, such as --model.env.id CartPole-v1")
    return result


def check_option(name: str, algorithm: type) -> None:
    """Raise `SettingError` for an option that does not exist."""
    if name in ("print_config", "model.help"):
        return
    section, _, rest = name.partition(".")
    key = rest.partition(".")[0].rstrip("+")
    if section not in TOP_LEVEL:
        raise SettingError(f"--{name} is not an option{nearest(section, [*TOP_LEVEL, 'config', 'print_config', 'help'])}")
    if section == "model" and rest and key != "class_path":
        if algorithm is not Algorithm:
            check_names("--model.", [key], model_settings(algorithm))
        if key == "env" and "." in rest:
            check_names("--model.env.", [rest.split(".")[1].rstrip("+")], [field.name for field in fields(EnvConfig)])
    elif section in sections() and rest:
        check_names(f"--{section}.", [key], sections()[section])


def explain(message: str) -> str:
    """One sentence from a message of jsonargparse: the key, what it must be, and its value."""
    keys = re.findall(r'[Kk]ey "([^"]+)"', message)
    nested = re.search(r"NestedArg\(key='([^']+)'", message)
    key = ".".join(dict.fromkeys(part for full in keys for part in full.split(".") if part not in ("init_args", "fit")))
    if nested and not key.endswith(nested[1]):
        key = f"{key}.{nested[1]}"
    expected = [text.strip(" .") for text in re.findall(r"Expected (?:an? )?(.+?)(?:\. Got value|\n|$)", message)]
    kinds = [kind for kind in dict.fromkeys(map(_kind, expected)) if kind not in ("null", "NoneType")]
    value = re.search(r"Got value: (.+)", message) or re.search(r"Given value: (?:NestedArg\(key='[^']*', val='?)?(.+?)'?\)?$", message, re.M)
    if key and kinds:
        return f"{key} must be {' or '.join(kinds[:2])}" + (f", got {value[1].strip()}" if value else "")
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    return f"{key}: {lines[-1]}" if key and lines else " ".join(lines)


def _kind(text: str) -> str:
    """`<class 'int'>` as a word."""
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).replace("typing.", "")
