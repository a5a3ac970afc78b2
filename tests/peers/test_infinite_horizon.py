"""A time limit is no end: where every step pays 1 for ever, the value is 1 / (1 − γ) however short episodes are cut.

The task, the settings and the 500 steps are those of Stable-Baselines3's test of the same name.
"""

from __future__ import annotations

import pytest
import torch

from lightning_rl import A2C, SAC
from tests.fitting import fit

SETTINGS = {
    A2C: {"net_arch": [32]},
    SAC: {"net_arch": [16], "n_critics": 1, "tau": 0.5, "learning_starts": 0},
}


def value_of_the_first_place(algorithm, ending):
    torch.manual_seed(0)
    env = {"id": "tests.peers.tasks:Circle-v0", "num_envs": 1, "kwargs": {"ending": ending}}
    model = algorithm(env, gamma=0.98, learning_rate=0.01, max_env_steps=500, **SETTINGS[algorithm])
    fit(model)
    place = torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        if algorithm is A2C:
            return model.network.value(place).item()
        action, _ = model.network.sample(place, deterministic=True)
        return model.critic(place, model.actions.continuous(action)).item()


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [A2C, pytest.param(SAC, marks=pytest.mark.slow)])
def test_a_time_limit_hides_nothing_of_the_rewards_beyond_it(algorithm):
    assert value_of_the_first_place(algorithm, "truncation") == pytest.approx(50, abs=1)  # 1 / (1 − 0.98)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [A2C, SAC])
def test_behind_a_termination_there_is_no_reward(algorithm):
    # the place is met with eight steps left and with four: (1 − 0.98⁸) / (1 − 0.98) = 7.5 and (1 − 0.98⁴) / (1 − 0.98) = 3.9
    assert 3.9 < value_of_the_first_place(algorithm, "termination") < 10  # the soft value counts the entropy too
