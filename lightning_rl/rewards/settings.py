"""Reward signals from settings: a name, and beside it what is different from its defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_rl.distributions import Distribution
from lightning_rl.errors import SettingError, nearest
from lightning_rl.rewards.gail import GAIL
from lightning_rl.rewards.intrinsic import RND, Curiosity
from lightning_rl.rewards.signal import Extrinsic, RewardSignal
from lightning_rl.spaces import Spaces

if TYPE_CHECKING:
    SignalSettings = Any  # given as a mapping, and a `ModuleDict` of signals from then on
else:
    SignalSettings = dict[str, Any]
SIGNALS: dict[str, type[RewardSignal]] = {"extrinsic": Extrinsic, "curiosity": Curiosity, "rnd": RND, "gail": GAIL}
GIVEN = ("self", "spaces", "actions")
"""Arguments that are no settings."""


def make_signals(
    settings: Mapping[str, Mapping[str, Any] | None] | None,
    extrinsic: Mapping[str, Any],
    spaces: Spaces,
    actions: Callable[[], Distribution],
) -> dict[str, RewardSignal]:
    """The signals of `settings`, merged over the environment's reward; null leaves a signal out, `{}` takes its defaults.

    Args:
        settings: name → settings.
        extrinsic: those of the environment's reward that have names of their own in an algorithm.
        spaces: of the environment.
        actions: the policy's distribution, when it is there.

    Raises:
        SettingError: no signal is left, or one with an unknown name or setting.
    """
    if settings is not None and not isinstance(settings, Mapping):
        raise SettingError(f"reward_signals must be a mapping of names to settings, got {settings!r}")
    chosen: dict[str, Mapping[str, Any] | None] = {"extrinsic": {}, **(settings or {})}
    signals = {}
    for name, setting in chosen.items():
        if name not in SIGNALS:
            raise SettingError(f"reward_signals.{name} is not a reward signal{nearest(name, SIGNALS)}")
        if setting is None:
            continue
        if not isinstance(setting, Mapping):
            raise SettingError(f"reward_signals.{name} must be a mapping of settings, got {setting!r}")
        signals[name] = _make(name, {**(extrinsic if name == "extrinsic" else {}), **setting}, spaces, actions)
    if not signals:
        raise SettingError("reward_signals: none is left; a policy needs one, if only {extrinsic: {strength: 0}}")
    return signals


def signal_settings(name: str) -> list[str]:
    """The names of a signal's settings."""
    return [each for each in inspect.signature(SIGNALS[name]).parameters if each not in GIVEN]


def _make(name: str, settings: Mapping[str, Any], spaces: Spaces, actions: Callable[[], Distribution]) -> RewardSignal:
    names = signal_settings(name)
    for key in settings:
        if key not in names:
            raise SettingError(f"reward_signals.{name}.{key} is not a setting{nearest(str(key), names)}")
    parameters = inspect.signature(SIGNALS[name]).parameters
    for key in names:
        if parameters[key].default is inspect.Parameter.empty and key not in settings:
            raise SettingError(f"reward_signals.{name}.{key} is missing")
    given: dict[str, Any] = {key: value for key, value in {"spaces": spaces, "actions": actions}.items() if key in parameters}
    try:
        return SIGNALS[name](**given, **settings)
    except SettingError as error:
        if str(error).startswith("reward_signals"):
            raise
        raise SettingError(f"reward_signals.{name}: {error}") from error
