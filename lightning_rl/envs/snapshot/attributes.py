"""Convert the attributes of an object to plain data and back: arrays, numbers, strings, containers of them, and random generators.

Plain data are None, bool, int, float, str, bytes, numpy arrays of numbers, and lists, tuples and dicts of plain data. A value of another
type becomes a tuple `("~name", ...)`. Objects are written back into their counterparts.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
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
BIT_GENERATORS = {cls.__name__: cls for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)}
CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, partial, Enum, np.dtype)
SERVICES = {"logging", "threading", "multiprocessing", "concurrent", "asyncio", "subprocess", "socket", "torch", "pygame", "mujoco"}
"""Packages whose objects are not part of an environment's state."""
MAX_PARTS = 100_000
"""An object with more values than this does not belong to an environment: a network, a data set."""


class UnsupportedValueError(Exception):
    """A value that cannot be converted to plain data, or that has no counterpart to be written into."""


def read_attributes(thing: object, encoder: Encoder | None = None) -> dict[str, Plain]:
    """Copy all attributes of an object that can be converted to plain data; leave the others out."""
    encoder = encoder or Encoder()
    encoder.seen.setdefault(id(thing), len(encoder.seen))
    state = {}
    for name, value in _attributes(thing).items():
        known = len(encoder.seen)
        try:
            state[name] = encoder.encode(value)
        except UnsupportedValueError:
            while len(encoder.seen) > known:  # another attribute may still hold the objects inside the value that is left out
                encoder.seen.popitem()
    return state


def write_attributes(thing: object, state: Mapping[str, Plain], decoder: Decoder | None = None, lenient: bool = False) -> None:
    """Write attributes into an object that was built in the same way. If `lenient`, values that do not fit are left out."""
    decoder = decoder or Decoder(lenient)
    existing = _attributes(thing)
    for name, plain in state.items():
        try:
            if not _is_state(thing, name):
                raise UnsupportedValueError(f"{name} is not state")
            value = decoder.decode(plain, existing.get(name))
        except UnsupportedValueError:
            if not decoder.lenient:
                raise
            continue
        if existing.get(name) is not value:
            setattr(thing, name, value)


def _attributes(thing: object) -> dict[str, object]:
    """Return an object's attributes, and the spaces of its class, from which all instances draw."""
    spaces = {name: getattr(type(thing), name, None) for name in ("observation_space", "action_space")}
    own = {name: value for name, value in vars(thing).items() if _is_state(thing, name)}
    return {name: space for name, space in spaces.items() if is_space(space)} | own


def _is_state(thing: object, name: str) -> bool:
    """Return whether an attribute may be state; the environment inside a wrapper is read by itself."""
    return not name.startswith("__") and name not in HOW_BUILT and not (name == "env" and isinstance(thing, gym.Wrapper))


class Encoder:
    """Converts values to plain data. An object or generator that several attributes share is converted once."""

    def __init__(self, only_generators: bool = False) -> None:
        self.only_generators = only_generators
        self.seen: dict[int, int] = {}
        self.parts = 0

    def encode(self, value: object) -> Plain:
        """Convert a value to plain data; raise `UnsupportedValueError` if that is not possible."""
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise UnsupportedValueError("too large")
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
            return self._generator(value)
        if not self.only_generators:
            if value is None or type(value) in (bool, int, float, str, bytes):
                return value
            if type(value) is np.ndarray:
                return self._array(value)
            if isinstance(value, np.generic):
                return ("~scalar", self._array(np.asarray(value)))
            if isinstance(value, list | tuple | deque | set | frozenset) and type(value) in CONTAINERS.values():
                maxlen = value.maxlen if isinstance(value, deque) else None
                return (f"~{type(value).__name__}", [self.encode(each) for each in value], maxlen)
            if isinstance(value, dict) and type(value) is dict:
                return ("~dict", [(self.encode(key), self.encode(each)) for key, each in value.items()])
            if is_atari(value):
                return ("~ale", value.cloneSystemState().serialize())
            if is_mujoco(value):
                return ("~mujoco", {name: array.copy() for name, array in _mujoco_arrays(value).items()}, float(value.time))
        service = getattr(type(value), "__module__", "").partition(".")[0] in SERVICES
        if service or isinstance(value, CODE) or not hasattr(value, "__dict__"):
            raise UnsupportedValueError(type(value).__name__)
        if id(value) in self.seen:
            return ("~same", self.seen[id(value)])
        self.seen[id(value)] = len(self.seen)
        if not is_space(value):
            return ("~object", type(value).__qualname__, read_attributes(value, self))
        # of a space only what it draws from; asking one that has parts for its own generator would seed them
        children = _children(value)
        return ("~space", None if children else self._generator(value.np_random), [self.encode(child) for child in children])

    def _generator(self, value: np.random.Generator | np.random.RandomState | random.Random) -> Plain:
        if id(value) in self.seen:
            return ("~same", self.seen[id(value)])
        number = self.seen[id(value)] = len(self.seen)
        if isinstance(value, random.Random):
            version, numbers, gauss = value.getstate()
            return ("~random", number, version, np.array(numbers, np.int64), gauss)
        if isinstance(value, np.random.Generator):
            return ("~generator", number, Encoder().encode(value.bit_generator.state))
        return ("~randomstate", number, Encoder().encode(value.get_state(legacy=False)))

    def _array(self, value: np.ndarray) -> Plain:
        if value.dtype.kind in NUMBERS:
            return value.copy()
        if value.dtype.kind in "cSUmM":
            return ("~array", value.dtype.str, list(value.shape), value.tobytes())
        raise UnsupportedValueError(f"an array of {value.dtype}")


class Decoder:
    """Makes values from plain data, in place where there is a counterpart. Plain data may come from a file that somebody made."""

    def __init__(self, lenient: bool = False) -> None:
        self.lenient = lenient
        self.made: dict[int, object] = {}

    def decode(self, plain: Plain, existing: Any = None) -> Any:
        """Make a value, or change an existing object in place; raise `UnsupportedValueError` for unknown kinds of plain data."""
        if isinstance(plain, np.ndarray):
            return plain.copy()
        if not isinstance(plain, tuple | list):
            return plain
        match plain:
            case [str(kind), children, maxlen] if kind in CONTAINERS:
                ordered = isinstance(existing, list | tuple | deque) and len(existing) == len(children)
                values = [self.decode(child, existing[i] if ordered else None) for i, child in enumerate(children)]
                return deque(values, maxlen) if kind == "~deque" else CONTAINERS[kind](values)
            case ["~dict", items]:
                before = existing if isinstance(existing, dict) else {}
                pairs = ((self.decode(key), each) for key, each in items)
                return {key: self.decode(each, before.get(key)) for key, each in pairs}
            case ["~scalar", array]:
                return self.decode(array)[()]
            case ["~array", dtype, shape, data]:
                return np.frombuffer(data, dtype).reshape(shape).copy()
            case ["~ale", data] if is_atari(existing):
                existing.restoreSystemState(type(existing.cloneSystemState())(data))
                return existing
            case ["~mujoco", arrays, time] if is_mujoco(existing):
                counterparts = _mujoco_arrays(existing)
                for name, array in arrays.items():
                    if name in counterparts and counterparts[name].shape == array.shape:
                        counterparts[name][...] = array
                existing.time = time
                return existing
            case ["~generator", number, state]:
                self.made[number] = made = self._generator(self.decode(state), existing)
                return made
            case ["~randomstate", number, state]:
                self.made[number] = legacy = np.random.RandomState()
                legacy.set_state(_checked(self.decode(state)))
                return legacy
            case ["~random", number, version, numbers, gauss]:
                self.made[number] = python = random.Random()
                python.setstate((version, tuple(map(int, numbers)), gauss))
                return python
            case ["~same", number]:
                return self.made.get(number, existing)  # an object that was met before is in its place already
            case ["~space", generator, children] if is_space(existing):
                if generator is not None:
                    made = self.decode(generator, existing.np_random)
                    if made is not existing.np_random:
                        existing.np_random.bit_generator.state = made.bit_generator.state
                for child, counterpart in zip(children, _children(existing), strict=True):
                    self.decode(child, counterpart)
                return existing
            case ["~object", name, state] if type(existing).__qualname__ == name:
                write_attributes(existing, state, self)
                return existing
        raise UnsupportedValueError(f"{str(plain[:2])[:80]} has no counterpart, or is of an unknown kind")

    def _generator(self, state: dict[str, Any], existing: object) -> np.random.Generator:
        name = state["bit_generator"]
        if not isinstance(name, str) or name not in BIT_GENERATORS:
            raise UnsupportedValueError(f"{name!r} is no bit generator")
        if not isinstance(existing, np.random.Generator) or type(existing.bit_generator).__name__ != name:
            existing = (type(existing) if isinstance(existing, np.random.Generator) else np.random.Generator)(BIT_GENERATORS[name]())
        existing.bit_generator.state = _checked(state)
        return existing


def _checked(state: dict[str, Any]) -> Any:
    """Raise `UnsupportedValueError` for a generator that would read beyond its words: numpy accepts any position."""
    position, buffered = state.get("state", {}).get("pos", 0), state.get("buffer_pos", 0)
    if not (0 <= position <= 624 and 0 <= buffered <= 4):
        raise UnsupportedValueError("the position of a generator is beyond its words")
    return state


def is_space(value: object) -> TypeGuard[gym.Space]:
    """Return whether a value is a space of gymnasium, by the methods of its class: some objects raise when they are asked."""
    return all(hasattr(type(value), name) for name in ("sample", "contains", "seed", "is_np_flattenable"))


def _children(space: gym.Space) -> list[gym.Space]:
    inner: Iterable[gym.Space] | Mapping[str, gym.Space] = getattr(space, "spaces", ())
    return list(inner.values() if isinstance(inner, Mapping) else inner)


def is_atari(value: object) -> TypeGuard[Any]:
    """Return whether a value is the emulator of an Atari game."""
    return type(value).__name__ == "ALEInterface"


def is_mujoco(value: object) -> TypeGuard[Any]:
    """Return whether a value is the data of a MuJoCo simulation."""
    return type(value).__name__ == "MjData"


def _mujoco_arrays(data: object) -> dict[str, np.ndarray]:
    """Return all of MuJoCo's arrays: some are a step behind the state vector, and Ant observes them. Constraints differ in number."""
    names = (name for name in dir(data) if not name.startswith(("_", "efc_", "iefc_")))
    arrays = {name: getattr(data, name) for name in names}
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray) and array.dtype.kind in NUMBERS}
