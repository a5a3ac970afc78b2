"""Which demonstrations come when."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rl.checkpoints.archive import to_arrays, to_plain
from lightning_rl.data.demonstrations import (
    DemonstrationDataset,
    DemonstrationDraws,
    DemonstrationSettings,
    EpisodeRows,
    NoCollector,
    ShuffledOrder,
)
from lightning_rl.errors import SettingError
from lightning_rl.networks.normalization import ObservationNormalizer
from tests.data.test_demonstrations import SEEN, counted


def dataset(rows: int = 10, length: int = 1, seed: int = 0, rank: int = 0, ranks: int = 1, **settings: Any) -> DemonstrationDataset:
    """One episode to learn from and one of 3 rows to validate."""
    given = {"batch_size": 4, "updates_per_iteration": 5, "max_updates": 12, "validation_fraction": 0.2, "split_seed": 0} | settings
    learned, held = (EpisodeRows(counted(number), length) for number in (rows, 3))
    config = DemonstrationSettings(**given, sequence_length=length)
    draws = DemonstrationDraws(learned, config.batch_size, seed, torch.device("cpu"), rank, ranks)
    return DemonstrationDataset(NoCollector(SEEN), draws, held, config)


def iterations(data: DemonstrationDataset) -> list[list[list[float]]]:
    """The rows of each minibatch of each iteration of a run."""
    found: list[list[list[float]]] = []
    for batches in data:
        data.begin_iteration(sum(map(len, found)), 0.0)
        found.append([batch.obs.flatten().tolist() for batch in batches])
        if sum(map(len, found)) >= data.settings.max_updates:
            return found
    raise AssertionError


def test_all_rows_come_once_before_any_comes_again_in_another_order():
    data = dataset()
    found = iterations(data)
    assert [len(batches) for batches in found] == [5, 5, 2] and len(data) == 3
    rows = [row for batches in found for batch in batches for row in batch]
    assert {len(batch) for batches in found for batch in batches} == {4}
    passes = [rows[at : at + 10] for at in range(0, 40, 10)]
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert len(set(map(tuple, passes))) == 4
    assert data.metrics() == {"train/epochs": pytest.approx(4.8)}


def test_the_seed_sets_the_order():
    assert iterations(dataset(seed=3)) == iterations(dataset(seed=3)) != iterations(dataset(seed=4))


def test_ranks_share_the_rows_of_a_pass():
    found = [iterations(dataset(rows=16, rank=rank, ranks=2)) for rank in (0, 1)]
    first = Counter(row for each in found for batch in each[0][:2] for row in batch)
    assert first == Counter(range(16))


def test_a_minibatch_of_more_rows_than_there_are_has_all_of_them():
    assert {tuple(sorted(batch)) for batch in iterations(dataset(rows=3, batch_size=7))[0]} == {(0, 1, 2)}


def test_with_a_memory_a_minibatch_holds_sequences():
    (batches, *_) = iterations(dataset(length=2, max_updates=1))
    assert len(batches[0]) == 4
    first, then = np.reshape(batches[0], (2, 2))
    assert (then == first + 1).all() and (first % 2 == 0).all()
    with pytest.raises(SettingError, match=r"memory\.sequence_length 5 is longer than batch_size 4"):
        dataset(length=5)


def test_validation_is_all_that_is_held_back_once():
    data = dataset(length=2)
    ((count, batch),) = data.validation()
    assert count == 3 and batch.obs.flatten().tolist() == [0, 2, 1, 2] and batch.weight.tolist() == pytest.approx([1 / 3] * 3 + [0])


@pytest.mark.parametrize("taken", [0, 3, 7, 10, 23])
def test_an_order_continues_from_a_saved_state(taken):
    order = ShuffledOrder(7, seed=1)
    order.take(taken) if taken else None
    state = to_plain(order.get_state())
    expected, other = order.take(20).tolist(), ShuffledOrder(7, seed=2)
    assert other.take(20).tolist() != expected
    assert other.set_state(to_arrays(state)) is None
    assert other.take(20).tolist() == expected and other.epochs == order.epochs == (taken + 20) / 7


def test_an_order_of_another_size_starts_again_and_gives_the_reason():
    order = ShuffledOrder(7, seed=1)
    assert order.set_state(to_arrays(to_plain(ShuffledOrder(8, seed=1).get_state()))) == "the checkpoint has 8 sequences, not 7"
    assert sorted(order.take(7)) == list(range(7))


def test_without_environments_nothing_is_counted_or_normalized():
    collector = NoCollector(SEEN)
    normalizer = ObservationNormalizer(SEEN)
    rollout = collector.rollout()
    normalizer.gather(rollout.obs, rollout.valid)
    assert float(normalizer.statistics[0].count) == pytest.approx(1e-4)
    assert (collector.env_steps, collector.rows, collector.metrics(), collector.take_notices()) == (0, 0, {}, [])
    assert collector.set_state(collector.get_state()) is None
