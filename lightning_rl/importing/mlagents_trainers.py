"""What PPO and SAC of ML-Agents have of their own, and the networks of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from lightning_rl.errors import SettingError, check_choice
from lightning_rl.importing.config import Config
from lightning_rl.importing.given import Given
from lightning_rl.importing.mlagents_tables import DECAYING, ENCODERS

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
