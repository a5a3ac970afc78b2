"""Record episodes and save them as Minari datasets."""

import os
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from lightning_rl.checkpoints.atomic import SaveError
from lightning_rl.demonstrations.dataset import Demonstration, empty_arrays
from lightning_rl.demonstrations.files import dataset_id, datasets_folder, new_folder, require_minari
from lightning_rl.envs.masks import detect_masks, with_mask_info
from lightning_rl.errors import SettingError, check_range
from lightning_rl.spaces import MASK, as_spaces, short
from lightning_rl.types import Tree, tree_map, tree_stack


def save_demonstrations(
    dataset: str, demonstrations: Sequence[Demonstration], env: gym.Env, *, algorithm: str | None = None, force: bool = False
) -> Path:
    """Save episodes as a Minari dataset; numbers are kept as they are, images too. Masks are among the infos, flat.

    Args:
        dataset: its id, such as `cartpole/expert-v0`.
        demonstrations: the episodes.
        env: what they were played in; the dataset holds its spaces, and how it was made where that can be written down.
        algorithm: who played.
        force: replace a dataset of that id.

    Returns:
        Its folder.

    Raises:
        SettingError: the id is not valid or is taken, or there are no episodes.
        SaveError: the disk is full, the folder cannot be written to, …; nothing is changed.
    """
    name = dataset_id(dataset)
    folder = new_folder(name, force)
    if not demonstrations:
        raise SettingError(f"there are no episodes to save as dataset {name!r}")
    try:  # in a hidden folder first, so that nobody sees a dataset that is not complete
        with TemporaryDirectory(prefix=".new-", dir=datasets_folder(), ignore_cleanup_errors=True) as place:
            _write(Path(place) / "new", name, demonstrations, env, algorithm)
            _move(Path(place), name, folder)
    except (OSError, RuntimeError) as error:  # h5py raises RuntimeError for a full disk
        reason = getattr(error, "strerror", None) or str(error)
        raise SaveError(f"dataset {name!r} could not be saved in {folder} ({reason})", reason) from error
    return folder


def _write(folder: Path, name: str, demonstrations: Sequence[Demonstration], env: gym.Env, algorithm: str | None) -> None:
    """Write a dataset into a new folder, with the classes below `minari.create_dataset_from_buffers`, which takes no folder."""
    minari, spaces = require_minari(), as_spaces(env.observation_space, env.action_space)
    folder.mkdir()
    storage = minari.dataset.minari_storage.MinariStorage.new(
        folder / "data",
        spaces.observation,
        spaces.action,
        env.spec if _can_be_written(env) else None,
        "hdf5",
        jpeg_encoding=False,  # which loses
    )
    description = f"Recorded by lightning_rl in {type(env.unwrapped).__name__ if env.spec is None else env.spec.id}."
    metadata = {"dataset_id": name, "minari_version": minari.__version__, "description": description}
    storage.update_metadata(metadata | ({} if algorithm is None else {"algorithm_name": algorithm}))
    storage.update_episodes(
        minari.data_collector.EpisodeBuffer(
            observations=obs,
            actions=action,
            rewards=reward,
            terminations=terminated,
            truncations=truncated,
            infos={MASK: mask} if len(mask) else None,
        )
        for obs, action, reward, terminated, truncated, mask in demonstrations
    )


def _can_be_written(env: gym.Env) -> bool:
    """Return whether gymnasium can write down how an environment was made."""
    try:
        return env.spec is not None and bool(env.spec.to_json())
    except (TypeError, ValueError):  # functions and objects among its arguments
        return False


def _move(place: Path, name: str, folder: Path) -> None:
    """Move a new dataset to its folder, and make its namespace."""
    minari = require_minari()
    namespace = minari.dataset.minari_dataset.parse_dataset_id(name)[0]
    if namespace is not None and namespace not in minari.namespace.list_local_namespaces():
        minari.namespace.create_namespace(namespace)
    folder.parent.mkdir(parents=True, exist_ok=True)
    replaced = place / "replaced"
    if folder.exists():
        os.replace(folder, replaced)
    try:
        os.replace(place / "new", folder)
    except BaseException:  # Ctrl-C too
        if replaced.exists():
            os.replace(replaced, folder)
        raise


class RecordEpisodes(gym.Wrapper):
    """Keeps what is played, episode by episode, to save it as a Minari dataset: by a script, a person or a policy.

    An episode that a reset cuts off is kept as truncated there. Actions are made members of the action space before the environment gets
    them (a list becomes an array, float64 float32), so that what it gets is what is recorded; observations are kept in the types of their
    space.

    A method `action_masks` is used (see `envs/masks.py`). Raises `SettingError` for spaces that cannot be recorded.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(with_mask_info(env))
        self.spaces = as_spaces(env.observation_space, env.action_space)
        self.forms = empty_arrays(self.spaces.observation), empty_arrays(self.spaces.action)
        self.name = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
        self.demonstrations: list[Demonstration] = []
        """The episodes so far, without the current one."""
        self.observed: list[tuple[Tree, Tree]] = []
        self.steps: list[tuple[Tree, float, bool, bool]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.cut()
        obs, info = self.env.reset(seed=seed, options=options)
        self.masks = detect_masks(self.env, info, f"environment {{}} of {self.name}")
        self.observed = [self._read_observation(obs, info)]
        return obs, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step and record; raise `SettingError` if the action or the observation is not in its space."""
        if not self.observed:
            raise gym.error.ResetNeeded("call reset before the first step of an episode")
        taken = self._read_action(action)
        obs, reward, terminated, truncated, info = self.env.step(taken)
        self.observed.append(self._read_observation(obs, info, bool(terminated or truncated)))
        self.steps.append((taken, float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            self._keep()
        return obs, reward, terminated, truncated, info

    def cut(self) -> None:
        """Keep the current episode as truncated, if there is one and it has a step."""
        if self.steps:
            self.steps[-1] = (*self.steps[-1][:3], True)
            self._keep()

    def save(self, dataset: str, force: bool = False) -> Path:
        """Save all episodes, also the current one, and return their folder, see `save_demonstrations`."""
        self.cut()
        return save_demonstrations(dataset, self.demonstrations, self.env, force=force)

    def _keep(self) -> None:
        obs, mask = tree_stack(self.observed)
        action, *numbers = zip(*self.steps, strict=True)
        reward, terminated, truncated = map(np.array, numbers)
        self.demonstrations.append(Demonstration(obs, tree_stack(action), reward, terminated, truncated, mask))
        self.observed, self.steps = [], []

    def _read_observation(self, obs: Tree, info: dict[str, Any], over: bool = False) -> tuple[Tree, Tree]:
        obs, mask = self.masks.one(obs, info, over=over)
        try:
            return tree_map(as_member, self.forms[0], obs), mask
        except (ValueError, TypeError) as error:
            raise SettingError(f"{self.name} observes what is not in its space {short(self.spaces.observation)}: {error}") from error

    def _read_action(self, action: Tree) -> Tree:
        try:
            taken = tree_map(as_member, self.forms[1], action)
            fits = self.action_space.contains(taken)
        except (ValueError, TypeError):
            fits = False
        if not fits:
            raise SettingError(f"the action {action!s:.60} is not in the space {short(self.action_space)} of {self.name}")
        return taken


def as_member(form: np.ndarray, value: Any) -> np.ndarray | np.generic:
    """Return a copy of a value in the type of arrays `[0, ...]`; raise `ValueError` for another shape, or if it is not the same integer.

    A choice becomes a number, which environments look up in their tables.
    """
    given = np.asarray(value)
    member = given.astype(form.dtype)
    if member.shape != form.shape[1:]:
        raise ValueError(f"shape {member.shape} instead of {form.shape[1:]}")
    if form.dtype.kind != "f" and (member != given).any():
        raise ValueError(f"{given} as {form.dtype}")
    return member if form.dtype.kind == "f" else member[()]


def interleave_episodes(recorders: Iterable[RecordEpisodes]) -> list[Demonstration]:
    """Return the episodes of environments that play in turn: the first of each, the second of each, …"""
    rows = zip_longest(*(recorder.demonstrations for recorder in recorders))
    return [each for each in chain.from_iterable(rows) if each is not None]


def record_1d(n_demos: int = 100, seed: int = 0, **settings: Any) -> RecordEpisodes:
    """Play the best action in `lightning_rl/Simple1D-v0`, straight to the goal: `record_1d().save("simple1d/expert-v0")`.

    Args:
        n_demos: how many steps to record; the last of them truncates its episode.
        seed: of the goals.
        settings: of `Simple1D`, such as `action=[1, 2]` or `num_visual=1`.
    """
    check_range("n_demos", n_demos, 1, whole=True)
    env = RecordEpisodes(gym.make("lightning_rl/Simple1D-v0", **settings))
    env.reset(seed=seed)
    for _ in range(n_demos):
        _, _, terminated, truncated, _ = env.step(best_action(env))
        if terminated or truncated:
            env.reset()
    env.cut()
    return env


def best_action(env: RecordEpisodes) -> Tree:
    """Go as far to the goal as an action can: to the goal itself in every dimension, to its side in every branch."""
    goal = env.get_wrapper_attr("goal")
    return tree_map(lambda form: np.full(form.shape[1:], goal if form.dtype.kind == "f" else goal > 0, form.dtype), env.forms[1])
