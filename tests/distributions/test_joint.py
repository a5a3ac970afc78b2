"""Dict and Tuple actions of any depth: parts add up, samples are actions, and each part is logged by its name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from lightning_rl import A2C, PPO, SAC
from lightning_rl.data.rollout import Batch
from lightning_rl.distributions import SoftActions, make_distribution
from lightning_rl.types import tree_index, tree_leaves, tree_to_numpy
from tests.fitting import Rows, fit, tiny

SEEDS = (1, 4, 6, 9, 13, 15)
"""Of spaces of one to three levels, with every kind of part."""
ROWS = 20
NESTED = {"env": {"kwargs": {"action": "nested"}}}
NESTED_PARTS = {"0", "1.bits", "1.pair", "2"}
HYBRID = {"env": {"kwargs": {"action": "hybrid"}}}


def random_space(rng: np.random.Generator, depth: int = 3, elementary: bool = True) -> Space:
    """Draw a space of at most so many levels; Dict or Tuple unless it may be elementary."""
    kind = rng.integers(0 if elementary else 4, 6 if depth else 4)
    if kind == 0:
        return Discrete(int(rng.integers(1, 5)), start=int(rng.integers(-3, 4)))
    if kind == 1:
        sizes = rng.integers(1, 4, [(2,), (3,), (2, 2)][rng.integers(3)])
        return MultiDiscrete(sizes, start=rng.integers(-2, 3, sizes.shape))
    if kind == 2:
        return MultiBinary([1, 3, [2, 2]][rng.integers(3)])
    if kind == 3:
        low = rng.normal(size=[(1,), (3,), (2, 2)][rng.integers(3)]).astype(np.float32)
        return Box(low, low + rng.uniform(0.5, 3, low.shape).astype(np.float32))
    children = [random_space(rng, depth - 1) for _ in range(rng.integers(1, 4))]
    if kind == 4:
        return Tuple(children)
    return Dict(list(zip(rng.permutation(list("abc")).tolist(), children, strict=False)))


def drawn(seed: int, action_dist: str = "clipped_normal", scale: float = 1.0) -> tuple[Space, Any, torch.Tensor]:
    """Return a nested space, its distribution, and inputs for it `[ROWS, num_inputs]`."""
    space = random_space(np.random.default_rng(seed), elementary=False)
    distribution = make_distribution(space, action_dist)
    return space, distribution, scale * torch.randn(ROWS, distribution.num_inputs, generator=torch.Generator().manual_seed(seed))


def at(space: Space, name: str) -> Space:
    """Return the part of a space with this name."""
    for key in name.split("."):
        space = space[int(key) if isinstance(space, Tuple) else key]
    return space


def test_a_joint_probability_and_entropy_are_the_sums_of_its_parts():
    for seed in SEEDS:
        space, distribution, x = drawn(seed)
        action = distribution.sample(x, (), torch.Generator().manual_seed(0))
        found = distribution.evaluate(x, action)
        apart = [make_distribution(at(space, name)) for name in distribution.names]
        parts = zip(apart, x.split([part.num_inputs for part in apart], -1), distribution.flat(action), strict=True)
        expected = [
            torch.stack([value.sum(-1) for value in values], -1) for values in zip(*(p.evaluate(i, a) for p, i, a in parts), strict=True)
        ]
        for value, of_parts in zip(found, expected, strict=True):
            assert value.shape == (ROWS, distribution.num_parts) and of_parts.shape == (ROWS, len(distribution.leaves()))
            assert torch.equal(distribution.leaf_sums(value), of_parts)
            torch.testing.assert_close(value.sum(-1), of_parts.sum(-1))


@pytest.mark.parametrize("action_dist", ["clipped_normal", "tanh_normal", "squashed_normal"])
def test_samples_have_a_row_each_and_become_actions_of_the_space(action_dist):
    for seed in SEEDS:
        space, distribution, x = drawn(seed, action_dist, scale=3.0)
        for action in (distribution.sample(x), distribution.mode(x), distribution.random(x)):
            assert all(len(leaf) == ROWS for leaf in tree_leaves(action))
            actions = distribution.to_env(tree_to_numpy(action))
            assert all(space.contains(tree_index(actions, row)) for row in range(ROWS))


@pytest.mark.parametrize("action_dist", ["clipped_normal", "tanh_normal", "squashed_normal"])
def test_actions_of_the_environment_are_converted_back_to_samples(action_dist):
    for seed in SEEDS:
        _, distribution, x = drawn(seed, action_dist)
        sampled = tree_to_numpy(distribution.random(x))  # inside the bounds, where clipping loses nothing
        back = distribution.from_env(distribution.to_env(sampled))
        for found, expected, leaf in zip(distribution.flat(back), distribution.flat(sampled), distribution.leaves(), strict=True):
            exact = not hasattr(leaf, "bounds")
            np.testing.assert_allclose(found, expected, rtol=0 if exact else 2e-2, atol=0 if exact else 1e-5)


def test_the_entropies_of_a_soft_policy_are_the_sums_of_its_parts():
    for seed in SEEDS:
        _, distribution, x = drawn(seed, "squashed_normal")
        actions = SoftActions(distribution)
        policy = actions.evaluate(x, actions.noise(len(x), torch.Generator().manual_seed(0)))
        parts = actions.leaf_entropies(policy)
        of_kinds = [parts[:, torch.tensor(actions.boxes) == box].sum(-1) for box in (True, False) if box in actions.boxes]
        torch.testing.assert_close(policy.entropy, torch.stack(of_kinds, -1))


def test_parts_are_named_by_their_paths_and_an_action_of_one_part_has_none():
    arm = Dict({"gripper": Discrete(2), "joints": Box(-1, 1, (7,), np.float32)})
    assert list(make_distribution(Dict({"arm": arm, "wheels": Tuple([Discrete(3), Tuple([MultiBinary(2)])])})).names) == [
        "arm.gripper",
        "arm.joints",
        "wheels.0",
        "wheels.1.0",
    ]
    assert [list(make_distribution(space).names) for space in (Discrete(2), MultiDiscrete([2, 2]), MultiBinary(2), arm["joints"])] == [
        []
    ] * 4


# ratios of 1.5 for the choice and 1.1 and 1.2 for the two dimensions of the turn, cut at 1.4: the joint one is 1.98
@pytest.mark.parametrize("ratio, expected", [("joint", 1.4), ("per_part", (1.4 + 1.32) / 2), ("per_dim", (1.4 + 1.1 + 1.2) / 3)])
def test_the_ratio_is_clipped_for_the_whole_action_each_part_or_each_dimension(ratio, expected):
    model = tiny(PPO, "tests.environments:Anything-v0", ratio=ratio, clip_range=0.4, vf_coef=0.0, **HYBRID)
    obs = torch.zeros(4, 3)
    action, _ = model.network.sample(obs)
    log_ratio = torch.tensor([1.5, 1.1, 1.2]).log()
    log_prob = model.network.log_prob(obs, action).detach() - log_ratio
    none, weight = torch.zeros(4, 1), torch.full((4,), 0.25)
    start = torch.zeros(1, 4, dtype=torch.bool)
    loss, metrics = model.loss(Batch(obs, action, log_prob, none, torch.ones(4), none, weight, start), 0.4, None, 0.0, 1.0)
    assert loss.item() == pytest.approx(-expected, abs=1e-5)
    assert metrics["approx_kl"].item() == pytest.approx(1.98 - 1 - math.log(1.98), abs=1e-5)


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_the_entropy_and_probability_of_each_part_are_logged_by_its_name(algorithm):
    logger = Rows()
    fit(tiny(algorithm, "tests.environments:Anything-v0", log_interval=1, **NESTED), logger=logger)
    for _, row in logger.rows:
        parts = {
            kind: {name.rpartition("/")[2]: value for name, value in row.items() if f"/{kind}/" in name} for kind in ("entropy", "log_prob")
        }
        assert parts["entropy"].keys() == parts["log_prob"].keys() == NESTED_PARTS
        assert sum(parts["entropy"].values()) == pytest.approx(-row["train/entropy_loss"], abs=1e-5)
        assert 0 < parts["entropy"]["2"] <= math.log(2) + 1e-6  # a Discrete(2)
        assert all(parts["log_prob"][name] < 0 for name in ("1.bits", "1.pair", "2"))


def test_sac_logs_the_entropy_of_each_part_by_its_name():
    logger = Rows()
    fit(tiny(SAC, "tests.environments:Anything-v0", log_interval=1, **NESTED), logger=logger)
    rows = [row for _, row in logger.rows if "train/entropy_discrete" in row]
    assert rows
    for row in rows:
        parts = {name.rpartition("/")[2]: value for name, value in row.items() if name.startswith("train/entropy/")}
        assert parts.keys() == NESTED_PARTS
        assert parts["0"] == pytest.approx(row["train/entropy_continuous"], abs=1e-5)
        assert sum(parts[name] for name in NESTED_PARTS - {"0"}) == pytest.approx(row["train/entropy_discrete"], abs=1e-5)


def test_sac_logs_entropies_without_a_graph():
    model, asked = tiny(SAC, "tests.environments:Anything-v0", log_interval=1, **HYBRID), []
    entropies = model.actions.leaf_entropies
    model.actions.leaf_entropies = lambda sample: asked.append(entropies(sample)) or asked[-1]
    fit(model)
    assert asked and not any(each.requires_grad for each in asked)


@pytest.mark.variants
@pytest.mark.parametrize(("algorithm", "action"), [(PPO, "discrete"), (A2C, "box"), (SAC, "multi-discrete")])
def test_no_parts_are_logged_for_an_action_of_one_part(algorithm, action):
    logger = Rows()
    fit(tiny(algorithm, "tests.environments:Anything-v0", log_interval=1, env={"kwargs": {"action": action}}), logger=logger)
    assert not [name for _, row in logger.rows for name in row if name.startswith(("train/entropy/", "train/log_prob"))]
