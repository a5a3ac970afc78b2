"""Masks of legal actions: convert the formats that environments use to the one that the rest of the package uses.

A mask is a flat bool array `[..., M]` with one entry for each choice of each discrete part of the action space, part after part. Discrete
has n entries, MultiDiscrete Σ nvec, and MultiBinary two for each bit, off and on; continuous parts have none. An environment provides it in
one of three places:

| where | as in |
|---|---|
| `info["action_mask"]`, after `reset` and every `step` | gymnasium's toy text, PettingZoo |
| a key `action_mask` of Dict observations, which networks do not see | RLlib, Sample Factory |
| a method `action_masks()`, if the environment is built here | sb3-contrib |

It may be a flat array. For MultiDiscrete and MultiBinary it may also be a tuple of arrays, and for Dict or Tuple a tree like the action
space, in which parts without choices are missing or None. With stacked frames the newest mask counts. After a termination the mask may be
missing or all false.
"""

from collections.abc import Callable, Iterator, Mapping

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector import VectorEnv

from lightning_rl.errors import SettingError
from lightning_rl.spaces import MASK, Spaces, as_spaces, choice_sizes, choices, legal_sample, short
from lightning_rl.types import Info, Options, StepResult, Tree, tree_leaves

Source = Mapping[str, Tree]
"""An info, or another mapping that may hold masks."""


class MaskInfo(gym.Wrapper):
    """Adds the mask of a method `action_masks()` to the info, unless there is a mask already."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, {MASK: self.env.get_wrapper_attr("action_masks")(), **info}

    def step(self, action: Tree) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if not terminated:
            info = {MASK: self.env.get_wrapper_attr("action_masks")(), **info}
        return obs, reward, terminated, truncated, info


def with_mask_info(env: gym.Env) -> gym.Env:
    """Wrap an environment if it or one of its wrappers has a method `action_masks`."""
    return MaskInfo(env) if env.has_wrapper_attr("action_masks") else env


class NoMasks:
    """Replaces `Masks` for environments that allow every action; an unexpected mask is an error."""

    def __init__(self, who: str) -> None:
        self.who = who

    def split(self, obs: Tree, info: Source, rows: np.ndarray | None = None, over: np.ndarray | None = None) -> tuple[Tree, Tree]:
        if MASK in info:
            fix = "return one in the info of reset too, or make a new model"
            raise SettingError(f"{self.who.format(0)} has an action_mask, but the first reset had none: {fix}")
        return obs, ()

    def one(self, obs: Tree, info: Source, index: int | str = 0, over: bool = False) -> tuple[Tree, Tree]:
        return self.split(obs, info)

    def strip(self, obs: Tree) -> Tree:
        return obs


class Masks:
    """Reads the masks of N = `num` environments. Raises `SettingError`: the action space has no discrete part.

    `who`: a format string that names one of them by index, such as `environment {} of Taxi-v3`.
    """

    def __init__(self, space: Space, who: str, num: int = 1) -> None:
        self.choices, self.sizes, self.who = choices(space), choice_sizes(space), who
        if not self.sizes:
            raise SettingError(f"{who.format(0)} has an action_mask, but its action space {short(space)} has no discrete part")
        self.width, self.first = sum(self.sizes), np.cumsum([0, *self.sizes[:-1]])
        self.all, self.every = np.arange(num), np.ones(num, dtype=bool)

    def split(self, obs: Tree, info: Source, rows: np.ndarray | None = None, over: np.ndarray | None = None) -> tuple[Tree, Tree]:
        """Return observations without their masks, and the masks `[K, M]`.

        `obs` belongs to the K environments `rows` (default: all N), `info` to all N. A mask that is missing or all false becomes all true
        if the episode is `over`, `[K]`; otherwise it raises `SettingError`.
        """
        rows = self.all if rows is None else rows
        raw, places, given = self._in_obs(obs), np.arange(len(rows)), np.ones(len(rows), dtype=bool)
        if MASK in info:
            raw, places, given = info[MASK], rows, info.get(f"_{MASK}", self.every)[rows]
        given = given & (raw is not None)
        mask = np.ones((len(rows), self.width), dtype=bool)
        mask[given] = self._read(raw, places[given], rows[given])
        return self.strip(obs), self._check(mask, given, rows, over)

    def one(self, obs: Tree, info: Source, index: int | str = 0, over: bool = False) -> tuple[Tree, Tree]:
        """Return the observation of a single environment without its mask, and the mask `[M]`."""
        raw = info.get(MASK, self._in_obs(obs))
        mask = np.ones((1, self.width), dtype=bool) if raw is None else self._flatten(raw, index)[None]
        return self.strip(obs), self._check(mask, np.array([raw is not None]), np.array([index]), np.array([over]))[0]

    def batch(self, raw: Tree, num: int) -> np.ndarray:
        """Return masks `[num, M]` from a batch of them in any format."""
        rows = np.arange(num)
        return self._check(self._read(raw, rows, rows), np.ones(num, dtype=bool), rows)

    def strip(self, obs: Tree) -> Tree:
        """Return observations without their masks."""
        return obs if self._in_obs(obs) is None else {key: child for key, child in obs.items() if key != MASK}

    def _in_obs(self, obs: Tree) -> Tree | None:
        return obs.get(MASK) if isinstance(obs, dict) else None

    def _read(self, raw: Tree, places: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the masks `[K, M]` at some indices of a batch in any format; they belong to the environments `rows`."""
        if isinstance(raw, np.ndarray) and raw.dtype != object and raw.ndim > 1 and raw.shape[-1] == self.width:
            return (raw if raw.ndim == 2 else raw[:, -1])[places] > 0
        masks = [self._flatten(_index(raw, place), row) for place, row in zip(places, rows, strict=True)]
        return np.stack(masks) if masks else np.ones((0, self.width), dtype=bool)

    def _flatten(self, raw: Tree, index: int | str) -> np.ndarray:
        """Return one mask `[M]`."""
        try:
            return np.concatenate(list(_flatten_parts(self.choices, raw)))
        except (ValueError, TypeError) as error:
            width = " + ".join(map(str, self.sizes))
            raise SettingError(
                f"the action_mask of {self.who.format(index)} must have {width} entries, one for each choice: {error}"
            ) from None

    def _check(self, mask: np.ndarray, given: np.ndarray, rows: np.ndarray, over: np.ndarray | None = None) -> np.ndarray:
        """Check that each part has a legal choice, and return the masks, all true if missing where the episode is over."""
        good = given & np.logical_or.reduceat(mask, self.first, axis=1).all(1)
        if good.all():
            return mask
        bad = ~good if over is None else ~(good | over)
        if bad.any():
            k = int(bad.argmax())
            who = self.who.format(rows[k])
            if not given[k]:
                raise SettingError(f"{who} has no action_mask, but the model was made with masks: return one after every reset and step")
            raise SettingError(f"{who} allows no action: its action_mask is all false" + " for one of its parts" * (len(self.sizes) > 1))
        return mask | ~good[:, None]


def make_masks(spaces: Spaces, who: str, num: int = 1) -> Masks | NoMasks:
    """Make the mask reader of environments with these spaces."""
    return Masks(spaces.action, who, num) if spaces.masked else NoMasks(who)


def detect_masks(env: gym.Env, info: Source, who: str, masked: bool = False) -> Masks | NoMasks:
    """Make the mask reader of an environment from the info of its first reset; `masked` requires masks."""
    spaces = as_spaces(env.observation_space, env.action_space)
    return make_masks(spaces._replace(masked=spaces.masked or masked or MASK in info), who)


def legal_action(env: gym.Env | VectorEnv, space: Space, sample: Callable[[], Tree], obs: Tree, info: Source) -> Tree:
    """Draw a random legal action, or call `sample` if all are legal; masks of vector environments are not read."""
    if isinstance(env, VectorEnv):
        return sample()
    mask = detect_masks(env, info, "environment {}").one(obs, info)[1]
    return sample() if isinstance(mask, tuple) else legal_sample(space, mask)


def _index(raw: Tree, place: int) -> Tree:
    """Return the masks of one environment from a batch; in gymnasium's infos, `_key` marks the environments that returned `key`."""
    if isinstance(raw, dict):
        return {key: _index(child, place) for key, child in raw.items() if not (key[:1] == "_" and key[1:] in raw)}
    if isinstance(raw, tuple):
        return tuple(_index(child, place) for child in raw)
    return None if raw is None else raw[place]


def _flatten_parts(choices: Tree, raw: Tree) -> Iterator[np.ndarray]:
    """Flatten one mask in any format, part after part; raise `ValueError` if it does not fit."""
    if (isinstance(raw, np.ndarray) and raw.dtype == object) or (isinstance(raw, list) and any(map(np.ndim, raw))):
        raw = tuple(raw)
    if not isinstance(raw, dict | tuple):
        mask, width = np.zeros(0) if raw is None else np.asarray(raw), int(sum(leaf.sum() for leaf in tree_leaves(choices)))
        flat = mask[-1] if mask.ndim == 2 and mask.shape[1] == width else mask.ravel()
        if len(flat) != width:
            raise ValueError("a part has no mask" if raw is None else f"got shape {mask.shape} for {width}")
        yield flat > 0
    elif isinstance(choices, np.ndarray):
        branches = tree_leaves(raw)
        if len(branches) != len(choices):
            raise ValueError(f"got {len(branches)} parts for {len(choices)}")
        for size, branch in zip(choices, branches, strict=True):
            yield from _flatten_parts(np.array([size]), branch)
    elif isinstance(choices, dict) == isinstance(raw, dict) and (isinstance(raw, dict) or len(raw) == len(choices)):
        for key in choices if isinstance(choices, dict) else range(len(choices)):
            yield from _flatten_parts(choices[key], raw.get(key) if isinstance(raw, dict) else raw[key])
    else:
        raise ValueError("its parts differ from those of the action space")
