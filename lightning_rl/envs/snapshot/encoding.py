"""Read the attributes of an object as plain data: arrays, numbers, strings, containers of them, objects, and random generators.

Plain data are None, bool, int, float, str, bytes, numpy arrays of numbers, and lists, tuples and dicts of plain data. A value of another
type becomes a tuple `("~name", ...)`, which `decoding.py` turns into the value again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum, Flag
from functools import cache, partial
from pathlib import PurePath
from re import Pattern
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

import gymnasium as gym
import numpy as np

Plain = Any
"""Plain data."""
NUMBERS = "biuf"
"""Kinds of arrays that any file can hold; the others become bytes."""
CONTAINERS: dict[str, type] = {"~list": list, "~tuple": tuple, "~deque": deque, "~set": set, "~frozenset": frozenset}
CONSTRUCTOR_ARGUMENTS = "_saved_kwargs"
"""Attribute in which gymnasium's `RecordConstructorArgs` keeps the arguments of a wrapper."""
HOW_BUILT = {"spec", "metadata", "_cached_spec", CONSTRUCTOR_ARGUMENTS, "_ezpickle_args", "_ezpickle_kwargs"}
"""Attributes, some of them private to gymnasium, that only repeat how an environment was built."""
CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, partial, type(cache(len)), np.dtype, np.ufunc)
SERVICES = {"logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "subprocess", "socket"}
SERVICES |= {"torch", "pygame", "mujoco"}
"""Packages whose objects are not part of an environment's state, but for tensors and their generators."""
FIXED = (range, slice, complex, type(...), PurePath, Pattern)
"""Values that nothing can change; an attribute that holds one is as good as never given another."""
MAX_PARTS = 100_000
"""An attribute with more values than this does not belong to an environment: a network, a data set."""
HEAP_TYPE = 1 << 9
"""The flag of classes that are written in Python, or as if they were."""


class UnsupportedValueError(Exception):
    """A value that cannot be converted to plain data, or that has no counterpart to be written into."""


def read_attributes(thing: object, encoder: Encoder | None = None) -> dict[str, Plain]:
    """Copy the attributes of an object as plain data.

    Leaves out what is no state: code, services. If the encoder is `strict`, raises `UnsupportedValueError` for anything else that
    cannot be converted; otherwise leaves it out.
    """
    encoder = encoder or Encoder()
    encoder.seen.setdefault(id(thing), len(encoder.seen))
    return encoder.attributes(thing, MAX_PARTS)


def attributes_of(thing: object) -> dict[str, object]:
    """Return an object's attributes, and the spaces of its class, from which all instances draw."""
    spaces = {name: getattr(type(thing), name, None) for name in ("observation_space", "action_space")}
    slots = {name: getattr(thing, name) for name in _slots(type(thing)) if hasattr(thing, name) and is_state(thing, name)}
    own = {name: value for name, value in getattr(thing, "__dict__", {}).items() if is_state(thing, name)}
    return {name: space for name, space in spaces.items() if is_space(space)} | slots | own


def _slots(cls: type) -> list[str]:
    """Return the names in the `__slots__` of a class and those that it extends, as attributes are called outside of it."""
    found = [(base.__name__.lstrip("_"), vars(base).get("__slots__", ())) for base in cls.__mro__]
    names = [(owner, name) for owner, slots in found for name in ([slots] if isinstance(slots, str) else slots)]
    return [f"_{owner}{name}" if name.startswith("__") and not name.endswith("__") else name for owner, name in names]


def is_state(thing: object, name: str) -> bool:
    """Return whether an attribute may be state; the environment inside a wrapper is read by itself."""
    return not name.startswith("__") and name not in HOW_BUILT and not (name == "env" and isinstance(thing, gym.Wrapper))


class Encoder:
    """Converts values to plain data. What several attributes share, an object, a list or an array, is converted once."""

    def __init__(self, only_generators: bool = False, strict: bool = False) -> None:
        self.only_generators, self.strict = only_generators, strict
        self.seen: dict[int, int] = {}
        self.arrays: dict[int, list[tuple[int, np.ndarray]]] = {}
        """The arrays met so far, with their numbers, by the owner of their memory."""
        self.parts = 0
        self.most: float = float("inf")

    def attributes(self, thing: object, most: float | None = None) -> dict[str, Plain]:
        """Convert the attributes of an object, each of `most` values at most; see `read_attributes`."""
        state = {}
        for name, value in attributes_of(thing).items():
            if most is not None:
                self.parts, self.most = 0, most
            known = len(self.seen)
            try:
                if not is_service(value):  # which stays as it was built
                    state[name] = self.encode(value)
            except UnsupportedValueError:
                if self.strict:
                    raise
                self._forget(known)  # another attribute may still hold the objects inside the value that is left out
        return state

    def encode(self, value: object) -> Plain:
        """Convert a value to plain data; raise `UnsupportedValueError` if that is not possible."""
        self.parts += 1
        if self.parts > self.most:
            raise UnsupportedValueError("too large")
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random) or is_torch(value, "Generator"):
            return self._generator(value)
        if not self.only_generators:
            if value is None or type(value) in (bool, int, float, str, bytes):
                return value
            if isinstance(value, Enum):
                return ("~enum", type(value).__qualname__, value.value if isinstance(value, Flag) else value.name)
            if isinstance(value, np.ndarray):
                return self._array(value)
            if isinstance(value, np.generic):
                return ("~scalar", self._plain_array(np.asarray(value)))
            if is_torch(value, "Tensor"):
                return self._tensor(value)
            if isinstance(value, tuple | frozenset):
                return self._fixed(value)
            if isinstance(value, list | dict | deque | set):
                return self._container(value)
            if is_atari(value):
                return ("~ale", value.cloneSystemState().serialize())
            if is_mujoco(value):
                return ("~mujoco", {name: array.copy() for name, array in mujoco_arrays(value).items()}, float(value.time))
        if isinstance(value, CODE) or is_service(value):
            return ("~kept", name_of(value))
        python = all(cls is object or cls.__flags__ & HEAP_TYPE for cls in type(value).__mro__)  # others hold what no attribute shows
        if not python or not (hasattr(value, "__dict__") or _slots(type(value))):
            raise UnsupportedValueError(type(value).__name__)
        if (known := self._number(value)) is not None:
            return known
        number = self.seen[id(value)]
        if not is_space(value):
            return ("~object", type(value).__qualname__, self.attributes(value), number)
        # of a space only what it draws from; asking one that has parts for its own generator would seed them
        children = inner_spaces(value)
        return ("~space", None if children else self._generator(value.np_random), [self.encode(child) for child in children])

    def _number(self, value: object) -> Plain:
        """Give a value the next number and return None; return a reference to it if it was met before."""
        if id(value) in self.seen:
            return ("~same", self.seen[id(value)])
        self.seen[id(value)] = len(self.seen)
        return None

    def _forget(self, known: int) -> None:
        """Forget all that got a number since there were `known`."""
        while len(self.seen) > known:
            self.seen.popitem()
        self.arrays = {owner: [each for each in found if each[0] < known] for owner, found in self.arrays.items()}

    def _fixed(self, value: Any) -> Plain:
        if type(value) in (tuple, frozenset):
            return (f"~{type(value).__name__}", [self.encode(each) for each in value], None)
        if not hasattr(value, "_fields"):
            raise UnsupportedValueError(type(value).__name__)
        return ("~named", type(value).__qualname__, [self.encode(each) for each in value])

    def _container(self, value: Any) -> Plain:
        if (known := self._number(value)) is not None:
            return known
        number, cls = self.seen[id(value)], type(value)
        if isinstance(value, dict):
            plain: list[Plain] = [(self.encode(key), self.encode(each)) for key, each in value.items()]
        else:
            plain = [self.encode(each) for each in value]
        if cls is dict:
            return ("~dict", plain, number)
        if cls in CONTAINERS.values():
            return (f"~{cls.__name__}", plain, value.maxlen if isinstance(value, deque) else None, number)
        return ("~like", cls.__qualname__, plain, self.attributes(value), number)

    def _generator(self, value: Any) -> Plain:
        if (known := self._number(value)) is not None:
            return known
        number = self.seen[id(value)]
        if isinstance(value, random.Random):
            version, numbers, gauss = value.getstate()
            return ("~random", number, version, np.array(numbers, np.int64), gauss)
        if isinstance(value, np.random.Generator):
            return ("~generator", number, Encoder().encode(value.bit_generator.state))
        if isinstance(value, np.random.RandomState):
            return ("~randomstate", number, Encoder().encode(value.get_state(legacy=False)))
        return ("~torch", self._plain_array(value.get_state().numpy()))

    def _array(self, value: np.ndarray) -> Plain:
        """Convert an array; one that lies within the memory of another becomes a view of it."""
        if type(value) is not np.ndarray:
            raise UnsupportedValueError(type(value).__name__)
        if (known := self._number(value)) is not None:
            return known
        number = self.seen[id(value)]
        others = self.arrays.setdefault(id(owner_of(value)), [])
        for at, other in others:
            if np.may_share_memory(value, other):
                first, last = np.lib.array_utils.byte_bounds(value)
                start, end = np.lib.array_utils.byte_bounds(other)
                if not (other.flags.c_contiguous and start <= first and last <= end) or value.dtype.kind not in NUMBERS:
                    raise UnsupportedValueError("an array that shares memory with another")
                offset = value.__array_interface__["data"][0] - start
                return ("~view", number, at, value.dtype.str, offset, list(value.shape), list(value.strides))
        others.append((number, value))
        if value.dtype.kind == "O":
            return ("~objects", list(value.shape), [self.encode(each) for each in value.flat])
        return ("~numpy", number, self._plain_array(value))

    def _plain_array(self, value: np.ndarray) -> Plain:
        if value.dtype.kind in NUMBERS:
            return value.copy()
        if value.dtype.kind in "cSUmM":
            return ("~array", value.dtype.str, list(value.shape), value.tobytes())
        raise UnsupportedValueError(f"an array of {value.dtype}")

    def _tensor(self, value: Any) -> Plain:
        """Convert a tensor that owns its memory on the CPU."""
        if (known := self._number(value)) is not None:
            return known
        whole = value.device.type == "cpu" and value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        if type(value).__name__ != "Tensor" or not whole or value.requires_grad:
            raise UnsupportedValueError("a tensor with a gradient, on a device or within another")
        try:
            array = value.numpy()
        except TypeError as error:  # bfloat16 and the like
            raise UnsupportedValueError(str(value.dtype)) from error
        return ("~tensor", self.seen[id(value)], self._plain_array(array))


def owner_of(array: np.ndarray) -> np.ndarray:
    """Return the array whose memory an array is a view of, as far as numpy knows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def name_of(value: Any) -> str:
    """Return the name of a function or class, or that of a value's class."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def is_service(value: object) -> bool:
    """Return whether a value serves an environment, such as a logger or a screen, or is one that never changes."""
    if isinstance(value, FIXED):
        return True
    package = getattr(type(value), "__module__", "").partition(".")[0]
    return package in SERVICES and not (is_torch(value, "Tensor") or is_torch(value, "Generator") or is_mujoco(value))


def is_torch(value: object, name: str) -> TypeGuard[Any]:
    """Return whether a value is torch's tensor or generator; torch need not be there for it."""
    return type(value).__name__ == name and type(value).__module__ in ("torch", "torch._C")


def is_space(value: object) -> TypeGuard[gym.Space]:
    """Return whether a value is a space of gymnasium, by the methods of its class: some objects raise when they are asked."""
    return all(hasattr(type(value), name) for name in ("sample", "contains", "seed", "is_np_flattenable"))


def inner_spaces(space: gym.Space) -> list[gym.Space]:
    inner: Iterable[gym.Space] | Mapping[str, gym.Space] = getattr(space, "spaces", ())
    return list(inner.values() if isinstance(inner, Mapping) else inner)


def is_atari(value: object) -> TypeGuard[Any]:
    """Return whether a value is the emulator of an Atari game."""
    return type(value).__name__ == "ALEInterface"


def is_mujoco(value: object) -> TypeGuard[Any]:
    """Return whether a value is the data of a MuJoCo simulation."""
    return type(value).__name__ == "MjData"


def mujoco_arrays(data: object) -> dict[str, np.ndarray]:
    """Return all of MuJoCo's arrays: some are a step behind the state vector, and Ant observes them. Constraints differ in number."""
    names = (name for name in dir(data) if not name.startswith(("_", "efc_", "iefc_")))
    arrays = {name: getattr(data, name) for name in names}
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray) and array.dtype.kind in NUMBERS}
