"""Demonstrations to Minari datasets, which are there whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium as gym

from lightning_rl.demonstrations.dataset import Demonstration
from lightning_rl.demonstrations.store import dataset_id, datasets_folder, new_folder, require_minari
from lightning_rl.errors import SettingError
from lightning_rl.saving.atomic import SaveFailed
from lightning_rl.spaces import MASK, as_spaces

PLACE = "MINARI_DATASETS_PATH"


def save_demonstrations(
    dataset: str, demonstrations: Sequence[Demonstration], env: gym.Env, *, algorithm: str | None = None, force: bool = False
) -> Path:
    """Save episodes as a Minari dataset; numbers are kept as they are, images too. Masks are among the infos, flat.

    Args:
        dataset: its id, such as `cartpole/expert-v0`.
        demonstrations: the episodes.
        env: what they were played in; the dataset holds its spaces, and how it was made where that can be said.
        algorithm: who played.
        force: replace a dataset of that id.

    Returns:
        Its folder.

    Raises:
        SettingError: no id, one that is taken, or no episodes.
        SaveFailed: the disk is full, the folder cannot be written to, …; nothing is changed.
    """
    minari, name = require_minari(), dataset_id(dataset)
    folder, spaces = new_folder(name, force), as_spaces(env.observation_space, env.action_space)
    if not demonstrations:
        raise SettingError(f"there are no episodes to save as dataset {name!r}")
    try:
        with elsewhere(datasets_folder()) as place, warnings.catch_warnings(action="ignore"):  # authors, links, … that are not given
            minari.create_dataset_from_buffers(
                name,
                [_buffer(minari, each) for each in demonstrations],
                env=env if _can_be_written(env) else None,
                observation_space=spaces.observation,
                action_space=spaces.action,
                algorithm_name=algorithm,
                description=f"Recorded by lightning_rl in {type(env.unwrapped).__name__ if env.spec is None else env.spec.id}.",
                data_format="hdf5",
                jpeg_encoding=False,  # which loses
            )
            _move(place, name, folder)
    except (OSError, RuntimeError) as error:  # h5py says so of a full disk
        reason = getattr(error, "strerror", None) or str(error)
        raise SaveFailed(f"dataset {name!r} could not be saved in {folder} ({reason})", reason) from error
    return folder


@contextmanager
def elsewhere(root: Path) -> Iterator[Path]:
    """A hidden folder in Minari's, which Minari takes for its own in here: what is made in it is seen by nobody before it is whole."""
    before = os.environ.get(PLACE)
    with TemporaryDirectory(prefix=".new-", dir=root, ignore_cleanup_errors=True) as place:
        os.environ[PLACE] = place
        try:
            yield Path(place)
        finally:
            os.environ.pop(PLACE)
            os.environ.update({} if before is None else {PLACE: before})


def _move(place: Path, name: str, folder: Path) -> None:
    """Give a dataset its own name, and its namespace what Minari writes there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for file in place.rglob("namespace_metadata.json"):
        target = place.parent / file.relative_to(place)
        if not target.exists():
            os.replace(file, target)
    replaced = place / "replaced"
    if folder.exists():
        os.replace(folder, replaced)
    try:
        os.replace(place / name, folder)
    except OSError:
        if replaced.exists():
            os.replace(replaced, folder)
        raise


def _buffer(minari: Any, demonstration: Demonstration) -> Any:
    """An episode as Minari takes it."""
    obs, action, reward, terminated, truncated, mask = demonstration
    return minari.data_collector.EpisodeBuffer(
        observations=obs,
        actions=action,
        rewards=reward,
        terminations=terminated,
        truncations=truncated,
        infos={MASK: mask} if len(mask) else None,
    )


def _can_be_written(env: gym.Env) -> bool:
    """Whether gymnasium can write down how an environment was made."""
    try:
        return env.spec is not None and bool(env.spec.to_json())
    except (TypeError, ValueError):  # functions and objects among its arguments
        return False
