"""`policy` and `policy_kwargs` of Stable-Baselines3: networks and their first weights."""

from __future__ import annotations

from typing import Any

from lightning_rl.errors import SettingError, check_choice
from lightning_rl.importing.config import Config
from lightning_rl.importing.expressions import read_expression
from lightning_rl.importing.given import Given, check_known
from lightning_rl.importing.zoo_tables import ACTIVATIONS, IMAGE_NET_ARCH, NET_ARCH, POLICY

ON_POLICY = ("ppo", "a2c")
SDE = {"log_std_init": "log_std_init of use_sde"}
"""What means something else with use_sde."""


def policy(config: Config, given: Given, algorithm: str) -> None:
    """What a policy is made of; what is not here stays in `given`.

    Raises:
        SettingError: an unknown policy, or a policy_kwargs that cannot be understood.
    """
    kind, place = given.take("policy", "MlpPolicy"), given.place("policy_kwargs")
    check_choice(given.place("policy"), kind, ("MlpPolicy", "CnnPolicy", "MultiInputPolicy"))
    settings = read_expression(given.take("policy_kwargs", {}), place)
    if not isinstance(settings, dict):
        raise SettingError(f"{place} must be a mapping such as dict(net_arch=[64, 64]), got {settings!r}")
    check_known(settings, POLICY, "a policy", f"{place}.")
    inner = Given(settings, {name: f"{place}.{name}" for name in settings})
    unless_given = (IMAGE_NET_ARCH if kind == "CnnPolicy" else NET_ARCH).get(algorithm)
    if "net_arch" in inner or unless_given is not None:
        widths, remark = net_arch(inner.take("net_arch", unless_given), inner.place("net_arch"))
        config.set("model.net_arch", widths, remark)
    if kind == "CnnPolicy":
        config.set("model.encoder", "nature_cnn")
    if "activation_fn" in inner:
        name = str(inner.take("activation_fn")).rpartition(".")[2]
        check_choice(inner.place("activation_fn"), name, ACTIVATIONS)
        config.set("model.activation", ACTIVATIONS[name])
    extractor = inner.take("features_extractor_kwargs", {})
    if isinstance(extractor, dict) and "features_dim" in extractor:
        config.set("model.encoder_features", extractor["features_dim"])
    if given.settings.get("use_sde"):
        inner.settings = {SDE.get(name, name): value for name, value in inner.settings.items()}
    PARTS[algorithm](config, inner)
    if inner.take("ortho_init") is False and algorithm in ON_POLICY:
        config.note("policy_kwargs.ortho_init dropped: first weights are orthogonal here")
    given.settings |= inner.settings


def on_policy(config: Config, inner: Given) -> None:
    """PPO and A2C."""
    if "log_std_init" in inner:
        config.set("model.log_std_init", inner.take("log_std_init"))
    if inner.take("share_features_extractor", True) is False:
        config.set("model.share_encoder", False)
    if config.algorithm == "A2C" and "RMSprop" in str(inner.settings.get("optimizer_class")):
        remark = "outside the square root; inside it there" if "TF" in inner.take("optimizer_class") else ""
        epsilon = inner.mapping("optimizer_kwargs").get("eps", 1e-5)
        config.set("model.rms_prop_eps", epsilon, remark)


def off_policy(config: Config, inner: Given) -> None:
    """DQN, SAC and TD3."""
    if "n_critics" in inner:
        config.set("model.n_critics", inner.integer("n_critics", 2))
    if "log_std_init" in inner:
        config.note(f"policy_kwargs.log_std_init {inner.take('log_std_init')} dropped: σ is what the network says here")
    inner.take("share_features_extractor")


PARTS = {"ppo": on_policy, "a2c": on_policy, "dqn": off_policy, "sac": off_policy, "td3": off_policy, "ddpg": off_policy}


def net_arch(setting: Any, where: str) -> tuple[list[int], str]:
    """Widths for all networks alike, and a remark where they were not: `[64, 64]`, `dict(pi=…, vf=…)`, `[64, dict(pi=…, vf=…)]`.

    Raises:
        SettingError: something else.
    """
    parts = setting if isinstance(setting, list) else [setting]
    shared, last = (parts[:-1], parts[-1]) if parts and isinstance(parts[-1], dict) else (parts, {})
    policy_widths = last.get("pi", [])
    others = next((last[name] for name in ("vf", "qf") if name in last), policy_widths)
    widths = [*shared, *policy_widths] if isinstance(policy_widths, list) else []
    if last.keys() - {"pi", "vf", "qf"} or not all(isinstance(width, int) for width in widths) or (last and not isinstance(others, list)):
        raise SettingError(f"{where} must be a list of widths such as [64, 64], or of pi and vf, got {setting!r}")
    if others != policy_widths:
        return widths, f"of the value too, which has {others} there"
    return widths, "shared by policy and value there, two networks here" if shared and last else ""
