"""Names of algorithms and settings, and suggestions for unknown ones, for the command line and Python.

Names are read from source files, so that a misspelled one is reported before torch is imported, which takes seconds.
"""

import ast
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lightning_rl.errors import nearest

ALGORITHMS = {
    "PPO": "lightning_rl.algorithms.ppo",
    "A2C": "lightning_rl.algorithms.a2c",
    "TRPO": "lightning_rl.algorithms.trpo",
    "IMPALA": "lightning_rl.algorithms.impala",
    "POCA": "lightning_rl.algorithms.poca",
    "SAC": "lightning_rl.algorithms.sac",
    "TQC": "lightning_rl.algorithms.tqc",
    "CrossQ": "lightning_rl.algorithms.crossq",
    "DQN": "lightning_rl.algorithms.dqn",
    "PQN": "lightning_rl.algorithms.pqn",
    "TD3": "lightning_rl.algorithms.td3",
    "IQL": "lightning_rl.algorithms.iql",
    "CQL": "lightning_rl.algorithms.cql",
    "TD3BC": "lightning_rl.algorithms.td3_bc",
    "AWAC": "lightning_rl.algorithms.awac",
    "EvolutionStrategies": "lightning_rl.algorithms.evolution",
    "ARS": "lightning_rl.algorithms.ars",
    "BehavioralCloning": "lightning_rl.algorithms.bc",
    "DAgger": "lightning_rl.algorithms.dagger",
}

MODELS = {**ALGORITHMS, "MultiAgent": "lightning_rl.algorithms.multi_agent"}
"""What can be trained: an algorithm, or several algorithms in one environment."""
SECTIONS = {
    "evaluation": "lightning_rl.callbacks.evaluation.EvaluationConfig",
    "checkpoint": "lightning_rl.callbacks.checkpoints.CheckpointConfig",
}
"""Arguments of our Trainer that have a top-level section in a config, and their classes."""
TRAINERS = ("pytorch_lightning.trainer.trainer.Trainer", "lightning_rl.training.trainer.Trainer")
PARTS = {
    "env": "lightning_rl.envs.config.EnvConfig",
    "replay": "lightning_rl.data.replay.storage.ReplayConfig",
    "behavioral_cloning": "lightning_rl.training.side_learners.CloningConfig",
    "actors": "lightning_rl.actors.config.ActorsConfig",
}
"""Settings of algorithms that are mappings, and their classes."""
MOVED = {
    "policy": "model.encoder and model.net_arch: the spaces choose the network",
    "policy_kwargs": "model.net_arch, model.activation and model.encoder",
    "optimize_memory_usage": "model.replay.optimize_memory_usage",
    "replay_buffer_kwargs": "model.replay",
    "n_envs": "model.env.num_envs",
    "n_timesteps": "model.max_env_steps",
    "total_timesteps": "model.max_env_steps",
    "env_id": "model.env.id",
    "env": "model.env.id",
    "lr": "model.learning_rate",
    "optimizer": "configure_optimizers of a subclass, see docs/your_own.md",
    "lr_scheduler": "a schedule as model.learning_rate, or configure_optimizers of a subclass",
    "data": "model.dataset of offline algorithms; other algorithms collect their own experience",
    "algo": "model",
    "normalize": "model.normalize_obs and model.normalize_reward",
    "seed": "seed_everything",
    "device": "trainer.accelerator",
    "verbose": "trainer.enable_progress_bar",
    "tensorboard_log": "trainer.default_root_dir: each run has its TensorBoard events",
    "eval_freq": "evaluation.every_n_env_steps",
    "n_eval_episodes": "evaluation.episodes",
    "import": "--import MODULE on the command line",
    "run-id": "trainer.run_name",
    "num-envs": "model.env.num_envs",
    "resume": "ckpt_path last",
    "initialize-from": "init_from",
    "time-scale": "model.env.kwargs.time_scale",
    "no-graphics": "model.env.kwargs.no_graphics",
    "num-areas": "model.env.kwargs.num_areas",
    "timeout-wait": "model.env.kwargs.timeout_wait",
    "env-args": "model.env.kwargs.env_args, a list",
    "quality-level": "model.env.kwargs.quality_level",
    "target-frame-rate": "model.env.kwargs.target_frame_rate",
    "capture-frame-rate": "model.env.kwargs.capture_frame_rate",
    "base-port": "model.env.kwargs.port",
    "max-lifetime-restarts": "model.env.max_restarts, per hour",
    "torch-device": "trainer.accelerator",
    "inference": "the program lightning-rl evaluate",
}
"""Settings of Stable-Baselines3 and its zoo, and options of mlagents-learn, that have another name or place here, in command-line form."""
NAMES_IN_OTHER_LIBRARIES = {
    "ddpg": "TD3 with n_critics: 1, policy_delay: 1, target_policy_noise: 0",
    "ippo": "PPO, or MultiAgent with an algorithm for each behavior",
    "mappo": "PPO with critic_obs: all",
    "qmix": "POCA, for groups that share a reward",
    "vdn": "POCA, for groups that share a reward",
    "doubledqn": "DQN with double: true",
    "duelingdqn": "DQN with dueling: true",
    "c51": "DQN with distribution: c51",
    "qrdqn": "DQN with distribution: quantiles",
    "rainbow": "DQN with the settings of the config dqn/rainbow",
    "r2d2": "DQN with memory: LSTM",
    "recurrentppo": "PPO with memory: LSTM",
    "maskableppo": "PPO, which applies action masks without a setting",
    "appo": "IMPALA",
    "a3c": "A2C",
    "discretesac": "SAC",
    "redq": "SAC with n_critics: 10, critic_subset: 2, gradient_steps: 20",
    "droq": "SAC with critic_layers: layer_norm, critic_dropout: 0.01, gradient_steps: 20",
    "her": "replay.relabel of an off-policy algorithm",
    "gail": "reward_signals.gail of another algorithm",
    "rnd": "reward_signals.rnd of another algorithm",
    "icm": "reward_signals.curiosity of another algorithm",
    "bc": "BehavioralCloning",
    "es": "EvolutionStrategies",
    "openaies": "EvolutionStrategies",
}
"""What algorithms of other libraries are here, by their names in lower case without punctuation."""
IN_PYTHON = {
    r"\bmodel\.env\.id\b": "env",
    r"\bmodel\.env\.(\w+)": r"env=lrl.EnvConfig(…, \1=…)",
    r"\bmodel\.(behavioral_cloning|replay|actors)\.(\w+)": r"\1={'\2': …}",
    r"\bmodel\.": "",
    r"\bevaluation\.(\w+)": r"lrl.Trainer(evaluation=lrl.EvaluationConfig(\1=…))",
    r"\bcheckpoint\.(\w+)": r"lrl.Trainer(checkpoint=lrl.CheckpointConfig(\1=…))",
    r"\btrainer\.(\w+)": r"lrl.Trainer(\1=…)",
    r"^(evaluation|checkpoint)$": r"lrl.Trainer(\1=…)",
    r"^seed_everything$": "pl.seed_everything(…) of pytorch_lightning, before the model is made",
}
"""Patterns of settings in command-line form, and how to write them in Python."""


def way_out_of_algorithm(name: str, names: Iterable[str], in_python: bool = False) -> str:
    """Return which other algorithms have an unknown setting, or else the result of `way_out`; `names` are the algorithm's settings."""
    owners = [] if name in MOVED else owners_of(name)
    return f", only of {', '.join(owners)}" if owners else way_out(name, names, in_python)


def way_out(name: str, names: Iterable[str], in_python: bool = False) -> str:
    """Return where an unknown setting belongs, or else the closest of `names`; an empty string if there is neither."""
    place = MOVED.get(name) or place_of(name)
    if place is None:
        return nearest(name, names)
    for pattern, written in IN_PYTHON.items() if in_python else ():
        place = re.sub(pattern, written, place)
    return f"; here it is {place}"


def suggest_algorithm(name: str, names: Iterable[str]) -> str:
    """Return what another library's algorithm is here, or else the closest of `names`; an empty string if there is neither."""
    here = NAMES_IN_OTHER_LIBRARIES.get(re.sub(r"\W|_", "", name).lower())
    return f"; here it is {here}" if here else nearest(name, names)


def owners_of(name: str) -> list[str]:
    """Return the algorithms that have a setting."""
    return [algorithm for algorithm in ALGORITHMS if name in settings_of_model(algorithm)]


def place_of(name: str) -> str | None:
    """Return the place of a setting in a config, such as `model.env.num_envs`; None if there is no such setting."""
    if name in SECTIONS:
        return name
    if owners_of(name):
        return f"model.{name}"
    places = [*(f"model.{part}" for part in PARTS), *SECTIONS, "trainer"]
    return next((f"{place}.{name}" for place in places if name in settings_of_section(place.removeprefix("model."))), None)


@cache
def settings_of_model(name: str) -> list[str]:
    """Return the settings of an algorithm of this package."""
    return [setting for setting in read_names(f"{MODELS[name]}.{name}") if setting != "spaces"]


@cache
def settings_of_section(section: str) -> list[str]:
    """Return the settings of a section of a config, or of a part of an algorithm's settings."""
    if section == "trainer":
        return [name for trainer in TRAINERS for name in read_names(trainer) if name not in SECTIONS]
    return read_names({**SECTIONS, **PARTS}[section])


def read_names(path: str) -> list[str]:
    """Read the settings of a class: the fields of a dataclass and its bases, or the parameters of `__init__`."""
    return [name for name, is_setting in read_fields(path).items() if is_setting]


@cache
def read_fields(path: str) -> dict[str, bool]:
    """Read the fields of a class, and whether each is a setting: a field with `init=False` hides a base class's setting."""
    module, _, name = path.rpartition(".")
    tree = read_source(module)
    definition = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    if not any("dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list):
        init = next((node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
        return {} if init is None else {argument.arg: True for argument in (*init.args.args[1:], *init.args.kwonlyargs)}
    home = {name.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
    home |= {node.name: module for node in tree.body if isinstance(node, ast.ClassDef)}
    bases = [base.id for base in definition.bases if isinstance(base, ast.Name) and str(home.get(base.id)).startswith("lightning_rl.")]
    fields: dict[str, bool] = {}
    for base in reversed(bases):
        fields |= read_fields(f"{home[base]}.{base}")
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation):
            fields[node.target.id] = node.value is None or "init=False" not in ast.unparse(node.value)
    return fields


@cache
def read_source(module: str) -> ast.Module:
    """Read a module's source without importing it or its parent packages."""
    package, *rest = module.split(".")
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return ast.parse(Path(spec.origin).parent.joinpath(*rest).with_suffix(".py").read_text(encoding="utf-8"))
