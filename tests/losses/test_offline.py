"""Losses of offline reinforcement learning, by hand."""

import math

import pytest
import torch

from lightning_rl.losses import offline as losses


def test_an_expectile_weighs_values_that_are_too_low_more_than_those_that_are_too_high():
    value, target = torch.tensor([[1.0], [3.0]]), torch.tensor([[3.0], [1.0]])
    assert losses.expectile_loss(value, target, 0.7).tolist() == pytest.approx([0.7 * 4, 0.3 * 4])
    assert losses.expectile_loss(value, target, 0.5).tolist() == pytest.approx([2, 2])
    streams = losses.expectile_loss(torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0, 1.0]]), 0.7)
    assert streams.tolist() == pytest.approx([(0.7 * 4 + 0.3 * 4) / 2])


def test_the_least_expectile_loss_is_at_the_expectile_of_the_targets():
    # of 0 and 1 in equal parts: 0.8 (1 - v) = 0.2 v, so v = 0.8
    value = torch.tensor([[0.8]], requires_grad=True)
    losses.expectile_loss(value.expand(2, 1), torch.tensor([[0.0], [1.0]]), 0.8).sum().backward()
    assert value.grad.item() == pytest.approx(0, abs=1e-6)


def test_advantages_become_weights_up_to_a_limit():
    weight = losses.advantage_weight(torch.tensor([[0.5], [-0.5], [10.0]]), 3.0, 100.0)
    assert weight.tolist() == pytest.approx([math.exp(1.5), math.exp(-1.5), 100])
    assert losses.advantage_weight(torch.tensor([[0.5, 0.25]]), 2.0, 100.0).tolist() == pytest.approx([math.exp(1.5)])


def test_the_conservative_gap_is_how_much_more_is_expected_of_drawn_actions_than_of_those_in_the_data():
    q = torch.tensor([[[1.0], [2.0]], [[0.0], [0.0]]])  # 2 critics, 2 drawn actions, 1 row
    q_data = torch.tensor([[1.5], [0.5]])
    # log(e + e²) - 1.5 + log 2 - 0.5
    plain = losses.conservative_gap(q, torch.zeros(2, 1), q_data)
    assert plain.tolist() == pytest.approx([math.log(math.e + math.e**2) - 1.5 + math.log(2) - 0.5])
    # actions of density 1/2, as uniform ones in [-1, 1] have, count twice
    weighed = losses.conservative_gap(q, torch.full((2, 1), -math.log(2)), q_data)
    assert weighed.tolist() == pytest.approx([plain.item() + 2 * math.log(2)])
