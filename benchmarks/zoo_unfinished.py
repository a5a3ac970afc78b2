"""Runs of the zoo that wait for more time: small archives beside the results, from which `zoo.py run` continues them."""

from __future__ import annotations

import tarfile
from pathlib import Path

UNFINISHED = Path(__file__).resolve().parent / "unfinished"
"""An archive for each run, in the repository, so that the next one to measure finds them wherever that is."""
LIMIT = 10 * 2**20
"""Bytes that an archive may have: a large replay buffer does not belong into a repository."""
OLDER = ".previous.ckpt"


def archive_of(config: str, seed: int) -> Path:
    """Where a run waits."""
    return UNFINISHED / f"{config.replace('/', '_')}_{seed}.tar.xz"


def pack(folder: Path, config: str, seed: int) -> Path:
    """Archive a run of `folder`; ValueError if there is none with a checkpoint, or if it is too large to wait in the repository."""
    home = folder / config
    found = [last.parents[1] for last in home.rglob(f"seed_{seed}/checkpoints/last.ckpt")]
    if len(found) != 1:
        raise ValueError(f"{config} seed {seed} has no run with a checkpoint in {folder}")
    archive = archive_of(config, seed)
    archive.parent.mkdir(exist_ok=True)
    new = archive.with_suffix(".new")
    with tarfile.open(new, "w:xz") as tar:
        for file in sorted(file for file in found[0].rglob("*") if file.is_file() and OLDER not in file.name):
            tar.add(file, file.relative_to(home))
    if (size := new.stat().st_size) > LIMIT:
        new.unlink()
        raise ValueError(f"{config} seed {seed} has {size / 2**20:.0f} MiB, more than {LIMIT // 2**20} do not belong into the repository")
    return new.replace(archive)


def unpack(folder: Path, config: str, seed: int) -> None:
    """Lay a run that waits where it was, unless it lies there already and has come further perhaps."""
    archive, home = archive_of(config, seed), folder / config
    if archive.exists() and not any(home.rglob(f"seed_{seed}/checkpoints/last.ckpt")):
        with tarfile.open(archive) as tar:
            tar.extractall(home, filter="data")
