"""Critics of an ensemble, against each of them alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from torch import nn

from lightning_rl.networks.off_policy import Critic

VECTOR = Box(-9, 9, (4,))
CAMERA = Dict(camera=Box(0, 255, (16, 16, 3), np.uint8), body=VECTOR)


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("net_arch", [(), (6,), (7, 6)])
@pytest.mark.parametrize(("choices", "streams"), [(1, 1), (5, 1), (3, 2)])
@pytest.mark.parametrize("ensemble", [1, 2, 3])
def test_there_is_a_value_for_each_critic_row_choice_and_stream(ensemble, choices, streams, net_arch):
    critic = Critic(VECTOR, 2, choices, ensemble=ensemble, streams=streams, net_arch=net_arch)
    assert critic(rows(8, 4), rows(8, 2)).shape == (ensemble, 8, choices, streams)
    of_the_observation = Critic(VECTOR, 0, choices, ensemble=ensemble, streams=streams, net_arch=net_arch)
    assert of_the_observation(rows(8, 4)).shape == (ensemble, 8, choices, streams)


def test_each_critic_is_a_separate_perceptron_over_observation_and_action():
    critic = Critic(VECTOR, 2, 3, ensemble=2, streams=2, net_arch=(6, 5), activation="tanh")
    obs, action = rows(8, 4), rows(8, 2, seed=1)
    q = critic(obs, action)
    for e in range(2):
        x = torch.cat([obs, action], -1)
        for layer in critic.layers:
            x = x @ layer.weight[e] + layer.bias[e] if hasattr(layer, "weight") else x.tanh()
        torch.testing.assert_close(q[e], x.unflatten(-1, (3, 2)))
    assert not torch.allclose(q[0], q[1])


def test_critics_learn_independently():
    critic = Critic(VECTOR, 2, ensemble=2, net_arch=(6,))
    before = [parameter.detach().clone() for parameter in critic.parameters()]
    critic(rows(8, 4), rows(8, 2))[0].square().sum().backward()
    torch.optim.SGD(critic.parameters(), 0.1).step()
    for old, new in zip(before, critic.parameters(), strict=True):
        assert torch.equal(old[1], new[1]) and not torch.equal(old[0], new[0])


def test_the_gradient_reaches_the_action():
    critic, action = Critic(VECTOR, 2, net_arch=(6,)), rows(8, 2).requires_grad_()
    critic(rows(8, 4), action).sum().backward()
    assert (action.grad != 0).all(-1).any()
    step = 1e-2 * torch.eye(2)[0]
    rise = (critic(rows(8, 4), action + step) - critic(rows(8, 4), action - step)).sum((0, 2, 3)) / 2e-2
    torch.testing.assert_close(rise, action.grad[:, 0], rtol=0.2, atol=0.05)


def test_an_image_encoder_is_shared_by_all_critics():
    critic = Critic(CAMERA, 2, 3, ensemble=2, net_arch=(6,), encoder_features=8)
    obs = {"camera": torch.randint(0, 256, (5, 16, 16, 3), dtype=torch.uint8), "body": rows(5, 4)}
    assert critic(obs, rows(5, 2)).shape == (2, 5, 3, 1)
    assert critic.layers[0].weight.shape == (2, 8 + 4 + 2, 6)
    assert sum(isinstance(module, nn.Conv2d) for module in critic.modules()) == sum(
        isinstance(module, nn.Conv2d) for module in Critic(CAMERA, 2, ensemble=1, encoder_features=8).modules()
    )


def test_a_bf16_critic_returns_single_precision():
    critic = Critic(VECTOR, 2, net_arch=(6,)).to(torch.bfloat16)
    assert critic(rows(8, 4).bfloat16(), rows(8, 2).bfloat16()).dtype == torch.float32
