"""One vector for all parameters changes what a step costs, not what it does."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_rl.errors import SettingError
from lightning_rl.optimization import FlatAdam, FlatParameters, FlatRMSprop, FlatSGD, gradient_step, parameters_of, with_gradient

OFF = GradScaler(enabled=False)


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(net):
    return net(torch.tensor([[1.0, -2.0, 0.5]])).square().sum() * 10


def test_the_vector_and_the_parameters_share_their_memory():
    net = module()
    vector = FlatParameters(net)
    assert vector.shape == (3 * 4 + 4 + 4 * 2 + 2,)
    with torch.no_grad():
        vector.fill_(0.25)
    assert all((parameter == 0.25).all() for parameter in net.parameters())
    net.load_state_dict({name: torch.full_like(value, 2.0) for name, value in net.state_dict().items()})
    assert (vector == 2.0).all()


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_module_and_its_optimizer_goes_on_by_itself_as_the_original_does(copies):
    net = module()
    optimizer = FlatAdam(net)
    gradient_step(loss_of(net), optimizer, OFF, 1e9, 1)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    copied, theirs = copies((net, optimizer))
    gradient_step(loss_of(copied), theirs, OFF, 1e9, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    gradient_step(loss_of(net), optimizer, OFF, 1e9, 1)
    assert not torch.equal(before[0], next(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), net.parameters(), strict=True))


def test_steps_on_the_vector_are_steps_on_the_parameters():
    plain, flat = module(), module()
    optimizers = [torch.optim.Adam(plain.parameters(), 0.1), torch.optim.Adam([FlatParameters(flat)], 0.1)]
    for _ in range(5):
        norms = [gradient_step(loss_of(net), opt, OFF, 0.5, 1) for net, opt in zip((plain, flat), optimizers, strict=True)]
        torch.testing.assert_close(norms[0], norms[1])
    for expected, found in zip(plain.parameters(), flat.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def adam_steps(watch, number=4, **settings):
    """The weights after some steps of `FlatAdam` that `watch` looks at from the second on, and of torch's own Adam."""
    plain, flat = module(), module()
    optimizers = [torch.optim.Adam(plain.parameters(), 0.1, fused=True, **settings), FlatAdam(flat)]
    optimizers[1].param_groups[0] |= {"lr": 0.1, **settings}
    for k in range(number):
        stop = watch(optimizers[1]) if k == 1 else lambda: None
        for net, optimizer in zip((plain, flat), optimizers, strict=True):
            gradient_step(loss_of(net), optimizer, OFF, 1e9, 1)
        stop()
    return [torch.cat([parameter.detach().flatten() for parameter in net.parameters()]) for net in (plain, flat)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"weight_decay": 0.1}, {"betas": (0.5, 0.7)}, {"maximize": True}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
)
def test_adam_on_the_vector_is_torchs_adam(settings):
    plain, flat = adam_steps(lambda optimizer: lambda: None, **settings)
    torch.testing.assert_close(flat, plain, rtol=0, atol=1e-7)


def test_hooks_around_a_step_of_adam_are_called_and_change_nothing():
    calls = []

    def watch(optimizer):
        handles = [
            optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
            optimizer.register_step_post_hook(lambda *_: calls.append("after")),
            register_optimizer_step_pre_hook(lambda each, *_: calls.append("before all") if each is optimizer else None),
            register_optimizer_step_post_hook(lambda each, *_: calls.append("after all") if each is optimizer else None),
        ]
        return lambda: [handle.remove() for handle in handles]

    plain, flat = adam_steps(watch)
    assert calls == ["before all", "before", "after", "after all"]
    torch.testing.assert_close(flat, plain, rtol=0, atol=1e-7)
    calls.clear()

    def watch_all(optimizer):
        return register_optimizer_step_post_hook(lambda each, *_: calls.append("after all") if each is optimizer else None).remove

    adam_steps(watch_all)
    assert calls == ["after all"]


def test_a_profiler_sees_the_steps_of_adam():
    profiles = []

    def watch(optimizer):
        profiles.append(torch.profiler.profile())
        profiles[0].start()
        return profiles[0].stop

    adam_steps(watch)
    assert "Optimizer.step#FlatAdam.step" in {event.key for event in profiles[0].key_averages()}


def test_a_step_clears_the_previous_gradient_even_if_it_was_set_to_none():
    net = module()
    optimizer = torch.optim.SGD([FlatParameters(net)], 0.0)
    first = gradient_step(loss_of(net), optimizer, OFF, 1e9, 1)
    net.zero_grad(set_to_none=True)
    assert gradient_step(loss_of(net), optimizer, OFF, 1e9, 1) == first


def test_a_parameter_without_gradient_stays():
    net = module()
    unused = nn.Parameter(torch.ones(2))
    net.register_parameter("unused", unused)
    gradient_step(loss_of(net), torch.optim.SGD([FlatParameters(net)], 0.1), OFF, 1.0, 1)
    assert (unused == 1).all()


def test_a_copy_of_the_network_does_not_share_the_vector():
    net = module()
    vector = FlatParameters(net)
    target = copy.deepcopy(net)
    with torch.no_grad():
        vector.zero_()
    assert all(parameter.abs().sum() > 0 for parameter in target.parameters())


def test_clipping_scales_a_gradient_of_3_4_12_to_the_given_norm():
    weights = [torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, 1.0)
    for most, moved in ((1.3, [-0.3, -0.4, -1.2]), (100.0, [-3.3, -4.4, -13.2])):
        loss = (weights[0] * torch.tensor([3.0, 4.0])).sum() + 12 * weights[1].sum()
        assert gradient_step(loss, optimizer, OFF, most, 1) == (13.0, True)
        torch.testing.assert_close(torch.cat(weights).detach(), torch.tensor(moved))


@pytest.mark.parametrize("flat, plain", [(FlatAdam, torch.optim.Adam), (FlatRMSprop, torch.optim.RMSprop)])
def test_an_optimizer_of_the_vector_is_torchs(flat, plain):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    twin = copy.deepcopy(network)
    ours, theirs = flat(network, eps=1e-5), plain(twin.parameters(), eps=1e-5)
    for k in range(50):
        x = torch.randn(8, 3)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.01 / (k + 1)
        ours.zero_grad()
        network(x).square().sum().backward()
        ours.step()
        theirs.zero_grad()
        twin(x).square().sum().backward()
        theirs.step()
    for one, other in zip(network.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    again = flat(copy.deepcopy(network), eps=1e-5)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    for optimizer in (ours, again):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(32)
        optimizer.step()
    assert torch.equal(ours.param_groups[0]["params"][0], again.param_groups[0]["params"][0])


def test_the_gradient_of_one_loss_is_in_the_vector_and_in_the_parameters_and_nowhere_else():
    net, other = module(), module()
    optimizer = FlatAdam(net)
    loss = loss_of(net) + loss_of(other)
    expected = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
    gradient_step(loss, optimizer, OFF, float("inf"), 1)
    assert (optimizer.param_groups[0]["params"][0].grad == torch.cat([gradient.flatten() for gradient in expected])).all()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert (parameter.grad == gradient).all()
    assert all(parameter.grad is None for parameter in other.parameters())


def test_a_users_backward_pass_reaches_the_step_after_zero_grad():
    net = module()
    optimizer = FlatAdam(net)
    for parameters in (optimizer, net):  # a module forgets its gradients, an optimizer zeroes them
        parameters.zero_grad()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()
        assert all((parameter != old).any() for parameter, old in zip(net.parameters(), before, strict=True))


def known_loss(optimizer, scale=None):
    """The loss 7, whose gradient is (1, 2) for a weight `[1, 2]` and 3 for a bias `[1]`, times a scale."""
    gradient = torch.tensor([1.0, 2.0, 3.0]) * (1 if scale is None else scale)
    return with_gradient(torch.tensor(7.0), gradient, parameters_of(optimizer), optimizer, scale)


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
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_on_such_a_loss_is_that_on_its_gradient(change, flat, scale):
    function, factor = CHANGES[change]
    net = nn.Linear(2, 1)
    before = torch.cat([net.weight.flatten(), net.bias]).detach()
    optimizer = FlatSGD(net, 0.0) if flat else torch.optim.SGD(net.parameters())
    optimizer.param_groups[0]["lr"] = 0.1
    scaler = OFF if scale is None else GradScaler("cpu", init_scale=scale)
    loss = function(known_loss(optimizer, None if scale is None else torch.tensor(scale)))
    norm, finite = gradient_step(loss, optimizer, scaler, 1e9, 1)
    assert finite and loss.item() == 7 * factor and norm.item() == pytest.approx(factor * 14**0.5)
    after = torch.cat([net.weight.flatten(), net.bias]).detach()
    torch.testing.assert_close(after, before - 0.1 * factor * torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_see_that_gradient(kind):
    net = nn.Linear(2, 1)
    optimizer, calls = FlatSGD(net, 0.0), []
    getattr(net.bias, kind)(lambda found: calls.append((found.grad if found is net.bias else found).tolist()))
    gradient_step(known_loss(optimizer), optimizer, OFF, 1e9, 1)
    assert calls == [[3.0]]


def test_a_step_of_another_optimizer_on_such_a_loss_is_an_error():
    with pytest.raises(SettingError, match="a compiled loss has no gradient for this optimizer: name losses in the order of optimizers"):
        gradient_step(known_loss(FlatAdam(nn.Linear(2, 1))), FlatAdam(nn.Linear(2, 1)), OFF, 1e9, 1)


def test_adam_on_the_vector_leaves_out_a_step_whose_scaled_gradient_is_infinite():
    net = nn.Linear(2, 1)
    optimizer, scaler = FlatAdam(net), GradScaler("cpu", init_scale=65_536.0)
    optimizer.param_groups[0]["lr"] = 0.1
    for factor, moves in ((1.0, True), (1e38, False), (1.0, True)):
        before = net.weight.detach().clone()
        gradient_step(factor * net.weight.sum(), optimizer, scaler, 1e9, 1)
        assert net.weight.isfinite().all() and torch.equal(net.weight, before) != moves
    assert scaler.get_scale() == 32_768


def test_adam_takes_another_group():
    net, more = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    optimizer = FlatAdam(net)
    optimizer.add_param_group({"params": [more]})
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for _ in range(3):
        gradient_step(net.weight.sum() + more.sum(), optimizer, OFF, 1e9, 1)
    assert more.item() == pytest.approx(0.7, abs=1e-4)
