"""Converting files in tests, and training with what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

import lightning_rl
from lightning_rl.cli.names import read_options
from lightning_rl.cli.settings import read_arguments
from lightning_rl.settings.yaml_files import Loader
from tests.experts import at_random
from tests.fitting import fit

FILES = Path(__file__).parent / "files"
SMALLER: dict[str, dict[str, Any]] = {
    "PPO": {"n_steps": 16, "batch_size": 16, "n_epochs": 1},
    "A2C": {},
    "POCA": {"n_steps": 16, "batch_size": 16, "n_epochs": 1},
    "DQN": {"steps_per_iteration": 64},
    "SAC": {"steps_per_iteration": 64},
    "ARS": {"episodes_per_generation": 2, "top_directions": 1},
    "TRPO": {"n_steps": 16, "batch_size": 16},
    "TQC": {"steps_per_iteration": 64},
    "CrossQ": {"steps_per_iteration": 64},
    "TD3": {"steps_per_iteration": 64},
}


def settings(text: str) -> dict[str, Any]:
    """The algorithm's settings in a config."""
    return yaml.load(text, Loader)["model"]["init_args"]


def comments(text: str) -> list[str]:
    """What a config says before its settings, without its first line."""
    return [line.removeprefix("# ") for line in text.splitlines()[1:] if line.startswith("#")]


def remark(text: str, name: str) -> str:
    """What stands beside a setting."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{name}:")]
    return line.partition("  # ")[2]


def trains(text: str, folder: Path, **smaller: Any) -> None:
    """The command line knows all names of a config, and what it describes, made smaller, trains for an iteration."""
    path = folder / "imported.yaml"
    path.write_text(text)
    read_arguments(read_options([f"--config={path}", "--model.env.id=CartPole-v1"]))
    name = yaml.load(text, Loader)["model"]["class_path"]
    given = settings(text)
    given["env"] = given["env"] | {"num_envs": 2} | smaller.pop("env", {})
    for part in (given.get("reward_signals", {}).get("gail"), given.get("behavioral_cloning")):
        if part:
            part["demo_path"] = at_random(given["env"]["id"], "{}")
    if name in ("DQN", "SAC", "TQC", "CrossQ", "TD3"):
        given = {"batch_size": 64} | given
        smaller = {"buffer_size": 512, "learning_starts": 30} | smaller
        given["batch_size"], given["train_freq"] = min(given["batch_size"], 64), min(given["train_freq"], 32)
    if "memory" in given:
        smaller = {"memory": given["memory"] | {"init_args": {"memory_size": 4, "sequence_length": 8}}} | smaller
    model = getattr(lightning_rl, name)(**given | SMALLER[name] | {"net_arch": [8] * len(given.get("net_arch", [8]))} | smaller)
    assert fit(model, max_steps=1).global_step == 1
    assert model.updates > 0
