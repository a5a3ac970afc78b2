"""The policy-gradient family, term by term."""

import pytest
import torch

from lightning_rl.losses.policy_gradient import (
    approximate_kl,
    clipped_surrogate,
    clipped_value_loss,
    mean,
    policy_gradient,
    scaled,
    value_loss,
)


def rows(count):
    return torch.full((count,), 1 / count)


@pytest.mark.parametrize(("ratio", "advantage", "loss"), [(1.5, 1, -1.2), (1.5, -1, 1.5), (0.5, 1, -0.5), (0.5, -1, 0.8)])
def test_clipped_surrogate_takes_the_worse_of_both_terms(ratio, advantage, loss):
    assert clipped_surrogate(torch.tensor([ratio]), torch.tensor([float(advantage)]), 0.2).item() == pytest.approx(loss)


def test_clipped_surrogate_of_four_rows_is_0_05_in_the_mean():
    ratio, advantage = torch.tensor([1.3, 0.7, 1.3, 0.7]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = clipped_surrogate(ratio, advantage, 0.2)
    assert loss.tolist() == pytest.approx([-1.2, -0.7, 1.3, 0.8])
    assert mean(loss, rows(4)).item() == pytest.approx(0.05)


def test_clipped_surrogate_has_zero_gradient_beyond_the_clip_and_only_on_the_improving_side():
    ratio = torch.tensor([1.3, 0.7, 1.3, 0.7], requires_grad=True)
    clipped_surrogate(ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2).sum().backward()
    assert ratio.grad.tolist() == [0, -1, 1, 0]


def test_at_ratio_1_the_clipped_surrogate_has_the_policy_gradient():
    advantage = torch.tensor([0.3, -2.0, 1.5])
    log_prob = torch.tensor([-0.5, -1.5, -0.1], requires_grad=True)
    ratio = (log_prob - log_prob.detach()).exp()
    (ppo,) = torch.autograd.grad(clipped_surrogate(ratio, advantage, 0.2).sum(), log_prob)
    (a2c,) = torch.autograd.grad(policy_gradient(log_prob, advantage).sum(), log_prob)
    torch.testing.assert_close(ppo, a2c)
    assert a2c.tolist() == pytest.approx([-0.3, 2.0, -1.5])


def test_clipping_each_part_differs_from_clipping_the_joint_ratio():
    parts, advantage = torch.tensor([[1.3, 0.9]]), torch.ones(1, 1)
    assert clipped_surrogate(parts, advantage, 0.2).sum().item() == pytest.approx(-2.1)
    assert clipped_surrogate(parts.prod(-1, keepdim=True), advantage, 0.2).item() == pytest.approx(-1.17)


def test_advantage_actor_critic_golden_numbers():
    policy = mean(policy_gradient(torch.tensor([-0.5, -1.5]), torch.tensor([1.0, -1.0])), rows(2))
    value = mean(value_loss(torch.tensor([[1.0], [0.5]]), torch.tensor([[2.0], [0.0]])), rows(2))
    assert policy.item() == pytest.approx(-0.5)
    assert value.item() == pytest.approx(0.625)


@pytest.mark.parametrize(
    ("value", "old_value", "returns", "loss"),
    [(1.5, 1.0, 2.0, 0.64), (1.1, 1.0, 2.0, 0.81), (0.5, 1.0, 2.0, 2.25), (1.5, 1.0, 0.0, 2.25)],
)
def test_clipped_value_loss_takes_the_worse_of_both_errors(value, old_value, returns, loss):
    tensors = (torch.tensor([[x]]) for x in (value, old_value, returns))
    assert clipped_value_loss(*tensors, clip_range=0.2).item() == pytest.approx(loss)


def test_clipped_value_loss_has_zero_gradient_once_the_value_moved_far_enough():
    value = torch.tensor([[1.5], [1.1]], requires_grad=True)
    clipped_value_loss(value, torch.ones(2, 1), torch.full((2, 1), 2.0), 0.2).sum().backward()
    assert value.grad.flatten().tolist() == pytest.approx([0, -1.8])


def test_approximate_kl_is_unbiased_and_never_negative():
    old = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    new = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    estimate = approximate_kl((new / old).log())
    assert (estimate >= 0).all()
    assert (old * estimate).sum().item() == pytest.approx((old * (old / new).log()).sum().item())
    assert approximate_kl(torch.zeros(3)).tolist() == [0, 0, 0]


def test_mean_ignores_rows_without_weight_and_averages_parts():
    weight = torch.tensor([0.5, 0.0, 0.5])
    assert mean(torch.tensor([1.0, 100.0, 3.0]), weight).item() == 2
    assert mean(torch.tensor([[1.0, 3.0], [100.0, 100.0], [3.0, 5.0]]), weight).item() == 3


def test_a_loss_with_coefficient_0_leaves_the_graph():
    x = torch.tensor(3.0, requires_grad=True)
    assert scaled(0.0, x) == 0.0 and not isinstance(scaled(0.0, x), torch.Tensor)
    assert scaled(1.0, x) is x
    scaled(-0.5, x).backward()
    assert scaled(-0.5, x).item() == -1.5 and x.grad.item() == -0.5
