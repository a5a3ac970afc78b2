"""Arrays from an HDF5 file of others: only what the reader expects, and no more of it than the file is large.

Such a file can declare arrays that no machine can hold, lead to other files by links, and hold types that stand for objects. Each array
is looked at before it is read.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rl.types import Tree


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
