"""A step of ARS equals that of sb3-contrib, from the same directions and returns."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import sb3_contrib
import torch

from lightning_rl import ARS
from lightning_rl.actors.generations import Results

PAIRS, TOP, SIZE = 6, 4, 3


@pytest.mark.parametrize("offset", [0.0, -1.0])
def test_a_step_equals_that_of_sb3_contrib_except_for_the_deviation_of_a_sample(offset, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    deltas, returns = torch.randn(PAIRS, SIZE, generator=generator), torch.randn(PAIRS, 2, generator=generator)
    lengths = torch.randint(1, 9, (PAIRS, 2), generator=generator)
    settings = {"learning_rate": 0.1, "alive_bonus_offset": offset}

    other = sb3_contrib.ARS("LinearPolicy", "Pendulum-v1", n_delta=PAIRS, n_top=TOP, **settings)
    before = other.weights = torch.randn(SIZE, generator=generator)
    given = returns + offset * lengths
    monkeypatch.setattr(other, "evaluate_candidates", lambda *_: torch.cat([given[:, 0], given[:, 1]]))
    monkeypatch.setattr(torch, "normal", lambda **_: deltas)
    other._logger = SimpleNamespace(record=lambda *_, **__: None)
    other._do_one_update(None, None)
    monkeypatch.undo()

    model = ARS("Pendulum-v1", episodes_per_generation=2 * PAIRS, top_directions=TOP, **settings)
    noise = SimpleNamespace(noise=lambda job, size: np.asarray(deltas[job]), sigma=0.05)
    weights = before.clone().requires_grad_()
    model.loss(Results(noise, returns.double(), returns.double().sign(), lengths.double()), weights).backward()
    factor = math.sqrt((2 * TOP - 1) / (2 * TOP))
    torch.testing.assert_close(before - 0.1 * factor * weights.grad, other.weights, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(other.weights, before)
