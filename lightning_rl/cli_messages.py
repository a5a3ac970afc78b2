"""What jsonargparse and Lightning say of wrong settings, in one sentence: the key, what it must be, its value, the way out."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Mapping
from pydoc import locate
from textwrap import shorten
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import Logger

import lightning_rl
from lightning_rl.algorithms.settings import settings_of
from lightning_rl.errors import closest, closest_of

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
