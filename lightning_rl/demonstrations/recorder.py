"""Record episodes and save them as Minari datasets."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from lightning_rl.checkpoints.atomic import SaveFailed
from lightning_rl.demonstrations.dataset import Demonstration, form_of
from lightning_rl.demonstrations.files import dataset_id, datasets_folder, new_folder, require_minari
from lightning_rl.envs.masks import masks_of, with_mask_info
from lightning_rl.errors import SettingError, check_range
from lightning_rl.spaces import MASK, as_spaces, short
from lightning_rl.types import Tree, tree_map, tree_stack

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


class RecordEpisodes(gym.Wrapper):
    """Keeps what is played, episode by episode, to save it as a Minari dataset: of a script, of a person, of a policy.

    An episode that a reset cuts off is kept as truncated there. Actions are made members of the action space before the environment gets
    them (a list becomes an array, float64 float32), so that what it gets is what is recorded; observations are kept in the types of their
    space.

    Args:
        env: one environment; a method `action_masks` is heard (see `envs/masks.py`).

    Raises:
        SettingError: its spaces cannot be recorded.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(with_mask_info(env))
        self.spaces = as_spaces(env.observation_space, env.action_space)
        self.forms = form_of(self.spaces.observation), form_of(self.spaces.action)
        self.name = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
        self.demonstrations: list[Demonstration] = []
        """The episodes so far, without the one under way."""
        self.seen: list[tuple[Tree, Tree]] = []
        self.done: list[tuple[Tree, float, bool, bool]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.cut()
        obs, info = self.env.reset(seed=seed, options=options)
        self.masks = masks_of(self.env, info, f"environment {{}} of {self.name}")
        self.seen = [self._seen(obs, info)]
        return obs, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step and record.

        Raises:
            SettingError: the action is not in the action space, or what is observed not in its space.
            ResetNeeded: the episode is over.
        """
        if not self.seen:
            raise gym.error.ResetNeeded("call reset before the first step of an episode")
        taken = self._taken(action)
        obs, reward, terminated, truncated, info = self.env.step(taken)
        self.seen.append(self._seen(obs, info, bool(terminated or truncated)))
        self.done.append((taken, float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            self._keep()
        return obs, reward, terminated, truncated, info

    def cut(self) -> None:
        """Keep the episode under way as truncated; there is none, or it has no step yet: nothing happens."""
        if self.done:
            self.done[-1] = (*self.done[-1][:3], True)
            self._keep()

    def save(self, dataset: str, force: bool = False) -> Path:
        """Save all episodes, also the one under way, as a Minari dataset, and say where it lies.

        Args:
            dataset: its id, such as `cartpole/expert-v0`.
            force: replace one of that id.

        Raises:
            SettingError: no id, one that is taken, or no episodes.
            SaveFailed: the disk is full, the folder cannot be written to, …; nothing is changed.
        """
        self.cut()
        return save_demonstrations(dataset, self.demonstrations, self.env, force=force)

    def _keep(self) -> None:
        obs, mask = tree_stack(self.seen)
        action, reward, terminated, truncated = zip(*self.done, strict=True)
        self.demonstrations.append(
            Demonstration(obs, tree_stack(action), np.array(reward), np.array(terminated), np.array(truncated), mask)
        )
        self.seen, self.done = [], []

    def _seen(self, obs: Tree, info: dict[str, Any], over: bool = False) -> tuple[Tree, Tree]:
        obs, mask = self.masks.one(obs, info, over=over)
        try:
            return tree_map(as_member, self.forms[0], obs), mask
        except (ValueError, TypeError) as error:
            raise SettingError(f"{self.name} observes what is not in its space {short(self.spaces.observation)}: {error}") from error

    def _taken(self, action: Tree) -> Tree:
        try:
            taken = tree_map(as_member, self.forms[1], action)
            fits = self.action_space.contains(taken)
        except (ValueError, TypeError):
            fits = False
        if not fits:
            raise SettingError(f"the action {action!s:.60} is not in the space {short(self.action_space)} of {self.name}")
        return taken


def as_member(form: np.ndarray, value: Any) -> Any:
    """A copy of a value in the type of arrays `[0, ...]`; a choice is a number, which environments look up in their tables.

    Raises:
        ValueError: it has another shape, or would not be the same integer.
    """
    given = np.asarray(value)
    member = given.astype(form.dtype)
    if member.shape != form.shape[1:]:
        raise ValueError(f"shape {member.shape} instead of {form.shape[1:]}")
    if form.dtype.kind != "f" and (member != given).any():
        raise ValueError(f"{given} as {form.dtype}")
    return member if form.dtype.kind == "f" else member[()]


def in_order(recorders: Iterable[RecordEpisodes]) -> list[Demonstration]:
    """The episodes of environments that play in turn: the first of each, the second of each, …"""
    rows = zip_longest(*(recorder.demonstrations for recorder in recorders))
    return [each for each in chain.from_iterable(rows) if each is not None]


def record_1d(n_demos: int = 100, seed: int = 0, **settings: Any) -> RecordEpisodes:
    """Play the best action in `lightning_rl/Simple1D-v0`, straight to the goal: `record_1d().save("simple1d/expert-v0")`.

    Args:
        n_demos: how many steps to record; the last of them truncates its episode.
        seed: of the goals.
        settings: of `Simple1D`, such as `action=[1, 2]` or `num_visual=1`.

    Raises:
        SettingError: `n_demos` is no number of steps.
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
    """As far to the goal as an action can say: the goal itself in every dimension, and its side in every branch."""
    goal = env.get_wrapper_attr("goal")
    return tree_map(lambda form: np.full(form.shape[1:], goal if form.dtype.kind == "f" else goal > 0, form.dtype), env.forms[1])
