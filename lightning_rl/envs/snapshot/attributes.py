"""What an object holds, as plain data, and back: arrays, numbers, strings, containers of them, and random generators.

Plain data are None, bool, int, float, str, bytes, numpy arrays of numbers, and lists, tuples and dicts of plain data. What has another
type becomes a tuple `("~name", ...)`. Objects that are not plain themselves are written back into their counterparts.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

NUMBERS = "biuf"
"""Kinds of arrays that any file can hold; the others go as bytes."""
CONTAINERS: dict[str, type] = {"~list": list, "~tuple": tuple, "~deque": deque, "~set": set, "~frozenset": frozenset}
SKIPPED = {"spec", "metadata", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"}
"""How an environment was made, which building it anew repeats."""
BIT_GENERATORS = {cls.__name__: cls for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)}
CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, partial, Enum, np.dtype)
SERVICES = {"logging", "threading", "multiprocessing", "concurrent", "asyncio", "subprocess", "socket", "torch", "pygame", "mujoco"}
"""Packages whose objects are no part of an environment's state."""
PARTS = 100_000
"""An object with more values than that is no environment's own: a network, a data set."""


class NotAttributesError(Exception):
    """A value that plain data cannot say, or that has no counterpart to be written into."""


def read(thing: Any, alike: AttributeReader | None = None) -> dict[str, Any]:
    """All attributes of an object that plain data can say, copied; others are left out."""
    reader = alike or AttributeReader()
    reader.seen.setdefault(id(thing), len(reader.seen))
    state = {}
    for name, value in attributes(thing).items():
        known = len(reader.seen)
        try:
            state[name] = reader.plain(value)
        except NotAttributesError:
            while len(reader.seen) > known:  # what a value that is left out shares with others is theirs to say
                reader.seen.popitem()
    return state


def write(thing: Any, state: dict[str, Any], alike: AttributeWriter | None = None, lenient: bool = False) -> None:
    """The inverse, into an object that was built alike. What does not fit is left out where `lenient`.

    Raises:
        NotAttributesError: a value does not fit.
    """
    writer = alike or AttributeWriter(lenient)
    existing = attributes(thing)
    for name, plain in state.items():
        try:
            if not is_state(thing, name):
                raise NotAttributesError(f"{name} is no state")
            value = writer.value(plain, existing.get(name))
        except NotAttributesError:
            if not writer.lenient:
                raise
            continue
        if existing.get(name) is not value:
            setattr(thing, name, value)


def attributes(thing: Any) -> dict[str, Any]:
    """An object's own attributes, and spaces that its class holds: all its instances draw from those."""
    spaces = {name: getattr(type(thing), name, None) for name in ("observation_space", "action_space")}
    own = {name: value for name, value in vars(thing).items() if is_state(thing, name)}
    return {name: space for name, space in spaces.items() if is_space(space)} | own


def is_state(thing: Any, name: str) -> bool:
    """Whether an attribute may be state: not Python's own, not how the object was made, and what is wrapped is asked itself."""
    return not name.startswith("__") and name not in SKIPPED and not (name == "env" and isinstance(thing, gym.Wrapper))


class AttributeReader:
    """Says values as plain data. A generator that several attributes share is said once."""

    def __init__(self, only_generators: bool = False) -> None:
        self.only_generators = only_generators
        self.seen: dict[int, int] = {}
        self.parts = 0

    def plain(self, value: Any) -> Any:
        """A value as plain data.

        Raises:
            NotAttributesError: it cannot be said.
        """
        self.parts += 1
        if self.parts > PARTS:
            raise NotAttributesError("too large")
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
            return self.generator(value)
        if not self.only_generators:
            if value is None or type(value) in (bool, int, float, str, bytes):
                return value
            if type(value) is np.ndarray:
                return self.array(value)
            if isinstance(value, np.generic):
                return ("~scalar", self.array(np.asarray(value)))
            if type(value) in CONTAINERS.values():
                name = f"~{type(value).__name__}"
                return (name, [self.plain(each) for each in value], value.maxlen if isinstance(value, deque) else None)
            if type(value) is dict:
                return ("~dict", [(self.plain(key), self.plain(each)) for key, each in value.items()])
            if type(value).__name__ == "ALEInterface":
                return ("~ale", value.cloneSystemState().__getstate__())
            if type(value).__name__ == "MjData":
                return ("~mujoco", {name: array.copy() for name, array in simulation(value).items()}, float(value.time))
        service = getattr(type(value), "__module__", "").partition(".")[0] in SERVICES
        if service or isinstance(value, CODE) or not hasattr(value, "__dict__"):
            raise NotAttributesError(type(value).__name__)
        return self.object(value)

    def generator(self, value: Any) -> Any:
        if id(value) in self.seen:
            return ("~same", self.seen[id(value)])
        number = self.seen[id(value)] = len(self.seen)
        if isinstance(value, random.Random):
            version, numbers, gauss = value.getstate()
            return ("~random", number, version, np.array(numbers, np.int64), gauss)
        kind = "~generator" if isinstance(value, np.random.Generator) else "~randomstate"
        state = value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state(legacy=False)
        return (kind, number, AttributeReader().plain(state))

    def array(self, value: np.ndarray) -> Any:
        if value.dtype.kind in NUMBERS:
            return value.copy()
        if value.dtype.kind in "cSUmM":
            return ("~array", value.dtype.str, list(value.shape), value.tobytes())
        raise NotAttributesError(f"an array of {value.dtype}")

    def object(self, value: Any) -> Any:
        if id(value) in self.seen:
            return ("~same", self.seen[id(value)])
        self.seen[id(value)] = len(self.seen)
        if is_space(value):  # of a space only what it draws from; its bounds are the environment's to build
            inner = getattr(value, "spaces", ())
            children = [self.plain(child) for child in (inner.values() if hasattr(inner, "values") else inner)]
            drawn = vars(value).get("_np_random")
            return ("~space", None if drawn is None else self.generator(drawn), children)
        return ("~object", type(value).__qualname__, read(value, self))


class AttributeWriter:
    """Makes values from plain data, in place where a counterpart exists."""

    def __init__(self, lenient: bool = False) -> None:
        self.lenient = lenient
        self.made: dict[int, Any] = {}

    def value(self, plain: Any, existing: Any = None) -> Any:
        """What plain data say; objects are changed in place.

        Raises:
            NotAttributesError: an object has no counterpart of its class.
        """
        if isinstance(plain, np.ndarray):
            return plain.copy()
        if not isinstance(plain, tuple | list):
            return plain
        kind, *parts = plain or (None,)
        if not isinstance(kind, str) or kind not in self.makers:
            raise NotAttributesError(f"{kind!r} is no kind of value")
        return self.makers[kind](self, existing, kind, *parts)

    def make_container(self, existing: Any, kind: str, children: list[Any], maxlen: int | None) -> Any:
        ordered = isinstance(existing, list | tuple | deque) and len(existing) == len(children)
        values = [self.value(child, existing[i] if ordered else None) for i, child in enumerate(children)]
        return deque(values, maxlen) if kind == "~deque" else CONTAINERS[kind](values)

    def make_dict(self, existing: Any, kind: str, items: list[Any]) -> dict[Any, Any]:
        before = existing if isinstance(existing, dict) else {}
        pairs = ((self.value(key), each) for key, each in items)
        return {key: self.value(each, before.get(key)) for key, each in pairs}

    def make_scalar(self, existing: Any, kind: str, array: Any) -> Any:
        return self.value(array)[()]

    def make_array(self, existing: Any, kind: str, dtype: str, shape: list[int], data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype).reshape(shape).copy()

    def make_ale(self, existing: Any, kind: str, data: bytes) -> Any:
        if type(existing).__name__ != "ALEInterface":
            raise NotAttributesError("no game")
        existing.restoreSystemState(type(existing.cloneSystemState())(data))
        return existing

    def make_mujoco(self, existing: Any, kind: str, arrays: dict[str, np.ndarray], time: float) -> Any:
        if type(existing).__name__ != "MjData":
            raise NotAttributesError("no simulation")
        counterparts = simulation(existing)
        for name, array in arrays.items():
            if name in counterparts and counterparts[name].shape == array.shape:
                counterparts[name][...] = array
        existing.time = time
        return existing

    def make_generator(self, existing: Any, kind: str, number: int, plain: Any) -> Any:
        state = self.value(plain)
        name = state["bit_generator"]
        if not isinstance(name, str) or name not in BIT_GENERATORS:
            raise NotAttributesError(f"{name!r} is no bit generator")
        check_places(state)
        bits: Any = BIT_GENERATORS[name]()
        bits.state = state
        self.made[number] = (type(existing) if isinstance(existing, np.random.Generator) else np.random.Generator)(bits)
        return self.made[number]

    def make_randomstate(self, existing: Any, kind: str, number: int, plain: Any) -> Any:
        state = self.value(plain)
        check_places(state)
        self.made[number] = made = np.random.RandomState()
        made.set_state(state)
        return made

    def make_random(self, existing: Any, kind: str, number: int, version: int, numbers: np.ndarray, gauss: float | None) -> Any:
        self.made[number] = made = random.Random()
        made.setstate((version, tuple(map(int, numbers)), gauss))
        return made

    def make_same(self, existing: Any, kind: str, number: int) -> Any:
        return self.made.get(number, existing)  # an object that was met before is in its place already

    def make_space(self, existing: Any, kind: str, generator: Any, children: list[Any]) -> Any:
        if not is_space(existing):
            raise NotAttributesError("no space")
        inner = getattr(existing, "spaces", ())
        for child, counterpart in zip(children, inner.values() if hasattr(inner, "values") else inner, strict=True):
            self.value(child, counterpart)
        existing._np_random = None if generator is None else self.value(generator)
        return existing

    def make_object(self, existing: Any, kind: str, name: str, state: dict[str, Any]) -> Any:
        if type(existing).__qualname__ != name:
            raise NotAttributesError(f"no {name}")
        write(existing, state, self)
        return existing

    makers: ClassVar[dict[str, Callable[..., Any]]] = {
        **dict.fromkeys(CONTAINERS, make_container),
        "~dict": make_dict,
        "~scalar": make_scalar,
        "~array": make_array,
        "~ale": make_ale,
        "~mujoco": make_mujoco,
        "~generator": make_generator,
        "~randomstate": make_randomstate,
        "~random": make_random,
        "~same": make_same,
        "~space": make_space,
        "~object": make_object,
    }


def simulation(data: Any) -> dict[str, np.ndarray]:
    """MuJoCo's arrays. All of them: some lag a step behind the state vector, and Ant observes such. Constraints differ in number."""
    names = (name for name in dir(data) if not name.startswith(("_", "efc_", "iefc_")))
    arrays = {name: getattr(data, name) for name in names}
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray) and array.dtype.kind in NUMBERS}


def is_space(value: Any) -> bool:
    """Whether something is a space of gymnasium, or nested in one."""
    return all(hasattr(type(value), name) for name in ("sample", "contains", "seed", "is_np_flattenable"))  # some raise when asked


def check_places(state: dict[str, Any]) -> None:
    """Raise `NotAttributesError` for a generator that would read beyond its words: numpy takes any place for the next one."""
    place, buffered = state.get("state", {}).get("pos", 0), state.get("buffer_pos", 0)
    if not (0 <= place <= 624 and 0 <= buffered <= 4):
        raise NotAttributesError("a generator without its words")
