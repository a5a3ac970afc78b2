"""Write plain data back as what it was: into the objects of an environment that was built in the same way, which decide what is called.

See `encoding.py` for what plain data are. They may come from a file that somebody made.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from copy import copy
from enum import Enum, Flag
from typing import Any

import numpy as np

from lightning_rl.envs.snapshot.encoding import (
    CONTAINERS,
    Plain,
    UnsupportedValueError,
    attributes_of,
    inner_spaces,
    is_atari,
    is_mujoco,
    is_space,
    is_state,
    is_torch,
    mujoco_arrays,
    name_of,
    owner_of,
)

BIT_GENERATORS = {cls.__name__: cls for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)}


def write_attributes(thing: object, state: Mapping[str, Plain], decoder: Decoder | None = None, lenient: bool = False) -> None:
    """Write attributes into an object that was built in the same way. If `lenient`, values that do not fit are left out."""
    decoder = decoder or Decoder(lenient)
    existing = attributes_of(thing)
    for name, plain in state.items():
        try:
            if not is_state(thing, name):
                raise UnsupportedValueError(f"{name} is not state")
            value = decoder.decode(plain, existing.get(name))
        except UnsupportedValueError:
            if not decoder.lenient:
                raise
            continue
        if existing.get(name) is not value:
            setattr(thing, name, value)


class Decoder:
    """Makes values from plain data, in place where there is a counterpart. Plain data may come from a file that somebody made."""

    def __init__(self, lenient: bool = False) -> None:
        self.lenient = lenient
        self.made: dict[int, Any] = {}

    def decode(self, plain: Plain, existing: Any = None) -> Any:
        """Make a value, or change an existing object in place; raise `UnsupportedValueError` for unknown kinds of plain data."""
        if isinstance(plain, np.ndarray):
            return _put(plain, existing)
        if not isinstance(plain, tuple | list):
            return plain
        match plain:
            case [str(kind), children, maxlen, *number] if kind in CONTAINERS:
                values = self._children(children, existing)
                if kind in ("~tuple", "~frozenset"):
                    return CONTAINERS[kind](values)
                made: Any = deque(maxlen=maxlen) if kind == "~deque" else CONTAINERS[kind]()
                return self._fill(self._made(number, made), values)
            case ["~dict", items, *number]:
                return self._fill(self._made(number, {}), self._items(items, existing))
            case ["~like", name, plains, attributes, number] if type(existing).__qualname__ == name and hasattr(existing, "clear"):
                values = (self._items if isinstance(existing, dict) else self._children)(plains, existing)
                made = self._made([number], copy(existing))
                made.clear()
                write_attributes(made, attributes, self)
                return self._fill(made, values)
            case ["~named", name, children] if type(existing).__qualname__ == name and hasattr(existing, "_make"):
                return existing._make(self._children(children, existing))
            case ["~enum", name, member] if type(existing).__qualname__ == name and isinstance(existing, Enum):
                return _member(type(existing), member)
            case ["~kept", name] if name_of(existing) == name:
                return existing
            case ["~numpy", number, array]:
                return self._made([number], self.decode(array, existing))
            case ["~view", number, whole, dtype, offset, shape, strides] if isinstance(self.made.get(whole), np.ndarray):
                return self._made([number], np.ndarray(shape, dtype, self.made[whole], offset, strides))  # numpy checks the bounds
            case ["~objects", shape, children]:
                made = np.empty(shape, object)
                for place, each in zip(np.ndindex(*shape), self._children(children, getattr(existing, "flat", None)), strict=True):
                    made[place] = each
                return made
            case ["~tensor", number, array]:
                return self._made([number], sys.modules["torch"].from_numpy(np.array(self.decode(array))))
            case ["~torch", state] if is_torch(existing, "Generator"):
                existing.set_state(sys.modules["torch"].from_numpy(self.decode(state)))
                return existing
            case ["~scalar", array]:
                return self.decode(array)[()]
            case ["~array", dtype, shape, data]:
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
            case ["~generator", number, state]:
                return self._made([number], self._generator(self.decode(state), existing))
            case ["~randomstate", number, state]:
                legacy = np.random.RandomState()
                legacy.set_state(_checked(self.decode(state)))
                return self._made([number], legacy)
            case ["~random", number, version, numbers, gauss]:
                python = random.Random()
                python.setstate((version, tuple(map(int, numbers)), gauss))
                return self._made([number], python)
            case ["~same", number]:
                return self.made.get(number, existing)
            case ["~space", generator, children] if is_space(existing):
                if generator is not None:
                    made = self.decode(generator, existing.np_random)
                    if made is not existing.np_random:
                        existing.np_random.bit_generator.state = made.bit_generator.state
                for child, counterpart in zip(children, inner_spaces(existing), strict=True):
                    self.decode(child, counterpart)
                return existing
            case ["~object", name, state, *number] if type(existing).__qualname__ == name:
                write_attributes(self._made(number, existing), state, self)
                return existing
        raise UnsupportedValueError(f"{str(plain[:2])[:80]} has no counterpart, or is of an unknown kind")

    def _made(self, number: list[int], value: Any) -> Any:
        """Note a value by its number, before what is inside it is made; older files number no containers."""
        for each in number:
            self.made[each] = value
        return value

    def _children(self, children: list[Plain], existing: Any) -> Iterator[Any]:
        """Make the values of a container one by one."""
        ordered = isinstance(existing, list | tuple | deque | np.flatiter) and len(existing) == len(children)
        return (self.decode(child, existing[i] if ordered else None) for i, child in enumerate(children))

    def _items(self, items: list[tuple[Plain, Plain]], existing: Any) -> Iterator[tuple[Any, Any]]:
        """Make the items of a dict one by one."""
        before = dict(existing) if isinstance(existing, dict) else {}
        keyed = ((self.decode(key), each) for key, each in items)
        return ((key, self.decode(each, before.get(key))) for key, each in keyed)

    def _fill(self, made: Any, values: Iterator[Any]) -> Any:
        """Put values into an empty container; each may hold the container itself."""
        for value in values:
            if isinstance(made, dict):
                made[value[0]] = value[1]
            elif isinstance(made, set):
                made.add(value)
            else:
                made.append(value)
        return made

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


def _put(array: np.ndarray, existing: Any) -> np.ndarray:
    """Return a copy of an array; where its counterpart is a view of memory that is not numpy's, write it there."""
    if not isinstance(existing, np.ndarray) or (existing.shape, existing.dtype) != (array.shape, array.dtype):
        return array.copy()
    if owner_of(existing).base is None or not existing.flags.writeable:
        return array.copy()
    existing[...] = array
    return existing


def _member(cls: type[Enum], member: Any) -> Enum:
    try:
        return cls(member) if issubclass(cls, Flag) else cls[member]
    except (KeyError, ValueError) as error:
        raise UnsupportedValueError(f"{cls.__qualname__} has no {member!r}") from error
