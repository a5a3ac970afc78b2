"""Save and read checkpoints so that no kill, full disk or damaged file can lose them.

A checkpoint is written under a temporary name in its own folder, synced to the disk, and renamed; `<name>.ckpt.json` next to it has its
size, its hash and the versions that wrote it. The previous generation of `last.ckpt` and `best.ckpt` is kept as `<name>.previous.ckpt`,
and is read if the newer one is missing or damaged. At every moment one of the two is intact.

Reading follows links: a run's folder or a checkpoint may be one. Saving replaces a link and never writes through it.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from lightning_fabric.plugins import CheckpointIO

from lightning_rl.checkpoints.archive import Checkpoint, Device, NotPlainError, read_archive
from lightning_rl.checkpoints.atomic import SaveError, committing, create, remove_leftovers, stage, sync_folder, temporary
from lightning_rl.checkpoints.manifest import damage, differences, identity, manifest_path, stage_manifest
from lightning_rl.errors import SettingError

__all__ = ["AtomicCheckpointIO", "SaveError", "differences", "find_saved", "last_generation", "previous_path", "read_verified", "shown"]

TWO_GENERATIONS = ("last.ckpt", "best.ckpt")
"""Files whose previous generation is kept."""
_reported: set[tuple[object, ...]] = set()
"""Damaged files that this process has reported: a resumed run reads its checkpoint more than once."""


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's access to checkpoint files, with atomic writes by one rank."""

    def save_checkpoint(self, checkpoint: Checkpoint, path: str | Path, storage_options: object = None) -> None:
        """Save a checkpoint; raises `SaveError` if it cannot be written."""
        path = Path(path)
        with committing(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        staged = stage(path, lambda file: torch.save(checkpoint, file))  # type: ignore[arg-type]
        with committing(str(path), staged):
            manifest = stage_manifest(staged)
            with committing(str(path), manifest):
                if path.name in TWO_GENERATIONS and _is_whole(path):
                    _keep(path)
                manifest_path(path).unlink(missing_ok=True)  # neither generation is ever next to the manifest of the other
                staged.commit()
                manifest.commit()
        sync_folder(path.parent)

    def load_checkpoint(self, path: str | Path, map_location: Device = None, weights_only: bool | None = None) -> Checkpoint:
        """Read a checkpoint as plain data, whatever `weights_only` says."""
        return read_verified(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        for generation in (Path(path), previous_path(Path(path))):
            manifest_path(generation).unlink(missing_ok=True)
            generation.unlink(missing_ok=True)


def read_verified(path: str | Path, map_location: Device = None, say: Callable[[str], None] = print) -> Checkpoint:
    """Read a checkpoint as plain data, or with a notice its previous generation; raises `SettingError` if neither can be read."""
    path = Path(path)
    previous = previous_path(path)
    try:
        return _read(path, map_location)
    except SettingError as error:
        if not previous.is_file():
            raise
        try:
            checkpoint = _read(previous, map_location)
        except SettingError:
            raise error from None
        notice = (str(error), *identity(path))
        if notice not in _reported:
            _reported.add(notice)
            say(f"{error}; continuing with the previous generation, {previous.name}")
        return checkpoint


def last_generation(folder: str | Path, name: str = "last.ckpt") -> Path | None:
    """Return the checkpoint of that name in a folder, or its previous generation if it is missing; None without either."""
    path = Path(folder) / name
    return next((generation for generation in (path, previous_path(path)) if generation.is_file()), None)


def find_saved(folder: str | Path) -> Path | None:
    """Return the checkpoint to resume from: `last.ckpt`, else `best.ckpt`, else the newest other checkpoint; None if there is none."""
    if (saved := last_generation(folder) or last_generation(folder, "best.ckpt")) is not None:
        return saved
    return max(filter(Path.is_file, Path(folder).glob("*.ckpt")), key=lambda path: path.stat().st_mtime, default=None)


def previous_path(path: Path) -> Path:
    """Return the path of the previous generation of a checkpoint."""
    return path.parent / f"{path.stem}.previous{path.suffix}"


def shown(path: str | Path) -> str:
    """Quote a path for a message; a long path loses its beginning."""
    text = str(path)
    return repr(text if len(text) <= 60 else f"…{text[-59:]}")


def _read(path: Path, map_location: Device) -> Checkpoint:
    if not path.is_file():
        raise SettingError(f"ckpt_path {shown(path)} is not a file")
    try:
        reason = damage(path)
        if reason is None:
            return read_archive(path, map_location)
    except NotPlainError as error:
        reason = str(error)
    except Exception as error:  # torch raises whatever its unpickler meets: EOFError, RuntimeError, UnpicklingError, KeyError, …
        reason = type(error).__name__
    raise SettingError(f"ckpt_path {shown(path)} cannot be read as a checkpoint ({reason}); it is damaged or of another kind")


def _is_whole(path: Path) -> bool:
    try:
        return path.is_file() and damage(path) is None
    except OSError:
        return False


def _keep(path: Path) -> None:
    """Make a checkpoint the previous generation; it keeps its own name too, so that one of them always exists."""
    previous = previous_path(path)
    manifest_path(previous).unlink(missing_ok=True)
    _link(path, previous)
    if manifest_path(path).is_file():
        _link(manifest_path(path), manifest_path(previous))


def _link(source: Path, target: Path) -> None:
    """Hard-link a file under a second name, or copy it if the file system has no hard links."""
    if target.exists() and os.path.samefile(source, target):  # the process was killed right after this
        return
    name = temporary(target)
    name.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), name)
    except OSError:
        with source.open("rb") as original, create(name) as copy:
            shutil.copyfileobj(original, copy)
    os.replace(name, target)
