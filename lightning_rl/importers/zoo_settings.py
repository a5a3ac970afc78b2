"""Stable-Baselines3's settings: their names and defaults, and what they become."""

from __future__ import annotations

from typing import Any

from lightning_rl.errors import SettingError, check_choice
from lightning_rl.importers.config import Config, Given, check_known, read_expression

ALGORITHMS = {"ppo": "PPO", "a2c": "A2C", "dqn": "DQN", "sac": "SAC", "td3": "TD3", "ddpg": "TD3"}
ELSEWHERE = {
    "ars": "PPO and SAC learn the same tasks",
    "crossq": "SAC is nearest",
    "her": "SAC is nearest, without hindsight",
    "ppo_lstm": "it is PPO with model.memory LSTM: take ppo.yml",
    "qrdqn": "it is DQN with model.distribution quantiles: take dqn.yml",
    "tqc": "SAC is nearest",
    "trpo": "PPO is nearest",
}
"""The zoo's other algorithms, and what is here instead."""

_SCHEDULED = {"learning_rate": "model.learning_rate"}
_COMMON = {name: f"model.{name}" for name in ("gamma",)}
_ON_POLICY = {name: f"model.{name}" for name in ("n_steps", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm", "normalize_advantage")}
_OFF_POLICY = {name: f"model.{name}" for name in ("buffer_size", "batch_size", "learning_starts", "tau", "n_steps")}
_OFF_POLICY |= {"optimize_memory_usage": "model.replay.optimize_memory_usage"}
_EXPLORATION = ("exploration_fraction", "exploration_initial_eps", "exploration_final_eps", "max_grad_norm")

RENAMED: dict[str, dict[str, str]] = {
    "ppo": _COMMON | _ON_POLICY | {"n_epochs": "model.n_epochs", "target_kl": "model.target_kl"},
    "a2c": _COMMON | _ON_POLICY | {"use_rms_prop": "model.use_rms_prop", "rms_prop_eps": "model.rms_prop_eps"},
    "dqn": _COMMON | _OFF_POLICY | {name: f"model.{name}" for name in _EXPLORATION},
    "sac": _COMMON | _OFF_POLICY | {name: f"model.{name}" for name in ("ent_coef", "target_entropy", "target_update_interval")},
    "td3": _COMMON | _OFF_POLICY | {name: f"model.{name}" for name in ("policy_delay", "target_policy_noise", "target_noise_clip")},
    "ddpg": _COMMON | _OFF_POLICY,
}
"""Settings with the same meaning: theirs → ours."""

SCHEDULED: dict[str, dict[str, str]] = {
    "ppo": _SCHEDULED | {"clip_range": "model.clip_range", "clip_range_vf": "model.clip_range_vf"},
    **{algorithm: _SCHEDULED for algorithm in ("a2c", "dqn", "sac", "td3", "ddpg")},
}
"""Numbers that may be schedules, `lin_0.001`."""
DIFFERENT = {"clip_range_vf": "the larger of the clipped and the unclipped loss; Stable-Baselines3 takes the clipped one"}
"""Settings whose name and range are the same, and whose effect is not."""

OFTEN = {"train_freq", "gradient_steps"}
OTHERS: dict[str, set[str]] = {
    "ppo": {"batch_size"},
    "a2c": set(),
    "dqn": OFTEN | {"target_update_interval"},
    "sac": OFTEN | {"noise_type", "noise_std"},
    "td3": OFTEN | {"noise_type", "noise_std"},
    "ddpg": OFTEN | {"noise_type", "noise_std"},
}
"""Settings that take more than a new name."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {"n_steps": 2048, "batch_size": 64, "n_epochs": 10},
    "a2c": {},
    "dqn": {"target_update_interval": 10_000, "train_freq": 4},
    "sac": {},
    "td3": {},
    "ddpg": {},
}
"""What Stable-Baselines3 has unless given, where it is not what we have."""

NET_ARCH: dict[str, list[int]] = {"td3": [400, 300], "ddpg": [400, 300]}
IMAGE_NET_ARCH: dict[str, list[int]] = {"ppo": [], "a2c": [], "dqn": []}
"""Hidden layers unless given, where they are not what we have; the second behind the encoder of CnnPolicy."""

ZOO = {"n_timesteps", "n_envs", "normalize", "policy", "policy_kwargs", "env_kwargs", "env_wrapper", "frame_stack", "seed"}

_SDE = "exploration that depends on the state is not here; noise is drawn anew at each step"
DROPPED = {
    **dict.fromkeys(
        (
            "use_sde",
            "sde_sample_freq",
            "use_sde_at_warmup",
            "full_std",
            "use_expln",
            "squash_output",
            "sde_net_arch",
            "log_std_init of use_sde",
        ),
        _SDE,
    ),
    "callback": "see trainer.callbacks",
    "vec_env_wrapper": "see env.wrappers",
    "vec_env_kwargs": "see env.vectorization",
    "monitor_kwargs": "episodes are counted without it",
    "replay_buffer_class": "memories are drawn alike, or by replay.prioritized",
    "replay_buffer_kwargs": "time limits are no terminations here; see replay",
    "rollout_buffer_class": "rollouts are what they are here",
    "rollout_buffer_kwargs": "rollouts are what they are here",
    "stats_window_size": "it is 100 episodes here",
    "delta_std": "of another algorithm",
    "noise_std_final": "the noise stays the same",
    "verbose": "see trainer.enable_progress_bar",
    "device": "see trainer.accelerator",
    "tensorboard_log": "see trainer.logger",
    "optimizer_class": "the optimizer is Adam here, or RMSprop for A2C",
    "optimizer_kwargs": "the optimizer's arguments are what they are here",
    "features_extractor_class": "see model.encoder",
    "features_extractor_kwargs": "see model.encoder",
    "normalize_images": "images are divided by 255",
}
"""Why a setting that is known is left out."""

POLICY = {"net_arch", "activation_fn", "log_std_init", "ortho_init", "n_critics", "share_features_extractor", "optimizer_class"}
POLICY |= {"optimizer_kwargs", "features_extractor_class", "features_extractor_kwargs", "normalize_images"}
POLICY |= {"full_std", "use_expln", "squash_output", "sde_net_arch"}
ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu", "SiLU": "silu", "ELU": "elu", "LeakyReLU": "leaky_relu", "GELU": "gelu"}

WRAPPERS: dict[str, tuple[str, dict[str, str], str]] = {
    "TimeFeatureWrapper": ("TimeAwareObservation", {}, "the time that passed, not what is left"),
    "FrameSkip": ("RepeatAction", {"skip": "num_repeats"}, ""),
    "ResizeObservation": ("ResizeObservation", {"shape": "shape"}, ""),
    "YAMLCompatResizeObservation": ("ResizeObservation", {"shape": "shape"}, ""),
    "GrayScaleObservation": ("GrayscaleObservation", {"keep_dim": "keep_dim"}, ""),
    "FlatObsWrapper": ("minigrid.wrappers.FlatObsWrapper", {}, ""),
}
"""Wrappers by their last name: ours, its arguments by their names, and what is different."""
WRAPPER_DEFAULTS: dict[str, dict[str, Any]] = {"TimeAwareObservation": {"normalize_time": True}, "RepeatAction": {"num_repeats": 4}}


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
