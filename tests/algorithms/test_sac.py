"""SAC: densities, temperatures, and the scale of actions."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_rl import DQN, SAC, load_policy
from lightning_rl.losses import soft_actor_critic as losses
from lightning_rl.networks.q_network import CategoricalReturn
from tests.algorithms.test_off_policy import at_updates, vector
from tests.fitting import fit, tiny


def test_the_density_of_an_action_is_that_in_unit_space():
    model = tiny(SAC, "tests.environments:Anything-v0", env={"kwargs": {"action": "box"}})  # [-2, 1] x [0, 10]
    x = torch.tensor([0.3, -0.5, -0.7, 0.1])  # two means, two log σ
    unit = torch.linspace(-1, 1, 20_001)[1:-1]
    log_prob = model.network.distribution.evaluate(x, torch.stack([unit, unit], -1))[0]
    for dim in range(2):
        assert torch.trapezoid(log_prob[:, dim].exp(), unit) == pytest.approx(1, abs=1e-3)
    assert model.temperature.target.item() == -2  # on the same scale
    with torch.no_grad():
        entropy = model.actions.evaluate(
            x.expand(100_000, 4), model.actions.noise(100_000, torch.Generator().manual_seed(0))
        ).entropy.mean()
    by_integral = -sum(torch.trapezoid(log_prob[:, d].exp() * log_prob[:, d], unit) for d in range(2))
    assert entropy == pytest.approx(by_integral.item(), abs=0.02)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize("ent_coef", [0.2, "auto"])
def test_rescaling_the_action_space_changes_nothing_that_sac_learns(ent_coef):
    found = []
    rescale = {"class_path": "gymnasium.wrappers.RescaleAction", "init_args": {"min_action": -1.0, "max_action": 1.0}}
    for wrappers in ([], [rescale]):  # Box ±2 and ±1
        env = {"num_envs": 1, "wrappers": wrappers}
        settings = {"learning_starts": 86, "train_freq": 1, "ent_coef": ent_coef, "learning_rate": 1e-3, "compile": False}
        model = tiny(SAC, "Pendulum-v1", env=env, **settings)
        fit(model)
        assert model.updates == 10
        found.append((vector(model.critic), vector(model.network), model.temperature().item()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-4, atol=1e-6)


# library bugs (losses/soft_actor_critic.py, networks/q_network.py): `@` is a product that autocast rounds
@pytest.mark.parametrize("name", ["soft value", "actor loss", "temperature loss", "mean of C51"])
def test_losses_and_means_are_not_rounded_where_networks_compute_in_bfloat16(name):
    random = torch.Generator().manual_seed(0)
    q, entropy, alpha, z = (torch.rand(shape, generator=random) for shape in ((64, 1), (64, 2), (2,), (64, 51)))
    compute = {
        "soft value": lambda: losses.soft_value(q, entropy, alpha),
        "actor loss": lambda: losses.actor_loss(q, entropy, alpha),
        "temperature loss": lambda: losses.temperature_loss(alpha.log(), entropy, torch.tensor([-1.0, 0.5])),
        "mean of C51": lambda: CategoricalReturn().mean(z),
    }[name]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = compute()
    torch.testing.assert_close(rounded, compute())


@pytest.mark.thorough
def test_actions_that_a_mask_rules_out_are_not_taken(tmp_path):
    for algorithm in (SAC, DQN):
        model = tiny(algorithm)
        fit(model).save_checkpoint(tmp_path / "a.ckpt")
        masks, policy = np.eye(3, dtype=bool)[[0, 1, 2]], load_policy(tmp_path / "a.ckpt")
        for deterministic in (True, False):
            assert policy.act(np.zeros((3, 2)), action_mask=masks, deterministic=deterministic)[0].tolist() == [0, 1, 2]


def test_a_given_temperature_stays():
    model = tiny(SAC, ent_coef=0.2)
    assert at_updates(model, lambda model: model.temperature().item()) == pytest.approx([0.2] * 20)
    assert len(model.configure_optimizers()) == 2 and len(tiny(SAC).configure_optimizers()) == 3


@pytest.mark.parametrize("target_entropy, rises", [(5.0, True), (-5.0, False)])
def test_the_temperature_rises_where_entropy_is_too_low_and_falls_where_it_is_too_high(target_entropy, rises):
    alphas = at_updates(tiny(SAC, target_entropy=target_entropy, learning_rate=0.01), lambda model: model.temperature().item())
    # the gradient of log α keeps its sign, so that Adam moves it by the learning rate each time
    assert alphas[-1] == pytest.approx(math.exp(20 * 0.01 * (1 if rises else -1)), rel=0.02)
    assert all((later > earlier) == rises for earlier, later in pairwise(alphas))


@pytest.mark.thorough
def test_each_kind_of_action_has_a_temperature_of_its_own():
    kwargs, target = {"action": "hybrid"}, {"continuous": 100.0, "discrete": -5.0}
    model = tiny(SAC, "tests.environments:Anything-v0", env={"kwargs": kwargs}, target_entropy=target, ent_coef="auto_0.1")
    trainer = fit(model)
    continuous, discrete = model.temperature().tolist()
    assert continuous > 0.1 > discrete
    logged = trainer.callback_metrics
    assert logged["train/ent_coef_continuous"] > 0.1 > logged["train/ent_coef_discrete"]
