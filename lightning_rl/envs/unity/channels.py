"""Side channels: messages that a scene and its trainer exchange in addition to observations and actions.

Their bytes follow one another: the channel's id (16 bytes, in .NET's order), the length of the payload (int32), and the payload. All
numbers are little-endian.
"""

import struct
from collections.abc import Iterator
from uuid import UUID

from lightning_rl.envs.lessons import Constant, Gaussian, MultiRangeUniform, Sampler, Uniform
from lightning_rl.errors import SettingError

PARAMETERS = UUID("534c891e-810f-11ea-a9d0-822485860400")
ENGINE = UUID("e951342c-4f7e-11ea-b238-784f4387d1f7")
STATS = UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")
ENGINE_SETTINGS = {
    "quality_level": (1, "i"),
    "time_scale": (2, "f"),
    "target_frame_rate": (3, "i"),
    "capture_frame_rate": (4, "i"),
}
"""Number and format of settings of the engine; 0 is the resolution."""
STAT_KINDS = ("mean", "last", "sum", "histogram")
"""How Unity wants the values of a statistic to be combined."""


def make_message(channel: UUID, payload: bytes) -> bytes:
    """Return the bytes of a message of a channel."""
    return channel.bytes_le + struct.pack("<i", len(payload)) + payload


def read_messages(data: bytes) -> Iterator[tuple[UUID, bytes]]:
    """Yield the channel and payload of each message. Raises `SettingError`: the last one is cut off."""
    place = 0
    while place < len(data):
        if place + 20 > len(data):
            raise SettingError("Unity's messages of side channels are cut off")
        channel, (size,) = UUID(bytes_le=data[place : place + 16]), struct.unpack_from("<i", data, place + 16)
        payload, place = data[place + 20 : place + 20 + size], place + 20 + size
        if len(payload) != size:
            raise SettingError(f"a message of Unity's side channel {channel} is cut off")
        yield channel, payload


def make_text(text: str) -> bytes:
    """Return a string with its length before it; it must be ASCII."""
    data = text.encode("ascii")
    return struct.pack("<i", len(data)) + data


def make_parameter(name: str, sampler: Sampler, seed: int) -> bytes:
    """Return the message that sets a parameter of the scene, which Unity draws at each read of it. `seed`: of a sampler without its own."""
    if not name.isascii():
        raise SettingError(f"env.parameters.{name}: Unity reads ASCII names only")
    if isinstance(sampler, Constant):
        return make_message(PARAMETERS, make_text(name) + struct.pack("<if", 0, sampler.value))
    seed = seed if sampler.seed < 0 else sampler.seed
    match sampler:
        case Uniform():
            drawn = struct.pack("<iff", 0, sampler.min_value, sampler.max_value)
        case Gaussian():
            drawn = struct.pack("<iff", 1, sampler.mean, sampler.st_dev)
        case MultiRangeUniform():
            ends = [float(end) for interval in sampler.intervals for end in interval]
            drawn = struct.pack(f"<ii{len(ends)}f", 2, len(ends), *ends)
        case _:
            raise SettingError(f"env.parameters.{name}: Unity cannot draw from {sampler}")
    return make_message(PARAMETERS, make_text(name) + struct.pack("<ii", 1, seed % 2**31) + drawn)


def make_engine_settings(width: int, height: int, **settings: float) -> bytes:
    """Return the messages that set Unity's engine; `settings` as in `ENGINE_SETTINGS`."""
    payloads = [struct.pack("<iii", 0, width, height)]
    for name, value in settings.items():
        number, form = ENGINE_SETTINGS[name]
        payloads.append(struct.pack(f"<i{form}", number, value))
    return b"".join(make_message(ENGINE, payload) for payload in payloads)


def read_stat(payload: bytes) -> tuple[str, float, str]:
    """Return name, value and kind, of `STAT_KINDS`, of a statistic that a scene reports."""
    (size,) = struct.unpack_from("<i", payload)
    value, kind = struct.unpack_from("<fi", payload, 4 + size)
    return payload[4 : 4 + size].decode("ascii", "replace"), value, STAT_KINDS[kind]
