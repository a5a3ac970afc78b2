"""A hyper-parameter file of rl-baselines3-zoo: which algorithm, which of its sections, and which environment of today."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym

from lightning_rl.envs.packages import prepare_package
from lightning_rl.errors import SettingError, check_choice, nearest
from lightning_rl.importing.given import Given
from lightning_rl.importing.zoo_tables import ALGORITHMS, ELSEWHERE

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
