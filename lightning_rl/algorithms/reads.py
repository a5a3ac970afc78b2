"""What a function reads from the attributes of modules, and whether all that is still so."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None))
FOLLOWED = ("lightning_rl.", "torch.")
"""Where objects come from that change in no other way than by their attributes."""
MISSING = object()
LOCK = Lock()


class NotFollowed(Exception):
    """Something was read whose changes cannot be noticed."""


class Reads:
    """Notes what is read from modules, but tensors, which are a traced function's inputs.

    Args:
        modules: whose attributes count.
        given: names that are inputs too.
    """

    def __init__(self, modules: Iterable[nn.Module], given: Collection[str]) -> None:
        self.modules = {id(module): module for module in modules}
        self.given = given
        self._types: dict[int, tuple[nn.Module, type]] = {}
        self._children: dict[int, tuple[dict[str, nn.Module], tuple[nn.Module, ...]]] = {}
        self._hooks: dict[int, Any] = {}
        self._values: dict[tuple[int, str], tuple[dict[str, Any], Any, Any]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what this thread reads meanwhile.

        Raises:
            NotFollowed: at the end, if not all of it can be compared.
        """
        reader = get_ident()

        def get(module: nn.Module, name: str) -> Any:
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                value = type(module).__getattr__(module, name)  # of a parameter, a buffer or a module
            if get_ident() == reader and id(module) in self.modules and not name.startswith("__"):
                self._note(module, object.__getattribute__(module, "__dict__"), name, value)
            return value

        with LOCK:
            nn.Module.__getattribute__ = get  # type: ignore[method-assign, assignment]
            try:
                yield
            finally:
                del nn.Module.__getattribute__
        self._values = {key: (place, value, contents(value)) for key, (place, value, _) in self._values.items()}

    def _note(self, module: nn.Module, attributes: dict[str, Any], name: str, value: Any) -> None:
        self._types[id(module)] = module, type(module)
        if name.endswith("_hooks"):
            self._hooks[id(value)] = value
        elif name == "_modules" or isinstance(value, nn.Module):
            modules = attributes["_modules"]
            self._children[id(modules)] = modules, tuple(modules.values())
        elif name not in ("_parameters", "_buffers", *self.given) and not isinstance(value, Tensor):
            self._values[id(attributes), name] = attributes, attributes.get(name, MISSING), None

    def hold(self) -> bool:
        """Whether the same would be read now, and there are no hooks."""
        if any(self._hooks.values()):
            return False
        for module, before in self._types.values():
            if type(module) is not before:
                return False
        for modules, children in self._children.values():
            if tuple(modules.values()) != children:
                return False
        for (_, name), (place, value, inside) in self._values.items():
            now = place.get(name, MISSING)
            if now is not value and not (type(now) is type(value) and isinstance(now, PLAIN) and now == value):
                return False
            if inside is not None and contents(now) != inside:
                return False
        return True


def contents(value: Any) -> Any:
    """The numbers and words in an object that may change inside it; None for one that has none.

    Raises:
        NotFollowed: what it does is not known here.
    """
    if value is MISSING or isinstance(value, PLAIN):
        return None
    if isinstance(value, dict):
        return {key: _part(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_part(each) for each in value]
    if isinstance(value, partial):
        return [contents(value.func), contents(value.args), contents(value.keywords)]
    if not str(getattr(value, "__module__", "")).startswith(FOLLOWED):
        raise NotFollowed(type(value).__name__)
    inside = getattr(value, "__dict__", {}).items()
    return {name: _part(each) for name, each in inside if isinstance(each, (*PLAIN, tuple))} or None


def _part(value: Any) -> Any:
    return value if isinstance(value, PLAIN) else id(value)
