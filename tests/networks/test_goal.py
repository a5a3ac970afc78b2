"""Layers that a goal generates against a loop over rows with a matrix for each."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import nn

from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import TorchActor, make_actor
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.mlp import EnsembleLinear, GoalLayers, HyperLinear, NoisyLinear, goal_mlp, mlp, orthogonal_linear
from lightning_rl.networks.off_policy import Actor, Critic
from lightning_rl.networks.q_network import QNetwork
from lightning_rl.spaces import Spaces

GOAL = slice(2, 5)
"""Of seven inputs."""
LAYERS = {"orthogonal": orthogonal_linear, "plain": nn.Linear, "noisy": NoisyLinear, "ensemble": partial(EnsembleLinear, 2)}
SPACE = Dict(body=Box(-9, 9, (3,)), task=Box(-9, 9, (2,)))


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded_layers(widths=(6, 5), layer=nn.Linear, goal=GOAL, activation="tanh"):
    torch.manual_seed(0)
    return goal_mlp(7, widths, activation, layer, goal)


def generated(hyper, goal, e=None):
    """The matrix `[in, out]` for one goal, worked out from the parameters; of member e of an ensemble."""
    weights = [parameter.detach() if e is None else parameter.detach()[e] for parameter in hyper.generator.parameters()]
    x = goal
    for k, (weight, bias) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
        x = (weight @ x if e is None else x @ weight) + bias.flatten()
        if k < 2:
            x = x / (1 + (-x).exp())
        if k == 1:
            x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()
    return torch.stack([x[i * hyper.sizes[1] : (i + 1) * hyper.sizes[1]] for i in range(hyper.sizes[0])])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("goal", [slice(0), slice(7, 7), slice(3, 3)])
def test_without_a_goal_it_is_the_same_perceptron(name, goal):
    layers = seeded_layers(layer=LAYERS[name], goal=goal)
    torch.manual_seed(0)
    plain = mlp(7, (6, 5), "tanh", LAYERS[name])
    assert type(layers) is nn.Sequential and [type(layer) for layer in layers] == [type(layer) for layer in plain]
    assert all(torch.equal(a, b) for a, b in zip(layers.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("widths", [(5,), (6, 5), (4, 6, 5)])
def test_each_row_is_multiplied_by_the_matrix_that_its_goal_generates(widths):
    layers, x = seeded_layers(widths), rows(4, 7)
    assert [type(layer) for layer in layers[:-2:2]] == [nn.Linear] * (len(widths) - 1)
    hyper = layers[-2]
    assert isinstance(hyper, HyperLinear) and hyper.sizes == ((7, *widths)[-2], 5)
    for row, result in zip(x, layers(x), strict=True):
        hidden = row
        for layer in list(layers)[:-2]:
            hidden = layer(hidden)
        torch.testing.assert_close(result, (hidden @ generated(hyper, row[GOAL]) + hyper.bias).tanh())


def test_what_is_not_the_goal_generates_nothing():
    layers, x = seeded_layers((5,)), rows(2, 7)
    x[1] = x[0]
    x[1, :2] += 1
    before = [layers[0](rows(1, 7), row[GOAL]) for row in x]
    assert torch.equal(before[0], before[1])
    x[1, 3] += 1
    assert not torch.allclose(layers[0](rows(1, 7), x[1, GOAL]), before[0])


def test_the_goal_stays_an_input_of_the_layers_too():
    layers, x = seeded_layers(), rows(2, 7).requires_grad_()
    assert layers[0].weight.shape == (6, 7)
    layers[0](x).sum().backward()
    assert x.grad[:, GOAL].all()


def test_each_critic_has_its_own_generator():
    torch.manual_seed(0)
    critic = Critic(SPACE, 2, 3, ensemble=2, net_arch=(6, 5), activation="tanh", goals=["task"])
    obs, action = {"body": rows(4, 3), "task": rows(4, 2, seed=1)}, rows(4, 2, seed=2)
    q, (first, _, hyper, _, head) = critic(obs, action), critic.layers
    for e in range(2):
        for b in range(4):
            x = torch.cat([obs["body"][b], obs["task"][b], action[b]])
            x = (x @ first.weight[e] + first.bias[e, 0]).tanh()
            x = (x @ generated(hyper, obs["task"][b], e) + hyper.bias[e, 0]).tanh()
            torch.testing.assert_close(q[e, b, :, 0], x @ head.weight[e] + head.bias[e, 0])
    q[0].sum().backward()
    for parameter in critic.parameters():
        assert parameter.grad[0].any() and not parameter.grad[1].any()


@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_reaches_every_weight(name):
    layers = seeded_layers(layer=LAYERS[name])
    for layer in layers.modules():
        if isinstance(layer, NoisyLinear):
            layer.resample()
    layers(rows(16, 7)).square().sum().backward()
    assert all(parameter.grad.any() for parameter in layers.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_generated_weights_start_small_and_the_bias_like_that_of_the_layer_replaced(name):
    hyper = seeded_layers(layer=LAYERS[name])[-2]
    last = hyper.generator[-1]
    assert last.weight.abs().max() <= 1 / np.sqrt(5 * 6) and last.weight.std().item() == pytest.approx(1 / np.sqrt(3 * 5 * 6), rel=0.1)
    assert not last.bias.any()
    torch.manual_seed(0)
    assert torch.equal(hyper.bias, mlp(7, (6, 5), "tanh", LAYERS[name])[-2].bias)


def test_every_leading_dimension_is_a_batch():
    layers, x = seeded_layers(), rows(6, 7)
    torch.testing.assert_close(layers(x.unflatten(0, (2, 3))), layers(x).unflatten(0, (2, 3)))
    torch.testing.assert_close(layers(x[0]), layers(x)[0])


@pytest.mark.parametrize("widths", [(), []])
def test_a_goal_without_a_hidden_layer_is_refused_in_one_line(widths):
    with pytest.raises(SettingError, match=r"^net_arch is empty, but goals need a hidden layer .*; use net_arch \[64\]$"):
        seeded_layers(widths)


def networks():
    choice, turn = Spaces(SPACE, Discrete(3)), Spaces(SPACE, Box(-1, 1, (2,)))
    settings = {"net_arch": (6, 5), "goals": ["body"]}
    return {
        "actor-critic": (ActorCritic(choice, **settings), 2),
        "actor": (Actor(turn, "squashed_normal", nn.Identity(), **settings), 1),
        "q-network": (QNetwork(choice, **settings), 1),
        "dueling": (QNetwork(choice, dueling=True, noisy=True, **settings), 2),
    }


@pytest.mark.parametrize("name", networks())
def test_every_perceptron_of_a_network_is_conditioned_on_the_goal(name):
    network, number = networks()[name]
    layers = [module for module in network.modules() if isinstance(module, GoalLayers)]
    assert len(layers) == number == sum(isinstance(module, HyperLinear) for module in network.modules())
    assert all(module.goal == slice(2, 5) and module[0].weight.shape == (6, 5) for module in layers)
    x, _ = network.eval().policy({"body": rows(4, 3), "task": rows(4, 2)}, (), None)
    assert x.isfinite().all()


def test_a_noisy_network_keeps_its_noise_around_the_generated_layer():
    network, _ = networks()["dueling"]
    assert [type(layer) for layer in network.head.value] == [NoisyLinear, nn.ReLU, HyperLinear, nn.ReLU, NoisyLinear]
    assert not any(isinstance(module, NoisyLinear) for module in network.head.value[2].modules())
    assert len(network.noisy_layers) == 4


@pytest.mark.parametrize("kind", [ActorCritic, QNetwork])
def test_a_network_with_a_goal_acts_in_torch(kind):
    network = kind(Spaces(Box(-9, 9, (3,)), Discrete(2)), activation="tanh", goals=["obs"])
    obs = rows(2, 4, 3).numpy()
    actor = make_actor(network, obs, torch.Generator().manual_seed(0))
    assert isinstance(actor, TorchActor)
    actor.act(0, (), np.zeros(4, bool))
