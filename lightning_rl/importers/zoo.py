"""`lightning-rl import-zoo`: a section of an rl-baselines3-zoo file as a config that runs."""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import gymnasium as gym

from lightning_rl.envs.make import find_newest_version, needs_mujoco_py, prepare_package
from lightning_rl.errors import SettingError, check_choice, check_names, check_range, nearest
from lightning_rl.importers import zoo_settings as zoo
from lightning_rl.importers.config import Config, Settings, read_expression, read_file
from lightning_rl.settings.yaml_files import Plain

VERSION = re.compile(r"(.+)-v(\d+)")
SHARED = {
    "atari": "the section of all games: name one of them, such as ALE/Pong-v5",
    "default": "the section of no environment: name one of the file's",
}


def import_zoo(path: str, env_id: str, algorithm: str | None = None) -> str:
    """Convert the section of an environment to the text of a config.

    Args:
        env_id: which environment of the file.
        algorithm: which algorithm; default: from the name of the file.

    Raises:
        SettingError: the file cannot be read, has no section for the environment, or has an unknown setting.
    """
    file = read_file(path)
    algorithm = find_algorithm(path, algorithm)
    section, settings = find_section(file, Path(path).name, env_id)
    known = {*zoo.ZOO, *zoo.SAME[algorithm], *zoo.SCHEDULED[algorithm], *zoo.OTHERS[algorithm], *zoo.DROPPED}
    check_names(f"{section}.", settings.values, known, f" of the zoo's {algorithm}")
    settings.values = zoo.DEFAULTS.get(algorithm, {}) | {name: value for name, value in settings.values.items() if value is not None}
    config = Config(zoo.ALGORITHMS[algorithm], f"lightning-rl import-zoo {Path(path).name} {env_id}")
    velocities, shown = hidden_velocities(env_id)
    current = current_id(shown)
    if current != shown:
        config.note(f"gymnasium has {current} instead of {shown}")
    if section not in (env_id, current):
        config.note(f"these are the settings of {section}")
    config.set("model.env.id", current)
    num_envs = settings.integer("n_envs", 1)
    config.set("model.env.num_envs", num_envs)
    set_environment(config, settings, velocities)
    config.set("model.max_env_steps", settings.integer("n_timesteps", 1_000_000))
    if algorithm == "ppo_lstm":
        set_sequences(config, settings, num_envs)
    elif algorithm in ("ppo", "trpo"):
        set_minibatches(config, settings, num_envs)
    between = None
    if algorithm in zoo.OFF_POLICY:
        between = set_update_ratio(config, settings, num_envs)
        zoo.set_hindsight(config, settings)
    if config.algorithm == "TD3":
        set_noise(config, settings)
    if algorithm == "ars":
        directions = settings.integer("n_delta", 8)
        config.set("model.episodes_per_generation", 2 * directions)
        config.set("model.top_directions", settings.integer("n_top", directions, high=directions))
        config.set("model.sigma", read_schedule(settings.take("delta_std", 0.05), "delta_std"))
        config.set("model.normalize_obs", "off")
    if algorithm == "qrdqn":
        config.set("model.distribution", "quantiles")
        batch_size = settings.integer("batch_size", 32)
        config.set("model.batch_size", batch_size)
        config.set("model.adam_eps", 0.01 / batch_size)
        config.set("model.max_grad_norm", settings.take("max_grad_norm"))
    if "top_quantiles_to_drop_per_net" in settings:
        config.set("model.drop_quantiles", settings.integer("top_quantiles_to_drop_per_net", 2, low=0))
    if algorithm == "ddpg":
        for name, value in {"n_critics": 1, "policy_delay": 1, "target_policy_noise": 0.0}.items():
            config.set(f"model.{name}", value)
    for name in zoo.SCHEDULED[algorithm]:
        if name in settings:
            scheduled = read_schedule(settings.take(name), settings.place(name))
            config.set(f"model.{name}", scheduled, zoo.DIFFERENT.get(name, "") if scheduled is not None else "")
    for name in zoo.SAME[algorithm]:
        if name in settings:
            value = settings.integer(name, 1) if name == "n_steps" else settings.take(name)
            config.set(f"model.{'replay.' if name == 'optimize_memory_usage' else ''}{name}", value)
    zoo.set_policy(config, settings, algorithm)
    zoo.set_exploration(config, settings, algorithm, config.settings.get("model.n_steps", 5) if between is None else between)
    set_normalization(config, settings)
    if "seed" in settings:
        config.set("seed_everything", settings.integer("seed", 0, low=0))
    config.drop(settings.values, zoo.DROPPED)
    return config.text()


def find_algorithm(path: str, name: str | None) -> str:
    """Return the algorithm of that name, or the one after which the file is named."""
    stem = Path(path).stem.lower()
    algorithm = stem if name is None or stem == "her" else name
    if algorithm in zoo.MISSING:
        raise SettingError(f"{path if algorithm == stem else '--algo'}: there is no {algorithm} here; {zoo.MISSING[algorithm]}")
    if name is not None:
        check_choice("--algo", name, zoo.ALGORITHMS)
    elif algorithm not in zoo.ALGORITHMS:
        raise SettingError(f"{path}: a zoo file is named after its algorithm, {', '.join(zoo.ALGORITHMS)}; name it with --algo")
    return algorithm


def find_section(file: Plain, name: str, env_id: str) -> tuple[str, Settings]:
    """Return the section of an environment, of another version of it, or of all Atari games, with its settings."""
    if env_id in SHARED:
        raise SettingError(f"{env_id} is {SHARED[env_id]}")
    section = env_id if env_id in file else next(reversed(versions_of(env_id, file)), None)
    if section is None and "atari" in file and (env_id.startswith("ALE/") or "NoFrameskip" in env_id):
        section = "atari"
    if section is None:
        raise SettingError(f"{name} has no section for {env_id}{nearest(env_id, map(str, file.keys() - SHARED.keys()))}")
    return section, Settings(file).section(section)


def versions_of(env_id: str, names: Iterable[object]) -> list[str]:
    """Return the names that are the same environment in any version, the newest last."""
    wanted = VERSION.fullmatch(env_id)
    versions = [match for name in names if wanted and (match := VERSION.fullmatch(str(name))) and match[1] == wanted[1]]
    return [match[0] for match in sorted(versions, key=lambda match: int(match[2]))]


def current_id(env_id: str) -> str:
    """Return the same id if gymnasium has it, else the id of the newest version."""
    if (game := re.fullmatch(r"(\w+)NoFrameskip-v4", env_id)) is not None:
        return f"ALE/{game[1]}-v5"
    try:
        prepare_package(env_id)
    except ImportError:
        return env_id
    gone = env_id not in gym.registry or needs_mujoco_py(env_id)
    return find_newest_version(env_id) if gone else env_id


def hidden_velocities(env_id: str) -> tuple[list[int], str]:
    """Return where the velocities are that a `…NoVel` environment of the zoo hides, and the id of the environment that shows them."""
    name, _, version = env_id.rpartition("-")
    velocities = zoo.VELOCITIES.get(name.removesuffix(zoo.MASKED), []) if name.endswith(zoo.MASKED) else []
    return velocities, f"{name.removesuffix(zoo.MASKED)}-{version}" if velocities else env_id


def set_environment(config: Config, settings: Settings, velocities: list[int]) -> None:
    """Convert the environment's arguments and wrappers, and hide its velocities."""
    arguments = read_expression(settings.take("env_kwargs", {}), settings.place("env_kwargs"))
    if not isinstance(arguments, dict):
        raise SettingError(f"{settings.place('env_kwargs')} must be a mapping of arguments, got {arguments!r}")
    if arguments:
        config.set("model.env.kwargs", arguments)
    frames = settings.integer("frame_stack", 1)
    kept: list[Plain] = []
    if velocities:
        kept.append({"class_path": "lightning_rl.envs.MaskObservation", "init_args": {"indices": velocities}})
    for path, given in read_wrappers(settings.take("env_wrapper"), settings.place("env_wrapper")):
        name = path.rpartition(".")[2]
        if name == "AtariWrapper":
            set_atari(config, given)
            frames = 1 if frames == 4 else frames
        elif name == "TimeLimit" and "max_episode_steps" in given:
            config.set("model.env.max_episode_steps", given["max_episode_steps"])
        elif (known := known_wrapper(name, given, path)) is not None:
            wrapper, remark = known
            kept.append(wrapper)
            if remark:
                config.note(f"{name} is {wrapper['class_path']} here: {remark}")
        else:
            config.note(f"env_wrapper {path} dropped: not known here; put what it does into env.wrappers")
    if kept:
        config.set("model.env.wrappers", kept)
    if frames > 1:
        for setting in kept:
            setting.get("init_args", {}).pop("keep_dim", None)  # frames are the channels
        config.set("model.env.frame_stack", frames)


def read_wrappers(setting: object, where: str) -> Iterator[tuple[str, Plain]]:
    """Yield each wrapper's class path with its arguments."""
    for wrapper in setting if isinstance(setting, list) else [] if setting is None else [setting]:
        if isinstance(wrapper, str):
            yield wrapper, {}
        elif isinstance(wrapper, dict) and len(wrapper) == 1 and isinstance(next(iter(wrapper.values())), dict | None):
            yield str(next(iter(wrapper))), next(iter(wrapper.values())) or {}
        else:
            raise SettingError(f"{where} must be class paths, each with its arguments, got {wrapper!r}")


def known_wrapper(name: str, settings: Plain, path: str) -> tuple[Plain, str] | None:
    """Return the wrapper to use here, and what is different about it; None if it is not known."""
    target, names, remark = zoo.WRAPPERS.get(name, (name, {key: key for key in settings}, ""))
    installed = "." in target or path.startswith(("gym.", "gymnasium.")) or name in zoo.WRAPPERS
    if not installed or not ("." in target or hasattr(gym.wrappers, target)) or settings.keys() - names.keys() - {"max_steps", "test_mode"}:
        return None
    arguments = zoo.WRAPPER_DEFAULTS.get(target, {}) | {names[key]: value for key, value in settings.items() if key in names}
    if isinstance(arguments.get("shape"), int):
        arguments["shape"] = [arguments["shape"]] * 2
    return {"class_path": target} | ({"init_args": arguments} if arguments else {}), remark


def set_atari(config: Config, settings: Plain) -> None:
    """Add the standard preprocessing of games."""
    config.set("model.env.atari", True)
    arguments = {"repeat_action_probability": 0.0} | config.settings.get("model.env.kwargs", {})
    config.set("model.env.kwargs", arguments, "no sticky actions, as in the NoFrameskip games that the zoo is for")
    if settings.get("clip_reward", True):
        config.set("model.clip_reward", 1)
    config.note("AtariWrapper is env.atari here: a lost life does not end an episode, and FIRE is not pressed at its beginning")
    for name, value in settings.items():
        if name not in ("clip_reward", "terminal_on_life_loss"):
            config.note(f"AtariWrapper.{name} {value} dropped: not a setting of env.atari")


def set_minibatches(config: Config, settings: Settings, num_envs: int) -> None:
    """Convert batch_size, which must divide the rollout here."""
    n_steps, wanted = settings.integer("n_steps", 2048), settings.integer("batch_size", 64)
    rows = n_steps * num_envs
    batch = next(size for size in range(min(wanted, rows), 0, -1) if rows % size == 0)
    config.set("model.n_steps", n_steps)
    config.set("model.batch_size", batch, f"{wanted} there; here a part of n_steps x num_envs = {rows}" * (batch != wanted))


def set_sequences(config: Config, settings: Settings, num_envs: int) -> None:
    """Convert batch_size to sequences of equal length, as long as a minibatch or a rollout allows, and as many of them as divide it."""
    n_steps, wanted = settings.integer("n_steps", 128), settings.integer("batch_size", 128)
    parts = math.ceil(n_steps / min(wanted, n_steps))
    length = math.ceil(n_steps / parts)
    count = next(count for count in range(max(1, wanted // length), 0, -1) if parts * num_envs % count == 0)
    batch = count * length
    config.set("model.n_steps", n_steps)
    remark = f"{wanted} there; here sequences of {length} that divide those of the rollout, {parts * num_envs}"
    config.set("model.batch_size", batch, remark * (batch != wanted))
    config.set("model.memory.class_path", "LSTM")
    config.set("model.memory.init_args.sequence_length", length, "at most as long there, where a minibatch is consecutive rows")


def set_update_ratio(config: Config, settings: Settings, num_envs: int) -> float:
    """Convert when to learn: here in steps of all environments together, there in steps of each of them.

    Return the steps of each environment between updates; infinity if updates follow whole episodes.
    """
    freq, steps = settings.take("train_freq", 1), settings.take("gradient_steps", 1)
    every, unit = freq if isinstance(freq, list | tuple) and len(freq) == 2 else (freq, "step")
    check_range(settings.place("train_freq"), every, 1, whole=True)
    check_choice(settings.place("train_freq"), unit, ("step", "episode"))
    check_range(settings.place("gradient_steps"), steps, -1, whole=True)
    if unit == "episode":
        updates = "as many updates as steps" if steps == -1 else f"{steps} updates"
        config.set("model.train_freq", 1, f"{updates} after {every} whole episodes there; here one after each step")
        steps = every = 1
    else:
        every *= num_envs
        config.set("model.train_freq", every, f"{every // num_envs} steps of each of {num_envs} environments" * (num_envs > 1))
    config.set("model.gradient_steps", steps)
    updates_each = every if steps == -1 else steps
    if "target_update_interval" in settings and config.algorithm != "DQN":  # there each training counts its updates from 0
        interval = settings.integer("target_update_interval", 1)
        remark = f"{interval} there, counted from 0 in each training of {updates_each} updates" if updates_each % interval else ""
        config.set("model.target_update_interval", min(interval, updates_each), remark)
    if config.algorithm == "DQN":  # there it moves between two trainings, whatever the number of updates in each
        interval = settings.integer("target_update_interval", 10_000)
        moves = max(1, round(interval / every)) * updates_each
        config.set("model.target_update_interval", moves, f"updates; {interval} environment steps there")
    return math.inf if unit == "episode" else every // num_envs


def set_noise(config: Config, settings: Settings) -> None:
    """Convert TD3's noise; by default there is none."""
    kind, sigma = settings.take("noise_type"), settings.number("noise_std", 0.0)
    if kind is not None:
        check_choice(settings.place("noise_type"), kind, ("normal", "ornstein-uhlenbeck"))
    remark = "without correlation in time; an Ornstein-Uhlenbeck process there" if kind == "ornstein-uhlenbeck" else ""
    config.set("model.action_noise", sigma if kind else 0.0, remark)


def read_schedule(value: object, where: str) -> Plain | float | None:
    """Read `lin_0.001` as a schedule that falls to 0, and a negative number, which switches off, as None."""
    kind, _, start = str(value).rpartition("_")
    try:
        number = float(start)
    except ValueError:
        number = math.nan
    if kind not in ("", "lin") or not math.isfinite(number):
        raise SettingError(f"{where} must be a number or a schedule such as lin_0.001, got {value!r}")
    if kind == "lin":
        return {"schedule": "linear", "start": number, "end": 0.0}
    return number if number >= 0 else None


def set_normalization(config: Config, settings: Settings) -> None:
    """Convert running statistics of observations and rewards."""
    setting = read_expression(settings.take("normalize", False), settings.place("normalize"))
    if setting is False:
        return
    chosen = setting if isinstance(setting, dict) else {}
    if setting is not True and not chosen:
        raise SettingError(f"{settings.place('normalize')} must be true or a mapping such as {{norm_reward: false}}, got {setting!r}")
    if chosen.pop("norm_obs", True):
        config.set("model.normalize_obs", "running")
    if chosen.pop("norm_reward", True) and config.algorithm != "ARS":  # ARS compares whole episodes
        config.set("model.normalize_reward", True)
    for name, value in chosen.items():
        if name not in ("gamma", "training"):
            reason = "normalized values are clipped at 10 here" if "clip" in str(name) else f"not a setting of {config.algorithm}"
            config.note(f"normalize.{name} {value} dropped: {reason}")
