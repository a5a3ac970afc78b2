"""How much entropy is worth, given or learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_rl.errors import SettingError, check_range


class Temperature(nn.Module):
    """α > 0 `[K]`, one for each kind of action, kept as log α.

    Args:
        kinds: the kinds of actions.
        ent_coef: α as a number, or `auto` or `auto_<first value>` to learn it.
        target: the entropy that a learned α aims at, for each kind.
    """

    target: Tensor

    def __init__(self, kinds: Sequence[str], ent_coef: float | str, target: Sequence[float] = ()) -> None:
        super().__init__()
        self.kinds = list(kinds)
        self.register_buffer("target", torch.tensor(target), persistent=False)
        self.learned = isinstance(ent_coef, str)
        alpha = _first_value(ent_coef) if isinstance(ent_coef, str) else ent_coef
        check_range("ent_coef", alpha, 0, open_low=self.learned)
        log_alpha = torch.full((len(self.kinds),), math.log(alpha) if alpha > 0 else -math.inf)
        self.log_alpha = nn.Parameter(log_alpha, requires_grad=self.learned)

    def forward(self) -> Tensor:
        """α, without gradient."""
        return self.log_alpha.detach().exp()


def _first_value(ent_coef: str) -> float:
    name, given, value = ent_coef.partition("_")
    try:
        if name == "auto":
            return float(value) if given else 1.0
    except ValueError:
        pass
    raise SettingError(f"ent_coef {ent_coef!r} must be a number, auto, or auto_<first value> such as auto_0.1")
