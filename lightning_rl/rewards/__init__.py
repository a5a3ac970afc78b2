"""Build reward signals from settings: each fills one reward stream of a rollout, with its own discount."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_rl.distributions import Distribution
from lightning_rl.errors import SettingError, check_names, nearest
from lightning_rl.rewards.gail import GAIL
from lightning_rl.rewards.intrinsic import RND, Curiosity
from lightning_rl.rewards.signal import Extrinsic, RewardSignal
from lightning_rl.spaces import Spaces

if TYPE_CHECKING:
    SignalSettings = Any  # passed as a mapping, then converted to a `ModuleDict` of signals
else:
    SignalSettings = dict[str, Any]
SIGNALS: dict[str, type[RewardSignal]] = {"extrinsic": Extrinsic, "curiosity": Curiosity, "rnd": RND, "gail": GAIL}


def make_signals(
    settings: Mapping[str, Mapping[str, object] | None] | None,
    extrinsic: Mapping[str, object],
    spaces: Spaces,
    actions: Callable[[], Distribution],
) -> dict[str, RewardSignal]:
    """Build the signals of `settings`, in addition to the environment's reward; null removes a signal, `{}` means its defaults.

    Args:
        extrinsic: settings of the environment's reward that algorithms have under other names.
        actions: returns the policy's distribution, after it is built.

    Raises:
        SettingError: no signal is left, or a name or setting is unknown.
    """
    if settings is not None and not isinstance(settings, Mapping):
        raise SettingError(f"reward_signals must be a mapping of names to settings, got {settings!r}")
    signals = {}
    for name, setting in {"extrinsic": {}, **(settings or {})}.items():
        if name not in SIGNALS:
            raise SettingError(f"reward_signals.{name} is not a reward signal{nearest(name, SIGNALS)}")
        if setting is None:
            continue
        if not isinstance(setting, Mapping):
            raise SettingError(f"reward_signals.{name} must be a mapping of settings, got {setting!r}")
        signals[name] = _make(name, {**(extrinsic if name == "extrinsic" else {}), **setting}, {"spaces": spaces, "actions": actions})
    if not signals:
        raise SettingError("reward_signals: no signal is left; a policy needs one, at least {extrinsic: {strength: 0}}")
    return signals


def _make(name: str, settings: Mapping[str, object], context: Mapping[str, object]) -> RewardSignal:
    parameters = inspect.signature(SIGNALS[name]).parameters
    known = parameters.keys() - context.keys()
    check_names(f"reward_signals.{name}.", settings, known)
    for key in known - settings.keys():
        if parameters[key].default is inspect.Parameter.empty:
            raise SettingError(f"reward_signals.{name}.{key} is missing")
    arguments: dict[str, Any] = {key: value for key, value in context.items() if key in parameters} | dict(settings)
    try:
        return SIGNALS[name](**arguments)
    except SettingError as error:
        if str(error).startswith("reward_signals"):
            raise
        raise SettingError(f"reward_signals.{name}: {error}") from error
