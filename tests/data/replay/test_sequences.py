"""Sequences from a replay buffer, against the plainest loop over what happened."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.data.replay.sampling import Sequences, sequence_errors
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.errors import SettingError
from tests.data.recordings import LAYOUTS, MODES, diary, environments, experience, some_actions
from tests.environments import Scripted

STEPS = 60


def memory_of(episode, t):
    """A policy's memory that tells where it was."""
    return np.array([1000 * episode + t, -t], np.float32)


def recorded(num_envs, mode, n_steps, burn_in, length, capacity=1000, **config):
    """A buffer with `STEPS` steps of scripted environments, and the rows of each."""
    envs, actions = environments(Scripted, num_envs), some_actions(Scripted, STEPS, num_envs)
    sequences = Sequences(burn_in, length, (np.zeros(2, np.float32),))
    buffer = ReplayBuffer(
        Scripted.observation_space, np.int64(0), capacity, num_envs, n_steps=n_steps, config=ReplayConfig(**config), sequences=sequences
    )
    for obs, action, step in experience(envs, actions, mode):
        memory = np.stack([memory_of(*each) for each in obs])
        buffer.add(obs, action, copy.deepcopy(step), (memory,))
    return buffer, [[row for row in diary(make(), actions[:, i], mode) if row is not None] for i, make in enumerate(envs)]


def slots_of(rows, number):
    """Rows in order, and behind the last one of an episode what was seen then; None for an observation without a row."""
    slots = []
    for row in rows:
        slots.append((row.obs, row))
        if row.ended:
            slots.append((row.next_obs, None))
    return slots[:number]


@pytest.mark.parametrize("optimize_memory_usage", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(("n_steps", "burn_in", "length"), [(1, 0, 4), (1, 2, 3), (3, 1, 5), (2, 0, 1)])
@pytest.mark.parametrize("capacity", [1000, 51])
def test_a_sequence_is_what_happened_one_row_after_the_other(capacity, n_steps, burn_in, length, num_envs, mode, optimize_memory_usage):
    buffer, rows = recorded(num_envs, mode, n_steps, burn_in, length, capacity, optimize_memory_usage=optimize_memory_usage)
    total = burn_in + length + n_steps
    kept = [each[-buffer.length :] for each in rows]
    assert buffer.ready == sum(max(0, len(each) - (total - 1)) for each in kept)
    assert len(np.unique(buffer.sample(3000 * length).rows)) == buffer.ready  # each of them comes
    num = 60
    window = buffer.sample(num * length)
    assert window.obs.shape == (total * num, 2) and window.memory[0].shape == (num, 2)
    for k in range(num):
        ring = int(window.rows[k]) // buffer.slots
        lane = slice(k, None, num)
        obs, start = window.obs[lane], window.episode_start[:, k]
        first = next(i for i, row in enumerate(kept[ring]) if np.array_equal(row.obs, obs[0]))
        slots = slots_of(kept[ring][first:], total)
        np.testing.assert_array_equal(obs, [seen for seen, _ in slots])
        np.testing.assert_array_equal(window.memory[0][k], memory_of(*obs[0]))
        np.testing.assert_array_equal(start, [False, *(row is None for _, row in slots[:-1])])
        for slot, (_, row) in enumerate(slots):
            learned = window.weight[lane][slot] > 0
            assert learned == (row is not None and burn_in <= slot < burn_in + length)
            if learned:
                i = next(i for i, each in enumerate(kept[ring]) if each is row)
                check_row(window, kept[ring], i, k + slot * num, obs, num, n_steps)
    assert window.weight.sum() == pytest.approx(1, abs=1e-5)
    assert len(np.unique(window.weight)) <= 2


def check_row(window, rows, i, place, obs, num, n_steps):
    """Reward, length and successor of the window that begins with row i, at a place of the batch."""
    ahead = []
    for row in rows[i : i + n_steps]:
        ahead.append(row)
        if row.ended:
            break
    assert window.action[place] == rows[i].action
    expected = [row.reward for row in ahead] + [0.0] * (n_steps - len(ahead))
    np.testing.assert_allclose(window.reward[place], np.float32(expected))
    assert window.steps[place] == (0 if ahead[-1].terminated else len(ahead))
    if not ahead[-1].terminated:
        np.testing.assert_array_equal(obs[window.successor[place] // num], ahead[-1].next_obs)
        assert window.successor[place] % num == place % num


def test_a_sequence_begins_where_all_of_it_is_there():
    sequences = Sequences(1, 2, (np.zeros(1, np.float32),))
    buffer = ReplayBuffer(Scripted.observation_space, np.int64(0), 20, 1, sequences=sequences)
    envs, actions = environments(Scripted, 1), some_actions(Scripted, 30, 1)
    ready = []
    for obs, action, step in experience(envs, actions, "SAME_STEP"):
        buffer.add(obs, action, step, (np.zeros((1, 1), np.float32),))
        ready.append(buffer.ready)
    assert ready == [0, 0, 0, *range(1, 18), *[17] * 10]  # of 20 rows the newest three begin none


def test_prioritized_sequences_are_drawn_by_the_errors_of_their_rows():
    buffer, _ = recorded(1, "SAME_STEP", 1, 0, 3, prioritized=True, alpha=1.0, beta=0.0)
    assert buffer.priorities.tree.total == buffer.ready == STEPS - 3  # all new, with priority 1
    window = buffer.sample(9)
    buffer.update(window.rows, lambda: torch.tensor([1e4, 1.0, 1.0]))
    drawn = buffer.sample(300).rows
    assert (drawn == window.rows[0]).mean() > 0.95
    assert buffer.priorities.tree[np.array([STEPS - 3, STEPS - 2, STEPS - 1])].tolist() == [0, 0, 0]


def test_overwritten_rows_begin_no_sequence():
    buffer, rows = recorded(1, "SAME_STEP", 1, 0, 3, capacity=20, prioritized=True)
    window = buffer.sample(600)
    drawn = {tuple(obs) for obs in window.obs[: len(window.rows)].tolist()}
    assert drawn == {tuple(row.obs.tolist()) for row in rows[0][-20:-3]}


def test_a_saved_position_counts_no_open_windows_of_sequences():
    buffer, _ = recorded(1, "SAME_STEP", 2, 1, 3)
    position, ready = buffer.position(), buffer.ready
    assert position["open"].tolist() == [0] and 0 < ready < len(buffer)
    buffer.continue_from(position)
    assert buffer.ready == ready


def test_the_error_of_a_sequence_is_near_its_largest():
    errors, weight = torch.tensor([9.0, 9.0, 1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 0.0, 0.1, 0.1, 0.1, 0.0])
    # of the first lane 9 (burned in), 1, 3, of the second 9, 2, and 4 that is no row
    assert sequence_errors(errors, weight, 2).tolist() == pytest.approx([0.9 * 3 + 0.1 * 2, 2.0])


def test_a_buffer_too_small_for_a_sequence_is_refused():
    with pytest.raises(
        SettingError, match=r"buffer_size must be at least num_envs \* \(burn_in \+ sequence_length \+ n_steps\) = 2 \* 8 = 16"
    ):
        ReplayBuffer(Scripted.observation_space, np.int64(0), 15, 2, n_steps=2, sequences=Sequences(1, 5, ()))
