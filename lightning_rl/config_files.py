"""Configs: YAML with exponents that are numbers, by path or by the name of a packaged one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from lightning_rl.errors import SettingError, nearest
from lightning_rl.startup import config_folder

MERGE = "tag:yaml.org,2002:merge"
WHOLE_FLOAT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+")


DEEPEST = 100
"""Mappings and lists inside one another in a config; ours have less than ten."""


def most_values(text: str) -> int:
    """Count the values that a config may have: as many as can stand in its text, and 10,000 by aliases and merges."""
    return len(text) + 10_000


class Loader(yaml.SafeLoader):
    """YAML 1.1 without its surprise that `1e6` is a string: here it is 1000000, and `3e-4` a float. Refuses a key given twice.

    Refuses what no settings are, with the line where it is: thousands of brackets, aliases that multiply, integers beyond any number.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.most, self.depth, self.keys = most_values(text), 0, 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read a value, as long as it does not lie too deep."""
        mark = self.peek_event().start_mark
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"more than {DEEPEST} brackets inside one another", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge what `<<` names, as long as it does not multiply."""
        super().flatten_mapping(node)
        self.keys += len(node.value)
        if self.keys > self.most:
            raise yaml.constructor.ConstructorError(None, None, f"<< merges more than {self.most:,} keys", node.start_mark)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """A value; one that its tag cannot have is refused where it stands."""
        start = repr(node.value[:30]) if isinstance(node, yaml.ScalarNode) else "this"
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            reason = f"{start} is no {node.tag.rpartition(':')[2]}: {str(error)[:60]}"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > sys.float_info.max_exp:
            raise yaml.constructor.ConstructorError(None, None, f"{start} is too large for a number", node.start_mark)
        return value


def _number(loader: Loader, node: yaml.ScalarNode) -> int | float:
    return number(str(node.value))


def _mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: list[Any] = []
    for key_node, _ in node.value:
        if key_node.tag == MERGE:
            continue
        key = loader.construct_object(key_node)
        if not isinstance(key, str | int):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not a word", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        seen.append(key)
    loader.flatten_mapping(node)  # `<<: *other` comes first, so that what stands here wins
    return dict(loader.construct_pairs(node, deep=True))


Loader.add_constructor("!number", _number)
Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
Loader.add_implicit_resolver("!number", re.compile(rf"^{WHOLE_FLOAT.pattern}$"), list("-+0123456789"))
Loader.yaml_implicit_resolvers = {  # exponents are ours before they are YAML's; `off`, `no` and `y` are words
    first: sorted((tag for tag in tags if tag[0] != "tag:yaml.org,2002:bool" or first in "tTfF"), key=lambda tag: tag[0] != "!number")
    for first, tags in Loader.yaml_implicit_resolvers.items()
}


def number(text: str) -> int | float:
    """A number with an exponent: an integer where it is whole."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def read_config(name: str) -> dict[str, Any]:
    """A config file, or a packaged one by its name such as `ppo/cartpole`.

    Raises:
        SettingError: no such file, not UTF-8, not YAML, or not a mapping.
    """
    try:
        config = parse(find_config(name).read_text(encoding="utf-8"), name)
    except UnicodeDecodeError as error:
        raise SettingError(f"{name} is not a text file in UTF-8; save it as one") from error
    if not isinstance(config, dict):
        got = "nothing" if config is None else repr(config)
        raise SettingError(f"{name} must be a mapping of settings such as `model: {{class_path: PPO}}`, got {got}")
    return spell_out(config)


def find_config(name: str) -> Path:
    """The file of that name, or the packaged config."""
    folder = config_folder()
    for path in (Path(name), folder / f"{name.removeprefix('configs/').removesuffix('.yaml')}.yaml"):
        if path.is_file():
            return path
    known = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    raise SettingError(f"--config {name}: there is no such file or packaged config (see lightning-rl list){nearest(name, known)}")


def parse(text: str, source: str) -> Any:
    """YAML as plain data."""
    try:
        parsed = yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "somewhere"
        raise SettingError(f"{source} is not valid YAML, {line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise SettingError(f"{source} is not valid YAML: {error}") from error
    most = most_values(text)
    if sum(1 for _ in islice(values(parsed), most + 1)) > most:
        raise SettingError(f"{source} holds more than {most:,} values: its aliases multiply")
    return parsed


def values(tree: Any) -> Iterator[Any]:
    """All values in plain data, those that are shared wherever they are."""
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield child
        yield from values(child)


def spell_out(config: dict[str, Any]) -> dict[str, Any]:
    """The same with `model: PPO` and `env: CartPole-v1` as mappings."""
    if isinstance(config.get("model"), str):
        config["model"] = {"class_path": config["model"]}
    model = config.get("model")
    arguments = model.get("init_args") if isinstance(model, dict) else None
    if isinstance(arguments, dict) and isinstance(arguments.get("env"), str):
        arguments["env"] = {"id": arguments["env"]}
    return config


def written(config: dict[str, Any]) -> str:
    """A config in one line of YAML, the kind of each value said: jsonargparse reads JSON's NaN and Infinity as words."""
    return yaml.safe_dump(config, default_style='"', default_flow_style=True, sort_keys=False, width=float("inf")).strip()
