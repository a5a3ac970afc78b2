"""What a dataset says of itself, compared with what an algorithm needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from lightning_rl.demonstrations.hdf5 import DamagedError
from lightning_rl.demonstrations.store import METADATA, require_minari
from lightning_rl.spaces import MASK, Spaces

LARGEST = 1 << 24
"""Bytes; the bounds of an image of 640 x 480 take 9 million."""


class Metadata(NamedTuple):
    """How many episodes there are, and whether images lie in them as JPEG files."""

    episodes: int
    images: bool


def read_metadata(folder: Path, spaces: Spaces) -> Metadata:
    """What has to be known before episodes are read. Spaces are compared as they are written down, and not built.

    Raises:
        DamagedError: they are not those of the algorithm, or there are no episodes that can be read.
    """
    minari, path = require_minari(), folder / METADATA
    if path.stat().st_size > LARGEST:
        raise DamagedError(f"its {METADATA} is larger than {LARGEST:,} bytes")
    metadata = json.loads(path.read_text(encoding="utf-8"))
    version, readable = metadata["minari_version"], minari.supported_dataset_versions
    if version not in readable:
        raise DamagedError(f"written by Minari {version!s:.20}, and Minari {minari.__version__} reads {min(readable)} to {max(readable)}")
    if metadata["data_format"] != "hdf5":
        raise DamagedError(f"its data_format is {metadata['data_format']!r:.20}, and only hdf5 is read")
    for kind, space in {"observation": spaces.observation, "action": spaces.action}.items():
        if f"{kind}_space" not in metadata:
            raise DamagedError(f"it does not say its {kind}_space")
        there = json.loads(metadata[f"{kind}_space"])
        if kind == "observation" and there["type"] == "Dict":
            there["subspaces"].pop(MASK, None)  # which networks do not see
        for difference in differences(there, json.loads(minari.serialization.serialize_space(space)), kind):
            raise DamagedError(difference)
    episodes = metadata["total_episodes"]
    if type(episodes) is not int or episodes < 1:
        raise DamagedError("it holds no episodes")
    return Metadata(episodes, bool(metadata.get("jpeg_encoding", True)))


def differences(there: Any, here: Any, name: str) -> Iterator[str]:
    """In words, how a space of a dataset differs from the algorithm's, both as Minari writes them; nothing where they are the same."""
    if there["type"] != here["type"]:
        yield f"{name} is {_short(there['type'])} in the dataset and {here['type']} in the algorithm"
    elif here["type"] in ("Dict", "Tuple"):
        children, own = (_children(each["subspaces"]) for each in (there, here))
        if children.keys() != own.keys():
            yield f"{name} has {_short(', '.join(children))} in the dataset and {_short(', '.join(own))} in the algorithm"
            return
        for key in own:
            yield from differences(children[key], own[key], f"{name}.{key}")
    else:
        for key in sorted(here, key=("shape", "dtype").__contains__, reverse=True):
            if there[key] != here[key]:
                a, b = _first_difference(there[key], here[key]) if key in ("low", "high") else (there[key], here[key])
                yield f"{name} has {key} {_short(a)} in the dataset and {_short(b)} in the algorithm"


def _children(subspaces: Any) -> dict[str, Any]:
    return subspaces if isinstance(subspaces, dict) else {str(i): child for i, child in enumerate(subspaces)}


def _first_difference(there: Any, here: Any) -> tuple[Any, Any]:
    """The first two numbers that differ in lists of lists of the same shape."""
    while isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        there, here = next((a, b) for a, b in zip(there, here, strict=True) if a != b)
    return there, here


def _short(value: Any) -> str:
    return shorten(str(value), 40, placeholder=" …")
