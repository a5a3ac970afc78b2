"""`lightning-rl import-mlagents`: a behavior of an ML-Agents trainer file, or all of them for `MultiAgent`, as a config that runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from lightning_rl.envs.lessons import as_parameter
from lightning_rl.envs.unity.settings import UnitySettings, check_no_build
from lightning_rl.errors import SettingError, check_choice, check_names, nearest
from lightning_rl.importers import mlagents_settings as mlagents
from lightning_rl.importers.config import Config, Settings, merge, read_file
from lightning_rl.settings.yaml_files import Plain, as_mapping

ALGORITHMS = {"ppo": "PPO", "sac": "SAC", "poca": "POCA"}
MISSING = {
    "offline_bc": "see lightning-rl fit --model.help BehavioralCloning",
    "online_bc": "see behavioral_cloning of PPO, or lightning-rl fit --model.help BehavioralCloning",
}
NESTED = {"hyperparameters": mlagents.HYPERPARAMETERS, "network_settings": mlagents.NETWORK}
FLAT = mlagents.HYPERPARAMETERS | mlagents.NETWORK | mlagents.MEMORY | mlagents.OLD
"""Settings of a behavior in an old file, in which behaviors have no sections."""


def import_mlagents(path: str, behavior_name: str | None = None, env_id: str | None = None) -> str:
    """Convert a behavior, or all of a file, to the text of a config.

    Args:
        behavior_name: which one; default: all.
        env_id: the environment, which such files do not name.

    Raises:
        SettingError: the file cannot be read, has an unknown setting, or asks for a trainer that does not exist here.
    """
    if env_id is not None:
        check_no_build("--env", env_id)
    file = read_trainers(path)
    if behavior_name is None and len(file.behaviors) > 1:
        return convert_all(path, file, env_id).text()
    return convert_behavior(path, read_behavior(file, behavior_name), env_id).text()


def of_env(env_id: str | None) -> str:
    """Return the option that names an environment."""
    return "" if env_id is None else f" --env {env_id}"


def convert_all(path: str, file: File, env_id: str | None) -> Config:
    """Convert several behaviors to one config of `MultiAgent`: a learner for each, and settings of the run from the first that has them."""
    config = Config("MultiAgent", f"lightning-rl import-mlagents {Path(path).name}{of_env(env_id)}")
    names = {str(name): known_as(str(name)) for name in file.behaviors}
    for name in names:
        same = [other for other in names if names[other] == names[name]]
        if len(same) > 1:
            raise SettingError(
                f"behaviors {same[0]!r} and {same[1]!r} are both {names[name]} here: names have only letters, digits, _ and -; rename one"
            )

    def convert(num_envs: int | None) -> dict[str, Config]:
        return {str(name): convert_behavior(path, read_behavior(file, name), env_id, names, num_envs) for name in file.behaviors}

    parts = convert(None)
    wanted = [part.settings["model.env.num_envs"] for part in parts.values() if "model.n_steps" in part.settings]
    if wanted:
        parts = convert(min(wanted))
    takes_turns = sum("model.self_play.save_steps" in part.settings for part in parts.values()) > 1
    for behavior, part in parts.items():
        for name, value in part.settings.items():
            if name.startswith("model.") and not name.startswith(OF_THE_RUN):
                continue
            if name not in config.settings:
                config.set(name, value, part.remarks[name])
            elif value != config.settings[name]:
                config.note(f"{behavior}: {name} {value} dropped: a run has one, {config.settings[name]} here")
    for line in dict.fromkeys(line for part in parts.values() for line in part.comments[1:]):
        config.note(line)
    parameters: Plain = {}
    for part in parts.values():
        parameters = part.settings.get("model.env.parameters", {}) | parameters
    if parameters:
        config.set("model.env.parameters", parameters)
    steps = max(part.settings["model.max_env_steps"] for part in parts.values())
    config.set("model.max_env_steps", steps, "steps of all copies; ML-Agents counts those of each behavior's agents")
    for name, part in parts.items():
        place = f"model.behaviors.{names[name]}"
        learner = {key: value for key, value in part.settings.items() if key.startswith("model.") and not key.startswith("model.env.")}
        learner = {key: value for key, value in learner.items() if not key.startswith((*OF_THE_RUN, "model.max_env_steps"))}
        if "model.self_play.save_steps" in learner and not takes_turns:
            learner = {key: value for key, value in learner.items() if not key.startswith("model.self_play.")}
            config.note(f"{name}.self_play dropped: no other behavior has it; import this one by --behavior {name}")
        config.set(f"{place}.agents", f"{name}/*" if mlagents.is_scene(part) else f"{name}*")
        config.set(f"{place}.learner.class_path", part.algorithm)
        for key, value in learner.items():
            config.set(f"{place}.learner.init_args.{key.removeprefix('model.')}", value, part.remarks[key])
    return config


OF_THE_RUN = ("model.env.id", "model.env.num_envs", "model.env.max_restarts", "model.env.kwargs.", "model.log_interval")
"""Settings of the model that learners share, in addition to the length of the run."""


def known_as(name: str) -> str:
    """Return our name of a behavior, which consists of letters, digits, _ and -."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return f"{'behavior_' * (not plain or plain.isdigit())}{plain}"


def convert_behavior(
    path: str, behavior: Behavior, env_id: str | None, names: Mapping[str, str] | None = None, num_envs: int | None = None
) -> Config:
    """Convert one behavior to a config of its algorithm.

    Args:
        names: our names of all behaviors, by their names in the file, if all learn in one run.
        num_envs: number of environments, if other behaviors learn in them too; default: from the file, or as its rollouts need.
    """
    settings = behavior.settings
    kind = "trainer" if "trainer" in settings else "trainer_type"
    trainer = settings.take(kind, "ppo")
    if str(trainer) in MISSING:
        raise SettingError(f"{settings.place(kind)} {trainer}: {MISSING[trainer]}")
    check_choice(settings.place(kind), trainer, ALGORITHMS)
    command = f"lightning-rl import-mlagents {Path(path).name} --behavior {behavior.name}{of_env(env_id)}"
    config = Config(ALGORITHMS[trainer], command)
    if env_id is None:
        config.note("such files do not name an environment: lightning-rl fit --config THIS_FILE --model.env.id ID")
    else:
        config.set("model.env.id", env_id)
    set_sections(config, behavior, names, num_envs)
    for name, (target, default) in mlagents.COMMON.items():
        config.set(target, settings.integer(name, default))
    mlagents.TRAINERS[trainer](config, settings, behavior.old)
    for name, (target, number) in mlagents.NUMBERS[trainer].items():
        config.set(target, settings.number(name, number))
    for name, (target, default) in mlagents.INTEGERS[trainer].items():
        config.set(target, settings.integer(name, default))
    mlagents.set_network(config, settings)
    for name, (value, remark) in mlagents.FIXED[trainer].items():
        config.set(f"model.{name}", value, remark)
    mlagents.set_reward_signals(config, settings, trainer, behavior.old)
    mlagents.set_cloning(config, settings, trainer)
    mlagents.set_self_play(config, settings, several=names is not None)
    if any(name in settings for name in ("checkpoint_interval", "keep_checkpoints", "even_checkpoints")):
        set_checkpoints(config, settings)
    config.drop(settings.values, mlagents.DROPPED)
    return config


class Behavior(NamedTuple):
    """A behavior of a file.

    settings: without sections, in whatever form the file has them.  old: whether the file has them without sections, too.
    sections: the other sections of the file.
    """

    name: str
    settings: Settings
    old: bool
    sections: Settings


class File(NamedTuple):
    """A trainer file.

    behaviors: settings by the behavior's name.  default: settings of all behaviors.  prefix: the place of behaviors in the file.
    sections: the other sections.
    """

    behaviors: Plain
    default: Plain
    prefix: str
    sections: Plain


def read_trainers(path: str) -> File:
    """Read a file, new or old."""
    file = read_file(path)
    if "behaviors" in file or "default_settings" in file:
        check_names("", file, mlagents.SECTIONS, " of an ML-Agents file")
        behaviors, default = (as_mapping(key, file.pop(key, None)) for key in ("behaviors", "default_settings"))
        sections, prefix = file, "behaviors."
    else:
        default = as_mapping("default", file.pop("default", None))
        sections = {key: file.pop(key) for key in ("parameter_randomization",) if key in file}
        behaviors, prefix = file, ""
    for section, known in mlagents.ENTRIES.items():
        check_names(f"{section}.", as_mapping(section, sections.get(section)), known, " of ML-Agents")
    if not behaviors and not default:
        raise SettingError(f"{path} has no behaviors; each has a name and settings")
    return File(behaviors, default, prefix, sections)


def read_behavior(file: File, name: object) -> Behavior:
    """Read the behavior of that name, or the only one."""
    behaviors, default, prefix, sections = file
    name = next(iter(behaviors), "default") if name is None else name
    if name not in behaviors and not (name == "default" and default):
        raise SettingError(f"--behavior {name}: there is no such behavior{nearest(str(name), map(str, behaviors))}")
    settings, old = flatten(merge(default, as_mapping(f"{prefix}{name}", behaviors.get(name))), f"{prefix}{name}.")
    return Behavior(str(name), settings, old, Settings(sections))


def flatten(settings: Plain, prefix: str) -> tuple[Settings, bool]:
    """Flatten the sections of a behavior's settings; also return whether there were none, as in an old file."""
    new = "trainer_type" in settings or any(section in settings for section in NESTED)
    old = not new and bool(settings.keys() & FLAT)
    check_names(prefix, settings, mlagents.BEHAVIOR | (set() if new else FLAT), " of ML-Agents")
    check_names(f"{prefix}self_play.", as_mapping(f"{prefix}self_play", settings.get("self_play")), mlagents.SELF_PLAY, " of ML-Agents")
    flat = {name: value for name, value in settings.items() if name not in NESTED}
    places = {name: f"{prefix}{name}" for name in flat}

    def inline(values: object, path: str, known: set[str]) -> None:
        section = as_mapping(f"{prefix}{path}", values)
        check_names(f"{prefix}{path}.", section, known, " of ML-Agents")
        flat.update(section)
        places.update({name: f"{prefix}{path}.{name}" for name in section})

    for section, known in NESTED.items():
        inline(settings.get(section), section, known)
    if new:
        memory = flat.pop("memory", None)
        flat["use_recurrent"] = memory is not None
        inline(memory, "network_settings.memory", mlagents.MEMORY)
    return Settings(flat, places), old


def set_sections(config: Config, behavior: Behavior, names: Mapping[str, str] | None, num_envs: int | None) -> None:
    """Convert the sections next to the behaviors; `names` and `num_envs` as in `convert_behavior`."""
    sections = behavior.sections
    env, checkpoint, torch = (sections.section(f"{name}_settings") for name in ("env", "checkpoint", "torch"))
    players, areas = env.integer("num_envs", 1), env.integer("num_areas", 1)
    given = players * areas
    if mlagents.is_scene(config):
        set_players(config, env, sections, players, areas)
    elif num_envs is not None:
        config.set("model.env.num_envs", num_envs, "buffer_size / time_horizon, the least of all behaviors" * (num_envs != given))
    elif given > 1:
        config.set("model.env.num_envs", given)
    set_environment_parameters(config, behavior, names)
    seed = env.integer("seed", -1, low=-1)
    if seed >= 0:
        config.set("seed_everything", seed)
    if "device" in torch:
        config.set("trainer.accelerator", str(torch.take("device")).partition(":")[0])
    for name, target in mlagents.RENAMED.items():
        if name in checkpoint:
            config.set(target, str(checkpoint.take(name)))
    config.drop(env.values | checkpoint.values | sections.values, mlagents.COMMAND_LINE)


def set_players(config: Config, env: Settings, sections: Settings, players: int, areas: int) -> None:
    """Convert the settings of Unity's players that a file has; `env` and `sections`: those that are not used yet."""
    config.set("model.env.num_envs", players, "players; the agents of each are rows")
    kept = {"env_args": "env_args", "base_port": "port", "timeout_wait": "timeout_wait"}
    given = {ours: env.take(name) for name, ours in kept.items() if name in env} | {"num_areas": areas}
    engine = sections.section("engine_settings")
    given |= {name: engine.take(name) for name in mlagents.ENTRIES["engine_settings"] - {"no_graphics_monitor"} if name in engine}
    env.take("env_path")
    if "max_lifetime_restarts" in env:
        config.set("model.env.max_restarts", env.integer("max_lifetime_restarts", 10, low=0), "in an hour")
    for name, value in given.items():
        if value not in (getattr(UnitySettings, name, None), []):
            config.set(f"model.env.kwargs.{name}", value)
    config.drop(engine.values, {"no_graphics_monitor": "all players have the same graphics"})


def set_environment_parameters(config: Config, behavior: Behavior, names: Mapping[str, str] | None) -> None:
    """Convert parameters that are sampled for each episode, and those of a curriculum; `names` as in `convert_behavior`."""
    sections, settings = behavior.sections, behavior.settings
    dropped: set[str] = set()
    parameters: Plain = {}

    def add(where: str, added: Plain) -> None:
        for name, setting in added.items():
            as_parameter(f"{where}.{name}", setting)
        parameters.update(added)

    def convert_criteria_behavior(where: str, name: object) -> Plain:
        if names is None:
            dropped.add(str(name))
            return {}
        if str(name) not in names:
            raise SettingError(f"{where}.completion_criteria.behavior {name!r} is not in the file{nearest(str(name), names)}")
        return {"behavior": names[str(name)]}

    given = sections.mapping("environment_parameters")
    current = {
        name: convert_lessons(f"environment_parameters.{name}", setting, convert_criteria_behavior) for name, setting in given.items()
    }
    add("environment_parameters", {name: setting for name, setting in current.items() if setting is not None})
    if dropped:
        config.note(f"completion_criteria.behavior {', '.join(sorted(dropped))} dropped: lessons are decided by the behavior that learns")
    randomized = sections.mapping("parameter_randomization")
    if randomized.pop("resampling-interval", None):
        config.note("resampling-interval dropped: parameters are drawn again for each episode")
    add("parameter_randomization", {name: convert_sampler(name, setting) for name, setting in randomized.items()})
    criteria_behavior = {} if names is None else {"behavior": names[behavior.name]}
    add(f"{settings.place('curriculum')}.parameters", convert_curriculum(settings, criteria_behavior))
    if parameters:
        config.set("model.env.parameters", parameters)


def convert_lessons(where: str, setting: object, convert_criteria_behavior: Callable[[str, object], Plain]) -> object:
    """Convert lessons `{Easy: {value: 1}}` to `{name: Easy, value: 1}`.

    `convert_criteria_behavior` takes the place of a lesson and the behavior that decides about it, and returns the entry for the criteria.
    """
    if not isinstance(setting, Mapping) or not isinstance(setting.get("curriculum"), list):
        return setting
    lessons = []
    for number, lesson in enumerate(setting["curriculum"]):
        if isinstance(lesson, Mapping) and len(lesson) == 1 and isinstance(next(iter(lesson.values())), Mapping):
            lesson = {"name": next(iter(lesson)), **next(iter(lesson.values()))}
        criteria = lesson.get("completion_criteria") if isinstance(lesson, Mapping) else None
        if isinstance(criteria, Mapping) and "behavior" in criteria:
            others = {key: value for key, value in criteria.items() if key != "behavior"}
            converted = convert_criteria_behavior(f"{where}.curriculum[{number}]", criteria["behavior"])
            lesson = {**lesson, "completion_criteria": {**others, **converted}}
        lessons.append(lesson)
    return {**setting, "curriculum": lessons}


def convert_sampler(name: str, setting: object) -> Plain:
    """Convert a sampler of an old `parameter_randomization`."""
    if not isinstance(setting, Mapping) or "sampler-type" not in setting:
        raise SettingError(f"parameter_randomization.{name} must be a mapping with a sampler-type, got {setting!r}")
    parameters = {key: value for key, value in setting.items() if key != "sampler-type"}
    return {"sampler_type": setting["sampler-type"], "sampler_parameters": parameters}


def convert_curriculum(settings: Settings, criteria_behavior: Plain) -> Plain:
    """Convert an old `curriculum` of a behavior, whose thresholds are between the values of each parameter.

    `criteria_behavior`: the entry of the criteria for the behavior that decides.
    """
    where, old = settings.place("curriculum"), settings.mapping("curriculum")
    thresholds, parameters = old.pop("thresholds", []), old.pop("parameters", {})
    if not isinstance(thresholds, list) or not isinstance(parameters, Mapping):
        raise SettingError(f"{where} must have a list of thresholds and a mapping of parameters")
    criteria = [{"completion_criteria": {**old, **criteria_behavior, "threshold": threshold}} for threshold in thresholds] + [{}]
    curricula: Plain = {}
    for name, values in parameters.items():
        if not isinstance(values, list) or len(values) != len(criteria):
            raise SettingError(
                f"{where}.parameters.{name} must be a list of {len(criteria)} values, one more than thresholds, got {values!r}"
            )
        curricula[name] = {"curriculum": [{"value": value, **criterion} for value, criterion in zip(values, criteria, strict=True)]}
    return curricula


def set_checkpoints(config: Config, settings: Settings) -> None:
    """Convert how often checkpoints are saved and how many are kept."""
    interval, keep = settings.integer("checkpoint_interval", 500_000), settings.integer("keep_checkpoints", 5, low=-1)
    if settings.take("even_checkpoints", False) and keep > 0:
        interval = max(1, config.settings["model.max_env_steps"] // keep)
    config.set("checkpoint.every_n_env_steps", interval)
    config.set("checkpoint.keep", keep or -1)
