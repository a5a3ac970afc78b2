"""Soft actor-critic, term by term, with numbers worked by hand.

Two conventions meet here: target critics take the least of the twins for each choice and then the expectation, and beside a value network
the least of the expectations counts.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_rl import SAC
from lightning_rl.losses import soft_actor_critic as losses
from lightning_rl.spaces import Spaces
from lightning_rl.types import Transition

PROBS = torch.tensor([[0.2, 0.5, 0.3]])
TWINS = torch.tensor([[1.0, 2.0, 0.0], [1.5, 1.0, 0.5]]).reshape(2, 1, 3, 1)
ENTROPY = torch.tensor([[1.02965301]])
TWO_PROBS = torch.tensor([[0.75, 0.25]])
TWO_TWINS = torch.tensor([[1.0, 3.0], [2.0, 2.0]]).reshape(2, 1, 2, 1)
TWO_ENTROPY = torch.tensor([[0.56233514]])


def alphas(*values):
    return torch.tensor(values)


def entropy_of(probs):
    return -(probs * probs.log()).sum(-1, keepdim=True)


def test_the_entropies_of_the_golden_numbers():
    torch.testing.assert_close(entropy_of(PROBS), ENTROPY)
    torch.testing.assert_close(entropy_of(TWO_PROBS), TWO_ENTROPY)


def test_discrete_value_with_target_critics_is_the_expectation_of_the_least():
    expected = losses.expected(TWINS.amin(0), PROBS, branches=1)
    assert expected.item() == pytest.approx(0.7)  # of 1, 1 and 0
    value = losses.soft_value(expected, ENTROPY, alphas(0.1))
    assert value.item() == pytest.approx(0.80296530, abs=1e-7)
    assert losses.actor_loss(expected, ENTROPY, alphas(0.1)).item() == pytest.approx(-0.80296530, abs=1e-7)


def test_discrete_value_with_a_value_network_is_the_least_of_the_expectations():
    both = losses.expected(TWO_TWINS, TWO_PROBS, branches=1)
    assert both.flatten().tolist() == [1.5, 2.0]
    value = losses.soft_value(both.amin(0), TWO_ENTROPY, alphas(0.1))
    assert value.item() == pytest.approx(1.556234, abs=1e-6)
    # the policy follows the first critic alone
    assert losses.actor_loss(both[0], TWO_ENTROPY, alphas(0.1)).item() == pytest.approx(-1.556234, abs=1e-6)
    # the other convention would give 0.75 · 1 + 0.25 · 2
    assert losses.expected(TWO_TWINS.amin(0), TWO_PROBS, branches=1).item() == 1.25


def test_continuous_golden_numbers():
    entropy = torch.tensor([[1.5]])  # of log π = (-1, -0.5)
    q, one = torch.tensor([1.0, 4.0]).reshape(2, 1, 1, 1), torch.ones(1, 1)
    expected = losses.expected(q.amin(0), one, branches=1)
    assert losses.soft_value(expected, entropy, alphas(0.2)).item() == pytest.approx(1.3)
    assert losses.actor_loss(expected, entropy, alphas(0.2)).item() == pytest.approx(-1.3)


@pytest.mark.parametrize(
    ("alpha", "entropy", "target", "loss", "gradient"),
    [
        (0.2, 1.5, -2.0, -5.6330327, 3.5),
        (0.1, 0.56233514, 0.138629, -0.9756195, 0.42370614),
        (1.0, 1.02965301, 1.07664004, 0.0, -0.04698703),
    ],
)
def test_temperature_loss_and_its_gradient_golden_numbers(alpha, entropy, target, loss, gradient):
    log_alpha = torch.tensor([math.log(alpha)], requires_grad=True)
    found = losses.temperature_loss(log_alpha, torch.tensor([[entropy]]), torch.tensor([target]))
    assert found.item() == pytest.approx(loss, abs=1e-6)
    # d log α (H − H̄) / d log α = H − H̄, however small α is
    assert torch.autograd.grad(found.sum(), log_alpha)[0].item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(("entropy", "rises"), [(0.5, True), (0.7, False)])
def test_the_temperature_rises_where_the_entropy_is_below_its_target_and_falls_above(entropy, rises):
    log_alpha = torch.zeros(1, requires_grad=True)
    losses.temperature_loss(log_alpha, torch.tensor([[entropy]]), torch.tensor([0.6])).sum().backward()
    torch.optim.SGD([log_alpha], 0.1).step()
    assert (log_alpha.item() > 0) is rises


def test_the_temperature_loss_moves_no_policy():
    entropy, log_alpha = torch.ones(2, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    losses.temperature_loss(log_alpha, entropy, torch.zeros(1)).sum().backward()
    assert entropy.grad is None and log_alpha.grad.item() == 2


def test_each_kind_of_action_has_its_own_temperature_and_target():
    log_alpha = torch.tensor([0.2, 0.5]).log().requires_grad_()
    entropy, target = torch.tensor([[1.5, 0.3], [-2.5, 0.9]]), torch.tensor([-2.0, 0.6])
    loss = losses.temperature_loss(log_alpha, entropy, target)
    # 3.5 log 0.2 − 0.3 log 0.5 and −0.5 log 0.2 + 0.3 log 0.5
    assert loss.tolist() == pytest.approx([-5.4250885, 0.5967748])
    loss.sum().backward()
    assert log_alpha.grad.tolist() == pytest.approx([3.5 - 0.5, -0.3 + 0.3], abs=1e-6)
    value = losses.soft_value(torch.tensor([[1.0], [2.0]]), entropy, alphas(0.2, 0.5))
    assert value.flatten().tolist() == pytest.approx([1 + 0.3 + 0.15, 2 - 0.5 + 0.45])


def test_reward_streams_share_the_entropy_and_the_policy_gets_it_once():
    q, entropy = torch.tensor([[1.0, 5.0]]), torch.tensor([[1.5]])
    value = losses.soft_value(q, entropy, alphas(0.2))
    assert value.flatten().tolist() == pytest.approx([1.15, 5.15])
    assert losses.actor_loss(q, entropy, alphas(0.2)).item() == pytest.approx(-6.3) == -value.sum().item()


def test_chosen_and_expected_equal_naive_loops():
    generator, sizes, start = torch.Generator().manual_seed(0), [3, 2, 4], [0, 3, 5]
    critics, rows, streams = 2, 5, 2
    q = torch.randn(critics, rows, sum(sizes), streams, generator=generator)
    logits = torch.randn(rows, sum(sizes), generator=generator)
    probs = torch.cat([part.softmax(-1) for part in logits.split(sizes, -1)], -1)
    action = torch.stack([torch.randint(size, (rows,), generator=generator) for size in sizes], -1)
    chosen = losses.chosen(q, action + torch.tensor(start))
    expected = losses.expected(q, probs, len(sizes))
    for e in range(critics):
        for b in range(rows):
            for s in range(streams):
                values = [q[e, b, start[k] + action[b, k], s] for k in range(3)]
                assert chosen[e, b, s].item() == pytest.approx(float(sum(values)) / 3, abs=1e-6)
                total = 0.0
                for k in range(3):
                    for a in range(sizes[k]):
                        total += float(probs[b, start[k] + a] * q[e, b, start[k] + a, s]) / 3
                assert expected[e, b, s].item() == pytest.approx(total, abs=1e-6)


def test_the_expectation_is_that_of_chosen_over_the_product_of_all_branches():
    generator, sizes, start = torch.Generator().manual_seed(0), [3, 2, 2], torch.tensor([0, 3, 5])
    q = torch.randn(1, 1, 7, 1, generator=generator)
    probs = torch.cat([torch.randn(1, size, generator=generator).softmax(-1) for size in sizes], -1)
    total = 0.0
    for action in torch.cartesian_prod(*map(torch.arange, sizes)):
        place = (action + start).unsqueeze(0)
        total += float(probs[0, place[0]].prod() * losses.chosen(q, place))
    assert losses.expected(q, probs, 3).item() == pytest.approx(total, abs=1e-6)


def test_critic_loss_sums_the_critics_and_averages_the_streams():
    q, target = torch.tensor([[[1.0, 0.0]], [[3.0, 2.0]]], requires_grad=True), torch.tensor([[2.0, 2.0]])
    loss = losses.critic_loss(q, target)
    # ½ (1 + 1) of the first stream, ½ (4 + 0) of the second
    assert loss.tolist() == [1.5]
    loss.sum().backward()
    assert q.grad.tolist() == [[[-0.5, -1.0]], [[0.5, 0.0]]]


def test_the_policy_loss_pulls_probability_to_the_better_choice():
    logits = torch.zeros(1, 2, requires_grad=True)
    probs = logits.softmax(-1)
    q = torch.tensor([[[1.0], [3.0]]])
    losses.actor_loss(losses.expected(q, probs, 1), entropy_of(probs), alphas(0.1)).sum().backward()
    # d Σ π q / d logit = π (q − mean); the entropy of the uniform policy has no slope
    assert logits.grad.flatten().tolist() == pytest.approx([0.5, -0.5])


class Known(SAC):
    """SAC whose networks answer with given numbers everywhere."""

    def __init__(self, probs, target_q, **settings):
        super().__init__(None, spaces=Spaces(Box(-1, 1, (1,)), Discrete(len(probs))), net_arch=[], **settings)
        for parameter in (parameter for module in (self.network, self.critic, self.target) for parameter in module.parameters()):
            torch.nn.init.zeros_(parameter)
        self.network.layers[-2].bias.data.copy_(torch.tensor(probs).log())
        self.target.layers[-1].bias.data.copy_(torch.tensor(target_q).unsqueeze(1))


NO_NOISE = torch.zeros(2, 0)
"""For two rows of an action without continuous dimensions."""


def transition(reward, discount):
    """Two rows of the same observation, the reward, and γ · (not terminated) of the second."""
    obs, weight = torch.zeros(2, 1), torch.full((2,), 0.5)
    return Transition(obs, torch.zeros(2).long(), torch.full((2, 1), reward), torch.tensor([[0.0], [discount]]), obs, weight, np.arange(2))


def test_sac_puts_the_discrete_golden_numbers_together():
    model = Known([0.2, 0.5, 0.3], [[1.0, 2.0, 0.0], [1.5, 1.0, 0.5]], ent_coef=0.1, target_entropy_scale=0.98)
    batch = transition(reward=1.0, discount=0.99)
    loss, errors, _ = model.critic_loss(batch, batch.obs, NO_NOISE)
    assert errors.tolist() == pytest.approx([1, 1.79493565])  # the critics answer 0; at the end of an episode y is the reward
    assert loss.item() == pytest.approx((1 + 1.79493565**2) / 2)  # ½ of both critics, the mean of both rows
    model.critic.load_state_dict(model.target.state_dict())
    loss, entropy, _ = model.actor_loss(batch, batch.obs, NO_NOISE)
    assert loss.item() == pytest.approx(-0.80296530)
    model.temperature.log_alpha.data.fill_(1.0)
    assert model.temperature_loss(batch, entropy).item() == pytest.approx(-0.04698703, abs=1e-7)


def test_sac_with_a_value_network_puts_the_golden_numbers_of_ml_agents_together():
    model = Known([0.75, 0.25], [[2.0]], ent_coef=0.1, target_entropy_scale=0.2, value_network=True)
    batch = transition(reward=1.0, discount=0.99)
    for parameter in model.value.parameters():
        torch.nn.init.zeros_(parameter)
    _, errors, _ = model.critic_loss(batch, batch.obs, NO_NOISE, NO_NOISE)
    assert errors.tolist() == pytest.approx([1, 2.98])
    model.critic.layers[-1].bias.data.copy_(TWO_TWINS.flatten(1).unsqueeze(1))
    assert model.value_loss(batch, batch.obs, NO_NOISE).item() == pytest.approx(1.556234**2 / 2, abs=1e-6)
    loss, entropy, _ = model.actor_loss(batch, batch.obs, NO_NOISE)
    assert loss.item() == pytest.approx(-1.556234, abs=1e-6)
    assert model.temperature_loss(batch, entropy).item() == pytest.approx(0.42371 * math.log(0.1), abs=1e-5)
