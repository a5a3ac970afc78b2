"""What a function reads from the attributes of modules, and whether all that is still so."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None))
MISSING = object()


class Reads:
    """Notes the attributes of modules that are read, but tensors, which are a traced function's inputs.

    Args:
        given: names that are inputs too.
    """

    def __init__(self, given: Collection[str]) -> None:
        self.given = given
        self._values: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._children: dict[int, tuple[dict[str, nn.Module], tuple[nn.Module, ...]]] = {}
        self._empty: dict[int, Any] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is read meanwhile."""

        def get(module: nn.Module, name: str) -> Any:
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                value = type(module).__getattr__(module, name)  # of a parameter, a buffer or a module
            self._note(object.__getattribute__(module, "__dict__"), name, value)
            return value

        nn.Module.__getattribute__ = get  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__

    def _note(self, attributes: dict[str, Any], name: str, value: Any) -> None:
        if name.endswith("_hooks"):
            self._empty[id(value)] = value
        elif name == "_modules" or isinstance(value, nn.Module):
            modules = attributes["_modules"]
            self._children[id(modules)] = modules, tuple(modules.values())
        elif name in attributes and not (name.startswith("__") or name in self.given or isinstance(value, Tensor | MethodType)):
            self._values[id(attributes), name] = attributes, value

    def hold(self) -> bool:
        """Whether the same would be read now, and there are no hooks."""
        if any(self._empty.values()) or any(tuple(modules.values()) != before for modules, before in self._children.values()):
            return False
        for (_, name), (attributes, value) in self._values.items():
            now = attributes.get(name, MISSING)
            if now is not value and not (type(now) is type(value) and isinstance(now, PLAIN) and now == value):
                return False
        return True
