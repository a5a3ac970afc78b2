"""Reward signals and behavioral cloning of ML-Agents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning_rl.errors import SettingError, check_range
from lightning_rl.importing.config import Config
from lightning_rl.importing.given import Given, check_known
from lightning_rl.importing.mlagents_tables import CLONING, NETWORK, SIGNAL_EXTRAS, SIGNALS

MINARI = re.compile(r"-v\d+$")
UNITY_DEMO = "name a Minari dataset there (see lightning-rl collect), Unity's .demo files cannot be read"


def reward_signals(config: Config, given: Given, trainer: str, old: bool) -> None:
    """What the policy is paid for.

    Raises:
        SettingError: an unknown signal or setting, or GAIL without demonstrations.
    """
    where = given.place("reward_signals")
    signals = given.mapping("reward_signals") or {"extrinsic": {}}
    check_known(signals, SIGNALS, "ML-Agents", f"{where}.")
    ours = {name: signal(config, name, settings, f"{where}.{name}", old) for name, settings in signals.items()}
    remark = ""
    if len(ours) > 1 and trainer == "sac":
        for settings in ours.values():
            settings["strength"] /= len(ours)
        remark = f"signals add up here and are averaged there: strengths are divided by {len(ours)}"
    elif len(ours) > 1:
        remark = "signals add up here and are averaged there, which is the same for normalized advantages"
    if ours.keys() == {"extrinsic"} and ours["extrinsic"]["strength"] == 1:
        config.set("model.gamma", ours["extrinsic"]["gamma"])
        return
    if remark:
        config.note(f"reward_signals: {remark}")
    for name in {"extrinsic": None, **ours}:
        config.set(f"model.reward_signals.{name}", ours.get(name))


def signal(config: Config, name: str, settings: Any, where: str, old: bool) -> dict[str, Any]:
    """The settings of one reward signal."""
    if settings is not None and not isinstance(settings, Mapping):
        raise SettingError(f"{where} must be a mapping of settings, got {settings!r}")
    check_known(settings or {}, SIGNALS[name], "ML-Agents", f"{where}.")
    given = Given(settings or {}, {each: f"{where}.{each}" for each in SIGNALS[name]})
    ours: dict[str, Any] = {key: given.number(key, default) for key, default in {"strength": 1.0, "gamma": 0.99}.items()}
    network = given.mapping("network_settings")
    check_known(network, NETWORK, "ML-Agents", f"{where}.network_settings.")
    if name == "extrinsic":
        if network:
            config.note(f"{where}.network_settings dropped: the environment's own reward needs no network")
        return ours
    size = given.take("encoding_size", network.get("hidden_units"))
    chosen = {"encoding_size": size, "encoder": network.get("vis_encode_type"), "normalize": network.get("normalize")}
    ours |= SIGNAL_EXTRAS.get(name, {}) | {key: value for key, value in chosen.items() if value is not None}
    if network.get("num_layers", 2) != 2:
        config.note(f"{where}.network_settings.num_layers dropped: a signal's network has 2 layers here")
    ours |= {key: value for key, value in given.settings.items() if value is not None}
    if name == "gail":
        demonstrations(config, ours.get("demo_path"), where)
        if old:  # terminations end today's stream, not that of the seed's era
            ours["ignore_done"] = True
    return ours


def cloning(config: Config, given: Given, trainer: str) -> None:
    """Behavioral cloning, of old `pretraining`.

    Raises:
        SettingError: an unknown setting, or no demonstrations.
    """
    name = "pretraining" if "pretraining" in given else "behavioral_cloning"
    settings, where = given.mapping(name), given.place(name)
    if not settings:
        return
    check_known(settings, CLONING, "ML-Agents", f"{where}.")
    demonstrations(config, settings.get("demo_path"), where)
    for key, value in {key: value for key, value in settings.items() if value is not None}.items():
        if key != "demo_path":
            check_range(f"{where}.{key}", value, 0)
        config.set(f"model.behavioral_cloning.{CLONING[key]}", value)
    if trainer == "sac" and not settings.get("samples_per_update"):
        config.note(f"{name}: a pass over the demonstrations after each update of SAC is one minibatch here")


def demonstrations(config: Config, path: Any, where: str) -> None:
    """A note where they are no Minari dataset.

    Raises:
        SettingError: there are none.
    """
    if not isinstance(path, str):
        raise SettingError(f"{where}.demo_path must name demonstrations, got {path!r}")
    if not MINARI.search(path):
        config.note(f"{where}.demo_path: {UNITY_DEMO}")
