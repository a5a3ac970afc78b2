"""ML-Agents' settings: their names and defaults, and what they become."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from lightning_rl.errors import SettingError, check_choice, check_range
from lightning_rl.importers.config import Config, Given, check_known

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


MOST_ENVS = 32


def ppo(config: Config, given: Given, old: bool) -> None:
    """A buffer as a rollout of whole minibatches, and what falls over the run."""
    rollout(config, given)
    inherited = "linear" if old else given.settings.get("learning_rate_schedule") or "linear"
    decaying(config, given, "learning_rate", "linear")
    decaying(config, given, "epsilon", inherited)
    decaying(config, given, "beta", inherited, "theirs is for the mean entropy of a continuous action's dimensions, here it is for the sum")
    config.set("model.share_encoder", bool(given.take("shared_critic", False)))


def rollout(config: Config, given: Given) -> None:
    """buffer_size rows as n_steps · num_envs, of which batch_size, in whole sequences, is a part."""
    buffer, horizon = given.integer("buffer_size", 10_240), given.integer("time_horizon", 64)
    asked, length = given.integer("batch_size", 1_024), sequence_length(given)
    num_envs = config.settings["model.env.num_envs"]
    if num_envs == 1:
        num_envs = max(1, min(MOST_ENVS, buffer // max(horizon, length)))
        config.set("model.env.num_envs", num_envs, "buffer_size / time_horizon, as many agents at once")
    sequences = max(1, min(asked, buffer) // length)
    step = length * sequences // math.gcd(sequences, num_envs)
    n_steps = step * max(1, round(buffer / (num_envs * step)))
    rows, batch = n_steps * num_envs, sequences * length
    config.set("model.n_steps", n_steps, f"x num_envs = {rows}; buffer_size {buffer} is not whole minibatches" * (rows != buffer))
    config.set("model.batch_size", batch, f"{asked} there; in whole sequences that fit the buffer" * (batch != asked))


def sac(config: Config, given: Given, old: bool) -> None:
    """How often it learns, and its temperature."""
    asked, length = given.integer("batch_size", 128), sequence_length(given)
    batch = max(1, asked // length) * length
    config.set("model.batch_size", batch, f"{asked} there; in whole sequences" * (batch != asked))
    if old and length > 1:
        config.note("memory_size: policy, value and both critics shared it there, here each of them has as much")
    begin = given.integer("buffer_init_steps", 0, low=0)
    config.set("model.learning_starts", max(begin, batch), "theirs waits for batch_size rows" * (begin < batch))
    cadence(config, given)
    decaying(config, given, "learning_rate", "linear" if old else "constant")
    config.set("model.ent_coef", f"auto_{given.number('init_entcoef', 1.0):g}")
    if "save_replay_buffer" in given:
        config.set("checkpoint.save_replay_buffer", given.take("save_replay_buffer"))


def cadence(config: Config, given: Given) -> None:
    """Environment steps for an update, and for one of the reward signals; in old files updates for every few steps."""
    interval, updates = given.integer("train_interval", 1), given.integer("num_update", 1)
    ratio = Fraction(given.number("steps_per_update", interval / updates, high=1e6)).limit_denominator(100)
    if not ratio:
        raise SettingError(f"{given.place('steps_per_update')} must be at least 0.01")
    config.set("model.train_freq", ratio.numerator)
    config.set("model.gradient_steps", ratio.denominator)
    signals, number = given.mapping("reward_signals"), "reward_signals_num_update"
    if "reward_signal_num_update" in signals:
        given.settings[number] = signals.pop("reward_signal_num_update")
        given.places[number] = f"{given.place('reward_signals')}.reward_signal_num_update"
    own = interval / given.integer(number, 1) if number in given else float(ratio)
    own = given.number("reward_signal_steps_per_update", own)
    given.settings["reward_signals"] = signals
    if own != float(ratio) and signals.keys() - {"extrinsic"}:
        config.set("model.reward_signal_steps_per_update", own)
    elif own != float(ratio):
        config.note("reward_signal_steps_per_update dropped: no reward signal learns")


TRAINERS: dict[str, Callable[[Config, Given, bool], None]] = {"ppo": ppo, "sac": sac}


def decaying(config: Config, given: Given, name: str, default: str, remark: str = "") -> None:
    """A number that stays or falls in a line over the run; which of both by default."""
    said, (path, start, end) = f"{name}_schedule" in given, DECAYING[name]
    schedule = given.take(f"{name}_schedule", default)
    check_choice(given.place(f"{name}_schedule"), schedule, ("linear", "constant"))
    start = given.number(name, start)
    if schedule == "constant":
        config.set(path, start, remark)
    else:
        why = remark if said else "; ".join(filter(None, ["as there unless the file says constant", remark]))
        config.set(path, {"schedule": "linear", "start": start, "end": min(start, end)}, why)


def network(config: Config, given: Given) -> None:
    """Hidden layers, encoder, normalization, memory."""
    units, layers = given.integer("hidden_units", 128), given.integer("num_layers", 2, high=100)
    encoder = given.take("vis_encode_type", "simple")
    check_choice(given.place("vis_encode_type"), encoder, ENCODERS)
    config.set("model.net_arch", [units] * layers)
    config.set("model.encoder", ENCODERS[encoder])
    config.set("model.encoder_features", units)
    if given.take("normalize", False):
        config.set("model.normalize_obs", "running")
    if given.take("use_recurrent", False):
        size, length = given.integer("memory_size", 128), given.integer("sequence_length", 64)
        memory = {"class_path": "LSTM", "init_args": {"memory_size": size, "sequence_length": length}}
        config.set("model.memory", memory, "between encoder and hidden layers; theirs is behind them")


def sequence_length(given: Given) -> int:
    """Rows of a sequence; 1 without a memory."""
    if not given.settings.get("use_recurrent"):
        return 1
    given.settings["sequence_length"] = length = given.integer("sequence_length", 64)
    return length
