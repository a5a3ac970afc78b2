"""Environment parameters of ML-Agents, with samplers and lessons in their form of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_rl.envs.lessons import as_parameter
from lightning_rl.errors import SettingError
from lightning_rl.importing.config import Config
from lightning_rl.importing.given import Given


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
