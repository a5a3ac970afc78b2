"""Python expressions in settings, such as `dict(net_arch=[256, 256], activation_fn=nn.ReLU)`, as plain data; nothing is run."""

from __future__ import annotations

import ast
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
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SettingError(f"{where} must be a mapping such as dict(net_arch=[64, 64]), got {text!r}") from error


def _plain(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(each.arg for each in keywords):
            return {str(each.arg): _plain(each.value) for each in keywords}
        case ast.Dict(keys=keys, values=values) if all(keys):
            return {_plain(key): _plain(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_plain(each) for each in elements]
        case ast.Name() | ast.Attribute():
            return ast.unparse(node)
        case _:
            return ast.literal_eval(node)
