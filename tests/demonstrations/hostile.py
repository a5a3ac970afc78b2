"""Datasets that are broken or mean harm, made from a good one."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from PIL import Image

from tests.checkpoints.hostile import Bomb
from tests.demonstrations.episodes import Drawn, recorded

OBSERVATION = Dict({"body": Dict({"arm": Box(-1, 1, (3,), np.float32), "mode": Discrete(4)}), "camera": Box(0, 255, (32, 40, 3), np.uint8)})
ACTION = Dict({"choice": Discrete(3, start=1), "turn": Box(-2, 2, (2,), np.float32)})


def good(name: str) -> Path:
    """The folder with the files of two episodes with 4 steps."""
    return recorded(Drawn(OBSERVATION, ACTION), episodes=2)[0].save(name) / "data"


def metadata(**changes: Any) -> Callable[[Path, Path], None]:
    """Change what the dataset says of itself; None removes a key, and spaces are given as changes of their JSON."""

    def damage(folder: Path, proof: Path) -> None:
        file = folder / "metadata.json"
        content = json.loads(file.read_text())
        for key, value in changes.items():
            if callable(value):
                space = json.loads(content[key])
                value(space["subspaces"])
                value = json.dumps(space)
            content[key] = value
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return damage


def arrays(change: Callable[[Any, Path], Any]) -> Callable[[Path, Path], None]:
    """Change the HDF5 file."""

    def damage(folder: Path, proof: Path) -> None:
        with h5py.File(folder / "main_data.hdf5", "a") as file:
            change(file, proof)

    return damage


def put(place: str, value: Any, **settings: Any) -> Callable[[Path, Path], None]:
    """Another array in the place of one of the second episode."""

    def change(file: Any, proof: Path) -> None:
        place_ = f"episode_1/{place}"
        del file[place_]
        if value is not None:
            file.create_dataset(place_, data=value, **settings)

    return arrays(change)


def number(place: str, value: Any) -> Callable[[Path, Path], None]:
    """Another number in the third row of an array."""

    def change(file: Any, proof: Path) -> None:
        array = file[f"episode_1/{place}"]
        array[(2,) + (0,) * (array.ndim - 1)] = value

    return arrays(change)


def link(place: str, target: Any) -> Callable[[Path, Path], None]:
    def change(file: Any, proof: Path) -> None:
        del file[f"episode_1/{place}"]
        file[f"episode_1/{place}"] = target(proof)

    return arrays(change)


def elsewhere(proof: Path) -> Any:
    other = proof.with_name("other.hdf5")
    with h5py.File(other, "w") as file:
        file["secret"] = np.ones(4)
    return h5py.ExternalLink(str(other), "secret")


def external_storage(file: Any, proof: Path) -> None:
    secret = proof.with_name("secret.txt")
    secret.write_bytes(bytes(64))
    del file["episode_1/rewards"]
    file.create_dataset("episode_1/rewards", (4,), np.float64, external=[(str(secret), 0, 32)])


def virtual(file: Any, proof: Path) -> None:
    layout = h5py.VirtualLayout((4,), np.float64)
    layout[:] = h5py.VirtualSource(str(proof.with_name("other.hdf5")), "secret", (4,))
    del file["episode_1/rewards"]
    file.create_virtual_dataset("episode_1/rewards", layout, fillvalue=1.0)


def declared(place: str, shape: tuple[int, ...]) -> Callable[[Path, Path], None]:
    """An array that is declared and never written, so that it takes no place in its file."""

    def change(file: Any, proof: Path) -> None:
        del file[f"episode_1/{place}"]
        file.create_dataset(f"episode_1/{place}", shape, np.float64, chunks=True)

    return arrays(change)


def many_times(folder: Path, proof: Path) -> None:
    """An episode under a thousand names."""
    metadata(total_episodes=1000)(folder, proof)
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        for i in range(2, 1000):
            file[f"episode_{i}"] = file["episode_0"]


def objects(file: Any, proof: Path) -> None:
    """Pickles where rewards belong."""
    del file["episode_1/rewards"]
    pickles = file.create_dataset("episode_1/rewards", (4,), h5py.vlen_dtype(np.uint8))
    for i in range(4):
        pickles[i] = np.frombuffer(pickle.dumps(Bomb(proof)), np.uint8)


def opaque(file: Any, proof: Path) -> None:
    del file["episode_1/rewards"]
    file.create_dataset("episode_1/rewards", data=np.array([np.void(pickle.dumps(Bomb(proof)))] * 4))


def jpeg(height: int, width: int) -> np.ndarray:
    file = BytesIO()
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(file, format="JPEG")
    return np.frombuffer(file.getvalue(), np.uint8)


def pictures(content: np.ndarray) -> Callable[[Path, Path], None]:
    """A dataset that says its pictures are compressed, all of them of this content."""

    def damage(folder: Path, proof: Path) -> None:
        metadata(jpeg_encoding=True)(folder, proof)
        for episode in (0, 1):
            arrays(lambda file, proof, episode=episode: file.pop(f"episode_{episode}/observations/camera"))(folder, proof)
            rows = np.stack([content] * 5)
            arrays(
                lambda file, proof, episode=episode, rows=rows: file.create_dataset(f"episode_{episode}/observations/camera", data=rows)
            )(folder, proof)

    return damage


def environment_that_runs(folder: Path, proof: Path) -> None:
    """Spaces that only the environment tells, which is a function."""
    spec = {
        "id": "Bomb-v0",
        "entry_point": "os:mkdir",
        "kwargs": {"path": str(proof)},
        "additional_wrappers": [],
        "vector_entry_point": None,
    }
    metadata(observation_space=None, env_spec=json.dumps(spec))(folder, proof)


def bytes_of(name: str, content: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    def damage(folder: Path, proof: Path) -> None:
        file = folder / name
        file.write_bytes(content(file.read_bytes()))

    return damage


def gone(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, proof: (folder / name).unlink()


def pipe(folder: Path, proof: Path) -> None:
    """A file that is never read to its end."""
    (folder / "main_data.hdf5").unlink()
    os.mkfifo(folder / "main_data.hdf5")


def deep(folder: Path, proof: Path) -> None:
    metadata(observation_space="[" * 100_000)(folder, proof)


def change(*path: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """Change fields of a space's part."""

    def damage(subspaces: dict[str, Any]) -> None:
        part = subspaces
        for key in path[:-1]:
            part = part[key]["subspaces"]
        part[path[-1]].update(fields)

    return damage


DATA = "main_data.hdf5"
FALSE = np.zeros(4, dtype=bool)
CASES: dict[str, tuple[Callable[[Path, Path], None], tuple[str, ...]]] = {
    # ---- another dataset than the algorithm needs: both sides are named
    "another shape": (
        metadata(observation_space=change("body", "arm", shape=[4], low=[-1.0] * 4, high=[1.0] * 4)),
        ("observation.body.arm has shape [4] in the dataset and [3] in the algorithm",),
    ),
    "another type": (
        metadata(observation_space=change("body", "arm", dtype="float64")),
        ("observation.body.arm has dtype float64 in the dataset and float32 in the algorithm",),
    ),
    "another bound": (
        metadata(action_space=change("turn", high=[2.0, 3.0])),
        ("action.turn has high 3.0 in the dataset and 2.0 in the algorithm",),
    ),
    "more choices": (metadata(action_space=change("choice", n=4)), ("action.choice has n 4 in the dataset and 3 in the algorithm",)),
    "another start": (
        metadata(action_space=change("choice", start=0)),
        ("action.choice has start 0 in the dataset and 1 in the algorithm",),
    ),
    "another kind": (
        metadata(observation_space=change("camera", type="MultiBinary", n=3)),
        ("observation.camera is MultiBinary in the dataset and Box in the algorithm",),
    ),
    "another key": (
        metadata(observation_space=lambda subspaces: subspaces.update(map=subspaces.pop("camera"))),
        ("observation has body, map in the dataset and body, camera in the algorithm",),
    ),
    "a future version": (metadata(minari_version="9.1.0"), ("written by Minari 9.1.0", "reads 0.4.0 to")),
    "another format": (metadata(data_format="arrow"), ("data_format is 'arrow'", "only hdf5")),
    # ---- not whole
    "no metadata": (gone("metadata.json"), ("is neither in", "metadata.json")),
    "empty": (metadata(total_episodes=0), ("it holds no episodes",)),
    "no data": (gone(DATA), (f"{DATA} is missing",)),
    "cut off": (bytes_of(DATA, lambda content: content[: len(content) // 2]), ("cannot be read", "OSError")),
    "no HDF5": (bytes_of(DATA, lambda content: b"numbers"), ("cannot be read", "OSError")),
    "no bytes": (bytes_of(DATA, lambda content: b""), ("cannot be read", "OSError")),
    "no JSON": (bytes_of("metadata.json", lambda content: content[:-9]), ("cannot be read", "JSONDecodeError")),
    "no text": (bytes_of("metadata.json", lambda content: b"\xff" + content), ("cannot be read", "UnicodeDecodeError")),
    "a list": (bytes_of("metadata.json", lambda content: b"[]"), ("cannot be read", "TypeError")),
    "no version": (metadata(minari_version=None), ("cannot be read", "minari_version")),
    "no spaces": (metadata(action_space=None), ("it has no action_space",)),
    "no space": (metadata(action_space="[1]"), ("cannot be read", "TypeError")),
    "no bounds": (metadata(action_space=lambda subspaces: subspaces["turn"].pop("high")), ("cannot be read", "'high'")),
    "a missing episode": (metadata(total_episodes=3), ("episode_2 is missing",)),
    "a missing group": (put("observations/body", None), ("episode_1/observations/body is missing",)),
    "missing rewards": (put("rewards", None), ("episode_1/rewards is missing",)),
    "a number as a group": (put("observations/body", 3), ("episode_1/observations/body is no group",)),
    "a group as numbers": (link("rewards", lambda proof: h5py.SoftLink("/episode_0")), ("episode_1/rewards is a link",)),
    # ---- not in its spaces
    "too few observations": (put("observations/body/arm", np.zeros((4, 3), np.float32)), ("arm has shape (4, 3), not 5 rows",)),
    "too many actions": (put("actions/choice", np.ones(5, np.int64)), ("actions/choice has shape (5,), not 4 rows",)),
    "too few flags": (put("terminations", FALSE[1:]), ("terminations has shape (3,), not 4 rows",)),
    "no step": (put("rewards", np.zeros(0)), ("rewards has shape (0,)",)),
    "one number": (put("rewards", 1.0), ("rewards has shape ()",)),
    "rewards of two dimensions": (put("rewards", np.ones((4, 1))), ("rewards has shape (4, 1)", "not a number a step")),
    "rewards as text": (put("rewards", np.array([b"1", b"2", b"3", b"4"])), ("rewards has shape (4,) and type |S1",)),
    "complex rewards": (put("rewards", np.ones(4, np.complex64)), ("rewards has shape (4,) and type",)),
    "other shape than said": (put("observations/body/arm", np.zeros((5, 2), np.float32)), ("shape (2,) and its space (3,)",)),
    "other type than said": (put("actions/turn", np.zeros((4, 2))), ("actions/turn is float64 and its space float32",)),
    "floats as choices": (put("actions/choice", np.ones(4)), ("actions/choice is float64 and its space int64",)),
    "flags that are none": (put("terminations", np.full(4, 2)), ("neither true nor false",)),
    "NaN observed": (number("observations/body/arm", np.nan), ("episode_1: observation.body.arm is nan at step 2",)),
    "infinite reward": (number("rewards", -np.inf), ("episode_1: reward is -inf at step 2",)),
    "NaN as action": (number("actions/turn", np.nan), ("episode_1: action.turn is nan at step 2", "from -2 to 2")),
    "action too far": (number("actions/turn", 2.5), ("action.turn is 2.5 at step 2, not a number from -2 to 2",)),
    "choice there is not": (number("actions/choice", 4), ("action.choice is 4 at step 2, not a number from 1 to 3",)),
    "choice before the first": (number("actions/choice", 0), ("action.choice is 0 at step 2, not a number from 1 to 3",)),
    "observed choice there is not": (number("observations/body/mode", -1), ("observation.body.mode is -1 at step 2",)),
    "goes on": (number("terminations", True), ("episode_1 continues after step 2, which ended it",)),
    # ---- means harm
    "huge metadata": (metadata(description="x" * (1 << 24)), ("metadata.json is larger than 16,777,216 bytes",)),
    "deep metadata": (deep, ("cannot be read", "RecursionError")),
    "an environment that runs": (environment_that_runs, ("it has no observation_space",)),
    "pickles": (arrays(objects), ("rewards has shape (4,) and type object",)),
    "opaque pickles": (arrays(opaque), ("rewards has shape (4,) and type |V",)),
    "a link to nowhere": (link("rewards", lambda proof: h5py.SoftLink("/nowhere")), ("episode_1/rewards is",)),
    "another file": (link("rewards", elsewhere), ("episode_1/rewards is a link",)),
    "bytes of another file": (arrays(external_storage), ("rewards is in other files",)),
    "parts of another file": (arrays(virtual), ("rewards is in other files",)),
    "compressed": (put("rewards", np.zeros(4), compression="gzip"), ("rewards is in other files or compressed",)),
    "without end": (declared("rewards", (1 << 50,)), ("rewards is larger than its file",)),
    "larger than its file": (declared("rewards", (1 << 20,)), ("rewards is larger than its file",)),
    "one episode many times": (many_times, ("is larger than its file",)),
    "a pipe": (pipe, (f"{DATA} is missing",)),
    "pictures that are none": (pictures(np.zeros(100, np.uint8)), ("observations/camera holds no images",)),
    "pictures of another size": (pictures(jpeg(3000, 4000)), ("camera holds images of another size than its space, (32, 40, 3)",)),
    "pictures as numbers": (pictures(np.zeros(100)), ("camera holds no images",)),
}
