"""Python expressions in settings, such as `dict(net_arch=[256, 256], activation_fn=nn.ReLU)`, as plain data; nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from lightning_rl.errors import SettingError


def read_expression(text: Any, where: str) -> Any:
    """Plain data of an expression: names such as `nn.ReLU` as texts, `dict(…)` as a mapping; what is no text as it is.

    Raises:
        SettingError: it is no expression, or says more than data.
    """
    if not isinstance(text, str):
        return text
    try:
        return _plain(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise SettingError(f"{where} must be a mapping such as dict(net_arch=[64, 64]), got {text!r}") from error


def _plain(node: ast.expr) -> Any:
    return READERS.get(type(node).__name__, ast.literal_eval)(node)


def _call(node: Any) -> dict[str, Any]:
    if ast.unparse(node.func) != "dict" or node.args or not all(each.arg for each in node.keywords):
        raise ValueError(f"{ast.unparse(node)} is no dict(name=value)")
    return {each.arg: _plain(each.value) for each in node.keywords}


def _mapping(node: Any) -> dict[Any, Any]:
    return {_plain(key): _plain(value) for key, value in zip(node.keys, node.values, strict=True)}


def _sequence(node: Any) -> list[Any]:
    return [_plain(each) for each in node.elts]


READERS: dict[str, Callable[[Any], Any]] = {
    **{"Call": _call, "Dict": _mapping, "List": _sequence, "Tuple": _sequence},
    **{"Name": ast.unparse, "Attribute": ast.unparse},
}
