"""TRPO: the divergence, the natural gradient and the trust region, with numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import pytorch_lightning as pl
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch.distributions import Bernoulli, Categorical, kl_divergence

import lightning_rl as lrl
from lightning_rl import TRPO
from lightning_rl.algorithms import trpo
from lightning_rl.algorithms.trpo import conjugate_gradient
from lightning_rl.distributions import make_distribution
from tests.fitting import Rows, fit, tiny, weights


def divergence(space, old, new, mask=()):
    distribution = make_distribution(space, "clipped_normal")
    before, after = (distribution.densities(torch.tensor([x]), mask) for x in (old, new))
    return sum(trpo.divergence(p, q).sum(-1) for p, q in zip(before, after, strict=True)).item()


def test_divergences_by_hand():
    half, three = 0.5 * math.log(0.5 / 0.75), 0.5 * math.log(0.5 / 0.25)  # from (½, ½) to (¾, ¼)
    logits = [math.log(3), 0.0]
    assert divergence(Discrete(2), [0.0, 0.0], logits) == pytest.approx(half + three)
    assert divergence(MultiDiscrete([2, 2]), [0.0] * 4, logits * 2) == pytest.approx(2 * (half + three))
    assert divergence(MultiBinary(1), [0.0], [math.log(3)]) == pytest.approx(half + three)
    assert divergence(Box(-1, 1, (2,)), [0.0, 1.0], [1.0, 1.0]) == pytest.approx(0.5)  # (μ − μ')² / 2 where σ = 1
    assert divergence(Dict(a=Box(-1, 1, (1,)), b=Discrete(2)), [0.0, 0.0, 0.0], [1.0, *logits]) == pytest.approx(0.5 + half + three)


def test_what_is_ruled_out_does_not_diverge():
    mask = torch.tensor([[True, True, False]])
    assert divergence(Discrete(3), [0.0, 0.0, 0.0], [math.log(3), 0.0, 5.0], mask) == pytest.approx(0.5 * math.log(4 / 3))
    off = torch.tensor([[True, False]])
    assert divergence(MultiBinary(1), [0.0], [2.0], off) == 0


def test_the_conjugate_gradient_solves_a_system_in_as_many_steps_as_it_has_rows():
    matrix, b = torch.tensor([[4.0, 1.0], [1.0, 3.0]]), torch.tensor([1.0, 2.0])
    assert conjugate_gradient(lambda vector: matrix @ vector, b, 2).tolist() == pytest.approx([1 / 11, 7 / 11])
    assert conjugate_gradient(lambda vector: matrix @ vector, torch.zeros(2), 2).tolist() == [0, 0]


@pytest.mark.thorough
def test_steps_stay_in_the_trust_region_and_improve():
    rows = Rows()
    fit(TRPO("CartPole-v1", n_steps=64, max_env_steps=2048, log_interval=1), logger=rows)
    steps = [row for _, row in rows.rows if "train/kl_divergence" in row]
    assert len(steps) == 4
    for row in steps:
        assert row["train/line_search_success"] == 1
        assert 0.003 < row["train/kl_divergence"] < 0.01, "a step is nearly as long as the trust region allows"
        assert row["train/policy_objective"] > 0, "advantages are normalized: the objective was 0 before the step"


def test_without_a_length_that_does_no_step_is_made(monkeypatch):
    model = tiny(TRPO, max_env_steps=16)
    policy = torch.nn.utils.parameters_to_vector(model.policy_parameters).detach().clone()
    surrogate = model.surrogate
    monkeypatch.setattr(model, "surrogate", lambda *arguments: (surrogate(*arguments)[0], surrogate(*arguments)[1] + 1))
    rows = Rows()
    fit(model, logger=rows)
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.policy_parameters), policy)
    assert not torch.equal(weights(model), weights(tiny(TRPO))), "the value function learns"
    assert [row["train/line_search_success"] for _, row in rows.rows if "train/line_search_success" in row] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_trpo_learns_cartpole(tmp_path, compile):
    pl.seed_everything(1, verbose=False)
    trainer = lrl.Trainer(enable_progress_bar=False, default_root_dir=tmp_path)
    trainer.fit(TRPO("CartPole-v1", max_env_steps=60_000, compile=compile))
    assert trainer.callback_metrics["eval/mean_reward"] >= 450


def test_the_divergence_is_finite_where_a_probability_rounds_to_0():
    even, sure = torch.tensor([[0.0, 0.0]]), torch.tensor([[200.0, 0.0]])
    old, new = Categorical(logits=even), Categorical(logits=sure)
    assert kl_divergence(old, new).isinf().all()  # e^-200 is 0 in float32
    expected = pytest.approx(100 - math.log(2))  # ½ (log ½ − 0) + ½ (log ½ + 200)
    assert trpo.divergence(old, new).item() == expected
    assert trpo.divergence(Bernoulli(logits=even[:, 0]), Bernoulli(logits=sure[:, 0])).item() == expected
    legal = torch.tensor([[0.3, -1.0, torch.finfo(torch.float32).min]])
    assert trpo.divergence(Categorical(logits=legal), Categorical(logits=2 * legal.clamp(min=-1e30))).isfinite().all()
    assert trpo.divergence(Categorical(logits=legal), Categorical(logits=legal)).item() == 0
