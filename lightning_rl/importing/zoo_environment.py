"""Environments of the zoo: arguments, stacked frames, wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from lightning_rl.errors import SettingError
from lightning_rl.importing.config import Config
from lightning_rl.importing.expressions import read_expression
from lightning_rl.importing.given import Given
from lightning_rl.importing.zoo_tables import WRAPPER_DEFAULTS, WRAPPERS


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
