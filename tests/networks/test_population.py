"""Many parameter sets of one network in one batch."""

from __future__ import annotations

from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_rl.actors.evaluator import (
    NumpyPopulation,
    TorchPopulation,
    draw_actions,
    flat_parameters,
    make_population,
)
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.memory import GRU, LSTM
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.types import tree_index, tree_map, tree_stack, tree_to_torch
from tests.environments import Anything, Crowd

VECTOR = Box(-1, 1, (3,), np.float32)
NETWORKS = {
    "vector": (VECTOR, {}, NumpyPopulation),
    "linear": (VECTOR, {"net_arch": []}, NumpyPopulation),
    "normalized": (VECTOR, {"normalize_obs": "running"}, NumpyPopulation),
    "smooth": (VECTOR, {"activation": "gelu"}, TorchPopulation),
    "choices": (Discrete(5), {}, TorchPopulation),
    "tree": (Anything.observation_spaces["dict"], {"normalize_obs": "running"}, TorchPopulation),
    "image": (Anything.observation_spaces["image"], {"encoder": "nature_cnn", "encoder_features": 8}, TorchPopulation),
    "entities": (Crowd.observation_space, {"entities": ["agents"], "encoder_features": 8}, TorchPopulation),
    "goals": (Crowd.observation_space, {"goals": ["goal"], "encoder_features": 8}, TorchPopulation),
    "LSTM": (VECTOR, {"memory": LSTM(4, 2)}, TorchPopulation),
    "GRU": (VECTOR, {"memory": GRU(4, 2)}, TorchPopulation),
}


def build(name, action=None):
    space, settings, _ = NETWORKS[name]
    torch.manual_seed(1)
    network = ActorCritic(Spaces(space, action or Discrete(4)), **{"net_arch": [8]} | settings)
    if "normalize_obs" in settings:
        network.normalizer.update(tree_to_torch(observations(space, 50)))
    names = [each for each, _ in network.named_parameters() if not each.startswith(("critic.", "distribution."))]
    return network, names


def observations(space, num, seed=1):
    space.seed(seed)
    rows = allocate(space, num)
    for k in range(num):
        tree_map(lambda row, leaf, k=k: row.__setitem__(k, leaf), rows, space.sample())
    return rows


def moved(network, names, noise):
    """A copy of a network whose weights were moved."""
    other = deepcopy(network)
    with torch.no_grad():
        at = 0
        for parameter in map(other.get_parameter, names):
            parameter += torch.from_numpy(noise[at : at + parameter.numel()]).view_as(parameter)
            at += parameter.numel()
    return other


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_members_compute_what_networks_with_their_weights_compute(name):
    network, names = build(name)
    obs, later = (observations(NETWORKS[name][0], 3, seed) for seed in (1, 2))
    population = make_population(network, names, 3, obs)
    assert type(population) is NETWORKS[name][2]
    noise = np.random.default_rng(1).standard_normal((3, population.size), np.float32)
    for k in range(3):
        population.set(k, noise[k])
    start, on = np.ones(3, bool), np.array([False, True, False])
    x, memory = population.act(obs, network.initial_memory(3), start)
    x, memory = x.clone(), tree_map(torch.clone, memory)
    after, _ = population.act(later, memory, on)
    for k in range(3):
        member, row = moved(network, names, noise[k]), slice(k, k + 1)
        expected, own = member.policy(tree_to_torch(tree_index(obs, row)), member.initial_memory(1), torch.ones(1, dtype=torch.bool))
        assert torch.allclose(x[row], expected, rtol=1e-5, atol=1e-5)
        expected, _ = member.policy(tree_to_torch(tree_index(later, row)), own, torch.from_numpy(on[row]))
        assert torch.allclose(after[row], expected, rtol=1e-5, atol=1e-5)
    assert (x[0] - x[1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [NumpyPopulation, TorchPopulation])
def test_the_weights_of_the_network_stay_and_a_member_can_be_set_again(kind):
    network, names = build("vector")
    before = flat_parameters(network, names)
    population = kind(network, names, 2)
    obs, noise = observations(VECTOR, 2), np.ones(population.size, np.float32)
    first = population.act(obs, (), np.ones(2, bool))[0].clone()
    population.set(0, noise)
    other = population.act(obs, (), np.ones(2, bool))[0].clone()
    population.set(0, 0 * noise)
    assert torch.equal(population.act(obs, (), np.ones(2, bool))[0], first)
    assert torch.equal(other[1], first[1]) and not torch.equal(other[0], first[0])
    assert torch.equal(flat_parameters(network, names), before)


def test_a_member_alone_computes_the_same_to_the_last_bit():
    network, names = build("normalized")
    obs = observations(VECTOR, 7)
    noise = np.random.default_rng(2).standard_normal((7, flat_parameters(network, names).numel()), np.float32)
    many = NumpyPopulation(network, names, 7)
    for k in range(7):
        many.set(k, noise[k])
    together = many.act(obs, (), np.ones(7, bool))[0]
    alone = NumpyPopulation(network, names, 1)
    for k in range(7):
        alone.set(0, noise[k])
        assert torch.equal(alone.act(obs[k : k + 1], (), np.ones(1, bool))[0], together[k : k + 1])


def test_actions_are_the_middle_or_drawn_by_a_generator_of_each_member():
    network, _ = build("vector")
    x = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 3)
    assert draw_actions(network, x, (), []).tolist() == [1, 1, 1]
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6, 5)]
    drawn = np.stack([draw_actions(network, x, (), generators) for _ in range(20)])
    assert (drawn[:, 0] == drawn[:, 2]).all() and (drawn[:, 0] != drawn[:, 1]).any()


@pytest.mark.parametrize("kind", Anything.action_spaces)
def test_actions_of_all_kinds_are_legal(kind):
    space: gym.Space = Anything.action_spaces[kind]
    network, _ = build("vector", space)
    x = torch.randn(3, network.distribution.num_inputs, generator=torch.Generator().manual_seed(1))
    for generators in ([], [torch.Generator().manual_seed(k) for k in range(3)]):
        actions = draw_actions(network, x, (), generators)
        assert all(space.contains(tree_index(actions, k)) for k in range(3))


def test_masks_rule_out_actions():
    network, _ = build("vector")
    x, mask = torch.tensor([[0.0, 9.0, 1.0, 0.0]] * 2), tree_stack([np.array([True, False, True, True])] * 2)
    assert draw_actions(network, x, mask, []).tolist() == [2, 2]
    assert 1 not in draw_actions(network, x, mask, [torch.Generator().manual_seed(k) for k in range(2)])
