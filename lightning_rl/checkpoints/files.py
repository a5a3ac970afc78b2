"""Checkpoints that a kill, a full disk or a damaged file cannot take away.

A checkpoint is written under a temporary name in its own folder, brought to the disk, and renamed; `<name>.ckpt.json` beside it says
its size, its hash and what wrote it. Of `last.ckpt` and `best.ckpt` the generation before stays as `<name>.previous.ckpt`, and is read
where the newer one is missing or damaged. At every moment one of the two is whole.

Links are followed for reading: a run's folder, or a checkpoint, may be one. Saving never writes through a link, it takes its place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import CheckpointIO

from lightning_rl.checkpoints.archive import NotPlainError, read_archive
from lightning_rl.checkpoints.atomic import SaveFailed, create, remove_leftovers, stage, sync_folder, temporary
from lightning_rl.checkpoints.manifest import damage, differences, identity, manifest_path, stage_manifest
from lightning_rl.errors import SettingError

__all__ = ["AtomicCheckpointIO", "SaveFailed", "differences", "last_generation", "previous_path", "read_verified", "shown"]

GENERATIONS = ("last.ckpt", "best.ckpt")
"""Files of which the generation before is kept."""
TOLD: set[tuple[Any, ...]] = set()
"""Which damaged files this process told of: a run that continues reads its checkpoint more than once."""


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's way to files, for one rank that writes."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Save a checkpoint; raises `SaveFailed` where the system does not let it."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveFailed(f"{path} could not be saved ({error.strerror or error})") from error
        remove_leftovers(path.parent)
        staged = stage(path, lambda file: torch.save(checkpoint, file))  # type: ignore[arg-type]
        try:
            manifest = stage_manifest(staged)
            try:
                if path.name in GENERATIONS and _is_whole(path):
                    _keep(path)
                manifest_path(path).unlink(missing_ok=True)  # neither generation is ever beside the manifest of the other
                staged.commit()
                manifest.commit()
            finally:
                manifest.discard()
        except SaveFailed:
            raise
        except OSError as error:
            raise SaveFailed(f"{path} could not be saved ({error.strerror or error})") from error
        finally:
            staged.discard()
        sync_folder(path.parent)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """A checkpoint as plain data, whatever `weights_only` says."""
        return read_verified(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint with all that belongs to it."""
        for each in (Path(path), previous_path(Path(path))):
            manifest_path(each).unlink(missing_ok=True)
            each.unlink(missing_ok=True)


def read_verified(path: str | Path, map_location: Any = None, say: Callable[[str], None] = print) -> dict[str, Any]:
    """A checkpoint as plain data, or the generation before where it is missing or damaged, which is said in one line.

    Raises:
        SettingError: neither can be read.
    """
    path = Path(path)
    first: SettingError | None = None
    for each in (path, previous_path(path)):
        if first is not None and not each.is_file():
            break
        try:
            checkpoint = _read(each, map_location)
        except SettingError as error:
            first = first or error
            continue
        told = (str(first), *identity(path))
        if first is not None and told not in TOLD:
            TOLD.add(told)
            say(f"{first}; continuing with the generation before, {each.name}")
        return checkpoint
    assert first is not None
    raise first


def last_generation(folder: str | Path, name: str = "last.ckpt") -> Path | None:
    """The checkpoint to continue from in a folder: `last.ckpt` (or another name), or the one before where it is missing."""
    path = Path(folder) / name
    return next((each for each in (path, previous_path(path)) if each.is_file()), None)


def previous_path(path: Path) -> Path:
    """Where the generation before lies."""
    return path.parent / f"{path.stem}.previous{path.suffix}"


def shown(path: str | Path) -> str:
    """A path in a message: quoted, its beginning left out where it is long."""
    text = str(path)
    return repr(text if len(text) <= 60 else f"…{text[-59:]}")


def _read(path: Path, map_location: Any) -> dict[str, Any]:
    if not path.is_file():
        raise SettingError(f"ckpt_path {shown(path)} is not a file")
    try:
        reason = damage(path)
        if reason is None:
            return read_archive(path, map_location)
    except NotPlainError as error:
        reason = str(error)
    except Exception as error:  # torch raises what its unpickler meets: EOFError, RuntimeError, UnpicklingError, KeyError, …
        reason = type(error).__name__
    raise SettingError(f"ckpt_path {shown(path)} cannot be read as a checkpoint ({reason}); it is damaged or of another kind")


def _is_whole(path: Path) -> bool:
    """Whether a file deserves to take the place of the generation before."""
    try:
        return path.is_file() and damage(path) is None
    except OSError:
        return False


def _keep(path: Path) -> None:
    """Make a checkpoint the generation before; it stays under its own name too, so that one of them is always there."""
    previous = previous_path(path)
    manifest_path(previous).unlink(missing_ok=True)
    _copy(path, previous)
    if manifest_path(path).is_file():
        _copy(manifest_path(path), manifest_path(previous))


def _copy(source: Path, target: Path) -> None:
    """The same file under a second name, or a copy where the file system has no second names."""
    if target.exists() and os.path.samefile(source, target):  # a kill came right after this
        return
    name = temporary(target)
    name.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), name)
    except OSError:
        with source.open("rb") as original, create(name) as copy:
            shutil.copyfileobj(original, copy)
    os.replace(name, target)
