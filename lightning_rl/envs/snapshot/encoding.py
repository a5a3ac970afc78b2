"""Read the attributes of an object as plain data: numbers, strings, arrays, containers of them, objects, and random generators.

Plain data are None, bool, int, float, str, bytes, NumPy arrays of numbers, and lists, tuples and dicts of plain data. A value of another
type becomes a tuple `("~kind", ...)`, which `decoding.py` converts back. Values that can be shared have a number after their kind.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import cache, partial
from pathlib import PurePath
from re import Pattern
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard

import gymnasium as gym
import numpy as np

if TYPE_CHECKING:
    import torch

Plain = Any
"""Plain data."""
NUMBERS = "biuf"
"""Kinds of dtypes that any file format can hold; arrays of other kinds become bytes."""
SCALARS = (bool, int, float, str, bytes)
CONTAINERS: dict[str, type] = {"~list": list, "~tuple": tuple, "~deque": deque, "~set": set, "~frozenset": frozenset}
DICTS: dict[str, type] = {"~dict": dict, "~Counter": Counter, "~OrderedDict": OrderedDict, "~defaultdict": defaultdict}
CONSTRUCTOR_ARGUMENTS = "_saved_kwargs"
"""Attribute in which gymnasium's `RecordConstructorArgs` stores the arguments of a wrapper."""
HOW_BUILT = {"spec", "metadata", "_cached_spec", CONSTRUCTOR_ARGUMENTS, "_ezpickle_args", "_ezpickle_kwargs"}
"""Attributes, some of them private to gymnasium, that only repeat how an environment was built."""
CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, partial, type(cache(len)), np.dtype, np.ufunc)
FIXED = (complex, range, slice, date, time, timedelta, tzinfo, Decimal, Fraction, PurePath, Pattern, type(...))
"""Types of immutable values, which are compared by their text."""
SERVICES = {
    *("logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "subprocess", "socket"),
    *("torch", "pygame", "mujoco"),
}
"""Packages whose objects are not part of an environment's state, except for tensors and generators of torch, and MuJoCo's data."""
MAX_PARTS = 100_000
"""An attribute with more values is not part of an environment's state but for example a network or a dataset."""
MAX_DEPTH = 100
VERSION = 2
"""Version of the format. In older states, which have no version, containers, objects and spaces have no numbers."""
WRITTEN_IN_PYTHON = 1 << 9
"""CPython's flag of classes made by a `class` statement; other classes may hold state outside of attributes."""


class UnsupportedValueError(Exception):
    """Raised when a value cannot be converted to plain data, or has no counterpart to be written into."""


def read_all(things: Iterable[object], only_generators: bool = False, strict: bool = False) -> list[dict[str, Plain]]:
    """Copy the attributes of objects as plain data; shared values are converted once.

    Code and services are not saved. If `strict`, raises `UnsupportedValueError` for anything else that cannot be converted, and for
    attributes with more than `MAX_PARTS` values; otherwise skips them.
    """
    encoder, things = Encoder(only_generators, strict), list(things)
    for thing in things:
        encoder.number(thing)
    return [encoder.attributes(thing, MAX_PARTS) for thing in things]


def objects_in(things: Iterable[object]) -> list[tuple[dict[str, object], dict[str, object]]]:
    """Return the attributes of each object, and of those in its attributes, with a copy of them that holds the same values."""
    attributes, seen, waiting = [], {}, list(things)
    first = {id(thing) for thing in waiting}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif hasattr(value, "__dict__") and (id(value) in first or is_plain_object(value)):
            attributes.append((vars(value), dict(vars(value))))
            waiting += vars(value).values()
    return attributes


def attributes_of(thing: object) -> dict[str, object]:
    """Return an object's attributes, and the spaces of its class, whose generators all instances share."""
    spaces = {name: getattr(type(thing), name, None) for name in ("observation_space", "action_space")}
    slots = {name: getattr(thing, name) for name in _slots(type(thing)) if hasattr(thing, name) and is_state(thing, name)}
    attributes = {name: value for name, value in getattr(thing, "__dict__", {}).items() if is_state(thing, name)}
    return {name: space for name, space in spaces.items() if is_space(space)} | slots | attributes


def _slots(cls: type) -> list[str]:
    """Return the names in the `__slots__` of a class and its bases, as they are accessed from outside (with name mangling)."""
    declared = [(base.__name__.lstrip("_"), vars(base).get("__slots__", ())) for base in cls.__mro__]
    names = [(owner, name) for owner, slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return [f"_{owner}{name}" if name.startswith("__") and not name.endswith("__") else name for owner, name in names]


def is_state(thing: object, name: str) -> bool:
    """Return whether an attribute may be state; the environment inside a wrapper is read separately."""
    is_env = isinstance(thing, gym.Env | gym.vector.VectorEnv)
    is_inside = name == "env" and isinstance(thing, gym.Wrapper | gym.vector.VectorWrapper)
    return not (name.startswith("__") or (is_env and name in HOW_BUILT) or is_inside)


class Encoder:
    """Converts values to plain data. An object, list or array that several attributes share is converted once."""

    def __init__(self, only_generators: bool = False, strict: bool = False) -> None:
        self.only_generators, self.strict = only_generators, strict
        self.seen: dict[int, int] = {}
        """Numbers of values, by id."""
        self.memory: dict[int, list[tuple[int, int, int, bool]]] = {}
        """Non-overlapping byte ranges of arrays, by the owner of the memory: first, end, number, whether contiguous."""
        self.kept: list[object] = []
        """Values to keep alive while their ids are in use."""
        self.parts, self.depth = 0, 0
        self.most: float = float("inf")

    def number(self, value: object) -> tuple[int, bool]:
        """Return the number of a value, and whether it already had one."""
        known = id(value) in self.seen
        if not known:
            self.seen[id(value)] = len(self.seen)
            self.kept.append(value)
        return self.seen[id(value)], known

    def attributes(self, thing: object, most: float | None = None) -> dict[str, Plain]:
        """Convert the attributes of an object, each with at most `most` values; see `read_all`."""
        state = {}
        for name, value in attributes_of(thing).items():
            if most is not None:
                self.parts, self.most = 0, most
            known = len(self.seen)
            try:
                state[name] = ("~service",) if is_service(value) else self.encode(value)
            except UnsupportedValueError:
                if self.strict:
                    raise
                self._forget(known)  # another attribute may hold objects of the skipped value
        return state

    def encode(self, value: object) -> Plain:
        """Convert a value to plain data; raise `UnsupportedValueError` if that is not possible."""
        self.parts += 1
        self.depth += 1
        try:
            if self.parts > self.most or self.depth > MAX_DEPTH:
                raise UnsupportedValueError("too large")
            return self._encode(value)
        finally:
            self.depth -= 1

    def _encode(self, value: object) -> Plain:
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random) or is_torch(value, "Generator"):
            return self._generator(value)
        if not self.only_generators:
            if value is None or type(value) in SCALARS:
                return value
            if isinstance(value, Enum):
                return ("~enum", type(value).__qualname__, value.value if isinstance(value, Flag) else value.name)
            if isinstance(value, np.ndarray):
                return self._array(value)
            if isinstance(value, np.generic):
                return ("~scalar", plain_array(np.asarray(value)))
            if is_torch(value, "Tensor"):
                return self._tensor(value)
            if isinstance(value, tuple | frozenset | list | set | deque | dict):
                return self._container(value)
            if isinstance(value, FIXED):
                return ("~fixed", text_of(value))
            if is_atari(value):
                return ("~ale", value.cloneSystemState().serialize())
            if is_mujoco(value):
                return ("~mujoco", {name: array.copy() for name, array in mujoco_arrays(value).items()}, float(value.time))
            if isinstance(value, CODE) or is_service(value):
                return self._code(value)
        number, known = self.number(value)
        if known:
            return ("~same", number)
        if is_space(value):
            return self._space(number, value)
        if not is_plain_object(value):
            raise UnsupportedValueError(type(value).__name__)
        return ("~object", number, type(value).__qualname__, self.attributes(value))

    def _forget(self, known: int) -> None:
        """Forget the values that were numbered since there were `known`."""
        while len(self.seen) > known:
            self.seen.popitem()
        self.memory = {owner: [entry for entry in entries if entry[2] < known] for owner, entries in self.memory.items()}

    def _code(self, value: object) -> Plain:
        """Convert code to its name and, for a method, the number of its object."""
        owner = getattr(value, "__self__", None)
        if isinstance(value, BuiltinFunctionType) and not isinstance(owner, ModuleType | type | None):
            raise UnsupportedValueError(f"{value.__qualname__} of a container")
        return ("~code", name_of(value), self.seen.get(id(owner)) if isinstance(value, MethodType) else None)

    def _space(self, number: int, space: gym.Space) -> Plain:
        """Convert the random generators of a space; accessing the own generator of a space with parts would seed the parts."""
        children = inner_spaces(space)
        generator = None if children else self._generator(space.np_random)
        return ("~space", number, text_of(space), generator, [self.encode(child) for child in children])

    def _container(self, value: tuple | frozenset | list | set | deque | dict) -> Plain:
        cls, kind = type(value), f"~{type(value).__name__}"
        if len(value) > self.most - self.parts:
            raise UnsupportedValueError("too large")
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ("~named", cls.__qualname__, [self.encode(item) for item in value])
        if cls is not (CONTAINERS | DICTS).get(kind):
            raise UnsupportedValueError(cls.__name__)
        if isinstance(value, set | frozenset) and list(cls(list(value))) != list(value):
            raise UnsupportedValueError("a set whose order depends on its history")
        if isinstance(value, tuple | frozenset):
            return (kind, [self.encode(item) for item in value])
        number, known = self.number(value)
        if known:
            return ("~same", number)
        if isinstance(value, dict):
            items = [(self.encode(key), self.encode(child)) for key, child in value.items()]
            return (kind, number, items, name_of(value.default_factory)) if isinstance(value, defaultdict) else (kind, number, items)
        return (kind, number, [self.encode(item) for item in value], value.maxlen if isinstance(value, deque) else None)

    def _generator(self, value: np.random.Generator | np.random.RandomState | random.Random | torch.Generator) -> Plain:
        number, known = self.number(value)
        if known:
            return ("~same", number)
        if type(value) is random.Random:
            version, numbers, gauss = value.getstate()
            return ("~random", number, version, np.array(numbers, np.int64), gauss)
        if isinstance(value, np.random.Generator):
            return ("~generator", number, Encoder().encode(value.bit_generator.state))
        if isinstance(value, np.random.RandomState):
            return ("~randomstate", number, Encoder().encode(value.get_state(legacy=False)))
        if isinstance(value, random.Random):
            raise UnsupportedValueError(type(value).__name__)
        return ("~torch", number, plain_array(value.get_state().numpy()))

    def _array(self, value: np.ndarray) -> Plain:
        """Convert an array; an array within the memory of another becomes a view of it."""
        if type(value) is not np.ndarray:
            raise UnsupportedValueError(type(value).__name__)
        number, known = self.number(value)
        if known:
            return ("~same", number)
        if value.dtype.kind == "O":
            return ("~objects", number, list(value.shape), [self.encode(item) for item in value.flat])
        others = self.memory.setdefault(id(owner_of(value)), [])
        first, end = np.lib.array_utils.byte_bounds(value)
        place = bisect(others, (first, end))
        for start, stop, whole, has_no_gaps in others[max(0, place - 1) : place + 1] if value.size else []:
            if start <= first and end <= stop and has_no_gaps and value.dtype.kind in NUMBERS:
                offset = value.__array_interface__["data"][0] - start
                return ("~view", number, whole, value.dtype.str, offset, list(value.shape), list(value.strides))
            if first < stop and start < end:
                raise UnsupportedValueError("an array that shares memory with another")
        plain = plain_array(value)
        if value.size:
            others.insert(place, (first, end, number, bool(value.flags.c_contiguous) and value.dtype.kind in NUMBERS))
        return ("~numpy", number, plain)

    def _tensor(self, value: torch.Tensor) -> Plain:
        """Convert a tensor on the CPU that shares its memory with no other."""
        number, known = self.number(value)
        if known:
            return ("~same", number)
        whole = value.device.type == "cpu" and value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        storage = value.untyped_storage().data_ptr() if value.numel() else -number
        if not whole or value.requires_grad or self.memory.setdefault(-storage, []):
            raise UnsupportedValueError("a tensor with a gradient, on a device, or with shared memory")
        try:
            plain = plain_array(value.numpy())
        except TypeError as error:  # bfloat16 and the like
            raise UnsupportedValueError(str(value.dtype)) from error
        self.memory[-storage].append((0, 0, number, False))
        return ("~tensor", number, plain)


def plain_array(value: np.ndarray) -> Plain:
    """Convert an array without numbering it."""
    if value.dtype.kind in NUMBERS:
        return value.copy()
    if value.dtype.kind in "cSUmM":
        return ("~array", value.dtype.str, list(value.shape), value.tobytes())
    raise UnsupportedValueError(f"an array of {value.dtype}")


def owner_of(array: np.ndarray) -> np.ndarray:
    """Return the array that owns an array's memory, as far as NumPy knows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def name_of(value: object) -> str:
    """Return the name of a function or class, or of a value's class; for a partial function also its scalar positional arguments."""
    if isinstance(value, partial):
        given = [*value.args, *(part for item in value.keywords.items() for part in item)]
        return f"partial {name_of(value.func)} {[argument for argument in given if isinstance(argument, SCALARS)]}"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def text_of(value: object) -> str:
    """Return a text that identifies a value: its class and repr, or only the class if the repr contains a memory address."""
    text = f"{type(value).__qualname__} {value!r}"
    return type(value).__qualname__ if " at 0x" in text else text


def is_plain_object(value: object) -> bool:
    """Return whether attributes are the whole state of an object; False for wrappers inside environments."""
    cls = type(value)
    in_python = cls is SimpleNamespace or all(base is object or base.__flags__ & WRITTEN_IN_PYTHON for base in cls.__mro__)
    has_attributes = hasattr(value, "__dict__") or bool(_slots(cls))
    return in_python and has_attributes and not isinstance(value, (*CODE, *FIXED, gym.Wrapper)) and not is_service(value)


def is_service(value: object) -> bool:
    """Return whether a value is a service and not state, such as a logger or a screen."""
    package = getattr(type(value), "__module__", "").partition(".")[0]
    return package in SERVICES and not (is_torch(value, "Tensor") or is_torch(value, "Generator") or is_mujoco(value))


def is_torch(value: object, name: str) -> TypeGuard[Any]:
    """Return whether a value is a torch tensor or generator, without importing torch."""
    return type(value).__name__ == name and type(value).__module__ in ("torch", "torch._C")


def is_space(value: object) -> TypeGuard[gym.Space]:
    """Return whether a value is a space of gymnasium, by the methods of its class: some objects raise on attribute access."""
    return all(hasattr(type(value), name) for name in ("sample", "contains", "seed", "is_np_flattenable"))


def inner_spaces(space: gym.Space) -> list[gym.Space]:
    """Return the parts of a space."""
    inner: Iterable[gym.Space] | Mapping[str, gym.Space] = getattr(space, "spaces", ())
    return list(inner.values() if isinstance(inner, Mapping) else inner)


def is_atari(value: object) -> TypeGuard[Any]:
    """Return whether a value is the emulator of an Atari game."""
    return type(value).__name__ == "ALEInterface"


def is_mujoco(value: object) -> TypeGuard[Any]:
    """Return whether a value is the data of a MuJoCo simulation."""
    return type(value).__name__ == "MjData"


def mujoco_arrays(data: object) -> dict[str, np.ndarray]:
    """Return MuJoCo's arrays except constraints, which vary in number. Some lag a step behind the state vector, and Ant observes them."""
    names = (name for name in dir(data) if not name.startswith(("_", "efc_", "iefc_")))
    arrays = {name: getattr(data, name) for name in names}
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray) and array.dtype.kind in NUMBERS}
