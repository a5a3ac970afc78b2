"""Unity's messages as arrays: specifications of behaviors, the agents in a message, and images."""

import io
import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.envs.unity.wire import CONTINUOUS, GOAL, PNG, messages
from lightning_rl.errors import SettingError, missing_extra

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class ObservationSpec(NamedTuple):
    """One observation of a behavior: its name and shape, its `dtype` here, and whether it describes a goal.

    Images are bytes if they come as PNGs whose planes are not averaged, else floats. A shape of two dimensions is a list of entities with
    rows of zeros at its end.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    is_goal: bool


class BehaviorSpec(NamedTuple):
    """What a behavior observes, its number of continuous actions, and the sizes of its discrete branches."""

    observations: tuple[ObservationSpec, ...]
    continuous: int
    branches: tuple[int, ...]


class Agents(NamedTuple):
    """N agents of a behavior in a message.

    groups: the number of each one's group, 0: none.  reward: own and group reward since the last decision; group_reward: the latter.
    obs: arrays `[N, *shape]`, one for each observation.  mask: the legal choices `[N, sum(branches)]`, or None.
    interrupted: whether an ended episode was truncated.
    """

    ids: list[int]
    groups: list[int]
    reward: np.ndarray
    group_reward: np.ndarray
    obs: list[np.ndarray]
    mask: np.ndarray | None
    interrupted: np.ndarray


def read_spec(parameters: Any, agent: Any) -> BehaviorSpec:
    """Read the specification of a behavior from its parameters and one of its agents."""
    observations = tuple(
        ObservationSpec(observation.name, tuple(observation.shape), find_dtype(observation), observation.observation_type == GOAL)
        for observation in agent.observations
    )
    spec = parameters.action_spec
    if spec.num_continuous_actions or spec.num_discrete_actions:
        return BehaviorSpec(observations, spec.num_continuous_actions, tuple(spec.discrete_branch_sizes))
    sizes = tuple(parameters.old_action_size)  # packages before protocol 1.3
    if parameters.old_space_type == CONTINUOUS:
        return BehaviorSpec(observations, sizes[0], ())
    return BehaviorSpec(observations, 0, sizes)


def find_dtype(observation: Any) -> np.dtype:
    """Return the type of an observation's numbers: bytes if none is a mean of several."""
    kept = [target for target in observation.channel_mapping if target >= 0]
    averages = len(set(kept)) < len(kept) if observation.channel_mapping else 1 in (observation.shape[0], observation.shape[-1])
    return np.dtype(np.uint8 if observation.compression_type == PNG and not averages else np.float32)


def split_agents(infos: Any, spec: BehaviorSpec, behavior: str) -> tuple[Agents, Agents]:
    """Return the agents that ask for a decision, and those whose episode ended; an agent may be in both."""
    asking, ended = ([info for info in infos if info.done == done] for done in (False, True))
    return read_agents(asking, spec, behavior), read_agents(ended, spec, behavior)


def read_agents(infos: list[Any], spec: BehaviorSpec, behavior: str) -> Agents:
    """Return agents as arrays. Raises `SettingError`: their observations have other shapes than at first."""
    if not infos:
        return nobody(spec)
    num, mask = len(infos), None
    for info in infos:
        if len(info.observations) != len(spec.observations):
            raise SettingError(f"{behavior}: an agent has {len(info.observations)} observations, not {len(spec.observations)}")
    obs = [read_sensor([info.observations[k] for info in infos], sensor, behavior) for k, sensor in enumerate(spec.observations)]
    if spec.branches:
        mask = np.ones((num, sum(spec.branches)), dtype=bool)
        for row, info in enumerate(infos):
            forbidden = read_packed(info, "action_mask", np.bool_, mask.shape[1])
            if forbidden is not None:
                mask[row] = ~forbidden
    group_reward = np.array([info.group_reward for info in infos], dtype=np.float64)
    reward = np.array([info.reward for info in infos], dtype=np.float64) + group_reward
    interrupted = np.array([info.max_step_reached for info in infos], dtype=bool)
    ids, groups = [info.id for info in infos], [info.group_id for info in infos]
    return Agents(ids, groups, reward, group_reward, obs, mask, interrupted)


@cache
def nobody(spec: BehaviorSpec) -> Agents:
    """Return no agents."""
    obs = [np.empty((0, *sensor.shape), sensor.dtype) for sensor in spec.observations]
    mask = np.ones((0, sum(spec.branches)), dtype=bool) if spec.branches else None
    return Agents([], [], np.zeros(0), np.zeros(0), obs, mask, np.zeros(0, dtype=bool))


def read_sensor(observations: list[Any], spec: ObservationSpec, behavior: str) -> np.ndarray:
    """Return the observations that one sensor of N agents made, `[N, *shape]`. Raises `SettingError`: one has another shape."""
    shape, size = spec.shape, 4 * math.prod(spec.shape)
    if spec.dtype == np.float32:
        data = [observation.float_data.data for observation in observations]  # packed, as Unity sends them: all are read at once
        if all(len(each) == size for each in data) and all(tuple(observation.shape) == shape for observation in observations):
            return np.frombuffer(bytearray().join(data), np.float32).reshape(len(data), *shape)
    rows = np.empty((len(observations), *shape), spec.dtype)
    for row, observation in enumerate(observations):
        rows[row] = read_observation(observation, spec, behavior)
    return rows


def read_packed(message: Any, field: str, dtype: type, size: int) -> np.ndarray | None:
    """Return a field of `size` numbers; None if it has another number of them."""
    values: np.ndarray = np.frombuffer(getattr(message, field), dtype)
    if values.size != size:  # perhaps it is not packed
        plain = getattr(messages(), type(message).DESCRIPTOR.name).FromString(message.SerializeToString())
        values = np.array(getattr(plain, field), dtype)
    return values if values.size == size else None


def read_observation(observation: Any, spec: ObservationSpec, behavior: str) -> np.ndarray:
    """Return an observation in the shape of its specification. Raises `SettingError`: it is another one."""
    shape = tuple(observation.shape)
    if shape != spec.shape:
        raise SettingError(f"{behavior}: observation {spec.name} has shape {shape}, not {spec.shape}")
    if observation.compression_type == PNG:
        image = read_image(observation.compressed_data, shape, list(observation.channel_mapping), f"{behavior}: observation {spec.name}")
        if image.dtype == spec.dtype:
            return image
    elif spec.dtype == np.float32:
        values = read_packed(observation.float_data, "data", np.float32, math.prod(shape))
        if values is None:
            raise SettingError(f"{behavior}: observation {spec.name} does not have {math.prod(shape)} numbers, as its shape {shape} says")
        return values.reshape(shape)
    raise SettingError(f"{behavior}: observation {spec.name} is compressed in another way than in the first message")


def read_image(data: bytes, shape: tuple[int, ...], mapping: list[int], label: str) -> np.ndarray:
    """Decode PNGs that follow one another: bytes, or floats from 0 to 1 if planes are averaged.

    The shape is `[C, H, W]`, or `[H, W, C]` of Unity's packages before 3.0, which have the same protocol version.

    Args:
        mapping: for each plane its channel, -1 to drop it; the mean of several planes with the same channel. Empty: the first C planes; one
            channel is the mean of the first PNG.
        label: name in messages.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise missing_extra("pillow", "unity", label) from error
    files = [PNG_SIGNATURE + part for part in data.split(PNG_SIGNATURE)[1:]] if len(shape) == 3 else []
    try:
        images = [np.atleast_3d(np.asarray(Image.open(io.BytesIO(file)))) for file in files]
    except (UnidentifiedImageError, OSError) as error:
        raise SettingError(f"{label} is damaged: {error}") from error
    if not images:
        raise SettingError(f"{label} of shape {shape} is not a PNG")
    planes = np.concatenate(images, 2).transpose(2, 0, 1)
    is_last = shape[:2] == planes.shape[1:] and shape[1:] != planes.shape[1:]
    channels = shape[2] if is_last else shape[0]
    if not mapping:
        mapping = [0] * images[0].shape[2] if channels == 1 else list(range(channels))
        mapping += [-1] * (len(planes) - len(mapping))
    sources = [[plane for plane, target in enumerate(mapping) if target == channel] for channel in range(max(mapping) + 1)]
    if len(mapping) != len(planes) or not all(sources):
        raise SettingError(f"{label} has {len(planes)} planes, which do not fit its mapping {mapping}")
    if all(len(source) == 1 for source in sources):
        planes = planes[[plane for (plane,) in sources]]
    else:
        planes = np.stack([planes[source].mean(0, dtype=np.float32) / 255 for source in sources]).astype(np.float32)
    image = planes.transpose(1, 2, 0) if is_last else planes
    if image.shape != shape:
        raise SettingError(f"{label} is an image of shape {image.shape}, not {shape}")
    return image
