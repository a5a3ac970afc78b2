"""Load demonstrations from `.demo` files of Unity ML-Agents.

A file holds the recording agent's requests one after another. The recorder writes a request with the action of the decision before, so the
action that answers request t stands at request t + 1; in files converted from old versions it stands at request t.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.checkpoints.files import shown
from lightning_rl.demonstrations.files import DamagedError
from lightning_rl.envs.unity import wire
from lightning_rl.envs.unity.decoding import Agents, BehaviorSpec, read_agents, read_spec
from lightning_rl.errors import SettingError, missing_extra
from lightning_rl.spaces import Spaces, allocate, choice_sizes, limits
from lightning_rl.types import Tree, is_finite, tree_index

SUFFIX = ".demo"
PAIRINGS = {"next": "the next", "own": "the same", "": "the next"}
"""Where the answer to a request stands, and in words; it is not known if too few requests are there to find out."""
VERSIONS = (0, 1)
PARAMETERS_AT = 33
"""Place of the behavior's parameters, after the padded header."""
LFS_POINTER = b"version https://git-lfs"
SMALL = 1000
"""The most numbers of an observation that is read to find the pairing."""
MIN_GAIN = 0.01
"""The least share of the variance of changes that actions must explain; in recordings of Unity's examples it is 0.04 to 1.2."""


class Recording(NamedTuple):
    """T requests of an agent. The reward and the action of a request came before its observations.

    done: `[T]`, whether it ended an episode.  continuous: `[T, C]`.  discrete: `[T, branches]`.
    """

    spec: BehaviorSpec
    agents: Agents
    done: np.ndarray
    continuous: np.ndarray
    discrete: np.ndarray


class Episode(NamedTuple):
    """One episode of T steps: obs `[T + 1, ...]` tree, action `[T, ...]` tree, reward `[T]`, mask `[T + 1, M]` or (), and how it ended."""

    obs: Tree
    action: Tree
    reward: np.ndarray
    mask: Tree
    terminated: bool


def find_files(dataset: str) -> list[Path]:
    """Return the `.demo` files that a dataset names: a file, or a folder that holds some. Empty: it is another kind of dataset."""
    path = Path(split_pairing(dataset)[0])
    if path.suffix == SUFFIX:
        return [path]
    return sorted(path.glob(f"*{SUFFIX}")) if os.path.isdir(path) else []  # False for invalid file names


def split_pairing(dataset: str) -> tuple[str, str | None]:
    """Split a dataset's name from the pairing that it may end with, as in `recorded.demo:own`."""
    path, _, pairing = dataset.rpartition(":")
    return (path, pairing) if path and pairing in PAIRINGS else (dataset, None)


def load_episodes(dataset: str, spaces: Spaces, say: Callable[[str], None]) -> list[Episode]:
    """Load the episodes of the files that `find_files` returns; a line for each file says how its actions are paired.

    Args:
        dataset: a file or folder; `:next` or `:own` at its end sets the pairing, else it is found out.
        spaces: spaces of the algorithm. Continuous actions are clipped to their bounds, and images as bytes become floats from 0 to 1 if
            the algorithm observes floats.

    Raises:
        SettingError: a file does not exist, is damaged, or has other observations or actions.
    """
    return [episode for path in find_files(dataset) for episode in read_file(path, split_pairing(dataset)[1], spaces, say)]


def read_file(path: Path, pairing: str | None, spaces: Spaces, say: Callable[[str], None]) -> list[Episode]:
    """Load the episodes of one file; arguments as in `load_episodes`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingError(f"dataset {shown(path)} cannot be read: {error.strerror}") from error
    try:
        recording = read_recording(data, path.name)
        found = pairing or find_pairing(recording)
        episodes = list(split_episodes(recording, found != "own", spaces))
    except (DamagedError, SettingError) as error:
        raise SettingError(f"dataset {shown(path)} {error}") from error
    if not episodes:
        raise SettingError(f"dataset {shown(path)} holds no step with an action")
    why = "as set" if pairing else "they explain best how observations change" if found else "as Unity's recorder writes them"
    say(f"dataset {shown(path)}: {len(episodes)} episodes; actions are those of {PAIRINGS[found]} request ({why})")
    return episodes


def read_recording(data: bytes, name: str) -> Recording:
    """Read the requests of a file. Raises `DamagedError`."""
    if data.startswith(LFS_POINTER):
        raise DamagedError("is a Git LFS pointer, not a demonstration")
    try:
        classes = wire.messages(raw=True)
    except ModuleNotFoundError as error:
        raise missing_extra("protobuf", "unity", name) from error
    header, _ = read_message(classes.DemonstrationMetaProto, data, 0)
    if header.api_version not in VERSIONS:
        raise DamagedError(f"has version {header.api_version} of the format; 0 and 1 are read")
    parameters, place = read_message(classes.BrainParametersProto, data, PARAMETERS_AT)
    pairs: list[Any] = []
    is_cut = header.number_steps == 0  # a recording that was not closed; a closed one ends with a copy of its header
    while place < len(data) and (is_cut or len(pairs) < header.number_steps):
        try:
            pair, place = read_message(classes.AgentInfoActionPairProto, data, place)
        except DamagedError:
            break
        pairs.append(pair)
    if len(pairs) < max(2, header.number_steps):
        raise DamagedError(f"is damaged: {len(pairs)} of {header.number_steps} steps")
    infos = [pair.agent_info for pair in pairs]
    spec = read_spec(parameters, infos[0])
    actions = [read_action(pair.action_info, spec) for pair in pairs]
    continuous, discrete = (np.stack(parts) for parts in zip(*actions, strict=True))
    agents = read_agents(infos, spec, name)
    if not (is_finite(continuous) and is_finite(tuple(agents.obs)) and is_finite(agents.reward)):
        raise DamagedError("holds a value that is NaN or infinite")
    return Recording(spec, agents, np.array([info.done for info in infos], dtype=bool), continuous, discrete)


def read_message(kind: Any, data: bytes, place: int) -> tuple[Any, int]:
    """Return the message at a place, after its length, and the place behind it. Raises `DamagedError`."""
    size = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise DamagedError("is damaged: it ends within a length")
        byte = data[place]
        size, place, shift = size | (byte & 127) << shift, place + 1, shift + 7
        if byte < 128:
            break
    if place + size > len(data):
        raise DamagedError("is damaged: it is cut off")
    try:
        return kind.FromString(data[place : place + size]), place + size
    except Exception as error:  # protobuf's classes of errors differ by its version
        raise DamagedError(f"is damaged: there is no {kind.DESCRIPTOR.name} at byte {place}") from error


def read_action(action: Any, spec: BehaviorSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the continuous and discrete action of a request; zeros if it has none. Raises `DamagedError`: it has another size."""
    continuous, discrete = np.frombuffer(action.continuous_actions, "<f4"), np.array(action.discrete_actions, np.int64)
    if not continuous.size and not discrete.size and action.old_actions:  # before protocol 1.3
        old = np.frombuffer(action.old_actions, "<f4")
        continuous, discrete = (old, discrete) if spec.continuous else (continuous, old.astype(np.int64))
    for kind, values, size in (("continuous", continuous, spec.continuous), ("discrete", discrete, len(spec.branches))):
        if values.size not in (0, size):
            raise DamagedError(f"is damaged: an action has {values.size} {kind} parts, not {size}")
    if discrete.size and ((discrete < 0) | (discrete >= spec.branches)).any():
        raise DamagedError(f"is damaged: the action {discrete.tolist()} is none of {spec.branches} choices")
    none = np.zeros(spec.continuous, np.float32), np.zeros(len(spec.branches), np.int64)
    return continuous if continuous.size else none[0], discrete if discrete.size else none[1]


# ---------------------------------------------------------------- episodes


def split_episodes(recording: Recording, shifted: bool, spaces: Spaces) -> Iterator[Episode]:
    """Yield the episodes of two requests or more; `shifted`: the action of step t stands at request t + 1.

    Raises `DamagedError`: the algorithm has other observations or actions.
    """
    agents, done = recording.agents, recording.done
    obs, action = find_observations(recording, spaces), find_actions(recording, spaces)
    mask = (np.ones((len(done), 0), dtype=bool) if agents.mask is None else agents.mask) if spaces.masked else ()
    first = 0
    for last in dict.fromkeys([*np.flatnonzero(done).tolist(), len(done) - 1]):
        if last > first:
            answers = slice(first + shifted, last + shifted)
            rows = slice(first, last + 1)
            ends = bool(done[last] and not agents.interrupted[last])
            yield Episode(tree_index(obs, rows), tree_index(action, answers), agents.reward[first + 1 : last + 1], mask[rows], ends)
        first = last + 1


def find_observations(recording: Recording, spaces: Spaces) -> Tree:
    """Return the observations as the algorithm has them, `[T, ...]`: by the names `obs_0`, `obs_1`, … or by those of the sensors."""
    present = [(spec.name, rows) for spec, rows in zip(recording.spec.observations, recording.agents.obs, strict=True) if rows[0].size]
    form = allocate(spaces.observation)
    if isinstance(form, dict):
        numbered, named = {f"obs_{i}": rows for i, (_, rows) in enumerate(present)}, dict(present)
        recorded = numbered if numbered.keys() == form.keys() else named
        if recorded.keys() != form.keys():
            raise DamagedError(f"observes {', '.join(named)}, the policy {', '.join(form)}")
        return {name: match_observation(name, recorded[name], form[name]) for name in form}
    if len(present) != 1:
        raise DamagedError(f"observes {', '.join(name for name, _ in present) or 'nothing'}, the policy one array")
    return match_observation(*present[0], form)


def match_observation(name: str, rows: np.ndarray, form: Tree) -> np.ndarray:
    """Return an observation in the dtype of an array of its space. Raises `DamagedError`: it does not fit."""
    if not isinstance(form, np.ndarray) or rows.shape[1:] != form.shape:
        raise DamagedError(f"has {name} of shape {rows.shape[1:]}, the policy {getattr(form, 'shape', 'several parts')}")
    if rows.dtype == np.uint8 and form.dtype.kind == "f":
        return (rows / np.float32(255)).astype(form.dtype)
    if not np.can_cast(rows.dtype, form.dtype, "same_kind"):
        raise DamagedError(f"has {name} as {rows.dtype}, the policy as {form.dtype}")
    return rows.astype(form.dtype)


def find_actions(recording: Recording, spaces: Spaces) -> Tree:
    """Return the actions as the algorithm's environment takes them, `[T, ...]`. Raises `DamagedError`: it takes others."""
    spec, space, sizes = recording.spec, spaces.action, choice_sizes(spaces.action)
    form: Any = allocate(space)
    parts: dict[str, Any] = {name: space[name] for name in form} if isinstance(form, dict) else {"": space}  # type: ignore[index]
    boxes = [name for name, part in parts.items() if not choice_sizes(part)]
    wide = sum(math.prod(parts[name].shape or ()) for name in boxes)
    if (wide, tuple(sizes)) != (spec.continuous, spec.branches) or len(boxes) > 1 or len(parts) - len(boxes) > 1:
        raise DamagedError(f"holds {describe_actions(spec.continuous, spec.branches)}, the policy has {describe_actions(wide, sizes)}")
    actions = {}
    for name, part in parts.items():
        if name in boxes:
            actions[name] = np.clip(recording.continuous.reshape(-1, *part.shape), *limits(part)).astype(part.dtype)
        else:
            actions[name] = (recording.discrete.reshape(-1, *part.shape) + getattr(part, "start", 0)).astype(part.dtype)
    return actions if isinstance(form, dict) else actions[""]


def describe_actions(continuous: int, branches: Any) -> str:
    """Describe actions in a few words."""
    parts = [f"{continuous} continuous"] * (continuous > 0) + [f"branches of {tuple(branches)} choices"] * (len(branches) > 0)
    return f"actions of {' and '.join(parts) or 'no parts'}"


# ---------------------------------------------------------------- pairing


def find_pairing(recording: Recording) -> str:
    """Return which actions predict best how observations change from request t to t + 1: those of request t + 1, or those of t.

    Compared is how much they improve a linear prediction of the one number that they improve most, on requests to which it was not fitted.
    An empty string stands for too few requests, none with small observations, or actions that explain nothing.
    """
    small = [rows.reshape(len(rows), -1) for rows in recording.agents.obs if 0 < rows[0].size <= SMALL]
    if not small:
        return ""
    obs = np.concatenate(small, 1, dtype=np.float64)
    choices = [np.eye(size)[recording.discrete[:, i]] for i, size in enumerate(recording.spec.branches)]
    action = np.concatenate([recording.continuous, *choices], 1)
    at = np.arange(len(obs) - 1)
    at = at[~(recording.done[at] | recording.done[at + 1])]
    if len(at) < 4 * (obs.shape[1] + action.shape[1]):
        return ""
    fitted = np.arange(len(at)) % 2 == 0
    change = obs[at + 1] - obs[at]
    scale = np.minimum(change[fitted].std(0), change[~fitted].std(0))
    change = change[:, scale > 1e-6] / scale[scale > 1e-6]
    if not change.size:
        return ""

    def errors(*known: np.ndarray) -> np.ndarray:
        """Return the mean squared error of each number on the requests that were not fitted."""
        x = np.concatenate([*known, np.ones((len(at), 1))], 1)
        penalty = 1e-3 * fitted.sum() * np.eye(x.shape[1])
        weights = np.linalg.solve(x[fitted].T @ x[fitted] + penalty, x[fitted].T @ change[fitted])
        return ((change[~fitted] - x[~fitted] @ weights) ** 2).mean(0)

    alone = errors(obs[at])
    gains = {pairing: (alone - errors(obs[at], action[rows])).max() for pairing, rows in (("next", at + 1), ("own", at))}
    best = max(gains, key=gains.__getitem__)
    return best if gains[best] > MIN_GAIN else ""
