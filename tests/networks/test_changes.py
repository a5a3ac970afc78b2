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


def replace_forward(net):
    net.actor[0].forward = lambda x: x


def hook(net):
    net.actor[0].register_forward_hook(lambda *_: None)


def hook_gradients(net):
    net.actor[0].register_full_backward_hook(lambda *_: None)


def change_the_type(net):
    net.actor[0].weight.data = net.actor[0].weight.data.double()


def hook_inputs(net):
    net.actor[0].register_forward_pre_hook(lambda *_: None)


def exchange_the_hooks(net):
    net.actor[0]._forward_hooks = {0: print}


def put_in_a_script(net):
    net.actor[1] = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.Tanh()))


def put_in_a_trace(net):
    net.actor[1] = torch.jit.trace(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.ones(1, 64))


CHANGES = [
    put_in_an_activation,
    put_in_a_parameter,
    replace_forward,
    hook,
    hook_gradients,
    change_the_type,
    hook_inputs,
    exchange_the_hooks,
    put_in_a_script,
    put_in_a_trace,
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


def test_another_function_in_the_place_of_one_that_replaced_forward_is_noticed():
    net = network()
    net.actor[0].forward = lambda x: x
    detector = ChangeDetector(net)
    assert not detector.changed()
    net.actor[0].forward = lambda x: -x
    assert detector.changed()


def test_learning_and_attributes_of_a_run_are_no_change():
    algorithm = PPO("CartPole-v1")
    detector = ChangeDetector(algorithm)
    algorithm.note, algorithm.forward = 1, lambda x: x
    with torch.no_grad():
        for parameter in algorithm.parameters():
            parameter += 1
    assert not detector.changed()
    algorithm.head = nn.Linear(2, 2)
    assert detector.changed()
