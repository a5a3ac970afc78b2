import pytest
import torch
from torch import nn

from lightning_rl import PPO
from lightning_rl.networks.changes import ChangeDetector


def network():
    return PPO("CartPole-v1").network


def put_in_an_activation(net):
    net.actor[1] = nn.ReLU()


def put_in_a_parameter(net):
    net.actor[0].bias = nn.Parameter(torch.zeros_like(net.actor[0].bias))


def replace_a_method(net):
    net.distribution.draw = lambda x, noise: None


def replace_forward(net):
    net.actor[0].forward = lambda x: x


def hook(net):
    net.actor[0].register_forward_hook(lambda *_: None)


def hook_gradients(net):
    net.actor[0].register_full_backward_hook(lambda *_: None)


def change_the_type(net):
    net.actor[0].weight.data = net.actor[0].weight.data.double()


def change_a_class(net):
    net.actor[0].__class__ = type("Mine", (nn.Linear,), {})


CHANGES = [
    put_in_an_activation,
    put_in_a_parameter,
    replace_a_method,
    replace_forward,
    hook,
    hook_gradients,
    change_the_type,
    change_a_class,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_until_it_is_accepted(change):
    net = network()
    detector = ChangeDetector(net)
    assert not detector.changed()
    change(net)
    assert detector.changed() and detector.changed()
    detector.accept()
    assert not detector.changed()


def test_a_removed_hook_and_another_in_its_place_are_noticed():
    net = network()
    handle = net.actor[0].register_forward_hook(lambda *_: None)
    detector = ChangeDetector(net)
    handle.remove()
    assert detector.changed()
    net.actor[0].register_forward_hook(lambda *_: None)
    assert detector.changed()


def test_a_method_replaced_in_a_class_and_a_hook_of_all_modules_are_noticed(monkeypatch):
    net = network()
    detector = ChangeDetector(net)
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: x)
    assert detector.changed()
    detector.accept()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert detector.changed()
    finally:
        handle.remove()


def test_learning_and_attributes_of_a_run_are_no_change():
    algorithm = PPO("CartPole-v1")
    detector = ChangeDetector(algorithm, is_run=True)
    algorithm.note = 1
    with torch.no_grad():
        for parameter in algorithm.parameters():
            parameter += 1
    assert not detector.changed()
    algorithm.head = nn.Linear(2, 2)
    assert detector.changed()
