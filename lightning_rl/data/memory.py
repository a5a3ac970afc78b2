"""How much memory a replay buffer takes, said before it is filled."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_rl.data.replay import row_template
from lightning_rl.data.replay_config import ReplayConfig
from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces
from lightning_rl.types import Tree

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_in_words(
    spaces: Spaces, action: Tree, buffer_size: int, config: ReplayConfig, ranks: int, frames: int = 1, memory: Tree = ()
) -> str:
    """One line that says what the replay buffers of all ranks take.

    Raises:
        SettingError: more than 90 % of the machine's memory, or more than its disk has free.
    """
    template = row_template(spaces.observation, action, memory, spaces.masks())
    size = buffer_size * ranks * config.layout.bytes_per_row(template, frames)
    words = f"replay buffer: {buffer_size:,} transitions" + f" on each of {ranks} ranks" * (ranks > 1) + f", {in_words(size)}"
    if config.directory is not None:
        free = _free_disk(Path(config.directory))
        if size > free:
            raise SettingError(f"{words}, but the disk of replay.directory {config.directory} has {in_words(free)}; lower buffer_size")
        return f"{words} in {config.directory}"
    total = physical_memory()
    if size > 0.9 * total:
        instead = "lower buffer_size" if config.optimize_memory_usage else "lower buffer_size or set replay.optimize_memory_usage"
        raise SettingError(f"{words}, more than 90 % of this machine's {in_words(total)}; {instead}, or name a replay.directory")
    return f"{words} of {in_words(total)} memory"


def physical_memory() -> int:
    """Bytes this process may use: the machine's, or its container's if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUP_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def in_words(size: int) -> str:
    """Bytes as people write them."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _free_disk(folder: Path) -> int:
    folder = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
