"""A replay buffer is restored from its segments as it was, and a save writes only new rows."""

from __future__ import annotations

import hashlib
import resource
from functools import partial
from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from lightning_rl.checkpoints.archive import to_arrays
from lightning_rl.checkpoints.atomic import SaveError
from lightning_rl.data.replay import segments
from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.data.replay.segments import SegmentStore, size_of
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.errors import SettingError
from lightning_rl.types import tree_leaves
from tests.data.recordings import LAYOUTS, MODES, diary, environments, experience, line_buffer, some_actions, walk
from tests.data.replay.test_buffer import ALL_WAYS, buffer_for, demonstrations, plain
from tests.environments import Image, Scripted, ScriptedDict


def through_a_file(manifest, folder):
    torch.save(manifest, folder / "manifest")
    return torch.load(folder / "manifest", weights_only=True)


def same_draws(one: ReplayBuffer, other: ReplayBuffer, times: int = 3) -> None:
    assert (len(one), one.ready, one.statistics()) == (len(other), other.ready, other.statistics())
    for _ in range(times if one.ready else 0):
        a, b = one.sample(16, 0.3), other.sample(16, 0.3)
        for x, y in zip(tree_leaves(tuple(a)), tree_leaves(tuple(b)), strict=True):
            assert x.dtype == y.dtype and np.array_equal(x, y)
        errors = np.random.default_rng(len(one)).exponential(size=16).astype(np.float32)
        for buffer in (one, other) if one.priorities is not None else ():
            buffer.update(a.rows, partial(torch.from_numpy, errors))


def buffers_and_modes():
    """All ways to keep rows in a buffer that is overwritten and in one that is not, each in another mode; slow in the other modes."""
    for (i, way), (j, capacity), (k, mode) in product(enumerate(ALL_WAYS), enumerate((21, 120)), enumerate(MODES)):
        yield pytest.param(*way, capacity, mode, marks=[] if (i + j + k) % 3 == 0 else [pytest.mark.slow])


@pytest.mark.parametrize("prioritized, layout, n_steps, capacity, mode", buffers_and_modes())
def test_runs_that_are_resumed_repeatedly_draw_the_same_as_one_that_never_stopped(prioritized, layout, n_steps, capacity, mode, tmp_path):
    def make(seed: int = 0) -> ReplayBuffer:
        return buffer_for(Scripted, capacity, 3, n_steps, seed, prioritized=prioritized, optimize_memory_usage=layout)

    whole, manifests = make(1), []
    store, part = SegmentStore(tmp_path / "rank0"), make(1)
    shown = diary(Scripted(period=2, first_episode=500), np.zeros(3, dtype=int), "SAME_STEP")
    for buffer in (whole, part):
        buffer.extend(demonstrations(*shown), plain)  # rings of different lengths
    for t, each in enumerate(experience(environments(Scripted, 3), some_actions(Scripted, 90, 3), mode)):
        whole.add(*each)
        part.add(*each)
        if t % 11 == 3 or t > 84:
            manifests = [*manifests[-1:], through_a_file(store.save(part), tmp_path)]
            if t % 2:  # killed: it goes on in another process, from this generation
                store, part = SegmentStore(tmp_path / "rank0"), make(5)
                store.load(manifests[-1], part)
            store.forget(manifests)
            same_draws(whole, part)
        if t == 45:  # an end that comes after its row was saved
            for buffer in (whole, part):
                buffer.cut()
    assert len(list((tmp_path / "rank0").iterdir())) < 12


@pytest.mark.parametrize("kind", [ScriptedDict, Image])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trees_and_images_come_back(kind, layout, tmp_path):
    one, other = (buffer_for(kind, 30, 3, seed=seed, optimize_memory_usage=layout) for seed in (1, 2))
    for said in experience(environments(kind, 3), some_actions(kind, 25, 3), "SAME_STEP"):
        one.add(*said)
    manifest = SegmentStore(tmp_path / "rank0").save(one)
    SegmentStore(tmp_path / "rank0").load(manifest, other)
    same_draws(one, other)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_stacks_of_frames_come_back_whole(n_steps, tmp_path):
    def env(period: int, first: int) -> gym.Env:
        return gym.wrappers.FrameStackObservation(Image(period=period, first_episode=first), 4)

    def make(seed: int) -> ReplayBuffer:
        space, config = env(1, 0).observation_space, ReplayConfig(optimize_memory_usage=True)
        return ReplayBuffer(space, np.zeros((), np.int64), 30, 3, n_steps=n_steps, config=config, frames=4, seed=seed)

    whole, part, store = make(1), make(1), SegmentStore(tmp_path / "rank0")
    envs = [lambda i=i, period=period: env(period, 3 * i) for i, period in enumerate((1, 2, 7))]
    for t, said in enumerate(experience(envs, np.zeros((60, 3), dtype=np.int64), "SAME_STEP")):
        whole.add(*said)
        part.add(*said)
        if t % 6 == 5:
            manifest = store.save(part)
            store, part = SegmentStore(tmp_path / "rank0"), make(2)
            store.load(manifest, part)
            same_draws(whole, part)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_buffer_in_files_comes_back_into_files(layout, tmp_path):
    one, other = (line_buffer(50, seed=s, optimize_memory_usage=layout, directory=str(tmp_path / "rows")) for s in (1, 2))
    walk(one, range(70), ends=(5, 66))
    SegmentStore(tmp_path / "rank0").load(SegmentStore(tmp_path / "rank0").save(one), other)
    same_draws(one, other)


def test_an_empty_buffer_comes_back_empty(tmp_path):
    buffer = line_buffer(10)
    manifest = SegmentStore(tmp_path / "rank0").save(buffer)
    walk(buffer, range(5))
    SegmentStore(tmp_path / "rank0").load(manifest, buffer)
    assert len(buffer) == 0 and manifest["segments"] == []


@pytest.mark.thorough
def test_a_save_writes_only_what_is_new_and_old_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "MAX_SEGMENT_BYTES", 8 << 20)  # an eighth of all sizes, for speed
    monkeypatch.setattr(segments, "SMALL_BYTES", 1 << 20)
    store = SegmentStore(tmp_path / "rank0")
    buffer = ReplayBuffer(gym.spaces.Box(-1, 1, (121,), np.float32), np.int64(0), 20_000, config=ReplayConfig())

    def files() -> dict[str, int]:
        return {each.name: each.stat().st_size for each in (tmp_path / "rank0").iterdir()}

    rows = 1000  # bytes of one
    buffer.continue_from({**buffer.position(), "written": np.array([15_000])})
    manifest = store.save(buffer)
    assert sum(files().values()) == pytest.approx(size_of(buffer, 15_000), rel=0.01) == pytest.approx(15_000 * rows, rel=0.01)
    before = files()
    buffer.continue_from({**buffer.position(), "written": np.array([15_100])})
    manifest = store.save(buffer)
    (new,) = files().keys() - before.keys()
    assert files()[new] == pytest.approx(101 * rows, rel=0.01)  # the newest one again
    for written in range(15_200, 40_000, 1000):
        buffer.continue_from({**buffer.position(), "written": np.array([written])})
        before = manifest
        manifest = store.save(buffer)
        store.forget([before, manifest])
        assert sum(files().values()) < 1.7 * 20_000 * rows
    with pytest.raises(SettingError, match="FileNotFoundError"):
        (tmp_path / "rank0" / manifest["segments"][0]["name"]).unlink()
        SegmentStore(tmp_path / "rank0").load(manifest, buffer)
    assert len(store.save(buffer)["segments"]) > 1  # it notices, and writes everything


def test_a_damaged_segment_and_other_settings_are_refused_in_one_line(tmp_path):
    store, buffer = SegmentStore(tmp_path / "rank0"), line_buffer(30, 2, n_steps=3)
    walk(buffer, range(20))
    manifest = store.save(buffer)
    for said, other in {
        "buffer_size 30, not 40": line_buffer(40, 2, n_steps=3),
        "num_envs 2, not 1": line_buffer(30, 1, n_steps=3),
        "n_steps 3, not 1": line_buffer(30, 2),
        "replay.prioritized False, not True": line_buffer(30, 2, n_steps=3, prioritized=True),
        "replay.optimize_memory_usage False, not True": line_buffer(30, 2, n_steps=3, optimize_memory_usage=True),
        "other observations and actions": buffer_for(Scripted, 30, 2, 3),
    }.items():
        with pytest.raises(SettingError, match=f"the replay buffer was saved with {said}: continue it with the same settings"):
            SegmentStore(tmp_path / "rank0").load(manifest, other)
    segment = tmp_path / "rank0" / manifest["segments"][0]["name"]
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    with pytest.raises(SettingError, match="is damaged"):
        SegmentStore(tmp_path / "rank0").load(manifest, line_buffer(30, 2, n_steps=3))


def test_a_full_disk_leaves_the_segments_that_were_there(tmp_path):
    store, buffer = SegmentStore(tmp_path / "rank0"), line_buffer(300, prioritized=True)
    walk(buffer, range(50))
    manifest = store.save(buffer)
    walk(buffer, range(50, 300))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(SaveError, match="could not be saved"):
            store.save(buffer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    earlier = line_buffer(300, prioritized=True)
    SegmentStore(tmp_path / "rank0").load(manifest, earlier)
    assert len(earlier) == 50
    later = line_buffer(300, prioritized=True)
    SegmentStore(tmp_path / "rank0").load(store.save(buffer), later)
    same_draws(buffer, later)


def test_a_name_stands_for_one_content(tmp_path):
    store, buffer, contents = SegmentStore(tmp_path / "rank0"), line_buffer(30), {}
    first = None
    for i in range(12):
        walk(buffer, range(10 * i, 10 * i + 10))
        manifest: Any = store.save(buffer)
        first = first or manifest
        if i % 3 == 2:  # back to an earlier generation, as after a damage
            store = SegmentStore(tmp_path / "rank0")
            store.load(to_arrays(manifest), buffer)
        for each in (tmp_path / "rank0").iterdir():
            digest = hashlib.sha256(each.read_bytes()).hexdigest()
            assert contents.setdefault(each.name, digest) == digest
