"""Generations: the gradient of shaped returns."""

from __future__ import annotations

import torch

from lightning_rl.algorithms.evolution import antithetic_gradient, centred_ranks, raw
from tests.losses.test_evolution import numbers

RETURNS = torch.tensor([[1.0, 3.0], [5.0, 2.0]], dtype=torch.float64)


NOISE = torch.tensor([[1.0, 0.0, -1.0], [0.5, 2.0, 0.0]])


def test_the_gradient_follows_the_noise_of_the_better_episodes():
    # differences -2/3 and 2/3: ((-2/3) (1, 0, -1) + (2/3) (0.5, 2, 0)) / 2
    assert antithetic_gradient(centred_ranks(RETURNS), NOISE).tolist() == numbers([-1 / 6, 2 / 3, 1 / 3])


def test_raw_returns_estimate_the_gradient_of_a_sphere():
    theta, sigma, noise = torch.tensor([1.0, 2.0], dtype=torch.float64), 0.1, torch.eye(2, dtype=torch.float64)
    returns = torch.stack([-torch.stack([theta + s * sigma * e for s in (1, -1)]).square().sum(1) for e in noise])
    assert returns.flatten().tolist() == numbers([-5.21, -4.81, -5.41, -4.61])
    estimate = antithetic_gradient(raw(returns), noise) / (2 * sigma)
    assert estimate.tolist() == numbers([-1, -2])  # half of -2θ, as each direction was tried once of two times
    assert antithetic_gradient(centred_ranks(returns), noise).tolist() == numbers([-1 / 6, -1 / 2])
