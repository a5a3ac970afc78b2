"""Write and read a shared agent: weights as safetensors, and everything else that acting needs as JSON. No code in them is ever run.

`agent.safetensors` holds the `state_dict` of a checkpoint, `agent.json` its settings and spaces, with the size and the hash of the other
file. The state that resuming needs (optimizers, environments, random generators, memories) is in neither.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lightning_rl.checkpoints.archive import Checkpoint
from lightning_rl.checkpoints.files import shown
from lightning_rl.checkpoints.manifest import written_by
from lightning_rl.errors import SettingError, nearest
from lightning_rl.processes.startup import packaged_agents
from lightning_rl.settings.yaml_files import Plain

FORMAT = "lightning_rl agent"
FORMAT_VERSION = 1
WEIGHTS, DESCRIPTION = "agent.safetensors", "agent.json"
ZOO = "zoo:"
"""Prefix of the address of an agent that comes with this package: `zoo:ALGORITHM/ENVIRONMENT`, named after the config that trained it."""
MAX_BYTES = 1 << 24
"""Maximum size of a description in bytes; ours have a few thousand, and more if an observation has many bounds."""
UNSHARED = ("ranks",)
"""Entries of our part of a checkpoint that only resuming needs."""


def agent_of(folder: Path) -> Path | None:
    """Return the path of the weights of the agent in a folder; None if there is no agent."""
    return folder / WEIGHTS if (folder / DESCRIPTION).is_file() else None


def packaged_agent(address: str | Path) -> Path:
    """Return the path of the weights for an address of the zoo. Raises `SettingError`: there is no such agent."""
    name, known = str(address).removeprefix(ZOO), packaged_agents()
    agent = agent_of(known[name]) if name in known else None
    if agent is None:
        raise SettingError(f"{address} is not one of the agents that come with this package{nearest(name, known)}")
    return agent


def write_agent(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write what acting needs of a checkpoint into a folder, and check that it reads back the same. Returns the path of the weights.

    Raises:
        SettingError: settings are not plain data.
    """
    entries = {key: value for key, value in checkpoint["lightning_rl"].items() if key not in UNSHARED}
    content = {"lightning_rl": entries, "hyper_parameters": checkpoint["hyper_parameters"]}
    path = folder / WEIGHTS
    try:
        described = {name: encode(part, name) for name, part in content.items()}
        weights = {
            name: weight.detach().cpu().clone(memory_format=torch.contiguous_format) for name, weight in checkpoint["state_dict"].items()
        }
        save_file(weights, path, {"format": "pt"})
    except (TypeError, ValueError, KeyError) as error:  # a type that safetensors does not have is a KeyError
        raise SettingError(f"this agent cannot be shared: {error}") from error
    file = {"name": WEIGHTS, "size": path.stat().st_size, "sha256": _hash(path)}
    description = {"format": FORMAT, "format_version": FORMAT_VERSION, "weights": file, "versions": written_by()["versions"], **described}
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    again = read_agent(path)
    same = again["state_dict"].keys() == weights.keys() and all(torch.equal(again["state_dict"][name], weights[name]) for name in weights)
    if not same or any(again[name] != content[name] for name in content):
        raise SettingError("this agent cannot be shared: its weights or settings read back differently")
    return path


def read_agent(path: Path) -> Checkpoint:
    """Read a shared agent as the checkpoint from which it was written, without what resuming needs.

    Raises:
        SettingError: the files are missing, damaged, of another kind or of a newer format.
    """
    description = read_description(path.with_name(DESCRIPTION))
    if not path.is_file():
        raise SettingError(f"ckpt_path {shown(path)} is not a file, although {DESCRIPTION} is there: download the agent again")
    try:
        file = description["weights"]
        if (path.stat().st_size, _hash(path)) != (file["size"], file["sha256"]):
            raise ValueError(f"its bytes are not those of {DESCRIPTION}")
        content = {name: decode(description[name]) for name in ("lightning_rl", "hyper_parameters")}
        return {"state_dict": load_file(path), **content}
    except Exception as error:  # a file from elsewhere: KeyError, TypeError, SafetensorError, …
        reason = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise SettingError(f"ckpt_path {shown(path)} is damaged ({reason}): delete it and download it again") from error


def read_description(path: Path) -> Plain:
    """Read the description of an agent. Raises `SettingError`: it is damaged, of another kind, or of a newer format."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"{shown(path)} cannot be read as the description of an agent ({type(error).__name__})") from error
    match content:
        case {"format": "lightning_rl agent", "format_version": int(version)} if version > FORMAT_VERSION:
            raise SettingError(f"{shown(path)} has format {version}, not {FORMAT_VERSION}: install a newer lightning_rl")
        case {"format": "lightning_rl agent", "format_version": int()}:
            return content
    raise SettingError(f"{shown(path)} is not the description of an agent of lightning_rl")


def encode(value: object, place: str) -> object:
    """Encode plain data as JSON, so that `decode` restores it. Raises `TypeError`: something is not plain data."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, tuple):
        return {"$tuple": encode([*value], place)}
    if isinstance(value, list):
        return [encode(child, f"{place}.{i}") for i, child in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(child, f"{place}.{key}") for key, child in value.items()}
        return {"$items": [[encode(key, place), encode(child, f"{place}.{key}")] for key, child in value.items()]}
    raise TypeError(f"{place} is a {type(value).__name__}, which is not plain data")


def decode(value: object) -> Any:
    """Invert `encode`."""
    if isinstance(value, list):
        return [decode(child) for child in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$float": str(number), **others} if not others:
            return float(number)
        case {"$tuple": list(children), **others} if not others:
            return tuple(map(decode, children))
        case {"$items": list(pairs), **others} if not others:
            return {decode(key): decode(child) for key, child in pairs}
    return {key: decode(child) for key, child in value.items()}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
