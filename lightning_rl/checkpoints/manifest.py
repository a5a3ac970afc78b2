"""What is said of a checkpoint beside it: its size and hash, and what wrote it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import lightning_rl
from lightning_rl.checkpoints.archive import checksum_error
from lightning_rl.checkpoints.atomic import Staged, stage

FORMAT_VERSION = 1
LARGEST = 1 << 20
"""Bytes of a manifest; ours have less than one thousand."""


def manifest_path(path: Path) -> Path:
    """Where the manifest of a checkpoint lies."""
    return path.with_name(f"{path.name}.json")


def stage_manifest(checkpoint: Staged) -> Staged:
    """The manifest of a checkpoint that was just written."""
    content = {"format_version": FORMAT_VERSION, "size": checkpoint.size, "sha256": checkpoint.sha256, **written_by()}
    text = json.dumps(content, indent=1) + "\n"
    return stage(manifest_path(checkpoint.path), lambda file: file.write(text.encode()))


def read_manifest(path: Path) -> dict[str, Any] | None:
    """What is said of a checkpoint; nothing where there is no manifest.

    Raises:
        ValueError: the manifest is none.
    """
    file = manifest_path(path)
    try:
        content = json.loads(_head(file)) if file.is_file() else None
    except FileNotFoundError:  # a run that saves has just removed it
        return None
    except RecursionError as error:
        raise ValueError("not a manifest") from error
    if content is None:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("size"), int) or not isinstance(content.get("sha256"), str):
        raise ValueError("not a manifest")
    return content


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(LARGEST)


def damage(path: Path) -> str | None:
    """How a checkpoint differs from its manifest or, without one, from its own checksums; nothing where it agrees."""
    for _ in range(10):
        before = identity(path)
        reason = _disagreement(path)
        if reason is None or before == identity(path):  # else a run has just saved it anew
            break
    return reason


def identity(path: Path) -> list[tuple[int, int]]:
    """What changes when a file is saved anew."""
    found = []
    for each in (path, manifest_path(path)):
        with contextlib.suppress(OSError):
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
    if path.stat().st_size != manifest["size"]:
        return f"it has {path.stat().st_size} bytes, not {manifest['size']}"
    with path.open("rb") as file:
        agrees = hashlib.file_digest(file, "sha256").hexdigest() == manifest["sha256"]
    return None if agrees else f"its bytes are not those of {manifest_path(path).name}"


def differences(path: str | Path) -> str | None:
    """One line if a checkpoint was written by other versions or on another processor than those here; nothing otherwise."""
    try:
        manifest = read_manifest(Path(path))
    except (ValueError, OSError):
        return None
    if manifest is None:
        return None
    different = []
    for key, here in written_by().items():
        there: Any = manifest.get(key)
        for name in here.keys() - {"threads"} if isinstance(there, dict) else ():
            if there.get(name) != here[name]:
                different.append(f"{name} {str(there.get(name))[:40]} (here {here[name]})")
    if not different:
        return None
    return f"{Path(path).name} was written with {', '.join(sorted(different))}: continuing is not bit-exact"


def threads_of(path: str | Path) -> int | None:
    """With how many CPU threads a checkpoint's run computed on a processor like the one here; None if that is unknown."""
    try:
        manifest = read_manifest(Path(path)) or {}
    except (ValueError, OSError):
        return None
    there, here = manifest.get("processor"), written_by()["processor"]
    number = there.get("threads") if isinstance(there, dict) and there.get("model") == here["model"] else None
    return number if isinstance(number, int) and 1 <= number <= (os.cpu_count() or 1) else None


def written_by() -> dict[str, dict[str, Any]]:
    """The versions and the processor that decide the last bits of what is computed here."""
    modules = {"torch": torch, "numpy": np, "gymnasium": gymnasium, "lightning_rl": lightning_rl}
    versions = {"python": platform.python_version(), **{name: str(module.__version__) for name, module in modules.items()}}
    processor = {
        "machine": platform.machine(),
        "model": _processor_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    return {"versions": versions, "processor": processor}


def _processor_model() -> str:
    """What Linux calls the processor, or the system's word for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
