"""What Stable-Baselines3 and its zoo call their settings, what they are unless given, and what they become here; as data."""

from __future__ import annotations

from typing import Any

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
