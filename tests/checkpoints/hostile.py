"""Malicious files, and broken ones that could do harm, made from a good checkpoint."""

from __future__ import annotations

import copy
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MEMBERS = ("state_dict", "hyper_parameters", "lightning_rl", "optimizer_states", "callbacks", "loops")


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


def hostile_files(good: Path, folder: Path, proof: Path) -> dict[str, Path]:
    """Make each file, by its name; code that runs leaves `proof`."""
    content = torch.load(good, weights_only=True)
    files: dict[str, Path] = {}

    def put(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
        changed = copy.deepcopy(content)
        change(changed)
        files[name] = folder / f"{name}.ckpt"
        torch.save(changed, files[name])

    def env(**settings: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda changed: changed["hyper_parameters"]["env"].update(settings)

    weight = next(name for name, value in content["state_dict"].items() if value.dim() == 2)
    for member in MEMBERS:
        put(f"bomb_in_{member}", lambda changed, member=member: changed.update({member: Bomb(proof)}))
    put("bomb_among_weights", lambda changed: changed["state_dict"].update(more=Bomb(proof)))
    files["bomb_alone"] = folder / "bomb_alone.ckpt"
    files["bomb_alone"].write_bytes(pickle.dumps(Bomb(proof)))

    payload = {"class_path": "os.mkdir", "init_args": {"path": str(proof)}}
    put("instantiator", lambda changed: changed["hyper_parameters"].update(_instantiator="os.mkdir", _class_path="os.mkdir"))
    put("instantiator_inside", lambda changed: changed["hyper_parameters"].update(net_arch={"_instantiator": "os.mkdir"}))
    put("class_path_as_algorithm", lambda changed: changed["lightning_rl"].update(algorithm="os.system"))
    put("class_path_as_wrapper", env(wrappers=[payload]))
    put("class_path_as_wrapper_name", env(wrappers=["os.system"]))
    put("class_path_as_environment", env(id="os:system"))
    put("environment_as_text", lambda changed: changed["hyper_parameters"].update(env="os:system"))
    put("class_path_inside", lambda changed: changed["hyper_parameters"].update(activation={"deep": [payload]}))

    files["path_traversal"] = rewritten(good, folder / "path_traversal.ckpt", lambda name: name.replace("version", "../../../version"))
    files["absolute_member"] = rewritten(good, folder / "absolute_member.ckpt", lambda name: name.replace("archive/", f"{proof}/"))
    files["zip_bomb"] = rewritten(good, folder / "zip_bomb.ckpt", lambda name: name, bomb="archive/data/999")

    put("another_shape", lambda changed: changed["state_dict"].update({weight: torch.zeros(3, 3)}))
    put("another_type", lambda changed: changed["state_dict"].update({weight: content["state_dict"][weight].to(torch.complex64)}))
    put("no_tensor", lambda changed: changed["state_dict"].update({weight: [1.0]}))
    put("tensor_larger_than_its_file", lambda changed: changed["state_dict"].update({weight: torch.zeros(1).expand(1 << 20, 1 << 20)}))
    put("sparse_tensor", lambda changed: changed["state_dict"].update({weight: torch.zeros(3, 3).to_sparse()}))
    put("no_numbers", lambda changed: changed["state_dict"][weight].fill_(float("nan")))
    put("infinite_numbers", lambda changed: changed["state_dict"][weight].fill_(float("inf")))
    put("future_version", lambda changed: changed["lightning_rl"].update(format_version=3))
    put("no_version", lambda changed: changed["lightning_rl"].update(format_version="1"))
    put("negative_steps", lambda changed: changed["lightning_rl"].update(env_steps=-1))
    put("settings_in_themselves", lambda changed: changed["hyper_parameters"].update(net_arch=changed["hyper_parameters"]))
    observations: list[Any] = []
    observations.append(observations)
    episodes = {"data": {"collector": {"episodes": {"obs": observations}}}}
    put("observations_in_themselves", lambda changed: changed["lightning_rl"].update(ranks=[episodes]))
    put("space_without_end", lambda changed: changed["lightning_rl"]["spaces"][0].update(shape=[1 << 40]))

    whole = good.read_bytes()
    for name, data in {"truncated": whole[: len(whole) // 2], "empty": b"", "text": b"weights"}.items():
        files[name] = folder / f"{name}.ckpt"
        files[name].write_bytes(data)
    secret = folder / "secret.txt"
    secret.write_text("root:x:0:0\n")
    files["link"] = folder / "link.ckpt"
    files["link"].symlink_to(secret)
    files["link_to_a_device"] = folder / "link_to_a_device.ckpt"
    files["link_to_a_device"].symlink_to("/dev/zero")
    files["link_as_manifest"] = folder / "link_as_manifest.ckpt"
    files["link_as_manifest"].write_bytes(whole)
    (folder / "link_as_manifest.ckpt.json").symlink_to(secret)
    return files


def rewritten(source: Path, target: Path, name: Callable[[str], str], bomb: str | None = None) -> Path:
    """Copy an archive with other names of members, and perhaps one more that is compressed and has 256 MB."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        first = old.namelist()[0].partition("/")[0]
        for member in old.namelist():
            new.writestr(name("archive/" + member[len(first) + 1 :]), old.read(member))
        if bomb is not None:
            entry = zipfile.ZipInfo(bomb)
            entry.compress_type = zipfile.ZIP_DEFLATED
            with new.open(entry, "w") as file:
                for _ in range(256):
                    file.write(bytes(1 << 20))
    return target


def numpy_bomb(proof: Path) -> bytes:
    """A `.npy` of one object, which runs when it is unpickled."""
    import numpy as np

    file, array = io.BytesIO(), np.empty(1, object)
    array[0] = Bomb(proof)
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()
