"""Minari datasets on disk: folders, metadata, and a reader for untrusted files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from lightning_rl.checkpoints.files import shown
from lightning_rl.errors import SettingError, closest, missing_extra
from lightning_rl.settings.yaml_files import Plain
from lightning_rl.spaces import MASK, Spaces
from lightning_rl.types import Tree

if TYPE_CHECKING:
    from h5py import Dataset, Group

METADATA = "metadata.json"
MAX_METADATA_BYTES = 1 << 24
"""For comparison, the bounds of an image of 640 x 480 take 9 million bytes."""


class DamagedError(ValueError):
    """Raised for a dataset that cannot be used. The message gives the reason in a few words."""


def require_minari() -> ModuleType:
    """Return the package; raise `SettingError` if it or a package it needs to read files is not installed."""
    try:
        import h5py  # noqa: F401
        import minari
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise missing_extra("minari", "minari", "a dataset of demonstrations") from error
    return minari


def dataset_id(name: str) -> str:
    """Return a dataset's id in Minari's format; `cartpole/v0` is short for `cartpole-v0`. Raise `SettingError` for an invalid name."""
    minari = require_minari()
    try:
        full = re.sub(r"/v(\d+)$", r"-v\1", name)
        minari.dataset.minari_dataset.parse_dataset_id(full)
    except (ValueError, TypeError) as error:  # TypeError: no version, or not a string
        raise SettingError(
            f"dataset {shown(name)} is not a valid name for Minari: letters, digits, - and _ (two or more before a /), "
            "such as cartpole-v0 or cartpole/expert-v0"
        ) from error
    return full


def datasets_folder() -> Path:
    """Return `MINARI_DATASETS_PATH`, or Minari's folder in the home folder; raise `SettingError` if it cannot be created."""
    try:
        return require_minari().storage.get_dataset_path()
    except OSError as error:
        raise SettingError(f"the folder of Minari's datasets, MINARI_DATASETS_PATH, cannot be used: {error}") from error


def data_folder(dataset: str) -> Path:
    """Return the folder with the files of a dataset, given by its id in Minari or by path; raise `SettingError` if there is none."""
    root = datasets_folder()
    for place in (root / re.sub(r"/v(\d+)$", r"-v\1", dataset), Path(dataset)):
        for folder in (place / "data", place):
            if os.path.isfile(folder / METADATA):  # False for invalid file names
                return folder
    known = [path.parent.parent.relative_to(root).as_posix() for path in root.glob(f"**/data/{METADATA}")]
    way_out = closest(dataset, known) or "; lightning-rl collect makes one"
    raise SettingError(f"dataset {shown(dataset)} is neither in {shown(root)} nor a folder with data/{METADATA}{way_out}")


def new_folder(name: str, force: bool) -> Path:
    """Return the folder for a new dataset; raise `SettingError` if it exists without `force`, or holds anything else than a dataset."""
    folder = datasets_folder() / name
    if folder.exists() and not force:
        way_out = "choose another name, or replace it: --force, in Python force=True"
        raise SettingError(f"dataset {shown(name)} already exists, in {shown(folder)}; {way_out}")
    what = "is a file" if folder.is_file() else "holds other things too"
    if folder.is_file() or (folder.exists() and [path.name for path in folder.iterdir()] != ["data"]):
        raise SettingError(f"dataset {shown(name)} cannot be replaced: {shown(folder)} {what}; choose another name")
    return folder


def read_metadata(folder: Path, spaces: Spaces) -> tuple[int, bool]:
    """Return the number of episodes, and whether images are stored as JPEG files.

    Spaces are compared in their serialized form, without building them. Raises `DamagedError` if they differ from the algorithm's.
    """
    minari, path = require_minari(), folder / METADATA
    if path.stat().st_size > MAX_METADATA_BYTES:
        raise DamagedError(f"its {METADATA} is larger than {MAX_METADATA_BYTES:,} bytes")
    metadata = json.loads(path.read_text(encoding="utf-8"))
    version, readable = metadata["minari_version"], minari.supported_dataset_versions
    if version not in readable:
        raise DamagedError(f"written by Minari {version!s:.20}, and Minari {minari.__version__} reads {min(readable)} to {max(readable)}")
    if metadata["data_format"] != "hdf5":
        raise DamagedError(f"its data_format is {metadata['data_format']!r:.20}, and only hdf5 is read")
    for kind, space in {"observation": spaces.observation, "action": spaces.action}.items():
        if f"{kind}_space" not in metadata:
            raise DamagedError(f"it has no {kind}_space")
        stored = json.loads(metadata[f"{kind}_space"])
        if kind == "observation" and stored["type"] == "Dict":
            stored["subspaces"].pop(MASK, None)  # networks do not observe it
        for difference in differences(stored, json.loads(minari.serialization.serialize_space(space)), kind):
            raise DamagedError(difference)
    episodes = metadata["total_episodes"]
    if type(episodes) is not int or episodes < 1:
        raise DamagedError("it holds no episodes")
    return episodes, bool(metadata.get("jpeg_encoding", True))


def differences(stored: Plain, known: Plain, name: str) -> Iterator[str]:
    """Describe how a space of a dataset differs from the algorithm's, both serialized by Minari; yield nothing if they are equal."""
    if stored["type"] != known["type"]:
        yield f"{name} is {_short(stored['type'])} in the dataset and {known['type']} in the algorithm"
    elif "subspaces" in known:
        children, expected = (
            part if isinstance(part, dict) else dict(zip(map(str, range(len(part))), part, strict=True))
            for part in (stored["subspaces"], known["subspaces"])
        )
        if children.keys() != expected.keys():
            yield f"{name} has {_short(', '.join(children))} in the dataset and {_short(', '.join(expected))} in the algorithm"
            return
        for key in expected:
            yield from differences(children[key], expected[key], f"{name}.{key}")
    else:
        for key in sorted(known, key=("shape", "dtype").__contains__, reverse=True):
            a, b = stored[key], known[key]
            while key in ("low", "high") and isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and a != b:
                a, b = next((x, y) for x, y in zip(a, b, strict=True) if x != y)  # the first numbers that differ
            if a != b:
                yield f"{name} has {key} {_short(a)} in the dataset and {_short(b)} in the algorithm"


def _short(value: object) -> str:
    return shorten(str(value), 40, placeholder=" …")


class ArrayFile:
    """An HDF5 file, open for reading. Arrays are numbers stored in the file itself; in total no more is read than the file's size.

    All methods raise `DamagedError` for data that are missing, of another shape or type, a link, or too large.
    """

    def __init__(self, path: Path) -> None:
        import h5py

        if not path.is_file():
            raise DamagedError(f"{path.name} is missing")
        self.h5py, self.file = h5py, h5py.File(path, "r")
        self.bytes_left = path.stat().st_size

    def close(self) -> None:
        self.file.close()

    def group(self, parent: Group, name: str) -> Group:
        return self._child(parent, name, self.h5py.Group, "group")

    def array(self, parent: Group, name: str, rows: int) -> np.ndarray:
        """Return numbers `[rows, ...]` of any dtype and shape."""
        return self._read(self._array(parent, name, rows))

    def vector(self, parent: Group, name: str, kinds: str, rows: int | None = None) -> np.ndarray:
        """Return at least one number `[rows]`, with a dtype of these kinds, in the byte order of this machine."""
        node = self._array(parent, name, rows)
        if node.ndim != 1 or not len(node) or node.dtype.kind not in kinds or not np.can_cast(node.dtype, np.float64):
            raise DamagedError(f"{_place(node)} has shape {node.shape} and type {node.dtype}, not a number a step")
        return self._read(node).astype(node.dtype.newbyteorder("="), copy=False)

    def tree(self, parent: Group, name: str, form: Tree, rows: int, images: bool) -> Tree:
        """Return a tree of arrays `[rows, ...]` with the shapes and dtypes of `form`; with `images`, bytes may be one JPEG file per row."""
        if isinstance(form, dict):
            group = self.group(parent, name)
            return {key: self.tree(group, key, child, rows, images) for key, child in form.items()}
        if isinstance(form, tuple):
            group = self.group(parent, name)
            return tuple(self.tree(group, f"_index_{i}", child, rows, images) for i, child in enumerate(form))
        node = self._array(parent, name, rows)
        if images and form.dtype == np.uint8 and node.ndim < form.ndim:
            return self._images(node, form.shape[1:])
        if node.shape[1:] != form.shape[1:]:
            raise DamagedError(f"{_place(node)} has shape {node.shape[1:]} and its space {form.shape[1:]}")
        if not np.can_cast(node.dtype, form.dtype):
            raise DamagedError(f"{_place(node)} is {node.dtype} and its space {form.dtype}")
        return self._read(node).astype(form.dtype, copy=False)

    def _child(self, parent: Group, name: str, kind: type, word: str) -> Group | Dataset:
        link, place = parent.get(name, getlink=True), f"{_place(parent)}/{name}".lstrip("/")
        if link is None:
            raise DamagedError(f"{place} is missing")
        if not isinstance(link, self.h5py.HardLink):
            raise DamagedError(f"{place} is a link")
        if not isinstance(parent[name], kind):
            raise DamagedError(f"{place} is no {word}")
        return parent[name]

    def _array(self, parent: Group, name: str, rows: int | None) -> Dataset:
        """Return an array without reading it."""
        node = self._child(parent, name, self.h5py.Dataset, "array")
        if not node.shape or (rows is not None and len(node) != rows):
            raise DamagedError(f"{_place(node)} has shape {node.shape or ()}, not {'a row a step' if rows is None else f'{rows} rows'}")
        if node.is_virtual or node.external or node.id.get_create_plist().get_nfilters():
            raise DamagedError(f"{_place(node)} is in other files or compressed, which Minari does not do")
        return node

    def _read(self, node: Dataset) -> np.ndarray:
        if node.dtype.kind not in "biuf":
            raise DamagedError(f"{_place(node)} holds no numbers")
        self._count(node, node.nbytes)
        return node[()]

    def _images(self, node: Dataset, shape: tuple[int, ...]) -> np.ndarray:
        """Return images `[rows, height, width]` or `[rows, height, width, 3]` from JPEG files."""
        from PIL import Image

        images = np.empty((len(node), *shape), np.uint8)
        for i in range(len(node)):
            file = np.asarray(node[i])
            self._count(node, file.nbytes)
            try:
                if file.dtype != np.uint8:
                    raise TypeError(f"{file.dtype} instead of bytes")
                image = Image.open(BytesIO(file.tobytes()), formats=["JPEG"])
                pixels = np.asarray(image) if image.size == shape[1::-1] else np.empty(0)
            except Exception as error:  # decoders may raise anything on invalid bytes
                raise DamagedError(f"{_place(node)} holds no images") from error
            if pixels.shape != shape:
                raise DamagedError(f"{_place(node)} holds images of another size than its space, {shape}")
            images[i] = pixels
        return images

    def _count(self, node: Dataset, size: int) -> None:
        self.bytes_left -= size
        if self.bytes_left < 0:
            raise DamagedError(f"{_place(node)} is larger than its file")


def _place(node: Group | Dataset) -> str:
    return node.name.lstrip("/")
