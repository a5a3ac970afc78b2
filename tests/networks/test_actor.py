"""The actor of SAC and TD3: its output, and that numpy acts like torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from torch import Generator, nn

from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import NumpyActor, TorchActor, make_actor
from lightning_rl.networks.off_policy import Actor
from lightning_rl.optimization import gradient_step
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.types import tree_leaves

VECTOR = Box(-np.inf, np.inf, (5,))
LOPSIDED = Box(np.array([-1, 0.5], np.float32), np.array([3, 0.75], np.float32))
HEADS = {"squashed_normal": nn.Identity, "noisy": nn.Tanh}
T, N = 3, 20


def seeded(seed=0):
    return Generator().manual_seed(seed)


def actor_for(space=LOPSIDED, action_dist="squashed_normal", kind=Actor, observation=VECTOR, **settings):
    torch.manual_seed(0)
    network = kind(Spaces(observation, space), action_dist, HEADS[action_dist](), **({"net_arch": (8, 6)} | settings))
    if action_dist == "noisy":
        network.distribution.sigma = 0.2
    return network


def observations(*shape):
    return 3 * torch.randn(*shape, 5, generator=seeded()) + 2


def normalized(network):
    network.normalizer.update(observations(100))
    return network


# ---------------------------------------------------------------- output


@pytest.mark.parametrize("net_arch", [(), (8, 6)])
@pytest.mark.parametrize("action_dist", HEADS)
def test_the_distributions_input_is_a_perceptron_of_the_observation(action_dist, net_arch):
    network, obs = actor_for(action_dist=action_dist, net_arch=net_arch), observations(T, N)
    x = obs
    linear = [layer for layer in network.layers if isinstance(layer, nn.Linear)]
    for layer in linear[:-1]:
        x = (x @ layer.weight.T + layer.bias).relu()
    x = x @ linear[-1].weight.T + linear[-1].bias
    torch.testing.assert_close(network(obs), x.tanh() if action_dist == "noisy" else x)
    assert network(obs).shape == (T, N, 2 if action_dist == "noisy" else 4)


@pytest.mark.parametrize("action_dist", HEADS)
def test_deterministic_actions_are_modes_and_others_follow_the_generator(action_dist):
    network, obs = normalized(actor_for(action_dist=action_dist, normalize_obs="running")), observations(N)
    x = network(network.normalizer(obs))
    assert torch.equal(network.sample(obs, deterministic=True)[0], network.distribution.mode(x))
    draws = [network.sample(obs, generator=seeded(seed))[0] for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert torch.equal(draws[0], network.distribution.sample(x, (), seeded(1)))
    assert draws[0].abs().max() <= 1


def test_masks_apply_to_deterministic_and_random_actions():
    network, mask = actor_for(Discrete(4)), torch.tensor([False, True, False, False]).expand(N, 4)
    for deterministic in (True, False):
        assert (network.sample(observations(N), action_mask=mask, deterministic=deterministic)[0] == 1).all()


def test_a_tree_of_observations_becomes_a_tree_of_actions():
    observation = Dict(camera=Box(0, 255, (16, 16, 3), np.uint8), body=VECTOR)
    space = Tuple([Dict(a=Discrete(3), b=LOPSIDED), MultiDiscrete([2, 2])])
    network = actor_for(space, observation=observation, encoder_features=8)
    obs = {"camera": torch.randint(0, 256, (N, 16, 16, 3), dtype=torch.uint8), "body": observations(N)}
    action, memory = network.sample(obs, generator=seeded())
    assert [tuple(leaf.shape) for leaf in tree_leaves(action)] == [(N,), (N, 2), (N, 2)]
    assert memory == ()


def test_a_bf16_actor_returns_single_precision():
    network = actor_for().to(torch.bfloat16)
    assert network(observations(N).bfloat16()).dtype == torch.float32


def test_an_empty_observation_is_refused():
    with pytest.raises(SettingError, match="is empty; an algorithm needs something to observe"):
        actor_for(observation=Box(-1, 1, (0,)))


# ---------------------------------------------------------------- acting


@pytest.mark.parametrize("normalize_obs", ["off", "running"])
@pytest.mark.parametrize("net_arch", [(), (8,), (8, 6)])
@pytest.mark.parametrize(
    ("space", "action_dist"), [(LOPSIDED, "squashed_normal"), (LOPSIDED, "noisy"), (Discrete(3, start=2), "squashed_normal")]
)
def test_numpy_acts_like_torch_for_the_same_noise(space, action_dist, net_arch, normalize_obs):
    network = normalized(actor_for(space, action_dist, net_arch=net_arch, normalize_obs=normalize_obs))
    obs = observations(T, N)
    actor = make_actor(network, obs.numpy(), seeded(1))
    assert isinstance(actor, NumpyActor)
    sent = [actor.act(t, (), np.zeros(N, bool))[0] for t in range(T)]
    expected = network.sample(obs, generator=seeded(1))[0].detach()
    torch.testing.assert_close(actor.actions(), expected, rtol=1e-5, atol=1e-5)
    for t in range(T):
        np.testing.assert_allclose(sent[t], network.distribution.to_env(expected[t].numpy()), rtol=1e-4, atol=1e-5)
        assert all(space.contains(action) for action in sent[t])


class OwnPolicy(Actor):
    """A user's policy that turns everything around."""

    def forward(self, obs):
        return -super().forward(obs)


@pytest.mark.parametrize(
    ("network", "space"),
    [
        (actor_for(kind=OwnPolicy), VECTOR),
        (actor_for(activation="silu"), VECTOR),
        (actor_for(net_arch=(257, 8)), VECTOR),
        (actor_for(MultiDiscrete([2, 3])), VECTOR),
        (actor_for(Dict(a=Discrete(3), b=LOPSIDED)), VECTOR),
        (actor_for(observation=Dict(only=VECTOR)), Dict(only=VECTOR)),
    ],
    ids=["subclass", "activation", "width", "branches", "hybrid", "dict"],
)
def test_networks_that_numpy_does_not_support_act_in_torch(network, space):
    obs = allocate(space, T, N)
    actor = make_actor(network, obs, seeded(1))
    assert isinstance(actor, TorchActor)
    actor.act(0, (), np.zeros(N, bool))
    row = {"only": torch.zeros(N, 5)} if isinstance(space, Dict) else torch.zeros(N, 5)
    expected = network.sample(row, generator=seeded(1))[0]
    for leaf, again in zip(tree_leaves(actor.actions()), tree_leaves(expected), strict=True):
        torch.testing.assert_close(leaf[0], again.detach())


@pytest.mark.parametrize("action_dist", HEADS)
def test_an_optimizers_steps_are_seen_by_an_actor_made_before(action_dist):
    network, obs = actor_for(action_dist=action_dist), observations(1, N).repeat(2, 1, 1)
    optimizer = torch.optim.Adam(network.parameters(), 0.05, fused=True)
    actor = make_actor(network, obs.numpy(), seeded())
    actor.act(0, (), np.zeros(N, bool))
    for _ in range(5):
        gradient_step((network(obs[0]) - 0.9).square().mean(), optimizer, torch.amp.GradScaler(enabled=False), 1.0, 1)
    actor.act(1, (), np.zeros(N, bool))
    noise = torch.from_numpy(actor.noise)
    x = network(obs).detach().numpy()
    torch.testing.assert_close(
        actor.actions()[1], torch.from_numpy(network.distribution.draw(x[1], noise[1].numpy())), rtol=1e-4, atol=1e-5
    )
    stale = network.distribution.draw(actor_for(action_dist=action_dist)(obs[0]).detach().numpy(), noise[1].numpy())
    assert abs(actor.actions()[1].numpy() - stale).max() > 0.05
