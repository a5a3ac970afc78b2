"""Minari datasets on disk: their folders, their metadata, and a reader that trusts no file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.checkpoints.files import shown
from lightning_rl.errors import SettingError, closest, missing_extra
from lightning_rl.spaces import MASK, Spaces
from lightning_rl.types import Tree

METADATA = "metadata.json"


def require_minari() -> Any:
    """The package.

    Raises:
        SettingError: it or what it needs to read files is not installed.
    """
    try:
        import h5py  # noqa: F401
        import minari
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise missing_extra("minari", "minari", "a dataset of demonstrations") from error
    return minari


def dataset_id(name: str) -> str:
    """A dataset's id, as Minari writes it; `cartpole/v0` is short for `cartpole-v0`.

    Raises:
        SettingError: it is none.
    """
    given = re.sub(r"/v(\d+)$", r"-v\1", name)
    try:
        require_minari().dataset.minari_dataset.parse_dataset_id(given)
    except (ValueError, TypeError) as error:  # TypeError: no version
        raise SettingError(
            f"dataset {shown(name)} is no name that Minari takes: letters, digits, - and _ (two or more before a /), "
            "such as cartpole-v0 or cartpole/expert-v0"
        ) from error
    return given


def datasets_folder() -> Path:
    """`MINARI_DATASETS_PATH`, or Minari's folder in the home folder.

    Raises:
        SettingError: it is not there and cannot be made.
    """
    try:
        return require_minari().storage.get_dataset_path()
    except OSError as error:
        raise SettingError(f"the folder of Minari's datasets, MINARI_DATASETS_PATH, cannot be used: {error}") from error


def data_folder(dataset: str) -> Path:
    """Where the files of a dataset lie: one of Minari's, by its id, or any other, by its path.

    Raises:
        SettingError: there is none.
    """
    root = datasets_folder()
    places = [root / re.sub(r"/v(\d+)$", r"-v\1", dataset), Path(dataset)]
    for folder in (each for place in places for each in (place / "data", place)):
        if os.path.isfile(folder / METADATA):  # False for names that no file can have
            return folder
    known = [path.parent.parent.relative_to(root).as_posix() for path in root.glob(f"**/data/{METADATA}")]
    way_out = closest(dataset, known) or "; lightning-rl collect makes one"
    raise SettingError(f"dataset {shown(dataset)} is neither in {shown(root)} nor a folder with data/{METADATA}{way_out}")


def new_folder(name: str, force: bool) -> Path:
    """Where a dataset of this id will lie.

    Raises:
        SettingError: there is one already, and not `force`, or something else.
    """
    folder = datasets_folder() / name
    if folder.exists() and not force:
        raise SettingError(f"dataset {shown(name)} is there already, in {shown(folder)}; choose another name, or replace it with force")
    if folder.exists() and [each.name for each in folder.iterdir()] != ["data"]:
        raise SettingError(f"dataset {shown(name)} cannot be replaced: {shown(folder)} holds other things too; choose another name")
    return folder


def check_keys(tree: Tree) -> None:
    """Raise `SettingError` for keys of Dict spaces that an HDF5 file would take for something else."""
    if isinstance(tree, dict):
        for key, child in tree.items():
            if not isinstance(key, str) or "/" in key or key in ("", "."):
                raise SettingError(f"the key {key!r} of a Dict space cannot be a name in a dataset; use letters")
            check_keys(child)
    elif isinstance(tree, tuple):
        for child in tree:
            check_keys(child)


class DamagedError(ValueError):
    """A dataset that cannot be used. The message says why, in a few words."""


class ArrayFile:
    """An HDF5 file, open for reading.

    Args:
        path: where it lies.

    Raises:
        DamagedError: it is no file.
        OSError: it is not HDF5.
    """

    def __init__(self, path: Path) -> None:
        import h5py

        if not path.is_file():
            raise DamagedError(f"{path.name} is missing")
        self.h5py, self.file = h5py, h5py.File(path, "r")
        self.left = path.stat().st_size
        """Bytes that may still be read: no more than there are."""

    def close(self) -> None:
        """Close it."""
        self.file.close()

    def group(self, parent: Any, name: str) -> Any:
        """A group in a group.

        Raises:
            DamagedError: there is none.
        """
        return self._child(parent, name, self.h5py.Group, "group")

    def array(self, parent: Any, name: str, rows: int) -> np.ndarray:
        """Numbers `[rows, ...]` of any type and shape.

        Raises:
            DamagedError: they are missing, or are other or more than the file holds.
        """
        return self._read(self._array(parent, name, rows))

    def vector(self, parent: Any, name: str, kinds: str, rows: int | None = None) -> np.ndarray:
        """Numbers `[rows]`, at least one, of one of some kinds of types, in the byte order of this machine.

        Raises:
            DamagedError: they are missing, or are other or more than the file holds.
        """
        node = self._array(parent, name, rows)
        if node.ndim != 1 or not len(node) or node.dtype.kind not in kinds or not np.can_cast(node.dtype, np.float64):
            raise DamagedError(f"{_place(node)} has shape {node.shape} and type {node.dtype}, not a number a step")
        return self._read(node).astype(node.dtype.newbyteorder("="), copy=False)

    def tree(self, parent: Any, name: str, form: Tree, rows: int, images: bool) -> Tree:
        """A tree of arrays `[rows, ...]`.

        Args:
            parent: the group it lies in.
            name: of the array, or of the group whose members are the children.
            form: arrays `[0, ...]` of the shapes and types.
            rows: how many are expected.
            images: whether arrays of bytes may lie there as JPEG files, one a row.

        Raises:
            DamagedError: it has another form.
        """
        if isinstance(form, dict | tuple):
            node = self.group(parent, name)
            if isinstance(form, dict):
                return {key: self.tree(node, key, child, rows, images) for key, child in form.items()}
            return tuple(self.tree(node, f"_index_{i}", child, rows, images) for i, child in enumerate(form))
        node = self._array(parent, name, rows)
        if images and form.dtype == np.uint8 and node.ndim < form.ndim:
            return self._images(node, form)
        if node.shape[1:] != form.shape[1:]:
            raise DamagedError(f"{_place(node)} has shape {node.shape[1:]} and its space {form.shape[1:]}")
        if not np.can_cast(node.dtype, form.dtype):
            raise DamagedError(f"{_place(node)} is {node.dtype} and its space {form.dtype}")
        return self._read(node).astype(form.dtype, copy=False)

    def _child(self, parent: Any, name: str, kind: type, word: str) -> Any:
        link = parent.get(name, getlink=True)
        place = f"{_place(parent)}/{name}".lstrip("/")
        if link is None:
            raise DamagedError(f"{place} is missing")
        if not isinstance(link, self.h5py.HardLink):
            raise DamagedError(f"{place} is a link")
        node = parent[name]
        if not isinstance(node, kind):
            raise DamagedError(f"{place} is no {word}")
        return node

    def _array(self, parent: Any, name: str, rows: int | None) -> Any:
        """An array that is not read yet."""
        node = self._child(parent, name, self.h5py.Dataset, "array")
        if not node.shape or (rows is not None and len(node) != rows):
            raise DamagedError(f"{_place(node)} has shape {node.shape or ()}, not {'a row a step' if rows is None else f'{rows} rows'}")
        if node.is_virtual or node.external or node.id.get_create_plist().get_nfilters():
            raise DamagedError(f"{_place(node)} lies in other files or is compressed, which Minari does not do")
        return node

    def _read(self, node: Any) -> np.ndarray:
        if node.dtype.kind not in "biuf":
            raise DamagedError(f"{_place(node)} holds no numbers")
        self._take(node, node.nbytes)
        return node[()]

    def _images(self, node: Any, form: np.ndarray) -> np.ndarray:
        """Images `[rows, height, width]` or `[rows, height, width, 3]` from JPEG files."""
        from PIL import Image

        shape = form.shape[1:]
        images = np.empty((len(node), *shape), np.uint8)
        for i in range(len(node)):
            file = np.asarray(node[i])
            if file.dtype != np.uint8:
                raise DamagedError(f"{_place(node)} holds no images")
            self._take(node, file.nbytes)
            try:
                image = Image.open(BytesIO(file.tobytes()), formats=["JPEG"])
                pixels = np.asarray(image) if image.size == shape[1::-1] else np.empty(0)
            except Exception as error:  # what decoders meet in bytes that are no image
                raise DamagedError(f"{_place(node)} holds no images") from error
            if pixels.shape != shape:
                raise DamagedError(f"{_place(node)} holds images of another size than its space, {shape}")
            images[i] = pixels
        return images

    def _take(self, node: Any, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise DamagedError(f"{_place(node)} is larger than the file it lies in")


def _place(node: Any) -> str:
    return node.name.lstrip("/")


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
