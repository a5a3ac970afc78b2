"""Checkpoints and segments are data from others: malicious ones are refused in one line, and do nothing."""

from __future__ import annotations

import hashlib
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_rl import PPO, SAC, Algorithm, EvolutionStrategies, SettingError, Trainer, load_policy
from lightning_rl.checkpoints.archive import to_arrays
from lightning_rl.data.replay.segments import SegmentStore
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.training.loading import check_environment, limited_weights
from tests.checkpoints.hostile import hostile_files, numpy_bomb
from tests.command_line import run
from tests.data.recordings import line_buffer, walk
from tests.fitting import fit, tiny

NAMES = 38
SETTINGS = "--model PPO --model.env.id CartPole-v1 --model.env.num_envs 2 --model.n_steps 8 --model.batch_size 8 --model.net_arch [8]"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A good checkpoint, the proof that something ran, and the hostile files."""
    folder = tmp_path_factory.mktemp("files")
    model = tiny(PPO, "CartPole-v1", max_env_steps=16)
    fit(model).save_checkpoint(folder / "good.ckpt", weights_only=False)
    proof = folder / "code_ran"
    files = hostile_files(folder / "good.ckpt", folder, proof)
    assert len(files) == NAMES
    return folder, proof, files


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.thorough
def test_the_checkpoint_behind_the_hostile_files_is_good(made):
    folder, _, _ = made
    action, _ = load_policy(folder / "good.ckpt").act(np.zeros(4, np.float32))
    assert action in (0, 1)
    model = tiny(PPO, "CartPole-v1")
    fit(model, ckpt_path=folder / "good.ckpt")
    assert model.env_steps == 96


def refused(make, proof: Path) -> None:
    before = peak()
    with pytest.raises(SettingError) as error:
        make()
    assert "\n" not in str(error.value)
    assert not proof.exists()
    assert peak() - before < 200 << 20


@pytest.mark.thorough
def test_no_hostile_file_gives_a_policy(made, capfd):
    _, proof, files = made
    for path in files.values():
        refused(lambda path=path: load_policy(path), proof)


def test_no_hostile_file_gives_an_algorithm(made, capfd):
    _, proof, files = made
    for path in files.values():
        refused(lambda path=path: Algorithm.load_from_checkpoint(path), proof)
        refused(lambda path=path: PPO.load_from_checkpoint(path), proof)


@pytest.mark.thorough
def test_no_hostile_file_is_continued(made, tmp_path):
    _, proof, files = made
    model = tiny(PPO, "CartPole-v1")
    for path in files.values():
        trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False)
        refused(lambda path=path, trainer=trainer: trainer.fit(model, ckpt_path=path), proof)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_the_program_refuses_hostile_files_in_one_line(made, capfd, tmp_path, monkeypatch):
    """One of each kind: the others take the same way through `load_policy` and `fit`."""
    _, proof, files = made
    monkeypatch.chdir(tmp_path)
    for name in (
        "bomb_alone",
        "bomb_in_callbacks",
        "class_path_as_wrapper",
        "zip_bomb",
        "infinite_numbers",
        "settings_in_themselves",
        "link_to_a_device",
    ):
        for command in (f"evaluate --ckpt_path {files[name]}", f"fit {SETTINGS} --ckpt_path {files[name]}"):
            status, _, message = run(command, capfd)
            assert (status, message.count("\n"), name) == (2, 1, name) and len(message) <= 201, (name, command, message)
    assert not proof.exists() and list(tmp_path.iterdir()) == []


def test_a_wrapper_that_writes_to_a_folder_named_by_a_file_is_refused(made, tmp_path):
    folder, _, _ = made
    content = torch.load(folder / "good.ckpt", weights_only=True)
    content["hyper_parameters"]["env"]["wrappers"] = [{"class_path": "RecordVideo", "init_args": {"video_folder": str(tmp_path / "v")}}]
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(SettingError, match="the wrapper RecordVideo, which writes files"):
        load_policy(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "env, said",
    [
        ({"frame_stack": 10**9}, "holds env.frame_stack 1000000000, but its observations have 4 numbers"),
        ({"wrappers": [{"class_path": "FrameStackObservation", "init_args": {"stack_size": 10**9}}]}, "holds env.stack_size 1000000000"),
        ({"kwargs": {"render_mode": "human"}}, "names the render_mode human, which opens a window; pass env yourself"),
        ({"wrappers": ["HumanRendering"]}, "names the wrapper HumanRendering, which opens a window; pass env yourself"),
    ],
)
def test_an_environment_that_takes_all_memory_or_opens_a_window_is_refused_before_it_is_built(env, said, made, tmp_path, capfd):
    folder, proof, _ = made
    content = torch.load(folder / "good.ckpt", weights_only=True)
    content["hyper_parameters"]["env"].update(env)
    torch.save(content, tmp_path / "a.ckpt")
    status, _, line = run(f"evaluate --ckpt_path {tmp_path / 'a.ckpt'}", capfd)
    assert (status, line.count("\n")) == (2, 1) and said in line
    refused(lambda: load_policy(tmp_path / "a.ckpt"), proof)
    assert PPO.load_from_checkpoint(tmp_path / "a.ckpt", env="CartPole-v1").env_steps == 16


def test_an_environments_own_arguments_may_be_called_as_those_of_a_frame_stack():
    own = {"frame_stack": 40, "stack_size": 40}
    check_environment({"id": "Mine-v0", "kwargs": own, "wrappers": [{"class_path": "mine.Wrapper", "init_args": own}]}, 4, "a.ckpt")
    for module in ("", "gymnasium.wrappers.", "gymnasium.wrappers.stateful_observation."):
        wrapper = {"class_path": f"{module}FrameStackObservation", "init_args": {"stack_size": 5}}
        with pytest.raises(SettingError, match=r"holds env\.stack_size 5, but its observations have 4 numbers"):
            check_environment({"id": "Mine-v0", "kwargs": own, "wrappers": [wrapper]}, 4, "a.ckpt")


def test_networks_too_large_for_their_weights_are_refused_before_they_are_built(made, tmp_path):
    folder, proof, _ = made
    content = torch.load(folder / "good.ckpt", weights_only=True)
    content["hyper_parameters"]["net_arch"] = [60_000, 60_000]  # 14 GB
    torch.save(content, tmp_path / "a.ckpt")
    refused(lambda: load_policy(tmp_path / "a.ckpt"), proof)


@pytest.mark.variants
@pytest.mark.parametrize("algorithm", [PPO, SAC, EvolutionStrategies])
def test_networks_of_more_layers_than_their_file_has_weights_are_refused_before_they_are_built(algorithm, tmp_path):
    model = tiny(algorithm)
    fit(model, max_steps=1).save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    content["hyper_parameters"]["net_arch"] = [1] * 10_000  # ten times as many took 30 s and 1.4 GB
    torch.save(content, tmp_path / "a.ckpt")
    built = []
    with (
        register_module_parameter_registration_hook(lambda *weight: built.append(weight)),
        pytest.raises(SettingError, match=r"a\.ckpt' does not fit its own settings, which have many more weights$"),
    ):
        load_policy(tmp_path / "a.ckpt")
    assert len(built) < 1000


def test_weights_of_a_file_that_another_one_names_are_not_counted_as_those_of_the_other(tmp_path):
    with limited_weights({}, tmp_path / "student.ckpt"):
        with limited_weights({"weight": torch.zeros(5_000_000)}, tmp_path / "teacher.ckpt"):
            torch.nn.Linear(5_000, 1_000, device="meta")
        torch.nn.Linear(10, 10)
        with pytest.raises(SettingError, match=r"student\.ckpt' does not fit its own settings"):
            torch.nn.Linear(5_000, 1_000, device="meta")


def test_a_folder_that_a_file_names_is_used_only_if_it_is_there(tmp_path):
    model = tiny(SAC, replay=ReplayConfig(directory=str(tmp_path / "rows")))
    fit(model).save_checkpoint(tmp_path / "a.ckpt")
    assert SAC.load_from_checkpoint(tmp_path / "a.ckpt").replay.directory == str(tmp_path / "rows")
    (tmp_path / "rows").rmdir()
    loaded = SAC.load_from_checkpoint(tmp_path / "a.ckpt", max_env_steps=112)
    fit(loaded)
    assert loaded.replay.directory is None and not (tmp_path / "rows").exists()


def test_a_run_in_a_folder_that_is_a_link_can_be_loaded(made, tmp_path):
    folder, _, _ = made
    (tmp_path / "run").symlink_to(folder)
    load_policy(tmp_path / "run" / "good.ckpt")


# ---------------------------------------------------------------- segments


@pytest.fixture
def saved(tmp_path):
    """A saved buffer: its folder and its manifest."""
    folder = tmp_path / "last.ckpt.d" / "rank0"
    buffer = line_buffer(40, prioritized=True)
    walk(buffer, range(30))
    return folder, to_arrays(SegmentStore(folder).save(buffer))


def replaced(folder: Path, manifest: dict, data: bytes) -> dict:
    """The manifest, with other bytes for its first segment."""
    entry = manifest["segments"][0]
    (folder / entry["name"]).write_bytes(data)
    return {**manifest, "segments": [{**entry, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}]}


def test_objects_in_a_segment_are_not_unpickled(saved, tmp_path):
    folder, manifest = saved
    manifest = replaced(folder, manifest, numpy_bomb(tmp_path / "code_ran"))
    refused(lambda: SegmentStore(folder).load(manifest, line_buffer(40, prioritized=True)), tmp_path / "code_ran")


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..", "", "a/../00000001.rows", "00000001.rows\n", 5, None])
def test_a_segment_outside_its_folder_is_refused(saved, name, tmp_path):
    folder, manifest = saved
    entry = manifest["segments"][0]
    (tmp_path / "x").write_bytes((folder / entry["name"]).read_bytes())
    manifest["segments"] = [{**entry, "name": name}]
    refused(lambda: SegmentStore(folder).load(manifest, line_buffer(40, prioritized=True)), tmp_path / "code_ran")


def test_a_link_as_segment_or_folder_is_refused(saved, tmp_path):
    folder, manifest = saved
    segment = folder / manifest["segments"][0]["name"]
    os.rename(segment, tmp_path / "x")
    segment.symlink_to(tmp_path / "x")
    refused(lambda: SegmentStore(folder).load(manifest, line_buffer(40, prioritized=True)), tmp_path / "code_ran")
    segment.unlink()
    os.rename(tmp_path / "x", segment)
    os.rename(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    refused(lambda: SegmentStore(folder).load(manifest, line_buffer(40, prioritized=True)), tmp_path / "code_ran")
    with pytest.raises(SettingError, match="is a link"):
        SegmentStore(folder).save(line_buffer(40))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["position"].update(written=np.array([1 << 60])),
        lambda m: m["position"].update(written=np.array([-1])),
        lambda m: m["position"].update(written=[30.0]),
        lambda m: m["position"].update(open=np.array([7])),
        lambda m: m["position"].update(rng={"bit_generator": "MT19937"}),
        lambda m: m["position"]["sampler"].update(largest=float("nan")),
        lambda m: m["segments"][0].update(size=1 << 60),
        lambda m: m["segments"][0].update(stop=np.array([1 << 60])),
        lambda m: m["segments"][0].update(start=np.array([5])),
        lambda m: m["segments"][0].update(stop=np.array([20])),
        lambda m: m["segments"].clear(),
        lambda m: m["segments"].append({}),
        lambda m: m["priorities"].update(m["segments"][0]),
        lambda m: m["settings"].update(n_steps=3),
        lambda m: m.pop("position"),
        lambda m: m.update(format_version=2),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(saved, change, tmp_path):
    folder, manifest = saved
    change(manifest)
    refused(lambda: SegmentStore(folder).load(manifest, line_buffer(40, prioritized=True)), tmp_path / "code_ran")


@pytest.mark.parametrize("array", [np.zeros(30), np.zeros(31, "V24"), np.zeros((30, 1), "f4"), np.zeros(0)])
def test_a_segment_of_other_arrays_is_refused(saved, array, tmp_path):
    folder, manifest = saved
    np.save(tmp_path / "x.npy", array)
    manifest = replaced(folder, manifest, (tmp_path / "x.npy").read_bytes())
    refused(lambda: SegmentStore(folder).load(manifest, line_buffer(40, prioritized=True)), tmp_path / "code_ran")


def test_a_header_that_promises_more_than_its_file_holds_is_refused(saved, tmp_path):
    folder, manifest = saved
    data = (folder / manifest["segments"][0]["name"]).read_bytes()
    manifest = replaced(folder, manifest, data.replace(b"(30,)", b"(1<9,)"[:5]).replace(b"(1<9,", b"(9e9,"))
    refused(lambda: SegmentStore(folder).load(manifest, line_buffer(40, prioritized=True)), tmp_path / "code_ran")
    manifest = replaced(folder, manifest, data.replace(b"(30,), }     ", b"(1" + b"0" * 8 + b",), }"))
    refused(lambda: SegmentStore(folder).load(manifest, line_buffer(40, prioritized=True)), tmp_path / "code_ran")
