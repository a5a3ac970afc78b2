"""Record episodes and save them as Minari datasets."""

import os
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium as gym
import numpy as np

from lightning_rl.checkpoints.atomic import SaveError
from lightning_rl.demonstrations.dataset import Demonstration, empty_arrays
from lightning_rl.demonstrations.files import dataset_id, datasets_folder, new_folder, require_minari
from lightning_rl.envs.masks import detect_masks, with_mask_info
from lightning_rl.errors import SettingError, check_range
from lightning_rl.nan_policy import check_episode
from lightning_rl.spaces import MASK, as_spaces, short
from lightning_rl.types import Info, Options, StepResult, Tree, tree_map, tree_stack


def save_demonstrations(
    dataset: str, demonstrations: Sequence[Demonstration], env: gym.Env, *, algorithm: str | None = None, force: bool = False
) -> Path:
    """Save episodes as a Minari dataset. All values are stored exactly, including images. Masks are stored flat in the infos.

    Args:
        dataset: its id, such as `cartpole/expert-v0`.
        demonstrations: the episodes.
        env: the environment of the episodes; the dataset stores its spaces, and its spec if that can be serialized.
        algorithm: the algorithm that played.
        force: replace an existing dataset with this id.

    Returns:
        Its folder.

    Raises:
        SettingError: the id is invalid or taken, or there are no episodes.
        SaveError: the disk is full, the folder is not writable, …; nothing is changed.
    """
    name = dataset_id(dataset)
    folder = new_folder(name, force)
    if not demonstrations:
        raise SettingError(f"there are no episodes to save as dataset {name!r}")
    try:  # first in a hidden folder, so that incomplete datasets are never visible
        with TemporaryDirectory(prefix=".new-", dir=datasets_folder(), ignore_cleanup_errors=True) as place:
            _write(Path(place) / "new", name, demonstrations, env, algorithm)
            _move(Path(place), name, folder)
    except (OSError, RuntimeError) as error:  # h5py raises RuntimeError for a full disk
        reason = getattr(error, "strerror", None) or str(error)
        raise SaveError(f"dataset {name!r} could not be saved in {folder} ({reason})", reason) from error
    return folder


def _write(folder: Path, name: str, demonstrations: Sequence[Demonstration], env: gym.Env, algorithm: str | None) -> None:
    """Write a dataset into a new folder, with the classes behind `minari.create_dataset_from_buffers`, which accepts no folder."""
    minari, spaces = require_minari(), as_spaces(env.observation_space, env.action_space)
    folder.mkdir()
    storage = minari.dataset.minari_storage.MinariStorage.new(
        folder / "data",
        spaces.observation,
        spaces.action,
        env.spec if _can_be_written(env) else None,
        "hdf5",
        jpeg_encoding=False,  # it is lossy
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
    """Return whether gymnasium can serialize an environment's spec."""
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
    except BaseException:  # including Ctrl-C
        if replaced.exists():
            os.replace(replaced, folder)
        raise


class RecordEpisodes(gym.Wrapper):
    """Records episodes played by a script, a person or a policy, to save them as a Minari dataset.

    An episode that is interrupted by a reset counts as truncated there. Actions are converted to members of the action space before the
    environment gets them (a list to an array, float64 to float32), so that the recorded actions are those it got. Observations are recorded
    in the dtypes of their space.

    A method `action_masks` is used (see `envs/masks.py`). Raises `SettingError` for spaces that cannot be recorded, and `NotFiniteError`
    for an observation or a reward that is NaN or infinite, because no dataset may hold one.
    """

    on_nan = "raise"
    """The setting of an algorithm whose evaluations are recorded: other values record what replaces NaN for its policy."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(with_mask_info(env))
        self.spaces = as_spaces(env.observation_space, env.action_space)
        self.forms = empty_arrays(self.spaces.observation), empty_arrays(self.spaces.action)
        self.name = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
        self.demonstrations: list[Demonstration] = []
        """Recorded episodes, without the current one."""
        self.observed: list[tuple[Tree, Tree]] = []
        self.steps: list[tuple[Tree, float, bool, bool]] = []

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        self.cut()
        obs, info = self.env.reset(seed=seed, options=options)
        self.masks = detect_masks(self.env, info, f"environment {{}} of {self.name}")
        self.observed = []
        self.observed = [self._read_step(obs, 0.0, info)[0]]
        return obs, info

    def step(self, action: Tree) -> StepResult:
        """Step and record; raise `SettingError` if the action or the observation is not in its space, or a number is not finite."""
        if not self.observed:
            raise gym.error.ResetNeeded("call reset before the first step of an episode")
        taken = self._read_action(action)
        obs, reward, terminated, truncated, info = self.env.step(taken)
        observed, checked_reward = self._read_step(obs, float(reward), info, bool(terminated or truncated))
        self.observed.append(observed)
        self.steps.append((taken, checked_reward, bool(terminated), bool(truncated)))
        if terminated or truncated:
            self._keep()
        return obs, reward, terminated, truncated, info

    def cut(self) -> None:
        """Record the current episode as truncated, if it has at least one step."""
        if self.steps:
            self.steps[-1] = (*self.steps[-1][:3], True)
            self._keep()

    def save(self, dataset: str, force: bool = False) -> Path:
        """Save all episodes, including the current one, and return their folder; see `save_demonstrations`."""
        self.cut()
        return save_demonstrations(dataset, self.demonstrations, self.env, force=force)

    def _keep(self) -> None:
        obs, mask = tree_stack(self.observed)
        action, *numbers = zip(*self.steps, strict=True)
        reward, terminated, truncated = map(np.array, numbers)
        self.demonstrations.append(Demonstration(obs, tree_stack(action), reward, terminated, truncated, mask))
        self.observed, self.steps = [], []

    def _read_step(self, obs: Tree, reward: float, info: Info, over: bool = False) -> tuple[tuple[Tree, Tree], float]:
        """Return an observation with its mask, and the reward, as they are recorded."""
        obs, mask = self.masks.one(obs, info, over=over)
        try:
            with np.errstate(over="ignore"):
                obs = tree_map(as_member, self.forms[0], obs)
            before = self.observed[-1][0] if self.observed else tree_map(np.zeros_like, obs)
            obs, reward, _ = check_episode(obs, reward, before, f"at step {len(self.steps) + 1} of an episode in {self.name}", self.on_nan)
            return (obs, mask), reward
        except (ValueError, TypeError) as error:
            raise SettingError(f"{self.name} returned an observation outside {short(self.spaces.observation)}: {error}") from error

    def _read_action(self, action: Tree) -> Tree:
        try:
            taken = tree_map(as_member, self.forms[1], action)
            fits = self.action_space.contains(taken)
        except (ValueError, TypeError):
            fits = False
        if not fits:
            raise SettingError(f"the action {action!s:.60} is not in the space {short(self.action_space)} of {self.name}")
        return taken


def as_member(form: np.ndarray, value: object) -> np.ndarray | np.generic:
    """Return a copy of a value with the dtype of an array `[0, ...]`; raise `ValueError` for another shape or a changed integer.

    A discrete action becomes a scalar, which environments use as an index.
    """
    given = np.asarray(value)
    member = given.astype(form.dtype)
    if member.shape != form.shape[1:]:
        raise ValueError(f"shape {member.shape} instead of {form.shape[1:]}")
    if form.dtype.kind != "f" and (member != given).any():
        raise ValueError(f"{given} as {form.dtype}")
    return member if form.dtype.kind == "f" else member[()]


def interleave_episodes(recorders: Iterable[RecordEpisodes]) -> list[Demonstration]:
    """Return the episodes of several environments interleaved: the first of each, the second of each, …"""
    rows = zip_longest(*(recorder.demonstrations for recorder in recorders))
    return [part for part in chain.from_iterable(rows) if part is not None]


def record_1d(n_demos: int = 100, seed: int = 0, **settings: Any) -> RecordEpisodes:
    """Play the best action in `lightning_rl/Simple1D-v0`, straight to the goal: `record_1d().save("simple1d/expert-v0")`.

    Args:
        n_demos: number of steps to record; the last step truncates its episode.
        seed: seed of the goals.
        settings: arguments of `Simple1D`, such as `action=[1, 2]` or `num_visual=1`.
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
    """Return the action that goes straight to the goal: the goal itself in every dimension, its side in every branch."""
    goal = env.get_wrapper_attr("goal")
    return tree_map(lambda form: np.full(form.shape[1:], goal if form.dtype.kind == "f" else goal > 0, form.dtype), env.forms[1])
