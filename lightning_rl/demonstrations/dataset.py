"""Demonstrations from datasets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces
from lightning_rl.types import Tree


class Demonstration(NamedTuple):
    """One episode: obs `[T + 1, ...]` and action `[T, ...]` trees of arrays in the environment's own form, reward, terminated, truncated
    `[T]`."""

    obs: Tree
    action: Tree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    action_mask: Tree = ()


def load_demonstrations(dataset: str, spaces: Spaces) -> list[Demonstration]:
    """The episodes of a dataset.

    Raises:
        SettingError: there is no such dataset.
    """
    raise SettingError(f"model.dataset {dataset!r} is not a dataset")
