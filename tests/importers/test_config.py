"""Python expressions in settings are read as data."""

from __future__ import annotations

import pytest

from lightning_rl.errors import SettingError
from lightning_rl.importers.config import read_expression


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("dict(net_arch=[256, 256], log_std_init=-2)", {"net_arch": [256, 256], "log_std_init": -2}),
        ("{'norm_obs': True, 'norm_reward': False}", {"norm_obs": True, "norm_reward": False}),
        ("dict(activation_fn=nn.ReLU, optimizer_class=RMSpropTFLike)", {"activation_fn": "nn.ReLU", "optimizer_class": "RMSpropTFLike"}),
        ("dict(net_arch=[dict(pi=(64,), vf=[64])])", {"net_arch": [{"pi": [64], "vf": [64]}]}),
        ("dict(a=None, b='x', c=1e-5)", {"a": None, "b": "x", "c": 1e-5}),
        ({"net_arch": [64]}, {"net_arch": [64]}),
    ],
)
def test_data_is_read(text, value):
    assert read_expression(text, "policy_kwargs") == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "dict(**{'a': 1})",
        "dict([1])",
        "{**x}",
        "[x for x in y]",
        "lambda: 1",
        "a = 1",
        "(" * 5000,
        "f'{x}'",
    ],
)
def test_anything_else_is_refused_and_no_code_runs(text):
    with pytest.raises(SettingError, match=r"^policy_kwargs must be a mapping"):
        read_expression(text, "policy_kwargs")
