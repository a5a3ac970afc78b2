"""Gaussians, plain and squashed."""

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from lightning_rl.distributions import TanhGaussian, make_distribution
from tests.distributions.test_distribution import seeded

LOPSIDED = Box(np.array([-1, 0.5, -7], np.float32), np.array([3, 0.75, -2], np.float32))


def test_a_squashed_action_spans_the_box():
    u = np.array([[-30, 0, 30], [math.atanh(0.5), 30, -30]], np.float32)
    actions = make_distribution(LOPSIDED, "tanh_normal").to_env(u)
    np.testing.assert_allclose(actions, [[-1, 0.625, -2], [2, 0.75, -7]], rtol=1e-6)


def test_a_saturated_squashed_action_never_leaves_a_box_whose_bounds_round():
    rng = np.random.default_rng(0)
    ends = np.sort(rng.normal(size=(2, 2000)).astype(np.float32), 0)
    space = Box(*ends)
    for sign in (-20, 20):
        assert space.contains(make_distribution(space, "tanh_normal").to_env(np.full((1, 2000), sign, np.float32))[0])


def test_gaussian_golden_numbers():
    distribution = make_distribution(Box(-1, 1, (2,)))
    log_prob, entropy = distribution.evaluate(torch.zeros(1, 2), torch.tensor([[0.5, 0.0]]))
    assert log_prob[0].tolist() == pytest.approx([-1.04393853, -0.91893853])
    assert entropy[0].tolist() == pytest.approx([1.41893853] * 2)


@pytest.mark.parametrize("half_range", [1, 2])
def test_squashed_gaussian_golden_numbers_do_not_depend_on_the_bounds(half_range):
    distribution = make_distribution(Box(-half_range, half_range, (1,)), "tanh_normal")
    log_prob, _ = distribution.evaluate(torch.zeros(1, 1), torch.tensor([[0.5]]))
    assert log_prob.item() == pytest.approx(-0.80370952, abs=1e-6)
    assert distribution.to_env(np.array([[0.5]])).item() == pytest.approx(0.46211716 * half_range)


@pytest.mark.parametrize(("mean", "log_std"), [(-0.8, -1.5), (0.0, 0.0), (1.5, 0.3), (-0.8, 0.3)])
def test_squashed_density_of_a_lopsided_box_integrates_to_1_over_unit_actions_and_its_entropy_is_the_integral(mean, log_std):
    distribution = make_distribution(Box(-0.5, 3.0, (1,)), "tanh_normal", log_std).double()
    cells = 50_001
    u, width = torch.atanh(2 * (torch.arange(cells, dtype=torch.float64) + 0.5) / cells - 1).unsqueeze(-1), 2 / cells
    log_prob, entropy = distribution.evaluate(torch.full_like(u, mean), u)
    density = log_prob.exp()
    assert (density.sum() * width).item() == pytest.approx(1, abs=1e-3)
    assert entropy[0].item() == pytest.approx(-(density * log_prob).sum().item() * width, abs=5e-3)


def test_squashed_entropy_is_that_of_an_integral_for_narrow_and_wide_gaussians():
    z, dz = np.linspace(-9, 9, 40_001), 18 / 40_000
    weights = np.exp(-z * z / 2) * dz / math.sqrt(2 * math.pi)
    means, worst = np.linspace(-5, 5, 21), 0.0
    for log_std in np.linspace(-5, 2, 15):
        distribution = make_distribution(Box(-1, 1, (1,)), "tanh_normal", log_std).double()
        found = distribution.evaluate(torch.tensor(means)[:, None], torch.zeros(21, 1, dtype=torch.float64))[1][:, 0].detach().numpy()
        u = np.abs(means[:, None] + math.exp(log_std) * z)
        log_derivative = 2 * (math.log(2) - u - np.log1p(np.exp(-2 * u)))  # of tanh
        expected = 0.5 * math.log(2 * math.pi * math.e) + log_std + log_derivative @ weights
        worst = max(worst, np.abs(found - expected).max())
    assert worst < 8e-6  # measured: 7.8e-6


def test_squashed_entropy_is_the_mean_surprise_of_samples():
    distribution = make_distribution(LOPSIDED, "tanh_normal", log_std_init=-0.3)
    x = torch.tensor([0.3, -1.0, 0.8]).expand(100_000, 3)
    log_prob, entropy = distribution.evaluate(x, distribution.sample(x, (), seeded()))
    torch.testing.assert_close(-log_prob.mean(0), entropy[0], rtol=0, atol=0.015)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squashed_density_and_its_gradient_stay_finite_up_to_20(dtype):
    distribution = make_distribution(Box(-2, 3, (41,)), "tanh_normal").to(dtype)
    u = torch.linspace(-20, 20, 41, dtype=dtype).unsqueeze(0)
    x = torch.zeros_like(u).requires_grad_()
    for mean in (x, u.clone().requires_grad_()):
        log_prob, entropy = distribution.evaluate(mean, u)
        (log_prob.sum() + entropy.sum()).backward()
        assert all(torch.isfinite(tensor).all() for tensor in (log_prob, entropy, mean.grad, distribution.log_std.grad))
    # log N(20) + 2 (20 - log 2), the tail of -log(1 - tanh²)
    expected = -200 - 0.5 * math.log(2 * math.pi) + 2 * (20 - math.log(2))
    assert distribution.evaluate(x, u)[0][0, -1].item() == pytest.approx(expected, rel=1e-2 if dtype is torch.bfloat16 else 1e-5)


def test_the_squashed_gaussian_reaches_boxes_inside_a_tree():
    distribution = make_distribution(Dict(a=Discrete(2), b=Tuple([LOPSIDED])), "tanh_normal", -1.0)
    (inner,) = distribution.parts[1].parts
    assert isinstance(inner, TanhGaussian)
    assert inner.log_std.tolist() == [-1.0] * 3
