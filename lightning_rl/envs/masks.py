"""Which actions are legal: from the forms in which environments say it to the one that everything else knows.

A mask is a flat array of bools `[..., M]`, a place for each choice of each discrete part of the action space, part after part: Discrete has
n, MultiDiscrete Σ nvec, MultiBinary two for each bit, off and on; continuous parts have none. An environment says it in one of three ways:

| where | as in |
|---|---|
| `info["action_mask"]`, after `reset` and every `step` | gymnasium's toy text, PettingZoo |
| a key `action_mask` of Dict observations, which networks do not see | RLlib, Sample Factory |
| a method `action_masks()`, of an environment that is built here | sb3-contrib |

as a flat array, for MultiDiscrete and MultiBinary also as a tuple of arrays, and for Dict or Tuple as a tree like the action space in which
parts without choices are missing or None. Of stacked frames the newest mask counts. Where an episode has terminated it may be missing or
all false.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector import VectorEnv

from lightning_rl.errors import SettingError
from lightning_rl.spaces import MASK, Spaces, as_spaces, choice_sizes, choices, legal_sample, short
from lightning_rl.types import Tree, tree_leaves

Info = Mapping[str, Any]


class MaskInfo(gym.Wrapper):
    """Puts what `action_masks()` says where others say it: into the info, unless there is a mask already."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, {MASK: self.env.get_wrapper_attr("action_masks")(), **info}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if not terminated:
            info = {MASK: self.env.get_wrapper_attr("action_masks")(), **info}
        return obs, reward, terminated, truncated, info


def with_mask_info(env: gym.Env) -> gym.Env:
    """The environment, wrapped if it or one of its wrappers has a method `action_masks`."""
    return MaskInfo(env) if env.has_wrapper_attr("action_masks") else env


class NoMasks:
    """For environments that rule out nothing. Methods as those of `Masks`."""

    def __init__(self, who: str) -> None:
        self.who = who

    def split(self, obs: Tree, info: Info, rows: np.ndarray | None = None, over: np.ndarray | None = None) -> tuple[Tree, Tree]:
        if MASK in info:
            raise SettingError(f"{self.who.format(0)} has an action_mask, and the model was made without: make a new one")
        return obs, ()

    def one(self, obs: Tree, info: Info, index: int = 0, over: bool = False) -> tuple[Tree, Tree]:
        return self.split(obs, info)

    def strip(self, obs: Tree) -> Tree:
        return obs


class Masks:
    """Reads the masks of environments.

    Args:
        space: the action space of one of them.
        who: names one by its index, as in `environment {} of Taxi-v3`.
        num: N, how many there are.

    Raises:
        SettingError: an action space without choices.
    """

    def __init__(self, space: Space, who: str, num: int = 1) -> None:
        self.choices, self.sizes, self.who = choices(space), choice_sizes(space), who
        if not self.sizes:
            raise SettingError(f"{who.format(0)} has an action_mask, which is for choices, and its actions {short(space)} have none")
        self.width, self.first = sum(self.sizes), np.cumsum([0, *self.sizes[:-1]])
        self.all, self.every = np.arange(num), np.ones(num, dtype=bool)

    def split(self, obs: Tree, info: Info, rows: np.ndarray | None = None, over: np.ndarray | None = None) -> tuple[Tree, Tree]:
        """Observations without their masks, and the masks `[K, M]`.

        Args:
            obs: of K environments.
            info: of all N.
            rows: which environments the K are; all unless given.
            over: where nothing follows, `[K]`: a mask that is missing or all false becomes all true.

        Raises:
            SettingError: a mask is missing, all false, or has another width.
        """
        rows = self.all if rows is None else rows
        said, places, given = self._of(obs), np.arange(len(rows)), np.ones(len(rows), dtype=bool)
        if MASK in info:
            said, places, given = info[MASK], rows, info.get(f"_{MASK}", self.every)[rows]
        given = given & (said is not None)
        mask = np.ones((len(rows), self.width), dtype=bool)
        mask[given] = self._read(said, places[given], rows[given])
        return self.strip(obs), self._checked(mask, given, rows, over)

    def one(self, obs: Tree, info: Info, index: int = 0, over: bool = False) -> tuple[Tree, Tree]:
        """The same of one environment alone, the mask `[M]`."""
        said = info.get(MASK, self._of(obs))
        mask = np.ones((1, self.width), dtype=bool) if said is None else self._flat(said, index)[None]
        return self.strip(obs), self._checked(mask, np.array([said is not None]), np.array([index]), np.array([over]))[0]

    def batch(self, said: Tree, num: int) -> np.ndarray:
        """Masks `[num, M]` from batched ones in any form."""
        rows = np.arange(num)
        return self._checked(self._read(said, rows, rows), np.ones(num, dtype=bool), rows)

    def strip(self, obs: Tree) -> Tree:
        """Observations without their masks."""
        return obs if self._of(obs) is None else {key: child for key, child in obs.items() if key != MASK}

    def _of(self, obs: Tree) -> Tree | None:
        return obs.get(MASK) if isinstance(obs, dict) else None

    def _read(self, said: Tree, places: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The masks `[K, M]` at some places of batched ones in any form, which are those of the environments `rows`."""
        if isinstance(said, np.ndarray) and said.dtype != object and said.ndim > 1 and said.shape[-1] == self.width:
            return (said if said.ndim == 2 else said[:, -1])[places] > 0
        masks = [self._flat(_at(said, place), row) for place, row in zip(places, rows, strict=True)]
        return np.stack(masks) if masks else np.ones((0, self.width), dtype=bool)

    def _flat(self, said: Tree, index: int) -> np.ndarray:
        """One mask `[M]`."""
        try:
            return np.concatenate(list(_parts(self.choices, said)))
        except (ValueError, TypeError) as error:
            wanted = f"{self.width} places" if len(self.sizes) == 1 else f"{' + '.join(map(str, self.sizes))} places"
            raise SettingError(f"the action_mask of {self.who.format(index)} must have {wanted}, one for each choice: {error}") from None

    def _checked(self, mask: np.ndarray, given: np.ndarray, rows: np.ndarray, over: np.ndarray | None = None) -> np.ndarray:
        """Masks that leave a choice in each part."""
        good = given & np.logical_or.reduceat(mask, self.first, axis=1).all(1)
        if good.all():
            return mask
        refused = ~good if over is None else ~(good | over)
        if refused.any():
            k = int(refused.argmax())
            who = self.who.format(rows[k])
            if not given[k]:
                raise SettingError(f"{who} has no action_mask, and the model was made with: give one after every reset and step")
            raise SettingError(f"{who} allows no action: its action_mask is all false" + " for one of its parts" * (len(self.sizes) > 1))
        return mask | ~good[:, None]


def make_masks(spaces: Spaces, who: str, num: int = 1) -> Masks | NoMasks:
    """What reads the masks of environments with these spaces."""
    return Masks(spaces.action, who, num) if spaces.masked else NoMasks(who)


def masks_of(env: gym.Env, info: Info, who: str, masked: bool = False) -> Masks | NoMasks:
    """What reads the masks of an environment that gave this info; there must be some if it is `masked`."""
    spaces = as_spaces(env.observation_space, env.action_space)
    return make_masks(spaces._replace(masked=spaces.masked or masked or MASK in info), who)


def legal_action(env: Any, space: Space, free: Callable[[], Any], obs: Tree, info: Info) -> Any:
    """A random action that an environment allows, or what `free` says where it rules out nothing; vectors of them are not asked."""
    if isinstance(env, VectorEnv):
        return free()
    mask = masks_of(env, info, "environment {}").one(obs, info)[1]
    return free() if isinstance(mask, tuple) else legal_sample(space, mask)


def _at(said: Tree, place: int) -> Tree:
    """What batched masks say of one environment; gymnasium's infos tell under `_key` who said `key`."""
    if isinstance(said, dict):
        return {key: _at(child, place) for key, child in said.items() if not (key[:1] == "_" and key[1:] in said)}
    if isinstance(said, tuple):
        return tuple(_at(child, place) for child in said)
    return None if said is None else said[place]


def _parts(choices: Tree, said: Tree) -> Iterator[np.ndarray]:
    """One mask in any form, part after part.

    Raises:
        ValueError: it does not fit.
    """
    if (isinstance(said, np.ndarray) and said.dtype == object) or (isinstance(said, list) and any(map(np.ndim, said))):
        said = tuple(said)
    if not isinstance(said, dict | tuple):
        mask, width = np.zeros(0) if said is None else np.asarray(said), _width(choices)
        flat = mask[-1] if mask.ndim == 2 and mask.shape[1] == width else mask.ravel()
        if len(flat) != width:
            raise ValueError("a part has none" if said is None else f"got shape {mask.shape} for {width}")
        yield flat > 0
    elif isinstance(choices, np.ndarray):
        branches = tree_leaves(said)
        if len(branches) != len(choices):
            raise ValueError(f"got {len(branches)} parts for {len(choices)}")
        for size, branch in zip(choices, branches, strict=True):
            yield from _parts(np.array([size]), branch)
    elif isinstance(choices, dict) == isinstance(said, dict) and (isinstance(said, dict) or len(said) == len(choices)):
        for key in choices if isinstance(choices, dict) else range(len(choices)):
            yield from _parts(choices[key], said.get(key) if isinstance(said, dict) else said[key])
    else:
        raise ValueError("got other parts than the actions have")


def _width(choices: Tree) -> int:
    return int(sum(leaf.sum() for leaf in tree_leaves(choices)))
