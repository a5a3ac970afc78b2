"""Return heads: mean, histogram and quantiles, worked by hand."""

from __future__ import annotations

import pytest
import torch

from lightning_rl.errors import SettingError
from lightning_rl.losses.q_learning import project
from lightning_rl.networks.q_network import CategoricalReturn, QuantileReturn, ScalarReturn, make_return_head
from lightning_rl.value_transforms import SymLog

HEADS = {"scalar": ScalarReturn(), "histogram": CategoricalReturn(5, -2.0, 2.0), "quantiles": QuantileReturn(4)}


def numbers(name, *shape, seed=0):
    return torch.randn(*shape, HEADS[name].atoms, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", HEADS)
def test_the_mean_is_that_of_the_distribution_for_any_leading_dimensions(name):
    head, z = HEADS[name], numbers(name, 3, 4, 2)
    values, probs = head.distribution(z)
    assert values.shape == probs.shape == z.shape
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, 4, 2))
    torch.testing.assert_close(head.mean(z), (values * probs).sum(-1))


@pytest.mark.parametrize("name", HEADS)
def test_losses_and_errors_are_row_by_row_and_errors_have_no_gradient(name):
    head, z = HEADS[name], numbers(name, 3, 2).requires_grad_()
    values, probs = head.distribution(numbers(name, 3, 2, seed=1))
    loss, error = head.loss(z, 0.5 + 0.9 * values, probs)
    assert loss.shape == error.shape == (3, 2)
    assert (error >= 0).all() and not error.requires_grad
    loss = loss.detach()
    for row in range(3):
        for stream in range(2):
            one = head.loss(z[row, stream], 0.5 + 0.9 * values[row, stream], probs[row, stream])
            torch.testing.assert_close((loss[row, stream], error[row, stream]), tuple(each.detach() for each in one))


@pytest.mark.parametrize("name", HEADS)
def test_gradient_steps_move_the_mean_to_that_of_a_target_inside_the_range(name):
    head, z = HEADS[name], numbers(name, 1)
    values, probs = head.distribution(numbers(name, 1, seed=1))
    target = (0.3 + 0.5 * values).clamp(-2, 2)
    for _ in range(500):
        z = z.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(head.loss(z, target, probs)[0].sum(), z)
        z = z - 0.5 * gradient
    assert head.mean(z).item() == pytest.approx((target * probs).sum().item(), abs=0.1)


def test_scalar_by_hand():
    loss, error = HEADS["scalar"].loss(torch.tensor([[1.0], [0.5]]), torch.tensor([[4.0], [0.0]]), torch.ones(2, 1))
    assert loss.tolist() == [2.5, 0.125]
    assert error.tolist() == [3, 0.5]


def test_histogram_by_hand():
    head = HEADS["histogram"]
    assert head.support.tolist() == [-2, -1, 0, 1, 2]
    z = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2]).log()
    assert head.mean(z).item() == pytest.approx(-0.2 - 0.2 + 0.2 + 0.4)
    # half of the target at 1.5, half beyond the end
    loss, error = head.loss(z, torch.tensor([1.5, 9.0]), torch.tensor([0.5, 0.5]))
    # -(0.25 log 0.2 + 0.75 log 0.2)
    assert loss.item() == error.item() == pytest.approx(1.6094379)


def test_quantiles_by_hand():
    head = QuantileReturn(2)
    assert head.fraction.tolist() == [0.25, 0.75]
    z = torch.tensor([0.0, 2.0])
    assert head.mean(z).item() == 1
    # errors of 0 at ¼: 1 → ¼ · 0.5; of 2 at ¾: -1 → ¼ · 0.5
    loss, error = head.loss(z, torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.5]))
    assert loss.item() == error.item() == 0.25


def test_heads_are_built_from_settings():
    assert isinstance(make_return_head("none", 51, -10, 10, 50), ScalarReturn)
    histogram, quantiles = (make_return_head(name, 11, -1, 3, 7) for name in ("c51", "quantiles"))
    assert isinstance(histogram, CategoricalReturn) and histogram.atoms == 11
    assert (histogram.support[0], histogram.support[-1]) == (-1, 3)
    assert isinstance(quantiles, QuantileReturn) and quantiles.atoms == 7
    assert not histogram.state_dict() and not quantiles.state_dict()  # settings say it all


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("c52", 51, -1, 1, 50), r"^distribution must be one of none, c51, quantiles, got 'c52'; did you mean c51\?$"),
        (("c51", 1, -1, 1, 50), r"^n_atoms must be >= 2, got 1$"),
        (("c51", 51, 1, 1, 50), r"^v_min 1 must be below v_max 1$"),
        (("quantiles", 51, -1, 1, 0), r"^n_quantiles must be >= 1, got 0$"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(settings, message):
    with pytest.raises(SettingError, match=message):
        make_return_head(*settings)


@pytest.mark.parametrize("head", ["none", "c51", "quantiles"])
def test_returns_of_several_streams_add_up_after_the_value_transform_is_inverted(head):
    # true returns (100, 0) and (40, 40): 100 > 80, though symlog 101 + 0 = 4.6 < 2 · symlog 41 = 7.4
    symlog = SymLog()
    atoms = {"none": 1, "c51": 301, "quantiles": 3}[head]
    returns = make_return_head(head, atoms, -5.0, 5.0, atoms, symlog)
    values = symlog(torch.tensor([[100.0, 0.0], [40.0, 40.0]]))  # [n, S]
    if head == "c51":
        z = project(values.unsqueeze(-1), torch.ones(2, 2, 1), returns.support).clamp(min=1e-30).log()
    else:
        z = values.unsqueeze(-1).expand(2, 2, atoms)
    torch.testing.assert_close(returns.mean(z), torch.tensor([[100.0, 0.0], [40.0, 40.0]]), rtol=1e-3, atol=1e-3)
    assert returns.mean(z).sum(-1).argmax() == 0


def test_the_mean_of_atoms_is_of_their_returns_not_of_their_transforms():
    symlog = SymLog()
    z = symlog(torch.tensor([0.0, 10.0]))
    assert QuantileReturn(2, symlog).mean(z).item() == pytest.approx(5.0)
    assert CategoricalReturn(2, 0.0, symlog(10.0), symlog).mean(torch.zeros(2)).item() == pytest.approx(5.0)
