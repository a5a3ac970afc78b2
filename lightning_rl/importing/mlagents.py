"""`lightning-rl import-mlagents`: a behavior of an ML-Agents trainer file as a config that runs."""

from __future__ import annotations

from pathlib import Path

from lightning_rl.errors import SettingError, check_choice
from lightning_rl.importing.config import Config
from lightning_rl.importing.given import Given
from lightning_rl.importing.mlagents_file import Behavior, read_behavior
from lightning_rl.importing.mlagents_parameters import environment_parameters
from lightning_rl.importing.mlagents_rewards import cloning, reward_signals
from lightning_rl.importing.mlagents_tables import ALIKE, COMMON, DROPPED, INTEGERS, NUMBERS, ON_THE_COMMAND_LINE, PASSED_ON
from lightning_rl.importing.mlagents_trainers import TRAINERS, network

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
