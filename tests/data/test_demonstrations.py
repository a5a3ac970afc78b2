"""Rows of demonstrated episodes: read, cut into sequences, split."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from lightning_rl.data.demonstrations import EpisodeRows, Rows, read_rows, split_by_episode
from lightning_rl.distributions import make_distribution
from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces
from lightning_rl.types import tree_leaves
from tests.environments import Choosy, legal
from tests.experts import played

SEEN = Box(-np.inf, np.inf, (1,), np.float32)


def counted(*lengths: int) -> list[Rows]:
    """Episodes whose observations count all their rows."""
    first = np.cumsum([0, *lengths])
    return [
        Rows(np.arange(at, at + length, dtype=np.float32)[:, None], np.zeros(length, dtype=np.int64), ())
        for at, length in zip(first, lengths, strict=False)
    ]


def test_sequences_are_cut_inside_their_episodes_and_hold_each_row_once():
    rows = EpisodeRows(counted(5, 2, 4), 2)
    assert (len(rows), rows.num_rows, rows.num_episodes) == (6, 11, 3)
    batch = rows.batch(np.arange(6))
    seen, weight = batch.obs.view(2, 6), batch.weight.view(2, 6)
    assert seen[0].tolist() == [0, 2, 4, 5, 7, 9]  # what begins each
    assert seen[1].tolist() == [1, 3, 4, 6, 8, 10]  # the third has one row, which fills its second place too
    assert (weight > 0).tolist() == [[True] * 6, [True, True, False, True, True, True]]
    assert weight[weight > 0].tolist() == pytest.approx([1 / 11] * 11)
    assert batch.episode_start.tolist() == [[True] * 6, [False] * 6]


def test_without_memory_a_sequence_is_a_row():
    rows = EpisodeRows(counted(3, 0, 2))
    batch = rows.batch(np.array([4, 0, 4]))
    assert len(rows) == 5 and batch.obs.flatten().tolist() == [4, 0, 4]
    assert batch.weight.tolist() == pytest.approx([1 / 3] * 3) and batch.episode_start.tolist() == [[True] * 3]


def test_no_episodes_are_no_rows():
    rows = EpisodeRows([], 4)
    assert (len(rows), rows.num_rows) == (0, 0)


def test_episodes_are_read_as_they_are_kept():
    env = gym.make("tests.environments:Anything-v0", observation="dict", action="nested")
    spaces, (episode, *_) = Spaces(env.observation_space, env.action_space), played(env, 1)
    distribution = make_distribution(spaces.action)
    rows = read_rows("it", episode.obs, episode.action, None, spaces, distribution)
    assert {len(leaf) for leaf in tree_leaves((rows.obs, rows.action))} == {5}
    assert np.array_equal(rows.obs["picture"], episode.obs["picture"][:-1]) and rows.obs["picture"].dtype == np.uint8
    there = distribution.to_env(rows.action)
    assert all(np.allclose(a, b) for a, b in zip(tree_leaves(there), tree_leaves(episode.action), strict=True))
    log_prob, _ = distribution.evaluate(torch.zeros(5, distribution.num_inputs), *_tensors(rows))
    assert log_prob.isfinite().all()


def _tensors(rows):
    batch = EpisodeRows([rows]).batch(np.arange(5))
    return batch.action, batch.action_mask


@pytest.mark.parametrize(
    ("action", "form"),
    [
        ("discrete", lambda mask: mask),
        ("multi-discrete", lambda mask: (mask[:, :2], mask[:, 2:])),
        ("hybrid", lambda mask: {"choice": mask}),
        ("nested", lambda mask: (None, {"pair": (mask[:, :2], mask[:, 2:6]), "bits": mask[:, 6:10]}, mask[:, 10:])),
    ],
)
def test_masks_are_read_in_all_their_forms_and_rule_over_the_actions(action, form):
    env = gym.make("tests.environments:Choosy-v0", action=action)
    (episode,) = played(env, 1)
    spaces = Spaces(env.observation_space, env.action_space, masked=True)
    distribution = make_distribution(spaces.action)
    rows = read_rows("it", episode.obs, episode.action, form(episode.action_mask), spaces, distribution)
    assert len(episode.action_mask) == 4  # with that of the last observation, where nothing is done
    assert rows.action_mask.tolist() == [legal([0, t], Choosy.sizes[action]).tolist() for t in range(3)]
    with pytest.raises(SettingError, match="it takes an action in step 0 that its environment does not allow"):
        read_rows("it", episode.obs, episode.action, ~episode.action_mask, spaces, distribution)


@pytest.mark.parametrize(
    ("action", "step"),
    [
        (np.array([0, 1, 3]), 0),  # counted from 1
        (np.array([1, 4, 3]), 1),
        (np.array([1, 2, -3]), 2),
    ],
)
def test_choices_out_of_range_are_refused(action, step):
    spaces = Spaces(SEEN, Discrete(3, start=1))
    with pytest.raises(SettingError, match=f"it takes an action in step {step} that"):
        read_rows("it", np.zeros((4, 1)), action, None, spaces, make_distribution(spaces.action))


@pytest.mark.parametrize(
    ("space", "obs", "action", "words"),
    [
        (Discrete(2), np.zeros((3, 1)), np.zeros(3, int), r"shape \(3, 1\) instead of \(4, 1\)"),
        (Discrete(2), np.zeros((4, 2)), np.zeros(3, int), r"shape \(4, 2\) instead of \(4, 1\)"),
        (Discrete(2), {"a": np.zeros((4, 1))}, np.zeros(3, int), "trees differ"),
        (Discrete(2), np.full((4, 1), np.nan), np.zeros(3, int), "NaN or infinite"),
        (MultiDiscrete([2, 3]), np.zeros((4, 1)), np.array([[1, 2], [1, 2], [2, 1]]), "an action in step 2"),
        (Box(-1, 1, (2,)), np.zeros((4, 1)), np.array([[0, 0], [0, np.inf], [0, 0]]), "an action in step 1"),
        (Box(-1, 1, (2,)), np.zeros((4, 1)), {"a": np.zeros((3, 2))}, "does not fit"),
    ],
)
def test_what_does_not_fit_the_spaces_is_refused(space, obs, action, words):
    with pytest.raises(SettingError, match=f"demonstration 7 .*{words}"):
        read_rows("demonstration 7", obs, action, None, Spaces(SEEN, space), make_distribution(space))


def test_a_split_keeps_episodes_whole_and_holds_back_no_more_than_asked():
    lengths = [10, 30, 5, 20, 35, 1, 9]
    for seed in range(50):
        learned, held = split_by_episode(lengths, 0.2, seed)
        assert sorted(learned + held) == list(range(7))
        assert 0 < sum(lengths[episode] for episode in held) <= 22
        assert (learned, held) == split_by_episode(lengths, 0.2, seed)
    assert len({tuple(split_by_episode(lengths, 0.2, seed)[1]) for seed in range(50)}) > 3


def test_a_split_of_equal_episodes_is_exact_and_of_one_episode_holds_nothing_back():
    assert [len(part) for part in split_by_episode([50] * 10, 0.2, 0)] == [8, 2]
    assert split_by_episode([100], 0.5, 0) == ([0], [])
    assert split_by_episode([3, 3], 0.0, 0) == ([0, 1], [])
