"""How far a policy is from demonstrated choices and numbers, with the numbers of the specification."""

import math

import pytest
import torch

from lightning_rl.losses.offline import accuracy, branches, cross_entropy, rank, squared_error, top_k_accuracy

LOG_P = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0]]).log_softmax(-1)
TARGET = torch.tensor([0, 2])
LEAST = torch.finfo(torch.float32).min


def test_cross_entropy_of_two_rows():
    loss = cross_entropy(LOG_P, TARGET)
    assert loss.tolist() == pytest.approx([0.16984602, 1.55144471])
    assert loss.mean().item() == pytest.approx(0.86064537)


def test_a_bit_is_a_choice_of_two():
    logit = torch.tensor([1.0, -2.0])
    log_p = torch.stack([torch.nn.functional.logsigmoid(-logit), torch.nn.functional.logsigmoid(logit)], -1)
    loss = cross_entropy(log_p, torch.tensor([1, 0]))
    assert loss.mean().item() == pytest.approx(0.22009485)  # of softplus(-1) and softplus(-2)


def test_label_smoothing_spreads_its_share_over_all_choices():
    # log p = log 0.7, 0.2, 0.1; q = 0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3
    log_p = torch.tensor([[0.7, 0.2, 0.1]]).log()
    expected = -(0.9 + 0.1 / 3) * math.log(0.7) - 0.1 / 3 * (math.log(0.2) + math.log(0.1))
    assert cross_entropy(log_p, torch.tensor([0]), 0.1).item() == pytest.approx(expected)
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    target = torch.arange(5)
    theirs = torch.nn.functional.cross_entropy(logits, target, reduction="none", label_smoothing=0.3)
    assert torch.allclose(cross_entropy(logits.log_softmax(-1), target, 0.3), theirs)


def test_label_smoothing_ignores_illegal_choices():
    log_p = torch.tensor([[math.log(0.75), LEAST, math.log(0.25)]])
    expected = -0.8 * math.log(0.25) - 0.2 * (math.log(0.75) + math.log(0.25)) / 2
    assert cross_entropy(log_p, torch.tensor([2]), 0.2).item() == pytest.approx(expected)


def test_branches_are_stacked_and_short_ones_padded_with_illegal_choices():
    log_p = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5]])
    assert branches(log_p, [5]).tolist() == [log_p.tolist()]
    assert branches(log_p[:, :4], [2, 2]).tolist() == [log_p[:, :4].view(2, 2).tolist()]
    expected = torch.tensor([[[0.1, 0.2, LEAST], [0.3, 0.4, 0.5]]])
    assert torch.equal(branches(log_p, [2, 3]), expected)


def test_the_rank_counts_choices_that_are_more_likely():
    assert rank(LOG_P, TARGET).tolist() == [0, 1]  # the second row's other two are alike
    assert accuracy(LOG_P, TARGET).tolist() == [1, 0]
    log_p = torch.arange(12.0).log_softmax(0).expand(3, 12)
    found = rank(log_p, torch.tensor([11, 7, 6]))
    assert found.tolist() == [0, 4, 5]
    assert top_k_accuracy(found, 5).tolist() == [1, 1, 0]


def test_half_the_squared_error_is_the_negative_log_likelihood_for_a_deviation_of_one_up_to_a_constant():
    mean, action = torch.tensor([0.5, -1.0]), torch.tensor([1.5, 1.0])
    assert squared_error(mean, action).tolist() == [1, 4]
    nll = -torch.distributions.Normal(mean, 1.0).log_prob(action)
    assert torch.allclose(nll, 0.5 * squared_error(mean, action) + 0.5 * math.log(2 * math.pi))
