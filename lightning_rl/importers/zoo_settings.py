"""Convert Stable-Baselines3's settings: their names and defaults, and our equivalents."""

import math
from typing import Any, get_args

from lightning_rl.data.replay.hindsight import Strategy
from lightning_rl.errors import SettingError, check_choice, check_names
from lightning_rl.importers.config import Config, Settings, read_expression
from lightning_rl.settings.yaml_files import Plain

ALGORITHMS = {
    "ppo": "PPO",
    "ppo_lstm": "PPO",
    "a2c": "A2C",
    "dqn": "DQN",
    "qrdqn": "DQN",
    "sac": "SAC",
    "tqc": "TQC",
    "crossq": "CrossQ",
    "td3": "TD3",
    "ddpg": "TD3",
    "trpo": "TRPO",
    "ars": "ARS",
}
ON_POLICY = ("ppo", "ppo_lstm", "a2c", "trpo")
OFF_POLICY = ("dqn", "qrdqn", "sac", "tqc", "crossq", "td3", "ddpg")
MISSING = {
    "her": "it is replay.relabel of SAC, TQC, TD3 and DQN, and the zoo does not read her.yml any more: take tqc.yml",
}
"""The zoo's other files, and what to use instead."""

_ON_POLICY = ("gamma", "n_steps", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm", "normalize_advantage")
_OFF_POLICY = ("gamma", "buffer_size", "batch_size", "learning_starts", "tau", "n_steps", "optimize_memory_usage")
_TRUST_REGION = ("cg_max_steps", "cg_damping", "line_search_shrinking_factor", "line_search_max_iter")
_EXPLORATION = ("exploration_fraction", "exploration_initial_eps", "exploration_final_eps")
SAME = {
    **dict.fromkeys(("ppo", "ppo_lstm"), (*_ON_POLICY, "n_epochs", "target_kl")),
    "a2c": (*_ON_POLICY, "use_rms_prop", "rms_prop_eps"),
    "trpo": ("gamma", "n_steps", "gae_lambda", "normalize_advantage", "target_kl", "n_critic_updates", *_TRUST_REGION),
    "dqn": (*_OFF_POLICY, *_EXPLORATION, "max_grad_norm"),
    "qrdqn": (*_OFF_POLICY, *_EXPLORATION, "max_grad_norm"),
    "sac": (*_OFF_POLICY, "ent_coef", "target_entropy"),
    "tqc": (*_OFF_POLICY, "ent_coef", "target_entropy"),
    "crossq": (*[name for name in _OFF_POLICY if name != "tau"], "ent_coef", "target_entropy", "policy_delay"),
    "ars": ("alive_bonus_offset", "zero_policy"),
    "td3": (*_OFF_POLICY, "policy_delay", "target_policy_noise", "target_noise_clip"),
    "ddpg": _OFF_POLICY,
}
"""Settings of the same name and meaning."""
SCHEDULED = {
    name: ("learning_rate", "clip_range", "clip_range_vf") if model == "PPO" else ("learning_rate",) for name, model in ALGORITHMS.items()
}
"""Numbers that may be schedules, `lin_0.001`."""
DIFFERENT = {"clip_range_vf": "the larger of the clipped and the unclipped loss; Stable-Baselines3 takes the clipped one"}
"""Settings of the same name with a different effect."""
OTHERS = {
    "ppo": {"batch_size"},
    "ppo_lstm": {"batch_size"},
    "a2c": set(),
    "trpo": {"batch_size", "sub_sampling_factor"},
    "ars": {"n_delta", "n_top", "delta_std"},
    **{name: {"train_freq", "gradient_steps", "target_update_interval"} for name in ("dqn", "qrdqn")},
    **{name: {"train_freq", "gradient_steps", "noise_type", "noise_std"} for name in ("crossq", "td3", "ddpg")},
    "sac": {"train_freq", "gradient_steps", "noise_type", "noise_std", "target_update_interval"},
    "tqc": {"train_freq", "gradient_steps", "noise_type", "noise_std", "target_update_interval", "top_quantiles_to_drop_per_net"},
}
"""Settings that need more than a copy."""
ZOO = {"n_timesteps", "n_envs", "normalize", "policy", "policy_kwargs", "env_kwargs", "env_wrapper", "frame_stack", "seed"}

DEFAULTS: dict[str, Plain] = {
    "ppo": {"n_steps": 2048, "batch_size": 64, "n_epochs": 10},
    "ppo_lstm": {"n_steps": 128, "batch_size": 128, "n_epochs": 10},
    "trpo": {"n_steps": 2048, "batch_size": 128},
    "dqn": {"target_update_interval": 10_000, "train_freq": 4},
    "qrdqn": {
        "learning_rate": 5e-5,
        "learning_starts": 100,
        "target_update_interval": 10_000,
        "train_freq": 4,
        "exploration_fraction": 0.005,
        "exploration_final_eps": 0.01,
    },
}
"""Stable-Baselines3's defaults that differ from ours."""
QUANTILES = {"qrdqn": 200, "tqc": 25}
NET_ARCH = {"td3": [400, 300], "ddpg": [400, 300]}
IMAGE_NET_ARCH: dict[str, list[int]] = {name: [] for name in (*ON_POLICY, "dqn", "qrdqn")}
"""Default hidden layers that differ from ours; IMAGE_NET_ARCH: those behind the encoder of CnnPolicy."""

EXPLORING = (*ON_POLICY, "sac", "tqc", "crossq")
"""Algorithms that support state-dependent exploration."""
_SDE = ("use_sde", "sde_sample_freq", "use_sde_at_warmup", "full_std", "use_expln", "squash_output", "sde_net_arch")
STEPS_OF_AN_EPISODE = 64
"""How many steps an exploration function is kept here if it is kept for an episode there."""
DROPPED = {
    **dict.fromkeys(_SDE, "without effect there unless use_sde explores"),
    "sub_sampling_factor": "the Fisher matrix is that of all rows here",
    "lstm_kwargs": "an LSTM has no other settings here",
    "callback": "see trainer.callbacks",
    "vec_env_wrapper": "see env.wrappers",
    "vec_env_kwargs": "see env.vectorization",
    "monitor_kwargs": "episodes are counted without it",
    "replay_buffer_class": "transitions are drawn uniformly, or by replay.prioritized",
    "replay_buffer_kwargs": "time limits are not terminations here; see replay",
    **dict.fromkeys(("rollout_buffer_class", "rollout_buffer_kwargs"), "rollouts have no settings here"),
    "stats_window_size": "it is 100 episodes here",
    "noise_std_final": "the noise stays the same",
    "verbose": "see trainer.enable_progress_bar",
    "device": "see trainer.accelerator",
    "tensorboard_log": "see trainer.logger",
    "optimizer_class": "the optimizer is Adam here, or RMSprop for A2C",
    "optimizer_kwargs": "the optimizer has no settings here",
    **dict.fromkeys(("features_extractor_class", "features_extractor_kwargs"), "see model.encoder"),
    "normalize_images": "images are divided by 255",
}
"""Why a known setting is left out if no conversion used it."""

HINDSIGHT = {
    "copy_info_dict": "rows have no info here; compute_reward gets an empty one",
    **dict.fromkeys(("handle_timeout_termination", "max_episode_length", "n_envs", "online_sampling"), "not needed here"),
}
"""Why other arguments of HerReplayBuffer are left out."""

POLICY = {"net_arch", "activation_fn", "log_std_init", "ortho_init", "n_critics", "share_features_extractor", "optimizer_class"}
POLICY |= {"optimizer_kwargs", "features_extractor_class", "features_extractor_kwargs", "normalize_images"}
RECURRENT = {"lstm_hidden_size", "n_lstm_layers", "shared_lstm", "enable_critic_lstm", "lstm_kwargs"}
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
"""Wrappers by class name: our wrapper, our names of its arguments by theirs, and what is different."""
MASKED = "NoVel"
"""What the zoo adds to the name of an environment whose velocities it hides."""
VELOCITIES = {
    "CartPole": [1, 3],
    "MountainCar": [1],
    "MountainCarContinuous": [1],
    "Pendulum": [2],
    "LunarLander": [2, 3, 5],
    "LunarLanderContinuous": [2, 3, 5],
}
"""Where these environments have the velocities that the zoo hides."""
WRAPPER_DEFAULTS: dict[str, Plain] = {"TimeAwareObservation": {"normalize_time": True}, "RepeatAction": {"num_repeats": 4}}


def set_policy(config: Config, settings: Settings, algorithm: str) -> None:
    """Convert `policy` and `policy_kwargs`; settings that do not exist here stay in `settings`."""
    recurrent, place = "Lstm" * (algorithm == "ppo_lstm"), settings.place("policy_kwargs")
    kinds = [f"{network}{recurrent}Policy" for network in ("Mlp", "Cnn", "MultiInput")]
    kind = settings.take("policy", kinds[0])
    check_choice(settings.place("policy"), kind, ["LinearPolicy"] * (algorithm == "ars") + kinds)
    values = read_expression(settings.take("policy_kwargs", {}), place)
    if not isinstance(values, dict):
        raise SettingError(f"{place} must be a mapping such as dict(net_arch=[64, 64]), got {values!r}")
    specific = {"n_quantiles"} if algorithm in QUANTILES else RECURRENT if recurrent else set()
    check_names(f"{place}.", values, POLICY | specific, " of a policy")
    inner = Settings(values, {name: f"{place}.{name}" for name in values})
    if algorithm == "ars":
        is_linear = kind == "LinearPolicy"
        config.set("model.net_arch", [] if is_linear else [64, 64], "with a bias; there without" * is_linear)
        if not is_linear:
            config.set("model.activation", "relu")
        if inner.take("squash_output", not is_linear):
            config.set("model.action_dist", "tanh_normal")
    sees_images = kind.startswith("Cnn")
    default = (IMAGE_NET_ARCH if sees_images else NET_ARCH).get(algorithm)
    if "net_arch" in inner or default is not None:
        set_widths(config, inner.take("net_arch", default), inner.place("net_arch"), algorithm)
    if sees_images:
        config.set("model.encoder", "nature_cnn")
    if recurrent:
        set_memory(config, inner, sees_images)
    if "activation_fn" in inner:
        name = str(inner.take("activation_fn")).rpartition(".")[2]
        check_choice(inner.place("activation_fn"), name, ACTIVATIONS)
        config.set("model.activation", ACTIVATIONS[name])
    extractor = inner.mapping("features_extractor_kwargs")
    if "features_dim" in extractor:
        config.set("model.encoder_features", extractor.pop("features_dim"))
    inner.values |= {f"features_extractor_kwargs.{name}": value for name, value in extractor.items()}
    explores = algorithm in EXPLORING and settings.values.get("use_sde")
    if algorithm in ON_POLICY:
        if "log_std_init" in inner:
            config.set("model.log_std_init", inner.take("log_std_init"))
        # TRPO shares nothing here, and a memory is shared with its encoder
        if inner.take("share_features_extractor", True) is False and algorithm not in ("trpo", "ppo_lstm"):
            config.set("model.share_encoder", False)
        if algorithm == "a2c" and "RMSprop" in str(inner.values.get("optimizer_class")):
            remark = "outside the square root; inside it there" if "TF" in inner.take("optimizer_class") else ""
            optimizer = inner.mapping("optimizer_kwargs")
            config.set("model.rms_prop_eps", optimizer.pop("eps", 1e-5), remark)
            inner.values |= {f"optimizer_kwargs.{name}": value for name, value in optimizer.items()}
        if inner.take("ortho_init") is False:
            config.set("model.ortho_init", False)
    else:
        if "n_critics" in inner:
            config.set("model.n_critics", inner.integer("n_critics", 2))
        if algorithm in QUANTILES:
            config.set("model.n_quantiles", inner.integer("n_quantiles", QUANTILES[algorithm]))
        if "log_std_init" in inner and explores:
            config.set("model.log_std_init", inner.take("log_std_init"))
        elif "log_std_init" in inner:
            config.note(f"policy_kwargs.log_std_init {inner.take('log_std_init')} dropped: σ is an output of the network here")
        inner.take("share_features_extractor")
        inner.take("ortho_init")
    settings.values |= inner.values


def set_memory(config: Config, inner: Settings, sees_images: bool) -> None:
    """Convert the LSTM of sb3-contrib's recurrent policies; policy and value share theirs only together with the encoder here."""
    size = inner.integer("lstm_hidden_size", 256)
    config.set("model.memory.init_args.memory_size", 2 * size, f"lstm_hidden_size {size} there, which does not count the cell")
    shares_encoder = sees_images and inner.values.get("share_features_extractor", True)
    if inner.take("shared_lstm", False):
        config.set("model.share_encoder", True, "the value's gradient changes the LSTM, too; there it does not")
    elif inner.take("enable_critic_lstm", True):
        if shares_encoder:
            config.note("policy and value share the image encoder there; here each has its own in front of its LSTM")
    elif shares_encoder:
        config.set("model.share_encoder", True, "enable_critic_lstm false: the value sees no LSTM there, but the same image encoder")
    else:
        config.note("enable_critic_lstm false dropped: the value has an LSTM of its own, as the policy has")
    inner.values.pop("enable_critic_lstm", None)
    if (layers := inner.integer("n_lstm_layers", 1)) > 1:
        config.note(f"n_lstm_layers {layers} dropped: a memory has one layer here")


def set_exploration(config: Config, settings: Settings, algorithm: str, steps: float) -> None:
    """Convert state-dependent exploration, after `set_policy`.

    Args:
        steps: length of a rollout per environment, which begins with a new function there; infinity if it is an episode.
    """
    if algorithm not in EXPLORING or not settings.take("use_sde", False):
        return
    config.set("model.use_sde", True)
    freq = settings.integer("sde_sample_freq", -1, low=-1)
    if 0 < freq < steps:
        config.set("model.sde_sample_freq", freq, f"and again after each {steps} there" if math.isfinite(steps) and steps % freq else "")
    elif steps == math.inf:
        config.set("model.sde_sample_freq", STEPS_OF_AN_EPISODE, "those of an episode there")
    for name in ("use_expln", "full_std"):
        if name in settings:
            config.set(f"model.{name}", settings.take(name))
    if settings.take("squash_output", False) and algorithm in ON_POLICY:
        config.set("model.action_dist", "tanh_normal")
    if settings.take("use_sde_at_warmup", False):
        config.set("model.warmup", "policy")


def set_widths(config: Config, setting: object, where: str, algorithm: str) -> None:
    """Convert `[64, 64]`, `dict(pi=…, vf=…)` or `[64, dict(pi=…, vf=…)]`; raises `SettingError` for anything else."""
    parts = setting if isinstance(setting, list) else [setting]
    shared, last = (parts[:-1], parts[-1]) if parts and isinstance(parts[-1], dict) else (parts, {})
    policy_widths = last.get("pi", [])
    others: Any = last.get("qf", policy_widths) if algorithm in OFF_POLICY else last.get("vf", [])
    widths = [*shared, *policy_widths] if isinstance(policy_widths, list) else []
    if last.keys() - {"pi", "vf", "qf"} or not all(isinstance(width, int) for width in widths) or (last and not isinstance(others, list)):
        raise SettingError(f"{where} must be a list of widths such as [64, 64], or of pi and vf, got {setting!r}")
    if algorithm in OFF_POLICY:
        config.set("model.net_arch", widths)
        if others != policy_widths or algorithm == "crossq":  # CrossQ's critics are wide by default
            config.set("model.critic_net_arch", [*shared, *others])
    else:
        both = widths if others == policy_widths else {"pi": widths, "vf": [*shared, *others]}
        config.set("model.net_arch", both, "shared by policy and value there, two networks here" if shared and last else "")


def set_hindsight(config: Config, settings: Settings) -> None:
    """Convert `replay_buffer_class: HerReplayBuffer` and its arguments; leave other classes alone."""
    if str(settings.values.get("replay_buffer_class")).rpartition(".")[2] != "HerReplayBuffer":
        return
    settings.take("replay_buffer_class")
    place = settings.place("replay_buffer_kwargs")
    values = read_expression(settings.take("replay_buffer_kwargs", {}), place)
    if not isinstance(values, dict):
        raise SettingError(f"{place} must be a mapping such as dict(n_sampled_goal=4), got {values!r}")
    names = ("goal_selection_strategy", "n_sampled_goal")
    check_names(f"{place}.", values, (*names, *HINDSIGHT), " of HerReplayBuffer")
    inner = Settings(values, {name: f"{place}.{name}" for name in values})
    strategy = str(inner.take(names[0], "future")).rpartition(".")[2].lower()
    check_choice(inner.place(names[0]), strategy, get_args(Strategy))
    config.set("model.replay.relabel.strategy", strategy)
    config.set("model.replay.relabel.k", inner.integer(names[1], 4))
    for wrapper in config.settings.get("model.env.wrappers", ()):
        if wrapper["class_path"] == "TimeAwareObservation":
            wrapper["init_args"]["flatten"] = False  # goals are found by their names
    config.drop(inner.values, HINDSIGHT)
