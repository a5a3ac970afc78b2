"""Kinds of hidden layers, by hand and against torch's own layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_rl.errors import SettingError
from lightning_rl.networks.layers import BatchRenorm, EnsembleLayerNorm, batch_statistics, hidden_layers
from lightning_rl.networks.mlp import EnsembleLinear


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["plain", "layer_norm", "simba", "batch_renorm"])
@pytest.mark.parametrize("ensemble", [None, 3])
def test_layers_end_with_the_last_width_for_each_member(kind, ensemble):
    layers = hidden_layers(kind, 4, (6, 6), "relu", ensemble=ensemble)
    assert layers(rows(8, 4)).shape == ((8, 6) if ensemble is None else (3, 8, 6))


@pytest.mark.parametrize("kind", ["plain", "layer_norm", "batch_renorm"])
def test_the_order_of_parts_is_that_of_the_papers(kind):
    parts = [each for each in hidden_layers(kind, 4, (6,), "relu", dropout=0.1).modules() if not list(each.children())]
    assert [type(each).__name__ for each in parts] == {
        "plain": ["Linear", "Dropout", "ReLU"],
        "layer_norm": ["Linear", "Dropout", "LayerNorm", "ReLU"],
        "batch_renorm": ["BatchRenorm", "Linear", "Dropout", "ReLU", "BatchRenorm"],
    }[kind]


def test_a_simba_block_adds_to_its_input_what_two_layers_make_of_its_normalized_rows():
    layers = hidden_layers("simba", 4, (6,), "relu")
    first, block, norm = layers
    x = first(rows(8, 4))
    hidden = nn.functional.linear(nn.functional.layer_norm(x, (6,)), block[1].weight, block[1].bias).relu()
    assert hidden.shape == (8, 24)
    expected = nn.functional.layer_norm(x + nn.functional.linear(hidden, block[3].weight, block[3].bias), (6,))
    torch.testing.assert_close(norm(block(x)), expected)


def test_each_member_of_an_ensemble_is_normalized_as_by_torch():
    norm = EnsembleLayerNorm(2, 5)
    nn.init.normal_(norm.scale)
    nn.init.normal_(norm.shift)
    x = rows(2, 8, 5)
    for e in range(2):
        torch.testing.assert_close(norm(x)[e], nn.functional.layer_norm(x[e], (5,), norm.scale[e, 0], norm.shift[e, 0]))


def test_at_first_renormalization_is_batch_normalization():
    norm, x = BatchRenorm(1), torch.tensor([[1.0], [3.0]])  # mean 2, variance 2 of a sample
    with batch_statistics(norm):
        found = norm(x)
    assert found.flatten().tolist() == pytest.approx([-1 / 2.001**0.5, 1 / 2.001**0.5])
    assert (norm.mean.item(), norm.var.item()) == pytest.approx((0.02, 1.01))
    assert norm(x).flatten().tolist() == pytest.approx([(each - 0.02) / 1.011**0.5 for each in (1, 3)])


def test_after_the_warm_up_a_batch_is_renormalized_towards_the_running_statistics_within_bounds():
    norm, x = BatchRenorm(2), torch.tensor([[1.0, 100.0], [3.0, 300.0]])
    norm.batches.fill_(norm.warmup + 1)
    with batch_statistics(norm):
        found = norm(x)
    # the first feature exactly as by the running mean 0 and variance 1; the second with r = 3 and d = 5
    assert found[:, 0].tolist() == pytest.approx([1 / 1.001**0.5, 3 / 1.001**0.5])
    assert found[:, 1].tolist() == pytest.approx([5 - 3 / 2**0.5, 5 + 3 / 2**0.5])


def test_statistics_move_only_inside_the_context_whatever_the_mode():
    norm = BatchRenorm(2).train()
    norm(rows(8, 2))
    assert norm.batches == 0 and (norm.mean == 0).all()
    with batch_statistics(nn.Sequential(norm)):
        norm(rows(8, 2))
    norm(rows(8, 2))
    assert norm.batches == 1


def test_a_constant_feature_has_a_finite_gradient():
    norm, x = BatchRenorm(1), torch.ones(4, 1, requires_grad=True)
    with batch_statistics(norm):
        norm(x).square().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_members_of_an_ensemble_have_their_own_statistics():
    norm = BatchRenorm(1, ensemble=2)
    with batch_statistics(norm):
        found = norm(torch.stack([rows(8, 1), 5 + 2 * rows(8, 1)]))
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-3)
    assert norm.mean[1].item() == pytest.approx(0.05 + 2 * norm.mean[0].item())


def test_dropout_acts_on_members_while_they_learn_alone():
    layers = hidden_layers("layer_norm", 4, (64,), "relu", ensemble=2, dropout=0.5)
    assert not torch.equal(layers(rows(8, 4)), layers(rows(8, 4)))
    layers.eval()
    assert torch.equal(layers(rows(8, 4)), layers(rows(8, 4)))
    assert any(isinstance(each, EnsembleLinear) for each in layers.modules())


@pytest.mark.parametrize(
    ("kind", "widths", "goal", "message"),
    [
        ("simba", (6, 8), slice(0), "simba layers need one width for all blocks, such as [256, 256], got [6, 8]"),
        ("simba", (), slice(0), "net_arch is empty, but simba layers need a width for each block, such as [256, 256]"),
        (
            "layer_norm",
            (6,),
            slice(2, 4),
            "goals generate the weights of plain layers without dropout, got layer_norm layers and dropout 0",
        ),
    ],
)
def test_layers_that_cannot_be_built_are_reported_in_one_line(kind, widths, goal, message):
    with pytest.raises(SettingError) as raised:
        hidden_layers(kind, 4, widths, "relu", goal=goal)
    assert str(raised.value).startswith(message)
