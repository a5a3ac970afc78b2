"""The numpy actor is the torch policy, faster; other networks are asked in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple
from torch import Generator

from lightning_rl.networks.acting import NumpyActor, TorchActor, make_actor
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.types import tree_leaves

VECTOR = Box(-np.inf, np.inf, (5,))
T, N = 3, 4


def network_for(action_space, **settings):
    torch.manual_seed(0)
    network = ActorCritic(Spaces(VECTOR, action_space), **settings)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.normalizer.update(torch.randn(100, 5) * 3 + 2)
    return network


def observations():
    return np.random.default_rng(0).normal(size=(T, N, 5)).astype(np.float32)


@pytest.mark.parametrize("normalize_obs", ["off", "running"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(
    ("space", "settings"),
    [
        (Discrete(3, start=2), {}),
        (Box(-1, 1, (2,)), {}),
        (Box(-1, 1, (2,)), {"action_dist": "tanh_normal"}),
        (Discrete(3), {"net_arch": []}),
    ],
)
def test_both_actors_take_the_same_actions_for_the_same_noise(space, settings, activation, normalize_obs):
    network = network_for(space, activation=activation, normalize_obs=normalize_obs, **settings)
    obs = observations()
    actor = make_actor(network, obs, Generator().manual_seed(1))
    assert isinstance(actor, NumpyActor)
    sent = [actor.act(t, (), np.zeros(N, bool))[0] for t in range(T)]
    x, _ = network.policy(torch.from_numpy(obs), (), None)
    noise = network.distribution.noise(torch.empty_like(x), Generator().manual_seed(1))
    expected = network.distribution.draw(x, noise).detach()
    torch.testing.assert_close(actor.actions(), expected, rtol=1e-5, atol=1e-5)
    for t in range(T):
        np.testing.assert_allclose(sent[t], network.distribution.to_env(expected[t].numpy()), rtol=1e-4, atol=1e-5)


def test_the_numpy_actor_sees_weights_that_change_in_place():
    network = network_for(Discrete(2))
    obs = observations()
    actor = make_actor(network, obs, Generator().manual_seed(1))
    with torch.no_grad():
        network.actor[-1].weight.zero_()
        network.actor[-1].bias.copy_(torch.tensor([-100.0, 100.0]))
    assert actor.act(0, (), np.zeros(N, bool))[0].tolist() == [1] * N


class OwnSample(ActorCritic):
    """A user's network with a policy of its own."""


@pytest.mark.parametrize(
    ("network", "space"),
    [
        (network_for(MultiBinary(3)), VECTOR),
        (network_for(Discrete(2), activation="silu"), VECTOR),
        (network_for(Discrete(2), net_arch=[257]), VECTOR),
        (ActorCritic(Spaces(Box(0, 255, (5,), np.uint8), Discrete(2))), Box(0, 255, (5,), np.uint8)),
        (ActorCritic(Spaces(Box(-9, 9, (5,), np.int32), Box(-1, 1, (2,)))), Box(-9, 9, (5,), np.int32)),
        (ActorCritic(Spaces(Discrete(4), Discrete(2))), Discrete(4)),
        (ActorCritic(Spaces(Dict({"only": VECTOR}), Discrete(2))), Dict({"only": VECTOR})),
        (ActorCritic(Spaces(Tuple([VECTOR]), Box(-1, 1, (2,)))), Tuple([VECTOR])),
        (OwnSample(Spaces(VECTOR, Discrete(2))), VECTOR),
    ],
    ids=["distribution", "activation", "width", "bytes", "integers", "one-hot", "dict", "tuple", "subclass"],
)
def test_what_numpy_does_not_know_is_asked_in_torch(network, space):
    actor = make_actor(network, allocate(space, T, N), Generator().manual_seed(0))
    assert isinstance(actor, TorchActor)
    actor.act(0, (), np.zeros(N, bool))
    assert all(leaf.shape[:2] == (1, N) for leaf in tree_leaves(actor.actions()))
