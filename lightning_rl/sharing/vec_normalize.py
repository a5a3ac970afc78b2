"""Read the statistics that `VecNormalize` of Stable-Baselines3 saved: a pickle, from which only arrays and numbers are built."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

Statistics = dict[str, np.ndarray | float]
"""`mean`, `var` and `count` of observations, with `epsilon` and `clip_obs`."""
ARRAYS: dict[str, Any] = {
    "_reconstruct": np.zeros(0).__reduce__()[0],
    "_frombuffer": np.zeros(0).__reduce_ex__(5)[0],  # from Python 3.14 on
    "scalar": np.float64(0).__reduce__()[0],
    "ndarray": np.ndarray,
    "dtype": np.dtype,
}
"""Functions and classes that build arrays and their numbers, by name."""
MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
IGNORED = ("stable_baselines3", "gymnasium", "gym", "numpy.random", "collections")
"""Packages whose objects are replaced by `Inert` ones, which keep their state: nothing of the packages is imported or called."""


class Inert:
    """A stand-in for an object of another package: keeps its state, does nothing."""

    state: Any = None

    def __new__(cls, *args: object, **settings: object) -> Inert:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Drop an item, such as one of an ordered dictionary."""


class Reader(pickle.Unpickler):
    """An unpickler that builds arrays, and puts `Inert` in place of everything that it may ignore."""

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """Return what builds arrays, or `Inert`; raise `UnpicklingError` for any other name."""
        if module in MODULES and name in ARRAYS:
            return ARRAYS[name]
        if any(module == each or module.startswith(f"{each}.") for each in IGNORED):
            return Inert
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_statistics(file: BinaryIO) -> Statistics | None:
    """Return `mean`, `var` and `count` of observations, with `epsilon` and `clip_obs`; None if observations are not normalized.

    Raises `Exception`: whatever a file raises that `VecNormalize.save` did not write.
    """
    saved = Reader(file).load().state
    if not saved["norm_obs"]:
        return None
    moments = saved["obs_rms"].state
    return {name: moments[name] for name in ("mean", "var", "count")} | {name: saved[name] for name in ("epsilon", "clip_obs")}
