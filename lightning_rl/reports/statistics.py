"""Numbers over few seeds, with what they leave open (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264), by the library rliable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lightning_rl.errors import SettingError, missing_extra

REPS = 2000
"""Resamples of a bootstrap."""


def rliable(needed_by: str) -> Any:
    """The library.

    Raises:
        SettingError: it is not installed, or what it stands on is too new for it.
    """
    try:
        from rliable import library
    except ImportError as error:
        raise missing_extra("rliable", "plots", needed_by) from error
    except Exception as error:  # its bootstraps, arch before version 8, fail in the middle of an import with pandas 3
        reason = f"{type(error).__name__}: {error}"
        raise SettingError(f'rliable cannot be imported ({reason}); run: pip install "lightning_rl[plots]"') from error
    return library


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
    return None if len(scores) == 1 else interval(scores[:, None], lambda drawn: iqm(drawn[:, 0]))


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """How likely a run of one group [R, …] ends higher than one of the other [Q, …]: the share of pairs, ties counted half.

    What `rliable.metrics.probability_of_improvement` says of one environment.
    """
    differences = x.reshape(-1, 1) - y.reshape(1, -1)
    return float(np.mean((differences > 0) + 0.5 * (differences == 0)))


def improvement_interval(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Its 95 % interval [2, 1]; None where a group has one seed."""
    return None if min(len(x), len(y)) == 1 else interval([x[:, None], y[:, None]], probability_of_improvement)


def interval(scores: Any, estimate: Callable[..., Any]) -> np.ndarray:
    """rliable's stratified bootstrap of an estimate, with the same numbers each time.

    It draws from numpy's global generator, which goes on afterwards as if nothing had been drawn.
    """
    library, state = rliable("compare"), np.random.get_state()
    np.random.seed(0)
    try:
        return library.get_interval_estimates({"": scores}, estimate, reps=REPS)[1][""]
    finally:
        np.random.set_state(state)
