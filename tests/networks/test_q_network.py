"""Q-networks: plain, dueling, noisy and distributional, and how they act."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from torch import Generator

from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import NumpyActor, TorchActor, make_actor
from lightning_rl.networks.mlp import NoisyLinear
from lightning_rl.networks.q_network import CategoricalReturn, QNetwork, QuantileReturn, ScalarReturn
from lightning_rl.optimization import gradient_step
from lightning_rl.spaces import Spaces

VECTOR = Box(-np.inf, np.inf, (5,))
SPACES = Spaces(VECTOR, Discrete(3))
RETURNS = {"scalar": ScalarReturn, "histogram": lambda: CategoricalReturn(7, -1.0, 1.0), "quantiles": lambda: QuantileReturn(4)}
T, N = 3, 40


def seeded(seed=0):
    return Generator().manual_seed(seed)


def network(*arguments, **settings):
    torch.manual_seed(0)
    return QNetwork(SPACES, *arguments, **({"net_arch": (8, 6)} | settings))


def observations(*shape):
    return torch.randn(*shape, 5, generator=seeded())


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("net_arch", [(), (8, 6)])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("returns", RETURNS)
def test_every_combination_has_a_value_for_each_action_stream_and_atom(returns, streams, noisy, dueling, net_arch):
    net = network(RETURNS[returns](), streams=streams, noisy=noisy, dueling=dueling, net_arch=net_arch)
    atoms = {"scalar": 1, "histogram": 7, "quantiles": 4}[returns]
    assert net(observations(6)).shape == (6, 3, streams, atoms)
    assert net(observations(T, N)).shape == (T, N, 3, streams, atoms)
    torch.testing.assert_close(net.value(observations(6)), net.returns.mean(net(observations(6))))
    assert net.value(observations(6)).shape == (6, 3, streams)
    action, memory = net.eval().sample(observations(6))
    torch.testing.assert_close(action, net.value(observations(6)).sum(-1).argmax(-1))
    assert memory == ()


@pytest.mark.parametrize("returns", RETURNS)
def test_the_advantages_of_a_dueling_network_have_the_mean_0(returns):
    net = network(RETURNS[returns](), dueling=True, streams=2)
    obs = observations(6)
    z, features = net(obs), net.encoder(obs)
    value, advantage = net.head.value(features).reshape(6, 2, -1), net.head.advantage(features).reshape(6, 3, 2, -1)
    torch.testing.assert_close(z.mean(1), value)
    for row, action in ((0, 1), (4, 2)):
        by_hand = value[row] + advantage[row, action] - advantage[row].sum(0) / 3
        torch.testing.assert_close(z[row, action], by_hand)
    last = [layer for layer in net.head.advantage if isinstance(layer, torch.nn.Linear)][-1]
    last.bias.data += 5.0  # a constant of all actions is not part of an advantage
    torch.testing.assert_close(net(obs), z, rtol=1e-4, atol=1e-5)


def test_noisy_layers_are_all_behind_the_encoder_and_draw_noise_together():
    net = network(noisy=True, dueling=True)
    assert len(net.noisy_layers) == 6
    assert not any(type(module) is torch.nn.Linear for module in net.modules())
    net.resample(seeded())
    assert all(layer.noise_in.any() and layer.noise_out.any() for layer in net.noisy_layers)
    assert not network().noisy_layers


def test_a_copy_of_a_noisy_network_has_its_own_noise():
    net = network(noisy=True)
    copied = deepcopy(net)
    copied.resample(seeded())
    assert all(isinstance(layer, NoisyLinear) and not layer.noise_in.any() for layer in net.noisy_layers)
    assert all(layer.noise_in.any() for layer in copied.modules() if isinstance(layer, NoisyLinear))


def test_a_noisy_network_acts_with_new_noise_in_training_and_without_in_evaluation():
    net, obs = network(noisy=True, net_arch=()), observations(500)
    generator = seeded()
    first, second = net.sample(obs, generator=generator)[0], net.sample(obs, generator=generator)[0]
    assert not torch.equal(first, second)
    assert torch.equal(first, net.sample(obs, generator=seeded())[0])
    net.eval()
    values = obs @ net.head[0].weight.T + net.head[0].bias
    assert torch.equal(net.sample(obs)[0], values.argmax(-1))


def test_reward_streams_are_added_before_the_greatest_is_taken():
    net = network(streams=2, net_arch=())
    torch.nn.init.zeros_(net.head[0].weight)
    net.head[0].bias.data.copy_(torch.tensor([[3.0, -3.0], [1.0, 1.5], [0.0, 2.0]]).flatten())
    action, _ = net.sample(observations(4))
    assert action.tolist() == [1] * 4


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_masks_reach_the_choice(epsilon, deterministic):
    net = network()
    net.distribution.epsilon = epsilon
    mask = torch.tensor([False, True, False]).expand(500, 3)
    action, _ = net.sample(observations(500), action_mask=mask, deterministic=deterministic, generator=seeded())
    assert (action == 1).all()


def test_a_deterministic_policy_does_not_explore():
    net, obs = network(), observations(500)
    net.distribution.epsilon = 1.0
    greatest = net.value(obs)[..., 0].argmax(-1)
    assert torch.equal(net.sample(obs, deterministic=True)[0], greatest)
    assert not torch.equal(net.sample(obs, generator=seeded())[0], greatest)


def test_a_bf16_network_returns_single_precision():
    net = network(dueling=True).to(torch.bfloat16)
    assert net(observations(6).bfloat16()).dtype == torch.float32


def test_images_and_vectors_are_encoded_together():
    space = Dict(camera=Box(0, 255, (16, 16, 3), np.uint8), body=VECTOR)
    net = QNetwork(Spaces(space, Discrete(3)), dueling=True, encoder_features=8)
    obs = {"camera": torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8), "body": observations(4)}
    assert net(obs).shape == (4, 3, 1, 1)


def test_only_discrete_actions_have_a_q_network():
    with pytest.raises(SettingError, match=r"^DQN and PQN need a Discrete action space, got MultiDiscrete\(\[2 3\]\); use SAC or PPO$"):
        QNetwork(Spaces(VECTOR, MultiDiscrete([2, 3])))


# ---------------------------------------------------------------- acting


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("normalize_obs", ["off", "running"])
@pytest.mark.parametrize("net_arch", [(), (8, 6)])
def test_a_plain_network_acts_in_numpy_as_in_torch(net_arch, normalize_obs, epsilon):
    net = network(net_arch=net_arch, normalize_obs=normalize_obs)
    net.normalizer.update(3 * observations(100) + 2)
    net.distribution.epsilon = epsilon
    obs = observations(T, N)
    actor = make_actor(net, obs.numpy(), seeded(1))
    assert isinstance(actor, NumpyActor)
    sent = [actor.act(t, (), np.zeros(N, bool))[0].tolist() for t in range(T)]
    expected = net.sample(obs, generator=seeded(1))[0]
    assert sent == actor.actions().tolist() == expected.tolist()
    assert (expected == net.value(obs)[..., 0].argmax(-1)).all().item() is (epsilon == 0)


class OwnValues(QNetwork):
    """A user's network, which may compute other values."""


@pytest.mark.parametrize(
    "settings",
    [{"dueling": True}, {"noisy": True}, {"streams": 2}, {"returns": CategoricalReturn()}, {"returns": QuantileReturn()}, {"own": True}],
    ids=["dueling", "noisy", "streams", "histogram", "quantiles", "subclass"],
)
def test_other_networks_act_in_torch(settings):
    own = settings.get("own", False)
    net = OwnValues(SPACES) if own else QNetwork(SPACES, **settings)
    assert net.perceptron() is None
    obs = observations(T, N).numpy()
    actor = make_actor(net.eval(), obs, seeded())
    assert isinstance(actor, TorchActor)
    sent, _ = actor.act(0, (), np.zeros(N, bool))
    assert sent.tolist() == net.value(torch.from_numpy(obs[0])).sum(-1).argmax(-1).tolist()


def test_steps_on_the_vector_of_all_parameters_are_seen_by_an_actor_made_before():
    net, obs = network(net_arch=(8,)), observations(1, N)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    actor = make_actor(net, obs.repeat(2, 1, 1).numpy(), seeded())
    assert isinstance(actor, NumpyActor)
    before = actor.act(0, (), np.zeros(N, bool))[0]
    worst = net.value(obs[0])[..., 0].argmin(-1)
    for _ in range(30):
        loss = -net.value(obs[0])[torch.arange(N), worst].mean()
        gradient_step(loss, optimizer, torch.amp.GradScaler(enabled=False), 1.0, 1)
    after = actor.act(1, (), np.zeros(N, bool))[0]
    assert (before != worst.numpy()).all()
    assert after.tolist() == net.value(obs[0])[..., 0].argmax(-1).tolist()
    assert (after == worst.numpy()).mean() > 0.5
