"""`lightning-rl import-zoo`: an environment's section of a file of rl-baselines3-zoo as a config that runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_rl.errors import SettingError, check_choice, check_range
from lightning_rl.importing.config import Config
from lightning_rl.importing.expressions import read_expression
from lightning_rl.importing.given import Given, check_known, read_file
from lightning_rl.importing.zoo_environment import environment
from lightning_rl.importing.zoo_file import algorithm_of, environment_of_today, section_of
from lightning_rl.importing.zoo_policy import policy
from lightning_rl.importing.zoo_tables import ALGORITHMS, DEFAULTS, DIFFERENT, DROPPED, OTHERS, RENAMED, SCHEDULED, ZOO


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
