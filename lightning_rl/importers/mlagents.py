"""`lightning-rl import-mlagents`: a behavior of an ML-Agents trainer file as a config that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from lightning_rl.envs.lessons import as_parameter
from lightning_rl.errors import SettingError, check_choice, nearest
from lightning_rl.importers.config import Config, Given, check_known, merged, read_file
from lightning_rl.importers.mlagents_settings import (
    ALIKE,
    BEHAVIOR,
    COMMON,
    DROPPED,
    ENTRIES,
    HYPERPARAMETERS,
    INTEGERS,
    MEMORY,
    NETWORK,
    NUMBERS,
    ON_THE_COMMAND_LINE,
    PASSED_ON,
    SECTIONS,
    SEED_ERA,
    SELF_PLAY,
    TRAINERS,
    cloning,
    network,
    reward_signals,
)

NESTED = {"hyperparameters": HYPERPARAMETERS, "network_settings": NETWORK}
FLAT = HYPERPARAMETERS | NETWORK | MEMORY | SEED_ERA
"""What stands in a behavior of an old file."""


@dataclass
class Behavior:
    """What a file says of one behavior.

    Args:
        name: of the behavior.
        given: its settings side by side, whatever the file's form.
        old: whether the file has them side by side.
        sections: the file's other sections, each with what is known of it.
    """

    name: str
    given: Given
    old: bool
    sections: Given


def read_behavior(path: str, name: str | None) -> Behavior:
    """The behavior of that name, or the only one.

    Raises:
        SettingError: there is none, there are several, or a setting is not one of ML-Agents.
    """
    file = read_file(path)
    if any(section in file for section in ("behaviors", "default_settings")):
        check_known(file, SECTIONS, "an ML-Agents file")
        behaviors, default = part(file, "behaviors"), part(file, "default_settings")
        sections = {key: value for key, value in file.items() if key not in ("behaviors", "default_settings")}
        prefix = "behaviors."
    else:
        behaviors = {key: value for key, value in file.items() if key not in ("default", "parameter_randomization")}
        default = part(file, "default")
        sections = {key: file[key] for key in ("parameter_randomization",) if key in file}
        prefix = ""
    for section, known in ENTRIES.items():
        check_known(part(sections, section), known, "ML-Agents", f"{section}.")
    if not behaviors and not default:
        raise SettingError(f"{path} has no behaviors; each has a name and settings")
    name = choose(name, behaviors, bool(default))
    settings = merged(default, part(behaviors, name, prefix))
    given, old = side_by_side(settings, f"{prefix}{name}.")
    return Behavior(name, given, old, Given(sections))


def choose(name: str | None, behaviors: Mapping[str, Any], default: bool) -> str:
    """The name of the behavior to take."""
    if name is None and len(behaviors) <= 1:
        return next(iter(behaviors), "default")
    if name is None:
        names = shorten(", ".join(map(str, behaviors)), 110, placeholder=" …")
        raise SettingError(f"there are {len(behaviors)} behaviors, name one of them by --behavior: {names}")
    if name not in behaviors and not (name == "default" and default):
        raise SettingError(f"--behavior {name}: there is none of that name{nearest(name, map(str, behaviors))}")
    return name


def part(settings: Mapping[str, Any], name: str, prefix: str = "") -> dict[str, Any]:
    """A part of the file that must be a mapping; an empty one where it is missing or null."""
    value = settings.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise SettingError(f"{prefix}{name} must be a mapping of settings, got {value!r}")
    return dict(value or {})


def side_by_side(settings: Mapping[str, Any], prefix: str) -> tuple[Given, bool]:
    """The settings of a behavior without its sections, and whether there were none.

    Raises:
        SettingError: one is not known in its place.
    """
    new = "trainer_type" in settings or any(section in settings for section in NESTED)
    old = not new and bool(settings.keys() & FLAT)
    check_known(settings, BEHAVIOR | (set() if new else FLAT), "ML-Agents", prefix)
    check_known(part(settings, "self_play", prefix), SELF_PLAY, "ML-Agents", f"{prefix}self_play.")
    flat, places = {}, {}
    for name, value in settings.items():
        if name not in NESTED:
            flat[name], places[name] = value, f"{prefix}{name}"
    for section, known in NESTED.items():
        inner = part(settings, section, prefix)
        check_known(inner, known, "ML-Agents", f"{prefix}{section}.")
        flat |= inner
        places |= {name: f"{prefix}{section}.{name}" for name in inner}
    if new:
        memory = part(flat, "memory", f"{prefix}network_settings.")
        check_known(memory, MEMORY, "ML-Agents", f"{prefix}network_settings.memory.")
        flat["use_recurrent"] = flat.pop("memory", None) is not None
        flat |= memory
        places |= {name: f"{prefix}network_settings.memory.{name}" for name in memory}
    return Given(flat, places), old


def environment_parameters(config: Config, sections: Given, given: Given) -> None:
    """What environments draw their parameters from, or what a curriculum gives them.

    Raises:
        SettingError: they cannot be read.
    """
    today = {name: of_today(setting) for name, setting in sections.mapping("environment_parameters").items()}
    parameters = check("environment_parameters", {name: setting for name, (setting, _) in today.items() if setting is not None})
    if behaviors := {each for _, named in today.values() for each in named}:
        config.note(f"completion_criteria.behavior {', '.join(sorted(behaviors))} dropped: lessons are judged by the one that learns")
    randomized = sections.mapping("parameter_randomization")
    if randomized.pop("resampling-interval", None):
        config.note("resampling-interval dropped: parameters are drawn anew for each episode")
    parameters |= check("parameter_randomization", {name: sampler(name, setting) for name, setting in randomized.items()})
    parameters |= check(f"{given.place('curriculum')}.parameters", curriculum(given))
    if parameters:
        config.set("model.env.parameters", parameters)


def check(where: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters, which can be read. Raise `SettingError` if not."""
    for name, setting in parameters.items():
        as_parameter(f"{where}.{name}", setting)
    return parameters


def of_today(setting: Any) -> tuple[Any, set[str]]:
    """A parameter whose lessons have their names beside their values: `{name: Easy, value: 1}` and not `{Easy: {value: 1}}`.

    Also the behaviors that were to judge them, which are left out.
    """
    if not isinstance(setting, Mapping) or not isinstance(setting.get("curriculum"), list):
        return setting, set()
    lessons, behaviors = [], set()
    for lesson in setting["curriculum"]:
        if isinstance(lesson, Mapping) and len(lesson) == 1 and isinstance(next(iter(lesson.values())), Mapping):
            lesson = {"name": next(iter(lesson)), **next(iter(lesson.values()))}
        criteria = lesson.get("completion_criteria") if isinstance(lesson, Mapping) else None
        if isinstance(criteria, Mapping) and "behavior" in criteria:
            behaviors.add(str(criteria["behavior"]))
            lesson = {**lesson, "completion_criteria": {key: value for key, value in criteria.items() if key != "behavior"}}
        lessons.append(lesson)
    return {**setting, "curriculum": lessons}, behaviors


def sampler(name: str, setting: Any) -> dict[str, Any]:
    """A sampler of an old `parameter_randomization`."""
    if not isinstance(setting, Mapping) or "sampler-type" not in setting:
        raise SettingError(f"parameter_randomization.{name} must be a mapping with a sampler-type, got {setting!r}")
    parameters = {key: value for key, value in setting.items() if key != "sampler-type"}
    return {"sampler_type": setting["sampler-type"], "sampler_parameters": parameters}


def curriculum(given: Given) -> dict[str, Any]:
    """An old `curriculum` of a behavior, whose thresholds lie between the values of each parameter."""
    where, old = given.place("curriculum"), given.mapping("curriculum")
    thresholds, parameters = old.pop("thresholds", []), old.pop("parameters", {})
    if not isinstance(thresholds, list) or not isinstance(parameters, Mapping):
        raise SettingError(f"{where} must have a list of thresholds and a mapping of parameters")
    criteria = [{"completion_criteria": {**old, "threshold": threshold}} for threshold in thresholds] + [{}]
    for name, values in parameters.items():
        if not isinstance(values, list) or len(values) != len(criteria):
            raise SettingError(
                f"{where}.parameters.{name} must be a list of {len(criteria)} values, one more than thresholds, got {values!r}"
            )
    return {
        name: {"curriculum": [{"value": value, **criterion} for value, criterion in zip(values, criteria, strict=True)]}
        for name, values in parameters.items()
    }


ALGORITHMS = {"ppo": "PPO", "sac": "SAC"}
ELSEWHERE = {
    "poca": "there is no POCA here; PPO for each agent is nearest: trainer_type ppo",
    "offline_bc": "see lightning-rl fit --model.help BehavioralCloning",
    "online_bc": "see behavioral_cloning beside PPO, or lightning-rl fit --model.help BehavioralCloning",
}


def import_mlagents(path: str, behavior_name: str | None = None, env_id: str | None = None) -> str:
    """The config as text.

    Args:
        path: of the file.
        behavior_name: which of its behaviors; needed where there are several.
        env_id: the environment, which such files do not name.

    Raises:
        SettingError: the file cannot be read, says something unknown, or asks for a trainer that is not here.
    """
    behavior = read_behavior(path, behavior_name)
    given = behavior.given
    kind = "trainer" if "trainer" in given else "trainer_type"
    trainer = given.take(kind, "ppo")
    if str(trainer) in ELSEWHERE:
        raise SettingError(f"{given.place(kind)} {trainer}: {ELSEWHERE[trainer]}")
    check_choice(given.place(kind), trainer, ALGORITHMS)
    config = Config(ALGORITHMS[trainer], f"lightning-rl import-mlagents {Path(path).name} --behavior {behavior.name}")
    if env_id is None:
        config.note("such files do not name an environment: lightning-rl fit --config THIS_FILE --model.env.id ID")
    else:
        config.set("model.env.id", env_id)
    sections(config, behavior)
    for name, (target, default) in COMMON.items():
        config.set(target, given.integer(name, default))
    TRAINERS[trainer](config, given, behavior.old)
    for name, (target, number) in NUMBERS[trainer].items():
        config.set(target, given.number(name, number))
    for name, (target, default) in INTEGERS[trainer].items():
        config.set(target, given.integer(name, default))
    network(config, given)
    for name, (value, remark) in ALIKE[trainer].items():
        config.set(f"model.{name}", value, remark)
    reward_signals(config, given, trainer, behavior.old)
    cloning(config, given, trainer)
    if any(name in given for name in ("checkpoint_interval", "keep_checkpoints", "even_checkpoints")):
        checkpoints(config, given)
    config.drop(given.settings, DROPPED)
    return config.text()


def sections(config: Config, behavior: Behavior) -> None:
    """What stands beside the behaviors."""
    given = behavior.sections
    env, checkpoint, torch = (section(given, f"{name}_settings") for name in ("env", "checkpoint", "torch"))
    num_envs = env.integer("num_envs", 1) * env.integer("num_areas", 1)
    config.set("model.env.num_envs", num_envs)
    environment_parameters(config, given, behavior.given)
    seed = env.integer("seed", -1, low=-1)
    if seed >= 0:
        config.set("seed_everything", seed)
    if "device" in torch:
        config.set("trainer.accelerator", str(torch.take("device")).partition(":")[0])
    for name, target in PASSED_ON.items():
        if name in checkpoint:
            config.set(target, str(checkpoint.take(name)))
    config.drop(env.settings | checkpoint.settings | given.settings, ON_THE_COMMAND_LINE)


def section(sections: Given, name: str) -> Given:
    """The settings of one of them."""
    settings = sections.mapping(name)
    return Given(settings, {each: f"{name}.{each}" for each in settings})


def checkpoints(config: Config, given: Given) -> None:
    """How often to save, and how many copies to keep, where the file says it."""
    interval, keep = given.integer("checkpoint_interval", 500_000), given.integer("keep_checkpoints", 5, low=-1)
    if given.take("even_checkpoints", False) and keep > 0:
        interval = max(1, config.settings["model.max_env_steps"] // keep)
    config.set("checkpoint.every_n_env_steps", interval)
    config.set("checkpoint.keep", keep or -1)
