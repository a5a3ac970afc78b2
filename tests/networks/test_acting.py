"""The numpy actor is the torch policy, faster; other networks are asked in torch."""

from __future__ import annotations

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple
from threadpoolctl import threadpool_info, threadpool_limits
from torch import Generator, nn

import lightning_rl as lrl
from lightning_rl.distributions.distribution import Categorical
from lightning_rl.networks.acting import NumpyActor, TorchActor, fits_numpy, make_actor
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.memory import GRUMemory
from lightning_rl.networks.mlp import mlp
from lightning_rl.networks.normalization import ObservationNormalizer
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


def test_an_iteration_begins_with_the_weights_as_they_are_moved_or_exchanged():
    network, obs = network_for(Discrete(2)), observations()
    actor = make_actor(network, obs, Generator().manual_seed(1))
    with torch.no_grad():
        network.actor[-1] = nn.Linear(network.actor[-1].in_features, 2)
        network.actor[-1].weight.zero_()
        network.actor[-1].bias.copy_(torch.tensor([-100.0, 100.0]))
    actor.begin(obs)
    assert actor.act(0, (), np.zeros(N, bool))[0].tolist() == [1] * N


def test_wide_layers_other_dtypes_and_other_modules_are_left_to_torch():
    def fits(width=5, layers=None, **settings):
        network = ActorCritic(Spaces(Box(-1, 1, (width,)), Discrete(3)), net_arch=[8], **settings)
        network.actor = network.actor if layers is None else layers
        return fits_numpy(network, np.zeros((1, 2, width), np.float32))

    assert fits() and fits(256) and fits(layers=mlp(5, [300], "tanh"))
    assert not fits(257) and not fits(activation="silu")
    for layers in (mlp(5, [8]).double(), mlp(5, [8]).append(nn.LayerNorm(8)), nn.Sequential(), nn.Sequential(nn.Linear(5, 3, bias=False))):
        assert not fits(layers=layers)


def test_numpy_multiplies_in_one_thread_while_a_run_lasts(tmp_path):
    seen = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, *_):
            seen.extend(library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas")

    with threadpool_limits(limits=2, user_api="blas"):
        model = lrl.A2C(env="CartPole-v1", max_env_steps=40)
        lrl.Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False, logger=False, callbacks=[Looks()]).fit(model)
        assert set(seen) == {1} and {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"} == {2}


class Tenths(ObservationNormalizer):
    """A normalizer of a user's own."""

    def forward(self, obs):
        return super().forward(obs) / 10


class Mirrored(GRUMemory):
    """A memory of a user's own."""

    def cell(self, x, state):
        return tuple(-leaf for leaf in super().cell(x, state))


class Stubborn(Categorical):
    """Actions of a user's own."""

    def sample(self, x, mask=(), generator=None):
        return super().sample(x, mask, generator) * 0


def test_what_a_user_wrote_acts_itself_and_not_as_the_class_that_it_extends():
    obs, generator = np.zeros((1, 4, 3), np.float32), Generator().manual_seed(0)

    def network(**settings):
        return ActorCritic(Spaces(Box(-1, 1, (3,)), Discrete(2)), net_arch=[5], **settings)

    assert isinstance(make_actor(network(), obs, generator), NumpyActor)
    own = network()
    own.normalizer = Tenths(Box(-1, 1, (3,)))
    assert isinstance(make_actor(own, obs, generator), TorchActor)
    own = network()
    own.distribution.__class__ = Stubborn
    assert isinstance(make_actor(own, obs, generator), TorchActor)
    own = network(memory=lrl.GRU(4, 4))
    assert isinstance(make_actor(own, obs, generator), NumpyActor)
    for part in own.modules():
        if type(part) is GRUMemory:
            part.__class__ = Mirrored
    assert isinstance(make_actor(own, obs, generator), TorchActor)


def test_actions_passed_to_an_environment_are_not_views_of_the_stored_ones():
    kept = np.array([1, 0, 1])
    given = Categorical(Discrete(2)).to_env(kept)
    given[:] = 0
    assert kept.tolist() == [1, 0, 1]
