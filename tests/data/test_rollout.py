"""From a rollout to minibatches."""

import pytest
import torch

from lightning_rl.data.rollout import make_batch, minibatches, normalize
from lightning_rl.types import Rollout


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_rollout(steps=3, num_envs=2, streams=1, **fields):
    """Rows numbered from 0 in their observation, with no reward and no end."""
    flag = torch.zeros(steps, num_envs, dtype=torch.bool)
    number = torch.arange(steps * num_envs).unflatten(0, (steps, num_envs))
    zero = torch.zeros(steps, num_envs, streams)
    rollout = Rollout(
        obs={"number": number, "twice": torch.stack([number, 2 * number], -1)},
        action=(number + 100,),
        log_prob=number.float(),
        reward=zero,
        value=zero,
        next_value=zero,
        terminated=flag,
        truncated=flag,
        valid=~flag,
        episode_start=flag,
    )
    return rollout._replace(**fields)


def test_advantages_and_returns_of_two_streams_end_with_the_episode():
    # environment 0 is truncated at row 1 with V(s') = 0.7, environment 1 terminated there
    reward = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1).expand(3, 2, 2)
    value = torch.tensor([0.5, 0.4, 0.3]).reshape(3, 1, 1).expand(3, 2, 2)
    next_value = torch.tensor([0.4, 0.7, 0.2]).reshape(3, 1, 1).expand(3, 2, 2)
    ends = torch.zeros(2, 3, 2, dtype=torch.bool)
    ends[0, 1, 1] = ends[1, 1, 0] = True
    rollout = make_rollout(streams=2, reward=reward, value=value, next_value=next_value, terminated=ends[0], truncated=ends[1])
    discount = torch.tensor([0.9, 0.0]) * ~ends[0].unsqueeze(-1)  # the second stream sees one step ahead only
    batch = make_batch(rollout, discount, 0.8)
    assert batch.returns.shape == batch.value.shape == (6, 2)
    assert batch.returns[:, 0].tolist() == pytest.approx([2.9656, 2.512, 2.63, 2.0, 3.18, 3.18])
    assert batch.returns[:, 1].tolist() == pytest.approx([1, 1, 2, 2, 3, 3])
    first, second = [2.4656, 2.012, 2.23, 1.6, 2.88, 2.88], [0.5, 0.5, 1.6, 1.6, 2.7, 2.7]
    assert batch.advantage.tolist() == pytest.approx([a + b for a, b in zip(first, second, strict=True)])


def test_rows_of_a_batch_stay_together_and_missing_slots_stay_empty():
    batch = make_batch(make_rollout(), torch.tensor(0.9), 1.0)
    rows = list(range(6))
    assert batch.obs["number"].tolist() == batch.log_prob.tolist() == rows
    assert batch.obs["twice"].tolist() == [[k, 2 * k] for k in rows]
    assert batch.action[0].tolist() == [k + 100 for k in rows]
    assert batch.action_mask == ()


def test_rows_that_are_no_experience_have_no_weight():
    valid = torch.tensor([[True, True], [False, True], [True, False]])
    batch = make_batch(make_rollout(valid=valid), torch.tensor(0.9), 1.0)
    assert batch.weight.tolist() == [0.25, 0.25, 0, 0.25, 0.25, 0]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 12])
def test_an_epoch_visits_each_row_once_with_all_that_belongs_to_it(batch_size):
    mask = torch.rand(4, 3, 5, generator=seeded()) < 0.5
    batch = make_batch(make_rollout(4, 3, action_mask=mask), torch.tensor(0.9), 1.0)
    seen = []
    for minibatch in minibatches(batch, batch_size, True, seeded()):
        number = minibatch.obs["number"]
        assert number.shape == minibatch.weight.shape == minibatch.advantage.shape == (batch_size,)
        assert torch.equal(minibatch.obs["twice"][:, 1], 2 * number)
        assert torch.equal(minibatch.action[0], number + 100)
        assert torch.equal(minibatch.action_mask, mask.flatten(0, 1)[number])
        assert torch.isfinite(minibatch.advantage).all()
        assert minibatch.weight.sum().item() == pytest.approx(1)
        seen += number.tolist()
    assert sorted(seen) == list(range(12))
    assert batch_size == 12 or seen != list(range(12))


def test_each_epoch_has_another_order_and_a_seed_repeats_it():
    batch = make_batch(make_rollout(10, 2), torch.tensor(0.9), 1.0)

    def epochs(generator):
        return [torch.cat([m.obs["number"] for m in minibatches(batch, 5, False, generator)]).tolist() for _ in range(2)]

    first, second = epochs(seeded(1))
    assert first != second
    assert [first, second] == epochs(seeded(1))


def test_weights_of_a_minibatch_sum_to_1_over_its_experience():
    valid = torch.ones(6, 2, dtype=torch.bool)
    valid[0, 0] = valid[3, 1] = valid[4, 0] = False
    batch = make_batch(make_rollout(6, 2, valid=valid), torch.tensor(0.9), 1.0)
    for minibatch in minibatches(batch, 4, False, seeded()):
        counts = valid.flatten()[minibatch.obs["number"]]
        assert minibatch.weight.tolist() == pytest.approx((counts / counts.sum()).tolist())


def test_a_minibatch_without_experience_weighs_nothing():
    batch = make_batch(make_rollout(valid=torch.zeros(3, 2, dtype=torch.bool)), torch.tensor(0.9), 1.0)
    for minibatch in minibatches(batch, 3, True, seeded()):
        assert minibatch.weight.tolist() == [0, 0, 0]
        assert torch.isfinite(minibatch.advantage).all()


def test_advantages_are_normalized_only_on_request_and_within_each_minibatch():
    batch = make_batch(make_rollout(4, 2), torch.tensor(0.9), 1.0)
    batch = batch._replace(advantage=torch.tensor([1.0, 20, 3, 4, 500, 6, 7, 8]))
    for minibatch in minibatches(batch, 4, False, seeded()):
        assert torch.equal(minibatch.advantage, batch.advantage[minibatch.obs["number"]])
    for minibatch in minibatches(batch, 4, True, seeded()):
        raw = batch.advantage[minibatch.obs["number"]]
        torch.testing.assert_close(minibatch.advantage, (raw - raw.mean()) / raw.std())


def test_normalize_1_2_3_4_with_the_unbiased_deviation():
    normalized = normalize(torch.tensor([1.0, 2, 3, 4], dtype=torch.float64), torch.full((4,), 0.25, dtype=torch.float64))
    assert normalized.tolist() == pytest.approx([-1.16189499, -0.38729833, 0.38729833, 1.16189499], abs=1e-7)


def test_normalize_ignores_rows_without_weight_and_leaves_a_single_row_alone():
    weight = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0], [0, 0, 1, 0, 0], [0.5, 0.5, 0, 0, 0]])
    normalized = normalize(torch.tensor([[1.0, 2, 3, 4, 1000], [1, 2, 3, 4, 5], [7, 7, 1, 2, 3]]), weight)
    assert normalized[0, :4].tolist() == pytest.approx([-1.16189499, -0.38729833, 0.38729833, 1.16189499], abs=1e-5)
    assert normalized[1].tolist() == [1, 2, 3, 4, 5]
    assert normalized[2, :2].tolist() == [0, 0]
