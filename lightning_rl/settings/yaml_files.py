"""Read config files: YAML in which `1e6` is a number, by path or by the name of a packaged config."""

import re
import sys
from collections.abc import Hashable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from lightning_rl.errors import SettingError, check_path, nearest
from lightning_rl.processes.startup import config_folder

Plain = dict[str, Any]
"""A mapping of plain YAML values: strings, numbers, lists and mappings."""

BOOL, FLOAT, MERGE, TEXT = (f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "merge", "str"))
NUMBER_WITH_EXPONENT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+")
MAX_DEPTH = 100
"""Maximum nesting of mappings and lists; our configs have fewer than ten levels."""
MAX_SHARED_VALUES = 10_000
"""Number of values that aliases and merges may add to those that are written out."""


class Loader(yaml.SafeLoader):
    """YAML 1.1 without its surprises: `1e6` is 1000000 and not a string, `off`, `no` and `y` are strings, and keys are unique.

    Malicious files fail with the line of the problem: thousands of brackets, aliases that multiply, integers larger than any float.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.max_keys, self.depth, self.keys = len(text) + MAX_SHARED_VALUES, 0, 0

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: tuple[bool, bool]) -> str:
        """Infer the type of a value that has no tag."""
        tag = super().resolve(kind, value, implicit)
        if kind is yaml.ScalarNode and value and implicit[0]:  # not in quotes
            if NUMBER_WITH_EXPONENT.fullmatch(value):
                return FLOAT
            return TEXT if tag == BOOL and value[0] not in "tTfF" else tag
        return tag

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read a value unless it is nested too deeply."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ComposerError(None, None, f"more than {MAX_DEPTH} nested brackets", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge the mappings of `<<`, up to a maximum number of keys."""
        super().flatten_mapping(node)
        self.keys += len(node.value)
        if self.keys > self.max_keys:
            raise ConstructorError(None, None, f"<< merges more than {self.max_keys:,} keys", node.start_mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value; report the line of a value that is invalid for its tag."""
        start = repr(node.value[:30]) if isinstance(node, yaml.ScalarNode) else "this"
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            reason = f"{start} is not a valid {node.tag.rpartition(':')[2]}: {str(error)[:60]}"
            raise ConstructorError(None, None, reason, node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > sys.float_info.max_exp:
            raise ConstructorError(None, None, f"{start} is too large for a number", node.start_mark)
        return value

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Build a float, or an integer if a number with an exponent is whole."""
        text = self.construct_scalar(node)
        return as_number(text) if NUMBER_WITH_EXPONENT.fullmatch(text) else self.construct_yaml_float(node)

    def construct_unique(self, node: yaml.MappingNode) -> dict[Hashable, object]:
        """Build a mapping whose keys are unique strings or integers."""
        keys: list[object] = []
        for key_node, _ in node.value:
            if key_node.tag == MERGE:
                continue
            key = self.construct_object(key_node)
            if key in keys or not isinstance(key, str | int):
                reason = "appears twice" if key in keys else "is not a word"
                raise ConstructorError(None, None, f"the key {key!r} {reason}", key_node.start_mark)
            keys.append(key)
        self.flatten_mapping(node)  # `<<: *other` comes first, so that this mapping's keys override it
        return dict(self.construct_pairs(node, deep=True))


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back as it was: a string that looks like a number, such as `1e5`, is in quotes."""

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: tuple[bool, bool]) -> str:
        """Infer the type that a value would be read as."""
        is_number = kind is yaml.ScalarNode and value and implicit[0] and NUMBER_WITH_EXPONENT.fullmatch(value)
        return FLOAT if is_number else super().resolve(kind, value, implicit)


def dump(config: object, **style: Any) -> str:
    """Write plain values as YAML, in their order; `style`: arguments of `yaml.dump`."""
    return yaml.dump(config, Dumper=Dumper, sort_keys=False, **style)


Loader.add_constructor(FLOAT, Loader.construct_number)
Loader.add_constructor("tag:yaml.org,2002:map", Loader.construct_unique)


def as_mapping(key: str, value: object, where: str = "") -> Plain:
    """Return a part of a file that must be a mapping; {} if it is null."""
    if value is not None and not isinstance(value, dict):
        raise SettingError(f"{key}{where} must be a mapping of settings, got {value!r}")
    return value or {}


def as_number(text: str) -> int | float:
    """Convert a number with an exponent, to an integer if it is whole."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def read_config(name: str) -> Plain:
    """Read a config file, or a packaged config by name, such as `ppo/cartpole`.

    Raises `SettingError`: the file does not exist, is not UTF-8, not YAML, or not a mapping.
    """
    config = parse_file(find_config(name), name)
    if not isinstance(config, dict):
        got = "nothing" if config is None else repr(config)
        raise SettingError(f"{name} must be a mapping of settings such as `model: {{class_path: PPO}}`, got {got}")
    return spell_out(config)


def find_config(name: str) -> Path:
    """Find the config file or packaged config of this name."""
    folder = config_folder()
    check_path("--config", name)
    for path in (Path(name), folder / f"{name.removeprefix('configs/').removesuffix('.yaml')}.yaml"):
        if path.is_file():
            return path
    if (Path(name) / "config.yaml").is_file():
        raise SettingError(f"--config {name} is a run's folder; its config is {Path(name) / 'config.yaml'}")
    known = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    raise SettingError(f"--config {name}: there is no such file or packaged config (see lightning-rl list){nearest(name, known)}")


def parse_file(path: Path, name: str) -> object:
    try:
        return parse(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError as error:
        raise SettingError(f"{name} is not a text file in UTF-8; save it as one") from error
    except OSError as error:
        raise SettingError(f"{name} cannot be read: {error.strerror}") from error


def parse(text: str, source: str) -> object:
    try:
        parsed = yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "somewhere"
        raise SettingError(f"{source} is not valid YAML, {line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise SettingError(f"{source} is not valid YAML: {error}") from error
    limit = len(text) + MAX_SHARED_VALUES
    if sum(1 for _ in islice(_values(parsed), limit + 1)) > limit:
        raise SettingError(f"{source} expands to more than {limit:,} values through its aliases")
    return parsed


def _values(tree: object) -> Iterator[object]:
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield child
        yield from _values(child)


def spell_out(config: Plain) -> Plain:
    """Expand `model: PPO` and `env: CartPole-v1` into mappings."""
    if isinstance(config.get("model"), str):
        config["model"] = {"class_path": config["model"]}
    model = config.get("model")
    arguments = model.get("init_args") if isinstance(model, dict) else None
    if isinstance(arguments, dict) and isinstance(arguments.get("env"), str):
        arguments["env"] = {"id": arguments["env"]}
    return config


def in_one_line(config: Plain) -> str:
    """Write a config as one line of YAML, with the type of each value. JSON will not do: jsonargparse reads its NaN as a string."""
    return yaml.safe_dump(config, default_style='"', default_flow_style=True, sort_keys=False, width=float("inf")).strip()


def first_difference(before: Mapping[str, object], now: Mapping[str, object], prefix: str = "") -> str | None:
    """Return the dotted name of the first setting in which two mappings differ; None if there is none."""
    for key in [*before, *(key for key in now if key not in before)]:
        one, other = before.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if (difference := first_difference(one, other, f"{prefix}{key}.")) is not None:
                return difference
        elif one != other:
            return f"{prefix}{key}"
    return None
