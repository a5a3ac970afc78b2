"""Check a checkpoint's archive before torch reads it; state as plain data."""

from __future__ import annotations

import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

SPARE = 1 << 26
"""Bytes that tensors may take beyond their file: those that repeat an element are small in it."""
DEEPEST = 200
"""Containers inside one another; a run's own have less than twenty."""


Checkpoint = dict[str, Any]
"""A checkpoint as plain data."""


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
    size = path.stat().st_size
    taken = sum(leaf.numel() * leaf.element_size() for leaf in leaves(content, size) if isinstance(leaf, Tensor))
    if taken > 2 * size + SPARE:
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


def checksum_error(path: Path) -> str | None:
    """What is wrong with an archive by the checksums of its members; nothing where they agree."""
    try:
        check_archive(path)
        with zipfile.ZipFile(path) as archive:
            return None if archive.testzip() is None else "one of its checksums is wrong"
    except NotPlainError as error:
        return str(error)
    except (zipfile.BadZipFile, ValueError, RuntimeError, EOFError):  # damaged headers that `testzip` does not catch
        return "one of its members cannot be read"


def leaves(tree: Any, most: int) -> Iterator[Any]:
    """All leaves of plain data. One that is shared comes again wherever it is met, as it does for whoever walks the data.

    Args:
        tree: the data.
        most: how many values they may be. Each takes a byte or more of its file, unless it is shared.

    Raises:
        NotPlainError: they are more, or nested deeper than `DEEPEST`, as data that holds itself is.
    """
    stack = [iter([tree])]
    while stack:
        for each in stack[-1]:
            most -= 1
            if most < 0:
                raise NotPlainError("plain data that repeats itself until it is larger than the file")
            if isinstance(each, dict | list | tuple | set):
                stack.append(iter(each.values() if isinstance(each, dict) else each))
                break
            yield each
        else:
            stack.pop()
        if len(stack) > DEEPEST:
            raise NotPlainError(f"plain data that holds itself, or is nested more than {DEEPEST} deep")


def mappings(tree: object) -> Iterator[Mapping[str, object]]:
    """Yield all mappings in plain data, outer ones first."""
    stack = [tree]
    while stack:
        each = stack.pop()
        if isinstance(each, Mapping):
            yield each
            stack.extend(each.values())
        elif isinstance(each, list | tuple):
            stack.extend(each)


PLAIN = (str, int, float, bool, bytes, type(None))


def to_plain(tree: Any, place: str = "state") -> Any:
    """A tree of dicts, lists, tuples and deques as one of dicts, lists and tuples whose leaves are copies that torch can save.

    Arrays become tensors, numpy's scalars numbers of Python, deques lists and named tuples tuples.

    Raises:
        TypeError: a leaf that is no plain data, with its place in the tree.
    """
    if isinstance(tree, np.generic) and tree.dtype.kind in "biufcSU":
        return tree.item()
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":
        return torch.from_numpy(np.array(tree, tree.dtype.newbyteorder("="), order="C"))
    if isinstance(tree, Tensor):
        return tree.detach().cpu().clone(memory_format=torch.contiguous_format)
    if type(tree) in PLAIN:
        return tree
    if isinstance(tree, dict):
        return {to_plain(key, f"a key of {place}"): to_plain(child, f"{place}[{key!r}]") for key, child in tree.items()}
    if isinstance(tree, list | tuple | deque):
        children = [to_plain(child, f"{place}[{i}]") for i, child in enumerate(tree)]
        return tuple(children) if isinstance(tree, tuple) else children
    what = f"an array of {tree.dtype}" if isinstance(tree, np.ndarray) else f"a {type(tree).__name__}"
    raise TypeError(f"{place} is {what}, which is no plain data: a checkpoint could not be read without trusting it")


def to_arrays(tree: Any) -> Any:
    """The way back: every tensor as an array. Tuples stay tuples; what was a deque is a list, what was a numpy scalar a number."""
    if isinstance(tree, Tensor):
        return tree.detach().cpu().numpy()
    if isinstance(tree, dict):
        return {key: to_arrays(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(to_arrays(child) for child in tree)
    return tree
