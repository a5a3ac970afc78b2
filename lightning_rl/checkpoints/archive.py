"""Check a checkpoint's archive before torch reads it, and convert state to plain data and back."""

import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

Checkpoint = dict[str, Any]
"""A checkpoint as plain data."""
Device = str | torch.device | None
SPARE_BYTES = 1 << 26
"""Bytes that tensors may take beyond twice the size of their file, in which tensors that repeat an element are small."""
MAX_DEPTH = 200
"""Maximum depth of nested containers; a run's state has fewer than twenty levels."""
PLAIN_TYPES = (str, int, float, bool, bytes, type(None))


class NotPlainError(ValueError):
    """Raised for a file that is not read, or whose content is not used. The message is the reason in a few words."""


def read_archive(file: Path | bytes, map_location: Device = None) -> Checkpoint:
    """Read a file, or its content, as plain data: no code in it runs, and it needs no more memory than the size of the file.

    Raises `NotPlainError`: the file is not an archive of tensors and plain data. Raises `Exception`: whatever torch raises for a damaged
    file.
    """
    check_archive(file)
    content = torch.load(_source(file), map_location=map_location, weights_only=True)
    size = _size(file)
    taken = sum(leaf.numel() * leaf.element_size() for leaf in leaves(content, size) if isinstance(leaf, Tensor))
    if taken > 2 * size + SPARE_BYTES:
        raise NotPlainError("its tensors are larger than the file")
    return content


def check_archive(file: Path | bytes) -> None:
    """Raise `NotPlainError` unless `torch.save` may have written a file: uncompressed members, with paths inside the archive."""
    try:
        with zipfile.ZipFile(_source(file)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise NotPlainError("not an archive, or truncated") from error
    for member in members:
        name = PurePosixPath(member.filename)
        if name.is_absolute() or ".." in name.parts or "\\" in member.filename or ":" in member.filename:
            raise NotPlainError("a member with a path outside the archive")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise NotPlainError("compressed members, which torch does not write")
    if sum(member.file_size for member in members) > _size(file):
        raise NotPlainError("members larger than the file")


def _source(file: Path | bytes) -> Path | BytesIO:
    return file if isinstance(file, Path) else BytesIO(file)


def _size(file: Path | bytes) -> int:
    return file.stat().st_size if isinstance(file, Path) else len(file)


def checksum_error(path: Path) -> str | None:
    """Check the checksums of an archive's members; return what is wrong, None if nothing is."""
    try:
        check_archive(path)
        with zipfile.ZipFile(path) as archive:
            return None if archive.testzip() is None else "one of its checksums is wrong"
    except NotPlainError as error:
        return str(error)
    except (zipfile.BadZipFile, ValueError, RuntimeError, EOFError):  # damaged headers that `testzip` does not catch
        return "one of its members cannot be read"


def leaves(tree: object, max_values: int) -> Iterator[object]:
    """Yield all leaves of plain data; a shared leaf is yielded at each place where it occurs.

    Raises `NotPlainError`: there are more than `max_values` values, or they are nested deeper than `MAX_DEPTH`, as in data that contains
    itself.
    """
    stack: list[Iterator[object]] = [iter([tree])]
    while stack:
        for child in stack[-1]:
            max_values -= 1
            if max_values < 0:
                raise NotPlainError("plain data that repeats itself until it is larger than the file")
            if isinstance(child, dict | list | tuple | set):
                stack.append(iter(child.values() if isinstance(child, dict) else child))
                break
            yield child
        else:
            stack.pop()
        if len(stack) > MAX_DEPTH:
            raise NotPlainError(f"plain data that contains itself, or is nested more than {MAX_DEPTH} deep")


def mappings(tree: object) -> Iterator[Mapping[str, object]]:
    """Yield all mappings in plain data, outer ones first."""
    stack = [tree]
    while stack:
        part = stack.pop()
        if isinstance(part, Mapping):
            yield part
            stack.extend(part.values())
        elif isinstance(part, list | tuple):
            stack.extend(part)


def to_plain(tree: object, place: str = "state") -> Any:
    """Copy a tree of dicts, lists, tuples and deques to one of dicts, lists and tuples whose leaves torch can save.

    Arrays become tensors, numpy scalars Python numbers, deques lists and named tuples tuples. Raises `TypeError`: a leaf is not plain data;
    the message names its place in the tree.
    """
    if isinstance(tree, np.generic) and tree.dtype.kind in "biufcSU":
        return tree.item()
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":
        return torch.from_numpy(np.array(tree, tree.dtype.newbyteorder("="), order="C"))
    if isinstance(tree, Tensor):
        return tree.detach().cpu().clone(memory_format=torch.contiguous_format)
    if type(tree) in PLAIN_TYPES:
        return tree
    if isinstance(tree, dict):
        return {to_plain(key, f"a key of {place}"): to_plain(child, f"{place}[{key!r}]") for key, child in tree.items()}
    if isinstance(tree, list | tuple | deque):
        children = [to_plain(child, f"{place}[{i}]") for i, child in enumerate(tree)]
        return tuple(children) if isinstance(tree, tuple) else children
    what = f"an array of {tree.dtype}" if isinstance(tree, np.ndarray) else f"a {type(tree).__name__}"
    raise TypeError(f"{place} is {what}, which is not plain data: a checkpoint could not be read without trusting it")


def to_arrays(tree: object) -> Any:
    """Copy a tree with each tensor as an array: the inverse of `to_plain`, except for deques, named tuples and numpy scalars."""
    if isinstance(tree, Tensor):
        return tree.detach().cpu().numpy()
    if isinstance(tree, dict):
        return {key: to_arrays(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(to_arrays(child) for child in tree)
    return tree
