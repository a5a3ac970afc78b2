"""ARS: what its name stands for."""

from __future__ import annotations

import pytest
import torch

from lightning_rl import ARS, EvolutionStrategies, SettingError
from lightning_rl.optimization import ScheduledSGD
from tests.fitting import fit, tiny, weights

SAME = {
    **{"net_arch": [], "normalize_obs": "running", "normalize_obs_share": 1.0, "sigma": 0.05, "shaping": "z_scores", "l2": 0.0},
    **{"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.02, "episodes_per_generation": 16, "zero_policy": True},
}


def test_ars_is_evolution_strategies_with_other_defaults():
    env = {"id": "CartPole-v1", "num_envs": 4}
    models = []
    for algorithm, settings in ((ARS, {}), (EvolutionStrategies, SAME)):
        torch.manual_seed(0)
        models.append(algorithm(env, max_env_steps=500, **settings))
        fit(models[-1])
    assert torch.equal(weights(models[0]), weights(models[1]))
    assert [type(layer).__name__ for layer in models[0].network.actor] == ["Linear"]
    assert models[0].network.actor[0].weight.abs().max() > 0, "it learned"


def test_a_momentum_of_one_which_moves_nothing_is_refused():
    with pytest.raises(SettingError, match=r"momentum must be >= 0 and <= 0\.999, got 1"):
        tiny(ARS, momentum=1.0)


def test_a_linear_policy_begins_with_zeros_and_plain_gradient_descent():
    model = tiny(ARS, net_arch=[])
    assert (model.network.actor[-1].weight == 0).all()
    assert type(model.configure_optimizers()[0]) is ScheduledSGD


def test_the_length_of_the_first_step_from_zeros_is_that_of_the_weights_after_it():
    ratios = []
    model = ARS({"id": "CartPole-v1", "num_envs": 4}, max_env_steps=500)
    model.record = lambda **values: ratios.append(values.get("update_ratio"))
    fit(model)
    assert next(each for each in ratios if each is not None).item() == pytest.approx(1)


def test_more_directions_than_there_are_is_told_in_a_line():
    with pytest.raises(SettingError, match=r"top_directions must be >= 1 and <= 8, got 9"):
        ARS("CartPole-v1", top_directions=9)
