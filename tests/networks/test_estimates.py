"""How the values of an ensemble of critics are read, with numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from lightning_rl.errors import SettingError
from lightning_rl.networks.off_policy import make_estimate

VALUES = torch.tensor([3.0, 1.0, 2.0]).view(3, 1, 1)  # of three critics, one row, one stream


def test_the_least_value_is_the_target_and_what_the_policy_climbs():
    estimate = make_estimate(3)
    assert estimate.target(VALUES).tolist() == [[[1.0]]] and estimate.policy(VALUES).tolist() == [[1.0]]
    loss, error = estimate.loss(VALUES, torch.tensor([[[2.5]]]))
    assert loss.tolist() == pytest.approx([0.5 * (0.25 + 2.25 + 0.25)]) and error.tolist() == pytest.approx([(0.5 + 1.5 + 0.5) / 3])


def test_the_least_of_a_random_subset_is_the_target_and_the_mean_of_all_what_the_policy_climbs():
    estimate, generator = make_estimate(3, subset=2), torch.Generator().manual_seed(0)
    targets = []
    for _ in range(300):
        estimate.resample(generator)
        assert len(set(estimate.subset.tolist())) == 2
        targets.append(estimate.target(VALUES).item())
    assert set(targets) == {1.0, 2.0}
    assert targets.count(2.0) / 300 == pytest.approx(1 / 3, abs=0.08)  # of the pairs (3, 1), (3, 2), (1, 2)
    assert estimate.policy(VALUES).tolist() == [[2.0]]


def test_the_greatest_quantiles_of_all_critics_together_are_left_out():
    estimate = make_estimate(2, quantiles=3, dropped=1)
    q = torch.tensor([5.0, 1.0, 9.0, 4.0, 2.0, 3.0]).view(6, 1, 1)
    assert estimate.target(q).flatten().tolist() == [1.0, 2.0, 3.0, 4.0]  # not one from each: 5 and 9 are of the first
    assert estimate.policy(q).item() == 4.0


def test_the_quantile_loss_by_hand():
    estimate = make_estimate(1, quantiles=2)
    loss, error = estimate.loss(torch.tensor([0.0, 1.0]).view(2, 1, 1), torch.tensor([0.5, 3.0]).view(2, 1, 1))
    # τ = ¼: targets above, δ 0.5 and 3: ¼ (0.125 + 2.5);  τ = ¾: δ −0.5 and 2: ¼ 0.125 + ¾ 1.5.  The mean of all four
    assert loss.tolist() == pytest.approx([(0.25 * 2.625 + 0.25 * 0.125 + 0.75 * 1.5) / 4])
    assert error.tolist() == pytest.approx([1.25])


def test_streams_and_rows_are_read_apart():
    estimate = make_estimate(2, quantiles=2, dropped=1)
    q = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    target = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
    loss, error = estimate.loss(q, target)
    for b in range(5):
        alone = [estimate.loss(q[:, b : b + 1, s : s + 1], target[:, b : b + 1, s : s + 1]) for s in range(3)]
        assert loss[b].item() == pytest.approx(sum(each[0].item() for each in alone) / 3)
        assert error[b].item() == pytest.approx(sum(each[1].item() for each in alone) / 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"subset": 4}, "critic_subset must be >= 1 and <= 3, got 4"),
        ({"quantiles": 5, "dropped": 5}, "drop_quantiles must be >= 0 and <= 4, got 5"),
        ({"dropped": 2}, "drop_quantiles 2 needs n_quantiles, such as 25"),
        ({"subset": 2, "quantiles": 5}, "critic_subset cannot be combined with n_quantiles, whose drop_quantiles keep the target low"),
    ],
)
def test_settings_that_make_no_sense_are_reported_in_one_line(settings, message):
    with pytest.raises(SettingError) as raised:
        make_estimate(3, **settings)
    assert str(raised.value).startswith(message)
