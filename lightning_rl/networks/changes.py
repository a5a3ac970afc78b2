"""Notice, name and copy what a user changes in a network."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Protocol, TypeVar

import cloudpickle
import torch
from torch import Tensor, nn

from lightning_rl.errors import SettingError

REPLACEABLE = {"forward", "policy", "sample", "mode", "noise", "draw", "to_env", "shift_and_scale", "initial"}
"""Methods of a policy's parts that a user may replace in an instance or a class; the numpy actor then leaves it to torch."""
PACKAGES = ("torch", "lightning_rl")
"""Packages whose methods the numpy actor knows."""
Structure = Mapping[str, object]
Module = TypeVar("Module", bound=nn.Module)
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS = [torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks]
"""Forward hooks of all modules of the process."""
MEMBERS = ("_modules", "_parameters", *HOOKS)
"""Attributes of a module that hold its parts, parameters and hooks."""
members_of, values_of, dtype_of = itemgetter(*MEMBERS), methodcaller("values"), attrgetter("dtype")
OF_TORCH = {*vars(nn.Module()), "_compiled_call_impl"}
"""Attributes of every module."""
OF_RUNS = {"by_batch", "epsilon", "exploration", "hooks", "shown"}
"""Attributes that runs change themselves."""
ABSENT = object()
"""Stands for what a structure lacks."""


class ChangeDetector:
    """Notices parts, parameters, hooks and functions `forward` that are put into a module or replaced in it, and other dtypes.

    Asked when an iteration begins. After a gradient step the parts are no longer in the processor's cache, so this reads each of them only
    once, in loops of C.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.accept()

    def accept(self) -> None:
        """Take the module as it is now."""
        parts = [part for part in self.module.modules() if vars(part).keys() >= set(MEMBERS)]  # those of TorchScript have other attributes
        self.attributes = [vars(part) for part in parts]
        self.inner = self.attributes[1:]  # Lightning replaces the algorithm's own `forward` itself
        self.parameters = list(self.module.parameters())
        self.kept = list(chain.from_iterable(map(values_of, chain.from_iterable(map(members_of, self.attributes)))))
        """What is kept gives its id to nothing else."""
        self.accepted = self._look()

    def changed(self) -> bool:
        """Return whether anything is not as it was accepted."""
        return self._look() != self.accepted

    def _look(self) -> tuple[object, ...]:
        filled = filter(None, chain.from_iterable(map(members_of, self.attributes)))
        return (
            list(map(id, chain.from_iterable(map(values_of, filled)))),
            [attributes.get("forward") for attributes in self.inner],
            list(map(dtype_of, self.parameters)),
        )


def structure_of(root: nn.Module, with_attributes: Callable[[type], bool] = lambda cls: True) -> Structure:
    """Return what weights and buffers leave out of a module, by name: classes, hooks, functions and plain attributes of its parts.

    Of the root itself, which may be a run, only hooks and replaced methods are read. A part that is used twice is its first name.
    `with_attributes`: the classes of parts whose plain attributes are read.
    """
    structure: dict[str, object] = {}
    names: dict[int, str] = {}
    for name, part in root.named_modules(remove_duplicate=False):
        if (first := names.setdefault(id(part), name)) != name:
            structure[name] = f"the same as {first}"
            continue
        attributes, dot = vars(part), "." if name else ""
        if name:
            structure[name] = type(part)
            structure |= {f"{name}.{key}": "parameter" for key, _ in part.named_parameters(recurse=False)}
        for key in attributes.keys() - OF_TORCH - OF_RUNS:
            value = attributes[key]
            is_replaced = isinstance(value, FUNCTIONS) and getattr(value, "__func__", value) is not getattr(type(part), key, None)
            if is_replaced or (name and with_attributes(type(part)) and is_plain(value)):  # Lightning puts its methods back as attributes
                structure[f"{name}{dot}{key}"] = value
        if hooks := tuple(hooks_of([part])):
            structure[f"hooks of {name or 'the algorithm'}"] = hooks
    return structure


def describe_uncalled(module: nn.Module) -> str | None:
    """Return a line about hooks and `forward` of parts that are not called as modules, as PPO's network is not; None if there are none."""
    names = [
        name
        for name, part in module.named_modules()
        if name and type(part).forward is nn.Module.forward and (hooks_of([part]) or "forward" in vars(part))
    ]
    if not names:
        return None
    return f"hooks and forward of {', '.join(names)} are not called, since losses call other methods of it: change a layer in it instead"


def hooks_of(parts: Iterable[nn.Module]) -> list[object]:
    """Return the hooks of modules that change what they compute."""
    return [hook for part in parts for kind in HOOKS for hook in vars(part)[kind].values()]


def is_replaced(method: object) -> bool:
    """Return whether a method of a class of `PACKAGES` is a function from elsewhere."""
    return isinstance(method, FunctionType) and method.__module__.partition(".")[0] not in PACKAGES


def changes_everywhere(parts: Iterable[nn.Module]) -> dict[str, str]:
    """Return a text for each change that acts in all of this process: hooks of all modules, and methods replaced in classes of parts."""
    changes = {"hooks of all modules": "hooks of all modules"} if any(GLOBAL_HOOKS) else {}
    for cls in {cls for kind in set(map(type, parts)) for cls in kind.__mro__}:
        for name in REPLACEABLE & vars(cls).keys() if cls.__module__.partition(".")[0] in PACKAGES else ():
            if is_replaced(vars(cls)[name]):
                changes[f"{cls.__name__}.{name}"] = f"{cls.__name__}.{name} (replaced)"
    return changes


def is_plain(value: object) -> bool:
    """Return whether a value is a number, a text or None, or a sequence of such."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def changes_of(before: Structure, now: Structure) -> dict[str, str]:
    """Return a text for each difference of two structures by its place; a part of another class stands for all that is in it."""
    changes: dict[str, str] = {}
    for place in [*now, *(place for place in before if place not in now)]:
        old, new = before.get(place, ABSENT), now.get(place, ABSENT)
        part = place.removeprefix("hooks of ")
        if new is old or new == old or any(f"{part}.".startswith(f"{other}.") for other in changes):
            continue
        ways = {"replaced": isinstance(new, FUNCTIONS), "added": old is ABSENT, "removed": new is ABSENT}
        way = next((way for way, holds in ways.items() if holds), f"{show(new)} for {show(old)}")
        changes[place] = place if place.startswith("hooks of ") else f"{place} ({way})"
    return changes


def show(value: object) -> str:
    """Return the name of a class, or the text of another value."""
    return value.__name__ if isinstance(value, type) else str(value)


def list_changes(changes: Sequence[str]) -> str:
    """Return changes as words of a sentence, the first three of many."""
    more = len(changes) - 3
    return ", ".join([*changes[:3], *([f"{more} more"] if more > 0 else [])])


def copy_network(network: Module) -> Module:
    """Return a copy of a network that shares nothing with it.

    A function of a user's own may refer to the network that it was written for, which is then copied with it.
    """
    values = structure_of(network).values()
    functions = [
        getattr(function, "__func__", function) for value in values for function in (value if isinstance(value, tuple) else (value,))
    ]
    refers = any(getattr(function, "__closure__", None) for function in functions)
    attributes = [value for part in network.modules() for value in vars(part).values()]
    computed = {id(value): value.detach().clone() for value in attributes if isinstance(value, Tensor) and not value.is_leaf}
    try:  # tensors that old weight normalization and pruning compute are not parameters, and cannot be copied with their graph
        return pickle.loads(cloudpickle.dumps(network)) if refers else deepcopy(network, computed)
    except Exception as error:  # of a user's function
        raise SettingError(f"the policy cannot be copied: {type(error).__name__}: {str(error).splitlines()[0]}") from error


class HasParameters(Protocol):
    """A network, whether a module or not."""

    def parameters(self) -> Iterator[Tensor]: ...


def check_float32(*networks: HasParameters) -> None:
    """Raise `SettingError` unless all parameters of networks are float32, as observations and returns are."""
    for network in networks:
        for parameter in network.parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                problem = f"{type(network).__name__} has parameters of {parameter.dtype}"
                raise SettingError(f"{problem}: networks act and learn in torch.float32; leave out .double() or .half(), or call .float()")
