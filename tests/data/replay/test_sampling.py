"""The tree of sums against plain running sums, and prioritized draws against the formulas."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch

from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.data.replay.sampling import Prioritized, SumTree
from lightning_rl.data.replay.storage import ReplayConfig
from tests.data.recordings import LAYOUTS, MODES, check_contents, diary, environments, experience, line_buffer, some_actions, walk
from tests.environments import Scripted

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100)


def by_running_sums(numbers: np.ndarray, sums: np.ndarray) -> list[int]:
    """The first place whose running sum is greater, or the last number that is not 0."""
    running, last = list(accumulate(numbers)), int(np.flatnonzero(numbers)[-1])
    return [next((place for place, total in enumerate(running) if total > s), last) for s in sums]


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_is_found_where_the_running_sum_passes_it(size):
    rng = np.random.default_rng(size)
    tree, numbers = SumTree(size), np.zeros(size)
    for _ in range(10):
        places = rng.integers(0, size, rng.integers(1, 2 * size + 1))
        values = rng.integers(0, 5, len(places)).astype(float)  # whole numbers: their sums are exact
        for place, value in zip(places, values, strict=True):  # of a place named twice the last number counts
            numbers[place] = value
        tree[places] = values
        assert tree[np.arange(size)].tolist() == numbers.tolist()
        assert tree.total == numbers.sum()
        if tree.total:
            sums = np.concatenate([np.arange(tree.total), tree.total * rng.random(50)])
            assert tree.find(sums).tolist() == by_running_sums(numbers, sums)


@pytest.mark.parametrize("size", SIZES)
def test_rounding_finds_neighbours_but_never_a_place_that_holds_nothing(size):
    rng = np.random.default_rng(size)
    for _ in range(20):
        numbers = np.where(rng.random(size) < 0.5, 0, 10.0 ** rng.uniform(-8, 8, size))
        numbers[rng.integers(size)] = 0.1
        tree = SumTree(size)
        tree[np.arange(size)] = numbers
        assert tree.total == pytest.approx(numbers.sum(), rel=1e-12)
        sums = np.array([0.0, np.nextafter(tree.total, 0), tree.total, np.nextafter(tree.total, np.inf), *(tree.total * rng.random(50))])
        found = tree.find(sums)
        assert (numbers[found] > 0).all()
        assert found[0] == np.flatnonzero(numbers)[0]
        running = numbers.cumsum()
        inside, tiny = sums[4:], 1e-9 * tree.total
        assert (inside <= running[found[4:]] + tiny).all() and (inside >= (running - numbers)[found[4:]] - tiny).all()


def test_numbers_can_all_be_one_or_all_but_one_be_nothing():
    tree = SumTree(6)
    tree[np.arange(6)] = 1.0
    assert tree.find(np.arange(6) + 0.5).tolist() == [0, 1, 2, 3, 4, 5]
    tree[np.array([0, 1, 2, 4, 5])] = 0.0
    assert tree.total == 1 and set(tree.find(np.linspace(0, 1, 20)).tolist()) == {3}
    tree[np.array([], dtype=np.int64)] = 5.0
    assert tree.total == 1


def test_sums_do_not_drift():
    tree, rng = SumTree(37), np.random.default_rng(0)
    for _ in range(3000):
        tree[rng.integers(0, 37, 8)] = 10.0 ** rng.uniform(-6, 6, 8)
    tree[np.arange(37)] = 0.1
    assert tree.total == pytest.approx(3.7, rel=1e-14)


# ---------------------------------------------------------------- draws by error


def prioritized(rows: int, layout: bool = False, n_steps: int = 1, **config: float) -> ReplayBuffer:
    return line_buffer(rows, n_steps=n_steps, prioritized=True, optimize_memory_usage=layout, **config)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_drawn_in_proportion_to_their_errors_to_the_power_of_alpha(alpha, layout):
    buffer, errors = prioritized(6, layout, alpha=alpha), np.array([0.0, 0.25, 1, 4, 9, 16])
    walk(buffer, range(6))
    rows = buffer.locate(np.arange(6))
    buffer.update(rows, lambda: torch.from_numpy(errors))
    drawn = np.concatenate([buffer.sample(50).reward[:, 0] for _ in range(400)]).astype(int)
    expected = (errors + 1e-6) ** alpha / ((errors + 1e-6) ** alpha).sum()
    assert np.bincount(drawn, minlength=6) / len(drawn) == pytest.approx(expected, abs=0.004)
    if alpha == 0.5:  # 0, ½, 1, 2, 3 and 4 of 10.5
        assert expected == pytest.approx(np.array([0, 0.5, 1, 2, 3, 4]) / 10.5, abs=2e-4)


def test_every_equal_part_of_the_total_gives_one_row():
    buffer = prioritized(4, alpha=1.0)
    walk(buffer, range(4))
    buffer.update(np.arange(4), lambda: torch.tensor([1.0, 2.0, 4.0, 1.0]))
    for _ in range(20):
        assert buffer.sample(8).reward[:, 0].tolist() == [0, 1, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("progress, beta", [(0.0, 0.4), (0.5, 0.7), (1.0, 1.0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_make_up_for_the_draws_the_more_the_further_the_run_is(progress, beta, layout):
    buffer, errors = prioritized(20, layout, n_steps=3, beta=0.4), np.random.default_rng(0).exponential(size=18)
    walk(buffer, range(30))
    assert buffer.ready == 18
    rows = buffer.locate(np.arange(18))
    buffer.update(rows, lambda: torch.from_numpy(errors))
    window = buffer.sample(10, progress)
    priority = dict(zip(rows.tolist(), (errors + 1e-6) ** 0.6, strict=True))
    weight = np.array([(18 * priority[row] / sum(priority.values())) ** -beta for row in window.rows.tolist()])
    assert window.weight == pytest.approx(weight / weight.max() / 10, rel=1e-5)
    assert window.weight.dtype == np.float32 and window.weight.max() == pytest.approx(0.1)


def test_weights_by_hand():
    buffer = prioritized(2, alpha=1.0, beta=0.5)
    walk(buffer, range(2))
    buffer.update(np.arange(2), lambda: torch.tensor([1.0, 3.0]))
    window = buffer.sample(4)
    # P = ¼ and ¾: (2 · ¼)^-½ = √2 and (2 · ¾)^-½ = √⅔, over √2, over the batch of 4
    assert window.reward[:, 0].tolist() == [0, 1, 1, 1]
    assert window.weight.tolist() == pytest.approx([0.25, *[0.25 / 3**0.5] * 3], rel=1e-5)


def test_rows_that_are_alike_weigh_one_over_the_batch():
    buffer = prioritized(50)
    walk(buffer, range(50))
    assert buffer.sample(8).weight.tolist() == pytest.approx([0.125] * 8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_rows_get_the_largest_priority_so_far(layout):
    buffer = prioritized(10, layout, alpha=0.5)
    walk(buffer, range(3))
    assert buffer.priorities.tree[buffer.locate(np.arange(3))].tolist() == [1, 1, 1]
    buffer.update(buffer.locate(np.arange(3)), lambda: torch.tensor([0.04, 16.0, 9.0]))
    walk(buffer, range(3, 5))
    assert buffer.priorities.tree[buffer.locate(np.arange(5))] == pytest.approx([0.2, 4, 3, 4, 4], rel=1e-4)
    buffer.update(buffer.locate(np.arange(5)), lambda: torch.full((5,), 0.01))  # the largest so far stays
    walk(buffer, [5])
    assert buffer.priorities.tree[buffer.locate(np.arange(6))] == pytest.approx([0.1] * 5 + [4], rel=1e-4)


@pytest.mark.variants
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_rows_with_a_complete_window_are_drawn_whatever_their_priorities(mode, num_envs, n_steps, layout):
    config = ReplayConfig(prioritized=True, optimize_memory_usage=layout, alpha=1.0)
    buffer = ReplayBuffer(Scripted.observation_space, np.int64(0), 7 * num_envs, num_envs, n_steps=n_steps, config=config)
    actions, envs = some_actions(Scripted, 33, num_envs), environments(Scripted, num_envs)
    rows = [diary(env(), actions[:, i], mode) for i, env in enumerate(envs)]
    for t, said in enumerate(experience(envs, actions, mode), 1):
        buffer.add(*said)
        check_contents(buffer, [each[:t] for each in rows])
        if buffer.ready:  # learning leaves errors that differ a little
            window = buffer.sample(8)
            errors = torch.from_numpy(1 + 0.1 * np.sin(window.rows))
            buffer.update(window.rows, lambda errors=errors: errors)
            assert buffer.priorities.tree.total == pytest.approx(buffer.priorities.tree[buffer.locate(np.arange(buffer.ready))].sum())


def test_a_row_without_an_error_is_drawn_too_if_rarely():
    sampler = Prioritized(4, alpha=0.5, beta=1.0)
    sampler.update(np.array([0, 2, 1]), lambda: torch.tensor([4.0, 0.0, 9.0]))
    assert sampler.tree[np.arange(4)] == pytest.approx([2, 3, 1e-3, 0], rel=1e-5)  # √10⁻⁶
