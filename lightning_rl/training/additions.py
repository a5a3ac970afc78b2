"""Save the attributes that a user adds to an algorithm, and name what checkpoints cannot hold: other objects, and changed networks."""

import dis
import pickle
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from inspect import unwrap
from types import FunctionType
from typing import Any

import pytorch_lightning as pl
from torch import Generator, Tensor, nn

from lightning_rl.checkpoints.archive import to_arrays, to_plain
from lightning_rl.envs.snapshot.decoding import Decoder
from lightning_rl.envs.snapshot.encoding import MAX_PARTS, VERSION, Encoder, UnsupportedValueError
from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import list_changes
from lightning_rl.types import State

PACKAGES = ("lightning_rl", "pytorch_lightning", "lightning", "torch")
"""Packages whose classes take care of their own state."""
BUILT_WITH = "built_with"
"""Attribute of a user's module: digests of its attributes as its constructor left them."""


def is_packaged(cls: type) -> bool:
    """Return whether a class is one of `PACKAGES`."""
    return cls.__module__.partition(".")[0] in PACKAGES


@cache
def packaged_names(cls: type) -> frozenset[str]:
    """Return the names that the packaged bases of a class define, and those of attributes that their methods assign."""
    names = {BUILT_WITH, "built", *vars(pl.LightningModule()), "_hparams", "_hparams_initial", "_hparams_name"}
    for base in filter(is_packaged, cls.__mro__):
        names |= vars(base).keys() | vars(base).get("__annotations__", {}).keys()
        for member in vars(base).values() if base.__module__.startswith("lightning_rl") else ():
            parts = (member, *(getattr(member, part, None) for part in ("__func__", "func", "fget", "fset")))
            functions = [unwrap(part) for part in parts if isinstance(part, FunctionType)]
            names |= {str(step.argval) for each in functions for step in dis.get_instructions(each) if step.opname == "STORE_ATTR"}
    return frozenset(names)


def own_attributes(module: nn.Module) -> dict[str, object]:
    """Return the attributes of a module that a user has added; settings, weights, code, and objects of `PACKAGES` are not among them."""
    cls: Any = type(module)
    known = packaged_names(cls) | getattr(module, "hparams", {}).keys()
    added = {name: value for name, value in vars(module).items() if name not in known and not is_code(value)}
    return {name: value for name, value in added.items() if isinstance(value, Tensor | Generator) or not is_packaged(type(value))}


def is_code(value: object) -> bool:
    """Return whether a value is a function, a method or a class, which do not change."""
    return callable(value) and not isinstance(value, nn.Module)


def own_modules(run: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that may have attributes of a user: runs, and those of a user's class, by their path in the run."""
    return ((path, each) for path, each in run.named_modules() if isinstance(each, pl.LightningModule) or not is_packaged(type(each)))


def note_attributes(run: nn.Module) -> None:
    """Note the attributes of a run that was just built: checkpoints hold those that have changed since."""
    for _, module in own_modules(run):
        if not is_packaged(type(module)):
            vars(module)[BUILT_WITH] = {name: digest(run, value) for name, value in own_attributes(module).items()}


def digest(run: nn.Module, value: object) -> bytes:
    """Return a digest of a value; empty if it cannot be saved."""
    try:
        return sha256(pickle.dumps(encoder_of(run).encode(value))).digest()
    except UnsupportedValueError:
        return b""


def encoder_of(run: nn.Module) -> Encoder:
    """Return an encoder for attributes of a run's modules; references to a module are saved as its number."""
    encoder = Encoder(strict=True)
    for module in run.modules():
        encoder.number(module)
    encoder.most = MAX_PARTS
    return encoder


def read_attributes(run: nn.Module) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the changed attributes of a run's modules as plain data, by the module's path, and why others cannot be saved."""
    stored: dict[str, dict[str, Any]] = {}
    unsaved: dict[str, str] = {}
    encoder = encoder_of(run)
    for path, module in own_modules(run):
        before = vars(module).get(BUILT_WITH, {})
        for name, value in own_attributes(module).items():
            new = digest(run, value)
            if not new or new != before.get(name):
                try:
                    encoder.parts = 0
                    stored.setdefault(path, {})[name] = encoder.encode(value)
                except UnsupportedValueError as error:
                    unsaved[f"{type(module).__name__}.{name}"] = str(error)
    return stored, unsaved


def write_attributes(run: nn.Module, stored: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Restore what `read_attributes` returned. Return the names of attributes that the run's modules no longer have.

    Raises:
        SettingError: a name is not that of a user's attribute.
    """
    modules, lost = dict(own_modules(run)), []
    decoder = Decoder(VERSION, [*run.modules()])
    for path, attributes in stored.items():
        for name, plain in attributes.items():
            module = modules.get(path)
            cls: Any = type(module)
            try:
                if module is None:
                    raise UnsupportedValueError(path)
                value = decoder.decode(plain, vars(module).get(name))
            except (UnsupportedValueError, TypeError, ValueError, KeyError, AttributeError):
                lost.append(f"{path}.{name}".lstrip("."))
                continue
            inherited = getattr(cls, name, None)
            if not name.isidentifier() or name in packaged_names(cls) or isinstance(inherited, property) or is_code(inherited):
                raise SettingError(f"the checkpoint holds an attribute {name[:40]!r}, which is not one of a user's class")
            vars(module)[name] = value
    return lost


class Additions:
    """What a user has added to a run, or changed in its networks: checkpoints hold the attributes, and the rest is named once."""

    def __init__(self) -> None:
        self.named: set[str] = set()
        """Attributes, and places of changes, that were named already."""
        self.lost: list[str] = []
        """Changes in the networks of the checkpoint that the run was loaded from."""

    def save(self, module: Any, changes: Mapping[str, str]) -> State:
        """Return entries of a checkpoint, and name what they do not hold; `changes`: what was changed in networks, by place."""
        attributes, unsaved = read_attributes(module)
        for name in unsaved.keys() - self.named:
            module.say(f"checkpoints do not hold {name} ({unsaved[name]}): make it plain data or a buffer, or use on_save_checkpoint")
        if new := [text for place, text in changes.items() if place not in self.named]:
            what = f"checkpoints do not hold what was changed after {type(module).__name__} was built: {list_changes(new)}"
            module.say(f"{what}; change it in the constructor of a subclass, or again after loading")
        self.named |= unsaved.keys() | changes.keys()
        return {"attributes": to_plain(attributes), **({"changes": [*changes.values()]} if changes else {})}

    def load(self, module: Any, state: State) -> None:
        """Restore attributes from a checkpoint."""
        if missing := write_attributes(module, to_arrays(state.get("attributes", {}))):
            module.say(f"not restored from the checkpoint, as they are not there any more: {', '.join(missing)}")

    def name_lost(self, module: Any, state: State, changes: Mapping[str, str]) -> None:
        """Name the changes in networks that the run of a checkpoint had and this one, with `changes`, has not."""
        here = changes.values()
        if lost := [text for text in state.get("changes", ()) if text not in here]:
            what = f"the checkpoint does not hold what had been changed in its networks: {list_changes(lost)}"
            (module.say if module.has_trainer else warnings.warn)(f"{what}; change it again, or results differ")
        self.lost = [] if module.has_trainer else lost
