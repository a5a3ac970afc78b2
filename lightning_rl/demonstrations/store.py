"""Where Minari keeps datasets, and how they are called."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lightning_rl.errors import SettingError, closest, missing_extra
from lightning_rl.saving.files import shown
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
