"""What ML-Agents' settings are called, what they are unless given, and what they become here; as data."""

from __future__ import annotations

from typing import Any

HYPERPARAMETERS = {
    *("batch_size", "buffer_size", "learning_rate", "learning_rate_schedule", "beta", "beta_schedule", "epsilon", "epsilon_schedule"),
    *("lambd", "num_epoch", "shared_critic", "buffer_init_steps", "init_entcoef", "tau", "steps_per_update", "save_replay_buffer"),
    "reward_signal_steps_per_update",
}
NETWORK = {"normalize", "hidden_units", "num_layers", "vis_encode_type", "memory", "goal_conditioning_type", "deterministic"}
MEMORY = {"memory_size", "sequence_length"}
BEHAVIOR = {
    *("trainer_type", "hyperparameters", "network_settings", "reward_signals", "behavioral_cloning", "self_play", "init_path"),
    *("max_steps", "time_horizon", "summary_freq", "keep_checkpoints", "checkpoint_interval", "even_checkpoints", "threaded", "framework"),
}
SEED_ERA = {
    *(
        "trainer",
        "num_update",
        "reward_signals_num_update",
        "train_interval",
        "use_recurrent",
        "pretraining",
        "gamma",
        "curiosity_enc_size",
        "curiosity_strength",
    ),
    *("demo_path", "model_path", "summary_path", "use_curiosity", "num_to_record", "curriculum"),
}
"""Settings of a behavior; in old files all of them stand side by side."""

ENCODERS = {name: name for name in ("simple", "nature_cnn", "resnet", "match3", "fully_connected")} | {"default": "simple"}

SIGNAL = {"strength", "gamma", "learning_rate", "network_settings", "encoding_size"}
SIGNALS = {
    "extrinsic": {"strength", "gamma", "network_settings"},
    "curiosity": SIGNAL,
    "rnd": SIGNAL,
    "gail": SIGNAL | {"demo_path", "use_actions", "use_vail"},
}
SIGNAL_EXTRAS: dict[str, dict[str, Any]] = {"rnd": {"normalize": False, "normalize_reward": False}}
"""What our signals do that theirs do not."""

CLONING = {
    **{name: name for name in ("demo_path", "strength", "steps", "batch_size", "samples_per_update")},
    "num_epoch": "n_epochs",
}

DECAYING: dict[str, tuple[str, float, float]] = {
    "learning_rate": ("model.learning_rate", 3e-4, 0.0),
    "epsilon": ("model.clip_range", 0.2, 0.1),
    "beta": ("model.ent_coef", 5e-3, 1e-5),
}
"""Numbers that may fall over the run: theirs → ours, what theirs is unless given, and where it ends."""
COMMON: dict[str, tuple[str, int]] = {"max_steps": ("model.max_env_steps", 500_000), "summary_freq": ("model.log_interval", 50_000)}
"""Integers of any trainer: theirs → ours, and what theirs is unless given."""
NUMBERS: dict[str, dict[str, tuple[str, float]]] = {
    "ppo": {"lambd": ("model.gae_lambda", 0.95)},
    "sac": {"tau": ("model.tau", 0.005)},
}
INTEGERS: dict[str, dict[str, tuple[str, int]]] = {
    "ppo": {"num_epoch": ("model.n_epochs", 3)},
    "sac": {"buffer_size": ("model.buffer_size", 50_000)},
}

ALIKE: dict[str, dict[str, tuple[Any, str]]] = {
    "ppo": {
        "normalize_advantage": (True, "in each minibatch; theirs once for all of a buffer"),
        "max_grad_norm": (None, "they do not clip gradients"),
        "ratio": ("per_dim", "they clip the ratio of each dimension and branch"),
        "activation": ("silu", ""),
        "log_std_init": (-1.1, "they divide continuous actions by 3: σ 1 there is 1/3 here"),
    },
    "sac": {
        "value_network": (True, "as theirs: a state value with a target, the first critic for the policy"),
        "warmup": ("policy", "they begin with the untrained policy"),
        "target_entropy_scale": (0.2, "of choices; theirs is 0.2 log n too, with a temperature for each branch"),
        "activation": ("silu", ""),
    },
}
"""Settings of ours that make an algorithm theirs, and why."""

DROPPED = {
    "framework": "it is PyTorch here",
    "threaded": "--model.threaded true of PPO and SAC steps environments during learning, with a policy that is one iteration old",
    "self_play": "there is no self-play here; the opponent is part of the environment",
    "init_path": "begin with the weights of another run by --init_from",
    "time_horizon": "episodes are not cut for a replay buffer",
    "deterministic": "evaluations are deterministic here unless evaluation.deterministic says otherwise",
    "goal_conditioning_type": "name the observations that tell the goal in model.goals",
    "gamma": "an old name; each reward signal has its own",
    "curiosity_enc_size": "an old name of reward_signals.curiosity.encoding_size",
    "curiosity_strength": "an old name of reward_signals.curiosity.strength",
    "use_curiosity": "an old name of reward_signals.curiosity",
    "demo_path": "an old name; reward_signals.gail and behavioral_cloning have their own",
    "model_path": "runs lie in trainer.default_root_dir",
    "summary_path": "runs lie in trainer.default_root_dir",
    "num_to_record": "of an old recorder",
    "memory_size": "nothing is remembered without use_recurrent",
    "sequence_length": "nothing is remembered without use_recurrent",
    "save_replay_buffer": "PPO has none",
}
"""Why a setting that is known and not needed is left out."""
SECTIONS = {"behaviors", "default_settings", "environment_parameters", "env_settings", "engine_settings", "checkpoint_settings"}
SECTIONS |= {"torch_settings", "debug", "parameter_randomization", "curriculum"}
ENTRIES = {
    "checkpoint_settings": {
        *("run_id", "results_dir", "initialize_from", "load_model", "resume", "force", "train_model", "inference"),
    },
    "env_settings": {
        *("env_path", "env_args", "base_port", "num_envs", "num_areas", "seed", "timeout_wait"),
        *("max_lifetime_restarts", "restarts_rate_limit_n", "restarts_rate_limit_period_s"),
    },
    "torch_settings": {"device"},
    "engine_settings": {
        *("width", "height", "quality_level", "time_scale", "target_frame_rate", "capture_frame_rate", "no_graphics"),
        "no_graphics_monitor",
    },
}
SELF_PLAY = {
    *("save_steps", "team_change", "swap_steps", "window", "play_against_latest_model_ratio", "initial_elo"),
    "play_against_current_self_ratio",
}
PASSED_ON = {"run_id": "trainer.run_name", "results_dir": "trainer.default_root_dir"}
ON_THE_COMMAND_LINE = {
    "initialize_from": "begin with the weights of another run by --init_from RUN",
    "load_model": "continue by --ckpt_path last",
    "resume": "continue by --ckpt_path last",
    "force": "begin anew in a folder by --force",
    "inference": "play a policy by lightning-rl evaluate",
    "train_model": "lightning-rl fit does",
    "env_path": "Unity's; name an environment of gymnasium",
    "env_args": "Unity's; an environment's arguments are model.env.kwargs",
    "base_port": "Unity's",
    "timeout_wait": "Unity's; see model.env.step_timeout",
    "max_lifetime_restarts": "see model.env.max_restarts",
    "restarts_rate_limit_n": "see model.env.max_restarts",
    "restarts_rate_limit_period_s": "see model.env.max_restarts",
    "engine_settings": "Unity's",
    "debug": "lightning-rl --debug",
    "curriculum": "lessons of an old form; write them as environment_parameters",
}
"""What is no setting here, and where it is."""
