"""What is put into an algorithm during a run, or in the place of a network before it, counts or is named."""

from __future__ import annotations

from copy import deepcopy

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

import lightning_rl as lrl
from tests.fitting import fit, tiny


class At(pl.Callback):
    """Changes an algorithm at the end of its second iteration, and keeps what it looks at after each."""

    def __init__(self, change, look=lambda algorithm: None):
        self.change, self.look, self.seen = change, look, []

    def on_train_batch_end(self, trainer, algorithm, *_):
        self.seen.append(self.look(algorithm))
        if len(self.seen) == 2:
            self.change(algorithm)


def replace(sequence, i, part):
    """A change that puts a part into a sequence of the algorithm."""
    return lambda algorithm: sequence(algorithm).__setitem__(i, part())


@pytest.mark.parametrize(
    ("algorithm", "layers", "target"),
    [
        (lrl.DQN, lambda algorithm: algorithm.network.head, lambda algorithm: algorithm.target.head),
        (lrl.TD3, lambda algorithm: algorithm.network.layers, lambda algorithm: algorithm.target_network.layers),
    ],
    ids=["DQN", "TD3"],
)
def test_a_target_gets_the_activation_that_its_network_gets_and_goes_on_following_it(algorithm, layers, target):
    model = tiny(algorithm, net_arch=[8], max_env_steps=192, **({"tau": 1.0, "target_update_interval": 1} if algorithm is lrl.DQN else {}))
    places = [i for i, layer in enumerate(layers(model)) if isinstance(layer, nn.ReLU)]
    look = At(replace(layers, places[0], nn.SiLU), lambda model: [weight.detach().clone() for weight in target(model).parameters()])
    fit(model, callbacks=[look])
    assert type(target(model)[places[0]]) is nn.SiLU
    assert all(not torch.equal(*pair) for pair in zip(look.seen[2], look.seen[-1], strict=True))
    if algorithm is lrl.DQN:
        assert all(torch.equal(*pair) for pair in zip(layers(model).parameters(), target(model).parameters(), strict=True))


@pytest.mark.parametrize("kind", ["function", "closure"])
def test_a_target_gets_the_forward_that_a_layer_of_its_network_gets(kind):
    model = tiny(lrl.DQN, net_arch=[8], max_env_steps=192)
    layer = model.network.head[0]
    functions = {"function": lambda x: 0 * x[..., :1].expand(-1, 8), "closure": lambda x: 0 * nn.functional.linear(x, layer.weight)}
    obs = torch.ones(2, layer.in_features)
    look = At(lambda model: setattr(layer, "forward", functions[kind]), lambda model: model.target.head[0](obs).abs().sum().item())
    fit(model, callbacks=[look])
    assert look.seen[1] > 0
    assert look.seen[2:] == [0.0] * (len(look.seen) - 2)


def test_a_distribution_in_the_place_of_another_of_its_class_is_the_one_that_acts():
    model = tiny(lrl.PPO, "Pendulum-v1", max_env_steps=256)
    other = deepcopy(model.network.distribution)
    with torch.no_grad():
        other.log_std.fill_(-1.0)
    acting = At(lambda model: setattr(model.network, "distribution", other), lambda model: model.collector._actor.distribution)
    fit(model, callbacks=[acting])
    assert acting.seen[1] is not other and acting.seen[2] is other and acting.seen[-1] is other


@pytest.mark.parametrize("algorithm", [lrl.PPO, lrl.DQN])
@pytest.mark.parametrize("what", ["layer", "parameter"])
def test_a_part_that_is_put_in_during_a_run_and_not_learned_is_named_once(algorithm, what, capfd):
    def change(model):
        layers = model.network.actor if algorithm is lrl.PPO else model.network.head
        if what == "layer":
            layers[-1] = deepcopy(layers[-1])
        else:
            layers[-1].weight = nn.Parameter(layers[-1].weight.detach().clone())

    fit(tiny(algorithm, max_env_steps=256), callbacks=[At(change)])
    lines = [line for line in capfd.readouterr().out.splitlines() if "not learned" in line]
    name = {lrl.PPO: "network.actor.", lrl.DQN: "network.head."}[algorithm]
    assert len(lines) == 1 and "parameters are not learned, since no optimizer holds them: " in lines[0] and name in lines[0]


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize(("algorithm", "part"), [(lrl.PPO, "network"), (lrl.SAC, "network.distribution")])
def test_hooks_of_a_part_that_nothing_calls_are_named(algorithm, part, hook, capfd):
    model = tiny(algorithm)
    getattr(model.get_submodule(part), hook)(lambda *arguments: pytest.fail("it is called"))
    fit(model)
    assert f"hooks and forward of {part} are not called, since" in capfd.readouterr().out


def test_forward_of_a_network_that_nothing_calls_is_named(capfd):
    model = tiny(lrl.PPO)
    model.network.forward = lambda *arguments: pytest.fail("it is called")
    fit(model)
    assert "hooks and forward of network are not called, since" in capfd.readouterr().out


@pytest.mark.parametrize(("algorithm", "part"), [(lrl.DQN, "network"), (lrl.TD3, "network"), (lrl.TD3, "critic"), (lrl.SAC, "critic")])
def test_a_network_that_is_replaced_before_a_run_without_its_target_is_refused(algorithm, part):
    model = tiny(algorithm)
    setattr(model, part, deepcopy(getattr(model, part)))
    name = algorithm.__name__
    with pytest.raises(lrl.SettingError, match=rf"^a network of {name} was replaced, but not in {name}\.target_networks: assign"):
        fit(model)


def test_a_network_that_is_replaced_together_with_its_target_learns():
    model = tiny(lrl.DQN, max_env_steps=128)
    model.network = deepcopy(model.network)
    model.target_networks = [(model.network, model.target)]
    before = [weight.detach().clone() for weight in model.network.parameters()]
    fit(model)
    assert all(not torch.equal(*pair) for pair in zip(before, model.network.parameters(), strict=True))


def test_a_learning_rate_that_is_put_into_an_optimizer_is_named(capfd):
    def change(model):
        model.trainer.optimizers[0].param_groups[0]["lr"] = 1e-5

    fit(tiny(lrl.PPO, max_env_steps=256), callbacks=[At(change)])
    lines = [line for line in capfd.readouterr().out.splitlines() if "assign that" in line]
    assert lines == ["1e-05 in an optimizer is replaced by learning_rate, which it follows: assign that"]


def test_what_nan_would_restore_are_the_parts_that_were_put_in():
    def restores(model):
        parts = [*model.network.head.parameters(), *model.target.head.parameters()]
        before = [part.detach().clone() for part in parts]
        for part in parts:
            part.detach().zero_()
        model.learner.guard.snapshot.restore()  # what the iteration ended with
        return all(torch.equal(*pair) for pair in zip(parts, before, strict=True))

    model = tiny(lrl.DQN, net_arch=[8], max_env_steps=192, on_nan="restore_last")
    look = At(lambda model: model.network.head.__setitem__(1, nn.SiLU()), restores)
    fit(model, callbacks=[look])
    assert len(look.seen) > 3 and all(look.seen)


class Actions(pl.Callback):
    """Keeps the mean of the actions of each iteration, and hooks a policy at the end of the second epoch, so that it always chooses 0."""

    def __init__(self):
        self.means = []

    def on_train_batch_start(self, trainer, algorithm, batch, *_):
        self.means.append(batch.action.float().mean().item())

    def on_train_epoch_end(self, trainer, algorithm):
        if len(self.means) == 2:
            algorithm.network.actor[-1].register_forward_hook(lambda layer, inputs, logits: 0 * logits + torch.tensor([99.0, 0.0, 0.0]))


def test_a_hook_that_is_put_in_between_two_epochs_acts_in_the_next():
    actions = Actions()
    fit(tiny(lrl.PPO), callbacks=[actions], limit_train_batches=1, max_epochs=4)
    assert min(actions.means[:2]) > 0 and actions.means[2:] == [0, 0]
