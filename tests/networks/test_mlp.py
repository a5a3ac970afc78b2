"""Layers against plain ones with the same weights."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from lightning_rl.errors import SettingError
from lightning_rl.networks.mlp import ACTIVATIONS, EnsembleLinear, NoisyLinear, mlp


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- perceptrons


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_hidden_layer_is_followed_by_its_activation(activation):
    layers = mlp(3, [5, 4], activation)
    assert [type(layer) for layer in layers] == [nn.Linear, ACTIVATIONS[activation]] * 2
    x = torch.randn(2, 3, generator=seeded())
    by_hand = layers[3](layers[2](layers[1](layers[0](x))))
    assert layers(x).shape == (2, 4)
    assert torch.equal(layers(x), by_hand)


def test_a_hook_on_a_layer_is_called_as_in_any_module():
    layers = mlp(3, [4], "relu", nn.Linear).append(nn.Linear(4, 2))
    x, plain = torch.ones(1, 3), nn.Sequential(*mlp(3, [4], "relu", nn.Linear).append(nn.Linear(4, 2)))
    plain.load_state_dict(layers.state_dict())
    assert (layers(x) == plain(x)).all()
    seen = []
    layers[0].register_forward_hook(lambda module, inputs, output: seen.append("after"))
    layers[1].register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    layers[2].register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("back"))
    layers(x).sum().backward()
    assert seen == ["after", "before", "back"]


def test_layers_are_orthogonal_by_default():
    assert torch.linalg.svdvals(mlp(4, [4])[0].weight).tolist() == pytest.approx([math.sqrt(2)] * 4)
    assert isinstance(mlp(4, [4], layer=NoisyLinear)[0], NoisyLinear)
    assert isinstance(mlp(4, [4], layer=partial(EnsembleLinear, 2))[0], EnsembleLinear)
    assert len(mlp(4, [])) == 0


@pytest.mark.parametrize(
    ("widths", "activation", "message"),
    [
        (64, "relu", r"^net_arch must be a list of widths such as \[64, 64\], got 64$"),
        ([64, 0], "relu", r"^net_arch must be >= 1, got 0$"),
        ([6.5], "relu", r"^net_arch must be an integer >= 1, got 6\.5$"),
        ([64], "rellu", r"^activation must be one of .*, got 'rellu'; did you mean relu\?$"),
    ],
)
def test_invalid_widths_and_activations_are_refused_in_one_line(widths, activation, message):
    with pytest.raises(SettingError, match=message):
        mlp(3, widths, activation)


# ---------------------------------------------------------------- ensembles


def singles(layer):
    """The layers of an ensemble as plain ones."""
    plain = [nn.Linear(*layer.weight.shape[1:]) for _ in layer.weight]
    for i, single in enumerate(plain):
        single.weight.data.copy_(layer.weight[i].T)
        single.bias.data.copy_(layer.bias[i, 0])
    return plain


def test_an_ensemble_equals_its_linear_layers_for_shared_and_separate_inputs():
    layer = EnsembleLinear(3, 4, 2)
    shared, own = torch.randn(5, 4, generator=seeded()), torch.randn(3, 5, 4, generator=seeded(1))
    plain = singles(layer)
    torch.testing.assert_close(layer(shared), torch.stack([single(shared) for single in plain]))
    torch.testing.assert_close(layer(own), torch.stack([single(rows) for single, rows in zip(plain, own, strict=True)]))


@pytest.mark.parametrize("ensemble", [1, 3])
def test_gradients_of_an_ensemble_are_those_of_its_layers(ensemble):
    layer = EnsembleLinear(ensemble, 4, 2)
    plain, x = singles(layer), torch.randn(5, 4, generator=seeded())
    layer(x).square().sum().backward()
    for i, single in enumerate(plain):
        single(x).square().sum().backward()
        torch.testing.assert_close(layer.weight.grad[i], single.weight.grad.T)
        torch.testing.assert_close(layer.bias.grad[i, 0], single.bias.grad)


def test_the_loss_of_one_member_moves_no_other():
    network = mlp(4, [6, 6], "relu", partial(EnsembleLinear, 3))
    network(torch.randn(5, 4, generator=seeded()))[1].sum().backward()
    for layer in network[::2]:
        assert layer.weight.grad[1].any() and layer.bias.grad[1].any()
        for parameter in (layer.weight, layer.bias):
            assert not parameter.grad[[0, 2]].any()


def test_each_member_starts_as_torchs_linear_layers_do_and_differs_from_the_others():
    torch.manual_seed(0)
    layer = EnsembleLinear(2, 100, 400)
    single = nn.Linear(100, 400)
    for weight, bias in zip(layer.weight, layer.bias, strict=True):
        assert weight.abs().max().item() == pytest.approx(0.1, rel=1e-3) == single.weight.abs().max().item()
        assert weight.std().item() == pytest.approx(single.weight.std().item(), rel=0.02)
        assert bias.abs().max().item() == pytest.approx(0.1, rel=0.02)
    assert not torch.equal(layer.weight[0], layer.weight[1])


# ---------------------------------------------------------------- noisy layers


def shaped(noise):
    """sign(x) √|x|."""
    return noise.sign() * noise.abs().sqrt()


def test_noise_is_factorised_and_reaches_weights_and_biases():
    layer = NoisyLinear(4, 3)
    layer.resample(seeded(7))
    generator = seeded(7)
    inside = shaped(torch.empty(4).normal_(generator=generator))
    outside = shaped(torch.empty(3).normal_(generator=generator))
    weight = layer.weight + layer.weight_sigma * torch.outer(outside, inside)
    bias = layer.bias + layer.bias_sigma * outside
    x = torch.randn(2, 5, 4, generator=seeded())
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, bias))
    assert not torch.allclose(layer(x), layer.eval()(x))


def test_noise_shapes_the_gradient_of_sigma():
    layer = NoisyLinear(2, 1)
    layer.resample(seeded())
    x = torch.tensor([[2.0, -3.0]])
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x)
    torch.testing.assert_close(layer.weight_sigma.grad, x * layer.noise_in * layer.noise_out)
    torch.testing.assert_close(layer.bias_sigma.grad, layer.noise_out)


def test_in_evaluation_the_weights_are_their_means():
    layer = NoisyLinear(4, 3).eval()
    layer.resample(seeded())
    x = torch.randn(5, 4, generator=seeded(1))
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_noise_stays_until_it_is_resampled_and_follows_the_generator():
    layer, x = NoisyLinear(4, 3), torch.randn(5, 4, generator=seeded())
    outputs = []
    for seed in (1, 1, 2):
        layer.resample(seeded(seed))
        outputs.append(layer(x))
        assert torch.equal(layer(x), outputs[-1])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_sigma_starts_at_a_half_over_the_root_of_the_inputs():
    layer = NoisyLinear(16, 3)
    assert layer.weight_sigma.flatten().tolist() == [0.125] * 48
    assert layer.bias_sigma.tolist() == [0.125] * 3
    assert layer.weight.abs().max() <= 0.25 and layer.bias.abs().max() <= 0.25
    assert NoisyLinear(16, 3, sigma=0.1).bias_sigma.tolist() == pytest.approx([0.025] * 3)


def test_noise_of_the_weights_is_centred_with_the_variance_of_its_factors():
    # E[f(ε)²] = E|ε| = √(2/π), so a weight's noise has the variance σ² · 2/π
    layer = NoisyLinear(2000, 2000)
    layer.resample(seeded())
    noise = torch.outer(layer.noise_out, layer.noise_in)
    assert noise.mean().item() == pytest.approx(0, abs=0.02)
    assert noise.var().item() == pytest.approx(2 / math.pi, rel=0.05)
