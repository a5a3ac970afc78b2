"""Batches that mix demonstrations with the run's own experience."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.data.replay.sampling import Sequences
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.errors import SettingError
from tests.data.recordings import LAYOUTS
from tests.environments import Scripted

SEQUENCES = Sequences(1, 3, (np.zeros(1, np.float32),))


def episodes(*lengths: int, first: int = 0) -> list[dict[str, Any]]:
    """Steps that observe (episode, t) and pay 10 · episode + t; every other episode, from the first on, terminates."""
    return [
        {
            "obs": np.array([k, t], np.float32),
            "action": t % 3,
            "reward": 10.0 * k + t,
            "next_obs": np.array([k, t + 1], np.float32),
            "terminated": t + 1 == length and k % 2 == 0,
            "truncated": t + 1 == length and k % 2 == 1,
        }
        for k, length in enumerate(lengths, first)
        for t in range(length)
    ]


def plain(action: np.ndarray) -> np.ndarray:
    return action


def made(
    own: list[Any], shown: list[Any], share: float = 0.25, num_envs: int = 1, capacity: int = 100, *, n_steps: int = 1, **config: Any
) -> Any:
    """Rows of a run's own and demonstrations."""
    settings: dict[str, Any] = {"n_steps": n_steps, "sequences": config.pop("sequences", None)}
    kept = ReplayConfig(**config)
    beside = ReplayConfig(**{**config, "prioritized": False})
    space, action = Scripted.observation_space, np.int64(0)
    demonstrations = ReplayBuffer(space, action, max(len(shown), n_steps + 1), config=beside, seed=7, **settings)
    demonstrations.extend(shown, plain)
    mixed = ReplayBuffer(space, action, capacity, num_envs, config=kept, demonstrations=demonstrations, share=share, **settings)
    mixed.extend(own, plain)
    return mixed


def test_each_batch_has_its_share_of_demonstrations():
    for share, batch_size, drawn in ((0.25, 8, 2), (0.5, 7, 4), (0.1, 5, None), (0.3, 10, 3), (0.01, 100, 1), (0.99, 100, 99)):
        mixed = made(episodes(30), episodes(9, first=100), share)
        if drawn is None:  # half a row, to the even number
            with pytest.raises(SettingError, match=r"demonstration_share 0\.1 of 5 rows is 0; a batch must hold both"):
                mixed.sample(batch_size)
            continue
        for _ in range(20):
            window = mixed.sample(batch_size)
            assert (window.obs[:, 0] >= 100).tolist() == (window.rows >= 100).tolist() == [False] * (batch_size - drawn) + [True] * drawn
            assert window.weight.tolist() == pytest.approx([1 / batch_size] * batch_size)


@pytest.mark.parametrize("optimize_memory_usage", LAYOUTS)
def test_demonstrations_are_never_overwritten_and_all_come_alike(optimize_memory_usage):
    mixed = made(episodes(4), episodes(2, 3, first=100), 0.5, capacity=4, optimize_memory_usage=optimize_memory_usage)
    mixed.extend(episodes(*[5] * 20, first=20), plain)
    window = mixed.sample(2000)
    own, shown = window.obs[:1000], window.obs[1000:]
    assert {tuple(obs) for obs in own.tolist()} == {(39, 1), (39, 2), (39, 3), (39, 4)} and len(mixed) == 4
    places, counts = np.unique(shown, axis=0, return_counts=True)
    assert places.tolist() == [[100, 0], [100, 1], [101, 0], [101, 1], [101, 2]]
    assert counts.min() > 150  # 200 each on average


@pytest.mark.parametrize("optimize_memory_usage", LAYOUTS)
def test_windows_of_demonstrations_end_with_their_episodes(optimize_memory_usage):
    mixed = made(episodes(30), episodes(2, 4, first=100), 0.5, n_steps=3, optimize_memory_usage=optimize_memory_usage)
    window = mixed.sample(400)
    by_hand = {  # rewards of three steps, how many count (0 where the episode terminated), what is seen then
        (100, 0): ([1000, 1001, 0], 0, (100, 2)),
        (100, 1): ([1001, 0, 0], 0, (100, 2)),
        (101, 0): ([1010, 1011, 1012], 3, (101, 3)),
        (101, 1): ([1011, 1012, 1013], 3, (101, 4)),
        (101, 2): ([1012, 1013, 0], 2, (101, 4)),
        (101, 3): ([1013, 0, 0], 1, (101, 4)),
    }
    found = {tuple(window.obs[i]): (window.reward[i].tolist(), int(window.steps[i]), tuple(window.next_obs[i])) for i in range(200, 400)}
    assert found == by_hand
    i = next(i for i in range(200) if window.obs[i, 1] == 7)
    assert (window.reward[i].tolist(), window.steps[i], tuple(window.next_obs[i])) == ([7, 8, 9], 3, (0, 10))


def test_the_single_steps_of_a_batch_come_in_its_order():
    mixed = made(episodes(30), episodes(2, 4, first=100), 0.5, n_steps=3)
    own, shown = np.array([4, 29]), np.array([2, 0]) + mixed.first_demonstration
    row, next_seen, length = mixed.steps(np.array([own[0], shown[0], shown[1], own[1]]))
    assert row.reward.reshape(4, 3).tolist() == [[4, 5, 6], [1010, 1011, 1012], [1000, 1001, 1001], [29] * 3]
    assert next_seen.obs.reshape(4, 3, 2)[1].tolist() == [[101, 1], [101, 2], [101, 3]]
    assert length.tolist() == [3, 3, 2, 1]


def test_only_rows_of_its_own_have_priorities():
    mixed = made(episodes(10), episodes(10, first=100), 0.5, prioritized=True, alpha=1.0, beta=1.0)
    mixed.priorities.tree[np.arange(10)] = [1.0] + [0.0] * 8 + [3.0]
    window = mixed.sample(8)
    assert window.rows[:4].tolist() == [0, 9, 9, 9]
    # (10 · P)^-1 over the largest, 1 and 1/3, of each of eight rows
    assert window.weight.tolist() == pytest.approx([1 / 8, *[1 / 24] * 3, *[1 / 8] * 4])
    mixed.update(window.rows, lambda: torch.arange(8.0))
    assert mixed.priorities.tree[np.array([0, 9])].tolist() == pytest.approx([1e-6, 3], abs=1e-5)
    assert mixed.priorities.tree.total == pytest.approx(3, abs=1e-4)
    assert mixed.age(window.rows).tolist() == [9, 0, 0, 0]


@pytest.mark.parametrize("n_steps", [1, 2])
@pytest.mark.parametrize("prioritized", [False, True])
def test_sequences_of_both_buffers_are_concatenated(n_steps, prioritized):
    mixed = made(
        episodes(3, 5, 20), episodes(4, 9, 7, first=100), 0.4, 2, 60, n_steps=n_steps, sequences=SEQUENCES, prioritized=prioritized
    )
    parts = [copy.deepcopy(buffer) for buffer in (mixed, mixed.demonstrations)]
    parts[0].demonstrations = None
    own, shown = parts[0].sample(9), parts[1].sample(6)  # three and two sequences of three rows
    batch = mixed.sample(15)
    total = SEQUENCES.slots(n_steps)
    assert batch.obs.shape == (5 * total, 2) and batch.episode_start.shape == (total, 5) and batch.memory[0].shape == (5, 1)
    assert batch.rows.tolist() == [*own.rows, *(shown.rows + 60)] and batch.source[3::5].tolist() == (shown.source[::2] + 60).tolist()
    assert batch.weight.sum() == pytest.approx(1)
    for window, lanes, first in ((own, 3, 0), (shown, 2, 3)):
        for k in range(lanes):
            here, there = slice(k, None, lanes), slice(first + k, None, 5)
            for name in ("obs", "action", "reward", "steps", "next_obs"):
                np.testing.assert_array_equal(getattr(batch, name)[there], getattr(window, name)[here])
            np.testing.assert_allclose(batch.weight[there], window.weight[here] * lanes / 5, rtol=1e-6)
            np.testing.assert_array_equal(batch.episode_start[:, first + k], window.episode_start[:, k])
            np.testing.assert_array_equal(batch.obs[batch.successor[there]], window.obs[window.successor[here]])
    row, _, _ = mixed.steps(batch.source)
    assert (row.observation.obs[:: mixed.n_steps] >= 100)[:, 0].reshape(total, 5).tolist() == [[False] * 3 + [True] * 2] * total
    if prioritized:
        mixed.update(batch.rows, lambda: torch.ones(5))


def test_a_share_of_sequences_is_one_of_each_kind_at_least():
    mixed = made(episodes(20), episodes(20, first=100), 0.1, sequences=SEQUENCES)
    with pytest.raises(SettingError, match=r"demonstration_share 0\.1 of 3 sequences of 3 rows is 0; a batch must hold both"):
        mixed.sample(9)


def test_draws_continue_from_a_saved_position():
    one, other = (made(episodes(30), episodes(20, first=100), 0.5) for _ in range(2))
    for _ in range(3):
        one.sample(10)
    other.continue_from(one.position())
    drawn = one.sample(10)
    assert drawn.rows.tolist() == other.sample(10).rows.tolist()
    without = {name: value for name, value in one.position().items() if name != "shown"}
    other.continue_from(without)  # saved when nothing was shown
    assert other.sample(10).rows[:5].tolist() == one.sample(10).rows[:5].tolist()


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5, float("nan"), True, "0.5"])
def test_a_share_is_more_than_nothing_and_less_than_all(share):
    with pytest.raises(SettingError, match=r"^replay\.demonstration_share must be a number > 0 and < 1, got "):
        ReplayConfig(demonstrations="a/b-v0", demonstration_share=share)


@pytest.mark.parametrize("demonstrations", ["", [], 3, {"a": 1}])
def test_demonstrations_have_a_name(demonstrations):
    with pytest.raises(SettingError, match=r"^replay\.demonstrations must be the name of a dataset, got "):
        ReplayConfig(demonstrations=demonstrations)
