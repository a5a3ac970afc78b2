"""The manifest next to a checkpoint: its size and hash, and the versions and processor that wrote it."""

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import lightning_rl
from lightning_rl.checkpoints.archive import checksum_error
from lightning_rl.checkpoints.atomic import Staged, stage

FORMAT_VERSION = 1
MAX_BYTES = 1 << 20
"""Maximum size of a manifest in bytes; ours have fewer than one thousand."""


def manifest_path(path: Path) -> Path:
    """Return the path of a checkpoint's manifest."""
    return path.with_name(f"{path.name}.json")


def stage_manifest(checkpoint: Staged) -> Staged:
    """Write the manifest of a checkpoint that was just written, under its temporary name."""
    content = {"format_version": FORMAT_VERSION, "size": checkpoint.size, "sha256": checkpoint.sha256, **written_by()}
    text = json.dumps(content, indent=1) + "\n"
    return stage(manifest_path(checkpoint.path), lambda file: file.write(text.encode()))


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Read the manifest of a checkpoint; None if it has none. Raises `ValueError` if the file is not a manifest."""
    file = manifest_path(path)
    if not file.is_file():
        return None
    try:
        with file.open("rb") as opened:
            content = json.loads(opened.read(MAX_BYTES))
    except FileNotFoundError:  # a run has just removed it in order to save
        return None
    except RecursionError as error:
        raise ValueError("not a manifest") from error
    if not isinstance(content, dict) or not isinstance(content.get("size"), int) or not isinstance(content.get("sha256"), str):
        raise ValueError("not a manifest")
    return content


def damage(path: Path) -> str | None:
    """Return how a checkpoint differs from its manifest and from its own checksums; None if it agrees with either.

    A checkpoint that a user's program has read and saved again agrees only with its own checksums.
    """
    for _ in range(10):
        before = identity(path)
        reason = _disagreement(path)
        if reason is None or before == identity(path):  # else a run has just saved it again
            break
    return reason


def identity(path: Path) -> list[tuple[int, int]]:
    """Return inode numbers and times, which change when a checkpoint is saved again."""
    found = []
    for each in (path, manifest_path(path)):
        with suppress(OSError):
            status = each.stat()
            found.append((status.st_ino, status.st_mtime_ns))
    return found


def _disagreement(path: Path) -> str | None:
    try:
        manifest = read_manifest(path)
    except (ValueError, OSError):
        return f"its manifest {manifest_path(path).name} cannot be read"
    if manifest is None:
        return checksum_error(path)
    reason = f"it has {path.stat().st_size} bytes, not {manifest['size']}"
    if path.stat().st_size == manifest["size"]:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == manifest["sha256"]:
                return None
        reason = f"its bytes are not those of {manifest_path(path).name}"
    return reason if checksum_error(path) is not None else None


def differences(path: str | Path) -> str | None:
    """Return one line if a checkpoint was written with other versions or on another processor; else None."""
    manifest = _manifest_or_nothing(path)
    different = []
    for key, here in written_by().items():
        there = manifest.get(key)
        if isinstance(there, dict):
            others = [name for name in here.keys() - {"threads"} if there.get(name) != here[name]]
            different += [f"{name} {str(there.get(name))[:40]} (here {here[name]})" for name in others]
    if not different:
        return None
    return f"{Path(path).name} was written with {', '.join(sorted(different))}: continuing is not bit-exact"


def threads_of(path: str | Path) -> int | None:
    """Return how many CPU threads a checkpoint's run used, on a processor of the same model; None if that is unknown."""
    there, here = _manifest_or_nothing(path).get("processor"), written_by()["processor"]
    number = there.get("threads") if isinstance(there, dict) and there.get("model") == here["model"] else None
    return number if isinstance(number, int) and 1 <= number <= (os.cpu_count() or 1) else None


def _manifest_or_nothing(path: str | Path) -> dict[str, object]:
    with suppress(ValueError, OSError):
        return read_manifest(Path(path)) or {}
    return {}


def written_by() -> dict[str, dict[str, object]]:
    """Return the versions and the processor, on which the last bits of results depend."""
    modules = {"torch": torch, "numpy": np, "gymnasium": gymnasium, "lightning_rl": lightning_rl}
    versions: dict[str, object] = {
        "python": platform.python_version(),
        **{name: str(module.__version__) for name, module in modules.items()},
    }
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    processor = {
        "machine": platform.machine(),
        "model": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    return {"versions": versions, "processor": processor}
