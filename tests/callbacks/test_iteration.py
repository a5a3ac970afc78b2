"""Target networks follow: the numbers, when, and who decides it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_rl import DQN, PPO, SAC, TD3
from lightning_rl.callbacks.iteration import TargetNetworkUpdate, make_target
from lightning_rl.errors import SettingError
from tests.fitting import fit, tiny

OFF_POLICY = {"net_arch": [4], "batch_size": 4, "learning_starts": 8, "train_freq": 2, "steps_per_iteration": 16, "max_env_steps": 48}
UPDATES = (48 - 8) // 2
ENVIRONMENTS = {SAC: "ScriptedBox", TD3: "ScriptedBox", DQN: "Scripted"}


def follow(online, target, tau):
    """One move."""
    callback, algorithm = TargetNetworkUpdate(tau), SimpleNamespace(target_networks=[(online, target)], updates=1)
    callback.on_train_start(None, algorithm)
    callback.on_update_end(None, algorithm)


def model_of(algorithm, **settings):
    """Two environments, 20 updates in 3 iterations."""
    torch.manual_seed(0)
    env = {"id": f"tests.environments:{ENVIRONMENTS[algorithm]}-v0", "num_envs": 2}
    return algorithm(env, **(OFF_POLICY | settings))


def parameters(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def linear(value):
    layer = nn.Linear(2, 3)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, value)
    return layer


# ---------------------------------------------------------------- the numbers


def test_three_moves_from_0_to_1_with_tau_0_005():
    online, target = linear(1.0), linear(0.0)
    for _ in range(3):
        follow(online, target, 0.005)
    assert parameters(target).tolist() == pytest.approx([0.014925125] * 9, rel=1e-6)
    assert (parameters(online) == 1).all()


def test_a_tau_of_1_copies_every_bit():
    torch.manual_seed(0)
    online, target = nn.Linear(50, 50), nn.Linear(50, 50)
    follow(online, target, 1.0)
    assert torch.equal(parameters(online), parameters(target))


def test_buffers_are_copied():
    torch.manual_seed(0)
    online = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    target = make_target(online)
    for _ in range(4):
        online(5 * torch.randn(8, 3) + 1)
    follow(online, target, 0.005)
    assert target[0].num_batches_tracked.item() == 4
    assert target[0].num_batches_tracked.dtype == torch.int64
    assert torch.equal(target[0].running_mean, online[0].running_mean) and target[0].running_mean.any()
    assert torch.equal(target[0].running_var, online[0].running_var)
    assert target[0].running_mean is not online[0].running_mean


def test_a_target_starts_as_a_copy_that_has_no_gradients_and_does_not_follow_by_itself():
    online = linear(1.0)
    target = make_target(online)
    assert (parameters(target) == 1).all()
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert all(parameter.requires_grad for parameter in online.parameters())
    with torch.no_grad():
        for parameter in online.parameters():
            parameter.fill_(2.0)
    assert (parameters(target) == 1).all()
    follow(online, target, 0.5)
    assert (parameters(target) == 1.5).all()
    assert not target(torch.ones(1, 2)).requires_grad


# ---------------------------------------------------------------- in a run


class Watch(pl.Callback):
    """Remembers the weights after each update, before targets move: `(online, target)` for each pair of networks. Comes first."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, algorithm):
        assert sum(isinstance(callback, TargetNetworkUpdate) for callback in trainer.callbacks) == 1
        assert all(torch.equal(online, target) for online, target in self.look(algorithm))

    def on_update_end(self, trainer, algorithm):
        self.seen.append(self.look(algorithm))

    def look(self, algorithm):
        return [(parameters(online), parameters(target)) for online, target in algorithm.target_networks]


def moves(model, *callbacks):
    """Train; for each update and pair of networks: the target before, the online weights, and the target after."""
    watch = Watch()
    fit(model, callbacks=[watch, *callbacks])
    assert len(watch.seen) == model.updates == UPDATES
    after = [*watch.seen[1:], watch.look(model)]
    return [
        [(target, online, later) for (online, target), (_, later) in zip(*pairs, strict=True)]
        for pairs in zip(watch.seen, after, strict=True)
    ]


def check(found, tau, every):
    """Every k-th update moved the targets the fraction tau, the others left them."""
    for update, pairs in enumerate(found, start=1):
        for before, online, after in pairs:
            assert not torch.equal(before, online)
            if update % every == 0:
                torch.testing.assert_close(after, before + tau * (online - before), rtol=1e-5, atol=1e-7)
                assert not torch.equal(after, before)
            else:
                assert torch.equal(after, before)


@pytest.mark.parametrize(
    ("algorithm", "settings", "networks"),
    [(SAC, {}, 1), (SAC, {"value_network": True}, 1), (TD3, {}, 2), (DQN, {}, 1), (DQN, {"noisy": True, "dueling": True}, 1)],
)
def test_targets_start_equal_and_move_after_every_third_update(algorithm, settings, networks):
    every = {"policy_delay": 3} if algorithm is TD3 else {"target_update_interval": 3}
    found = moves(model_of(algorithm, tau=0.25, **every, **settings))
    assert {len(pairs) for pairs in found} == {networks}
    if algorithm is TD3:  # its policy stays between moves, so at first it is its own target
        found = [pairs[1:] for pairs in found]
    check(found, 0.25, 3)


@pytest.mark.parametrize("algorithm", [SAC, DQN])
def test_the_trainers_own_callback_replaces_the_algorithms(algorithm):
    own = TargetNetworkUpdate(tau=0.5, every_n_updates=4)
    check(moves(model_of(algorithm, tau=0.25, target_update_interval=1), own), 0.5, 4)


class Patient(TargetNetworkUpdate):
    """A user's rule: nothing moves before the tenth update."""

    def on_update_end(self, trainer, algorithm):
        if algorithm.updates >= 10:
            super().on_update_end(trainer, algorithm)


def test_so_does_a_users_subclass_of_it():
    found = moves(model_of(SAC), Patient(tau=0.5))
    assert all(torch.equal(before, after) for pairs in found[:9] for before, _, after in pairs)
    check(found[9:], 0.5, 1)


def test_a_model_that_is_fitted_again_keeps_one_callback():
    counts = []
    count = pl.callbacks.LambdaCallback(
        on_train_start=lambda trainer, _: counts.append(sum(isinstance(each, TargetNetworkUpdate) for each in trainer.callbacks))
    )
    model = model_of(DQN, tau=0.25)
    trainer = fit(model, callbacks=[count])
    model.max_env_steps = 96
    trainer.fit(model)
    assert counts == [1, 1] and model.env_steps == 96


def test_an_algorithm_without_target_networks_refuses_it_in_one_line():
    with pytest.raises(SettingError, match=r"^TargetNetworkUpdate: PPO has no target networks$"):
        fit(tiny(PPO), callbacks=[TargetNetworkUpdate()])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": 0.0}, r"^tau must be > 0 and <= 1, got 0\.0$"),
        ({"tau": 1.5}, r"^tau must be > 0 and <= 1, got 1\.5$"),
        ({"every_n_updates": 0}, r"^target_update_interval must be >= 1, got 0$"),
        ({"every_n_updates": 1.5}, r"^target_update_interval must be an integer >= 1, got 1\.5$"),
    ],
)
def test_settings_outside_their_range_are_refused_in_one_line(settings, message):
    with pytest.raises(SettingError, match=message):
        TargetNetworkUpdate(**settings)
