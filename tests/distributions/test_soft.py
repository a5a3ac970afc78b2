"""Distributions of off-policy algorithms: squashed densities, exploration, random actions, and choices with continuous dimensions."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from lightning_rl.distributions import SoftActions, check_box_actions, make_distribution, make_epsilon_greedy
from lightning_rl.errors import SettingError
from lightning_rl.losses.soft_actor_critic import chosen, expected
from lightning_rl.types import tree_index, tree_leaves, tree_map, tree_stack, tree_to_numpy, tree_to_torch

LOPSIDED = Box(np.array([-1, 0.5, -7], np.float32), np.array([3, 0.75, -2], np.float32))
SPACES = {
    "box": LOPSIDED,
    "matrix": Box(-0.1, 0.3, (2, 2), np.float32),
    "double box": Box(-0.1, 0.3, (2,), np.float64),
    "discrete": Discrete(4, start=-2),
    "multi_discrete": MultiDiscrete([3, 2, 4], start=[1, -1, 0]),
    "multi_discrete of 2 dimensions": MultiDiscrete([[2, 3], [4, 2]], start=[[1, 2], [3, 4]]),
    "bits": MultiBinary(3),
    "grid of bits": MultiBinary([2, 3]),
    "dict": Dict(move=LOPSIDED, jump=Discrete(3, start=1)),
    "nested": Tuple([Dict(a=MultiDiscrete([2, 3]), b=Tuple([LOPSIDED, MultiBinary(2)])), Discrete(2), Box(-2, 2, (1,))]),
}
SQUASHES = ("squashed_normal", "noisy", "tanh_normal")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(distribution, rows=5, scale=1.0):
    return scale * torch.randn(rows, distribution.num_inputs, generator=seeded())


# ---------------------------------------------------------------- squashed Gaussians


@pytest.mark.parametrize("half_range", [1, 2])
def test_squashed_density_golden_numbers_do_not_depend_on_the_bounds(half_range):
    distribution = make_distribution(Box(-half_range, half_range, (1,)), "squashed_normal")
    action = torch.tensor([[0.46211716]])  # tanh 0.5
    assert distribution.evaluate(torch.zeros(1, 2), action)[0].item() == pytest.approx(-0.80370952, abs=1e-6)
    assert distribution.to_env(action.numpy()).item() == pytest.approx(0.46211716 * half_range)


@pytest.mark.parametrize(("mean", "log_std"), [(-0.8, -2.0), (0.0, 0.0), (1.5, 0.5), (-0.8, 0.5)])
def test_squashed_density_of_a_lopsided_box_integrates_to_1_over_unit_actions(mean, log_std):
    torch.manual_seed(1)  # of the surprise, which is sampled
    distribution = make_distribution(Box(-0.5, 3.0, (1,)), "squashed_normal").double()
    cells = 50_000
    action = (2 * (torch.arange(cells, dtype=torch.float64) + 0.5) / cells - 1).unsqueeze(-1)
    log_prob, surprise = distribution.evaluate(torch.tensor([[mean, log_std]], dtype=torch.float64).expand(cells, 2), action)
    width = 2 / cells
    assert (log_prob.exp().sum() * width).item() == pytest.approx(1, abs=1e-3)
    assert surprise.mean().item() == pytest.approx(-(log_prob.exp() * log_prob).sum().item() * width, abs=0.02)


@pytest.mark.parametrize("action_dist", ["squashed_normal", "tanh_normal"])
def test_monte_carlo_integral_of_the_density_over_unit_actions_of_3_dimensions_is_1(action_dist):
    distribution = make_distribution(LOPSIDED, action_dist, log_std_init=-0.2)
    mean, log_std = torch.tensor([0.3, -0.6, 0.1]), torch.tensor([-0.2, 0.1, -0.4])
    x = torch.cat([mean, log_std]) if action_dist == "squashed_normal" else mean
    unit = torch.empty(200_000, 3).uniform_(-1, 1, generator=seeded())
    action = unit if action_dist == "squashed_normal" else unit.atanh()
    log_prob, _ = distribution.evaluate(x.expand(len(unit), -1), action)
    volume = 2**3
    assert (log_prob.sum(-1).exp().mean() * volume).item() == pytest.approx(1, abs=0.015)


def test_a_draws_log_probability_is_that_of_its_action():
    distribution = make_distribution(LOPSIDED, "squashed_normal")
    x = inputs(distribution, rows=1000, scale=0.2)
    action, log_prob = distribution.rsample(x, distribution.noise(x, seeded()))
    torch.testing.assert_close(distribution.evaluate(x, action)[0], log_prob, rtol=1e-3, atol=1e-3)
    assert torch.equal(distribution.sample(x, (), seeded()), action)


def test_draws_are_reparameterized():
    distribution = make_distribution(Box(-1, 1, (1,)), "squashed_normal")
    x = torch.tensor([[0.3, -0.5]], requires_grad=True)
    action, _ = distribution.rsample(x, distribution.noise(x, seeded()))
    (gradient,) = torch.autograd.grad(action.sum(), x)
    slope = 1 - action.item() ** 2
    # a = tanh(μ + σ ε): da/dμ = 1 − a², da/d log σ = (1 − a²) σ ε with σ ε = atanh a − μ
    assert gradient[0].tolist() == pytest.approx([slope, slope * (math.atanh(action.item()) - 0.3)], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squashed_log_probability_and_its_gradient_stay_finite_up_to_20(dtype):
    distribution = make_distribution(Box(-2, 3, (41,)), "squashed_normal").to(dtype)
    mean = torch.linspace(-20, 20, 41, dtype=dtype)
    for log_std in (-30.0, -20.0, -1.0, 2.0, 9.0):
        x = torch.cat([mean, torch.full_like(mean, log_std)]).unsqueeze(0).requires_grad_()
        action, log_prob = distribution.rsample(x, distribution.noise(x, seeded()))
        (log_prob.sum() + action.sum()).backward()
        assert all(torch.isfinite(tensor).all() for tensor in (action, log_prob, x.grad))
    # a narrow Gaussian at 20: log N = −½ ε² + 20 − ½ log 2π plus 2 (20 − log 2)
    x = torch.cat([torch.full((41,), 20.0), torch.full((41,), -20.0)]).to(dtype).unsqueeze(0)
    noise = torch.empty(1, 41, dtype=dtype).normal_(generator=seeded()).double()
    tail = -0.5 * noise.square() + 20 - 0.5 * math.log(2 * math.pi) + 2 * (20 - math.log(2))
    found = distribution.rsample(x, distribution.noise(x, seeded()))[1].double()
    torch.testing.assert_close(found, tail, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_actions_up_to_the_bounds_have_a_finite_log_probability(dtype):
    distribution = make_distribution(Box(-2, 3, (41,)), "squashed_normal").to(dtype)
    x = torch.zeros(1, 82, dtype=dtype, requires_grad=True)
    action = torch.linspace(-20, 20, 41, dtype=dtype).tanh().unsqueeze(0)
    assert action[0, 0] == -1 and action[0, -1] == 1
    log_prob, surprise = distribution.evaluate(x, action)
    (log_prob.sum() + surprise.sum()).backward()
    assert all(torch.isfinite(tensor).all() for tensor in (log_prob, surprise, x.grad))


def test_log_sigma_is_clipped_to_minus_20_and_2():
    distribution = make_distribution(Box(-1, 1, (1,)), "squashed_normal")
    for beyond, end in ((-50.0, -20.0), (9.0, 2.0)):
        far, near = (distribution.rsample(torch.tensor([[0.1, log_std]]), torch.ones(1, 1)) for log_std in (beyond, end))
        torch.testing.assert_close(far, near)
        draws = (distribution.draw(np.array([[0.1, log_std]], np.float32), np.ones((1, 1), np.float32)) for log_std in (beyond, end))
        np.testing.assert_array_equal(*draws)


@pytest.mark.parametrize("action_dist", ["squashed_normal", "noisy"])
def test_arrays_and_noise_make_the_same_actions_as_tensors(action_dist):
    distribution = make_distribution(LOPSIDED, action_dist)
    distribution.sigma = 0.3
    x = inputs(distribution, rows=100)
    drawn = distribution.draw(x.numpy(), distribution.noise(x, seeded(3)).numpy())
    np.testing.assert_allclose(drawn, distribution.sample(x, (), seeded(3)).numpy(), rtol=1e-5, atol=1e-6)


def test_modes_of_continuous_actions():
    x = torch.tensor([[0.5, -3.0, 0.0, 0.7, 0.1, -0.2]])
    assert make_distribution(LOPSIDED, "squashed_normal").mode(x)[0].tolist() == pytest.approx([math.tanh(0.5), math.tanh(-3), 0])
    noisy = make_distribution(LOPSIDED, "noisy")
    noisy.sigma = 5.0
    assert torch.equal(noisy.mode(x[:, 3:]), x[:, 3:])


# ---------------------------------------------------------------- exploration


def test_exploration_noise_has_its_deviation_and_is_clipped_to_the_bounds():
    distribution = make_distribution(Box(-1, 1, (2,)), "noisy")
    x = torch.tensor([0.0, 0.95]).expand(50_000, 2)
    assert torch.equal(distribution.sample(x, (), seeded()), x)  # none unless asked for
    distribution.sigma = 0.1
    action = distribution.sample(x, (), seeded())
    assert action[:, 0].std().item() == pytest.approx(0.1, rel=0.02)
    assert action[:, 0].mean().item() == pytest.approx(0, abs=2e-3)
    assert action.max() == 1
    assert (action[:, 1] == 1).float().mean().item() == pytest.approx(0.3085, abs=0.01)  # 1 − Φ(0.05 / 0.1)


@pytest.mark.parametrize(("epsilon", "greatest"), [(0.0, 1.0), (0.5, 0.625), (1.0, 0.25)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_epsilon_greedy_takes_the_greatest_value_or_any(epsilon, greatest, scale):
    distribution = make_epsilon_greedy(Discrete(4))
    distribution.epsilon = epsilon
    x = scale * torch.tensor([-1.0, 3.0, 2.5, -7.0]).expand(100_000, 4)
    frequency = distribution.sample(x, (), seeded()).bincount(minlength=4) / len(x)
    others = (1 - greatest) / 3
    assert frequency.tolist() == pytest.approx([others, greatest, others, others], abs=0.006)
    assert (distribution.mode(x) == 1).all()


def test_exploration_is_decided_by_the_generator():
    distribution = make_epsilon_greedy(Discrete(4))
    distribution.epsilon = 0.5
    x = inputs(distribution, rows=100)
    draws = [distribution.sample(x, (), seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("action_dist", ["squashed_normal", "noisy", "clipped_normal", "tanh_normal"])
def test_random_continuous_actions_are_uniform_between_the_bounds(action_dist):
    distribution = make_distribution(LOPSIDED, action_dist)
    action = distribution.to_env(distribution.random(torch.full((40_000, distribution.num_inputs), 9.0), (), seeded()).numpy())
    for values, low, high in zip(action.T, LOPSIDED.low, LOPSIDED.high, strict=True):
        share = np.histogram(values, 8, (low, high))[0] / len(values)
        np.testing.assert_allclose(share, 1 / 8, atol=0.008)


def discrete_spaces():
    """Return distributions without continuous dimensions."""
    names = ("discrete", "multi_discrete", "multi_discrete of 2 dimensions", "bits")
    return [make_epsilon_greedy(Discrete(4)), *(make_distribution(SPACES[name]) for name in names)]


def test_random_choices_are_uniform_whatever_the_network_returns():
    for distribution in discrete_spaces():
        x = torch.linspace(-50, 50, distribution.num_inputs).expand(40_000, -1)
        choices = distribution.choices(distribution.random(x, (), seeded()))
        for branch, size in zip(choices.T, distribution.sizes, strict=True):
            frequency = branch.bincount(minlength=size) / len(x)
            assert frequency.tolist() == pytest.approx([1 / size] * size, abs=0.012)


def test_random_actions_of_a_tree_are_random_in_all_its_parts():
    distribution = make_distribution(SPACES["nested"], "squashed_normal")
    action = distribution.random(torch.full((20_000, distribution.num_inputs), 9.0), (), seeded())
    assert action[0]["a"].float().mean(0).tolist() == pytest.approx([0.5, 1.0], abs=0.02)
    assert action[0]["b"][0].mean(0).tolist() == pytest.approx([0] * 3, abs=0.02)
    assert action[0]["b"][1].mean(0).tolist() == pytest.approx([0.5] * 2, abs=0.02)
    assert action[1].float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert action[2].var().item() == pytest.approx(1 / 3, abs=0.02)


MASKS = {4: torch.tensor([True, False, False, True]), 9: torch.tensor([True, False, True, False, True, False, False, False, True])}


@pytest.mark.parametrize("draw", ["sample", "random", "mode"])
@pytest.mark.parametrize("name", ["epsilon 0", "epsilon 0.5", "epsilon 1", "discrete", "multi_discrete"])
def test_masked_draws_are_never_illegal_and_random_ones_are_uniform_over_the_legal_choices(name, draw):
    space = SPACES["multi_discrete" if name == "multi_discrete" else "discrete"]
    distribution = make_epsilon_greedy(space) if name.startswith("epsilon") else make_distribution(space)
    if name.startswith("epsilon"):
        distribution.epsilon = float(name.split()[1])
    mask = MASKS[distribution.num_inputs]
    x = torch.where(mask, -50.0, 50.0).expand(100_000, -1)
    masks = mask.expand_as(x)
    action = distribution.mode(x, masks) if draw == "mode" else getattr(distribution, draw)(x, masks, seeded())
    choices = distribution.choices(action)
    for branch, legal in zip(choices.T, mask.split(distribution.sizes), strict=True):
        frequency = branch.bincount(minlength=len(legal)) / len(x)
        assert (frequency[~legal] == 0).all()
        if draw == "random":
            torch.testing.assert_close(frequency[legal], torch.full_like(frequency[legal], 1 / int(legal.sum())), rtol=0, atol=0.01)


# ---------------------------------------------------------------- the environment's form


@pytest.mark.parametrize("action_dist", [*SQUASHES, "clipped_normal"])
def test_to_env_inverts_from_env(action_dist):
    for space in SPACES.values():
        space.seed(0)
        distribution = make_distribution(space, action_dist)
        actions = tree_map(np.asarray, tree_stack([space.sample() for _ in range(20)]))
        back = distribution.to_env(distribution.from_env(actions))
        assert all(space.contains(tree_index(back, i)) for i in range(20))
        for expected_leaf, leaf in zip(tree_leaves(actions), tree_leaves(back), strict=True):
            np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("action_dist", SQUASHES)
def test_from_env_inverts_to_env_and_keeps_shapes_and_types(action_dist):
    for space in SPACES.values():
        distribution = make_distribution(space, action_dist)
        kept = tree_to_numpy(distribution.random(torch.zeros(50, distribution.num_inputs), (), seeded()))
        back = distribution.from_env(distribution.to_env(kept))
        for expected_leaf, leaf in zip(tree_leaves(kept), tree_leaves(back), strict=True):
            assert leaf.dtype == expected_leaf.dtype
            np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("space", "action", "kept"),
    [
        (Discrete(4, start=-2), [-2, 1], [0, 3]),
        (MultiDiscrete([[2, 3], [4, 2]], start=[[1, 2], [3, 4]]), [[[1, 4], [6, 5]]], [[0, 2, 3, 1]]),
        (MultiBinary([2, 2]), [[[0, 1], [1, 0]]], [[0, 1, 1, 0]]),
        (LOPSIDED, [[-1, 0.625, -2], [0, 0.5, -7]], [[-1, 0, 1], [-0.5, -1, -1]]),
    ],
)
def test_demonstrated_actions_by_hand(space, action, kept):
    dtype = space.dtype if isinstance(space, Box | MultiBinary) else np.int64
    assert make_distribution(space, "squashed_normal").from_env(np.array(action, dtype)).tolist() == kept


def test_demonstrations_at_the_bounds_are_converted_to_finite_numbers():
    distribution = make_distribution(LOPSIDED, "tanh_normal")
    ends = np.stack([LOPSIDED.low, LOPSIDED.high])
    u = distribution.from_env(ends)
    assert np.isfinite(u).all() and (abs(u) > 7).all()
    np.testing.assert_allclose(distribution.to_env(u), ends, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_demonstrated_choices_may_have_any_integer_type(dtype):
    for space, action, kept in ((Discrete(4, start=-2), [1, 0], [3, 2]), (MultiDiscrete([3, 2], start=[1, -1]), [[3, 0]], [[2, 1]])):
        stored = make_distribution(space).from_env(np.array(action, dtype))
        assert stored.tolist() == kept and stored.dtype == np.int64


@pytest.mark.parametrize("action_dist", SQUASHES)
def test_a_dimension_that_cannot_move_is_refused_in_one_line(action_dist):
    stuck = Box(np.array([[-1, 2], [-1, -1]], np.float32), np.array([[1, 2], [1, 1]], np.float32))
    with pytest.raises(
        SettingError,
        match=r"^(a policy of SAC, TQC, CrossQ or CQL|TD3|action_dist .*) needs a Box with low < high, got 2 for both at \[0, 1\]$",
    ):
        make_distribution(stuck, action_dist)


def test_spaces_that_do_not_fit_are_refused_in_one_line():
    unbounded = Box(np.array([-1, -np.inf], np.float32), np.array([1, 1], np.float32))
    with pytest.raises(SettingError, match=r"^a policy of SAC, TQC, CrossQ or CQL needs a bounded Box, got Box\(2,\); use PPO$"):
        make_distribution(unbounded, "squashed_normal")
    with pytest.raises(SettingError, match=r"^TD3 needs a bounded Box, got Box\(2,\); use PPO$"):
        make_distribution(unbounded, "noisy")
    with pytest.raises(SettingError, match=r"^a policy of IQL or AWAC needs a bounded Box, got Box\(2,\); use PPO$"):
        make_distribution(unbounded, "unit_normal")
    with pytest.raises(SettingError, match=r"^DQN and PQN need a Discrete action space, got Box\(3,\); use SAC, TD3 or PPO$"):
        make_epsilon_greedy(LOPSIDED)
    with pytest.raises(SettingError, match=r"^DQN and PQN need a Discrete action space, got MultiBinary\(3\); use SAC or PPO$"):
        make_epsilon_greedy(MultiBinary(3))
    with pytest.raises(SettingError, match=r"^TD3 needs a Box action space, got Discrete\(3\); use SAC or PPO \(offline: IQL or AWAC\)$"):
        check_box_actions("TD3", Discrete(3))
    check_box_actions("TD3", LOPSIDED)


# ---------------------------------------------------------------- soft actions

BRANCHES = {
    "box": [],
    "matrix": [],
    "discrete": [4],
    "multi_discrete": [3, 2, 4],
    "multi_discrete of 2 dimensions": [2, 3, 4, 2],
    "bits": [2] * 3,
    "dict": [3],
    "nested": [2, 3, 2, 2, 2],
}
DIMENSIONS = {"box": 3, "matrix": 4, "dict": 3, "nested": 4}


def soft(name):
    return SoftActions(make_distribution(SPACES[name], "squashed_normal"))


@pytest.mark.parametrize("name", BRANCHES)
def test_a_soft_policy_draws_the_continuous_dimensions_and_weighs_all_choices(name):
    actions, sizes, dimensions = soft(name), BRANCHES[name], DIMENSIONS.get(name, 0)
    kinds = ["continuous"] * bool(dimensions) + ["discrete"] * bool(sizes)
    assert (actions.kinds, actions.num_actions) == (kinds, dimensions)
    assert (actions.num_branches, actions.num_choices) == (len(sizes) or 1, sum(sizes) or 1)
    policy = actions.evaluate(inputs(actions.distribution), actions.noise(5, seeded()))
    assert policy.probs.shape == (5, actions.num_choices) and policy.entropy.shape == (5, len(kinds))
    assert policy.action is None if not dimensions else policy.action.shape == (5, dimensions)
    for branch in policy.probs.split(sizes or [1], -1):
        torch.testing.assert_close(branch.sum(-1), torch.ones(5))


@pytest.mark.parametrize("name", BRANCHES)
def test_entropies_and_probabilities_are_those_of_the_distribution(name):
    actions = soft(name)
    distribution, x = actions.distribution, inputs(actions.distribution, scale=0.5)
    policy = actions.evaluate(x, actions.noise(len(x), seeded()))
    stored = distribution.sample(x, (), seeded(1))
    log_prob, entropy = distribution.evaluate(x, stored)
    continuous = [box for leaf, box in zip(distribution.leaves(), actions.boxes, strict=True) for _ in range(leaf.num_parts)]
    discrete = ~torch.tensor(continuous)
    if "discrete" in actions.kinds:
        torch.testing.assert_close(policy.entropy[:, -1], entropy[:, discrete].sum(-1))
        torch.testing.assert_close(policy.probs.gather(-1, actions.choices(stored)), log_prob[:, discrete].exp())
    else:
        assert (policy.probs == 1).all()
    if "continuous" in actions.kinds:
        boxes = [part for part, box in zip(distribution.flat(stored), actions.boxes, strict=True) if box]
        assert torch.equal(actions.continuous(stored), torch.cat(boxes, -1))
        drawn = iter(policy.action.split([part.shape[-1] for part in boxes], -1))
        leaves = zip(distribution.leaves(), actions.boxes, x.split(actions.inputs, -1), strict=True)
        surprise = -sum(leaf.evaluate(part, next(drawn))[0].sum(-1) for leaf, box, part in leaves if box)
        torch.testing.assert_close(policy.entropy[:, 0], surprise, rtol=1e-3, atol=1e-3)
    else:
        assert policy.action is None and actions.continuous(stored) is None


@pytest.mark.parametrize("name", BRANCHES)
def test_choices_equal_a_naive_lookup(name):
    actions = soft(name)
    stored = actions.distribution.random(torch.zeros(50, actions.distribution.num_inputs), (), seeded())
    places = [(branch, choice) for branch, size in enumerate(BRANCHES[name] or [1]) for choice in range(size)]
    parts = [part for part, box in zip(actions.distribution.flat(stored), actions.boxes, strict=True) if not box]
    found = actions.choices(stored).tolist()
    assert len(found) == 50
    for row in range(50):
        taken = [int(choice) for part in parts for choice in part[row].reshape(-1)] or [0]
        assert found[row] == [places.index(pair) for pair in enumerate(taken)]


def test_expected_is_the_sum_over_the_product_of_all_branches():
    """E_π[Q] of the additive critic, against every joint action, its probability and its Q."""
    actions = SoftActions(make_distribution(Dict(a=MultiDiscrete([2, 3]), b=LOPSIDED, c=Discrete(2, start=5)), "squashed_normal"))
    distribution = actions.distribution
    x = inputs(distribution, rows=1)
    policy = actions.evaluate(x, actions.noise(len(x), seeded()))
    q = torch.randn(2, 1, actions.num_choices, 3, generator=seeded())
    total = torch.zeros(2, 1, 3)
    for first, second, third in product(range(2), range(3), range(2)):
        joint = {"a": torch.tensor([[first, second]]), "b": policy.action, "c": torch.tensor([third])}
        log_prob = distribution.evaluate(x, joint)[0][0, [0, 1, -1]].sum()
        total += log_prob.exp() * chosen(q, actions.choices(joint))
        by_hand = (q[:, 0, first] + q[:, 0, 2 + second] + q[:, 0, 5 + third]) / 3
        torch.testing.assert_close(chosen(q, actions.choices(joint))[:, 0], by_hand)
    torch.testing.assert_close(expected(q, policy.probs, actions.num_branches), total)


def test_critics_get_stored_actions_of_the_environment_in_their_places():
    actions = soft("nested")
    space = SPACES["nested"]
    space.seed(1)
    sampled = tree_stack([space.sample() for _ in range(3)])
    stored = tree_to_torch(actions.distribution.from_env(sampled))
    bits = sampled[0]["b"][1]
    choices = [sampled[0]["a"][:, 0], 2 + sampled[0]["a"][:, 1], 5 + bits[:, 0], 7 + bits[:, 1], 9 + sampled[1]]
    assert actions.choices(stored).tolist() == np.stack(choices, 1).tolist()
    unit = np.concatenate([2 * (sampled[0]["b"][0] - LOPSIDED.low) / (LOPSIDED.high - LOPSIDED.low) - 1, sampled[2] / 2], 1)
    torch.testing.assert_close(actions.continuous(stored), torch.from_numpy(unit), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tree", [lambda action: (action,), lambda action: {"a": (action,)}])
def test_a_tree_whose_only_leaf_is_a_box_gives_critics_the_same_vector_as_the_box(tree):
    space = Tuple([LOPSIDED]) if isinstance(tree(0), tuple) else Dict(a=Tuple([LOPSIDED]))
    action = torch.tensor([[0.5, -1.0, 0.25]])
    assert SoftActions(make_distribution(space, "squashed_normal")).continuous(tree(action)) is action


@pytest.mark.parametrize(
    ("space", "multiplier", "scale", "targets"),
    [
        (Box(-1, 1, (3,)), 1, 1, {"continuous": -3}),
        (Box(-2, 2, (3,)), 1, 1, {"continuous": -3}),
        (Box(-2, 2, (3,)), 0.5, 1, {"continuous": -1.5}),
        (LOPSIDED, 1, 1, {"continuous": -3}),
        (Discrete(2), 1, 0.98, {"discrete": 0.67928}),
        (Discrete(3), 1, 0.98, {"discrete": 1.07664}),
        (Discrete(4), 1, 0.98, {"discrete": 1.35857}),
        (Discrete(6), 1, 0.98, {"discrete": 1.75592}),
        (Discrete(18), 1, 0.98, {"discrete": 2.83256}),
        (Discrete(2), 1, 0.89, {"discrete": 0.61690}),
        (Discrete(4), 1, 0.89, {"discrete": 1.23380}),
        (Discrete(6), 1, 0.89, {"discrete": 1.59467}),
        (Discrete(18), 1, 0.89, {"discrete": 2.57243}),
        (Discrete(2), 1, 0.2, {"discrete": 0.138629}),
        (Discrete(3), 1, 0.2, {"discrete": 0.219722}),
        (Discrete(4), 1, 0.2, {"discrete": 0.277259}),
        (MultiDiscrete([3, 2, 4]), 1, 0.5, {"discrete": 0.5 * math.log(24)}),
        (MultiBinary([2, 3]), 1, 1, {"discrete": math.log(64)}),
        (SPACES["dict"], 1, 0.89, {"continuous": -3, "discrete": 0.89 * math.log(3)}),
    ],
)
def test_target_entropies(space, multiplier, scale, targets):
    found = SoftActions(make_distribution(space, "squashed_normal")).target_entropy(multiplier, scale)
    assert found == pytest.approx(targets, abs=1e-5)
    assert list(found) == list(targets)


# ---------------------------------------------------------------- masks


NESTED_MASK = torch.tensor([True, True, False, True, False, *[True] * 4, False, True])  # of a, two bits and the choice
LEGAL = {  # branch after branch
    "discrete": ([4], [[0, 3]]),
    "multi_discrete": ([3, 2, 4], [[0, 2], [1], [3]]),
    "nested": ([2, 3, 2, 2, 2], [[0, 1], [1], [0, 1], [0, 1], [1]]),
}


def mask_of(name, rows):
    mask = NESTED_MASK if name == "nested" else MASKS[sum(LEGAL[name][0])]
    return mask.expand(rows, -1)


@pytest.mark.parametrize(("favour", "upstream"), [(0.0, 1.0), (50.0, 1e20), (1e6, 1e20)])
@pytest.mark.parametrize("name", LEGAL)
def test_illegal_choices_have_probability_gradient_and_entropy_exactly_0(name, favour, upstream):
    actions, (sizes, legal) = soft(name), LEGAL[name]
    mask = torch.cat([torch.tensor([choice in branch for choice in range(size)]) for size, branch in zip(sizes, legal, strict=True)])
    columns = torch.arange(actions.distribution.num_inputs)
    # nested: 5 logits of a, 6 numbers of the box, 2 bits, 2 logits of the choice, and 2 numbers of the last box
    illegal = columns[[2, 4, 13]] if name == "nested" else columns[~mask]
    x = inputs(actions.distribution)
    x[:, illegal] += favour
    x.requires_grad_()
    policy = actions.evaluate(x, actions.noise(len(x), seeded()), mask_of(name, 5))
    assert (policy.probs[:, ~mask] == 0).all() and (policy.probs[:, mask] > 0).all()
    for branch, kept in zip(policy.probs.split(sizes, -1), legal, strict=True):
        torch.testing.assert_close(branch[:, kept].sum(-1), torch.ones(5))
    p = policy.probs[:, mask]
    torch.testing.assert_close(policy.entropy[:, -1], -(p * p.log()).sum(-1))
    q = torch.randn(5, actions.num_choices, 1, generator=seeded())
    loss = (expected(q, policy.probs, len(sizes)).sum() + policy.entropy[:, -1].sum()) * upstream
    loss.backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[:, illegal] == 0).all()
    assert (x.grad[:, 0] != 0).all()


def test_masked_entropy_and_expectation_are_those_of_the_legal_choices_alone():
    x, q = torch.tensor([[0.3, 9.0, 9.0, -1.2]]), torch.tensor([[[1.0], [1e9], [-1e9], [2.0]]])
    masked = soft("discrete").evaluate(x, torch.zeros(1, 0), mask_of("discrete", 1))
    alone = SoftActions(make_distribution(Discrete(2))).evaluate(x[:, [0, 3]], torch.zeros(len(x), 0))
    torch.testing.assert_close(masked.entropy, alone.entropy)
    torch.testing.assert_close(expected(q, masked.probs, 1), expected(q[:, [0, 3]], alone.probs, 1))


def test_a_single_legal_choice_is_certain():
    mask = torch.tensor([[False, True, False, False]])
    policy = soft("discrete").evaluate(torch.tensor([[5.0, -90.0, 3.0, 2.0]]), torch.zeros(1, 0), mask)
    assert policy.probs.tolist() == [[0, 1, 0, 0]]
    assert policy.entropy.item() == 0


def test_the_policy_of_iql_explores_with_its_newest_deviation_while_an_iteration_goes_on():
    distribution = make_distribution(Box(-1, 1, (2,), np.float32), "unit_normal")
    x = torch.zeros(1000, 2)
    noise = distribution.noise(x, torch.Generator().manual_seed(0)).detach()
    for log_std in (-3.0, -5.0):
        distribution.log_std.data.fill_(log_std)
        for drawn in (distribution.draw(x, noise), torch.from_numpy(distribution.draw(x.numpy(), noise.numpy()))):
            assert drawn.std().item() == pytest.approx(math.exp(log_std), rel=0.05)
