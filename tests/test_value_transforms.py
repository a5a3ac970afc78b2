"""Transforms of returns and their inverses, and numbers as histograms, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_rl.errors import SettingError
from lightning_rl.value_transforms import (
    TRANSFORMS,
    Identity,
    Linear,
    SignedHyperbolic,
    SymLog,
    make_value_transform,
    scalar_to_support,
    support_to_scalar,
)

ALL = [Identity(), Linear(3.0, -2.0), SymLog(), SignedHyperbolic(1e-2), SignedHyperbolic(1e-3), SignedHyperbolic(0.0)]
NAMES = ["identity", "linear", "symlog", "1e-2", "1e-3", "eps 0"]
RETURNS = np.concatenate([sign * np.logspace(-6, 4, 101) for sign in (-1, 1)] + [np.zeros(1)])


@pytest.mark.parametrize(
    ("eps", "x", "h"),
    [
        (1e-2, 3, 1.03),
        (1e-2, 8, 2.08),
        (1e-2, 100, 10.04987562),
        (1e-2, -3, -1.03),
        (1e-2, 1e4, 199.004999875),
        (1e-3, 3, 1.003),
        (1e-3, 1e4, 109.00499988),
        (0, 8, 2),
        (0, -3, -1),
        (1e-2, 0, 0),
    ],
)
def test_signed_hyperbolic_golden_numbers(eps, x, h):
    assert SignedHyperbolic(eps)(x) == pytest.approx(h, abs=1e-8)
    assert SignedHyperbolic(eps).inverse(h) == pytest.approx(x, rel=1e-8)


def test_epsilon_stands_outside_the_sign():
    """With sign(z) (√(|z| + 1) − 1 + ε z), as some write it, −3 becomes −0.97 and comes back as −2.77."""
    h = SignedHyperbolic(1e-2)
    assert h(-3) == pytest.approx(-1.03)
    assert h.inverse(-0.97) == pytest.approx(-2.77243, abs=1e-5)


def test_the_slope_at_0_is_a_half_plus_epsilon():
    x = torch.tensor([-1e-9, 1e-9], dtype=torch.float64, requires_grad=True)
    SignedHyperbolic(1e-2)(x).sum().backward()
    assert x.grad.tolist() == pytest.approx([0.51, 0.51])


@pytest.mark.parametrize(("x", "h"), [(0, 0), (math.e - 1, 1), (1 - math.e**2, -2)])
def test_symlog_by_hand(x, h):
    assert SymLog()(x) == pytest.approx(h)
    assert SymLog().inverse(h) == pytest.approx(x)


def test_linear_by_hand():
    assert Linear(2.0, 1.0)(3.0) == 7
    assert Linear(2.0, 1.0).inverse(7.0) == 3


@pytest.mark.parametrize("h", ALL, ids=NAMES)
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-9), (np.float32, 1e-3)])
def test_the_inverse_restores_small_and_large_returns(h, dtype, rtol):
    x = RETURNS.astype(dtype)
    for form in (x, torch.from_numpy(x)):
        near_0 = 1e-6 if isinstance(h, Linear) and dtype is np.float32 else 0  # -2 swallows what is that small
        np.testing.assert_allclose(np.asarray(h.inverse(h(form))), x, rtol=rtol, atol=near_0)


@pytest.mark.parametrize("h", [ALL[0], *ALL[2:]], ids=["identity", *NAMES[2:]])
def test_transforms_are_odd_and_strictly_increasing(h):
    x = np.sort(RETURNS)
    assert (np.diff(h(x)) > 0).all()
    x = x[abs(x) < 100]  # further out, exp is too large
    assert (np.diff(h.inverse(x)) > 0).all()
    np.testing.assert_array_equal(h(-x), -h(x))
    np.testing.assert_array_equal(h.inverse(-x), -h.inverse(x))


@pytest.mark.parametrize("h", ALL, ids=NAMES)
def test_arrays_stay_arrays_and_tensors_tensors_of_their_precision(h):
    for transform in (h, h.inverse):
        for dtype in (np.float32, np.float64):
            array = np.array([[-2.5, 4.0]], dtype)
            tensor = torch.from_numpy(array)
            assert isinstance(transform(array), np.ndarray) and transform(array).dtype == dtype
            assert transform(tensor).dtype == tensor.dtype
            np.testing.assert_allclose(transform(array), transform(tensor).numpy(), rtol=1e-6)
            assert float(transform(4.0)) == pytest.approx(transform(array)[0, 1], rel=1e-6)


def test_the_inverse_follows_after_the_expectation():
    h = SignedHyperbolic(1e-2)
    assert h.inverse((h(0.0) + h(100.0)) / 2) == pytest.approx(31.5928, abs=1e-4)
    assert (h.inverse(h(0.0)) + h.inverse(h(100.0))) / 2 == pytest.approx(50)


def test_transforms_are_made_by_name():
    assert {name: type(make_value_transform(name)) for name in TRANSFORMS} == TRANSFORMS
    with pytest.raises(SettingError, match=r"^value_transform must be one of identity, .*, got 'symlg'; did you mean symlog"):
        make_value_transform("symlg")


def test_transforms_without_an_inverse_are_refused():
    with pytest.raises(SettingError, match="scale 0 has no inverse"):
        Linear(0.0)
    with pytest.raises(SettingError, match=r"at least 0, got -0\.1"):
        SignedHyperbolic(-0.1)


def histogram(places, size):
    """Probabilities by their places."""
    return [places.get(i, 0) for i in range(size)]


@pytest.mark.parametrize(
    ("x", "low", "places"),
    [
        (3.7, 0, {3: 0.3, 4: 0.7}),
        (3.7, -10, {13: 0.3, 14: 0.7}),
        (-3.7, -10, {6: 0.7, 7: 0.3}),
        (-10.0, -10, {0: 1}),
        (10.0, -10, {20: 1}),
        (4.0, 0, {4: 1}),
    ],
)
def test_a_number_is_split_between_its_two_neighbors(x, low, places):
    probs = scalar_to_support(torch.tensor(x), low, 10)
    assert probs.tolist() == pytest.approx(histogram(places, 11 - low), abs=1e-6)


@pytest.mark.parametrize(("x", "place"), [(11.0, 20), (-10.5, 0), (math.inf, 20)])
def test_a_number_outside_is_clipped_to_the_range(x, place):
    assert scalar_to_support(torch.tensor(x), -10, 10).tolist() == histogram({place: 1}, 21)


def test_integers_become_one_hot():
    assert torch.equal(scalar_to_support(torch.tensor([0, 3, 2]), 0, 3), torch.eye(4)[[0, 3, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (10,), (2, 5)])
def test_histograms_have_the_mean_they_were_made_of(shape, dtype):
    x = torch.empty(shape, dtype=dtype).uniform_(-10, 10, generator=torch.Generator().manual_seed(0))
    probs = scalar_to_support(x, -10, 10)
    assert probs.shape == (*shape, 21) and probs.dtype == dtype
    assert (probs >= 0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(shape, dtype=dtype))
    torch.testing.assert_close(support_to_scalar((probs + 1e-30).log(), -10, 10), x)


def test_the_mean_of_a_softmax_golden_number():
    logits = torch.zeros(11)
    logits[3], logits[4] = 0.3, 0.7
    assert support_to_scalar(logits, 0, 10).item() == pytest.approx(4.86141021, abs=1e-6)


def test_cross_entropy_against_a_histogram_is_least_at_its_number():
    probs = scalar_to_support(torch.tensor([2.25]), 0, 4)
    logits = torch.zeros(1, 5, requires_grad=True)
    for _ in range(300):
        (gradient,) = torch.autograd.grad(-(probs * logits.log_softmax(-1)).sum(), logits)
        logits = (logits - 4.0 * gradient).detach().requires_grad_()
    assert support_to_scalar(logits, 0, 4).item() == pytest.approx(2.25, abs=0.02)


def test_nan_on_a_support_is_nan():
    assert scalar_to_support(torch.tensor([float("nan")]), -2, 2).isnan().any()
