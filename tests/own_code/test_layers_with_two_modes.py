"""Dropout, BatchNorm and one's own layers act in evaluation mode and learn in training mode."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.utils import parametrizations

import lightning_rl as lrl
from tests.fitting import fit, tiny
from tests.own_code.test_parts_put_in_during_a_run import At


class Watched(nn.Module):
    """Counts in which modes it is called."""

    def __init__(self):
        super().__init__()
        self.modes = {True: [], False: []}

    def forward(self, x):
        self.modes[torch.is_grad_enabled()].append(self.training)
        return x


class Noise(nn.Module):
    """A part of a network that is a user's own, with a layer of torch in it."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x)


LAYERS = {
    "PPO": lambda model: model.network.actor,
    "A2C": lambda model: model.network.actor,
    "SAC": lambda model: model.network.layers,
    "TD3": lambda model: model.network.layers,
    "DQN": lambda model: model.network.head,
}


@pytest.mark.parametrize("name", ["PPO", "A2C", "SAC", "TD3", "DQN"])
def test_a_layer_acts_in_evaluation_mode_and_learns_in_training_mode(name):
    model, watched = tiny(getattr(lrl, name)), Watched()
    LAYERS[name](model).insert(1, watched)
    acting = []
    look = At(lambda model: None, lambda model: acting.append(watched.training))
    fit(model, callbacks=[look])
    assert set(watched.modes[True]) == {True}
    assert False in watched.modes[False]
    assert set(acting) == {True}
    if name in ("PPO", "A2C"):  # rollouts are all that is computed without gradients
        assert set(watched.modes[False]) == {False}


def test_a_layer_that_a_user_put_into_evaluation_mode_stays_in_it():
    model, watched = tiny(lrl.PPO), Watched()
    model.network.actor.insert(1, watched)
    fit(model, callbacks=[At(lambda model: watched.eval())])
    assert not watched.training


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Noise(), nn.Sequential(nn.Dropout(0.5)), nn.AlphaDropout(0.5)], ids=repr)
def test_actions_of_rollouts_are_those_without_dropout(layer):
    model = tiny(lrl.PPO, "Pendulum-v1", net_arch=[8])
    model.network.actor.insert(1, layer)
    model.network.critic.insert(1, nn.Dropout(0.5))
    rollouts = []
    prepare = model.prepare
    model.prepare = lambda rollout: (rollouts.append(is_as_in_evaluation(model, rollout)), prepare(rollout))[1]
    fit(model)
    assert all(rollouts)


def is_as_in_evaluation(model, rollout):
    """Return whether values and log-probabilities of a rollout are those of a network in evaluation mode."""
    model.network.eval()
    with torch.no_grad():
        log_prob, value = model.network.log_prob(rollout.obs, rollout.action), model.network.value(rollout.obs)
    model.network.train()
    return torch.allclose(log_prob, rollout.log_prob, atol=1e-5) and torch.allclose(value, rollout.value[: len(value)], atol=1e-5)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, parametrizations.spectral_norm], ids=["old", "new"])
def test_spectral_normalization_makes_power_iterations_in_updates_and_none_in_rollouts(norm):
    model, seen = tiny(lrl.PPO, net_arch=[8]), []
    layer = norm(model.network.actor[0])
    (direction,) = (buffer for name, buffer in layer.named_buffers() if name.endswith("_u"))

    class Look(pl.Callback):
        def on_train_batch_start(self, *arguments):
            seen.append(direction.clone())

        def on_train_batch_end(self, *arguments):
            seen.append(direction.clone())

    fit(model, callbacks=[Look()])
    assert len(seen) >= 4
    for k in range(0, len(seen), 2):
        assert not torch.equal(seen[k], seen[k + 1])
        assert k == 0 or torch.equal(seen[k - 1], seen[k])


@pytest.mark.parametrize("name", ["PPO", "SAC", "DQN"])
def test_batch_normalization_learns_with_one_environment(name):
    model = tiny(getattr(lrl, name), env={"num_envs": 1}, net_arch=[8], max_env_steps=128)
    norm = nn.BatchNorm1d(8)
    LAYERS[name](model).insert(1, norm)
    fit(model)
    assert norm.num_batches_tracked > 0
    assert norm.running_mean.abs().sum() > 0


def test_noisy_networks_go_on_exploring_where_they_are_a_users_subclass():
    class Own(type(tiny(lrl.DQN, noisy=True).network)):
        pass

    model = tiny(lrl.DQN, noisy=True)
    model.network.__class__ = Own
    noise = At(lambda model: None, lambda model: model.network.noisy_layers[0].noise_in.clone())
    fit(model, callbacks=[noise])
    assert not torch.equal(noise.seen[0], noise.seen[1])
