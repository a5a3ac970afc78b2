"""Leave hooks and attributes to the user.

A run does its own work before or after Lightning's hooks, whether they call `super()` or not. Checkpoints hold the attributes that a user
adds, and name what they cannot hold.
"""

import dis
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
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

RUN_HOOKS = {
    "on_train_start": "start_run",
    "on_save_checkpoint": "save_run",
    "on_load_checkpoint": "load_run",
}
"""Hooks in which a run does work, and the methods that do it."""

LAST_HOOK = "on_train_batch_end"
"""The hook that the run calls before checkpoints are saved; Lightning calls it after them."""

ConfigureCallbacks = Callable[..., Sequence[pl.Callback] | pl.Callback]


class HookedModule(pl.LightningModule):
    """A module that does work in Lightning's hooks without defining them, so that subclasses can override them freely."""

    hooks_in_progress: set[str]
    called_early: bool
    """Whether the last hook of this iteration has been called, before Lightning calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks_in_progress, self.called_early = set(), False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for hook in (*RUN_HOOKS, "configure_callbacks"):
            method = getattr(cls, hook)  # may come from a mixin
            if not hasattr(method, "does_work"):
                setattr(cls, hook, work_before(hook, method) if hook in RUN_HOOKS else add_own_callbacks(method))
        if not hasattr(getattr(cls, LAST_HOOK), "is_called_early"):
            setattr(cls, LAST_HOOK, skip_second_call(getattr(cls, LAST_HOOK)))

    def call_hook(self, name: str, *arguments: object, **named: object) -> object:
        """Call a hook without the run's own work, for a module that is part of another module's run."""
        self.hooks_in_progress.add(name)
        try:
            return getattr(self, name)(*arguments, **named)
        finally:
            self.hooks_in_progress.remove(name)

    def call_last_hook(self, *arguments: object) -> None:
        """Call the module's last hook of an iteration; Lightning's own call does nothing then."""
        self.call_hook(LAST_HOOK, *arguments)
        self.called_early = True

    def own_callbacks(self) -> list[pl.Callback]:
        """Return the callbacks that a run needs with any Trainer."""
        raise NotImplementedError


def work_before(name: str, hook: Callable[..., object]) -> Callable[..., object]:
    """Wrap a hook so that the run's work is done once before it, whether the hook calls `super()` or not."""

    @wraps(hook)
    def both(self: HookedModule, *arguments: object) -> object:
        if name in self.hooks_in_progress:  # called by `super()`
            return hook(self, *arguments)
        self.hooks_in_progress.add(name)
        try:
            getattr(self, RUN_HOOKS[name])(*arguments)
            return hook(self, *arguments)
        finally:
            self.hooks_in_progress.remove(name)

    both.does_work = True  # type: ignore[attr-defined]
    return both


def skip_second_call(hook: Callable[..., object]) -> Callable[..., object]:
    """Wrap the last hook of an iteration so that Lightning's call does nothing if the run has called it."""

    @wraps(hook)
    def once(self: HookedModule, *arguments: object, **named: object) -> object:
        if self.called_early:
            self.called_early = False
            return None
        return hook(self, *arguments, **named)

    once.is_called_early = True  # type: ignore[attr-defined]
    return once


def add_own_callbacks(configure_callbacks: ConfigureCallbacks) -> ConfigureCallbacks:
    """Wrap a `configure_callbacks` so that it adds to the run's own callbacks, whether it calls `super()` or not."""

    @wraps(configure_callbacks)
    def add(self: HookedModule) -> Sequence[pl.Callback] | pl.Callback:
        if "configure_callbacks" in self.hooks_in_progress:
            return configure_callbacks(self)
        self.hooks_in_progress.add("configure_callbacks")
        try:
            more = configure_callbacks(self) or []
        finally:
            self.hooks_in_progress.remove("configure_callbacks")
        given = [more] if isinstance(more, pl.Callback) else list(more)
        return [*(each for each in self.own_callbacks() if not has_kind(given, each)), *given]

    add.does_work = True  # type: ignore[attr-defined]
    return add


for name in RUN_HOOKS:
    setattr(HookedModule, name, work_before(name, getattr(pl.LightningModule, name)))
setattr(HookedModule, LAST_HOOK, skip_second_call(getattr(pl.LightningModule, LAST_HOOK)))
HookedModule.configure_callbacks = add_own_callbacks(pl.LightningModule.configure_callbacks)  # type: ignore[method-assign]


def has_kind(callbacks: Iterable[pl.Callback], callback: pl.Callback) -> bool:
    """Return whether there is a callback of this kind."""
    return any(isinstance(each, type(callback)) for each in callbacks)


# ---------------------------------------------------------------- attributes

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

    def save(self, run: Any) -> State:
        """Return entries of a checkpoint, and name what they do not hold."""
        attributes, unsaved = read_attributes(run)
        for name in unsaved.keys() - self.named:
            run.say(f"checkpoints do not hold {name} ({unsaved[name]}): make it plain data or a buffer, or use on_save_checkpoint")
        changes = run.changes
        if new := [text for place, text in changes.items() if place not in self.named]:
            what = f"checkpoints do not hold what was changed after {type(run).__name__} was built: {list_changes(new)}"
            run.say(f"{what}; change it in the constructor of a subclass, or again after loading")
        self.named |= unsaved.keys() | changes.keys()
        return {"attributes": to_plain(attributes), **({"changes": [*changes.values()]} if changes else {})}

    def load(self, run: Any, state: State) -> None:
        """Restore attributes from a checkpoint, and name the changes that its run had and this one has not."""
        if missing := write_attributes(run, to_arrays(state.get("attributes", {}))):
            run.say(f"not restored from the checkpoint, as they are not there any more: {', '.join(missing)}")
        here = run.changes.values()
        if lost := [text for text in state.get("changes", ()) if text not in here]:
            what = f"the checkpoint does not hold what had been changed in its networks: {list_changes(lost)}"
            (run.say if run.has_trainer else warnings.warn)(f"{what}; change it again, or results differ")
        self.lost = [] if run.has_trainer else lost
