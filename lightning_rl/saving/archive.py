"""What a file must be before torch reads it: an archive as `torch.save` writes it, no larger in memory than on disk."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

SPARE = 1 << 26
"""Bytes that tensors may take beyond their file: those that repeat an element are small in it."""


class NotPlainError(ValueError):
    """A file that is not read at all, or whose content is not used. The message says why, in a few words."""


def read_archive(path: Path, map_location: Any = None) -> Any:
    """What a file holds, as plain data: nothing in it is run, and it takes no more memory than the file is large.

    Raises:
        NotPlainError: it is no archive of tensors and plain data.
        Exception: whatever torch meets in a damaged file.
    """
    check_archive(path)
    content = torch.load(path, map_location=map_location, weights_only=True)
    taken = sum(tensor.numel() * tensor.element_size() for tensor in tensors(content))
    if taken > 2 * path.stat().st_size + SPARE:
        raise NotPlainError("its tensors are larger than the file")
    return content


def check_archive(path: Path) -> None:
    """Raise `NotPlainError` unless `torch.save` may have written a file: members as they are, with names inside, all of them in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise NotPlainError("no archive, or cut off") from error
    for member in members:
        name = PurePosixPath(member.filename)
        if name.is_absolute() or ".." in name.parts or "\\" in member.filename or ":" in member.filename:
            raise NotPlainError("a member with a path that leads out of it")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise NotPlainError("compressed members, which torch does not write")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise NotPlainError("members larger than the file")


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in plain data."""
    stack, seen = [tree], set()
    while stack:
        each = stack.pop()
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, dict | list | tuple | set) and id(each) not in seen:
            seen.add(id(each))
            stack.extend(each.values() if isinstance(each, dict) else each)
