"""What a user changes in a network after it is built counts in acting, learning and evaluations, whichever way computes them."""

from __future__ import annotations

from types import MethodType

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.nn.utils import parametrizations, prune

from lightning_rl.data.collector import Collector
from lightning_rl.envs.stepping import Stepper
from lightning_rl.networks.acting import NumpyActor
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.off_policy import Actor
from lightning_rl.networks.q_network import QNetwork
from lightning_rl.spaces import Spaces

NUM, STEPS, WIDTH = 3, 4, 5
OBS, DISCRETE, BOX = Box(-2, 2, (WIDTH,)), Discrete(3), Box(-1, 1, (2,))
NETWORKS = {
    "actor-critic": lambda: ActorCritic(Spaces(OBS, DISCRETE), net_arch=[8, 8], normalize_obs="running"),
    "separate critic": lambda: ActorCritic(Spaces(OBS, BOX), net_arch=[8], share_encoder=False),
    "q network": lambda: QNetwork(Spaces(OBS, DISCRETE), net_arch=(8, 8)),
    "actor": lambda: Actor(Spaces(OBS, BOX), "squashed_normal", nn.Identity(), net_arch=[8, 8]),
}


class Seen(gym.Env):
    """Pays nothing and lasts for ever; observations are random."""

    def __init__(self, action_space):
        self.observation_space, self.action_space = OBS, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-2, 2, WIDTH).astype(np.float32), {}

    def step(self, action):
        return self.np_random.uniform(-2, 2, WIDTH).astype(np.float32), 0.0, False, False, {}


class Doubled(nn.Linear):
    """A layer of a user's own, of the same shape."""

    def forward(self, x):
        return 2 * super().forward(x)


class Reversed(nn.Sequential):
    """Layers of a user's own."""

    def forward(self, x):
        return super().forward(x).flip(-1)


class Halved(nn.Module):
    """An encoder of a user's own, put in the place of the network's."""

    is_vector = True

    def forward(self, obs):
        return obs / 2


def layers_of(network):
    return {ActorCritic: "actor", QNetwork: "head", Actor: "layers"}[type(network)]


def encoder_of(network):
    return "actor_encoder" if isinstance(network, ActorCritic) else "encoder"


def layers(network):
    return getattr(network, layers_of(network))


def last(network):
    return [layer for layer in layers(network) if isinstance(layer, nn.Linear)][-1]


def replace_last(network, kind):
    where = [i for i, layer in enumerate(layers(network)) if isinstance(layer, nn.Linear)][-1]
    new = kind(last(network).in_features, last(network).out_features)
    new.load_state_dict(last(network).state_dict())
    layers(network)[where] = new


def patch(part, name, change):
    before = getattr(part, name)
    setattr(part, name, MethodType(lambda self, *arguments, **named: change(before(*arguments, **named)), part))


def set_weights(network, change):
    with torch.no_grad():
        for parameter in network.parameters():
            change(parameter)


def assign_state(network):
    network.load_state_dict({**network.state_dict(), **{name: -value for name, value in network.named_parameters()}}, assign=True)


def flip(output):
    return output.flip(-1)


CHANGES = {
    "hook of the last layer": lambda n: last(n).register_forward_hook(lambda m, i, out: flip(out)),
    "pre-hook of the first layer": lambda n: layers(n)[0].register_forward_pre_hook(lambda m, given: (-given[0],)),
    "hook of an activation": lambda n: layers(n)[1].register_forward_hook(lambda m, i, out: -out),
    "hook of the layers": lambda n: layers(n).register_forward_hook(lambda m, i, out: flip(out)),
    "hook of the encoder": lambda n: getattr(n, encoder_of(n)).register_forward_hook(lambda m, i, out: -out),
    "pre-hook of the encoder": lambda n: getattr(n, encoder_of(n)).register_forward_pre_hook(lambda m, given: (-given[0],)),
    "hook of the normalizer": lambda n: n.normalizer.register_forward_hook(lambda m, i, out: out / 3),
    "forward of the last layer": lambda n: patch(last(n), "forward", flip),
    "forward of the layers": lambda n: patch(layers(n), "forward", flip),
    "forward of the encoder": lambda n: patch(getattr(n, encoder_of(n)), "forward", torch.neg),
    "forward of the normalizer": lambda n: patch(n.normalizer, "forward", torch.neg),
    "policy of the network": lambda n: patch(n, "policy", lambda out: (flip(out[0]), out[1])),
    "forward of the network": lambda n: patch(n, "forward", torch.neg) if hasattr(n, "encoder") else patch(n.actor, "forward", torch.neg),
    "another encoder": lambda n: setattr(n, encoder_of(n), Halved()),
    "another activation": lambda n: layers(n).__setitem__(1, nn.SiLU()),
    "another known activation": lambda n: layers(n).__setitem__(1, nn.Tanh() if isinstance(layers(n)[1], nn.ReLU) else nn.ReLU()),
    "dropout": lambda n: layers(n).__setitem__(1, nn.Sequential(layers(n)[1], nn.Dropout(0.5)).eval()),
    "batch normalization": lambda n: layers(n).__setitem__(1, nn.Sequential(layers(n)[1], nn.BatchNorm1d(8)).eval()),
    "a layer of one's own": lambda n: replace_last(n, Doubled),
    "layers of one's own": lambda n: setattr(n, layers_of(n), Reversed(*layers(n))),
    "another layer": lambda n: replace_last(n, nn.Linear),
    "old weight norm": lambda n: (nn.utils.weight_norm(last(n)), set_weights(n, torch.neg_)),
    "weight norm": lambda n: (parametrizations.weight_norm(last(n)), set_weights(n, torch.neg_)),
    "old spectral norm": lambda n: nn.utils.spectral_norm(last(n)).eval(),
    "orthogonal weights": lambda n: parametrizations.orthogonal(last(n)),
    "pruning": lambda n: (prune.l1_unstructured(last(n), "weight", amount=0.5), set_weights(n, torch.neg_)),
    "weights in place": lambda n: set_weights(n, torch.neg_),
    "weights by data": lambda n: [setattr(parameter, "data", -parameter.data) for parameter in n.parameters()],
    "weights by vector": lambda n: nn.utils.vector_to_parameters(-nn.utils.parameters_to_vector(n.parameters()), n.parameters()),
    "weights by assignment": assign_state,
    "no bias": lambda n: setattr(last(n), "bias", None),
    "a hook of all modules": lambda n: nn.modules.module.register_module_forward_hook(
        lambda m, i, out: flip(out) if m is last(n) else None
    ),
}


@pytest.fixture
def collector():
    def make(name):
        torch.manual_seed(0)
        network = NETWORKS[name]()
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.5)
        network.normalizer.update(torch.randn(100, WIDTH) + 1)
        action = BOX if name in ("separate critic", "actor") else DISCRETE
        envs = SyncVectorEnv([lambda: Seen(action)] * NUM, autoreset_mode=AutoresetMode.SAME_STEP, copy=False)
        made = Collector(Stepper(envs, AutoresetMode.SAME_STEP), Spaces(OBS, action), network, STEPS, seed=0, log_probs=False)
        made.begin()
        return made

    before = dict(nn.modules.module._global_forward_hooks)
    yield make
    for number in set(nn.modules.module._global_forward_hooks) - set(before):
        del nn.modules.module._global_forward_hooks[number]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_counts_in_acting_learning_and_evaluations_from_the_next_iteration_on(name, change, collector):
    made = collector(name)
    network, obs = made.network, torch.randn(STEPS * NUM, WIDTH)
    before = network.policy(obs, (), None)[0]
    CHANGES[change](network)
    with torch.no_grad():
        x = network.policy(obs, (), None)[0]
        changed = not torch.allclose(before, x, atol=1e-6)
        assert changed or change in ("another layer", "orthogonal weights", "dropout", "batch normalization")

        # learning
        if isinstance(network, ActorCritic):
            action = network.distribution.mode(x)
            expected = network.distribution.evaluate(x, action)[0]
            torch.testing.assert_close(network.evaluate(obs, action)[0], expected)
        elif change != "policy of the network":  # these learn from `forward`
            learned = network(network.normalizer(obs))
            torch.testing.assert_close(learned.squeeze(-2).squeeze(-1) if isinstance(network, QNetwork) else learned, x)

        # evaluations
        best = network.distribution.mode(x)
        torch.testing.assert_close(network.sample(obs, deterministic=True)[0], best)

        # acting
        actor = made.begin()
        rows = obs.view(STEPS, NUM, WIDTH)
        actor.begin(rows.numpy())
        if isinstance(actor, NumpyActor):
            actor.noise = np.zeros_like(actor.noise)
            for t in range(STEPS):
                actor.act(t, (), np.zeros(NUM, bool))
            taken = actor.actions()
            torch.testing.assert_close(taken, best.reshape(taken.shape).to(taken.dtype), rtol=1e-4, atol=1e-5)
        else:
            assert made.take_notices() == ["the policy was changed from outside: torch computes its actions from now on, which is slower"]
            generator = made.generator.get_state()
            sent = actor.act(0, (), np.zeros(NUM, bool))[0]
            made.generator.set_state(generator)
            action = network.sample(rows[0], generator=made.generator)[0]
            np.testing.assert_array_equal(sent, network.distribution.to_env(action.numpy()))
