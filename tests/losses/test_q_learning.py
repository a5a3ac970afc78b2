"""Losses of the Q-learning family against naive loops."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from lightning_rl.losses.q_learning import chosen, cross_entropy, huber, project, quantile_huber


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("streams", "atoms"), [(1, 1), (2, 3)])
def test_chosen_selects_the_entries_of_each_rows_action(streams, atoms):
    z, action = torch.randn(5, 4, streams, atoms, generator=seeded()), torch.tensor([3, 0, 1, 1, 2])
    assert torch.equal(chosen(z, action), torch.stack([z[i, a] for i, a in enumerate(action)]))


@pytest.mark.parametrize(("error", "threshold", "loss"), [(0.5, 1, 0.125), (-3, 1, 2.5), (3, 2, 4), (-1, 1, 0.5), (0, 1, 0)])
def test_huber_by_hand(error, threshold, loss):
    assert huber(torch.tensor(1.0 + error), torch.tensor(1.0), threshold).item() == loss


@pytest.mark.parametrize("threshold", [0.5, 1.0, 3.0])
def test_huber_and_its_gradient_are_those_of_torch(threshold):
    error = torch.cat([4 * torch.randn(200, generator=seeded()), torch.tensor([0.0, threshold, -threshold])]).requires_grad_()
    ours = huber(error, torch.zeros_like(error), threshold)
    theirs = threshold * smooth_l1_loss(error, torch.zeros_like(error), beta=threshold, reduction="none")
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(loss.sum(), error)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() == threshold


def test_cross_entropy_of_uniform_logits_is_log_n_and_least_at_the_target():
    target = torch.tensor([[0.1, 0.2, 0.7]])
    assert cross_entropy(torch.zeros(1, 3), target).item() == pytest.approx(1.0986123)
    logits = target.log().requires_grad_()
    loss = cross_entropy(logits, target)
    assert loss.item() == pytest.approx(0.8018186)  # the entropy of the target
    assert torch.autograd.grad(loss.sum(), logits)[0].abs().max() < 1e-6


def naive_projection(values, probs, support):
    """Algorithm 1 of Bellemare et al. 2017, atom by atom, in double precision."""
    values, probs, support = values.double(), probs.double(), support.double()
    step = (support[-1] - support[0]) / (len(support) - 1)
    rows = torch.zeros(len(values), len(support), dtype=torch.float64)
    for row, (vs, ps) in enumerate(zip(values, probs, strict=True)):
        for v, p in zip(vs, ps, strict=True):
            v = min(max(v, support[0]), support[-1])
            for i, z in enumerate(support):
                rows[row, i] += max(0.0, 1 - abs(v - z) / step) * p
    return rows


SUPPORTS = {"51": torch.linspace(-10, 10, 51), "2": torch.tensor([-1.0, 3.0]), "lopsided": torch.linspace(-0.3, 7.1, 12)}


@pytest.mark.parametrize("name", SUPPORTS)
def test_projection_equals_the_naive_one_between_on_and_outside_the_atoms(name):
    support = SUPPORTS[name]
    between = torch.empty(4, 5).uniform_(float(support[0]), float(support[-1]), generator=seeded())
    outside = torch.tensor([-1e6, -11.0, 12.0, 1e6]).unsqueeze(1)
    values = torch.cat([between, support[[0, -1, len(support) // 2]].expand(4, 3), outside], 1)
    probs = torch.randn(4, values.shape[1], generator=seeded(1)).softmax(-1)
    projected = project(values, probs, support)
    torch.testing.assert_close(projected.double(), naive_projection(values, probs, support), rtol=0, atol=2e-6)
    assert projected.sum(-1).tolist() == pytest.approx([1] * 4)


def test_projection_inside_the_support_keeps_the_mean():
    values = torch.empty(3, 2, 9).uniform_(-10, 10, generator=seeded())
    probs = torch.randn(3, 2, 9, generator=seeded(1)).softmax(-1)
    projected = project(values, probs, SUPPORTS["51"])
    assert projected.shape == (3, 2, 51)
    torch.testing.assert_close(projected @ SUPPORTS["51"], (values * probs).sum(-1), rtol=0, atol=1e-5)


def test_projection_by_hand():
    support = torch.tensor([0.0, 1.0, 2.0])
    # r + γ z = 0.5 + 0.5 z of the atoms themselves: 0.5, 1 and 1.5
    projected = project(0.5 + 0.5 * support, torch.tensor([0.2, 0.2, 0.6]), support)
    assert projected.tolist() == pytest.approx([0.1, 0.6, 0.3])
    # at the end of an episode all atoms lie on the reward
    assert project(torch.full((3,), 1.75), torch.tensor([0.2, 0.2, 0.6]), support).tolist() == pytest.approx([0, 0.25, 0.75])


@pytest.mark.parametrize("ends", [(-10, 10), (-0.3, 7.1), (0, 200), (-1e-3, 1e3)])
@pytest.mark.parametrize("atoms", [2, 11, 51, 101])
def test_atoms_on_the_support_keep_their_probability_and_none_is_negative(atoms, ends):
    support = torch.linspace(*ends, atoms)
    probs = torch.randn(atoms, generator=seeded()).softmax(-1)
    projected = project(support, probs, support)
    torch.testing.assert_close(projected, probs, rtol=0, atol=2e-6)
    one_by_one = project(support.unsqueeze(-1), torch.ones(atoms, 1), support)
    assert (one_by_one >= 0).all()
    torch.testing.assert_close(one_by_one, torch.eye(atoms), rtol=0, atol=1e-4)
    assert one_by_one[0, 0] == one_by_one[-1, -1] == 1


def naive_quantile_huber(quantiles, fraction, target, threshold):
    total = 0.0
    for q, tau in zip(quantiles, fraction, strict=True):
        of_one = 0.0
        for t in target:
            error = float(t - q)
            size = abs(error)
            loss = 0.5 * error**2 if size <= threshold else threshold * (size - 0.5 * threshold)
            of_one += abs(float(tau) - (error < 0)) * loss / threshold
        total += of_one / len(target)
    return total


@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_quantile_huber_equals_naive_loops(threshold):
    quantiles, target = torch.randn(2, 3, 4, generator=seeded()), 2 * torch.randn(2, 3, 6, generator=seeded(1))
    fraction = (torch.arange(4) + 0.5) / 4
    loss = quantile_huber(quantiles.movedim(-1, 0), fraction, target.movedim(-1, 0), threshold)
    naive = [[naive_quantile_huber(quantiles[i, j], fraction, target[i, j], threshold) for j in range(3)] for i in range(2)]
    torch.testing.assert_close(loss, torch.tensor(naive))


def test_quantile_huber_by_hand():
    # errors 2 and -0.5 of the median, half weight each: ½ (1.5 + 0.125) / 2
    assert quantile_huber(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([3.0, 0.5])).item() == pytest.approx(0.40625)


def test_quantile_huber_is_least_at_the_quantiles_of_a_sample():
    sample = torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0])
    fraction = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])  # the middles: each of the sample is one of its quantiles
    quantiles = torch.zeros(5, requires_grad=True)
    for _ in range(250):
        (gradient,) = torch.autograd.grad(quantile_huber(quantiles, fraction, sample, threshold=0.01), quantiles)
        quantiles = (quantiles - gradient.sign() * 0.05).detach().requires_grad_()
    torch.testing.assert_close(quantiles.detach(), sample, rtol=0, atol=0.1)


def test_the_least_quantile_loss_for_one_number_is_the_number():
    quantiles = torch.full((3,), 2.5, requires_grad=True)
    loss = quantile_huber(quantiles, torch.tensor([0.25, 0.5, 0.75]), torch.full((7,), 2.5))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, quantiles)[0].tolist() == [0, 0, 0]


def test_a_target_that_is_nan_gives_probabilities_that_are_nan():
    probs = project(torch.tensor([[float("nan")]]), torch.ones(1, 1), torch.linspace(-1, 1, 3))
    assert probs.isnan().any()
