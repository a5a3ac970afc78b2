"""Distributions: probabilities against their definitions, masks, and the environment's form of actions."""

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from lightning_rl.distributions import Joint, make_distribution
from lightning_rl.errors import SettingError
from lightning_rl.losses.policy_gradient import clipped_surrogate
from lightning_rl.types import tree_index, tree_leaves, tree_map, tree_to_numpy

LOPSIDED = Box(np.array([-1, 0.5, -7], np.float32), np.array([3, 0.75, -2], np.float32))
SPACES = {
    "discrete": Discrete(4, start=-2),
    "multi_discrete": MultiDiscrete([3, 2, 4], start=[1, -1, 0]),
    "multi_discrete of 2 dimensions": MultiDiscrete([[2, 3], [4, 2]], start=[[1, 2], [3, 4]]),
    "short discrete": Discrete(5, start=-2, dtype=np.int32),
    "short multi_discrete": MultiDiscrete([3, 2], dtype=np.int32),
    "bits": MultiBinary(3),
    "grid of bits": MultiBinary([2, 3]),
    "box": LOPSIDED,
    "matrix": Box(-0.1, 0.3, (2, 2), np.float32),
    "double box": Box(-0.1, 0.3, (2,), np.float64),
    "dict": Dict(move=LOPSIDED, jump=Discrete(2, start=1), keys=Tuple([MultiBinary(2), MultiDiscrete([2, 3])])),
    "tuple": Tuple([Discrete(3), Dict(a=Discrete(2))]),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def logits(distribution, rows=5, scale=1.0):
    return scale * torch.randn(rows, distribution.num_inputs, generator=seeded())


@pytest.mark.parametrize("action_dist", ["clipped_normal", "tanh_normal"])
@pytest.mark.parametrize("name", SPACES)
def test_samples_and_modes_are_actions_of_the_space(name, action_dist):
    distribution = make_distribution(SPACES[name], action_dist, log_std_init=1.0)
    x = logits(distribution, rows=50, scale=3.0)
    for action in (distribution.sample(x, (), seeded()), distribution.mode(x)):
        actions = distribution.to_env(tree_to_numpy(action))
        assert all(SPACES[name].contains(tree_index(actions, i)) for i in range(50))


@pytest.mark.parametrize("name", SPACES)
def test_probabilities_and_entropies_are_part_by_part_for_any_leading_dimensions(name):
    distribution = make_distribution(SPACES[name])
    x = logits(distribution, rows=6)
    action = distribution.sample(x, (), seeded())
    log_prob, entropy = distribution.evaluate(x, action)
    assert log_prob.shape == entropy.shape == (6, distribution.num_parts)
    rollout = distribution.evaluate(x.unflatten(0, (3, 2)), tree_map(lambda leaf: leaf.unflatten(0, (3, 2)), action))
    torch.testing.assert_close(rollout, (log_prob.unflatten(0, (3, 2)), entropy.unflatten(0, (3, 2))))


@pytest.mark.parametrize("name", SPACES)
def test_samples_depend_on_the_generator_alone(name):
    distribution = make_distribution(SPACES[name])
    x = logits(distribution, rows=20)
    torch.manual_seed(1)
    first = distribution.sample(x, (), seeded(3))
    torch.manual_seed(2)
    again, other = distribution.sample(x, (), seeded(3)), distribution.sample(x, (), seeded(4))
    assert all(map(torch.equal, tree_leaves(first), tree_leaves(again)))
    assert not all(map(torch.equal, tree_leaves(first), tree_leaves(other)))


def test_categorical_log_probability_by_hand():
    # log-softmax of [0, 1] at 1, of [1, 0, 0] at 0, and their sum
    two = make_distribution(Discrete(2)).evaluate(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))[0]
    three = make_distribution(Discrete(3)).evaluate(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0]))[0]
    assert two.item() == pytest.approx(-0.31326169)
    assert three.item() == pytest.approx(-0.55144471)
    # the joint importance ratio against uniform behaviour
    log_rho = two.item() + math.log(2) + three.item() + math.log(3)
    assert log_rho == pytest.approx(0.92705307)
    assert math.exp(log_rho) == pytest.approx(2.52705115)


@pytest.mark.parametrize("name", ["discrete", "multi_discrete", "multi_discrete of 2 dimensions", "bits"])
def test_draws_follow_the_probabilities_and_entropy_is_their_mean_surprise(name):
    distribution = make_distribution(SPACES[name])
    x = logits(distribution, rows=1).expand(40_000, -1)
    action = distribution.sample(x, (), seeded())
    log_prob, entropy = distribution.evaluate(x, action)
    torch.testing.assert_close(-log_prob.mean(0), entropy[0], rtol=0, atol=0.02)
    frequency = (action == action[0]).float().mean(0)
    torch.testing.assert_close(frequency.reshape(-1), log_prob[0].exp(), rtol=0, atol=0.012)


def test_the_mode_is_the_most_likely_action():
    x = torch.tensor([[0.1, 2.0, -1.0, 0.3, 0.2, 5.0]])
    assert make_distribution(Discrete(6)).mode(x).tolist() == [5]
    assert make_distribution(MultiDiscrete([2, 4])).mode(x).tolist() == [[1, 3]]
    assert make_distribution(MultiBinary(6)).mode(x).tolist() == [[1, 1, 0, 1, 1, 1]]
    assert make_distribution(Box(-1, 1, (6,))).mode(x) is x


@pytest.mark.parametrize(
    ("space", "sampled", "expected"),
    [
        (Discrete(4, start=-2), [0, 3], [-2, 1]),
        (MultiDiscrete([3, 2], start=[1, -1]), [[0, 0], [2, 1]], [[1, -1], [3, 0]]),
        (MultiDiscrete([[2, 3], [4, 2]], start=[[1, 2], [3, 4]]), [[0, 2, 3, 1]], [[[1, 4], [6, 5]]]),
        (MultiBinary([2, 2]), [[0.0, 1.0, 1.0, 0.0]], [[[0, 1], [1, 0]]]),
        (LOPSIDED, [[-9.0, 0.6, 0.0]], [[-1.0, 0.6, -2.0]]),
    ],
)
def test_actions_are_converted_for_the_environment(space, sampled, expected):
    actions = make_distribution(space).to_env(np.array(sampled, np.float32 if isinstance(space, Box) else None))
    np.testing.assert_allclose(actions, expected)


def test_random_actions_are_uniform_in_the_dimensions_with_bounds_and_normal_in_those_without():
    low, high = np.array([0, -np.inf, -np.inf, -3e38], np.float32), np.array([4, 1, np.inf, 3e38], np.float32)
    distribution = make_distribution(Box(low, high), log_std_init=math.log(2))
    action = distribution.random(torch.zeros(20_000, 4), (), seeded())
    bounded, *others = action.detach().T
    assert bounded.min() >= 0 and bounded.max() <= 4
    assert (bounded.mean().item(), bounded.var().item()) == (pytest.approx(2, abs=0.05), pytest.approx(16 / 12, abs=0.05))
    for each in others:  # without bounds, or with some whose difference is no number: μ = 0, σ = 2
        assert (each.mean().item(), each.std().item()) == (pytest.approx(0, abs=0.05), pytest.approx(2, abs=0.05))


def test_random_actions_between_bounds_that_float32_does_not_hold_are_numbers():
    distribution = make_distribution(Box(-1e300, 1e300, (2,), np.float64))
    assert distribution.random(torch.zeros(9, 2), (), seeded()).isfinite().all()


@pytest.mark.parametrize("name", ["box", "matrix"])
def test_log_std_is_free_and_learns_from_log_probability(name):
    distribution = make_distribution(SPACES[name], log_std_init=-0.5)
    assert distribution.log_std.tolist() == [-0.5] * distribution.num_parts
    x = torch.zeros(1, distribution.num_inputs)
    distribution.evaluate(x, x + 1.0)[0].sum().backward()
    # d log N / d log σ = z² − 1 with z² = e
    assert distribution.log_std.grad.tolist() == pytest.approx([math.e - 1] * distribution.num_parts)


MASK = {
    "discrete": torch.tensor([True, False, False, True]),
    "multi_discrete": torch.tensor([True, False, True, False, True, False, False, False, True]),
}


@pytest.mark.parametrize("name", MASK)
def test_masked_draws_are_never_illegal_even_where_logits_favour_it(name):
    distribution, mask = make_distribution(SPACES[name]), MASK[name]
    x = torch.where(mask, -50.0, 50.0).expand(20_000, -1)
    actions = distribution.sample(x, mask.expand_as(x), seeded()), distribution.mode(x, mask)
    for action in actions:
        if name == "discrete":
            assert set(action.flatten().tolist()) <= {0, 3}
        else:
            assert [set(column.flatten().tolist()) <= legal for column, legal in zip(action.split(1, -1), ({0, 2}, {1}, {3}), strict=True)]
    assert len(actions[0].unique(dim=0)) == 2  # both legal actions are tried


@pytest.mark.parametrize("name", MASK)
def test_illegal_logits_get_exactly_no_gradient_and_legal_ones_do(name):
    distribution, mask = make_distribution(SPACES[name]), MASK[name]
    x = logits(distribution).requires_grad_()
    masks = mask.expand_as(x)
    log_prob, entropy = distribution.evaluate(x, distribution.sample(x.detach(), masks, seeded()), masks)
    (log_prob.sum() + 3 * entropy.sum()).backward()
    assert (x.grad[:, ~mask] == 0).all()
    assert (x.grad[:, :1] != 0).all()


def test_masked_probability_and_entropy_are_those_of_the_legal_choices_alone():
    x = torch.tensor([[0.3, 9.0, 9.0, -1.2]])
    legal = make_distribution(Discrete(2)).evaluate(torch.tensor([[0.3, -1.2]]), torch.tensor([1]))
    masked = make_distribution(Discrete(4)).evaluate(x, torch.tensor([3]), MASK["discrete"].unsqueeze(0))
    torch.testing.assert_close(masked, legal)
    only = make_distribution(Discrete(4)).evaluate(x, torch.tensor([1]), torch.tensor([[False, True, False, False]]))
    assert (only[0].item(), only[1].item()) == (0, 0)


def test_branches_of_different_sizes_are_independent():
    sizes = [3, 2, 4]
    distribution = make_distribution(MultiDiscrete(sizes))
    x, action = logits(distribution), torch.tensor([[2, 1, 3]]).expand(5, 3)
    log_prob, entropy = distribution.evaluate(x, action)
    for k, (size, part) in enumerate(zip(sizes, x.split(sizes, -1), strict=True)):
        expected = make_distribution(Discrete(size)).evaluate(part, action[:, k])
        torch.testing.assert_close((log_prob[:, k : k + 1], entropy[:, k : k + 1]), expected)


@pytest.mark.parametrize("space", [Dict(a=Discrete(3), b=Discrete(4)), Tuple([Discrete(3), Discrete(4)])])
@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_of_a_tree_of_discrete_actions_is_that_of_a_multi_discrete_one(space, masked):
    tree, flat = make_distribution(space), make_distribution(MultiDiscrete([3, 4]))
    x = logits(flat)
    mask = torch.tensor([True, True, False, True, False, True, True]) if masked else ()
    action = flat.sample(x, mask, seeded())
    parts = {"a": action[:, 0], "b": action[:, 1]} if isinstance(space, Dict) else (action[:, 0], action[:, 1])

    def loss(distribution, action, mask):
        inputs = x.clone().requires_grad_()
        log_prob, entropy = distribution.evaluate(inputs, action, mask)
        ratio = (log_prob.sum(-1) + 1.5).exp()
        total = clipped_surrogate(ratio, torch.linspace(-1, 1, 5), 0.2).mean() - 0.1 * entropy.sum(-1).mean()
        return total, *torch.autograd.grad(total, inputs)

    torch.testing.assert_close(loss(tree, parts, mask), loss(flat, action, mask))


def test_each_part_of_a_nested_tree_has_its_own_slice_action_and_mask():
    distribution = make_distribution(SPACES["dict"])
    assert isinstance(distribution, Joint)
    assert (distribution.num_inputs, distribution.num_parts) == (2 + 2 + 5 + 3, 1 + 2 + 2 + 3)
    x = torch.zeros(1000, distribution.num_inputs)
    assert distribution.mask_width == 2 + 4 + 5
    free, on = [True, True], [False, True]
    mask = torch.tensor([*on, *free, *on, True, False, False, False, True])  # of jump, of two bits and of the pair of keys; moves have none
    action = distribution.sample(x, mask, seeded())
    assert action.keys() == {"jump", "keys", "move"}
    assert (action["jump"] == 1).all()
    assert (action["keys"][0][:, 1] == 1).all() and 400 < action["keys"][0][:, 0].sum() < 600
    assert (action["keys"][1] == torch.tensor([0, 2])).all()
    log_prob, entropy = distribution.evaluate(x, action, mask)
    forced, free_bit = [3, 5, 6, 7], 4
    assert log_prob[:, forced].abs().max() == entropy[:, forced].abs().max() == 0
    assert log_prob[0, free_bit].item() == pytest.approx(-math.log(2)) and entropy[0, free_bit].item() == pytest.approx(math.log(2))


def test_masks_of_bits_have_off_and_on_for_each_and_forced_bits_count_for_nothing():
    distribution = make_distribution(MultiBinary(3))
    x = torch.tensor([[5.0, -5.0, 0.5]], requires_grad=True)
    mask = torch.tensor([[True, False, False, True, True, True]])  # the first bit must be off, the second on
    assert distribution.mode(x, mask).tolist() == [[0, 1, 1]]
    drawn = distribution.sample(x.expand(1000, 3), mask.expand(1000, 6), seeded())
    assert (drawn[:, :2] == torch.tensor([0.0, 1.0])).all() and 560 < drawn[:, 2].sum() < 680  # sigmoid(0.5) = 0.622
    log_prob, entropy = distribution.evaluate(x, torch.tensor([[0.0, 1.0, 1.0]]), mask)
    assert log_prob.tolist() == [pytest.approx([0, 0, -0.474077])] and entropy.tolist() == [pytest.approx([0, 0, 0.662847])]
    assert distribution.log_probs(x, mask).exp().tolist() == [pytest.approx([1, 0, 0, 1, 0.377541, 0.622459])]
    (log_prob.sum() + entropy.sum()).backward()
    assert x.grad[0, :2].tolist() == [0, 0] and x.grad[0, 2] != 0


@pytest.mark.parametrize(
    "space", [Text(4), Box(0, 9, (2,), np.int32), Dict({}), Tuple([]), Dict(a=Discrete(2), b=Dict({})), Tuple([Discrete(2), Text(4)])]
)
def test_an_action_space_without_a_distribution_is_refused_in_one_line(space):
    with pytest.raises(SettingError, match=r"^the action space .* is not supported; use") as error:
        make_distribution(space)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "space", [Box(-1, 1, (0,)), Box(-1, 1, (2, 0)), MultiDiscrete(np.zeros(0, int)), Tuple([Discrete(2), Box(0, 1, (0,))])]
)
@pytest.mark.parametrize("action_dist", ["clipped_normal", "squashed_normal", "noisy"])
def test_an_action_space_without_any_action_is_refused_in_one_line(space, action_dist):
    with pytest.raises(SettingError, match=r"^the action space (Box|MultiDiscrete).* is empty; an algorithm needs something to do$"):
        make_distribution(space, action_dist)


def test_settings_that_do_not_fit_are_refused():
    unbounded = Box(np.array([-1, -np.inf], np.float32), np.array([1, 1], np.float32))
    with pytest.raises(SettingError, match=r"tanh_normal needs a bounded Box, got Box\(2,\); use clipped_normal"):
        make_distribution(unbounded, "tanh_normal")
    with pytest.raises(SettingError, match="did you mean tanh_normal"):
        make_distribution(unbounded, "tanh_norm")
