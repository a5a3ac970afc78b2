"""`lightning-rl import-zoo`: a section of an rl-baselines3-zoo file as a config that runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym

from lightning_rl.envs.make import prepare_package
from lightning_rl.errors import SettingError, check_choice, check_range, nearest
from lightning_rl.importers.config import Config, Given, check_known, read_expression, read_file
from lightning_rl.importers.zoo_settings import (
    ALGORITHMS,
    DEFAULTS,
    DIFFERENT,
    DROPPED,
    ELSEWHERE,
    OTHERS,
    RENAMED,
    SCHEDULED,
    WRAPPER_DEFAULTS,
    WRAPPERS,
    ZOO,
    policy,
)

VERSION = re.compile(r"(.+)-v(\d+)")
SHARED = {
    "atari": "the section of all games: name one of them, such as ALE/Pong-v5",
    "default": "the section of no environment: name one of the file's",
}


def algorithm_of(path: str, given: str | None) -> str:
    """The algorithm that is asked for, or that of the file's name.

    Raises:
        SettingError: there is no such algorithm here.
    """
    name = Path(path).stem.lower() if given is None else given
    if name in ELSEWHERE:
        where = path if given is None else "--algo"
        raise SettingError(f"{where}: there is no {name} here; {ELSEWHERE[name]}")
    if given is not None:
        check_choice("--algo", given, ALGORITHMS)
    elif name not in ALGORITHMS:
        raise SettingError(f"{path}: a zoo file is named for its algorithm, {', '.join(ALGORITHMS)}; say which by --algo")
    return name


def section_of(file: dict[str, Any], name: str, env_id: str) -> tuple[str, Given]:
    """The name and settings of a file's section for an environment: its own, that of another version, or that of all Atari games.

    Raises:
        SettingError: there is none.
    """
    if env_id in SHARED:
        raise SettingError(f"{env_id} is {SHARED[env_id]}")
    section = section_name(env_id, file)
    if section is None:
        raise SettingError(f"{name} has no section for {env_id}{nearest(env_id, map(str, file.keys() - SHARED.keys()))}")
    if not isinstance(file[section], dict):
        raise SettingError(f"{section} must be a mapping of settings, got {file[section]!r}")
    return section, Given(file[section], {each: f"{section}.{each}" for each in file[section]})


def section_name(env_id: str, file: dict[str, object]) -> str | None:
    """Which section is for an environment."""
    if env_id in file:
        return env_id
    if versions := versions_of(env_id, file):
        return versions[-1]
    return "atari" if "atari" in file and (env_id.startswith("ALE/") or "NoFrameskip" in env_id) else None


def versions_of(env_id: str, names: object) -> list[str]:
    """The names that are the same environment in any version, the newest last."""
    wanted = VERSION.fullmatch(env_id)
    found = [match for name in names if wanted and (match := VERSION.fullmatch(str(name))) and match[1] == wanted[1]]  # type: ignore[attr-defined]
    return [match[0] for match in sorted(found, key=lambda match: int(match[2]))]


def environment_of_today(env_id: str) -> str:
    """The same id where gymnasium has it, else that of its newest version."""
    if (game := re.fullmatch(r"(\w+)NoFrameskip-v4", env_id)) is not None:
        return f"ALE/{game[1]}-v5"
    try:
        prepare_package(env_id)
    except ImportError:
        return env_id
    spec, versions = gym.registry.get(env_id), versions_of(env_id, gym.registry)
    gone = spec is None or "mujoco_py" in getattr(spec.entry_point, "__name__", "")
    return versions[-1] if gone and versions else env_id


def environment(config: Config, given: Given) -> None:
    """What is built, and what is put around it.

    Raises:
        SettingError: a setting of the wrong kind.
    """
    arguments = read_expression(given.take("env_kwargs", {}), given.place("env_kwargs"))
    if not isinstance(arguments, dict):
        raise SettingError(f"{given.place('env_kwargs')} must be a mapping of arguments, got {arguments!r}")
    if arguments:
        config.set("model.env.kwargs", arguments)
    frames = given.integer("frame_stack", 1)
    kept: list[dict[str, Any]] = []
    for path, settings in wrappers(given.take("env_wrapper"), given.place("env_wrapper")):
        name = path.rpartition(".")[2]
        if name == "AtariWrapper":
            atari(config, settings)
            frames = 1 if frames == 4 else frames
        elif name == "TimeLimit" and "max_episode_steps" in settings:
            config.set("model.env.max_episode_steps", settings["max_episode_steps"])
        elif (found := known_wrapper(name, settings, path)) is not None:
            wrapper, remark = found
            kept.append(wrapper)
            if remark:
                config.note(f"{name} is {wrapper['class_path']} here: {remark}")
        else:
            config.note(f"env_wrapper {path} dropped: not known here; put what it does into env.wrappers")
    if kept:
        config.set("model.env.wrappers", kept)
    if frames > 1:
        for each in kept:
            each.get("init_args", {}).pop("keep_dim", None)  # frames are the channels
        config.set("model.env.frame_stack", frames)


def wrappers(setting: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each wrapper by its class path, with its arguments.

    Raises:
        SettingError: neither class paths nor mappings of them to arguments.
    """
    for each in setting if isinstance(setting, list) else [] if setting is None else [setting]:
        if isinstance(each, str):
            yield each, {}
        elif isinstance(each, dict) and len(each) == 1 and isinstance(next(iter(each.values())), dict | None):
            yield str(next(iter(each))), next(iter(each.values())) or {}
        else:
            raise SettingError(f"{where} must be class paths, each with its arguments, got {each!r}")


def known_wrapper(name: str, settings: dict[str, Any], path: str) -> tuple[dict[str, Any], str] | None:
    """Our wrapper, and what is different about it; None if it is not known."""
    ours, names, remark = WRAPPERS.get(name, (name, {key: key for key in settings}, ""))
    installed = "." in ours or path.startswith(("gym.", "gymnasium.")) or name in WRAPPERS
    if not installed or not ("." in ours or hasattr(gym.wrappers, ours)) or settings.keys() - names.keys() - {"max_steps", "test_mode"}:
        return None
    arguments = WRAPPER_DEFAULTS.get(ours, {}) | {names[key]: value for key, value in settings.items() if key in names}
    if isinstance(arguments.get("shape"), int):
        arguments["shape"] = [arguments["shape"]] * 2
    return {"class_path": ours} | ({"init_args": arguments} if arguments else {}), remark


def atari(config: Config, settings: dict[str, Any]) -> None:
    """The standard preprocessing of games."""
    config.set("model.env.atari", True)
    arguments = {"repeat_action_probability": 0.0} | config.settings.get("model.env.kwargs", {})
    config.set("model.env.kwargs", arguments, "no sticky actions, as in the NoFrameskip games that the zoo is for")
    if settings.get("clip_reward", True):
        config.set("model.clip_reward", 1)
    config.note("AtariWrapper is env.atari here: a lost life does not end an episode, and FIRE is not pressed at its beginning")


def import_zoo(path: str, env_id: str, algorithm: str | None = None) -> str:
    """The config as text.

    Args:
        path: of the file.
        env_id: which of its environments.
        algorithm: which algorithm, if the file's name does not tell.

    Raises:
        SettingError: the file cannot be read, has nothing for the environment, or says something unknown.
    """
    file = read_file(path)
    algorithm = algorithm_of(path, algorithm)
    section, given = section_of(file, Path(path).name, env_id)
    known = ZOO | RENAMED[algorithm].keys() | SCHEDULED[algorithm].keys() | OTHERS[algorithm] | DROPPED.keys()
    check_known(given.settings, known, f"the zoo's {algorithm}", f"{section}.")
    given.settings = DEFAULTS[algorithm] | {name: value for name, value in given.settings.items() if value is not None}
    config = Config(ALGORITHMS[algorithm], f"lightning-rl import-zoo {Path(path).name} {env_id}")
    today = environment_of_today(env_id)
    if today != env_id:
        config.note(f"gymnasium has {today} instead of {env_id}")
    if section not in (env_id, today):
        config.note(f"these are the settings of {section}")
    config.set("model.env.id", today)
    num_envs = given.integer("n_envs", 1)
    config.set("model.env.num_envs", num_envs)
    environment(config, given)
    config.set("model.max_env_steps", given.integer("n_timesteps", 1_000_000))
    for step in STEPS[algorithm]:
        step(config, given, num_envs)
    for name, target in SCHEDULED[algorithm].items():
        if name in given:
            value = schedule(given.take(name), given.place(name))
            config.set(target, value, DIFFERENT.get(name, "") if value is not None else "")
    for name, target in RENAMED[algorithm].items():
        if name in given:
            config.set(target, given.take(name))
    policy(config, given, algorithm)
    normalize(config, given)
    if "seed" in given:
        config.set("seed_everything", given.integer("seed", 0, low=0))
    config.drop(given.settings, DROPPED)
    return config.text()


def minibatches(config: Config, given: Given, num_envs: int) -> None:
    """PPO's batch_size, which must be a part of the rollout here."""
    n_steps, asked = given.integer("n_steps", 2048), given.integer("batch_size", 64)
    rows = n_steps * num_envs
    batch = next(size for size in range(min(asked, rows), 0, -1) if rows % size == 0)
    config.set("model.n_steps", n_steps)
    config.set("model.batch_size", batch, f"{asked} there; here a part of n_steps x num_envs = {rows}" * (batch != asked))


def often(config: Config, given: Given, num_envs: int) -> None:
    """When to learn: in environment steps of all environments together, which Stable-Baselines3 counts for each."""
    freq, steps = given.take("train_freq", 1), given.take("gradient_steps", 1)
    every, unit = freq if isinstance(freq, list | tuple) and len(freq) == 2 else (freq, "step")
    check_range(given.place("train_freq"), every, 1, whole=True)
    check_choice(given.place("train_freq"), unit, ("step", "episode"))
    check_range(given.place("gradient_steps"), steps, -1, whole=True)
    if unit == "episode":
        updates = "as many updates as steps" if steps == -1 else f"{steps} updates"
        config.set("model.train_freq", 1, f"{updates} after {every} whole episodes there; here one after each step")
        steps = every = 1
    else:
        every *= num_envs
        config.set("model.train_freq", every, f"{every // num_envs} steps of each of {num_envs} environments" * (num_envs > 1))
    config.set("model.gradient_steps", steps)
    if config.algorithm == "DQN":  # there it moves between two trainings, whatever the number of updates in each
        interval = given.integer("target_update_interval", 10_000)
        updates_each = every if steps == -1 else steps
        config.set(
            "model.target_update_interval", max(1, round(interval / every)) * updates_each, f"updates; {interval} environment steps there"
        )


def noise(config: Config, given: Given, num_envs: int) -> None:
    """TD3's noise, of which there is none unless it is given."""
    kind, sigma = given.take("noise_type"), given.number("noise_std", 0.0)
    if kind is not None:
        check_choice(given.place("noise_type"), kind, ("normal", "ornstein-uhlenbeck"))
    remark = "without correlation in time; an Ornstein-Uhlenbeck process there" if kind == "ornstein-uhlenbeck" else ""
    config.set("model.action_noise", sigma if kind else 0.0, remark)


def as_ddpg(config: Config, given: Given, num_envs: int) -> None:
    """What makes DDPG of TD3."""
    for name, value in {"n_critics": 1, "policy_delay": 1, "target_policy_noise": 0.0}.items():
        config.set(f"model.{name}", value)


STEPS: dict[str, list[Callable[[Config, Given, int], None]]] = {
    "ppo": [minibatches],
    "a2c": [],
    "dqn": [often],
    "sac": [often],
    "td3": [often, noise],
    "ddpg": [often, noise, as_ddpg],
}


def schedule(value: Any, where: str) -> Any:
    """`lin_0.001` as a schedule that falls to 0; a negative number, which switches off, as null.

    Raises:
        SettingError: neither that nor a number.
    """
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


def normalize(config: Config, given: Given) -> None:
    """Running statistics of observations and rewards."""
    setting = read_expression(given.take("normalize", False), given.place("normalize"))
    if setting is False:
        return
    chosen = setting if isinstance(setting, dict) else {}
    if setting is not True and not chosen:
        raise SettingError(f"{given.place('normalize')} must be true or a mapping such as {{norm_reward: false}}, got {setting!r}")
    if chosen.pop("norm_obs", True):
        config.set("model.normalize_obs", "running")
    if chosen.pop("norm_reward", True):
        config.set("model.normalize_reward", True)
    for name, value in chosen.items():
        if name not in ("gamma", "training"):
            config.note(f"normalize.{name} {value} dropped: normalized numbers are cut at 10 here")
