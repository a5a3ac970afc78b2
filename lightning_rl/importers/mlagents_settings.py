"""Convert ML-Agents' settings: their names and defaults, and our equivalents."""

import math
import re
from collections.abc import Callable
from fractions import Fraction

from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, check_choice, check_names, check_range
from lightning_rl.importers.config import Config, Settings
from lightning_rl.settings.yaml_files import Plain, as_mapping

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
OLD = {
    *("trainer", "num_update", "reward_signals_num_update", "train_interval", "use_recurrent", "pretraining", "gamma", "curriculum"),
    *("curiosity_enc_size", "curiosity_strength", "demo_path", "model_path", "summary_path", "use_curiosity", "num_to_record"),
}
"""Settings of a behavior that only old files have; their behaviors have no sections."""
SELF_PLAY = {
    *("save_steps", "team_change", "swap_steps", "window", "play_against_latest_model_ratio", "initial_elo"),
    "play_against_current_self_ratio",
}
SELF_PLAY_DROPPED = {
    "swap_steps": "an opponent is drawn for each episode of each copy",
    "team_change": "the seat of the learner changes with each episode",
}
"""Why settings of self-play are dropped; scenes of Unity keep them, and several behaviors `team_change`."""
SECTIONS = {"behaviors", "default_settings", "environment_parameters", "env_settings", "engine_settings", "checkpoint_settings"}
SECTIONS |= {"torch_settings", "debug", "parameter_randomization", "curriculum"}
ENTRIES = {
    "checkpoint_settings": {"run_id", "results_dir", "initialize_from", "load_model", "resume", "force", "train_model", "inference"},
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

COMMON = {"max_steps": ("model.max_env_steps", 500_000), "summary_freq": ("model.log_interval", 50_000)}
"""Integers of all trainers: their name → ours, and their default."""
NUMBERS = {"ppo": {"lambd": ("model.gae_lambda", 0.95)}, "sac": {"tau": ("model.tau", 0.005)}}
INTEGERS = {"ppo": {"num_epoch": ("model.n_epochs", 3)}, "sac": {"buffer_size": ("model.buffer_size", 50_000)}}
NUMBERS["poca"], INTEGERS["poca"] = NUMBERS["ppo"], INTEGERS["ppo"]
DECAYING = {
    "learning_rate": ("model.learning_rate", 3e-4, 0.0),
    "epsilon": ("model.clip_range", 0.2, 0.1),
    "beta": ("model.ent_coef", 5e-3, 1e-5),
}
"""Numbers that may decay over the run: their name → ours, their default, and their final value."""
RENAMED = {"run_id": "trainer.run_name", "results_dir": "trainer.default_root_dir"}
ENCODERS = {name: name for name in ("simple", "nature_cnn", "resnet", "match3", "fully_connected")} | {"default": "simple"}
CLONING = {name: name for name in ("demo_path", "strength", "steps", "batch_size", "samples_per_update")} | {"num_epoch": "n_epochs"}
SIGNAL = {"strength", "gamma", "learning_rate", "network_settings", "encoding_size"}
SIGNALS = {
    "extrinsic": {"strength", "gamma", "network_settings"},
    "curiosity": SIGNAL,
    "rnd": SIGNAL,
    "gail": SIGNAL | {"demo_path", "use_actions", "use_vail"},
}
FIXED: dict[str, dict[str, tuple[object, str]]] = {
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
"""Settings that make our algorithm equal to theirs, and why."""
FIXED["poca"] = FIXED["ppo"]

DROPPED = {
    "framework": "it is PyTorch here",
    "threaded": "--model.threaded true of PPO and SAC steps environments during learning, with a policy that is one iteration old",
    "init_path": "begin with the weights of another run by --init_from",
    "time_horizon": "episodes are not cut for a replay buffer",
    "deterministic": "evaluations are deterministic here; change evaluation.deterministic",
    "goal_conditioning_type": "name the observations that contain the goal in model.goals",
    "gamma": "an old name; each reward signal has its own",
    "curiosity_enc_size": "an old name of reward_signals.curiosity.encoding_size",
    "curiosity_strength": "an old name of reward_signals.curiosity.strength",
    "use_curiosity": "an old name of reward_signals.curiosity",
    "demo_path": "an old name; reward_signals.gail and behavioral_cloning have their own",
    **dict.fromkeys(("model_path", "summary_path"), "runs are in trainer.default_root_dir"),
    "num_to_record": "of an old recorder",
    **dict.fromkeys(("memory_size", "sequence_length"), "nothing is remembered without use_recurrent"),
    "save_replay_buffer": "PPO has none",
}
"""Why a known setting is left out if no conversion used it."""
COMMAND_LINE = {
    "initialize_from": "begin with the weights of another run by --init_from RUN",
    **dict.fromkeys(("load_model", "resume"), "continue by --ckpt_path last"),
    "force": "overwrite a run by --force",
    "inference": "play a policy by lightning-rl evaluate",
    "train_model": "lightning-rl fit does",
    "env_path": "a file starts no programs here; for this scene, import with --env unity:PATH",
    "env_args": "Unity's; an environment's arguments are model.env.kwargs",
    **dict.fromkeys(("base_port", "engine_settings"), "Unity's"),
    "timeout_wait": "Unity's; see model.env.step_timeout",
    **dict.fromkeys(
        ("max_lifetime_restarts", "restarts_rate_limit_n", "restarts_rate_limit_period_s"),
        "see model.env.max_restarts",
    ),
    "debug": "lightning-rl --debug",
    "curriculum": "lessons of an old form; write them as environment_parameters",
}
"""Settings of a file that have no place in a config, and what to use instead."""

MAX_ENVS = 32
MINARI = re.compile(r"-v\d+$")


def is_scene(config: Config) -> bool:
    """Return whether the environment of a config is a scene of Unity."""
    return "model.env.id" in config.settings and EnvConfig(config.settings["model.env.id"]).is_unity


def set_ppo(config: Config, settings: Settings, old: bool) -> None:
    """Convert buffer_size to n_steps · num_envs rows, a whole number of minibatches of whole sequences; convert decaying settings too."""
    buffer, horizon = settings.integer("buffer_size", 10_240), settings.integer("time_horizon", 64)
    wanted, length = settings.integer("batch_size", 1_024), sequence_length(settings)
    if "model.env.num_envs" not in config.settings:
        fitting = max(1, min(MAX_ENVS, buffer // max(horizon, length)))
        config.set("model.env.num_envs", fitting, "buffer_size / time_horizon, as many agents at once")
    scene = is_scene(config)
    num_envs = 1 if scene else config.settings["model.env.num_envs"]  # how many agents a scene has, only the scene knows
    sequences = max(1, min(wanted, buffer) // length)
    step = length * sequences // math.gcd(sequences, num_envs)
    n_steps = step * max(1, round((horizon if scene else buffer / num_envs) / step))
    rows, batch = n_steps * num_envs, sequences * length
    remark = f"x num_envs = {rows}; buffer_size {buffer} is not whole minibatches" * (rows != buffer)
    of_scene = f"time_horizon in whole minibatches; x agents of all players, set it to buffer_size {buffer} / agents"
    config.set("model.n_steps", n_steps, of_scene if scene else remark)
    config.set("model.batch_size", batch, f"{wanted} there; in whole sequences that fit the buffer" * (batch != wanted))
    inherited = "linear" if old else settings.values.get("learning_rate_schedule") or "linear"
    set_decaying(config, settings, "learning_rate", "linear")
    set_decaying(config, settings, "epsilon", inherited)
    entropy = "theirs is for the mean entropy of a continuous action's dimensions, here it is for the sum"
    set_decaying(config, settings, "beta", inherited, entropy)
    config.set("model.share_encoder", bool(settings.take("shared_critic", False)))


def set_sac(config: Config, settings: Settings, old: bool) -> None:
    """Convert the update ratio and the temperature."""
    if "model.env.num_envs" not in config.settings:
        config.set("model.env.num_envs", 1)
    wanted, length = settings.integer("batch_size", 128), sequence_length(settings)
    batch = max(1, wanted // length) * length
    config.set("model.batch_size", batch, f"{wanted} there; in whole sequences" * (batch != wanted))
    if old and length > 1:
        config.note("memory_size: policy, value and both critics shared it there, here each of them has as much")
    begin = settings.integer("buffer_init_steps", 0, low=0)
    config.set("model.learning_starts", max(begin, batch), "theirs waits for batch_size rows" * (begin < batch))
    set_update_ratio(config, settings)
    set_decaying(config, settings, "learning_rate", "linear" if old else "constant")
    config.set("model.ent_coef", f"auto_{settings.number('init_entcoef', 1.0):g}")
    if "save_replay_buffer" in settings:
        config.set("checkpoint.save_replay_buffer", settings.take("save_replay_buffer"))


def set_poca(config: Config, settings: Settings, old: bool) -> None:
    """Convert the same settings as for PPO; sizes count steps of groups here."""
    set_ppo(config, settings, old)
    config.set("model.batch_size", config.settings["model.batch_size"], "steps of groups; theirs counts those of each agent")
    units = settings.integer("hidden_units", 128)
    settings.values["hidden_units"] = units
    size = 4 * max(1, round(units / 4))
    config.set("model.attention_size", size, f"hidden_units {units} is no multiple of 4" * (size != units))


TRAINERS: dict[str, Callable[[Config, Settings, bool], None]] = {"ppo": set_ppo, "sac": set_sac, "poca": set_poca}


def set_update_ratio(config: Config, settings: Settings) -> None:
    """Convert environment steps per update, for the policy and the reward signals; old files have a number of updates per interval."""
    interval, updates = settings.integer("train_interval", 1), settings.integer("num_update", 1)
    ratio = Fraction(settings.number("steps_per_update", interval / updates, high=1e6)).limit_denominator(100)
    if not ratio:
        raise SettingError(f"{settings.place('steps_per_update')} must be at least 0.01")
    config.set("model.train_freq", ratio.numerator)
    config.set("model.gradient_steps", ratio.denominator)
    signals, number = settings.mapping("reward_signals"), "reward_signals_num_update"
    if "reward_signal_num_update" in signals:
        settings.values[number] = signals.pop("reward_signal_num_update")
        settings.places[number] = f"{settings.place('reward_signals')}.reward_signal_num_update"
    signal_ratio = interval / settings.integer(number, 1) if number in settings else float(ratio)
    signal_ratio = settings.number("reward_signal_steps_per_update", signal_ratio)
    settings.values["reward_signals"] = signals
    if signal_ratio != float(ratio) and signals.keys() - {"extrinsic"}:
        config.set("model.reward_signal_steps_per_update", signal_ratio)
    elif signal_ratio != float(ratio):
        config.note("reward_signal_steps_per_update dropped: no reward signal learns")


def set_decaying(config: Config, settings: Settings, name: str, default: str, remark: str = "") -> None:
    """Convert a number that is constant or decays linearly over the run; `default`: which of them, if the file has no schedule."""
    explicit, (path, start, end) = f"{name}_schedule" in settings, DECAYING[name]
    schedule = settings.take(f"{name}_schedule", default)
    check_choice(settings.place(f"{name}_schedule"), schedule, ("linear", "constant"))
    start = settings.number(name, start)
    if schedule == "constant":
        config.set(path, start, remark)
    else:
        why = remark if explicit else "; ".join(filter(None, ["it falls there by default", remark]))
        config.set(path, {"schedule": "linear", "start": start, "end": min(start, end)}, why)


def set_network(config: Config, settings: Settings) -> None:
    """Convert hidden layers, encoder, normalization and memory."""
    units, layers = settings.integer("hidden_units", 128), settings.integer("num_layers", 2, high=100)
    encoder = settings.take("vis_encode_type", "simple")
    check_choice(settings.place("vis_encode_type"), encoder, ENCODERS)
    config.set("model.net_arch", [units] * layers)
    config.set("model.encoder", ENCODERS[encoder])
    config.set("model.encoder_features", units)
    if settings.take("normalize", False):
        config.set("model.normalize_obs", "running")
    if settings.take("use_recurrent", False):
        size, length = settings.integer("memory_size", 128), settings.integer("sequence_length", 64)
        memory = {"class_path": "LSTM", "init_args": {"memory_size": size, "sequence_length": length}}
        config.set("model.memory", memory, "between encoder and hidden layers; theirs is behind them")


def sequence_length(settings: Settings) -> int:
    """Return the length of a sequence; 1 without a memory."""
    if not settings.values.get("use_recurrent"):
        return 1
    settings.values["sequence_length"] = length = settings.integer("sequence_length", 64)
    return length


def set_reward_signals(config: Config, settings: Settings, trainer: str, old: bool) -> None:
    """Convert the reward signals."""
    where = settings.place("reward_signals")
    signals = settings.mapping("reward_signals") or {"extrinsic": {}}
    check_names(f"{where}.", signals, SIGNALS, " of ML-Agents")
    streams = {name: convert_signal(config, name, as_mapping(f"{where}.{name}", signals[name]), f"{where}.{name}", old) for name in signals}
    remark = ""
    if len(streams) > 1 and trainer == "sac":
        for setting in streams.values():
            setting["strength"] /= len(streams)
        remark = f"signals add up here and are averaged there: strengths are divided by {len(streams)}"
    elif len(streams) > 1:
        remark = "signals add up here and are averaged there, which is the same for normalized advantages"
    if streams.keys() == {"extrinsic"} and streams["extrinsic"]["strength"] == 1:
        config.set("model.gamma", streams["extrinsic"]["gamma"])
        return
    if remark:
        config.note(f"reward_signals: {remark}")
    for name in {"extrinsic": None, **streams}:
        config.set(f"model.reward_signals.{name}", streams.get(name))


def convert_signal(config: Config, name: str, values: Plain, where: str, old: bool) -> Plain:
    """Convert the settings of one reward signal."""
    check_names(f"{where}.", values, SIGNALS[name], " of ML-Agents")
    settings = Settings(values, {key: f"{where}.{key}" for key in SIGNALS[name]})
    converted: Plain = {"strength": settings.number("strength", 1.0), "gamma": settings.number("gamma", 0.99)}
    network = settings.mapping("network_settings")
    check_names(f"{where}.network_settings.", network, NETWORK, " of ML-Agents")
    if name == "extrinsic":
        if network:
            config.note(f"{where}.network_settings dropped: the environment's own reward needs no network")
        return converted
    if name == "rnd":  # normalized here by default, but not there
        converted |= {"normalize": False, "normalize_reward": False}
    size = settings.take("encoding_size", network.get("hidden_units"))
    chosen = {"encoding_size": size, "encoder": network.get("vis_encode_type"), "normalize": network.get("normalize")}
    converted |= {key: value for key, value in (chosen | settings.values).items() if value is not None}
    if network.get("num_layers", 2) != 2:
        config.note(f"{where}.network_settings.num_layers dropped: a signal's network has 2 layers here")
    if name == "gail":
        check_demonstrations(config, converted.get("demo_path"), where)
        if old:  # a termination ends the returns of the signal in newer files, but not in old ones
            converted["ignore_done"] = True
    return converted


def set_cloning(config: Config, settings: Settings, trainer: str) -> None:
    """Convert behavioral cloning, `pretraining` in old files."""
    name = "pretraining" if "pretraining" in settings else "behavioral_cloning"
    cloning, where = settings.mapping(name), settings.place(name)
    if not cloning:
        return
    check_names(f"{where}.", cloning, CLONING, " of ML-Agents")
    check_demonstrations(config, cloning.get("demo_path"), where)
    for key, value in cloning.items():
        if value is not None:
            if key != "demo_path":
                check_range(f"{where}.{key}", value, 0)
            config.set(f"model.behavioral_cloning.{CLONING[key]}", value)
    if trainer == "sac" and not cloning.get("samples_per_update"):
        config.note(f"{name}: a pass over the demonstrations after each update of SAC is one minibatch here")


def set_self_play(config: Config, settings: Settings, several: bool) -> None:
    """Convert self-play. Outside Unity an opponent is drawn for each episode of each copy, and plays the whole episode.

    `several`: whether several behaviors are converted together, which take turns learning.
    """
    if "self_play" not in settings:
        return
    section = settings.section("self_play")
    old = section.number("play_against_current_self_ratio", 0.5, high=1)
    config.set("model.self_play.window", section.integer("window", 10))
    config.set("model.self_play.save_steps", section.integer("save_steps", 20_000))
    config.set("model.self_play.play_against_latest_model_ratio", section.number("play_against_latest_model_ratio", old, high=1))
    config.set("model.self_play.initial_elo", section.number("initial_elo", 1200.0))
    in_scene = is_scene(config)
    if config.algorithm == "POCA" and not several and not in_scene:
        config.note("self_play.teams must name the agents of each team, such as [agent_team0_*, agent_team1_*]: such files do not")
    for name, reason in SELF_PLAY_DROPPED.items():
        if name in section:
            is_kept = in_scene or (several and name == "team_change")
            steps = section.integer(name, 1, low=1 if is_kept else 0)
            if is_kept:
                config.set(f"model.self_play.{name}", steps)
            else:
                config.note(f"self_play.{name} dropped: {reason}")


def check_demonstrations(config: Config, path: object, where: str) -> None:
    """Add a comment about demonstrations that are neither a Minari dataset nor a `.demo` file; raise `SettingError` if there are none."""
    if not isinstance(path, str):
        raise SettingError(f"{where}.demo_path must name demonstrations, got {path!r}")
    if not MINARI.search(path) and not path.endswith(".demo"):
        config.note(f"{where}.demo_path: name a .demo file of Unity, a folder of them, or a Minari dataset (see lightning-rl collect)")
