"""Numbers worked by hand for evolution strategies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from lightning_rl import EvolutionStrategies
from lightning_rl.actors.generations import Results
from lightning_rl.algorithms.evolution import SHAPINGS, antithetic_gradient, centred_ranks, z_scores
from tests.fitting import tiny

RETURNS = torch.tensor([[1.0, 3.0], [5.0, 2.0]], dtype=torch.float64)
NOISE = torch.tensor([[1.0, 0.0, -1.0], [0.5, 2.0, 0.0]])


def numbers(tensor):
    return pytest.approx(torch.as_tensor(tensor, dtype=torch.float64).flatten().tolist(), abs=1e-7)


def test_ranks_go_from_minus_a_half_to_a_half():
    assert centred_ranks(RETURNS).flatten().tolist() == numbers([-0.5, 1 / 6, 0.5, -1 / 6])


def test_equal_returns_share_the_mean_of_their_ranks():
    # ranks 0, 1.5, 1.5, 3 of 3
    assert centred_ranks(torch.tensor([[7.0, 8.0], [8.0, 9.0]])).flatten().tolist() == numbers([-0.5, 0, 0, 0.5])


def test_ranks_depend_only_on_the_order_of_returns():
    assert torch.equal(centred_ranks(RETURNS.exp() * 10 - 3), centred_ranks(RETURNS))


def test_z_scores_have_mean_0_and_deviation_1():
    # mean 2.75, deviations -1.75 0.25 2.25 -0.75, their squares 3.0625 0.0625 5.0625 0.5625: variance 2.1875
    expected = [each / math.sqrt(2.1875) for each in (-1.75, 0.25, 2.25, -0.75)]
    assert z_scores(RETURNS).flatten().tolist() == numbers(expected)


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("value", [0.0, 500.0, -0.1])
def test_equal_returns_give_a_gradient_of_exactly_0(shaping, value):
    returns = torch.full((3, 2), value, dtype=torch.float64)
    gradient = antithetic_gradient(SHAPINGS[shaping][1](returns), torch.randn(3, 5))
    assert gradient.tolist() == [0.0] * 5


class Golden:
    """A generation with the noise of these tests."""

    def noise(self, job, size):
        return NOISE[job].numpy()


@pytest.mark.parametrize(
    "optimizer, step",
    [("adam", [-0.00999998, 0.01, 0.00999999]), ("sgd", [-0.00017167, 0.00065667, 0.00031833])],
)
def test_the_first_step_of_an_optimizer(optimizer, step):
    model = tiny(EvolutionStrategies, optimizer=optimizer, learning_rate=0.01, l2=0.005, momentum=0.9, shaping="centred_ranks")
    model.network = nn.Linear(2, 1)
    with torch.no_grad():
        model.network.weight.copy_(torch.tensor([[1.0, 2.0]]))
        model.network.bias.fill_(3.0)
    (chosen,) = model.configure_optimizers()
    weights = torch.cat([parameter.flatten() for parameter in model.network.parameters()])
    model.loss(Results(Golden(), RETURNS, RETURNS, RETURNS), weights).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.network.parameters()])
    assert gradients.tolist() == numbers([0.17166667, -0.65666667, -0.31833333])
    chosen.step()
    assert (parameters_to_vector(model.network.parameters()).detach() - torch.tensor([1.0, 2.0, 3.0])).tolist() == pytest.approx(
        step, abs=2e-7
    )


def test_some_shapings_use_the_signs_of_rewards():
    model = tiny(EvolutionStrategies, shaping="signs", l2=0.0)
    model.network = nn.Linear(2, 1)
    signs = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    weights = torch.cat([parameter.flatten() for parameter in model.network.parameters()])
    (gradient,) = torch.autograd.grad(model.loss(Results(Golden(), RETURNS, signs, RETURNS), weights), weights)
    # the descent direction -g = -(2 (1, 0, -1) - (0.5, 2, 0)) / 2
    assert gradient.tolist() == numbers([-0.75, 1.0, 1.0])
