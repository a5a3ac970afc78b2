"""Returns and advantages against numbers worked by hand, and against their definitions."""

import math

import pytest
import torch

from lightning_rl.returns import discounted_sum, explained_variance, gae, n_step, vtrace

GAMMA = 0.9
VALUE = [0.5, 0.4, 0.3]


def column(values):
    """`[T, N = 1, S = 1]` in double precision."""
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1)


def close(tensor, expected):
    assert tensor.flatten().tolist() == pytest.approx(expected, abs=1e-6)


# rewards, next values, terminated at, truncated at, λ, advantages
GAE = {
    "in one episode": ([1, 1, 1], [0.4, 0.3, 0.2], None, None, 0.8, [1.942592, 1.5036, 0.88]),
    "λ = 1": ([1, 1, 1], [0.4, 0.3, 0.2], None, None, 1.0, [2.3558, 1.662, 0.88]),
    "λ = 0": ([1, 1, 1], [0.4, 0.3, 0.2], None, None, 0.0, [0.86, 0.87, 0.88]),
    "terminated in the middle": ([1, 2, 3], [0.4, 0.3, 0.2], 1, None, 0.8, [2.012, 1.6, 2.88]),
    "truncated in the middle": ([1, 2, 3], [0.4, 0.7, 0.2], None, 1, 0.8, [2.4656, 2.23, 2.88]),
    "terminated at the end": ([1, 0, 2], [0.4, 0.3, 7.0], 2, None, 0.8, [1.64768, 1.094, 1.7]),
    "truncated at the end": ([1, 0, 2], [0.4, 0.3, 1.0], None, 2, 0.8, [2.11424, 1.742, 2.6]),
}


def flags(terminated, truncated, length=3):
    """`discount` and `carry` of an episode that ends at one of two rows."""
    discount, carry = torch.full((length, 1, 1), GAMMA, dtype=torch.float64), torch.ones(length, 1, 1, dtype=torch.bool)
    if terminated is not None:
        discount[terminated], carry[terminated] = 0, False
    if truncated is not None:
        carry[truncated] = False
    return discount, carry


@pytest.mark.parametrize("case", GAE)
def test_gae_bootstraps_through_truncation_but_not_termination(case):
    reward, next_value, terminated, truncated, gae_lambda, expected = GAE[case]
    discount, carry = flags(terminated, truncated)
    close(gae(column(reward), discount, column(VALUE), column(next_value), carry, gae_lambda), expected)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_gae_lets_no_reward_of_the_next_episode_leak_into_this_one(end):
    discount, carry = flags(**{"terminated": None, "truncated": None, end: 1})
    a, b = (gae(column([1, 2, last]), discount, column(VALUE), column([0.4, 0.7, 0.2]), carry, 0.8).flatten().tolist() for last in (3, 300))
    assert a[:2] == b[:2]
    assert a[2] != b[2]


def random_stream(steps, num_envs=4, streams=3, seed=0):
    """Random rewards, values and episode ends, with a discount for each stream."""
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, num_envs, streams)
    reward, value, next_value = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    terminated = torch.rand(steps, num_envs, 1, generator=generator) < 0.2
    truncated = (torch.rand(steps, num_envs, 1, generator=generator) < 0.2) & ~terminated
    discount = torch.tensor([0.9, 0.99, 1.0], dtype=torch.float64) * ~terminated
    return reward, discount, value, next_value, ~(terminated | truncated)


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 33])
def test_gae_equals_the_recursion_for_any_length_and_broadcasts_flags_over_streams(steps):
    reward, discount, value, next_value, carry = random_stream(steps)
    expected, ahead = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in reversed(range(steps)):
        ahead = reward[t] + discount[t] * next_value[t] - value[t] + discount[t] * 0.7 * carry[t] * ahead
        expected[t] = ahead
    torch.testing.assert_close(gae(reward, discount, value, next_value, carry, 0.7), expected)


def test_gae_of_one_reward_at_the_end_decays_by_gamma_lambda():
    discount, carry = flags(2, None)
    zero = column([0, 0, 0])
    close(gae(column([0, 0, 1]), discount, zero, zero, carry, 0.8), [0.72**2, 0.72, 1])


def test_a_rollout_split_in_two_gives_the_same_advantages_when_the_first_half_knows_the_returns_of_the_second():
    reward, discount, value, next_value, carry = random_stream(10)
    next_value[3], carry[3] = value[4], True  # the split is within an episode
    whole = gae(reward, discount, value, next_value, carry, 1.0)
    known = next_value.clone()
    known[3] = (whole + value)[4]
    first = gae(reward[:4], discount[:4], value[:4], known[:4], carry[:4], 1.0)
    second = gae(*(x[4:] for x in (reward, discount, value, next_value, carry)), 1.0)
    torch.testing.assert_close(torch.cat([first, second]), whole)


def test_gae_does_not_depend_on_the_order_of_environments():
    stream = random_stream(9)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(gae(*stream, 0.9)[:, order], gae(*(x[:, order] for x in stream), 0.9))


def test_gae_of_a_constant_reward_with_a_perfect_critic_is_0():
    ones = torch.ones(20, 1, 1, dtype=torch.float64)
    value = ones / (1 - GAMMA)
    close(gae(ones, ones * GAMMA, value, value, ones.bool(), 0.95), [0.0] * 20)


def test_returns_carry_no_gradient():
    value = column(VALUE).requires_grad_()
    discount, carry = flags(None, None)
    arguments = (column([1, 1, 1]), discount, value, value, carry)
    target, advantage = vtrace(value, *arguments)
    for tensor in (gae(*arguments, 0.8), n_step(arguments[0], discount, value, carry, 2), target, advantage):
        assert not tensor.requires_grad


def test_n_step_windows_by_hand():
    discount, carry = flags(None, None)
    # r + γV'; r + γr + γ²V', shorter at the end of the rollout
    one = [1 + 0.9 * 0.4, 2 + 0.9 * 0.3, 3 + 0.9 * 0.2]
    two = [1 + 0.9 * 2 + 0.81 * 0.3, 2 + 0.9 * 3 + 0.81 * 0.2, one[2]]
    three = [1 + 0.9 * 2 + 0.81 * 3 + 0.729 * 0.2, two[1], one[2]]
    for n, expected in ((1, one), (2, two), (3, three), (50, three)):
        close(n_step(column([1, 2, 3]), discount, column([0.4, 0.3, 0.2]), carry, n), expected)


def test_n_step_stops_at_the_end_of_an_episode_and_bootstraps_only_through_truncation():
    reward, next_value = column([1, 2, 3]), column([0.4, 0.7, 0.2])
    close(n_step(reward, *flags(1, None)[:1], next_value, flags(1, None)[1], 3), [1 + 0.9 * 2, 2.0, 3.18])
    close(n_step(reward, *flags(None, 1)[:1], next_value, flags(None, 1)[1], 3), [1 + 0.9 * (2 + 0.9 * 0.7), 2 + 0.9 * 0.7, 3.18])


def test_n_step_over_the_whole_rollout_equals_gae_with_lambda_1():
    reward, discount, value, next_value, carry = random_stream(11)
    # within an episode the critic's V(s') is the next row's V(s)
    next_value[:-1] = torch.where(carry[:-1], value[1:], next_value[:-1])
    expected = gae(reward, discount, value, next_value, carry, 1.0) + value
    torch.testing.assert_close(n_step(reward, discount, next_value, carry, 11), expected)


# ρ, (ρ̄, c̄, ρ̄_pg), targets, advantages
VTRACE = {
    "on-policy": ([1, 1, 1], (1, 1, 1), [2.8558, 2.062, 1.18], [2.3558, 1.662, 0.88]),
    "clipped at 1": ([2, 0.5, 1], (1, 1, 1), [2.1079, 1.231, 1.18], [1.6079, 0.831, 0.88]),
    "wider clips": ([2, 0.5, 1], (3, 1, 1.5), [2.9679, 1.231, 1.18], [2.41185, 0.831, 0.88]),
}


@pytest.mark.parametrize("case", VTRACE)
def test_vtrace_golden_numbers(case):
    rho, clips, targets, advantages = VTRACE[case]
    discount, carry = flags(None, None)
    target, advantage = vtrace(column(rho).log(), column([1, 1, 1]), discount, column(VALUE), column([0.4, 0.3, 0.2]), carry, *clips)
    close(target, targets)
    close(advantage, advantages)


@pytest.mark.parametrize(("end", "target", "advantage"), [("terminated", 0.75, 0.25), ("truncated", 1.065, 0.565)])
def test_vtrace_bootstraps_through_truncation_but_not_termination(end, target, advantage):
    discount, carry = flags(**{"terminated": None, "truncated": None, end: 0}, length=2)
    v, a = vtrace(column([0.5, 1.5]).log(), column([1, 2]), discount, column([0.5, 0.4]), column([0.7, 0.3]), carry)
    close(v, [target, 2.27])
    close(a, [advantage, 1.87])


@pytest.mark.parametrize("clip_rho", [3.7, None])
@pytest.mark.parametrize("clip_c", [2.2, None])
@pytest.mark.parametrize("lambda_", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("num_envs", [1, 5])
def test_vtrace_equals_the_direct_double_sum(clip_rho, clip_c, lambda_, num_envs):
    steps = 6
    reward, discount, value, next_value, carry = random_stream(steps, num_envs, seed=num_envs)
    log_rho = torch.rand(steps, num_envs, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 5 - 2.5
    rho = log_rho.exp()
    c = lambda_ * rho.clamp(max=math.inf if clip_c is None else clip_c)
    delta = rho.clamp(max=math.inf if clip_rho is None else clip_rho) * (reward + discount * next_value - value)
    expected = torch.stack([value[s] + sum((discount * carry * c)[s:t].prod(0) * delta[t] for t in range(s, steps)) for s in range(steps)])
    ahead = torch.cat([torch.where(carry[:-1], expected[1:], next_value[:-1]), next_value[-1:]])
    target, advantage = vtrace(log_rho, reward, discount, value, next_value, carry, clip_rho, clip_c, 1.3, lambda_)
    torch.testing.assert_close(target, expected)
    torch.testing.assert_close(advantage, rho.clamp(max=1.3) * (reward + discount * ahead - value))


def test_discounted_sum_runs_forwards_from_its_start():
    # decay 0.5; an episode ends at row 1
    reward, decay = torch.tensor([[1.0], [2.0], [4.0], [8.0]]), torch.tensor([[0.5], [0.0], [0.5], [0.5]])
    assert discounted_sum(reward, decay, torch.tensor([3.0])).flatten().tolist() == [4.0, 4.0, 4.0, 10.0]
    assert reward.flatten().tolist() == [1.0, 2.0, 4.0, 8.0]


ALL = torch.ones(4, dtype=torch.bool)


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant():
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert explained_variance(returns, returns, ALL).item() == 1
    assert explained_variance(torch.full((4,), 3.0), returns, ALL).item() == 0
    # residuals 1, 1, -1, -1: variance 1, against 3.5
    value = returns - torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert explained_variance(value, returns, ALL).item() == pytest.approx(1 - 1 / 3.5)
    assert torch.isfinite(explained_variance(returns, torch.ones(4), ALL))


def test_explained_variance_of_streams_does_not_count_the_difference_of_their_means():
    returns = torch.tensor([[101.0, 1.0], [103.0, 1.0], [101.0, 3.0], [103.0, 3.0]])
    assert explained_variance(torch.tensor([102.0, 2.0]).expand(4, 2), returns, ALL).item() == 0
    # the first stream is known, the second is not: variance 0 + 1 of 1 + 1
    value = torch.stack([returns[:, 0], torch.full((4,), 2.0)], -1)
    assert explained_variance(value, returns, ALL).item() == pytest.approx(0.5)


def test_explained_variance_uses_valid_rows_alone():
    value, returns = torch.tensor([1.0, 2.0, 99.0]), torch.tensor([1.0, 2.0, -7.0])
    assert explained_variance(value, returns, torch.tensor([True, True, False])).item() == 1
    assert explained_variance(value, returns, torch.tensor([True, True, True])).item() < 0
