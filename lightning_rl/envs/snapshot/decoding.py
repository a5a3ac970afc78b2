"""Restore values from plain data into the objects of an environment that was built the same way.

See `encoding.py` for the format. The data may come from an untrusted file: they never name what is imported or called; that depends only on
the existing objects.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, Flag
from types import MethodType
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from lightning_rl.envs.snapshot.encoding import (
    CODE,
    CONTAINERS,
    DICTS,
    NUMBERS,
    SCALARS,
    VERSION,
    Plain,
    UnsupportedValueError,
    attributes_of,
    inner_spaces,
    is_atari,
    is_mujoco,
    is_plain_object,
    is_service,
    is_space,
    is_state,
    is_torch,
    mujoco_arrays,
    name_of,
    owner_of,
    text_of,
)

T = TypeVar("T")
BIT_GENERATORS = {cls.__name__: cls for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)}


def write_all(
    things: Iterable[object], states: Sequence[Mapping[str, Plain]], version: int | None, lenient: bool = False, whole: bool = False
) -> None:
    """Write the states of `read_all` into objects that were built the same way.

    Args:
        things: the objects.
        states: the state of each object.
        version: version of the states, see `encoding.VERSION`.
        lenient: skip what does not fit.
        whole: the states hold all attributes: remove others, which the original objects had lost since they were built.

    Raises:
        UnsupportedValueError: something does not fit.
    """
    things = list(things)
    decoder = Decoder(version, things, lenient, whole)
    for thing, state in zip(things, states, strict=True):
        decoder.write(thing, state)


class Decoder:
    """Makes values from plain data, in place if there is a counterpart; arguments as for `write_all`."""

    def __init__(self, version: int | None, things: Sequence[object] = (), lenient: bool = False, whole: bool = False) -> None:
        self.lenient, self.whole = lenient, whole
        self.is_old = version is None
        """Whether only generators have numbers (old states), so that a reference to another value means its counterpart."""
        self.made: dict[int, Any] = {} if self.is_old else dict(enumerate(things))
        """Values by their numbers."""
        self.used: dict[int, int] = {id(thing): number for number, thing in enumerate(things)}
        """Numbers of the counterparts that were written into, by id: one object cannot be the counterpart of two values."""

    def write(self, thing: object, state: Mapping[str, Plain]) -> None:
        """Write attributes into an object."""
        existing = attributes_of(thing)
        for name, plain in state.items():
            try:
                is_method = name not in existing and callable(getattr(type(thing), name, None))
                if not is_state(thing, name) or is_method:
                    raise UnsupportedValueError(f"{name} is not state")
                value = self.decode(plain, existing.get(name))
                if not is_same(existing.get(name), value):
                    setattr(thing, name, value)
            except (UnsupportedValueError, AttributeError, TypeError) as error:  # also for frozen objects
                if not self.lenient:
                    raise UnsupportedValueError(str(error)) from error
        if self.whole:
            for name in [name for name in getattr(thing, "__dict__", {}) if name in existing and name not in state]:
                delattr(thing, name)

    def decode(self, plain: Plain, existing: object = None) -> Any:
        """Make a value, or change an existing object in place; raise `UnsupportedValueError` for unknown kinds of plain data."""
        if isinstance(plain, np.ndarray):
            return put(plain, existing)
        if not isinstance(plain, tuple | list):
            return plain
        match plain:
            case ["~service"]:
                return existing
            case ["~same", int(number)] if number in self.made:
                return self.made[number]
            case ["~same", int()] if self.is_old:
                return existing
            case ["~code", name, number] if isinstance(existing, CODE) or is_service(existing):
                owner = existing.__self__ if isinstance(existing, MethodType) else None
                if name_of(existing) == name and (number is None or self.made.get(number, owner) is owner):
                    return existing
            case ["~fixed", text] if text_of(existing) == text:
                return existing
            case ["~enum", name, member] if type(existing).__qualname__ == name and isinstance(existing, Enum):
                return member_of(type(existing), member)
            case ["~named", name, children] if type(existing).__qualname__ == name and isinstance(existing, tuple):
                return tuple.__new__(type(existing), self._children(children, existing))
            case ["~tuple" | "~frozenset" as kind, list(children)]:
                return CONTAINERS[kind](self._children(children, existing))
            case ["~list" | "~set" | "~deque" as kind, int(number), list(children), maxlen]:
                made: Any = self._note(number, deque(maxlen=maxlen) if kind == "~deque" else CONTAINERS[kind]())
                for child in self._children(children, existing):  # a child may hold the container itself
                    made.add(child) if kind == "~set" else made.append(child)
                return made
            case [str(kind), int(number), list(items), *factory] if kind in DICTS:
                if not factory:
                    made = DICTS[kind]()
                elif isinstance(existing, defaultdict) and name_of(existing.default_factory) == factory[0]:
                    made = defaultdict(existing.default_factory)
                else:
                    raise UnsupportedValueError("another factory of default values")
                return self._items(self._note(number, made), items, existing)
            case ["~object", int(number), name, state] if type(existing).__qualname__ == name and is_plain_object(existing):
                self.write(self._claim(number, existing), state)
                return existing
            case ["~space", int(number), text, generator, children] if is_space(existing) and text_of(existing) == text:
                return self._draw_on(self._note(number, existing), generator, children)
            case ["~numpy", int(number), array]:
                return self._note(number, self.decode(array, existing))
            case ["~view", int(number), int(whole), dtype, offset, shape, strides] if isinstance(self.made.get(whole), np.ndarray):
                if np.dtype(dtype).kind in NUMBERS and 0 not in strides:  # numpy checks the bounds
                    return self._note(number, np.ndarray(shape, dtype, self.made[whole], offset, strides))
            case ["~objects", int(number), shape, children]:
                made, values = self._note(number, np.empty(shape, object)), self._children(children, getattr(existing, "flat", None))
                for place, value in zip(np.ndindex(*shape), values, strict=True):
                    made[place] = value
                return made
            case ["~tensor", int(number), array]:
                return self._note(number, sys.modules["torch"].from_numpy(np.array(self.decode(array))))
            case ["~torch", int(number), state] if is_torch(existing, "Generator"):
                self._claim(number, existing).set_state(sys.modules["torch"].from_numpy(self.decode(state)))
                return existing
            case ["~scalar", array]:
                return self.decode(array)[()]
            case ["~array", dtype, shape, bytes(data)] if np.dtype(dtype).kind in "cSUmM":
                return np.frombuffer(data, dtype).reshape(shape).copy()
            case ["~ale", data] if is_atari(existing):
                existing.restoreSystemState(type(existing.cloneSystemState())(data))
                return existing
            case ["~mujoco", arrays, time] if is_mujoco(existing):
                counterparts = mujoco_arrays(existing)
                for name, array in arrays.items():
                    if name in counterparts and counterparts[name].shape == array.shape:
                        counterparts[name][...] = array
                existing.time = time
                return existing
            case ["~generator", int(number), state]:
                return self._note(number, self._generator(number, self._apart(state), existing))
            case ["~randomstate", int(number), state]:
                legacy = np.random.RandomState()
                legacy.set_state(_checked(self._apart(state)))
                return self._note(number, legacy)
            case ["~random", int(number), version, numbers, gauss]:
                python = random.Random()
                python.setstate((version, tuple(map(int, numbers)), gauss))
                return self._note(number, python)
            case _ if self.is_old:
                return self._decode_old(plain, existing)
        raise UnsupportedValueError(f"{str(plain[:2])[:80]} has no counterpart, or is of an unknown kind")

    def _decode_old(self, plain: Plain, existing: object) -> Any:
        """Make a value from old data, in which containers, objects and spaces have no numbers."""
        match plain:
            case [str(kind), list(children), maxlen] if kind in CONTAINERS:
                values = self._children(children, existing)
                return deque(values, maxlen) if kind == "~deque" else CONTAINERS[kind](values)
            case ["~dict", list(items)]:
                return self._items({}, items, existing)
            case ["~object", str(name), state] if type(existing).__qualname__ == name and is_plain_object(existing):
                self.write(existing, state)
                return existing
            case ["~space", generator, children] if is_space(existing):
                return self._draw_on(existing, generator, children)
        raise UnsupportedValueError(f"{str(plain[:2])[:80]} has no counterpart, or is of an unknown kind")

    def _apart(self, plain: Plain) -> Any:
        """Make a value whose parts are numbered separately."""
        return Decoder(None if self.is_old else VERSION).decode(plain)

    def _note(self, number: int, value: T) -> T:
        """Store a value by its number."""
        self.made[number] = value
        return value

    def _claim(self, number: int, existing: T) -> T:
        """Store a counterpart that is written into by its number; raise if it is already that of another value."""
        if self.used.setdefault(id(existing), number) != number:
            raise UnsupportedValueError(f"one {type(existing).__qualname__} is the counterpart of two")
        return self._note(number, existing)

    def _children(self, children: list[Plain], existing: object) -> Iterator[Any]:
        """Make the values of a container one by one."""
        ordered = existing if isinstance(existing, list | tuple | deque | np.flatiter) and len(existing) == len(children) else None
        return (self.decode(child, None if ordered is None else ordered[i]) for i, child in enumerate(children))

    def _items(self, made: dict, items: list[tuple[Plain, Plain]], existing: object) -> dict:
        """Make the items of a dict one by one; an item may hold the dict itself."""
        before = dict(existing) if type(existing) in DICTS.values() and isinstance(existing, dict) else {}
        for key, item in items:
            name = self.decode(key)
            made[name] = self.decode(item, before.get(name))
        return made

    def _draw_on(self, space: gym.Space, generator: Plain, children: list[Plain]) -> gym.Space:
        """Restore the random generators of a space and its parts."""
        if generator is not None:
            made = self.decode(generator, space.np_random)
            if made is not space.np_random:
                space.np_random.bit_generator.state = made.bit_generator.state
        for child, counterpart in zip(children, inner_spaces(space), strict=True):
            self.decode(child, counterpart)
        return space

    def _generator(self, number: int, state: dict[str, Plain], existing: object) -> np.random.Generator:
        name = state["bit_generator"]
        if not isinstance(name, str) or name not in BIT_GENERATORS:
            raise UnsupportedValueError(f"{name!r} is no bit generator")
        is_free = self.used.setdefault(id(existing), number) == number
        if not isinstance(existing, np.random.Generator) or type(existing.bit_generator).__name__ != name or not is_free:
            existing = (type(existing) if isinstance(existing, np.random.Generator) else np.random.Generator)(BIT_GENERATORS[name]())
        existing.bit_generator.state = _checked(state)
        return existing


def _checked(state: dict[str, Plain]) -> dict[str, Plain]:
    """Raise `UnsupportedValueError` if a generator would read beyond its state: NumPy accepts any position."""
    position, buffered = state.get("state", {}).get("pos", 0), state.get("buffer_pos", 0)
    if not (0 <= position <= 624 and 0 <= buffered <= 4):
        raise UnsupportedValueError("the position of a generator is beyond its words")
    return state


def is_same(a: object, b: object) -> bool:
    """Return whether an attribute already has this value."""
    return a is b or (type(a) is type(b) and isinstance(a, SCALARS) and repr(a) == repr(b))


def put(array: np.ndarray, existing: object) -> np.ndarray:
    """Return a copy of an array; if its counterpart is a view of memory that NumPy does not own, write it there instead."""
    if not isinstance(existing, np.ndarray) or (existing.shape, existing.dtype) != (array.shape, array.dtype):
        return array.copy()
    if owner_of(existing).base is None or not existing.flags.writeable:
        return array.copy()
    existing[...] = array
    return existing


def member_of(cls: type[Enum], member: Plain) -> Enum:
    """Return a member of an enumeration by name, or of flags by bits."""
    try:
        return cls(member) if issubclass(cls, Flag) else cls[member]
    except (KeyError, ValueError) as error:
        raise UnsupportedValueError(f"{cls.__qualname__} has no {member!r}") from error
