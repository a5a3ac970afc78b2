"""Numbers over few seeds, with what they leave open (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264), by the library rliable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lightning_rl.errors import SettingError, missing_extra

REPS = 2000
"""Resamples of a bootstrap."""


def rliable(needed_by: str) -> tuple[Any, Any]:
    """The library's two modules.

    Raises:
        SettingError: it is not installed, or what it stands on is too new for it.
    """
    try:
        from rliable import library, metrics
    except ImportError as error:
        raise missing_extra("rliable", "plots", needed_by) from error
    except Exception as error:  # its bootstraps, arch before version 8, fail in the middle of an import with pandas 3
        reason = f"{type(error).__name__}: {error}"
        raise SettingError(f'rliable cannot be imported ({reason}); run: pip install "lightning_rl[plots]"') from error
    return library, metrics


def iqm(scores: np.ndarray) -> Any:
    """The interquartile mean over seeds [R, …]: the mean without the lowest and the highest quarter, each rounded down to whole seeds.

    What `rliable.metrics.aggregate_iqm` says of one environment, of all points of a curve at once. With three seeds it is their mean.
    """
    quarter = len(scores) // 4
    return np.sort(scores, axis=0)[quarter : len(scores) - quarter].mean(axis=0)


def iqm_interval(scores: np.ndarray) -> np.ndarray | None:
    """The 95 % interval [2, G] of the interquartile mean of curves [R, G]: seeds are drawn again, at each point by itself.

    None where it would say nothing: there is one seed.
    """
    if len(scores) == 1:
        return None
    library, _ = rliable("compare")
    with drawn_alike():
        _, intervals = library.get_interval_estimates({"": scores[:, None]}, lambda drawn: iqm(drawn[:, 0]), reps=REPS)
    return intervals[""]


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray | None]:
    """How likely a run of one group [R] ends higher than one of the other [Q], ties counted half; and its 95 % interval [2].

    The interval is None where a group has one seed.
    """
    library, metrics = rliable("compare")
    scores = [x[:, None], y[:, None]]
    if min(len(x), len(y)) == 1:
        return float(metrics.probability_of_improvement(*scores)), None
    with drawn_alike():
        points, intervals = library.get_interval_estimates({"": scores}, metrics.probability_of_improvement, reps=REPS)
    return float(points[""]), intervals[""].ravel()


@contextmanager
def drawn_alike() -> Iterator[None]:
    """rliable draws from numpy's global generator: here it begins alike each time, and goes on afterwards as if nothing had been drawn."""
    state = np.random.get_state()
    np.random.seed(0)
    try:
        yield
    finally:
        np.random.set_state(state)
