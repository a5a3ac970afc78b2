"""Load demonstrations from Minari datasets (minari.farama.org), with all values exactly as recorded, and from Unity's `.demo` files.

Files are read here and not by Minari, because Minari builds the environment named in a dataset if its spaces are missing, allocates spaces
and arrays as large as the file declares, and follows links to other files. Here nothing in a dataset is executed, and no package is
imported for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from textwrap import shorten
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array

from lightning_rl.checkpoints.files import shown
from lightning_rl.demonstrations import unity_files
from lightning_rl.demonstrations.files import ArrayFile, DamagedError, data_folder, read_metadata
from lightning_rl.envs.masks import Masks
from lightning_rl.errors import SettingError
from lightning_rl.spaces import MASK, Spaces, limits, to_plain
from lightning_rl.types import MAX_FLOAT32, Tree, tree_index, tree_map

if TYPE_CHECKING:
    from h5py import Group

LIBRARY_ERRORS = (OSError, LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError, MemoryError)
"""Errors that libraries raise for a damaged file."""


class Demonstration(NamedTuple):
    """One episode of T steps.

    obs: `[T + 1, ...]` and action: `[T, ...]`, trees of arrays in the environment's own format, obs without the key `action_mask`.
    reward, terminated, truncated: `[T]`.
    action_mask: bool `[T + 1, M]`, of the choices at obs; () without masks.
    """

    obs: Tree
    action: Tree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    action_mask: Tree = ()


def load_demonstrations(dataset: str, spaces: Spaces, say: Callable[[str], None] = print) -> list[Demonstration]:
    """Load the episodes of a dataset. An episode that neither terminated nor was truncated counts as truncated after its last step.

    Args:
        dataset: the id of a Minari dataset, such as `cartpole/expert-v0`, or the path of its folder; or a `.demo` file of Unity or a folder
            of them, see `unity_files.py`.
        spaces: spaces of the algorithm.
        say: called with a line about each `.demo` file.

    Raises:
        SettingError: the dataset does not exist, is damaged or empty, or has other spaces.
    """
    if unity_files.find_files(dataset):
        return [as_demonstration(episode) for episode in unity_files.load_episodes(dataset, spaces, say)]
    folder = data_folder(dataset)
    forms = empty_arrays(spaces.observation), empty_arrays(spaces.action)
    try:
        episodes, images = read_metadata(folder, spaces)
        with closing(ArrayFile(folder / "main_data.hdf5")) as file:
            return [read_episode(file, number, spaces, forms, images) for number in range(episodes)]
    except (DamagedError, SettingError) as error:
        raise SettingError(f"dataset {shown(dataset)}: {error}") from error
    except LIBRARY_ERRORS as error:
        reason = shorten(f"{type(error).__name__}: {error}", 80, placeholder=" …")
        raise SettingError(f"dataset {shown(dataset)} cannot be read ({reason}); it is damaged or not a Minari dataset") from error


def as_demonstration(episode: unity_files.Episode) -> Demonstration:
    """Convert an episode of a `.demo` file."""
    last = np.arange(len(episode.reward)) == len(episode.reward) - 1
    ends = last & episode.terminated
    return Demonstration(episode.obs, episode.action, episode.reward, ends, last & ~ends, episode.mask)


def summarize(demonstrations: Iterable[Demonstration]) -> str:
    """Describe episodes in one line: number, steps, return and length."""
    rewards = [demonstration.reward for demonstration in demonstrations]
    returns, lengths = [reward.sum() for reward in rewards], [len(reward) for reward in rewards]
    numbers = f"{len(rewards):,} episode{'s' * (len(rewards) != 1)}, {sum(lengths):,} step{'s' * (sum(lengths) != 1)}"
    return f"{numbers}, return {np.mean(returns):.2f} ± {np.std(returns):.2f}, mean length {np.mean(lengths):.1f}" if rewards else numbers


def concatenate_steps(demonstrations: Iterable[Demonstration], from_env: Callable[[Tree], Tree]) -> tuple[Tree, Tree, np.ndarray]:
    """Return the observations, the actions as a policy samples them, and the terminations of all steps, `[M, ...]`."""
    rows = [
        (tree_index(demonstration.obs, slice(None, -1)), from_env(demonstration.action), demonstration.terminated)
        for demonstration in demonstrations
    ]
    return tree_map(lambda *leaves: np.concatenate(leaves), *rows)


def transitions(demonstrations: Iterable[Demonstration]) -> list[dict[str, Tree]]:
    """Return all steps in the format of `ReplayBuffer.extend`; the last step of an episode truncates it unless it terminated."""
    return [
        {
            "obs": tree_index(obs, t),
            "action": tree_index(action, t),
            "reward": float(reward[t]),
            "next_obs": tree_index(obs, t + 1),
            "terminated": bool(terminated[t]),
            "truncated": bool(truncated[t] or (t == len(reward) - 1 and not terminated[t])),
            **({MASK: mask[t], f"next_{MASK}": mask[t + 1]} if len(mask) else {}),
        }
        for obs, action, reward, terminated, truncated, mask in demonstrations
        for t in range(len(reward))
    ]


def empty_arrays(space: Space) -> Tree:
    """Return arrays `[0, ...]` with the shapes and dtypes of a space; raise `SettingError` for a space that files cannot store."""
    to_plain(space)
    form = create_empty_array(space, 0)
    check_keys(form)
    return form


def check_keys(tree: Tree) -> None:
    """Raise `SettingError` for keys of Dict spaces that have another meaning in HDF5 files."""
    for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, tuple) else ():
        if isinstance(tree, dict) and (not isinstance(key, str) or "/" in key or key in ("", ".")):
            raise SettingError(f"the key {key!r} of a Dict space cannot be a name in a dataset; use letters")
        check_keys(child)


def read_episode(file: ArrayFile, number: int, spaces: Spaces, forms: tuple[Tree, Tree], images: bool) -> Demonstration:
    """Read one episode; raise `DamagedError` or `SettingError` if it does not fit the spaces, or its masks are invalid."""
    name = f"episode_{number}"
    group = file.group(file.file, name)
    reward = file.vector(group, "rewards", "fiu")
    steps = len(reward)
    terminated, truncated = (file.vector(group, key, "biu", steps) for key in ("terminations", "truncations"))
    if ((terminated > 1) | (truncated > 1) | (terminated < 0) | (truncated < 0)).any():
        raise DamagedError(f"{name} has terminations or truncations that are neither true nor false")
    terminated, truncated = terminated.astype(bool), truncated.astype(bool)
    ended = terminated | truncated
    if ended[:-1].any():
        raise DamagedError(f"{name} continues after step {int(ended.argmax())}, which ended it")
    truncated[-1] |= not ended[-1]
    obs = file.tree(group, "observations", forms[0], steps + 1, images)
    action = file.tree(group, "actions", forms[1], steps, images)
    check_values(obs, limits(spaces.observation), f"{name}: observation", floats=False)  # environments overshoot their bounds
    check_values(action, limits(spaces.action), f"{name}: action", floats=True)
    check_values(reward, np.array([-np.inf, np.inf]), f"{name}: reward", floats=True)
    mask = read_masks(file, group, spaces, terminated) if spaces.masked else ()
    return Demonstration(obs, action, reward, terminated, truncated, mask)


def read_masks(file: ArrayFile, group: Group, spaces: Spaces, terminated: np.ndarray) -> np.ndarray:
    """Read the masks of an episode from its infos or its observations; raise `SettingError` if one does not fit or allows no action."""
    name = group.name[1:]
    place = next((place for place in ("infos", "observations") if f"{place}/{MASK}" in group), None)
    if place is None:
        raise DamagedError(f"{name} has no action masks, but the algorithm's environment has")
    array = file.array(file.group(group, place), MASK, len(terminated) + 1)
    masks = Masks(spaces.action, f"step {{}} of {name}", len(array))
    return masks.split((), {MASK: array}, over=np.append(np.zeros(len(terminated), dtype=bool), terminated[-1]))[1]


def check_values(tree: Tree, bounds: Tree, name: str, floats: bool) -> None:
    """Raise `DamagedError` for NaN and infinite values, and for integers (with `floats` also floats) out of bounds `[2, ...]`."""
    if isinstance(tree, dict | tuple):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            check_values(tree[key], bounds[key], f"{name}.{key}", floats)
        return
    if tree.dtype.kind == "f":
        bounds = np.clip(np.float64(bounds), -MAX_FLOAT32, MAX_FLOAT32) if floats else np.array([-MAX_FLOAT32, MAX_FLOAT32])
    bad = ~((bounds[0] <= tree) & (tree <= bounds[1]))
    if bad.any():
        place = tuple(np.argwhere(bad)[0])
        low, high = (np.broadcast_to(bound, tree.shape)[place] for bound in bounds)
        raise DamagedError(f"{name} is {tree[place]} at step {place[0]}, not a number from {low:g} to {high:g}")
