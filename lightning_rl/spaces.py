"""Observation and action spaces: leaves, storage, choices, checks, and a plain form for files.

Only this file and `distributions/` check the class of a space.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from textwrap import shorten
from typing import NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, flatdim, flatten

from lightning_rl.errors import SettingError, nearest
from lightning_rl.types import State, Tree, tree_leaves, tree_map

MASK = "action_mask"
"""The key of the legal actions in an observation or info."""
OWN, JOINT = "own", "joint"
"""The keys of an agent's own observation, and of the joint observation of all agents or the environment's state."""


class Spaces(NamedTuple):
    """The spaces of one environment, and whether it masks actions; observations are as networks see them, without the key `action_mask`.

    agents: the names of all agents of a multi-agent environment.
    one_learns: whether only one agent learns in each episode, as in turn-based games and self-play.
    teams: the teams of agents, if one team learns in each episode.
    joint: what observations contain under the key `joint`, in addition to an agent's `own`: the observations of `all` agents, or the
        environment's `state`.
    groups: the number of groups of equal size that the agents of a scene of Unity are in, listed one after the other; 0: all agents that
        learn in an environment are a group.
    """

    observation: Space
    action: Space
    masked: bool = False
    agents: tuple[str, ...] = ()
    one_learns: bool = False
    joint: str = ""
    teams: tuple[tuple[str, ...], ...] = ()
    groups: int = 0

    @property
    def rows(self) -> int:
        """Return how many rows of a vector environment one environment takes: one for each agent that learns at the same time."""
        if self.teams:
            return len(self.teams[0])
        return 1 if self.one_learns else max(1, len(self.agents))

    @property
    def group_size(self) -> int:
        """Return how many of these rows are a group."""
        return len(self.agents) // self.groups if self.groups else self.rows

    def masks(self, *batch: int) -> Tree:
        """Return masks `[*batch, M]` that allow everything; () if the environment has no masks."""
        return np.ones((*batch, sum(choice_sizes(self.action))), dtype=bool) if self.masked else ()


class Leaf(NamedTuple):
    """One observation leaf.

    kind: vector, image or one_hot; a one_hot leaf has parts with `sizes` and `starts`.
    name: its path in the observation space: `robot.arm`, `cameras.0`; `obs` if the space itself is the leaf.
    """

    kind: str
    shape: tuple[int, ...]
    scale: float = 1.0
    sizes: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    name: str = "obs"

    @property
    def channels_last(self) -> bool:
        """Return whether an image, or each of a stack, is HWC, with fewer channels than rows."""
        return self.shape[-1] < self.shape[-3]


def observation_leaves(space: Space, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Yield the leaves of an observation space, in the order of `types.tree_leaves`.

    A Box with three dimensions (or four: stacked frames) is an image; bytes are scaled to [0, 1]. Raises `SettingError`: no encoder can
    read the space or a part of it.
    """
    name = ".".join(path) or "obs"
    if isinstance(space, Dict):
        for key in sorted(space, key=str):
            yield from observation_leaves(space[key], (*path, str(key)))
    elif isinstance(space, Tuple):
        for i, child in enumerate(space):
            yield from observation_leaves(child, (*path, str(i)))
    elif isinstance(space, Box):
        scale = 1 / 255 if space.dtype == np.uint8 else 1.0
        yield Leaf("image" if len(space.shape) in (3, 4) else "vector", space.shape, scale, name=name)
    elif isinstance(space, Discrete):
        yield Leaf("one_hot", (), 1.0, (int(space.n),), (int(space.start),), name)
    elif isinstance(space, MultiDiscrete):
        yield Leaf("one_hot", space.shape, 1.0, tuple(map(int, space.nvec.flat)), tuple(map(int, space.start.flat)), name)
    elif isinstance(space, MultiBinary):
        yield Leaf("vector", space.shape, name=name)
    else:
        raise SettingError(
            f"the observation space {short(space)} is not supported; use Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
        )


def is_part_of(name: str, parts: Sequence[str]) -> bool:
    """Return whether the name of a leaf is in `parts` or inside one of them, as `robot.arm` is inside `robot`."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def check_observation_space(space: Space, entities: Sequence[str] = (), goals: Sequence[str] = (), critic_obs: Sequence[str] = ()) -> None:
    """Raise `SettingError` if no encoder can read an observation space, or if a name does not match a suitable observation."""
    leaves = list(observation_leaves(space))
    if not leaves or any(0 in leaf.shape for leaf in leaves):
        raise SettingError(f"the observation space {short(space)} is empty; an algorithm needs something to observe")
    named = {leaf.name: leaf for leaf in leaves}
    parts = {leaf.name.partition(".")[0] for leaf in leaves}
    if not isinstance(critic_obs, list | tuple):
        raise SettingError(f"critic_obs must be a list of names of observations such as [{leaves[0].name}], got {critic_obs!r}")
    for name in critic_obs:
        if name not in parts:
            raise SettingError(f"critic_obs: there is no observation {name!r}{nearest(str(name), parts)}")
    if all(is_part_of(leaf.name, critic_obs) for leaf in leaves):
        raise SettingError("critic_obs: these are all observations; the policy needs something to observe")
    for setting, names in {"entities": entities, "goals": goals}.items():
        if not isinstance(names, list | tuple):
            raise SettingError(f"{setting} must be a list of names of observations such as [{leaves[0].name}], got {names!r}")
        for name in names:
            if name not in named:
                raise SettingError(f"{setting}: there is no observation {name!r}{nearest(str(name), named)}")
    for name in entities:
        if named[name].kind != "vector" or len(named[name].shape) != 2:
            raise SettingError(f"entities: {name!r} has shape {named[name].shape}; a set of entities is a Box of shape (max_n, features)")
        if name in goals:
            raise SettingError(f"goals: {name!r} is a set of entities, which cannot be a goal")


def with_vector(space: Space, key: str, size: int) -> Space:
    """Return the space of observations with a vector appended: a longer vector, or a Dict with one more key.

    Raises `SettingError`: a vector cannot be appended to these observations.
    """
    vector = Box(-np.inf, np.inf, (size,), np.float32)
    if isinstance(space, Dict):
        return Dict({**space.spaces, key: vector})
    if isinstance(space, Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating):
        low, high = np.append(space.low, vector.low), np.append(space.high, vector.high)
        return Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype)
    raise SettingError(f"{key} cannot be appended to observations {short(space)}; only to a vector of floats or to a Dict")


def with_joint(space: Space, size: int) -> Space:
    """Return the space of an agent's own observation and a vector that is (nearly) the same for all agents."""
    return Dict({OWN: space, JOINT: Box(-np.inf, np.inf, (size,), np.float32)})


def flat_observation(space: Space, observation: Tree | None) -> np.ndarray:
    """Flatten an observation to a vector, without its mask; zeros if it is None."""
    if observation is None:
        return np.zeros(flatdim(space), dtype=np.float32)
    seen = {key: observation[key] for key in space} if isinstance(space, Dict) else observation
    return np.asarray(flatten(space, seen), dtype=np.float32)


def allocate(space: Space, *batch: int) -> Tree:
    """Return a tree of zeros `[*batch, ...]` to store observations in: bytes and integers keep their dtype, floats are float32."""

    def zeros(leaf: Space) -> np.ndarray:
        dtype = np.float32 if np.issubdtype(leaf.dtype, np.floating) or isinstance(leaf, MultiBinary) else leaf.dtype
        return np.zeros((*batch, *(leaf.shape or ())), np.int64 if isinstance(leaf, Discrete) else dtype)

    return _map_leaves(zeros, space)


def _map_leaves(function: Callable[[Space], np.ndarray], space: Space) -> Tree:
    if isinstance(space, Dict):
        return {key: _map_leaves(function, child) for key, child in space.items()}
    return tuple(_map_leaves(function, child) for child in space) if isinstance(space, Tuple) else function(space)


def samples(space: Space, num: int) -> Tree:
    """Draw random members, as a tree of arrays `[num, ...]` in the space's dtypes."""
    return tree_map(lambda *leaves: np.stack(leaves), *(space.sample() for _ in range(num)))


def choices(space: Space) -> Tree:
    """Return the number of choices of each part of an action space as arrays.

    These are `[n]` for Discrete, nvec for MultiDiscrete, 2 for each bit of MultiBinary, and empty for others.
    """

    def sizes(leaf: Space) -> np.ndarray:
        if isinstance(leaf, Discrete):
            return np.array([leaf.n])
        if isinstance(leaf, MultiBinary):
            return np.full(math.prod(leaf.shape), 2)
        return leaf.nvec.ravel() if isinstance(leaf, MultiDiscrete) else np.zeros(0, dtype=np.int64)

    return _map_leaves(sizes, space)


def choice_sizes(space: Space) -> list[int]:
    """Return `choices` as a list, in the order of the space and of its distribution; their sum is M, the width of a mask."""
    if isinstance(space, Dict | Tuple):
        return [size for child in (space.values() if isinstance(space, Dict) else space) for size in choice_sizes(child)]
    return choices(space).tolist()


def limits(space: Space) -> Tree:
    """Return the lowest and highest values of each part of a space: arrays `[2, ...]` that broadcast against its members."""

    def ends(leaf: Space) -> np.ndarray:
        if isinstance(leaf, Box):
            return np.stack([leaf.low, leaf.high])
        if isinstance(leaf, Discrete | MultiDiscrete):
            return np.stack([leaf.start, leaf.start + (leaf.n if isinstance(leaf, Discrete) else leaf.nvec) - 1])
        return np.arange(2)

    return _map_leaves(ends, space)


def is_legal(space: Space, action: Tree, mask: Tree) -> bool:
    """Return whether an action is in the space and, if the space is Discrete, allowed by the mask `[n]`."""
    if not space.contains(action):
        return False
    return not (isinstance(space, Discrete) and len(mask)) or bool(mask[action - space.start])


def legal_sample(space: Space, mask: np.ndarray) -> Tree:
    """Draw a random action that a mask `[M]` allows."""
    if isinstance(space, Dict | Tuple):
        children = list(space.values()) if isinstance(space, Dict) else list(space)
        ends = np.cumsum([sum(choice_sizes(child)) for child in children])
        parts = [legal_sample(child, part) for child, part in zip(children, np.split(mask, ends[:-1]), strict=True)]
        return dict(zip(space, parts, strict=True)) if isinstance(space, Dict) else tuple(parts)
    sizes = choice_sizes(space)
    if not sizes:
        return space.sample()
    drawn = np.array([space.np_random.choice(np.flatnonzero(part)) for part in np.split(mask, np.cumsum(sizes)[:-1])])
    return drawn.reshape(space.shape).astype(space.dtype) + (0 if isinstance(space, MultiBinary) else space.start)  # type: ignore[attr-defined]


def add_hidden(space: Space, observation: Tree, hidden: Sequence[str]) -> Tree:
    """Add zeros to an observation or a batch for missing keys that only critics see."""
    if not isinstance(space, Dict) or not hidden:
        return observation
    given = observation if isinstance(observation, Mapping) and not observation.keys() - space.keys() else {OWN: observation}
    key = next(iter(given))
    shape = np.shape(tree_leaves(given[key])[0])
    batch = shape[: len(shape) - len(np.shape(tree_leaves(allocate(space[key]))[0]))]
    return {name: given[name] if name in given or name not in hidden else allocate(child, *batch) for name, child in space.items()}


def without_hidden(spaces: Spaces, hidden: Sequence[str]) -> Spaces:
    """Return the spaces without observations that only critics see; for joint observations, the agent's own part."""
    if spaces.joint:
        return spaces._replace(observation=spaces.observation[OWN], joint="")  # type: ignore[index]
    if not hidden or not isinstance(spaces.observation, Dict):
        return spaces
    return spaces._replace(observation=Dict({key: child for key, child in spaces.observation.items() if key not in hidden}))


def is_batch_of(space: Space, observation: Tree) -> bool:
    """Return whether an observation is a batch: has more dimensions than the space. Its first part decides, if it is present."""
    try:
        if isinstance(space, Dict):
            key = next(iter(space))
            return is_batch_of(space[key], observation[key])
        if isinstance(space, Tuple):
            return is_batch_of(space[0], observation[0])
        return np.ndim(observation) > len(space.shape or ())
    except (LookupError, TypeError, ValueError):  # another structure
        return False


def mismatches(space: Space, obs: Tree, key: str = "", batched: bool = False) -> Iterator[str]:
    """Yield the differences between an observation, or a batch of them, and its space, part by part."""
    part = f"the observation {key!r}" if key else "the observation"
    if isinstance(space, Dict) and not isinstance(obs, Mapping):
        yield f"{part} is a {type(obs).__name__}, and its space a Dict"
    elif isinstance(space, Tuple) and (not isinstance(obs, tuple | list) or len(obs) != len(space)):
        yield f"{part} is not a tuple of {len(space)}"
    elif isinstance(space, Dict | Tuple):
        for name, child in space.items() if isinstance(space, Dict) else enumerate(space):
            path = f"{key}.{name}" if key else str(name)
            if isinstance(space, Dict) and name not in obs:
                yield f"the observation {path!r} is missing"
            else:
                yield from mismatches(child, obs[name], path, batched)
        for name in unknown_parts(space, obs):
            yield f"the observation {f'{key}.{name}' if key else name!r} is not in its space"
    elif what := misshape(obs, space.shape or (), batched):
        yield f"{part} {what}, and its space {space.shape or ()}"
    elif has_fractions(space, np.asarray(obs)):
        yield f"{part} is {np.asarray(obs).dtype}, and its space {space.dtype}"
    elif is_outside(space, np.asarray(obs)):
        yield f"{part} is {obs}, and its space {space}"


def unknown_parts(space: Space, obs: Tree) -> list[str]:
    """Return the names in an observation that its space does not have, except a mask."""
    return [name for name in obs if name not in space.spaces and name != MASK] if isinstance(space, Dict) else []


def is_outside(space: Space, obs: Tree) -> bool:
    """Return whether an observation, or a batch, has a number outside its Discrete or MultiDiscrete space, or one that would wrap in the
    integer dtype of another space.
    """
    if isinstance(space, Dict | Tuple):
        return any(is_outside(child, obs[name]) for name, child in (space.items() if isinstance(space, Dict) else enumerate(space)))
    if isinstance(space, Discrete | MultiDiscrete):
        sizes = space.n if isinstance(space, Discrete) else space.nvec
        return bool(((obs < space.start) | (obs >= space.start + sizes)).any())
    if space.dtype is None or space.dtype.kind not in "iu" or np.can_cast(obs.dtype, space.dtype):
        return False
    limits = np.iinfo(space.dtype)
    return bool(((obs < limits.min) | (obs > limits.max)).any())


def has_fractions(space: Space, obs: np.ndarray) -> bool:
    """Return whether numbers would lose their fractions in an integer space, such as images from 0 to 1 in a space of bytes."""
    return obs.dtype.kind == "f" and space.dtype is not None and space.dtype.kind in "iu" and bool((obs != np.trunc(obs)).any())


def cast(space: Space, obs: Tree) -> Tree:
    """Cast an observation to the dtypes of its space, such as bytes if an environment returns whole numbers as floats."""
    if isinstance(space, Dict):
        return {name: cast(child, obs[name]) for name, child in space.items()}
    if isinstance(space, Tuple):
        return tuple(cast(child, part) for child, part in zip(space, obs, strict=True))
    return obs if getattr(obs, "dtype", None) == space.dtype else np.asarray(obs).astype(space.dtype)


def as_rows(space: Space, obs: Tree, batched: bool = True) -> Tree:
    """Return a batch of observations, or a single one as a batch, as arrays in the dtypes of their space.

    Raises `SettingError`: parts or shapes differ from the space, or parts have different numbers of observations.
    """
    for what in mismatches(space, obs, batched=batched):
        raise SettingError(shorten(what, 160, placeholder=" …"))
    if not batched:
        obs = tree_map(lambda leaf: np.asarray(leaf)[None], obs)
    counts = [len(leaf) for leaf in tree_leaves(obs)]
    if len({*counts}) > 1:
        raise SettingError(f"the parts of a batch have {counts[0]} and {next(n for n in counts if n != counts[0])} observations")
    rows = allocate(space, counts[0])
    tree_map(partial(np.copyto, casting="unsafe"), rows, obs)
    return rows


def misshape(value: object, shape: tuple[int, ...], batched: bool = False) -> str:
    """Describe what is wrong with a value that must be numbers of a shape, or a batch of them; an empty string if nothing is."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return f"is {value!r}"
    if array.dtype.kind not in "biuf":
        return f"is {value!r}"
    return "" if (array.shape[1:] if batched else array.shape) == shape else f"has shape {array.shape}"


def short(space: Space) -> str:
    """Describe a space in one line of at most 60 characters."""
    text = f"Box{space.shape}" if isinstance(space, Box) else " ".join(str(space).split())
    return text if len(text) <= 60 else text[:57] + "..."


def to_plain(space: Space) -> State:
    """Convert a space to strings, numbers and lists, for checkpoints."""
    if isinstance(space, Dict):
        return {"type": "Dict", "spaces": {key: to_plain(child) for key, child in space.items()}}
    if isinstance(space, Tuple):
        return {"type": "Tuple", "spaces": [to_plain(child) for child in space]}
    if isinstance(space, Box):
        low, high = (_compact(bound) for bound in (space.low, space.high))
        return {"type": "Box", "low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}
    if isinstance(space, Discrete):
        dtype = {} if space.dtype == np.int64 else {"dtype": str(space.dtype)}
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), **dtype}
    if isinstance(space, MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": str(space.dtype)}
    if isinstance(space, MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
    raise SettingError(f"the space {short(space)} is not supported")


def from_plain(plain: State) -> Space:
    """Build a space from its plain form. Raises `SettingError`: the type of space is unknown."""
    kind = plain["type"]
    if kind == "Dict":
        return Dict([(key, from_plain(child)) for key, child in plain["spaces"].items()])  # pairs keep their order
    if kind == "Tuple":
        return Tuple([from_plain(child) for child in plain["spaces"]])
    if kind == "Box":
        shape, dtype = tuple(plain["shape"]), np.dtype(plain["dtype"]).type
        return Box(_expand(plain["low"], shape, dtype), _expand(plain["high"], shape, dtype), shape, dtype)
    if kind == "Discrete":
        n, start = plain["n"], plain["start"]
        if "dtype" not in plain:  # gymnasium before 1.2.2 has no such argument
            return Discrete(n, start=start)
        return Discrete(n, start=start, dtype=plain["dtype"])
    if kind == "MultiDiscrete":
        return MultiDiscrete(plain["nvec"], plain["dtype"], start=plain["start"])
    if kind == "MultiBinary":
        return MultiBinary(plain["n"])
    raise SettingError(f"the checkpoint names an unknown space type {kind!r}")


def _compact(bound: np.ndarray) -> float | list[float]:
    """Return one number if all are equal (images), else all of them in order."""
    return bound.flat[0].item() if bound.size and (bound == bound.flat[0]).all() else bound.ravel().tolist()


def _expand(bound: float | list[float], shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.broadcast_to(np.asarray(bound, dtype).reshape(shape if isinstance(bound, list) else ()), shape).copy()


def as_spaces(observation: Space, action: Space) -> Spaces:
    """Return the spaces of an environment; it masks actions if its observations have the key `action_mask`."""
    if not (isinstance(observation, Dict) and MASK in observation.spaces):
        return Spaces(observation, action)
    return Spaces(Dict([(key, child) for key, child in observation.items() if key != MASK]), action, masked=True)


def single_spaces(envs: gym.vector.VectorEnv) -> Spaces:
    """Return the spaces of one of the environments of a vector environment."""
    return as_spaces(envs.single_observation_space, envs.single_action_space)


def describe_space(space: Space) -> str:
    """Describe a space briefly: `Box(4)`, `Discrete(2)`, `Dict(camera: Box(64, 64, 3) uint8, speed: Box(1))`."""
    if isinstance(space, Box):
        return f"Box({', '.join(map(str, space.shape))})" + ("" if space.dtype == "float32" else f" {space.dtype}")
    if isinstance(space, Discrete):
        return f"Discrete({space.n})"
    if isinstance(space, MultiDiscrete):
        return f"MultiDiscrete({', '.join(map(str, space.nvec.ravel()))})"
    if isinstance(space, MultiBinary):
        return f"MultiBinary({space.n})"
    if isinstance(space, Dict):
        return f"Dict({', '.join(f'{name}: {describe_space(part)}' for name, part in space.items())})"
    if isinstance(space, Tuple):
        return f"Tuple({', '.join(map(describe_space, space))})"
    return str(space)
