"""What a replay buffer keeps and gives back: every row as it happened, in both layouts."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_rl.data.replay import storage
from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.data.replay.segments import SegmentStore
from lightning_rl.data.replay.storage import DerivedNext, ReplayConfig, StoredNext, make_row_template
from lightning_rl.distributions import make_distribution
from lightning_rl.errors import SettingError
from lightning_rl.settings.fields import as_settings
from lightning_rl.types import EnvStep, tree_leaves
from tests.data.recordings import (
    LAYOUTS,
    LINE,
    MODES,
    Row,
    check_contents,
    diary,
    environments,
    experience,
    line_buffer,
    some_actions,
    starts,
    walk,
)
from tests.environments import Image, Scripted, ScriptedBox, ScriptedDict

ALL_WAYS = [(prioritized, layout, n_steps) for prioritized in (False, True) for layout in LAYOUTS for n_steps in (1, 3)]


def buffer_for(kind: type[Scripted], capacity: int, num_envs: int = 1, n_steps: int = 1, seed: int = 0, **config: Any) -> ReplayBuffer:
    action = np.zeros_like(kind.action_space.sample())
    return ReplayBuffer(kind.observation_space, action, capacity, num_envs, n_steps=n_steps, config=ReplayConfig(**config), seed=seed)


# ---------------------------------------------------------------- rows are what happened


@pytest.mark.variants
@pytest.mark.parametrize("kind", [Scripted, ScriptedDict, Image, ScriptedBox])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_what_happened_while_rings_fill_and_wrap(kind, mode, num_envs, n_steps, layout):
    steps, spare = 33, num_envs - 1  # a capacity that the environments do not divide is rounded down
    actions, envs = some_actions(kind, steps, num_envs), environments(kind, num_envs)
    rows = [diary(env(), actions[:, i], mode) for i, env in enumerate(envs)]
    buffer = buffer_for(kind, 7 * num_envs + spare, num_envs, n_steps, optimize_memory_usage=layout)
    assert buffer.length == 7
    for t, (obs, action, step) in enumerate(experience(envs, actions, mode), 1):
        buffer.add(obs, action, step)
        if t <= 9 or t % 4 == 1:
            check_contents(buffer, [each[:t] for each in rows])
    assert buffer.added == sum(row is not None for each in rows for row in each) > 3 * 7 * num_envs / 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n_steps, capacity", [(1, 2), (3, 4), (5, 6)])
def test_the_smallest_rings_hold_one_window_and_its_successor(layout, n_steps, capacity):
    actions = some_actions(Scripted, 40, 1)
    rows = diary(Scripted(period=4), actions[:, 0], "SAME_STEP")
    buffer = buffer_for(Scripted, capacity, n_steps=n_steps, optimize_memory_usage=layout)
    for t, said in enumerate(experience([lambda: Scripted(period=4)], actions, "SAME_STEP"), 1):
        buffer.add(*said)
        check_contents(buffer, [rows[:t]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_next_observations_are_in_the_same_episode_as_far_ahead_as_the_window_is_long(mode, n_steps, layout):
    buffer = buffer_for(Scripted, 3 * 11, 3, n_steps, optimize_memory_usage=layout)
    envs = [lambda i=i: Scripted(period=5, first_episode=100 * i) for i in range(3)]
    for said in experience(envs, some_actions(Scripted, 60, 3), mode):
        buffer.add(*said)
    window = buffer.sample(500)
    (episode, t), (next_episode, next_t) = window.obs.T, window.next_obs.T
    k = np.minimum(n_steps, 5 - t)
    assert (next_episode == episode).all() and (next_t == t + k).all()
    ends = next_t == 5  # the true last observation, not the first of the next episode
    assert ends.any() and (~ends).any() and not (t == 5).any()
    # of three episodes, one is truncated; 100 and 200 are those that remain 1 and 2
    terminated = ends & (episode % 3 != 1)
    assert (window.steps == np.where(terminated, 0, k)).all() and terminated.any() and (ends & ~terminated).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beyond_the_end_of_a_window_its_last_row_is_repeated_as_the_slots_there_may_be_empty(layout):
    buffer = buffer_for(Scripted, 20, n_steps=3, optimize_memory_usage=layout)
    for said in experience([Scripted], np.zeros((3, 1), dtype=int), "SAME_STEP"):
        buffer.add(*said)
    row, following, length = buffer.steps(np.array([0, 2]))  # the episode has three steps
    assert row.observation.obs.tolist() == [[0, 0], [0, 1], [0, 2], [0, 2], [0, 2], [0, 2]]
    assert following.obs.tolist() == [[0, 1], [0, 2], [0, 3], [0, 3], [0, 3], [0, 3]]
    assert length.tolist() == [3, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_by_hand(layout):
    buffer = buffer_for(Scripted, 20, n_steps=3, optimize_memory_usage=layout)
    for said in experience([Scripted], np.zeros((8, 1), dtype=int), "SAME_STEP"):
        buffer.add(*said)
    window = buffer.sample(200)
    found = {tuple(obs): i for i, obs in enumerate(window.obs.astype(int).tolist())}
    # the rows (2, 0) and (2, 1) have no complete window yet
    assert sorted(found) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    by_hand = {
        (0, 0): ([0, 1, 2], 0, [0, 3]),  # ends by termination
        (0, 1): ([1, 2, 0], 0, [0, 3]),
        (0, 2): ([2, 0, 0], 0, [0, 3]),
        (1, 0): ([10, 11, 12], 3, [1, 3]),  # by truncation
        (1, 1): ([11, 12, 0], 2, [1, 3]),
        (1, 2): ([12, 0, 0], 1, [1, 3]),
    }
    for place, (reward, steps, next_obs) in by_hand.items():
        i = found[place]
        assert (window.reward[i].tolist(), int(window.steps[i]), window.next_obs[i].tolist()) == (reward, steps, next_obs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reset_rows_of_next_step_are_in_no_buffer(layout):
    buffer = buffer_for(Scripted, 100, optimize_memory_usage=layout)
    for said in experience([Scripted], some_actions(Scripted, 11, 1), "NEXT_STEP"):
        buffer.add(*said)
    # every fourth of eleven steps is a reset
    assert len(buffer) == buffer.added == 9
    assert set(buffer.sample(300).obs[:, 1]) == {0, 1, 2}


def test_a_row_written_keeps_nothing_of_the_arrays_it_came_from():
    buffer = line_buffer(4)
    obs, reward, none, valid = np.ones((1, 1), np.float32), np.ones(1), np.zeros(1, dtype=bool), np.ones(1, dtype=bool)
    buffer.add(obs, np.zeros(1, dtype=int), EnvStep(obs, reward, none, none, valid, none, np.zeros(0, dtype=int), None, {}))
    obs[:], reward[:] = 5, 5
    window = buffer.sample(2)
    assert window.obs.max() == window.next_obs.max() == window.reward.max() == 1
    window.obs[:] = 9
    assert buffer.sample(2).obs.max() == 1


# ---------------------------------------------------------------- golden values


def test_a_ring_of_three_holds_the_newest_three():
    buffer = line_buffer(3)
    walk(buffer, range(5))
    assert len(buffer) == buffer.ready == 3
    assert buffer.layout.row.observation.obs[:, 0].tolist() == [3, 4, 2]
    assert buffer.layout.row.reward.tolist() == [3, 4, 2]
    assert buffer.layout.next_observation.obs[:, 0].tolist() == [4, 5, 3]


def test_a_ring_of_three_holds_the_newest_three_and_what_followed_them_where_observations_are_kept_once():
    buffer = line_buffer(3, optimize_memory_usage=True)
    walk(buffer, range(5))
    assert len(buffer) == buffer.ready == 3
    assert buffer.layout.observations.columns.obs[:, 0].tolist() == [4, 5, 2, 3]  # 5 followed 4
    window = buffer.sample(100)
    assert set(window.obs[:, 0]) == set(window.reward[:, 0]) == {2, 3, 4}
    assert (window.next_obs == window.obs + 1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_counted_oldest_first(layout):
    buffer = line_buffer(3, optimize_memory_usage=layout)
    walk(buffer, range(2))
    assert buffer.layout.read(*2 * [buffer.locate(np.arange(2))])[0].reward.tolist() == [0, 1]
    walk(buffer, range(2, 8))
    assert buffer.layout.read(*2 * [buffer.locate(np.arange(3))])[0].reward.tolist() == [5, 6, 7]
    assert buffer.age(buffer.locate(np.arange(3))).tolist() == [2, 1, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ages_are_counted_in_rows_of_the_same_environment(layout):
    buffer = line_buffer(8, num_envs=2, optimize_memory_usage=layout)
    walk(buffer, range(6))
    rows = buffer.locate(np.arange(8))
    assert buffer.layout.read(rows, rows)[0].reward.tolist() == [2, 3, 4, 5, 2, 3, 4, 5]
    assert buffer.age(rows).tolist() == [3, 2, 1, 0, 3, 2, 1, 0]


def test_mean_picks_are_draws_over_additions():
    buffer = line_buffer(3)
    assert buffer.statistics() == {"replay/size": 0, "replay/mean_picks": 0}
    walk(buffer, range(5))
    buffer.sample(6)
    buffer.sample(4)
    assert buffer.statistics() == {"replay/size": 3, "replay/mean_picks": 2}


# ---------------------------------------------------------------- drawing


@pytest.mark.parametrize("prioritized, replace", [(False, False), (False, True), (True, True)])
def test_the_same_seed_draws_the_same_batches(prioritized, replace):
    def rows(seed: int) -> list[list[int]]:
        buffer = line_buffer(30, seed=seed, prioritized=prioritized, replace=replace)
        walk(buffer, range(50))
        return [buffer.sample(10).rows.tolist() for _ in range(5)]

    assert rows(1) == rows(1) != rows(2)


def test_without_replacement_no_row_is_drawn_twice_and_no_more_than_there_are():
    buffer = line_buffer(20, num_envs=2, n_steps=3, replace=False)
    walk(buffer, range(15))
    assert buffer.ready == 2 * (10 - 2)
    for _ in range(20):
        assert len(set(buffer.sample(12).rows)) == 12
    assert len(set(buffer.sample(16).rows)) == 16
    with pytest.raises(SettingError, match="17 rows without replacement of 16: raise learning_starts or lower batch_size"):
        buffer.sample(17)


def test_with_replacement_more_rows_can_be_drawn_than_there_are():
    buffer = line_buffer(20)
    walk(buffer, range(3))
    assert len(buffer.sample(100).rows) == 100


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampling_without_a_complete_window_is_an_error(prioritized, layout):
    buffer = line_buffer(20, n_steps=3, prioritized=prioritized, optimize_memory_usage=layout)
    walk(buffer, range(2))
    with pytest.raises(SettingError, match="nothing to learn from yet with n_steps 3: raise learning_starts"):
        buffer.sample(4)


@pytest.mark.parametrize("replace, draws, batch_size", [(True, 200, 250), (False, 1250, 40)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_rows_are_equally_likely(layout, replace, draws, batch_size):
    buffer = line_buffer(60, num_envs=3, n_steps=3, replace=replace, optimize_memory_usage=layout)
    walk(buffer, range(33))
    assert buffer.ready == 3 * 18
    counts = np.bincount(np.concatenate([buffer.sample(batch_size).rows for _ in range(draws)]), minlength=3 * buffer.slots)
    expected = draws * batch_size / 54
    assert np.count_nonzero(counts) == 54
    chi_square = ((counts[counts > 0] - expected) ** 2 / expected).sum()
    assert chi_square < 53 + 4 * np.sqrt(2 * 53)  # four standard deviations above its mean, 53
    assert chi_square > 5  # rows taken in turn would give 0


def test_weights_of_rows_that_are_alike_are_one_over_the_batch():
    buffer = line_buffer(20)
    walk(buffer, range(9))
    assert buffer.sample(8).weight.tolist() == [0.125] * 8


# ---------------------------------------------------------------- saving and loading


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(tree_leaves(tuple(a)), tree_leaves(tuple(b)), strict=True))


@pytest.mark.parametrize("capacity", [21, 120])  # 120 rows end up to 90 episodes: the table of final observations grows beyond 64
@pytest.mark.parametrize("prioritized, layout, n_steps", ALL_WAYS)
def test_a_copy_continues_with_the_same_batches(capacity, prioritized, layout, n_steps, tmp_path):
    def make(seed: int) -> ReplayBuffer:
        return buffer_for(Scripted, capacity, 3, n_steps, seed, prioritized=prioritized, optimize_memory_usage=layout)

    errors = np.random.default_rng(0)

    def update(*buffers: ReplayBuffer) -> None:
        windows = [buffer.sample(16, progress=0.3) for buffer in buffers]
        assert all(same(window, windows[0]) for window in windows)
        sizes = torch.from_numpy(errors.exponential(size=16))
        for buffer in buffers if prioritized else ():
            buffer.update(windows[0].rows, lambda: sizes)

    envs = [lambda i=i, period=period: Scripted(period=period, first_episode=100 * i) for i, period in enumerate((1, 1, 5))]
    said = experience(envs, some_actions(Scripted, 75, 3), "SAME_STEP")
    buffer = make(seed=1)
    for each in said[:59]:  # in the middle of the third environment's episode
        buffer.add(*each)
        if len(buffer) > 9:
            update(buffer)
    if layout:
        assert len(buffer.layout.finals.records) == (96 if capacity == 120 else 64)
    twin = make(seed=2)
    SegmentStore(tmp_path).load(SegmentStore(tmp_path).save(buffer), twin)
    assert twin.statistics() == buffer.statistics()
    for each in said[59:]:
        update(buffer, twin)
        buffer.add(*each)
        twin.add(*each)
    update(buffer, twin)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_buffer_returns_to_an_earlier_state_though_it_has_grown_since(layout, tmp_path):
    buffer = line_buffer(200, optimize_memory_usage=layout)
    walk(buffer, range(10), ends=range(10))
    earlier = SegmentStore(tmp_path).save(buffer)
    before = buffer.sample(50)
    walk(buffer, range(1000, 1150), ends=range(1000, 1150))
    SegmentStore(tmp_path).load(earlier, buffer)
    assert same(buffer.sample(50), before)
    walk(buffer, range(1000, 1150), ends=range(1000, 1150))
    window = buffer.sample(2000)
    assert len(buffer) == 160 and (window.next_obs == window.obs + 1).all()


# ---------------------------------------------------------------- where the bytes lie


def test_pictures_are_kept_as_bytes_and_once_in_the_layout_that_saves_memory():
    template = make_row_template(Image.observation_space, np.int64(0))
    # a picture takes 108; action, reward and two flags take 8 + 4 + 2, all in steps of 8
    assert DerivedNext.bytes_per_row(template) == 108 + 16 + 5
    assert StoredNext.bytes_per_row(template) == 112 + 8 + 4 + 2 + 108 + 6
    for layout in LAYOUTS:
        buffer = buffer_for(Image, 10, optimize_memory_usage=layout)
        for said in experience([Image], some_actions(Image, 12, 1), "SAME_STEP"):
            buffer.add(*said)
        window = buffer.sample(5)
        assert window.obs.dtype == window.next_obs.dtype == np.uint8
        assert window.obs.shape == window.next_obs.shape == (5, 6, 6, 3)


def test_nested_observations_keep_their_types():
    buffer = buffer_for(ScriptedDict, 10, optimize_memory_usage=True)
    for said in experience([ScriptedDict], some_actions(ScriptedDict, 12, 1), "SAME_STEP"):
        buffer.add(*said)
    for obs in buffer.sample(5).obs, buffer.sample(5).next_obs:
        assert (obs["where"]["episode"].dtype, obs["where"]["t"].dtype, obs["image"].dtype) == (np.float32, np.int64, np.uint8)
        assert (obs["where"]["t"].shape, obs["image"].shape) == ((5,), (5, 5, 5, 1))


def allocated(make: Any) -> int:
    """Bytes that a call leaves allocated; zeros count though no page of them is touched."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = make()
        return tracemalloc.get_traced_memory()[0] - before if kept else 0
    finally:
        tracemalloc.stop()


ROWS = 1_000_000
HALF_CHEETAH = Box(-np.inf, np.inf, (17,), np.float64)


def cheetah_buffer(capacity: int = ROWS, num_envs: int = 1, **config: Any) -> ReplayBuffer:
    return ReplayBuffer(HALF_CHEETAH, np.zeros(6, np.float32), capacity, num_envs, config=ReplayConfig(**config))


def test_a_million_rows_take_at_most_a_tenth_more_than_their_numbers():
    template = make_row_template(HALF_CHEETAH, np.zeros(6, np.float32))
    numbers = 2 * 17 * 4 + 6 * 4 + 4 + 1 + 1
    assert StoredNext.bytes_per_row(template) <= 1.1 * numbers
    buffer = []
    assert ROWS * numbers <= allocated(lambda: buffer.append(cheetah_buffer()) or buffer) <= 1.1 * ROWS * numbers


def test_a_million_rows_whose_observations_are_kept_once_take_their_estimated_size():
    said = DerivedNext.bytes_per_row(make_row_template(HALF_CHEETAH, np.zeros(6, np.float32)))
    assert said == 17 * 4 + (6 * 4 + 4 + 2 + 2) + 5
    buffer = []
    taken = allocated(lambda: buffer.append(cheetah_buffer(optimize_memory_usage=True)) or buffer)
    assert ROWS * said <= taken <= 1.01 * ROWS * said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_in_files_are_the_same_and_take_no_memory(layout, tmp_path):
    said = experience(environments(Scripted, 3), some_actions(Scripted, 60, 3), "SAME_STEP")
    in_memory = buffer_for(Scripted, 40, 3, 3, optimize_memory_usage=layout)
    in_files = buffer_for(Scripted, 40, 3, 3, optimize_memory_usage=layout, directory=str(tmp_path / "new" / "folder"))
    for each in said:
        in_memory.add(*each)
        in_files.add(*each)
        if in_memory.ready:
            assert same(in_memory.sample(8), in_files.sample(8))
    buffer = []
    taken = allocated(lambda: buffer.append(cheetah_buffer(100_000, optimize_memory_usage=layout, directory=str(tmp_path))) or buffer)
    assert taken < 6 * 100_000  # where a last observation lies, how many frames belong together


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_buffers_may_keep_their_files_in_the_same_folder(layout, tmp_path):
    ranks = [line_buffer(30, optimize_memory_usage=layout, directory=str(tmp_path)) for _ in range(2)]
    for first, buffer in zip((0, 100), ranks, strict=True):
        walk(buffer, range(first, first + 10))
    for first, buffer in zip((0, 100), ranks, strict=True):
        window = buffer.sample(500)
        assert set(window.obs[:, 0]) == set(range(first, first + 10)) and (window.next_obs == window.obs + 1).all()


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what a process takes")
@pytest.mark.parametrize("prioritized, layout", [(False, False), (False, True), (True, True)])
def test_a_full_buffer_takes_no_more_memory_however_much_is_added(prioritized, layout):
    space = Box(-np.inf, np.inf, (100,), np.float32)
    config = ReplayConfig(prioritized=prioritized, optimize_memory_usage=layout)
    buffer = ReplayBuffer(space, np.zeros(6, np.float32), 20_000, 200, config=config)
    rng = np.random.default_rng(0)
    obs, action, valid, none = rng.random((200, 100)), rng.random((200, 6)), np.ones(200, dtype=bool), np.zeros(200, dtype=bool)

    def add(steps: int) -> None:
        for _ in range(steps):
            end = rng.random(200) < 0.02
            final = obs[end] if end.any() else None
            buffer.add(obs, action, EnvStep(obs, np.ones(200), end, none, valid, end, np.flatnonzero(end), final, {}))
            buffer.sample(64)

    add(105)  # full, and a little more: the number of ends that a full buffer holds varies
    before = resident()
    assert len(buffer) == 20_000
    add(250)
    assert resident() - before < 0.02 * before < 20_000 * 100 * 4 * 5


# ---------------------------------------------------------------- demonstrations


def demonstrations(*rows: Row) -> list[dict[str, Any]]:
    return [
        {
            "obs": row.obs,
            "action": row.action,
            "reward": row.reward,
            "next_obs": row.next_obs,
            "terminated": row.terminated,
            "truncated": row.ended and not row.terminated,
        }
        for row in rows
    ]


def plain(action: np.ndarray) -> np.ndarray:
    return action


@pytest.mark.parametrize("kind", [Scripted, ScriptedDict, Image])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_demonstrations_are_rows_like_others_and_the_last_episode_is_cut_off(kind, n_steps, layout):
    rows = diary(kind(), some_actions(kind, 8, 1)[:, 0], "SAME_STEP")
    buffer = buffer_for(kind, 20, n_steps=n_steps, optimize_memory_usage=layout)
    buffer.extend(iter(demonstrations(*rows)), plain)
    check_contents(buffer, [[*rows[:-1], rows[-1]._replace(ended=True)]])
    assert buffer.ready == 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_episode_that_does_not_go_on_in_the_list_is_cut_there(layout):
    rows = diary(Scripted(period=5), np.zeros(10, dtype=int), "SAME_STEP")
    left = [rows[i] for i in (0, 1, 3, 4, 6)]  # (0, 2) and (1, 0) are missing
    buffer = buffer_for(Scripted, 20, n_steps=3, optimize_memory_usage=layout)
    buffer.extend(demonstrations(*left), plain)
    cut = [row._replace(ended=i in (1, 3, 4)) for i, row in enumerate(left)]
    check_contents(buffer, [cut])
    assert [start.steps for start in starts(cut, 3)] == [2, 1, 0, 0, 1]  # the first episode is terminated at (0, 5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_episode_goes_to_the_ring_with_the_fewest_rows(layout):
    episodes = [
        [row._replace(obs=row.obs + 10 * i, next_obs=row.next_obs + 10 * i, ended=t == steps - 1) for t, row in enumerate(rows[:steps])]
        for i, steps in enumerate((3, 2, 2, 4, 1))
        for rows in [diary(Scripted(period=5), np.zeros(5, dtype=int), "SAME_STEP")]
    ]
    buffer = buffer_for(Scripted, 30, 3, optimize_memory_usage=layout)
    buffer.extend(demonstrations(*(row for episode in episodes for row in episode)), plain)
    # 3, 2, 2 rows; then the first of the two rings with 2 takes 4 more, and the other one
    assert buffer.count.tolist() == [3, 6, 3]
    check_contents(buffer, [episodes[0], episodes[1] + episodes[3], episodes[2] + episodes[4]])


def test_more_demonstrations_go_on_where_the_last_ones_ended():
    shown = [diary(Scripted(period=2, first_episode=i), np.zeros(2, dtype=int), "SAME_STEP") for i in (10, 20, 30)]
    buffer = buffer_for(Scripted, 30, 3)
    for episode in shown:
        buffer.extend(demonstrations(*episode), plain)
    check_contents(buffer, shown)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experience_follows_demonstrations(mode, n_steps, layout):
    shown = diary(Scripted(period=2, first_episode=500), np.zeros(5, dtype=int), "SAME_STEP")
    rows = [shown[:2], shown[2:4], [shown[4]._replace(ended=True)]]  # episode by episode into three rings
    buffer = buffer_for(Scripted, 24, 3, n_steps, optimize_memory_usage=layout)
    buffer.extend(demonstrations(*shown), plain)
    check_contents(buffer, rows)
    actions, envs = some_actions(Scripted, 20, 3), environments(Scripted, 3)
    for i, env in enumerate(envs):
        rows[i] = rows[i] + diary(env(), actions[:, i], mode)
    for t, said in enumerate(experience(envs, actions, mode), 1):
        buffer.add(*said)
        check_contents(buffer, [each[: len(each) - 20 + t] for each in rows])


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_demonstrations_in_the_middle_of_an_episode_cut_it(prioritized, n_steps, layout):
    actions = np.zeros((9, 1), dtype=int)
    rows = diary(Scripted(period=5), actions[:, 0], "SAME_STEP")
    shown = diary(Scripted(period=2, first_episode=500), np.zeros(4, dtype=int), "SAME_STEP")
    said = experience([lambda: Scripted(period=5)], actions, "SAME_STEP")
    buffer = buffer_for(Scripted, 20, n_steps=n_steps, optimize_memory_usage=layout, prioritized=prioritized)
    for each in said[:3]:
        buffer.add(*each)
    buffer.extend(demonstrations(*shown), plain)
    for each in said[3:]:
        buffer.add(*each)
    rows[2] = rows[2]._replace(ended=True)
    check_contents(buffer, [rows[:3] + shown + rows[3:]])


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_current_episodes_are_cut_where_the_environments_are_reset(n_steps, layout):
    buffer = buffer_for(Scripted, 30, 3, n_steps, optimize_memory_usage=layout)
    buffer.cut()  # nothing is under way
    assert len(buffer) == 0
    rows: list[list[Row]] = [[], [], []]
    for start in range(3):
        envs = [lambda i=i, start=start: Scripted(period=2 + i, first_episode=100 * i + 10 * start) for i in range(3)]
        actions = some_actions(Scripted, 7, 3)
        for said in experience(envs, actions, "SAME_STEP"):
            buffer.add(*said)
        buffer.cut()
        for i, env in enumerate(envs):
            *before, last = diary(env(), actions[:, i], "SAME_STEP")
            rows[i] += [*before, last._replace(ended=True)]
        check_contents(buffer, rows)
        assert buffer.ready == len(buffer)


def test_demonstrated_actions_are_kept_as_the_policy_samples_them():
    choices, box = Discrete(3, start=5), Box(-2, 6, (2,), np.float32)
    for space, action, stored in ((choices, 7, 2), (box, np.array([0.0, 6.0]), [-0.5, 1.0])):
        buffer = ReplayBuffer(LINE, np.zeros_like(stored, dtype=np.float32 if space is box else np.int64), 10)
        transition = {"obs": [0.0], "action": action, "reward": 1, "next_obs": [1.0], "terminated": True, "truncated": False}
        buffer.extend([transition], make_distribution(space, "squashed_normal").from_env)
        window = buffer.sample(1)
        assert window.action[0].tolist() == stored
        assert (window.reward[0, 0], window.steps[0], window.next_obs[0, 0]) == (1, 0, 1)


def test_no_demonstrations_are_nothing():
    buffer = line_buffer(10)
    buffer.extend([], plain)
    assert len(buffer) == 0


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("num_envs, n_steps, least", [(1, 1, 2), (3, 1, 6), (3, 4, 15)])
def test_a_buffer_too_small_for_a_window_of_each_environment_is_refused(num_envs, n_steps, least):
    line_buffer(least, num_envs, n_steps)
    with pytest.raises(SettingError, match=f"buffer_size must be at least .* = {least}, got {least - 1}"):
        line_buffer(least - 1, num_envs, n_steps)


def test_settings_may_be_a_mapping_of_known_names():
    assert as_settings("replay", ReplayConfig, {"replace": False}) == ReplayConfig(replace=False)
    with pytest.raises(SettingError, match=r"replay\.prioritised is not a setting; did you mean prioritized"):
        as_settings("replay", ReplayConfig, {"prioritised": True})


@pytest.mark.parametrize(("name", "said"), [("a" * 300, "… is too long for a path"), ("a\0b", " is not a valid path: it contains a NUL")])
def test_a_folder_that_cannot_exist_is_refused(name, said):
    with pytest.raises(SettingError) as refusal:
        ReplayConfig(directory=name)
    assert str(refusal.value) == f"replay.directory {name[:60]!r}{said}"


@pytest.mark.parametrize("wrong", [{"alpha": 1.1}, {"alpha": -0.1}, {"beta": 2}, {"beta": "x"}])
def test_exponents_are_between_0_and_1(wrong):
    with pytest.raises(SettingError, match=f"replay.{next(iter(wrong))} must be"):
        ReplayConfig(**wrong)


def frames_of_four(period, first_episode=0):
    """A picture of (episode, t), four of them stacked, as `make_env` stacks them."""
    return gym.wrappers.FrameStackObservation(Image(period=period, first_episode=first_episode), 4)


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_stacked_frames_are_stored_once_and_come_back_as_stacks(num_envs, mode, n_steps):
    periods = {1: [6], 3: [1, 2, 7]}[num_envs]
    envs = [lambda i=i, period=period: frames_of_four(period, 3 * i) for i, period in enumerate(periods)]
    actions = np.zeros((60, num_envs), dtype=np.int64)
    said = experience(envs, actions, mode)
    space, action = envs[0]().observation_space, np.zeros((), dtype=np.int64)
    whole, once = (
        ReplayBuffer(
            space,
            action,
            10 * num_envs,
            num_envs,
            n_steps=n_steps,
            config=ReplayConfig(optimize_memory_usage=saving),
            frames=4,
            seed=3,
        )
        for saving in (False, True)
    )
    for obs, action, step in said:  # the rings wrap several times
        whole.add(obs, action, step)
        once.add(obs, action, step)
        if once.ready:
            assert once.ready == whole.ready
            ours, theirs = once.sample(16), whole.sample(16)
            for name in ("obs", "next_obs", "action", "reward", "steps"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert once.layout.observations.records.nbytes == num_envs * (10 + 4) * 6 * 6 * 3
    assert ours.obs.dtype == np.uint8 and ours.obs.shape == (16, 4, 6, 6, 3)


def test_frames_that_do_not_begin_with_the_first_one_are_refused():
    space = frames_of_four(5).observation_space
    buffer = ReplayBuffer(space, np.zeros((), np.int64), 8, config=ReplayConfig(optimize_memory_usage=True), frames=4)
    obs = np.arange(4, dtype=np.uint8).reshape(1, 4, 1, 1, 1) * np.ones((1, 1, 6, 6, 3), np.uint8)
    flags = np.zeros(1, dtype=bool)
    row = storage.Row(storage.Observation(obs), np.zeros(1, np.int64), np.zeros(1), flags, flags)
    with pytest.raises(SettingError, match=r"replay\.optimize_memory_usage"):
        buffer.write(np.array([0]), row, storage.Observation(obs))


# ---------------------------------------------------------------- lost rows


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lost_steps_cut_the_episode_that_they_were_lost_from(layout, n_steps, prioritized):
    actions = some_actions(Scripted, 20, 2)
    envs = [lambda i=i: Scripted(period=5 + i, first_episode=100 * i) for i in range(2)]
    said = experience(envs, actions, "SAME_STEP")
    rows: list[list[Row]] = [diary(env(), actions[:, i], "SAME_STEP") for i, env in enumerate(envs)]
    buffer = buffer_for(Scripted, 60, 2, n_steps, prioritized=prioritized, optimize_memory_usage=layout)
    lost = {(0, 3), (0, 11), (0, 12), (1, 0), (1, 7), (1, 19)}  # in the middle, twice in a row, before there is any, at the end
    for t, (obs, action, step) in enumerate(said):
        valid = np.array([(i, t) not in lost for i in range(2)])
        kept = [i for i in step.ended if valid[i]]
        final = step.final_obs[[list(step.ended).index(i) for i in kept]] if kept else None
        step = step._replace(
            valid=valid,
            terminated=step.terminated & valid,
            truncated=step.truncated & valid,
            ended=np.array(kept, dtype=int),
            final_obs=final,
        )
        buffer.add(obs, action, step)
        expected = []
        for i in range(2):
            each = [row._replace(ended=row.ended or ((i, s + 1) in lost and s + 1 <= t)) for s, row in enumerate(rows[i][: t + 1])]
            expected.append([None if (i, s) in lost else row for s, row in enumerate(each)])
        check_contents(buffer, expected)


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reset_rows_of_next_step_change_nothing_of_the_rows_before(layout, n_steps):
    with_resets, without = (buffer_for(Scripted, 30, n_steps=n_steps, optimize_memory_usage=layout) for _ in range(2))
    for obs, action, step in experience([Scripted], some_actions(Scripted, 20, 1), "NEXT_STEP"):
        with_resets.add(obs, action, step)
        if step.valid.all():
            without.add(obs, action, step)
    assert same(with_resets.sample(100), without.sample(100))


@pytest.mark.parametrize("frames", [256, 257, 300])
def test_many_stacked_frames_are_stored_once_and_come_back(frames):
    space, none = gym.spaces.Box(-1e9, 1e9, (frames, 1), np.float32), np.zeros(1, bool)
    plain, thrifty = (
        ReplayBuffer(space, np.zeros((), np.int64), 1_000, frames=frames, config=ReplayConfig(optimize_memory_usage=saves))
        for saves in (False, True)
    )
    stack = np.zeros((1, frames, 1), np.float32)
    for t in range(1, 500):
        after = np.concatenate([stack[:, 1:], np.full((1, 1, 1), t, np.float32)], 1)
        for buffer in (plain, thrifty):
            buffer.add(stack, np.zeros(1, np.int64), EnvStep(after, np.zeros(1), none, none, ~none, none, np.zeros(0, int), None, {}))
        stack = after
    torch.manual_seed(0)
    rows = plain.sample(64).obs
    torch.manual_seed(0)
    assert np.array_equal(rows, thrifty.sample(64).obs)
