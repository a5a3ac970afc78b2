"""Optimizers with the scheduled learning rate are torch's, and a gradient step is that of a plain loop."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_rl import optimization
from lightning_rl.errors import SettingError
from lightning_rl.optimization import (
    ScheduledAdam,
    ScheduledRAdam,
    ScheduledRMSprop,
    ScheduledSGD,
    gradient_step,
    parameters_of,
    with_gradient,
)

OFF = GradScaler(enabled=False)


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(net):
    return net(torch.tensor([[1.0, -2.0, 0.5]])).square().sum() * 10


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_module_and_its_optimizer_goes_on_by_itself_as_the_original_does(copies):
    net = module()
    optimizer = ScheduledAdam(net)
    gradient_step(loss_of(net), optimizer, OFF, 1e9, 1)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    copied, theirs = copies((net, optimizer))
    gradient_step(loss_of(copied), theirs, OFF, 1e9, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    gradient_step(loss_of(net), optimizer, OFF, 1e9, 1)
    assert not torch.equal(before[0], next(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), net.parameters(), strict=True))


def test_a_step_clears_the_previous_gradient():
    net = module()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    first = gradient_step(loss_of(net), optimizer, OFF, 1e9, 1)
    assert gradient_step(loss_of(net), optimizer, OFF, 1e9, 1) == first


def test_a_parameter_that_the_loss_does_not_use_stays_and_has_no_gradient():
    net = module()
    unused = nn.Parameter(torch.ones(2))
    net.register_parameter("unused", unused)
    gradient_step(loss_of(net), torch.optim.SGD(net.parameters(), 0.1, weight_decay=1.0), OFF, 1.0, 1)
    assert (unused == 1).all() and unused.grad is None


def test_clipping_scales_a_gradient_of_3_4_12_to_the_given_norm():
    weights = [torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, 1.0)
    for most, moved in ((1.3, [-0.3, -0.4, -1.2]), (100.0, [-3.3, -4.4, -13.2])):
        loss = (weights[0] * torch.tensor([3.0, 4.0])).sum() + 12 * weights[1].sum()
        assert gradient_step(loss, optimizer, OFF, most, 1) == (13.0, True)
        torch.testing.assert_close(torch.cat(weights).detach(), torch.tensor(moved))


@pytest.mark.parametrize(
    ("scheduled", "plain"),
    [
        (lambda net: ScheduledAdam(net, eps=1e-5), lambda parameters: torch.optim.Adam(parameters, eps=1e-5)),
        (ScheduledRAdam, torch.optim.RAdam),
        (lambda net: ScheduledRMSprop(net, eps=1e-5), lambda parameters: torch.optim.RMSprop(parameters, eps=1e-5)),
    ],
)
def test_a_scheduled_optimizer_makes_the_steps_of_torchs_in_a_plain_loop_and_in_gradient_step(scheduled, plain):
    nets = [module() for _ in range(3)]
    optimizers = [scheduled(nets[0]), scheduled(nets[1]), plain(nets[2].parameters())]
    for k in range(50):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.01 / (k + 1)
        gradient_step(loss_of(nets[0]), optimizers[0], OFF, 1e9, 1)
        for net, optimizer in zip(nets[1:], optimizers[1:], strict=True):
            net.zero_grad()
            loss_of(net).backward()
            optimizer.step()
    for first, second, third in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(first, third)
        assert torch.equal(first, second)


def test_only_parameters_of_the_optimizer_get_the_gradient():
    net, other = module(), module()
    optimizer = ScheduledAdam(net)
    loss = loss_of(net) + loss_of(other)
    expected = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
    gradient_step(loss, optimizer, OFF, float("inf"), 1)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert (parameter.grad == gradient).all()
    assert all(parameter.grad is None for parameter in other.parameters())


CHANGES_OF_GRADIENTS = {
    "cloned": lambda net: [setattr(parameter, "grad", parameter.grad.clone()) for parameter in net.parameters()],
    "doubled": lambda net: [parameter.grad.mul_(2) for parameter in net.parameters()],
    "replaced": lambda net: [setattr(parameter, "grad", torch.ones_like(parameter)) for parameter in net.parameters()],
    "removed": lambda net: setattr(net[0].weight, "grad", None),
    "zeroed in part": lambda net: net[2].zero_grad(),
}


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
@pytest.mark.parametrize("change", CHANGES_OF_GRADIENTS)
def test_gradients_that_a_hook_changes_are_those_of_each_step(change, hook):
    net, twin = module(), module()
    optimizer, theirs = ScheduledAdam(net), torch.optim.Adam(twin.parameters())
    for _ in range(3):
        hooks = lambda name, *_: CHANGES_OF_GRADIENTS[change](net) if name == hook else None  # noqa: E731
        gradient_step(loss_of(net), optimizer, OFF, float("inf"), 1, hooks)
        twin.zero_grad()
        loss_of(twin).backward()
        CHANGES_OF_GRADIENTS[change](twin)
        theirs.step()
    for parameter, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


def point_to_copies(net):
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()


CHANGES_OF_PARAMETERS = {
    "data": point_to_copies,
    "vector_to_parameters": lambda net: vector_to_parameters(parameters_to_vector(net.parameters()), net.parameters()),
    "double and float": lambda net: net.double().float(),
}


@pytest.mark.parametrize("change", CHANGES_OF_PARAMETERS)
def test_parameters_that_point_to_other_memory_go_on_learning(change):
    net, twin = module(), module()
    optimizer, theirs = ScheduledAdam(net), ScheduledAdam(twin)
    for _ in range(3):
        gradient_step(loss_of(net), optimizer, OFF, 1e9, 1)
        CHANGES_OF_PARAMETERS[change](net)
        gradient_step(loss_of(twin), theirs, OFF, 1e9, 1)
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), twin.parameters(), strict=True))


def test_a_module_in_two_optimizers_learns_from_both():
    shared, first, second = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD([*shared.parameters(), *head.parameters()], 0.1) for head in (first, second)]
    for head, optimizer in zip((first, second), optimizers, strict=True):
        before = shared.weight.detach().clone()
        gradient_step(head(shared(torch.ones(1, 3))).sum(), optimizer, OFF, 1e9, 1)
        torch.testing.assert_close(before - shared.weight, 0.1 * shared.weight.grad)
        assert shared.weight.grad.abs().sum() > 0


def test_a_parameter_that_is_frozen_between_two_steps_stays_and_learns_again_when_it_is_not():
    net = module()
    optimizer = ScheduledAdam(net)
    for learns in (True, False, True):
        net[0].requires_grad_(learns)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        gradient_step(loss_of(net), optimizer, OFF, 1e9, 1)
        moved = [bool((parameter != old).any()) for parameter, old in zip(net.parameters(), before, strict=True)]
        assert moved == [learns, learns, True, True]


def test_a_step_whose_parameters_are_all_frozen_changes_nothing():
    net = module().requires_grad_(False)
    norm, finite = gradient_step(loss_of(net), torch.optim.Adam(net.parameters()), OFF, 1e9, 1)
    assert norm == 0 and finite


def test_a_state_of_version_0_1_0_with_one_vector_continues_as_if_each_parameter_had_its_own():
    net = module()
    optimizer = ScheduledAdam(net)
    for _ in range(3):
        gradient_step(loss_of(net), optimizer, OFF, 1e9, 1)
    state = copy.deepcopy(optimizer.state_dict())
    states = [state["state"][number] for number in range(4)]
    vector = {name: torch.cat([each[name].flatten() for each in states]) for name in ("exp_avg", "exp_avg_sq")}
    old = {
        "state": {0: {"step": states[0]["step"], **vector}},
        "param_groups": [{**state["param_groups"][0], "params": [0], "foreach": None}],
    }
    again = copy.deepcopy(net)
    theirs = ScheduledAdam(again)
    theirs.load_state_dict(old)
    for _ in range(3):
        gradient_step(loss_of(net), optimizer, OFF, 1e9, 1)
        gradient_step(loss_of(again), theirs, OFF, 1e9, 1)
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), again.parameters(), strict=True))


def known_loss(optimizer, scale=None):
    """The loss 7, whose gradient is (1, 2) for a weight `[1, 2]` and 3 for a bias `[1]`, times a scale."""
    gradient = torch.tensor([1.0, 2.0, 3.0]) * (1 if scale is None else scale)
    return with_gradient(torch.tensor(7.0), gradient if scale is None else gradient / scale, parameters_of(optimizer))


def test_a_loss_that_brings_its_gradient_is_a_part_of_torchs_graph():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for scale in (None, torch.tensor(64.0)):
        total = 0.5 * known_loss(optimizer, scale) + 4 * net.bias.sum()
        net.zero_grad()
        total.backward()
        assert total.item() == pytest.approx(3.5 + 4 * net.bias.item())
        assert net.weight.grad.tolist() == [[0.5, 1.0]] and net.bias.grad.tolist() == [1.5 + 4]
        (only,) = torch.autograd.grad(known_loss(optimizer, scale), [net.bias])
        assert only.tolist() == [3.0]


def halved_in_place(loss):
    loss *= 0.5
    return loss


CHANGES = {"as it is": (lambda loss: loss, 1.0), "doubled": (lambda loss: 2 * loss, 2.0), "halved in place": (halved_in_place, 0.5)}


@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_on_such_a_loss_is_that_on_its_gradient(change, scale):
    function, factor = CHANGES[change]
    net = nn.Linear(2, 1)
    before = torch.cat([net.weight.flatten(), net.bias]).detach()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = OFF if scale is None else GradScaler("cpu", init_scale=scale)
    loss = function(known_loss(optimizer, None if scale is None else torch.tensor(scale)))
    norm, finite = gradient_step(loss, optimizer, scaler, 1e9, 1)
    assert finite and loss.item() == 7 * factor and norm.item() == pytest.approx(factor * 14**0.5)
    after = torch.cat([net.weight.flatten(), net.bias]).detach()
    torch.testing.assert_close(after, before - 0.1 * factor * torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_see_that_gradient(kind):
    net = nn.Linear(2, 1)
    optimizer, calls = ScheduledSGD(net, 0.0), []
    getattr(net.bias, kind)(lambda found: calls.append((found.grad if found is net.bias else found).tolist()))
    gradient_step(known_loss(optimizer), optimizer, OFF, 1e9, 1)
    assert calls == [[3.0]]


def test_a_gradient_that_a_hook_puts_in_the_place_of_such_a_gradient_is_measured_clipped_and_used():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)

    def replace(name, *arguments):
        if name == "on_after_backward":
            net.weight.grad, net.bias.grad = torch.tensor([[6.0, 0.0]]), torch.tensor([8.0])

    known, before = known_loss(optimizer), torch.cat([net.weight.flatten(), net.bias]).detach()
    norm, _ = gradient_step(known, optimizer, OFF, 5.0, 1, replace)
    assert norm.item() == 10.0
    torch.testing.assert_close(torch.cat([net.weight.flatten(), net.bias]).detach(), before - torch.tensor([3.0, 0.0, 4.0]))


def test_a_step_of_another_optimizer_on_such_a_loss_is_an_error():
    with pytest.raises(SettingError, match="not depend on its optimizer's parameters: they were replaced, or compiled losses"):
        gradient_step(known_loss(ScheduledAdam(nn.Linear(2, 1))), ScheduledAdam(nn.Linear(2, 1)), OFF, 1e9, 1)


def test_adam_leaves_out_a_step_whose_scaled_gradient_is_infinite():
    net = nn.Linear(2, 1)
    optimizer, scaler = ScheduledAdam(net), GradScaler("cpu", init_scale=65_536.0)
    optimizer.param_groups[0]["lr"] = 0.1
    for factor, moves in ((1.0, True), (1e38, False), (1.0, True)):
        before = net.weight.detach().clone()
        gradient_step(factor * net.weight.sum(), optimizer, scaler, 1e9, 1)
        assert net.weight.isfinite().all() and torch.equal(net.weight, before) != moves
    assert scaler.get_scale() == 32_768


def test_adam_takes_another_group():
    net, more = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    optimizer = ScheduledAdam(net)
    optimizer.add_param_group({"params": [more]})
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for _ in range(3):
        gradient_step(net.weight.sum() + more.sum(), optimizer, OFF, 1e9, 1)
    assert more.item() == pytest.approx(0.7, abs=1e-4)


def test_a_name_of_an_earlier_version_is_todays_optimizer_and_one_line_says_so():
    with pytest.warns(FutureWarning, match=r"^FlatRMSprop is now ScheduledRMSprop; import that from lightning_rl.optimization$"):
        from lightning_rl.optimization import FlatRMSprop
    assert FlatRMSprop is optimization.ScheduledRMSprop
    for unknown in ("FlatParameters", "FlatLBFGS", "Adam"):
        with pytest.raises(AttributeError, match=unknown):
            getattr(optimization, unknown)


def trained(optimizer_of, steps=4, before=lambda optimizer: None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = optimizer_of(net)
    before(optimizer)
    for _ in range(steps):
        net(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]), optimizer


TORCHS = {
    ScheduledAdam: lambda net: torch.optim.Adam(net.parameters(), fused=True),
    ScheduledRMSprop: lambda net: torch.optim.RMSprop(net.parameters(), foreach=True),
}


@pytest.mark.parametrize(
    ("scheduled", "group"),
    [
        *((ScheduledAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}), (ScheduledAdam, {"amsgrad": True})),
        *((ScheduledRMSprop, {"momentum": 0.9}), (ScheduledRMSprop, {"centered": True}), (ScheduledRMSprop, {"alpha": 0.5})),
        (ScheduledRMSprop, {"alpha": 1.0}),
        *((one, group) for one in TORCHS for group in ({}, {"weight_decay": 0.1}, {"maximize": True}, {"lr": 0.1, "eps": 1e-3})),
    ],
)
def test_a_scheduled_optimizer_moves_weights_as_torchs_whatever_its_group_says(scheduled, group):
    def configure(optimizer):
        optimizer.param_groups[0].update({"lr": 0.01, **group})

    ours, optimizer = trained(scheduled, before=configure)
    theirs, torchs = trained(TORCHS[scheduled], before=configure)
    assert torch.equal(ours, theirs)
    states = optimizer.state_dict()["state"], torchs.state_dict()["state"]
    assert all(torch.equal(states[0][k][name], states[1][k][name]) for k in states[1] for name in states[1][k])


@pytest.mark.parametrize("scheduled", TORCHS)
@pytest.mark.parametrize("changed", [torch.Tensor.contiguous, lambda grad: grad[:1, :1, :1, :1].expand_as(grad)], ids=["order", "expanded"])
def test_a_gradient_that_lies_otherwise_in_memory_than_its_parameter_is_read_in_its_order(scheduled, changed):
    def make():
        torch.manual_seed(0)
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    nets = make(), make()
    optimizers = (
        scheduled(nets[0]),
        torch.optim.Adam(nets[1].parameters()) if scheduled is ScheduledAdam else torch.optim.RMSprop(nets[1].parameters()),
    )
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.01
    for _ in range(3):
        torch.manual_seed(1)
        gradients = torch.randn(4, 3, 3, 3), torch.randn(4)
        for net, optimizer in zip(nets, optimizers, strict=True):
            net.weight.grad, net.bias.grad = changed(gradients[0]), gradients[1].clone()
            optimizer.step()
    torch.testing.assert_close(nets[0].weight, nets[1].weight)


@pytest.mark.parametrize("scheduled", TORCHS)
def test_hooks_of_a_scheduled_optimizers_steps_are_called_also_those_registered_later_and_for_all_optimizers(scheduled):
    calls = []

    def register(optimizer):
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    trained(scheduled, steps=3, before=register)
    assert calls == ["before", "after"] * 3
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("all"))
    trained(scheduled, steps=3)
    handle.remove()
    assert calls[6:] == ["all"] * 3


@pytest.mark.parametrize("scheduled", TORCHS)
def test_a_profiler_sees_the_steps_of_a_scheduled_optimizer(scheduled):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trained(scheduled, steps=3)
    assert next(event.count for event in profile.key_averages() if event.key.startswith("Optimizer.step#")) == 3


@pytest.mark.parametrize("widths", [[], [3], [4, 2], [64] * 5])
def test_the_norm_of_gradients_is_torchs_total_norm_bit_for_bit(widths):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(5, width) for width in widths))
    loss = sum((layer(torch.randn(7, 5)).square().mean() for layer in net), torch.zeros(()))
    norm, _ = gradient_step(loss, torch.optim.SGD([*net.parameters(), nn.Parameter(torch.zeros(1), False)], 0.0), OFF, 1e9, 1)
    assert norm == torch.nn.utils.get_total_norm([parameter.grad for parameter in net.parameters()])
