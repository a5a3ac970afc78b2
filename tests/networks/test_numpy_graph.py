"""Graphs of torch's operations in numpy: what torch computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from lightning_rl.networks.numpy_graph import NumpyGraph
from lightning_rl.networks.numpy_ops import NotInNumpy


def in_numpy(function, *inputs: Tensor, first: int | None = None) -> tuple[NumpyGraph, list[np.ndarray]]:
    """A function's graph, and its outputs after a call with other inputs before."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    graph = NumpyGraph(module, {}, len(function(*inputs)) if first is None else first)
    for turned in (True, False):
        for array, tensor in zip(graph.inputs, inputs, strict=True):
            np.copyto(array, (tensor.flip(0) if turned else tensor).numpy())
        graph()
    return graph, graph.outputs


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def gradient(function):
    """A function's value and gradient."""

    def both(x: Tensor, *others: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = function(x, *others)
        return [y.detach(), *torch.autograd.grad((y * torch.arange(y.numel()).view(y.shape)).sum(), x)]

    return both


def written(x: Tensor) -> Tensor:
    """Fills its result from behind, as a sum over time does."""
    result, last = torch.empty_like(x), torch.zeros_like(x[0])
    for t in reversed(range(len(x))):
        last = x[t] + 0.5 * last
        result[t] = last
    return result.add_(1)


FUNCTIONS = {
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "log_softmax of two": lambda x: F.log_softmax(x[:, :2], -1),
    "softmax": lambda x: F.softmax(x, 1),
    "logsigmoid": F.logsigmoid,
    "sigmoid and softplus": lambda x: torch.sigmoid(x) * F.softplus(x.detach()),
    "perceptron": lambda x: torch.tanh(x @ x.T).relu() @ x,
    "batched products": lambda x: torch.baddbmm(x[None, :, :1], x.T.expand(3, 5, 4).transpose(1, 2), x.T.expand(3, 5, 4)).relu(),
    "huber": lambda x: F.huber_loss(x, 0.5 - x.detach().abs(), reduction="none"),
    "clamp and where": lambda x: torch.where(x > 0.3, x.clamp(-0.5, 0.9), x**2).clamp(min=-x.detach().abs()),
    "minimum of equals": lambda x: torch.minimum(x, x.detach().clamp(max=0.2)),
    "gather": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "sums": lambda x: x.sum(0) + x.sum(1).mean() + x.exp().sum((0, 1), keepdim=True).sqrt() + x.reshape(2, 2, 5).sum((0, 1)),
    "least and greatest": lambda x: x.amin(1, keepdim=True) * x[:, :3].amax(1, keepdim=True) + x.amin(0),
    "parts": lambda x: torch.cat([x[1:, ::2], x[:3, :1], torch.stack([x[0, :3], x[1, 1:4], x[2, 2:]])], 1),
    "one of twos": lambda x: torch.stack(x.view(4, 5, 1).unbind(1)).squeeze(-1) / (1 + x.T**2),
    "index": lambda x: x[:, [3, 0, 3]] * 2 - 1,
    "masks": lambda x: x.masked_fill((x > 0) & ~(x > 1), 3.0) * (x > 0).float() * (1 - (x < -1).float()),
    "written": lambda x: written(x.detach()) * x,
    "rsqrt and floor": lambda x: (x.detach().floor() + x) * (x**2 + 1).rsqrt(),
    "silu, which torch computes": F.silu,
    "elu and leaky ReLU, which torch computes": lambda x: F.elu(x) * F.leaky_relu(x, 0.2),
    "gelu, which torch computes": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh") * x.detach().sign(),
    "inverse": lambda x: (1 - x) / (x.abs() + 1).log() - x**-1,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_torch(name):
    function, x = gradient(FUNCTIONS[name]), rows(4, 5)
    for found, expected in zip(in_numpy(function, x)[1], function(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=2e-6, rtol=1e-5)


def test_what_is_added_to_one_place_twice_counts_twice():
    def added(x: Tensor) -> list[Tensor]:
        index = torch.tensor([[0, 0, 2, 2, 2]]).expand(4, 5) + 0 * x.long()
        return [torch.zeros_like(x).scatter_add(1, index, x)]

    x = rows(4, 5)
    (found,) = in_numpy(added, x)[1]
    np.testing.assert_allclose(found[:, 0], x[:, 0] + x[:, 1], rtol=1e-6)
    np.testing.assert_allclose(found[:, 2], x[:, 2:].sum(1), rtol=1e-5)
    assert not found[:, [1, 3, 4]].any()


def test_other_outputs_are_computed_when_they_are_asked_for_and_share_what_is_known():
    def both(x: Tensor) -> list[Tensor]:
        later = (x * 3).exp()
        return [(x * 3).sum(), later]

    x = rows(4, 5)
    graph, (first, later) = in_numpy(both, x, first=1)
    assert graph.at_once == [True, False] and len(graph.calls) == 2 and len(graph.later) == 1
    np.testing.assert_allclose(first, 3 * x.sum(), rtol=1e-5)
    graph.compute_others()
    np.testing.assert_allclose(later, (3 * x).exp(), rtol=1e-5)


def test_equal_operations_are_done_once_unless_one_is_overwritten():
    def twice(x: Tensor) -> list[Tensor]:
        return [(x + 1) * (x + 1), (x + 2).mul_(2), (x + 2).mul_(3)]

    x = rows(4, 5)
    graph, (square, double, triple) = in_numpy(twice, x)
    assert len(graph.calls) == 2 + 2 + 2
    for found, expected in zip((square, double, triple), twice(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_what_is_read_before_and_after_it_is_overwritten_are_two_values():
    def around(x: Tensor) -> list[Tensor]:
        y = x * 2
        before, sum_before = y.exp(), y + x
        y.add_(1)
        return [before, y.exp(), sum_before, y + x]

    x = rows(4, 5)
    for found, expected in zip(in_numpy(around, x)[1], around(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_products_with_one_have_the_type_that_torch_says():
    found = in_numpy(lambda x: [x * 1.0, x * 1], torch.arange(4))[1]
    assert [array.dtype for array in found] == [np.float32, np.int64]


def test_an_array_that_is_placed_is_read_where_it_lies():
    module = make_fx(lambda w, x: [w * x], tracing_mode="fake")(torch.zeros(2), torch.zeros(2))
    weight = np.array([2.0, 3.0], np.float32)
    graph = NumpyGraph(module, {0: weight}, 1)
    graph.inputs[1][:] = 5
    weight += 1
    graph()
    assert graph.outputs[0].tolist() == [15, 20] and graph.inputs[0] is weight


def test_what_is_not_finite_passes_without_a_warning_as_in_torch():
    _, (found,) = in_numpy(lambda x: [(x / 0).log()], torch.tensor([1.0, -1.0, 0.0]))
    assert found[0] == np.inf and np.isnan(found[1:]).all()


def test_an_operation_that_is_not_known_is_named():
    with pytest.raises(NotInNumpy, match=r"aten\.native_layer_norm\.default"):
        in_numpy(lambda x: [F.layer_norm(x, (5,))], rows(4, 5))
